/* disk_tier.h - KV pages on a disk: writes what the prefix cache has when nothing else is to be
 * done, and reads the prefixes of waiting requests while steps run.
 *
 * Pages of closed sequences are written behind. When a request begins to wait, pages of its prefix
 * that only the disk has are read into host memory, if that is predicted to be sooner than computing
 * them. They enter the tree in order, so a prefix may end anywhere, and the rest is computed. A read
 * that takes longer than computing would have taken is given up.
 *
 * Whatever goes wrong with the disk is a page that is missing, a count, and told once when it
 * begins and once when it ends. Owned by the step thread, which never waits here but in stop. */
#ifndef HD_KV_DISK_TIER_H
#define HD_KV_DISK_TIER_H

#include "kv/cache_disk.h"
#include "kv/disk_io.h"

typedef struct hd_disk_tier hd_disk_tier;

typedef struct hd_disk_tier_options {
    hd_disk *disk; /* it closes it, also if it cannot be opened */
    int32_t page_tokens, seq_pages, lookback;
    /* Returns a page of host memory, of page_bytes. */
    void *(*host_page)(void *ctx, hd_kv_group group, hd_host_page host);
    size_t page_bytes[HD_N_KV_GROUPS];
    /* Waits until the copies that were queued so far have run; 0, or what is wrong. */
    hd_status (*wait_copies)(void *ctx, hd_err *err);
    /* Queues what brings a page of host memory that was read to the other ranks of the attention group.
     * May be NULL. */
    void (*spread)(void *ctx, hd_kv_group group, hd_host_page host);
    /* On another thread: the tier has something to do. May be NULL. */
    void (*wake)(void *ctx);
    /* Transfers begin to fail, by an errno, EBADMSG for a wrong checksum; or work again, 0. May be
     * NULL. */
    void (*tell)(void *ctx, hd_disk_job_kind kind, int why);
    void *ctx;
    int32_t n_threads; /* 0: transfers run in hd_disk_tier_step(), for simulations */
} hd_disk_tier_options;

hd_status hd_disk_tier_open(hd_disk_tier **out, const hd_disk_tier_options *o, hd_err *err);
void hd_disk_tier_close(hd_disk_tier *t); /* NULL is fine; writes what was begun */

/* Before any other call, and again after stop: the cache whose pages these are, opened with the key. */
const uint64_t *hd_disk_tier_key(const hd_disk_tier *t);
void hd_disk_tier_attach(hd_disk_tier *t, hd_cache *cache);
hd_disk *hd_disk_tier_store(const hd_disk_tier *t); /* as long as the tier */

/* Between two steps, while no copy is pending: takes what is done, and goes on. copied: copies were
 * queued since the last call. */
void hd_disk_tier_step(hd_disk_tier *t, int64_t now_ns, bool copied);

/* In a step without rows: queues copies of pages that lie on the device alone and should be
 * written. */
void hd_disk_tier_save(hd_disk_tier *t);

/* When a call of step is wanted although nothing else is to be done; 0: not before wake. */
int64_t hd_disk_tier_look_ns(const hd_disk_tier *t);

/* Asks for the prefix of a request. Returns whether it should wait for it. tokens[n] must stay until
 * it ended or was cancelled. ns_of_token: of computing one; 0: not known. */
bool hd_disk_tier_ask(hd_disk_tier *t, uint64_t id, uint64_t salt, const int32_t *tokens,
                      int32_t n, double ns_of_token, int64_t now_ns);
/* Whether another prefix can be asked for now. */
bool hd_disk_tier_has_room(const hd_disk_tier *t);
/* Returns a request whose prefix is read as far as it will be; 0: none. */
uint64_t hd_disk_tier_ended(hd_disk_tier *t);
void hd_disk_tier_cancel(hd_disk_tier *t, uint64_t id); /* an unknown id is fine */

/* Waits for all transfers and ends all reads. Before pages are dropped or memory is given back. */
void hd_disk_tier_stop(hd_disk_tier *t);
/* Drops the pages of the disk. After stop. */
void hd_disk_tier_clear(hd_disk_tier *t);
/* Pages that are computed from now on have names of other weights (hd_disk_root()). With
 * hd_cache_renew(). */
void hd_disk_tier_renew(hd_disk_tier *t, uint64_t weights);

typedef struct hd_disk_tier_stats {
    hd_disk_stats disk;
    int64_t written[HD_N_KV_GROUPS], read[HD_N_KV_GROUPS]; /* pages */
    int64_t read_bytes, read_ns; /* of prefixes that were read, and from ask to end */
    int64_t write_failed, read_failed, late, declined;
} hd_disk_tier_stats;

hd_disk_tier_stats hd_disk_tier_read_stats(const hd_disk_tier *t);

/* What reading a byte takes, of prefixes read lately; 0: not known. */
double hd_disk_tier_byte_ns(const hd_disk_tier *t);

#endif
