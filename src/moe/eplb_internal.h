/* eplb_internal.h - one layer's placement while it is planned. */
#ifndef HD_MOE_EPLB_INTERNAL_H
#define HD_MOE_EPLB_INTERNAL_H

#include "moe/eplb.h"

typedef struct eplb_layer {
    const hd_eplb_args *args;
    int32_t experts, slots, ranks;
    int32_t alive, usable; /* ranks with slots that are not gone; their slots */
    const int32_t *first;  /* [ranks + 1] first slot of each rank */
    const int32_t *node;   /* [ranks]; all 0 if placement ignores nodes */
    int32_t nodes;         /* that placement respects */
    const int32_t *rank;   /* [slots] */
    const double *loads;   /* [experts] of this layer */
    double scale;          /* step rows per row of loads */
    double mean;           /* cost of a rank if all were equal, without copies */
    double least;          /* no plan's largest cost is below */
    /* The placement. */
    int32_t *expert; /* [slots]; -1: empty */
    int32_t *nth;    /* [slots] which copy of its expert this is */
    int32_t *copies; /* [experts] */
    double *cost;    /* [ranks] */
    uint16_t *held;  /* [ranks][experts] copies of the expert on the rank */
    /* Memory for a planner, where n = slots + ranks. */
    uint64_t *keys; /* [n] of eplb_sort */
    double *value;  /* [3][n] */
    int32_t *words; /* [11][n] */
    int32_t *home;  /* [experts] node */
    int32_t *saved; /* [2][slots] */
} eplb_layer;

/* Cost of one of r copies of an expert with these loads. */
static inline double eplb_copy_cost(const eplb_layer *l, double load, int32_t r) {
    if (l->args->phase == HD_EPLB_ROWS) return load / r;
    const double n = load * l->scale / r;
    if (l->args->phase == HD_EPLB_DECODE) return n + HD_EPLB_READ_ROWS * (n < 1 ? n : 1);
    const double tiles = n / HD_EPLB_TILE;
    const double whole = (double)(int64_t)tiles;
    return (whole + (whole < tiles)) * HD_EPLB_TILE;
}

static inline bool eplb_gone(const eplb_layer *l, int32_t d) {
    return l->args->gone && l->args->gone[d];
}

static inline uint16_t *eplb_held(const eplb_layer *l, int32_t d, int32_t e) {
    return &l->held[(size_t)d * (size_t)l->experts + (size_t)e];
}

static inline double eplb_cost(const eplb_layer *l, int32_t e, int32_t r) {
    return eplb_copy_cost(l, l->loads[e], r);
}

/* Computes copies, cost and held from expert; returns the largest cost. */
double eplb_recount(eplb_layer *l);

/* order[n] becomes the indices by falling value, the lower index first among equals. Uses
 * spare[n]. */
void eplb_sort(const eplb_layer *l, const double *value, int32_t n, int32_t *order,
               int32_t *spare);

/* A heap of indices at[n] by key; with `largest` the largest is on top, otherwise the smallest.
 * Among equals the lowest index. */
typedef struct eplb_heap {
    int32_t *at;
    int32_t n;
    const double *key;
    bool largest;
} eplb_heap;

void eplb_heapify(eplb_heap *h);
/* Restores the heap after at[0] or its key changed. */
void eplb_sink(eplb_heap *h);

/* Writes the copies of the experts with home[e] == node, or of all if node < 0, for so many slots:
 * the largest cost of a copy becomes as small as possible with at most `most` copies of each.
 * Returns that cost. Copies that lower no cost are not made if copies cost. */
double eplb_choose_copies(eplb_layer *l, int32_t node, int32_t slots, int32_t most);

/* The published algorithm into expert and nth. The numbers divide. */
void eplb_published(eplb_layer *l);

/* Copies and placement from nothing, for an even split, no expert twice on a rank if possible. */
void eplb_place(eplb_layer *l);

/* Lowers the largest cost by exchanges and replaced copies, until it is at most `goal`, none
 * helps, or `moves` (< 0: no limit) experts came to ranks that did not hold them. Returns the
 * moves. */
int64_t eplb_descend(eplb_layer *l, double goal, int64_t moves);

/* Looks for a plan of a small layer that costs less, or as much without an expert twice on a rank.
 * cost: the largest of the plan that the layer has. Returns whether the layer has a better one. */
bool eplb_search(eplb_layer *l, double cost);

/* Takes over a previous map; experts without a slot get one. Returns these experts' number. */
int32_t eplb_restore(eplb_layer *l, const int32_t *previous);

/* Fills empty slots with further copies, at most `moves` (< 0: no limit), where the largest cost
 * does not rise. */
void eplb_fill(eplb_layer *l, int64_t moves);

/* A placement whose shared experts connect all ranks. */
void eplb_chain(eplb_layer *l);

#endif
