/* cache_internal.h - the state of the prefix cache, for cache*.c. */
#ifndef HD_KV_CACHE_INTERNAL_H
#define HD_KV_CACHE_INTERNAL_H

#include "base/heap.h"
#include "kv/cache.h"

enum { ROOT = 0, NONE = -1 };

typedef struct cache_node {
    int32_t parent, first_child, next, prev; /* next and prev: siblings */
    int32_t depth;                           /* number of pages above; the root has -1 */
    hd_device_page device[HD_N_KV_GROUPS];   /* NONE: not in that tier */
    hd_host_page host[HD_N_KV_GROUPS];
    int32_t n_resident; /* children whose FULL page is on the device */
    int32_t refs, window_refs;
    int32_t hash_next; /* chain of the child table */
    uint64_t hash;     /* of parent, salt and tokens */
    uint64_t salt;
    uint32_t epoch; /* in which it was computed: only sequences of the same match it */
    int64_t used;   /* tick of the last sequence that used it */
    int64_t floor[HD_N_TIERS][HD_N_KV_GROUPS]; /* of each heap then: cache_worth.c */
    uint8_t uses;                              /* closed sequences that used it */
    bool turn_end;                             /* a sequence ended here */
    bool whole; /* its WINDOW page has the vectors of all layers */
    hd_page_name name;
    bool released;  /* a sequence whose path contains it was closed */
    bool from_disk; /* its FULL page was read from the disk and not used since */
    /* written to the last tier, or given up; being written: the page of host memory stays where it is */
    bool clean[HD_N_KV_GROUPS], writing[HD_N_KV_GROUPS];
} cache_node;

typedef struct cache_seq {
    bool open;
    uint64_t salt;
    uint32_t epoch;
    int32_t node;        /* deepest node of the path */
    int32_t n_nodes;     /* pages that are nodes */
    int32_t n_pages;     /* all pages; those after n_nodes are private */
    int32_t window_from; /* first page that keeps its WINDOW page */
    /* While its window is rebuilt: WINDOW pages before `rebuilt` are its own, those before `window_to`
     * are taken. 0: none is */
    int32_t rebuilt, window_to;
    int32_t first;        /* position that it computes first */
    int32_t prompt_pages; /* behind which its prompt would continue, asked again */
    hd_kv_ends ends;
} cache_seq;

typedef struct cache_free_list {
    int32_t *items;
    int32_t n;
} cache_free_list;

struct hd_cache {
    hd_cache_options o;
    cache_node *nodes; /* [n_nodes + 1], the root first */
    int32_t *tokens;   /* [n_nodes + 1, page_tokens] */
    int32_t *buckets;  /* [n_buckets] heads of hash chains */
    int32_t n_buckets, n_nodes;
    cache_free_list free_nodes, free_pages[HD_N_TIERS][HD_N_KV_GROUPS];
    hd_heap evictable[HD_N_TIERS][HD_N_KV_GROUPS]; /* nodes whose page may leave the tier */
    cache_seq *seqs;
    hd_device_page *table[HD_N_KV_GROUPS]; /* [max_seqs, seq_pages] */
    int32_t *path;                         /* [seq_pages] scratch of a match: its nodes */
    uint8_t *tiers; /* [seq_pages, HD_N_KV_GROUPS] scratch of a plan: where its pages lie */
    bool has_names; /* there is a disk tier */
    uint64_t name_key[2];
    hd_page_name root;
    /* nodes with a page to be written: to the disk from host memory; to host memory */
    hd_heap writable[HD_N_KV_GROUPS], unsaved[HD_N_KV_GROUPS];
    bool *reserved[HD_N_KV_GROUPS]; /* [n_host] pages of host memory in transfer, of no node */
    hd_page_copy *copies;
    int32_t n_copies, cap_copies;
    int64_t tick;
    int64_t floor[HD_N_TIERS][HD_N_KV_GROUPS]; /* of the worth of what stays, less the tick */
    uint32_t epoch;                            /* counts hd_cache_renew() */
    int32_t n_pinned;                          /* nodes with refs */
    int32_t n_resident;                        /* nodes whose FULL page is on the device */
    int32_t lookback_pages; /* WINDOW pages that a sequence needs before its next position */
    hd_kv_group lacking;    /* of which there were too few pages last */
    int64_t matched_tokens, asked_tokens, host_tokens, disk_tokens, declined, rebuilt,
        rebuilt_tokens; /* see hd_cache_stats */
    hd_cache_costs costs;
    int64_t evicted[HD_N_KV_GROUPS], saved[HD_N_KV_GROUPS], loaded[HD_N_KV_GROUPS];
};

static inline int32_t cache_n_pages(const hd_cache *c, int tier, int group) {
    return tier == HD_TIER_DEVICE ? c->o.n_pages[group] : c->o.n_host[group];
}

static inline hd_device_page *cache_table(const hd_cache *c, int32_t seq, hd_kv_group group) {
    return c->table[group] + (int64_t)seq * c->o.seq_pages;
}

/* Whether a sequence has a WINDOW page of its own at a node of its path. */
static inline bool cache_keeps_window(const hd_cache *c, int32_t seq, int32_t at, int32_t n) {
    const int32_t page = cache_table(c, seq, HD_KV_WINDOW)[at].n;
    return page != NONE && page != c->nodes[n].device[HD_KV_WINDOW].n;
}

static inline bool cache_is_in(const cache_node *k, hd_tier tier, hd_kv_group group) {
    return (tier == HD_TIER_DEVICE ? k->device[group].n : k->host[group].n) != NONE;
}

/* Whether a page of the node may leave a tier. On the device these are a FULL page without one
 * below it, and a WINDOW page that no window reads. In host memory, unless it is being
 * written to the disk, a FULL page that is on the device too, or is the only one of a leaf; and a
 * WINDOW page, unless it is about to be read. */
