/* disk_index.h - the extents of one KV group in a store's files: which pages they have, by name, and
 * which is replaced next. The owner has a lock. */
#ifndef HD_KV_DISK_INDEX_H
#define HD_KV_DISK_INDEX_H

#include "base/heap.h"
#include "base/status.h"
#include "kv/page_name.h"

typedef enum hd_extent_state {
    HD_EXTENT_FREE,
    HD_EXTENT_WRITING,
    HD_EXTENT_HAS_PAGE
} hd_extent_state;

typedef struct hd_disk_extent {
    hd_extent_state state;
    int32_t n_readers;
    bool lost; /* a read failed, or it was dropped: free it when nobody reads or writes it */
    hd_page_name name;
    int32_t page;  /* of its prefix, below 2^HD_DISK_DEPTH_BITS */
    uint64_t used; /* the larger, the later; below 2^(63 - HD_DISK_DEPTH_BITS) */
    int32_t next;  /* in its bucket */
} hd_disk_extent;

enum { HD_DISK_DEPTH_BITS = 20 };

typedef struct hd_disk_index {
    hd_disk_extent *extents; /* [n] */
    int32_t n, n_buckets;
    int32_t *buckets;  /* [n_buckets] heads of chains of extents that have pages */
    hd_heap free;      /* the lowest number first, so that files stay short */
    hd_heap evictable; /* extents that have pages and no readers */
    int64_t replaced;
    int32_t n_pages;
} hd_disk_index;

hd_status hd_disk_index_open(hd_disk_index *x, int32_t n, hd_err *err);
void hd_disk_index_close(hd_disk_index *x); /* one that is half open or all zero is fine */

/* Returns the extent with a page, -1: none. */
int32_t hd_disk_index_find(const hd_disk_index *x, hd_page_name name);

/* Returns an extent without a page, in the place of the least recently used one if there is no other, of
 * one prefix its end first; -1: all are read or written. */
int32_t hd_disk_index_take(hd_disk_index *x);

void hd_disk_index_add(hd_disk_index *x, int32_t extent);    /* it has a page now */
void hd_disk_index_drop(hd_disk_index *x, int32_t extent);   /* and no more */
void hd_disk_index_update(hd_disk_index *x, int32_t extent); /* it was changed otherwise */

/* Drops all pages. Those that are read or written are lost. */
void hd_disk_index_drop_all(hd_disk_index *x);

/* Verifies every count and link. where: for the error. */
hd_status hd_disk_index_check(const hd_disk_index *x, const char *where, hd_err *err);

#endif
