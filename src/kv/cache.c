/* cache.c - the radix tree of cached prefixes: nodes in an array, children by hash, three
 * LRU heaps.
 *
 * refs counts the sequences whose path contains a node, so a node with refs 0 has only such
 * nodes below it. window_refs counts the sequences whose window still reaches into the
 * node's page. Every page is in exactly one place: a free list, a node, or a sequence's
 * private tail. */
#include "kv/cache.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/heap.h"

enum { ROOT = 0, NONE = -1 };

typedef struct node {
    int32_t parent, first_child, next, prev; /* next and prev: siblings */
    int32_t depth;                           /* number of pages above; the root has -1 */
    int32_t page[HD_N_KV_GROUPS];            /* WINDOW: NONE is a tombstone */
    int32_t snapshot;
    int32_t refs, window_refs;
    int32_t hash_next; /* chain of the child table */
    uint64_t hash;     /* of parent, salt and tokens */
    uint64_t salt;
    int64_t used;  /* tick of the last sequence that used it */
    bool turn_end; /* a sequence ended here */
} node;

typedef struct seq {
    bool open;
    uint64_t salt;
    int32_t node;        /* deepest node of the path */
    int32_t n_nodes;     /* pages that are nodes */
    int32_t n_pages;     /* all pages; those after n_nodes are private */
    int32_t window_from; /* first page that keeps its WINDOW page */
} seq;

typedef struct free_list {
    int32_t *items;
    int32_t n;
} free_list;

struct hd_cache {
    hd_cache_options o;
    node *nodes;      /* [n_nodes + 1], the root first */
    int32_t *tokens;  /* [n_nodes + 1, page_tokens] */
    int32_t *buckets; /* [n_buckets] heads of hash chains */
    int32_t n_buckets, n_nodes;
    free_list free_nodes, free_pages[HD_N_KV_GROUPS], free_snapshots;
    hd_heap leaves;    /* unpinned nodes without children, by recency */
    hd_heap windows;   /* nodes whose WINDOW page no sequence needs */
    hd_heap snapshots; /* nodes with a snapshot */
    seq *seqs;
    int32_t *table[HD_N_KV_GROUPS]; /* [max_seqs, seq_pages] */
    int32_t *path;                  /* [seq_pages] scratch of a match: its nodes */
    hd_page_copy *copies;
    int32_t n_copies, cap_copies;
    int64_t tick;
    int32_t n_pinned;       /* nodes with refs */
    int32_t lookback_pages; /* WINDOW pages that a sequence needs before its next position */
    int64_t matched_tokens, asked_tokens, evicted[HD_N_KV_GROUPS];
};

/* ---- memory ---- */

static bool take_free(free_list *f, int32_t n) {
    f->items = calloc((size_t)n + 1, sizeof *f->items);
    return f->items != NULL;
}

static void fill_free(free_list *f, int32_t n) {
    for (int32_t i = 0; i < n; i++) f->items[i] = n - 1 - i; /* low numbers first */
    f->n = n;
}

static bool take_memory(hd_cache *c, hd_err *err) {
    const hd_cache_options *o = &c->o;
    const size_t n = (size_t)c->n_nodes + 1;
    const size_t table = (size_t)o->max_seqs * (size_t)o->seq_pages;
    c->nodes = calloc(n, sizeof *c->nodes);
    c->tokens = calloc(n * (size_t)o->page_tokens, sizeof *c->tokens);
    c->buckets = calloc((size_t)c->n_buckets, sizeof *c->buckets);
    c->seqs = calloc((size_t)o->max_seqs, sizeof *c->seqs);
    c->copies = calloc((size_t)c->cap_copies, sizeof *c->copies);
    c->path = calloc((size_t)o->seq_pages, sizeof *c->path);
    bool good = c->nodes && c->tokens && c->buckets && c->seqs && c->copies && c->path;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        c->table[l] = calloc(table, sizeof *c->table[l]);
        good = good && c->table[l] && take_free(&c->free_pages[l], o->n_pages[l]);
    }
    return good && take_free(&c->free_nodes, c->n_nodes) &&
           take_free(&c->free_snapshots, o->n_snapshots) &&
           hd_heap_init(&c->leaves, c->n_nodes + 1, err) == HD_OK &&
           hd_heap_init(&c->windows, c->n_nodes + 1, err) == HD_OK &&
           hd_heap_init(&c->snapshots, c->n_nodes + 1, err) == HD_OK;
}

