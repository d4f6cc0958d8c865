/* traced_comm_internal.h - communication of a rank that runs alone: nothing is sent, and every call
 * reports what the rank would send. Rows of other ranks arrive as a balanced router would send
 * them, more by a given factor. */
#ifndef HD_CAPACITY_TRACED_COMM_INTERNAL_H
#define HD_CAPACITY_TRACED_COMM_INTERNAL_H

#include "comm/shm.h"

/* name: of the call; inside, outside: bytes that this rank sends to ranks of its node and to others. */
typedef void traced_exchange_fn(void *ctx, const char *name, double inside, double outside);

typedef struct traced_comm {
    hd_comm comm;
    traced_exchange_fn *report;
    void *ctx;
    int32_t node;      /* ranks of a node */
    int32_t act_bytes; /* of an activation's element */
    int32_t n_experts;
    int64_t rows;            /* of all attention groups in the step */
    double most;             /* rows of the busiest rank / rows of the mean one */
    comm_shm_most *messages; /* raised by what ranks that are processes would send; or NULL */
    int64_t room;            /* for that: rows that a rank's experts can receive at once */
} traced_comm;

void traced_comm_init(traced_comm *c, const hd_parallel_config *parallel, int32_t rank);

/* Fills offset[slots + 1]: `places` rows on as many slots as can be expected to get any of `choices`
 * choices, each of any of n experts. */
void traced_spread(int32_t *offset, int32_t slots, int64_t places, double choices, int32_t n);

#endif
