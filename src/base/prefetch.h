/* prefetch.h - asks the system to read pieces of mapped files before they are needed.
 *
 * A list of pieces goes to a thread, which asks for each in order and does not wait for any. So
 * reads of many small pieces run side by side, and who reads the pieces later waits at most for
 * those that are still on their way. A list that comes while the thread is busy is not asked for:
 * its pieces are read when they are needed. */
#ifndef HD_BASE_PREFETCH_H
#define HD_BASE_PREFETCH_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct hd_prefetch hd_prefetch;

typedef struct hd_prefetch_piece {
    const void *at; /* in memory that stays mapped until hd_prefetch_close() */
    size_t bytes;   /* 1 or more */
} hd_prefetch_piece;

/* Sums since open. Of files that this process neither owns nor may write, Linux says that every page
 * is in memory; it is asked to read them all the same. */
typedef struct hd_prefetch_stats {
    int64_t pieces;     /* that were asked for */
    int64_t resident;   /* of them: all of their pages were in memory */
    int64_t read_bytes; /* of pages that were not */
    int64_t skipped;    /* pieces of lists that came too early */
} hd_prefetch_stats;

/* Starts the thread. most: pieces of a list. */
hd_status hd_prefetch_open(hd_prefetch **out, int32_t most, hd_err *err);
void hd_prefetch_close(hd_prefetch *p); /* waits for the list in progress; NULL is fine */

/* Says that a range is read in small pieces at random places: a read brings no neighbors. */
void hd_prefetch_at_random(const void *at, size_t bytes);

/* Returns where up to `most` pieces are written, for hd_prefetch_start(); NULL while the list before
 * is in progress. n: how many there would be. One thread calls both. */
hd_prefetch_piece *hd_prefetch_list(hd_prefetch *p, int32_t n);
void hd_prefetch_start(hd_prefetch *p, int32_t n);

void hd_prefetch_wait(hd_prefetch *p); /* until the list was asked for */

hd_prefetch_stats hd_prefetch_read_stats(hd_prefetch *p); /* any thread */

#endif
