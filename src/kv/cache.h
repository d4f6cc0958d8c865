/* cache.h - the prefix cache: a radix tree of KV pages by token content, and the KV of
 * running sequences.
 *
 * The tree is over virtual pages of tokens; a node is one full page of one prefix. Each node
 * owns pages in both KV groups. It lives as long as its FULL page. Its WINDOW page is freed
 * once no window needs it, while the node and its FULL page remain shareable (a tombstone).
 * The node says where each of its pages lies: on the device, in host memory, or in both
 * tiers. A sequence reads pages on the device only. A *sequence KV* is what one running sequence holds: the nodes of its prefix,
 * which it pins, and private pages after them.
 *
 *     sequence A:  [n0]-[n1]-[n2]-(private tail)     n: node, FULL pages pinned by A and B
 *     sequence B:  [n0]-[n1]-(private)               WINDOW pages live only near each end
 *
 * A match of d pages is valid if the pages within the lookback before position d *
 * page_tokens have their WINDOW page in some tier; otherwise a shorter match is used. What the
 * device has no more room for goes to host memory while the budget of its KV group lasts, and leaves
 * each tier by worth (cache_worth.c): WINDOW pages of branch points and of finished conversation
 * turns are worth most. A match brings its pages back, as many as are sooner read than computed. Device pages
 * of a prefix are always its beginning.
 *
 * If layers have tails (kv.h), a WINDOW page may lack the vectors of these layers: it is not *whole*.
 * Then a match also needs whole pages within its lookback, unless all tails of the new sequence
 * begin after it. Where a sequence leaves the tree, below the pages that it matches, it
 * makes the pages whole, so that the next one continues there.
 *
 * If windows can be rebuilt, a match may also end where WINDOW pages are in no tier. The sequence then
 * begins options.rebuild positions before its end, with WINDOW pages of its own, which enter the tree
 * when the end is reached. Such a match saves as many tokens less.
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
#include "kv/page_name.h"

typedef struct hd_cache hd_cache;

/* Where a page may lie: the tiers, the fastest first. */
typedef enum hd_tier { HD_TIER_DEVICE, HD_TIER_HOST, HD_N_TIERS } hd_tier;

typedef struct hd_cache_options {
    int32_t page_tokens;
    /* Lookback: how many positions before the next one WINDOW pages are still read (the
     * sliding window, or a compressor's unfinished block); 0: the family has no such pages. */
    int32_t lookback;
    /* hd_kv_longest_tail(): sequences leave whole WINDOW pages only before their ends, and later
     * ones continue there, or where their own tails begin. 0: every page is whole. */
    int32_t tail;
    int32_t
        replayed; /* tails are the last so many positions of a prompt (hd_kv_ends.windows_from),
                       * and so many are always computed; 0: they are as long as windows read */
    int32_t rebuild; /* hd_kv_rebuild_length(); 0: windows are not rebuilt */
    int32_t n_pages[HD_N_KV_GROUPS];
    int32_t n_host[HD_N_KV_GROUPS]; /* pages that host memory may hold */
    int32_t max_seqs;               /* running sequences at a time */
    int32_t seq_pages;              /* length of the longest sequence, in pages */
    const uint64_t *name_key;       /* [2] for a disk tier (cache_disk.h), copied; NULL: none */
    bool write_through; /* hd_cache_save_unwritten() is for pages of open sequences too */
} hd_cache_options;

/* What computing a token takes, bringing a page of host memory to the device, and one of the disk
 * to host memory, all in the same unit; all 0: not known, and every page is brought back. */
typedef struct hd_cache_costs {
    double token, page[HD_N_KV_GROUPS], disk[HD_N_KV_GROUPS];
} hd_cache_costs;

hd_status hd_cache_open(hd_cache **out, const hd_cache_options *options, hd_err *err);
void hd_cache_close(hd_cache *c); /* NULL is fine */

/* From now on the usable prefix of a request is the one with which it is ready first; without
 * costs the longest. */
void hd_cache_set_costs(hd_cache *c, const hd_cache_costs *costs);

/* Returns the length of the usable cached prefix of tokens[n], a multiple of
 * page_tokens below n (at least one token is always left to compute). Changes nothing.
 * Prefixes are shared among equal salts only. */
int32_t hd_cache_match(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n);

/* Opens sequence `seq`, which must be unused, on the usable cached prefix; *hit is
 * its length in tokens. HD_EAGAIN: pages of host memory found too few pages on the device; the
 * sequence stays closed. */
hd_status hd_cache_acquire(hd_cache *c, int32_t seq, uint64_t salt, const int32_t *tokens,
                           int32_t n, int32_t *hit);

/* The same for a sequence of which the first `prompt` tokens were the prompt: a replay is that of the
 * prompt, whatever came after it. */
hd_status hd_cache_resume(hd_cache *c, int32_t seq, uint64_t salt, const int32_t *tokens,
                          int32_t n, int32_t prompt, int32_t *hit);

