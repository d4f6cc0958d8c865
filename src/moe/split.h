/* split.h - the exact split of a batch: how many rows of each expert go to each of its slots, so that
 * the largest sum of a rank is as small as possible.
 *
 * A placement of one layer is a graph, ranks joined by the experts that they share. Its tables are one
 * block of words, so that they can lie in a device's memory and change there with the placement.
 * Nothing here allocates. Results depend on the arguments only. */
#ifndef HD_MOE_SPLIT_H
#define HD_MOE_SPLIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __CUDACC__
#define HD_SPLIT_FN static inline __host__ __device__
#else
#define HD_SPLIT_FN static inline
#endif

HD_BEGIN_C

/* How the rows of a rank are split over the copies of an expert. */
typedef enum hd_expert_split {
    HD_SPLIT_TURNS, /* in turn, by the row's number */
    HD_SPLIT_LOCAL, /* exactly, each rank its own rows alone */
    HD_SPLIT_FLOW   /* exactly, the rows of all ranks together */
} hd_expert_split;

extern const char
    *const hd_expert_split_names[]; /* "turns", "local", "flow"; NULL ends the list */

/* Parses one of them; NULL is the default. */
hd_status hd_expert_split_of(hd_expert_split *out, const char *name, hd_err *err);

typedef struct hd_split_shape {
    int32_t experts, slots, ranks;
} hd_split_shape;

typedef struct hd_split_holder {
    int32_t slot, rank;
} hd_split_holder;

/* A slot whose expert has copies on other ranks, too: all are holder[begin] to holder[end]. */
typedef struct hd_split_shared {
    int32_t slot, begin, end;
} hd_split_shared;

/* A rank in its tree. An expert has the slots `mine` here and `theirs` at the parent; no other branch has
 * the same of either. */
typedef struct hd_split_branch {
    int32_t rank, parent; /* parent -1: a root */
    int32_t mine, theirs;
} hd_split_branch;

typedef struct hd_split_graph {
    hd_split_shape shape;
    hd_split_branch *branch; /* [ranks] breadth first, tree by tree; *alive of them */
    hd_split_holder *holder; /* [slots] of each expert, by slot */
    hd_split_shared *shared; /* [slots] of each rank */
    int32_t *depth;          /* [ranks] of a branch: ranks between it and the root, and one */
    int32_t *root;           /* [ranks] of the tree that the rank is in; -1: it has no slots */
    int32_t *size;           /* [ranks] of a tree, at its root: ranks */
    int32_t *holder0;        /* [experts + 1] into holder */
    int32_t *shared0;        /* [ranks + 1] into shared */
    int32_t *alive;          /* [1] ranks with slots */
} hd_split_graph;

HD_SPLIT_FN int32_t hd_split_words(hd_split_shape s) {
    return 5 * s.slots + 8 * s.ranks + s.experts + 3;
}

/* Where the tables lie in a block of hd_split_words() words, aligned to 16 bytes. */
HD_SPLIT_FN hd_split_graph hd_split_graph_in(const int32_t *block, hd_split_shape s) {
    int32_t *at = (int32_t *)(uintptr_t)block;
    hd_split_graph g;
    g.shape = s;
    g.branch = (hd_split_branch *)at;
    g.holder = (hd_split_holder *)(at += 4 * s.ranks);
    g.shared = (hd_split_shared *)(at += 2 * s.slots);
    g.depth = at += 3 * s.slots;
    g.root = at += s.ranks;
    g.size = at += s.ranks;
    g.holder0 = at += s.ranks;
    g.shared0 = at += s.experts + 1;
    g.alive = at + s.ranks + 1;
    return g;
}

/* Makes the graph of a map: slot_expert [slots], -1: empty; rank_slot0 [ranks + 1]. */
void hd_split_graph_make(const hd_split_graph *g, const int32_t *slot_expert,
                         const int32_t *rank_slot0);

/* Splits rows [experts] over slots: out [slots], of which those of an expert add up to its rows.
 * Returns the largest sum of a rank; -1 if an expert with rows has no slot. certificate [ranks] may be
 * NULL; it is set for ranks such that the experts with rows that live only there suffice to prove that
 * no split is better. scratch: hd_split_scratch_bytes(), aligned to 8. */
int64_t hd_split_rows(const hd_split_graph *g, const int32_t *rows, int32_t *out, void *scratch,
                      bool *certificate);
size_t hd_split_scratch_bytes(hd_split_shape s);

/* The slot that row number `row` of an expert goes to, of which `first` [slots] are the first ones. */
HD_SPLIT_FN int32_t hd_split_slot(const hd_split_graph *g, const int32_t *first, int32_t expert,
                                  int32_t row) {
    int32_t at = g->holder0[expert];
    const int32_t last = g->holder0[expert + 1] - 1;
    while (at < last && first[g->holder[at + 1].slot] <= row) at++;
    return g->holder[at].slot;
}

/* Rows of an expert that no copy has been given yet: of all sources, those before this one, this one. */
typedef struct hd_split_left {
    int64_t all, before, own;
} hd_split_left;

/* Gives the next copy `here` rows of all sources. Returns how many are this source's: its share, so that
 * sources and copies all add up. */
HD_SPLIT_FN int32_t hd_split_part(hd_split_left *l, int64_t here) {
    int64_t before = l->before, own = l->own;
    if (here < l->all) { /* not the last copy with rows */
        before = here * l->before / l->all;
        own = here * (l->before + l->own) / l->all - before;
    }
    l->all -= here;
    l->before -= before;
    l->own -= own;
    return (int32_t)own;
}

HD_END_C

#endif
