/* cache.h - which token sequences already have pages: the prefix tree and its leases.
 *
 * One tree over virtual pages of tokens; a node is one full page of one prefix. Each node
 * casts a shadow into every lifetime's pool: its ENTRIES page lives as long as the node, its
 * WINDOW page is given back once no window needs it, while the node and its entries stay
 * shareable (a tombstone). A *lease* is one running sequence: the nodes of its prefix, which it
 * pins, and private pages behind them.
 *
 *     lease A:  [n0]-[n1]-[n2]-(private tail)        n: node, entries pinned by A and B
 *     lease B:  [n0]-[n1]-(private)                  window pages live only near each end
 *
 * A match of d pages is valid if the pages within reach before position d * page_tokens have
 * their WINDOW page, on the device or as a host snapshot; otherwise a
 * shorter one is taken. Evicted window pages become snapshots while the budget lasts; those of
 * branch points and of ends of turns are given up last.
 *
 * This is bookkeeping on the host: no device memory is touched. What must be copied is left in
 * a list that the owner runs, in order, before the next step. Owned by the step thread; all
 * memory is taken at open. Deterministic: recency is a counter, not a clock. */
#ifndef HD_KV_CACHE_H
#define HD_KV_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "kv/kv.h"

typedef struct hd_cache hd_cache;

typedef struct hd_cache_options {
    int32_t page_tokens;
    int32_t
        lookback; /* how far before the next position WINDOW pages are still read: the window,
                      or a compressor's unfinished block; 0: the family has no such pages */
    int32_t n_pages[HD_N_KV_GROUPS];
    int32_t n_snapshots; /* window pages that host memory may hold */
    int32_t max_seqs;    /* sequences at a time */
    int32_t seq_pages;   /* the longest sequence, in pages */
} hd_cache_options;

hd_status hd_cache_open(hd_cache **out, const hd_cache_options *options, hd_err *err);
void hd_cache_close(hd_cache *c); /* NULL is fine */

/* Tokens of the longest usable cached prefix of tokens[n], a multiple of page_tokens below n
 * (at least one token is always left to compute). Changes nothing. salt separates tenants. */
int32_t hd_cache_match(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n);

/* Opens a free lease on the longest usable prefix and gives its length in *hit. HD_EAGAIN when
 * window pages for it cannot be had; then nothing changed. */
hd_status hd_cache_acquire(hd_cache *c, int32_t seq, uint64_t salt, const int32_t *tokens,
                           int32_t n, int32_t *hit);

/* Makes sure positions below n_tokens have pages; evicts what nobody uses. HD_EAGAIN when the
 * pools cannot give them: the lease keeps what it had. */
hd_status hd_cache_extend(hd_cache *c, int32_t seq, int32_t n_tokens);

/* tokens[n_done] are computed: full pages among them enter the tree, and window pages that no
 * later query of this lease can see are let go. Call with the lease's own growing sequence. */
void hd_cache_commit(hd_cache *c, int32_t seq, const int32_t *tokens, int32_t n_done);

/* Ends a lease. Its committed pages stay in the tree; end_of_turn marks where the next turn of
 * a conversation will probably continue. */
void hd_cache_release(hd_cache *c, int32_t seq, bool end_of_turn);

/* Forgets every prefix that no lease pins. */
void hd_cache_flush(hd_cache *c);

/* The lease's pages, [lease_pages]; only live entries are meaningful (-1: none). */
const int32_t *hd_cache_table(const hd_cache *c, int32_t seq, hd_kv_group life);

/* The pending copies; *n of them. hd_cache_copied() empties the list. */
const hd_page_copy *hd_cache_copies(const hd_cache *c, int32_t *n);
void hd_cache_copied(hd_cache *c);

typedef struct hd_cache_stats {
    int32_t pages[HD_N_KV_GROUPS];     /* in all */
    int32_t free[HD_N_KV_GROUPS];      /* in nobody's hands */
    int32_t evictable[HD_N_KV_GROUPS]; /* cached, but would be given up for a lease */
    int32_t nodes, snapshots;
    int64_t matched_tokens, asked_tokens; /* by acquire, since open */
    int64_t evicted[HD_N_KV_GROUPS];
} hd_cache_stats;

hd_cache_stats hd_cache_read_stats(const hd_cache *c);

/* Walks everything and verifies every count and link. idle: no lease may be open. HD_ENOMEM:
 * there was no memory to look. */
hd_status hd_cache_check(const hd_cache *c, bool idle, hd_err *err);

/* Every page is free again and no lease open, whatever the books said; counters go on. */
void hd_cache_reset(hd_cache *c);

#endif
