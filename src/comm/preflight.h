/* preflight.h - before weights are read, every pair of ranks exchanges bytes both ways at the same time:
 * that they arrive, that they are the same, and how fast. Then each rank tells the first one what time it is and
 * how much memory it has. */
#ifndef HD_COMM_PREFLIGHT_H
#define HD_COMM_PREFLIGHT_H

#include "comm/messages.h"

/* Longest time of all of it; bytes each way of a pair, and in a world of more ranks than that. */
enum {
    HD_PREFLIGHT_MS = 10000,
    HD_PREFLIGHT_BYTES = 1 << 20,
    HD_PREFLIGHT_MANY = 8,
    HD_PREFLIGHT_BYTES_OF_MANY = 1 << 17
};

/* Returns the partner of a member in a round of 0 .. hd_preflight_rounds(n) - 1, in which pairs have no
 * member in common; -1: none. In all rounds together each pair meets once. */
int32_t hd_preflight_partner(int32_t n, int32_t member, int32_t round);
int32_t hd_preflight_rounds(int32_t n);

/* A rank, as it has told the first one. */
typedef struct hd_preflight_rank {
    int64_t clock_ns;  /* how far its clock is ahead of the first one's, */
    int64_t within_ns; /* to within so much: half the time of a message there and back */
    uint64_t free_bytes;
} hd_preflight_rank;

typedef struct hd_preflight_args {
    int32_t own, n;  /* a member of n */
    uint64_t ticket; /* of HD_MESSAGE_HELLO, from this one on, six for each pair */
    uint64_t most;   /* bytes that a message may have */
    uint64_t free_bytes;
} hd_preflight_args;

typedef struct hd_preflight_results {
    /* Of member 0: [n, n], bytes per second each way of every pair, as both have measured them; [n]. */
    float *rates;
    hd_preflight_rank *ranks;
    int32_t other; /* has sent bytes that are not those expected; -1: none */
} hd_preflight_results;

/* A member exchanges bytes with each other one. False: communication has ended, or there is another one. */
bool hd_preflight_run(const hd_link *link, const hd_preflight_args *a,
                      hd_preflight_results *out);

#endif