void hd_cache_reset(hd_cache *c) {
    const hd_cache_options *o = &c->o;
    fill_free(&c->free_nodes, c->n_nodes);
    fill_free(&c->free_snapshots, o->n_snapshots);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) fill_free(&c->free_pages[l], o->n_pages[l]);
    hd_heap_clear(&c->leaves);
    hd_heap_clear(&c->windows);
    hd_heap_clear(&c->snapshots);
    memset(c->seqs, 0, (size_t)o->max_seqs * sizeof *c->seqs);
    for (int32_t i = 0; i < c->n_buckets; i++) c->buckets[i] = NONE;
    c->n_copies = 0;
    c->n_pinned = 0;
    c->nodes[ROOT] = (node){
        .parent = NONE,
        .first_child = NONE,
        .next = NONE,
        .prev = NONE,
        .depth = -1,
        .page = {NONE, NONE},
        .snapshot = NONE
    };
}

hd_status hd_cache_open(hd_cache **out, const hd_cache_options *options, hd_err *err) {
    *out = NULL;
    hd_cache *c = calloc(1, sizeof *c);
    if (!c) return HD_FAIL(err, HD_ENOMEM, "no memory for a prefix cache");
    c->o = *options;
    c->n_nodes = options->n_pages[HD_KV_FULL];
    c->lookback_pages = (int32_t)hd_ceil_div(options->lookback, options->page_tokens);
    c->cap_copies = 2 * (options->n_pages[HD_KV_WINDOW] + options->n_snapshots) + 2;
    c->n_buckets = 64;
    while (c->n_buckets < 2 * c->n_nodes) c->n_buckets *= 2;
    if (!take_memory(c, err)) {
        hd_cache_close(c);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a prefix cache of %d pages",
                       options->n_pages[HD_KV_FULL]);
    }
    hd_cache_reset(c);
    *out = c;
    return HD_OK;
}

void hd_cache_close(hd_cache *c) {
    if (!c) return;
    free(c->nodes);
    free(c->tokens);
    free(c->buckets);
    free(c->seqs);
    free(c->copies);
    free(c->path);
    free(c->free_nodes.items);
    free(c->free_snapshots.items);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        free(c->table[l]);
        free(c->free_pages[l].items);
    }
    hd_heap_deinit(&c->leaves);
    hd_heap_deinit(&c->windows);
    hd_heap_deinit(&c->snapshots);
    free(c);
}

static int32_t pop(free_list *f) {
    return f->n ? f->items[--f->n] : NONE;
}

static void push(free_list *f, int32_t item) {
    f->items[f->n++] = item;
}

static int32_t *table_of(const hd_cache *c, int32_t l, hd_kv_group group) {
    return c->table[group] + (int64_t)l * c->o.seq_pages;
}

/* Adds a page copy; callers ensure that the list has room. */
static void add_copy(hd_cache *c, bool to_snapshot, int32_t page, int32_t snapshot) {
    assert(c->n_copies < c->cap_copies);
    c->copies[c->n_copies++] = (hd_page_copy){to_snapshot, page, snapshot};
}

/* ---- the tree ---- */

static int32_t *node_tokens(const hd_cache *c, int32_t n) {
    return c->tokens + (int64_t)n * c->o.page_tokens;
}

static uint64_t mix(uint64_t h, uint64_t word) {
    h = (h ^ word) * 0xD6E8FEB86659FD93u;
    return h ^ h >> 32;
}

/* Hashes a page in four lanes, because a single chain of multiplications would be slow.
 * Equality is always decided by comparing the tokens. */
static uint64_t hash_page(const hd_cache *c, int32_t parent, uint64_t salt,
                          const int32_t *tokens) {
    enum { LANES = 4, PER_WORD = sizeof(uint64_t) / sizeof *tokens };
    uint64_t lanes[LANES], word;
    int32_t i = 0;
    for (int k = 0; k < LANES; k++) lanes[k] = salt + (uint64_t)k * 0x9E3779B97F4A7C15u;
    for (; i + LANES * PER_WORD <= c->o.page_tokens; i += LANES * PER_WORD) {
        for (int k = 0; k < LANES; k++) {
            memcpy(&word, tokens + i + k * PER_WORD, sizeof word);
            lanes[k] = mix(lanes[k], word);
        }
    }
    for (; i < c->o.page_tokens; i++) lanes[0] = mix(lanes[0], (uint32_t)tokens[i]);
    uint64_t h = (uint64_t)(uint32_t)parent;
    for (int k = 0; k < LANES; k++) h = mix(h, lanes[k]);
    return h;
}