/* Returns the position from which on an open sequence is computed: *hit of hd_cache_acquire(), or where
 * the rebuild of its window begins. */
int32_t hd_cache_first(const hd_cache *c, int32_t seq);

/* Returns for what layers with tails must compute an open sequence: for its position n - 1 of
 * hd_cache_acquire() and all later ones, and for the branch; or for the window before *hit, until
 * that is committed. All 0 without tails. */
hd_kv_ends hd_cache_ends(const hd_cache *c, int32_t seq);

/* Reserves pages for positions below n_tokens; evicts cached pages that are not pinned.
 * HD_EAGAIN: the pools are full; the sequence keeps what it had. */
hd_status hd_cache_extend(hd_cache *c, int32_t seq, int32_t n_tokens);

/* Returns the KV group that had too few pages when HD_EAGAIN was last returned. */
hd_kv_group hd_cache_lacking(const hd_cache *c);

/* Commits computed tokens[n_done]: full pages among them enter the tree. WINDOW pages that
 * no later query of this sequence reads are freed. tokens must be the sequence's own. */
void hd_cache_commit(hd_cache *c, int32_t seq, const int32_t *tokens, int32_t n_done);

/* Closes a sequence. Its committed pages stay in the tree; end_of_turn marks where the next
 * turn of a conversation will probably continue. */
void hd_cache_release(hd_cache *c, int32_t seq, bool end_of_turn);

/* Says that what is computed from now on differs: prefixes of sequences that are open or were
 * closed before are never matched again. Open sequences go on; what they commit is not shared
 * with later ones. Evicts what no sequence pins. */
void hd_cache_renew(hd_cache *c);

/* Evicts every prefix that no sequence pins. */
void hd_cache_flush(hd_cache *c);

/* The calls below move page `page` of tokens between caches: positions page * page_tokens and
 * the page_tokens - 1 after it, in one KV group. */

/* Returns the first of the pages from `from` on, below n_pages, that is not cached; n_pages: there is none.
 * Of WINDOW pages, those that are whole are. */
int32_t hd_cache_first_lacking(const hd_cache *c, uint64_t salt, const int32_t *tokens,
                               int32_t from, int32_t n_pages, hd_kv_group group);
bool hd_cache_has(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t page,
                  hd_kv_group group);

/* Returns how many of the first n_pages pages of tokens a sequence could continue behind, whatever
 * their tier, and whatever that costs. */
int32_t hd_cache_usable(const hd_cache *c, uint64_t salt, const int32_t *tokens,
                        int32_t n_pages);

/* Returns the page of host memory that has the bytes once the pending copies have run; -1: the
 * page is not cached, or host memory has no room. */
hd_host_page hd_cache_export(hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t page,
                             hd_kv_group group);

/* Adds a page to the cache. Returns the page of host memory that the caller fills before any
 * other call; -1: host memory has no room, a page above it or the FULL page beside it is missing,
 * or a sequence reads the page without being whole. hd_cache_has() must be false, and no copy may
 * be pending. A WINDOW page must be whole. */
hd_host_page hd_cache_import(hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t page,
                             hd_kv_group group);

/* Returns the sequence's block table, [seq_pages]: numbers of pages on the device, as kernels read them;
 * only live entries are meaningful (-1: none). */
const int32_t *hd_cache_block_table(const hd_cache *c, int32_t seq, hd_kv_group group);

/* Returns the pending page copies, *n of them. hd_cache_copied() empties the list. */
const hd_page_copy *hd_cache_copies(const hd_cache *c, int32_t *n);
void hd_cache_copied(hd_cache *c);

typedef struct hd_cache_stats {
    int32_t pages[HD_N_KV_GROUPS];     /* total */
    int32_t free[HD_N_KV_GROUPS];      /* free pages */
    int32_t evictable[HD_N_KV_GROUPS]; /* cached pages that may be evicted for a sequence */
    int32_t host[HD_N_KV_GROUPS];      /* pages in use in host memory */
    int32_t nodes;
    /* since open: by hd_cache_acquire; pages evicted from the device, copied to host memory and
     * copied back */
    int64_t matched_tokens, asked_tokens;
    int64_t declined;    /* matches that were shorter because computing was sooner */
    int64_t host_tokens; /* of matched_tokens: their FULL pages were in host memory only */
    int64_t disk_tokens; /* of host_tokens: they were read from the disk for this */
    int64_t rebuilt, rebuilt_tokens; /* windows, and positions computed again for them */
    int64_t evicted[HD_N_KV_GROUPS], saved[HD_N_KV_GROUPS], loaded[HD_N_KV_GROUPS];
} hd_cache_stats;

hd_cache_stats hd_cache_read_stats(const hd_cache *c);

/* Verifies every count and link. If `idle`, no sequence may be open. HD_ENOMEM: no memory
 * for the check. */
hd_status hd_cache_check(const hd_cache *c, bool idle, hd_err *err);

/* Frees every page and closes every sequence, whatever the state was; counters go on. */
void hd_cache_reset(hd_cache *c);

#endif
