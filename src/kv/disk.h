/* disk.h - the store of the disk tier: which pages the files have, by name, and how many may be
 * there.
 *
 * The index lies in memory and is read from the heads when a store is opened, so that a lookup
 * never waits for the disk. A page has a name that says all it depends on (page_name.h); that is
 * why a store knows nothing of the tree, and outlives it. The least recently used page makes room
 * for a new one, the end of a prefix before its beginning.
 *
 * Several caches of a process may share a store: all calls but open are for any thread, and those that
 * transfer bytes between begin and end of the same extent. A failure is never more than a page that
 * is not there. */
#ifndef HD_KV_DISK_H
#define HD_KV_DISK_H

#include "kv/disk_files.h"
#include "kv/disk_format.h"

typedef struct hd_disk hd_disk;

typedef struct hd_disk_options {
    hd_disk_files files; /* the store's from now on, also if it cannot be opened */
    const char *where;   /* the folder, for messages */
    uint64_t bytes;      /* that all files together may have */
    int32_t page_tokens;
    size_t page_bytes[HD_N_KV_GROUPS]; /* 0: no such pages */
    const char *identity; /* below HD_DISK_IDENTITY bytes; a store of another one is refused */
} hd_disk_options;

/* HD_EINVAL: the store belongs to another identity, or the bytes hold no page of a group. */
hd_status hd_disk_open(hd_disk **out, const hd_disk_options *o, hd_err *err);
hd_disk *hd_disk_share(hd_disk *d); /* returns d, which wants one more close */
void hd_disk_close(hd_disk *d);     /* NULL is fine; none of its owner's transfers may run */

const uint64_t *hd_disk_key(const hd_disk *d); /* [2] of page names */
/* The root of names for weights: 0 are those of the files, and other numbers have a meaning in this
 * process alone. */
hd_page_name hd_disk_root(const hd_disk *d, uint64_t weights);

bool hd_disk_has(hd_disk *d, hd_kv_group group, hd_page_name name);

/* Says that a page is used by a request, and whether the store has it. Begin returns the time of a
 * request, so that the pages of its prefix were used at the same time. */
uint64_t hd_disk_begin_use(hd_disk *d);
bool hd_disk_use(hd_disk *d, hd_kv_group group, hd_page_name name, uint64_t time);

/* Returns the extent of a page and keeps it there; -1: the store does not have it. */
int32_t hd_disk_begin_read(hd_disk *d, hd_kv_group group, hd_page_name name);
/* good: what was read is the page. Otherwise the store forgets it. */
void hd_disk_end_read(hd_disk *d, hd_kv_group group, int32_t extent, bool good);

/* Returns an extent for a page that the store does not have, the page'th of its prefix; -1: all
 * extents are being read or written. */
int32_t hd_disk_begin_write(hd_disk *d, hd_kv_group group, hd_page_name name, int32_t page);
void hd_disk_end_write(hd_disk *d, hd_kv_group group, int32_t extent, bool good);

/* Transfers bytes of a page. Return 0 or an errno; EBADMSG: the extent does not have this page;
 * ECANCELED: all pages were dropped meanwhile. */
int hd_disk_read(hd_disk *d, hd_kv_group group, int32_t extent, void *page);
int hd_disk_write(hd_disk *d, hd_kv_group group, int32_t extent, const void *page);
int hd_disk_sync(hd_disk *d); /* what was written so far survives a power cut */

/* Drops all pages, for good, and waits for transfers that run. Returns 0 or an errno: then they come
 * back when the store is opened again. */
int hd_disk_clear(hd_disk *d);

typedef struct hd_disk_stats {
    int32_t extents[HD_N_KV_GROUPS], used[HD_N_KV_GROUPS];
    uint64_t bytes;                   /* of the files, at most */
    int64_t replaced[HD_N_KV_GROUPS]; /* pages that made room for others */
} hd_disk_stats;

hd_disk_stats hd_disk_read_stats(hd_disk *d);

/* Verifies every count and link of the index. */
hd_status hd_disk_check(hd_disk *d, hd_err *err);

#endif
