/* cache_disk.h - what the prefix cache does for the disk tier: it says which pages should be
 * written, and takes pages that were read into its tree. Bookkeeping, like cache.h; bytes are
 * moved by disk_tier.c.
 *
 * Pages travel between host memory and the disk. One in transfer cannot be evicted. None of the
 * calls that return a page of host memory may be called while copies are pending (cache.h), since
 * these would read or write it. */
#ifndef HD_KV_CACHE_DISK_H
#define HD_KV_CACHE_DISK_H

#include "kv/cache.h"

/* Pages of prefixes that are computed from now on have names below this root: of the weights, and
 * of nothing else. At first it is {0, 0}. Call it with hd_cache_renew(). */
void hd_cache_set_root(hd_cache *c, hd_page_name root);

/* ---- writing: pages of closed sequences, with write_through of all ---- */

typedef struct hd_cache_page {
    hd_kv_group group;
    int32_t node; /* of the tree */
    hd_host_page host;
    int32_t page; /* of its prefix */
    hd_page_name name;
} hd_cache_page;

/* Returns the next page in host memory that was not written yet, and keeps it there; false: none. */
bool hd_cache_begin_write(hd_cache *c, hd_kv_group group, hd_cache_page *out);
/* done: it needs no writing any more. */
void hd_cache_end_write(hd_cache *c, const hd_cache_page *page, bool done);

/* Queues copies of up to n pages to host memory that lie on the device alone and should be written; with
 * write_through also without a disk. */
void hd_cache_save_unwritten(hd_cache *c, hd_kv_group group, int32_t n);

/* Whether there are pages to write; on the device alone: which hd_cache_save_unwritten() copies. */
bool hd_cache_has_unwritten(const hd_cache *c, bool on_device);

/* ---- reading ---- */

/* Whether the disk has a page, for hd_cache_plan_reads(). */
typedef struct hd_cache_lookup {
    void *ctx;
    bool (*has)(void *ctx, hd_kv_group group, hd_page_name name);
} hd_cache_lookup;

/* What to read for a request. */
typedef struct hd_cache_reads {
    int32_t from, to; /* FULL pages from .. to - 1 */
    int32_t n_windows;
    int32_t *windows; /* [pages in the lookback] WINDOW pages, memory of the caller */
    int32_t saved,
        without;   /* tokens that the cache saves with what is read, and without reading */
    bool declined; /* the disk has more, but computing that is sooner */
} hd_cache_reads;

/* Finds the match of tokens[n] that is ready first, with pages of the disk. names: [seq_pages]
 * receives the names of the first `to` pages. Returns whether there is something to read. */
bool hd_cache_plan_reads(const hd_cache *c, const hd_cache_lookup *disk, uint64_t salt,
                         const int32_t *tokens, int32_t n, hd_page_name *names,
                         hd_cache_reads *out);

/* Returns a page of host memory to read into; -1: none can be evicted. */
hd_host_page hd_cache_reserve(hd_cache *c, hd_kv_group group);
void hd_cache_unreserve(hd_cache *c, hd_kv_group group, hd_host_page host);

/* Ends the reservation of page `host`, which now has the bytes of page `page` of tokens. FULL pages
 * come from the first missing one on, then WINDOW pages. false: a page above is no longer cached.
 * *node: the node of the FULL page, for the call with the next one; -1 at first. */
bool hd_cache_adopt(hd_cache *c, uint64_t salt, const int32_t *tokens,
                    const hd_page_name *names, int32_t page, hd_kv_group group,
                    hd_host_page host, int32_t *node);

#endif
