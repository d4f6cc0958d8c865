/* eplb_internal.h - one layer's placement while it is planned. */
#ifndef HD_MOE_EPLB_INTERNAL_H
#define HD_MOE_EPLB_INTERNAL_H

#include <string.h>

#include "moe/eplb.h"

typedef struct eplb_entry {
    uint64_t key;
    int64_t at;
} eplb_entry;

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
    uint16_t *held;  /* [experts][ranks] copies of the expert on the rank */
    /* Memory for a planner, where n = slots + ranks. */
    uint64_t *keys;   /* [n] of eplb_sort */
    eplb_entry *tree; /* [4][n] of an eplb_tree */
    double *value;    /* [3][n] */
    int32_t *words;   /* [11][n] */
    int32_t *home;    /* [experts] node */
    int32_t *saved;   /* [2][slots] */
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
    return &l->held[(size_t)e * (size_t)l->ranks + (size_t)d];
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

/* The lowest key of at most n, by index: a tree whose root is entry 1, in which each entry is the
 * lower one of the two below it, the left one among equals. Fill the leaves, then build it. */
typedef struct eplb_tree {
    eplb_entry *entry; /* [2][leaves] */
    int32_t leaves;    /* a power of two */
} eplb_tree;

#define EPLB_OUT ((uint64_t)1 << 63) /* behind every key of a load */

/* Keys of values that are not negative. */
static inline uint64_t eplb_key(double v) {
    uint64_t bits;
    v += 0.0; /* no negative zero */
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static inline uint64_t eplb_falling_key(double v) {
    return eplb_key(v) ^ INT64_MAX;
}

/* A tree of n leaves that are out, in the layer's memory. */
eplb_tree eplb_tree_of(const eplb_layer *l, int32_t n);

static inline void eplb_tree_fill(const eplb_tree *t, int32_t i, uint64_t key) {
    t->entry[t->leaves + i].key = key;
}

void eplb_tree_build(const eplb_tree *t);

static inline eplb_entry eplb_tree_top(const eplb_tree *t) {
    return t->entry[1];
}

/* By masks: a branch on which entry is lower could not be predicted. */
static inline void eplb_tree_set(const eplb_tree *t, int64_t i, uint64_t key) {
    eplb_entry *entry = t->entry, mine = {key, i};
    int64_t k = t->leaves + i;
    entry[k].key = key;
    for (; k > 1; k /= 2) {
        const eplb_entry other = entry[k ^ 1];
        const uint64_t stays = 0 - (uint64_t)(mine.key < other.key + !(k & 1));
        mine.key = other.key ^ ((mine.key ^ other.key) & stays);
        mine.at = other.at ^ ((mine.at ^ other.at) & (int64_t)stays);
        entry[k / 2] = mine;
    }
}

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