static int32_t *bucket_of(const hd_cache *c, uint64_t hash) {
    return &c->buckets[hash & (uint64_t)(c->n_buckets - 1)];
}

static int32_t find_child(const hd_cache *c, int32_t parent, uint64_t salt,
                          const int32_t *tokens) {
    const uint64_t hash = hash_page(c, parent, salt, tokens);
    for (int32_t n = *bucket_of(c, hash); n != NONE; n = c->nodes[n].hash_next) {
        const node *k = &c->nodes[n];
        if (k->hash == hash && k->parent == parent && k->salt == salt &&
            memcmp(node_tokens(c, n), tokens, (size_t)c->o.page_tokens * sizeof *tokens) == 0) {
            return n;
        }
    }
    return NONE;
}

/* Eviction key: recency, with ends of turns and branch points above everything else, because
 * a conversation will probably return to them. */
static int64_t window_key(const hd_cache *c, int32_t n) {
    const node *k = &c->nodes[n];
    bool branch = k->first_child != NONE && c->nodes[k->first_child].next != NONE;
    return k->used + (branch || k->turn_end ? (int64_t)1 << 62 : 0);
}

/* A snapshot of a page that is also on the device is evicted first. */
static int64_t snapshot_key(const hd_cache *c, int32_t n) {
    const bool spare = c->nodes[n].page[HD_KV_WINDOW] != NONE;
    return window_key(c, n) - (spare ? INT64_MAX : 0);
}

/* Updates the heaps after any change of a node's state. */
static void finish(hd_cache *c, int32_t n) {
    const node *k = &c->nodes[n];
    if (n == ROOT) return;
    if (k->refs == 0 && k->first_child == NONE) {
        hd_heap_put(&c->leaves, n, k->used);
    } else {
        hd_heap_remove(&c->leaves, n);
    }
    if (k->page[HD_KV_WINDOW] != NONE && k->window_refs == 0) {
        hd_heap_put(&c->windows, n, window_key(c, n));
    } else {
        hd_heap_remove(&c->windows, n);
    }
    const bool awaited = k->window_refs > 0 && k->page[HD_KV_WINDOW] == NONE;
    if (k->snapshot != NONE && !awaited) {
        hd_heap_put(&c->snapshots, n, snapshot_key(c, n));
    } else {
        hd_heap_remove(&c->snapshots, n);
    }
}

static int32_t add_node(hd_cache *c, int32_t parent, uint64_t salt, const int32_t *tokens) {
    const int32_t n = pop(&c->free_nodes);
    assert(n != NONE); /* every node owns a FULL page, and there are as many nodes as pages */
    const int32_t id = n + 1;
    node *k = &c->nodes[id], *p = &c->nodes[parent];
    *k = (node){
        .parent = parent,
        .first_child = NONE,
        .next = p->first_child,
        .prev = NONE,
        .depth = p->depth + 1,
        .page = {NONE, NONE},
        .snapshot = NONE,
        .salt = salt,
        .hash = hash_page(c, parent, salt, tokens),
        .used = c->tick
    };
    if (p->first_child != NONE) c->nodes[p->first_child].prev = id;
    p->first_child = id;
    memcpy(node_tokens(c, id), tokens, (size_t)c->o.page_tokens * sizeof *tokens);
    int32_t *bucket = bucket_of(c, k->hash);
    k->hash_next = *bucket;
    *bucket = id;
    finish(c, parent);
    return id;
}

static void unlink_hash(hd_cache *c, int32_t n) {
    int32_t *at = bucket_of(c, c->nodes[n].hash);
    while (*at != n) at = &c->nodes[*at].hash_next;
    *at = c->nodes[n].hash_next;
}

