/* fetch_source_internal.h - where the experts of a fetch come from: memory of this host, which is copied, or
 * that of another host, which a thread reads (comm/pieces.h). */
#ifndef HD_MODEL_FETCH_SOURCE_INTERNAL_H
#define HD_MODEL_FETCH_SOURCE_INTERNAL_H

#include "model/expert_fetch.h"
#include "moe/fetch_order.h"

typedef struct fetch_sources {
    hd_fetch_source *all; /* [n] owned */
    int32_t n;
} fetch_sources;

hd_status fetch_sources_open(fetch_sources *f, const hd_fetch_source *all, int32_t n,
                             hd_err *err);
void fetch_sources_close(fetch_sources *f); /* all zeros are fine */

/* Returns the first source that has an expert; -1: none. */
int32_t fetch_source_of(const fetch_sources *f, int32_t layer, int32_t expert);

/* What a copy of an array is called in hd_fetch_copy. array: as in hd_piece. */
static inline int32_t fetch_name(int32_t expert, int32_t array) {
    return expert * HD_PIECE_ARRAYS + array;
}

/* Queues copies of a layer's experts on s, and reads with their readers. reads [n]: the last read of each
 * reader; without readers it may be NULL. */
void fetch_queue(const fetch_sources *f, hd_stream *s, int32_t layer,
                 const hd_fetch_copy *copies, int32_t n, uint64_t *reads);

/* Waits until these reads are done. */
void fetch_await(const fetch_sources *f, const uint64_t *reads);

#endif
