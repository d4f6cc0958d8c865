/* rounds_internal.h - which rows of a dispatch travel in which round. */
#ifndef HD_COMM_ROUNDS_INTERNAL_H
#define HD_COMM_ROUNDS_INTERNAL_H

#include "base/checked.h"
#include "comm/comm.h"

/* Of the rows that member `from` sends to member `to`, those of the round: places [first, end). */
typedef struct comm_places {
    int32_t first, end;
} comm_places;

static inline comm_places comm_places_of(const hd_dispatch_args *a, int32_t from, int32_t to) {
    const int32_t *offset = a->offset + (int64_t)to * a->n_slots;
    const int64_t all = offset[a->n_slots];
    if (!a->most) return (comm_places){offset[0], (int32_t)all};
    const int64_t first = hd_min_i64(offset[0] + (int64_t)a->round * a->most[from], all);
    return (comm_places){(int32_t)first, (int32_t)hd_min_i64(first + a->most[from], all)};
}

/* Those of a slot of the group, of the round's; a: of member `from`. */
static inline comm_places comm_places_at(const hd_dispatch_args *a, int32_t from,
                                         int32_t slot) {
    const comm_places p = comm_places_of(a, from, slot / a->n_slots);
    const int32_t first = hd_max_i32(p.first, hd_min_i32(a->offset[slot], p.end));
    return (comm_places){first, hd_max_i32(first, hd_min_i32(a->offset[slot + 1], p.end))};
}

/* Rounds that a member needs for its rows; at least 1. */
static inline int32_t comm_rounds_of(const hd_dispatch_args *a, int32_t from, int32_t members) {
    int32_t rounds = 1;
    for (int32_t to = 0; to < members && a->most && a->most[from]; to++) {
        const int32_t *offset = a->offset + (int64_t)to * a->n_slots;
        const int64_t n = hd_ceil_div(offset[a->n_slots] - offset[0], a->most[from]);
        rounds = hd_max_i32(rounds, (int32_t)n);
    }
    return rounds;
}

#endif