/* Removes an unpinned leaf from the tree and frees all its pages. */
static void drop_leaf(hd_cache *c, int32_t n) {
    node *k = &c->nodes[n];
    assert(k->refs == 0 && k->window_refs == 0 && k->first_child == NONE);
    hd_heap_remove(&c->leaves, n);
    hd_heap_remove(&c->windows, n);
    hd_heap_remove(&c->snapshots, n);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        if (k->page[l] != NONE) push(&c->free_pages[l], k->page[l]);
    }
    if (k->snapshot != NONE) push(&c->free_snapshots, k->snapshot);
    unlink_hash(c, n);
    if (k->next != NONE) c->nodes[k->next].prev = k->prev;
    if (k->prev != NONE) c->nodes[k->prev].next = k->next;
    if (c->nodes[k->parent].first_child == n) c->nodes[k->parent].first_child = k->next;
    finish(c, k->parent);
    push(&c->free_nodes, n - 1);
}

/* ---- pages ---- */

/* Returns a snapshot slot for a node that is about to lose its WINDOW page: a free one, or
 * that of a node with a lower key. */
static int32_t take_snapshot(hd_cache *c, int32_t for_node) {
    if (c->free_snapshots.n) return pop(&c->free_snapshots);
    const int32_t other = hd_heap_min(&c->snapshots);
    if (other < 0 || snapshot_key(c, other) > window_key(c, for_node)) return NONE;
    const int32_t slot = c->nodes[other].snapshot;
    c->nodes[other].snapshot = NONE;
    finish(c, other);
    return slot;
}

/* Evicts the WINDOW page with the lowest key; its content is saved as a snapshot if
 * possible. */
static bool evict_window(hd_cache *c) {
    const int32_t n = hd_heap_min(&c->windows);
    if (n < 0) return false;
    node *k = &c->nodes[n];
    const int32_t page = k->page[HD_KV_WINDOW];
    if (k->snapshot == NONE && c->n_copies < c->cap_copies) {
        k->snapshot = take_snapshot(c, n);
        if (k->snapshot != NONE) add_copy(c, true, page, k->snapshot);
    }
    k->page[HD_KV_WINDOW] = NONE;
    finish(c, n);
    push(&c->free_pages[HD_KV_WINDOW], page);
    c->evicted[HD_KV_WINDOW]++;
    return true;
}

static bool evict_entries(hd_cache *c) {
    const int32_t n = hd_heap_min(&c->leaves);
    if (n < 0) return false;
    drop_leaf(c, n);
    c->evicted[HD_KV_FULL]++;
    return true;
}

static int32_t take_page(hd_cache *c, hd_kv_group group) {
    if (!c->free_pages[group].n) {
        bool evicted = group == HD_KV_WINDOW ? evict_window(c) : evict_entries(c);
        if (!evicted) return NONE;
    }
    return pop(&c->free_pages[group]);
}

/* ---- matching ---- */

/* Writes the nodes along tokens to c->path. Returns how many of them form the longest valid
 * match. */
static int32_t walk(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n) {
    const int32_t page = c->o.page_tokens;
    int32_t at = ROOT, best = 0, live = 0;
    for (int32_t d = 0; d < c->o.seq_pages && (int64_t)(d + 1) * page < n; d++) {
        at = find_child(c, at, salt, tokens + (int64_t)d * page);
        if (at == NONE) break;
        c->path[d] = at;
        const node *k = &c->nodes[at];
        live = k->page[HD_KV_WINDOW] != NONE || k->snapshot != NONE ? live + 1 : 0;
        if (live >= hd_min_i32(c->lookback_pages, d + 1)) best = d + 1;
    }
    return best;
}

int32_t hd_cache_match(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n) {
    return walk(c, salt, tokens, n) * c->o.page_tokens;
}

/* ---- pinning ---- */

static void pin(hd_cache *c, int32_t n) {
    node *k = &c->nodes[n];
    c->n_pinned += k->refs++ == 0;
    k->used = c->tick;
    finish(c, n);
}

static void unpin(hd_cache *c, int32_t n) {
    node *k = &c->nodes[n];
    assert(k->refs > 0);
    c->n_pinned -= --k->refs == 0;
    finish(c, n);
}

static void hold_window(hd_cache *c, int32_t n) {
    c->nodes[n].window_refs++;
    finish(c, n);
}

static void drop_window(hd_cache *c, int32_t n) {
    assert(c->nodes[n].window_refs > 0);
    c->nodes[n].window_refs--;
    finish(c, n);
}

/* Allocates a WINDOW page for a node and fills it from its snapshot. A window_ref of the
 * node keeps both from eviction meanwhile. */
