/* preflight.h - before weights are read, every pair of ranks exchanges bytes both ways at the same time:
 * that they arrive, that they are the same, and how fast. */
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

/* Member `own` of n exchanges bytes with each other one. Of member 0: rates [n, n] become the bytes per
 * second each way of every pair, as both have measured them. most: bytes that a message may have. False:
 * communication has ended; or *other, -1 at first, has sent bytes that are not those expected. Tickets of
 * HD_MESSAGE_HELLO from `ticket` on, four for each pair. */
bool hd_preflight_run(const hd_link *link, int32_t own, int32_t n, uint64_t ticket,
                      uint64_t most, float *rates, int32_t *other);

#endif
