/* fetch.h - experts of a layer that lie in host memory, which the device reads in place: moe_fetch copies
 * those that rows chose to device memory, or asks the host to compute the rows of some of them; moe_join
 * takes those rows; moe_round names the rows of a round whose experts were fetched before rows chose. */
#ifndef HD_OPS_FETCH_H
#define HD_OPS_FETCH_H

#include "ops/types.h"

HD_BEGIN_C

enum {
    HD_EXPERT_MATRICES = 3,      /* gate, up, down */
    HD_MAX_FETCH_EXPERTS = 1024, /* of a layer, and slots */
    HD_HOST_MAX_SECONDS = 60,    /* that a device waits for the host */
    HD_HOST_PAUSE =
        8 /* of so many uses of a layer one leaves all to the device: slots follow what is used */
};

/* Where the arrays of an expert lie in its slot, and their bytes; scale_bytes 0: no scales. */
typedef struct hd_expert_layout {
    int64_t data_at[HD_EXPERT_MATRICES], scale_at[HD_EXPERT_MATRICES]; /* multiples of 16 */
    int64_t data_bytes[HD_EXPERT_MATRICES], scale_bytes[HD_EXPERT_MATRICES];
} hd_expert_layout;

/* What device memory has of experts that were used. */
typedef struct hd_fetch_counts {
    int64_t used, staged, fetched,
        fetched_bytes;              /* staged: of those used, had a slot already */
    int64_t sent, sent_rows;        /* of those used, the host computed; their rows */
    int64_t predicted_ns, taken_ns; /* of rounds with such: to fetch, compute and join */
} hd_fetch_counts;

/* The slots of a layer, in device memory; before the first use every expert and holder is -1, and
 * all else 0. */
typedef struct hd_expert_slots {
    uint8_t *memory; /* [n_slots, slot_bytes], 16-byte aligned */
    int32_t *slot;   /* [n_experts] of each expert; -1: none */
    int32_t *holder; /* [n_slots] the expert in each; -1: none */
    int64_t *used;   /* [n_slots] the layer's use that was the last with it */
    int64_t *clock;  /* [1] how many uses */
    int64_t slot_bytes;
    int32_t n_slots;
} hd_expert_slots;

/* ---- rows that the host computes ---- */

/* What a device and the host tell each other, in host memory that operators read and write. */
typedef struct hd_host_mail {
    uint32_t asked; /* by the device: so many times, rows of one layer each time */
    uint32_t done;  /* by the host: computed so many of these */
    int32_t ended;  /* by the host: 1: it computes no more, and y is undefined */
    int32_t late;   /* by the device: 1: it gave up waiting */
    int64_t expert_ns,
        row_ns; /* by the host: what an expert takes, and each of its rows; 0: not known */
    int32_t layer, n;                        /* by the device: experts, */
    int32_t expert[HD_MAX_FETCH_EXPERTS];    /* their numbers */
    int32_t first[HD_MAX_FETCH_EXPERTS + 1]; /* row of each in x, weight and y; [n] all */
} hd_host_mail;

/* What the device knows of it, in device memory; 0 at first. */
typedef struct hd_host_desk {
    int64_t fetch_ns; /* what fetching an expert took lately; 0: not known */
    int64_t begun_ns; /* of the round */
    uint32_t asked;
    uint32_t written; /* blocks of threads that have written their part of the rows */
    uint32_t copied;  /* that have copied their part of the experts */
    int32_t n, rows;  /* of the round, as in the mail */
    int32_t expert[HD_MAX_FETCH_EXPERTS], first[HD_MAX_FETCH_EXPERTS + 1];
} hd_host_desk;

typedef struct hd_host_rows {
    hd_host_mail *mail; /* NULL: the host computes none */
    hd_host_desk *desk;
    float *x, *weight, *y; /* host memory: [most, cols], [most], [most, cols] */
    int32_t most, cols;    /* cols of x and y */
    bool always;           /* all missing experts whose rows have room, whatever it takes */
} hd_host_rows;

/* ---- operators ---- */

/* Fetches experts of a layer that all lie in host memory into slots of device memory. Slots keep what they
 * hold, and so are a cache.
 *
 * A use of a layer is one round or several. A round has the experts from where the one before ended,
 * in order, until `most` of those with rows had no slot, or those with rows fill all slots. A missing
 * one takes the slot that no expert of the round has and that was used least lately, the lowest
 * first; slots whose experts have their turn in a later round come last.
 *
 * With a host that computes rows, those of missing experts with the fewest rows are its, the first k in
 * order of (rows, (number + clock) % n_experts), that have room in `most` rows. k is the number for which the longer
 * of both sides takes least: k experts and their rows on the host; the others' copies. The table has any
 * slot for such an expert: what the device computes with it is replaced by moe_join.
 *
 * With a set, slots keep what they hold. A missing expert takes a slot that holds none, the lowest first,
 * else the next place of the set; `most` counts the latter, rounds are not limited by slots, and the clock
 * stands still. The host computes no rows then. */
typedef struct hd_moe_fetch_args {
    hd_weight *table; /* [3, n_experts] the matrices of the round's experts with rows */
    int32_t *
        round_offset; /* [n_experts + 1] offset, without the rows of other rounds; NULL: not wanted */
    int32_t *range; /* [2] first expert of the round, and of the next one */
    const int32_t
        *before;   /* range of the round before, may be `range`; NULL: first round of the use */
    int32_t *todo; /* [1 + 2 * n_experts] scratch: how many, their experts, where they go */
    hd_fetch_counts *counts; /* += */
    hd_fetch_counts *seen;   /* = counts, in host memory; NULL: not wanted */
    const hd_weight *from;   /* [3, n_experts] where they lie; the table's arrays are aside */
    const int32_t *offset;   /* [n_experts + 1] of moe_permute; NULL: as if all had rows */
    hd_expert_slots slots;
    uint8_t *set; /* [most, slot_bytes] device memory; NULL: none */
    hd_expert_layout layout;
    int32_t n_experts, most; /* most: 1 .. slots.n_slots without a set */
    hd_host_rows host;
    /* read with a host: rows of the layer, x[assignment[p] / top_k] at place p, and what they are weighted
     * with, NULL: ones */
    hd_rows x; /* [*, host.cols] */
    const int32_t *assignment;
    const float *weight; /* by assignment */
    int32_t top_k, layer;
} hd_moe_fetch_args;

#define HD_ROWS_moe_fetch(T) T(x, PLAIN)

/* The rows of a round, once it is known what rows chose. */
typedef struct hd_moe_round_args {
    int32_t *round_offset;         /* [n_experts + 1] of moe_fetch */
    const int32_t *offset, *range; /* of moe_permute; of moe_fetch */
    int32_t n_experts;
} hd_moe_round_args;

#define HD_ROWS_moe_round(T)

/* Waits for the rows that the host computes in the round, and takes them to their places of y. If the host does
 * not come in time, the mail says so and y is undefined. */
typedef struct hd_moe_join_args {
    hd_rows y;             /* [places, host.cols] */
    const int32_t *offset; /* of moe_permute */
    hd_host_rows host;
    hd_fetch_counts *counts; /* += */
} hd_moe_join_args;

#define HD_ROWS_moe_join(T) T(y, PLAIN)

#define HD_FETCH_OPS(X) \
    X(moe_fetch)        \
    X(moe_round)        \
    X(moe_join)

HD_END_C

#endif
