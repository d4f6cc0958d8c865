/* handover.h - the pages of a prompt as messages: from the cache of one server to that of
 * another.
 *
 * A page leaves and arrives through host memory (cache.h), by the copies that also evict and
 * bring back. It is whole: entries, index keys and choices of all layers, those that draft
 * included, in the FULL group; raw vectors and compressor state in the WINDOW group. The receiver
 * computes the rest of the prompt, at least one token, as after any hit in its cache.
 *
 * lease.h decides when a page may move; this file moves one. Owned by the step thread, between
 * steps, where nothing else is said. */
#ifndef HD_KV_HANDOVER_H
#define HD_KV_HANDOVER_H

#include "kv/cache.h"

/* On the wire as it is, before the bytes of the page; between processes of one version and one
 * byte order. */
typedef struct hd_page_head {
    uint32_t group;  /* hd_kv_group */
    uint32_t page;   /* of the prompt */
    uint64_t bytes;  /* that follow */
    uint64_t digest; /* of the prompt up to the page's end, of group, page and bytes */
} hd_page_head;

/* The ranks of an attention group: each has all its pages, under the same numbers. */
typedef struct hd_page_ranks {
    void *ctx;
    void (*copy)(void *ctx, const hd_page_copy *copies,
                 int32_t n); /* as hd_kv_copy(), on all */
    /* The others get a page of host memory that was filled here. On the stream. */
    void (*spread)(void *ctx, hd_kv_group group, hd_host_page host);
} hd_page_ranks;

/* One side of a handover. Everything is borrowed. */
typedef struct hd_handover {
    hd_cache *cache;
    hd_kv *kv;
    hd_stream *stream;
    hd_page_ranks ranks; /* copy NULL: one rank */
    int32_t page_tokens;
    size_t page_bytes[HD_N_KV_GROUPS]; /* hd_kv_host_page() of this kv */
    uint64_t salt;
    const int32_t *tokens; /* [n_tokens] the prompt */
    int32_t n_tokens;
} hd_handover;

/* Pages of a prompt: in each KV group n of them, from `first` on. They move in this order: those of
 * the FULL group, then those of the WINDOW group. */
typedef struct hd_page_range {
    int32_t first[HD_N_KV_GROUPS], n[HD_N_KV_GROUPS];
} hd_page_range;

static inline uint32_t hd_page_range_size(const hd_page_range *r) {
    return (uint32_t)r->n[HD_KV_FULL] + (uint32_t)r->n[HD_KV_WINDOW];
}

/* Returns the i-th of them, and its KV group. */
int32_t hd_page_range_at(const hd_page_range *r, uint32_t i, hd_kv_group *group);

/* Whether they are among the first `all` pages of a prompt. */
bool hd_page_range_fits(const hd_page_range *r, int32_t all);

/* Returns how many whole pages of the prompt may move. */
int32_t hd_handover_pages(const hd_handover *h);

/* Returns the bytes of a message with a page of this KV group. */
size_t hd_handover_bytes(const hd_handover *h, hd_kv_group group);

/* Finds the pages that a sequence with this prompt would read and the cache has not. */
void hd_handover_lacking(const hd_handover *h, int32_t lookback, hd_page_range *out);

/* Finds the pages without which a later request could not continue behind the longest prefix that the
 * cache has. */
void hd_handover_usable(const hd_handover *h, int32_t lookback, hd_page_range *out);

/* Writes the bytes of a page to out, [page_bytes]. HD_EAGAIN: as hd_handover_export(). */
hd_status hd_handover_copy(const hd_handover *h, hd_kv_group group, int32_t page, void *out,
                           hd_err *err);

/* Makes a message of the bytes that were copied behind its head. Any thread: reads neither cache nor
 * kv. */
void hd_handover_seal(const hd_handover *h, hd_kv_group group, int32_t page, void *message);

/* Writes the message of a page to out, hd_handover_bytes(). HD_EAGAIN: the page is not cached, or
 * host memory has no room. Other errors: of the stream. */
hd_status hd_handover_export(const hd_handover *h, hd_kv_group group, int32_t page, void *out,
                             hd_err *err);

/* Says whether a message of n bytes, of any alignment, is a page of this prompt. HD_EFORMAT: its
 * length, group, page or digest is wrong. Any thread: reads neither cache nor kv. */
hd_status hd_handover_check(const hd_handover *h, const void *message, size_t n, hd_err *err);

/* Puts the page of a message that was checked into the cache, FULL pages from the first on.
 * HD_EAGAIN: host memory has no room, or a page above is missing. A page that is cached is kept. */
hd_status hd_handover_place(const hd_handover *h, const void *message, hd_err *err);

/* Checks and places a message. HD_EFORMAT: nothing changed. */
hd_status hd_handover_import(const hd_handover *h, const void *message, size_t n, hd_err *err);

#endif