static inline bool cache_may_leave(const cache_node *k, hd_tier tier, hd_kv_group group) {
    const bool resident = cache_is_in(k, HD_TIER_DEVICE, group);
    if (!cache_is_in(k, tier, group)) return false;
    if (tier == HD_TIER_HOST && k->writing[group]) return false;
    if (group == HD_KV_WINDOW) return k->window_refs == 0 || (tier == HD_TIER_HOST && resident);
    if (tier == HD_TIER_HOST) return resident || (k->refs == 0 && k->first_child == NONE);
    return k->refs == 0 && k->n_resident == 0;
}

static inline bool cache_is_cached(const cache_node *k, hd_kv_group group) {
    return cache_is_in(k, HD_TIER_DEVICE, group) || cache_is_in(k, HD_TIER_HOST, group);
}

static inline bool cache_is_away(const cache_node *k, hd_kv_group group) {
    return !cache_is_in(k, HD_TIER_DEVICE, group);
}

/* Whether all layers find there what they read. */
static inline bool cache_is_complete(const cache_node *k, hd_kv_group group) {
    return cache_is_cached(k, group) && (group != HD_KV_WINDOW || k->whole);
}

/* What the first d pages save, in the unit of costs, without the reads; a token counts 1 if costs are not
 * known. A rebuild counts as if every layer computed all of its positions: half as many rows are
 * computed, but at the end of a prefix, where attention takes longest. */
static inline double cache_saving(const hd_cache *c, int32_t d, bool rebuilds) {
    const int32_t tokens = d * c->o.page_tokens - (rebuilds ? c->o.rebuild : 0);
    return tokens * (c->costs.token > 0 ? c->costs.token : 1);
}

/* Conversations will probably come back to ends of turns and branch points. */
static inline bool cache_is_junction(const hd_cache *c, const cache_node *k) {
    return k->turn_end || (k->first_child != NONE && c->nodes[k->first_child].next != NONE);
}

/* Whether a page should be written: of finished sequences, or at once, all FULL pages, and the
 * WINDOW pages at junctions that are whole, as others are rarely read and large. */
static inline bool cache_is_unwritten(const hd_cache *c, const cache_node *k,
                                      hd_kv_group group) {
    if (!c->has_names && !c->o.write_through) return false;
    if (!k->released && !c->o.write_through) return false;
    if (k->clean[group] || k->writing[group]) return false;
    if (k->epoch != c->epoch || !cache_is_complete(k, group)) return false;
    return group == HD_KV_FULL || cache_is_junction(c, k);
}

/* cache.c */
int32_t cache_pop(cache_free_list *f);
void cache_push(cache_free_list *f, int32_t item);
hd_host_page cache_pop_host(hd_cache *c, hd_kv_group group);
void cache_push_host(hd_cache *c, hd_kv_group group, hd_host_page page);
int32_t cache_find_child(const hd_cache *c, int32_t parent, uint64_t salt, uint32_t epoch,
                         const int32_t *tokens);
int32_t cache_add_node(hd_cache *c, int32_t parent, uint64_t salt, uint32_t epoch,
                       const int32_t *tokens);
/* Say where the page of a node lies in a tier; NONE: no longer there. */
void cache_set_device(hd_cache *c, int32_t n, hd_kv_group group, hd_device_page page);
void cache_set_host(hd_cache *c, int32_t n, hd_kv_group group, hd_host_page page);
/* Updates the heaps after any other change of a node's state. */
void cache_finish(hd_cache *c, int32_t n);
/* Saves the page of a node to host memory. Returns whether it lies there. */
bool cache_save_page(hd_cache *c, int32_t n, hd_kv_group group);
/* Evicts a page from host memory; a FULL page that is nowhere else goes with its node. */
void cache_evict_host(hd_cache *c, int32_t n, hd_kv_group group);
void cache_free_page(hd_cache *c, int32_t n, hd_tier tier, hd_kv_group group);
/* A pinned node's pages stay. */
void cache_pin(hd_cache *c, int32_t n);
void cache_unpin(hd_cache *c, int32_t n);
/* Adds a page copy; callers ensure that the list has room. */
void cache_add_copy(hd_cache *c, hd_kv_group group, bool save, hd_device_page device,
                    hd_host_page host);

/* cache_match.c: finds the valid matches of tokens[n]; their nodes are in c->path. */
typedef struct cache_match {
    int32_t best, longest; /* nodes of the match that is ready first, and of the longest */
    bool rebuilds;         /* the window of the best one is rebuilt */
    int32_t known;         /* nodes along the tokens, matched or not */
} cache_match;

cache_match cache_walk(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n,
                       int32_t replay_from);

/* Where the replay of a prompt of n tokens begins; 0 without replays. */
static inline int32_t cache_replay_from(const hd_cache *c, int32_t n) {
    return c->o.replayed && n > c->o.replayed ? n - c->o.replayed : 0;
}

/* cache_worth.c */
/* Key of a page in the heap of its tier, or what it would be there. */
int64_t cache_key(const hd_cache *c, int32_t n, hd_tier tier, hd_kv_group group);
/* A node is used now. */
void cache_touch(const hd_cache *c, cache_node *k);
/* The page of a node leaves a tier to make room. */
void cache_raise_floor(hd_cache *c, int32_t n, hd_tier tier, hd_kv_group group);

/* cache_exchange.c */
/* Returns the node of the last of n pages, if all are cached; else NONE. */
int32_t cache_node_at(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n);
/* Frees a WINDOW page that is not whole, unless a sequence reads it. */
bool cache_drop_partial(hd_cache *c, int32_t n);

#endif