static bool restore_window(hd_cache *c, int32_t n) {
    if (c->nodes[n].page[HD_KV_WINDOW] != NONE) return true;
    if (c->n_copies + 2 > c->cap_copies) return false; /* an eviction may add a copy first */
    const int32_t page = take_page(c, HD_KV_WINDOW);
    if (page == NONE) return false;
    add_copy(c, false, page, c->nodes[n].snapshot);
    c->nodes[n].page[HD_KV_WINDOW] = page;
    finish(c, n);
    return true;
}

static void let_go(hd_cache *c, seq *l, int32_t id) {
    int32_t n = l->node;
    for (int32_t d = l->n_nodes - 1; d >= 0; d--) {
        if (d >= l->window_from && c->lookback_pages) drop_window(c, n);
        unpin(c, n);
        n = c->nodes[n].parent;
    }
    for (int32_t p = l->n_nodes; p < l->n_pages; p++) {
        push(&c->free_pages[HD_KV_FULL], table_of(c, id, HD_KV_FULL)[p]);
        if (c->lookback_pages) {
            push(&c->free_pages[HD_KV_WINDOW], table_of(c, id, HD_KV_WINDOW)[p]);
        }
    }
    *l = (seq){0};
}

static void clear_table(hd_cache *c, int32_t id) {
    for (int group = 0; group < HD_N_KV_GROUPS; group++) {
        int32_t *table = table_of(c, id, (hd_kv_group)group);
        for (int32_t p = 0; p < c->o.seq_pages; p++) table[p] = NONE;
    }
}

hd_status hd_cache_acquire(hd_cache *c, int32_t id, uint64_t salt, const int32_t *tokens,
                           int32_t n, int32_t *hit) {
    seq *l = &c->seqs[id];
    assert(!l->open);
    c->tick++;
    const int32_t d = walk(c, salt, tokens, n);
    *hit = 0;
    clear_table(c, id);
    *l = (seq){.open = true,
               .salt = salt,
               .node = d ? c->path[d - 1] : ROOT,
               .n_nodes = d,
               .n_pages = d,
               .window_from = hd_max_i32(0, d - c->lookback_pages)};
    for (int32_t p = 0; p < d; p++) {
        pin(c, c->path[p]);
        if (p >= l->window_from && c->lookback_pages) hold_window(c, c->path[p]);
        table_of(c, id, HD_KV_FULL)[p] = c->nodes[c->path[p]].page[HD_KV_FULL];
    }
    for (int32_t p = l->window_from; p < d && c->lookback_pages; p++) {
        if (!restore_window(c, c->path[p])) {
            let_go(c, l, id);
            return HD_EAGAIN;
        }
        table_of(c, id, HD_KV_WINDOW)[p] = c->nodes[c->path[p]].page[HD_KV_WINDOW];
    }
    *hit = d * c->o.page_tokens;
    c->asked_tokens += n;
    c->matched_tokens += *hit;
    return HD_OK;
}

static bool add_private_page(hd_cache *c, int32_t id, int32_t at) {
    const int32_t entries = take_page(c, HD_KV_FULL);
    if (entries == NONE) return false;
    if (c->lookback_pages) {
        const int32_t window = take_page(c, HD_KV_WINDOW);
        if (window == NONE) {
            push(&c->free_pages[HD_KV_FULL], entries);
            return false;
        }
        table_of(c, id, HD_KV_WINDOW)[at] = window;
    }
    table_of(c, id, HD_KV_FULL)[at] = entries;
    return true;
}

static void drop_private_page(hd_cache *c, int32_t id, int32_t at) {
    for (int group = 0; group < HD_N_KV_GROUPS; group++) {
        int32_t *page = &table_of(c, id, (hd_kv_group)group)[at];
        if (*page != NONE) push(&c->free_pages[group], *page);
        *page = NONE;
    }
}

hd_status hd_cache_extend(hd_cache *c, int32_t id, int32_t n_tokens) {
    seq *l = &c->seqs[id];
    const int32_t want = (int32_t)hd_ceil_div(n_tokens, c->o.page_tokens), had = l->n_pages;
    assert(l->open && want <= c->o.seq_pages);
    while (l->n_pages < want) {
        if (!add_private_page(c, id, l->n_pages)) {
            while (l->n_pages > had) drop_private_page(c, id, --l->n_pages);
            return HD_EAGAIN;
        }
        l->n_pages++;
    }
    return HD_OK;
}

