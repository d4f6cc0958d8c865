/* cache.h - the prefix cache: a radix tree of KV pages by token content, and the KV of
 * running sequences.
 *
 * The tree is over virtual pages of tokens; a node is one full page of one prefix. Each node
 * owns pages in both KV groups. Its FULL page lives as long as the node. Its WINDOW page is
 * freed once no window needs it, while the node and its FULL page remain shareable (a
 * tombstone). A *sequence KV* is what one running sequence holds: the nodes of its prefix,
 * which it pins, and private pages after them.
 *
 *     sequence A:  [n0]-[n1]-[n2]-(private tail)     n: node, FULL pages pinned by A and B
 *     sequence B:  [n0]-[n1]-(private)               WINDOW pages live only near each end
 *
 * A match of d pages is valid if the pages within the lookback before position d *
 * page_tokens have their WINDOW page, on the device or as a host snapshot; otherwise a
 * shorter match is used. Evicted WINDOW pages become snapshots while the budget lasts; those
 * of branch points and of finished conversation turns are evicted last (LRU otherwise).
 *
 * This is bookkeeping on the host: no device memory is touched. Page copies are left in a
 * list that the owner runs, in order, before the next step. Owned by the step thread; all
 * memory is allocated at open. Deterministic: recency is a counter, not a clock. */
#ifndef HD_KV_CACHE_H
#define HD_KV_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "kv/kv.h"

typedef struct hd_cache hd_cache;

typedef struct hd_cache_options {
    int32_t page_tokens;
    /* Lookback: how many positions before the next one WINDOW pages are still read (the
     * sliding window, or a compressor's unfinished block); 0: the family has no such pages. */
    int32_t lookback;
    int32_t n_pages[HD_N_KV_GROUPS];
    int32_t n_snapshots; /* WINDOW pages that host memory may hold */
    int32_t max_seqs;    /* running sequences at a time */
    int32_t seq_pages;   /* length of the longest sequence, in pages */
} hd_cache_options;

hd_status hd_cache_open(hd_cache **out, const hd_cache_options *options, hd_err *err);
void hd_cache_close(hd_cache *c); /* NULL is fine */

/* Returns the length of the longest usable cached prefix of tokens[n], a multiple of
 * page_tokens below n (at least one token is always left to compute). Changes nothing.
 * Prefixes are shared among equal salts only. */
int32_t hd_cache_match(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n);

/* Opens sequence `seq`, which must be unused, on the longest usable cached prefix; *hit is
 * its length in tokens. HD_EAGAIN: there are no WINDOW pages for it, and nothing changed. */
hd_status hd_cache_acquire(hd_cache *c, int32_t seq, uint64_t salt, const int32_t *tokens,
                           int32_t n, int32_t *hit);

/* Reserves pages for positions below n_tokens; evicts cached pages that are not pinned.
 * HD_EAGAIN: the pools are full; the sequence keeps what it had. */
hd_status hd_cache_extend(hd_cache *c, int32_t seq, int32_t n_tokens);

/* Commits computed tokens[n_done]: full pages among them enter the tree. WINDOW pages that
 * no later query of this sequence reads are freed. tokens must be the sequence's own. */
void hd_cache_commit(hd_cache *c, int32_t seq, const int32_t *tokens, int32_t n_done);

/* Closes a sequence. Its committed pages stay in the tree; end_of_turn marks where the next
 * turn of a conversation will probably continue. */
void hd_cache_release(hd_cache *c, int32_t seq, bool end_of_turn);

/* Evicts every prefix that no sequence pins. */
void hd_cache_flush(hd_cache *c);

/* Returns the sequence's block table, [seq_pages]; only live entries are meaningful (-1:
 * none). */
const int32_t *hd_cache_block_table(const hd_cache *c, int32_t seq, hd_kv_group group);

/* Returns the pending page copies, *n of them. hd_cache_copied() empties the list. */
const hd_page_copy *hd_cache_copies(const hd_cache *c, int32_t *n);
void hd_cache_copied(hd_cache *c);

typedef struct hd_cache_stats {
    int32_t pages[HD_N_KV_GROUPS];     /* total */
    int32_t free[HD_N_KV_GROUPS];      /* free pages */
    int32_t evictable[HD_N_KV_GROUPS]; /* cached pages that may be evicted for a sequence */
    int32_t nodes, snapshots;
    int64_t matched_tokens, asked_tokens; /* by hd_cache_acquire, since open */
    int64_t evicted[HD_N_KV_GROUPS];
} hd_cache_stats;

hd_cache_stats hd_cache_read_stats(const hd_cache *c);

/* Verifies every count and link. If `idle`, no sequence may be open. HD_ENOMEM: no memory
 * for the check. */
hd_status hd_cache_check(const hd_cache *c, bool idle, hd_err *err);

/* Frees every page and closes every sequence, whatever the state was; counters go on. */
void hd_cache_reset(hd_cache *c);

#endif
