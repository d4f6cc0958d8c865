/* load_costs.h - what computing a position and reading a page of host memory take, by the times
 * of steps, so that a page is read only where that is sooner.
 *
 *     step without copies:  row = time / rows, of steps with a page of rows or more
 *     step with copies:     byte = (time - max(rows * row, shortest small step)) / bytes copied
 *
 * Each is the mean of its last value and the one before. A page that was computed instead of
 * read gives no new time of reading, so the old one counts for a little less each time: reading
 * is tried again, the later, the slower it was. No clock: the same times lead to the same costs. */
#ifndef HD_SCHED_LOAD_COSTS_H
#define HD_SCHED_LOAD_COSTS_H

#include <stddef.h>
#include <stdint.h>

#include "kv/cache.h"

typedef struct sched_load_costs {
    double row_ns, byte_ns;            /* 0: not measured yet */
    double disk_byte_ns;               /* of reading the disk, as disk_tier.h measured it */
    double least_ns;                   /* shortest step of fewer rows without copies */
    int32_t least_rows;                /* rows of a step from which on row_ns is measured */
    size_t page_bytes[HD_N_KV_GROUPS]; /* of a copy; 0: nothing is measured */
} sched_load_costs;

/* A step of so many rows, and the copies before them, took ns. */
void sched_load_costs_took(sched_load_costs *c, int64_t ns, int32_t rows,
                           const int32_t copied[HD_N_KV_GROUPS]);

/* Pages were computed although host memory had them. */
void sched_load_costs_declined(sched_load_costs *c);

/* All 0 until both are measured. */
hd_cache_costs sched_load_costs_of(const sched_load_costs *c);

#endif