/* ---- growing the tree ---- */

/* Another sequence has already committed this sequence's first private page: share its node.
 * Equal prefixes have equal bits (design D8), so the exchange is invisible. */
static void share_page(hd_cache *c, int32_t id, int32_t at, int32_t n) {
    node *k = &c->nodes[n];
    int32_t *entries = &table_of(c, id, HD_KV_FULL)[at];
    int32_t *window = &table_of(c, id, HD_KV_WINDOW)[at];
    push(&c->free_pages[HD_KV_FULL], *entries);
    *entries = k->page[HD_KV_FULL];
    if (!c->lookback_pages) return;
    if (k->page[HD_KV_WINDOW] == NONE) {
        k->page[HD_KV_WINDOW] = *window;
    } else {
        push(&c->free_pages[HD_KV_WINDOW], *window);
        *window = k->page[HD_KV_WINDOW];
    }
}

static void commit_page(hd_cache *c, int32_t id, const int32_t *tokens) {
    seq *l = &c->seqs[id];
    const int32_t at = l->n_nodes;
    int32_t n = find_child(c, l->node, l->salt, tokens);
    if (n != NONE) {
        share_page(c, id, at, n);
    } else {
        n = add_node(c, l->node, l->salt, tokens);
        for (int group = 0; group < HD_N_KV_GROUPS; group++) {
            c->nodes[n].page[group] = table_of(c, id, (hd_kv_group)group)[at];
        }
    }
    pin(c, n);
    if (c->lookback_pages) hold_window(c, n);
    l->node = n;
    l->n_nodes++;
}

static void release_passed_windows(hd_cache *c, int32_t id, int32_t n_done) {
    seq *l = &c->seqs[id];
    const int32_t first = hd_max_i32(0, n_done - c->o.lookback) / c->o.page_tokens;
    if (!c->lookback_pages || first <= l->window_from) return;
    int32_t n = l->node;
    for (int32_t p = l->n_nodes - 1; p >= l->window_from; p--, n = c->nodes[n].parent) {
        if (p >= first) continue;
        drop_window(c, n);
        table_of(c, id, HD_KV_WINDOW)[p] = NONE;
    }
    l->window_from = first;
}

void hd_cache_commit(hd_cache *c, int32_t id, const int32_t *tokens, int32_t n_done) {
    seq *l = &c->seqs[id];
    assert(l->open && hd_ceil_div(n_done, c->o.page_tokens) <= l->n_pages);
    while ((int64_t)(l->n_nodes + 1) * c->o.page_tokens <= n_done) {
        commit_page(c, id, tokens + (int64_t)l->n_nodes * c->o.page_tokens);
    }
    release_passed_windows(c, id, n_done);
}

void hd_cache_release(hd_cache *c, int32_t id, bool end_of_turn) {
    seq *l = &c->seqs[id];
    assert(l->open);
    c->tick++;
    if (end_of_turn && l->node != ROOT) c->nodes[l->node].turn_end = true;
    int32_t n = l->node;
    for (int32_t d = l->n_nodes; d > 0; d--, n = c->nodes[n].parent) c->nodes[n].used = c->tick;
    let_go(c, l, id);
}

void hd_cache_flush(hd_cache *c) {
    for (int32_t n; (n = hd_heap_min(&c->leaves)) >= 0;) drop_leaf(c, n);
}

/* ---- tables, copies, statistics ---- */

const int32_t *hd_cache_block_table(const hd_cache *c, int32_t id, hd_kv_group group) {
    return table_of(c, id, group);
}

const hd_page_copy *hd_cache_copies(const hd_cache *c, int32_t *n) {
    *n = c->n_copies;
    return c->copies;
}

void hd_cache_copied(hd_cache *c) {
    c->n_copies = 0;
}

hd_cache_stats hd_cache_read_stats(const hd_cache *c) {
    hd_cache_stats s = {.nodes = c->n_nodes - c->free_nodes.n,
                        .snapshots = c->o.n_snapshots - c->free_snapshots.n,
                        .matched_tokens = c->matched_tokens,
                        .asked_tokens = c->asked_tokens};
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        s.pages[l] = c->o.n_pages[l];
        s.free[l] = c->free_pages[l].n;
        s.evicted[l] = c->evicted[l];
    }
    s.evictable[HD_KV_FULL] = s.nodes - c->n_pinned;
    s.evictable[HD_KV_WINDOW] = c->windows.n;
    return s;
}

/* ---- checking ---- */

typedef struct census {
    const hd_cache *c;
    int32_t *refs, *window_refs, *seen[HD_N_KV_GROUPS];
    hd_err *err;
} census;

static hd_status broken(const census *s, const char *what, int64_t number) {
    return HD_FAIL(s->err, HD_EINVAL, "prefix cache: %s (%lld)", what, (long long)number);
}

static void count_seq(const census *s, int32_t id) {
    const hd_cache *c = s->c;
    const seq *l = &c->seqs[id];
    int32_t n = l->node;
    for (int32_t d = l->n_nodes - 1; d >= 0; d--, n = c->nodes[n].parent) {
        s->refs[n]++;
        if (d >= l->window_from && c->lookback_pages) s->window_refs[n]++;
    }
    for (int32_t p = l->n_nodes; p < l->n_pages; p++) {
        for (int group = 0; group < (c->lookback_pages ? HD_N_KV_GROUPS : 1); group++) {
            s->seen[group][table_of(c, id, (hd_kv_group)group)[p]]++;
        }
    }
}

static hd_status check_node(const census *s, int32_t n) {
    const hd_cache *c = s->c;
    const node *k = &c->nodes[n];
    if (s->refs[n] != k->refs) return broken(s, "refs differ from the sequences' paths", n);
    if (s->window_refs[n] != k->window_refs) return broken(s, "window refs differ", n);
    if (k->depth != c->nodes[k->parent].depth + 1) return broken(s, "wrong depth", n);
    if (k->window_refs > 0 && k->page[HD_KV_WINDOW] == NONE) {
        return broken(s, "a held window page is gone", n);
    }
    if (hd_heap_has(&c->leaves, n) != (k->refs == 0 && k->first_child == NONE)) {
        return broken(s, "leaf heap is wrong", n);
    }
    if (hd_heap_has(&c->windows, n) != (k->window_refs == 0 && k->page[HD_KV_WINDOW] != NONE)) {
        return broken(s, "window heap is wrong", n);
    }
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        if (k->page[l] != NONE) s->seen[l][k->page[l]]++;
    }
    return HD_OK;
}

static hd_status check_all(const census *s) {
    const hd_cache *c = s->c;
    int32_t n_seen = 0, n_pinned = 0;
    for (int32_t id = 0; id < c->o.max_seqs; id++) {
        if (c->seqs[id].open) count_seq(s, id);
    }
    for (int32_t b = 0; b < c->n_buckets; b++) {
        for (int32_t n = c->buckets[b]; n != NONE; n = c->nodes[n].hash_next) {
            if (n_seen++ == c->n_nodes) return broken(s, "a chain has no end", b);
            HD_TRY(check_node(s, n));
            n_pinned += c->nodes[n].refs > 0;
        }
    }
    if (n_seen != c->n_nodes - c->free_nodes.n) return broken(s, "lost nodes", n_seen);
    if (n_pinned != c->n_pinned) return broken(s, "pinned nodes miscounted", n_pinned);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        for (int32_t i = 0; i < c->free_pages[l].n; i++)
            s->seen[l][c->free_pages[l].items[i]]++;
        for (int32_t p = 0; p < c->o.n_pages[l]; p++) {
            if (s->seen[l][p] != 1) return broken(s, "a page is not in exactly one place", p);
        }
    }
    return HD_OK;
}

hd_status hd_cache_check(const hd_cache *c, bool idle, hd_err *err) {
    census s = {.c = c, .err = err};
    s.refs = calloc((size_t)c->n_nodes + 1, sizeof *s.refs);
    s.window_refs = calloc((size_t)c->n_nodes + 1, sizeof *s.window_refs);
    bool good = s.refs && s.window_refs;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        s.seen[l] = calloc((size_t)c->o.n_pages[l] + 1, sizeof *s.seen[l]);
        good = good && s.seen[l];
    }
    hd_status st = good ? check_all(&s) : HD_FAIL(err, HD_ENOMEM, "no memory for a check");
    for (int32_t id = 0; idle && st == HD_OK && id < c->o.max_seqs; id++) {
        if (c->seqs[id].open) st = broken(&s, "a sequence without an owner is open", id);
    }
    free(s.refs);
    free(s.window_refs);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) free(s.seen[l]);
    return st;
}
