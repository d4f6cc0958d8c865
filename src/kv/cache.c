/* cache.c - the radix tree of cached prefixes: nodes in an array, children by hash, a heap of
 * what may leave for each tier and KV group. What it does for the disk tier is in cache_disk.c.
 *
 * refs counts the sequences whose path contains a node, so a node with refs 0 has only such
 * nodes below it. window_refs counts the sequences whose window still reaches into the
 * node's page. Every page of a tier is in exactly one place: a free list, a node, or a
 * sequence's private tail, or is the WINDOW page that a sequence keeps for itself at a node
 * (share_window). The nodes whose FULL page is on the device are a tree with the same
 * root: a page leaves the device before those above it, and comes back after them. */
#include "kv/cache.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "kv/cache_internal.h"

/* ---- memory ---- */

static bool take_free(cache_free_list *f, int32_t n) {
    f->items = calloc((size_t)n + 1, sizeof *f->items);
    return f->items != NULL;
}

static void fill_free(cache_free_list *f, int32_t n) {
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
    c->tiers = calloc((size_t)o->seq_pages * HD_N_KV_GROUPS, sizeof *c->tiers);
    bool good =
        c->nodes && c->tokens && c->buckets && c->seqs && c->copies && c->path && c->tiers;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        c->table[l] = calloc(table, sizeof *c->table[l]);
        c->reserved[l] = calloc((size_t)o->n_host[l] + 1, sizeof *c->reserved[l]);
        good = good && c->table[l] && c->reserved[l] &&
               hd_heap_init(&c->writable[l], c->n_nodes + 1, err) == HD_OK &&
               hd_heap_init(&c->unsaved[l], c->n_nodes + 1, err) == HD_OK;
        for (int t = 0; t < HD_N_TIERS; t++) {
            good = good && take_free(&c->free_pages[t][l], cache_n_pages(c, t, l)) &&
                   hd_heap_init(&c->evictable[t][l], c->n_nodes + 1, err) == HD_OK;
        }
    }
    return good && take_free(&c->free_nodes, c->n_nodes);
}

void hd_cache_reset(hd_cache *c) {
    const hd_cache_options *o = &c->o;
    fill_free(&c->free_nodes, c->n_nodes);
    for (int t = 0; t < HD_N_TIERS; t++) {
        for (int l = 0; l < HD_N_KV_GROUPS; l++) {
            fill_free(&c->free_pages[t][l], cache_n_pages(c, t, l));
            hd_heap_clear(&c->evictable[t][l]);
        }
    }
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        hd_heap_clear(&c->writable[l]);
        hd_heap_clear(&c->unsaved[l]);
        memset(c->reserved[l], 0, (size_t)o->n_host[l] * sizeof *c->reserved[l]);
    }
    memset(c->nodes, 0, ((size_t)c->n_nodes + 1) * sizeof *c->nodes);
    memset(c->seqs, 0, (size_t)o->max_seqs * sizeof *c->seqs);
    for (int32_t i = 0; i < c->n_buckets; i++) c->buckets[i] = NONE;
    c->n_copies = 0;
    c->n_pinned = c->n_resident = 0;
    c->nodes[ROOT] = (cache_node){
        .parent = NONE,
        .first_child = NONE,
        .next = NONE,
        .prev = NONE,
        .depth = -1,
        .device = {{NONE}, {NONE}},
        .host = {{NONE}, {NONE}}
    };
}

hd_status hd_cache_open(hd_cache **out, const hd_cache_options *options, hd_err *err) {
    *out = NULL;
    hd_cache *c = calloc(1, sizeof *c);
    if (!c) return HD_FAIL(err, HD_ENOMEM, "no memory for a prefix cache");
    c->o = *options;
    c->has_names = options->name_key != NULL;
    if (c->has_names) memcpy(c->name_key, options->name_key, sizeof c->name_key);
    c->n_nodes = options->n_pages[HD_KV_FULL] + options->n_host[HD_KV_FULL];
    c->lookback_pages = (int32_t)hd_ceil_div(options->lookback, options->page_tokens);
    c->cap_copies = 2;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        if (options->n_host[l]) c->cap_copies += 2 * (options->n_pages[l] + options->n_host[l]);
    }
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
    free(c->tiers);
    free(c->free_nodes.items);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        free(c->table[l]);
        free(c->reserved[l]);
        hd_heap_deinit(&c->writable[l]);
        hd_heap_deinit(&c->unsaved[l]);
        for (int t = 0; t < HD_N_TIERS; t++) {
            free(c->free_pages[t][l].items);
            hd_heap_deinit(&c->evictable[t][l]);
        }
    }
    free(c);
}

int32_t cache_pop(cache_free_list *f) {
    return f->n ? f->items[--f->n] : NONE;
}

void cache_push(cache_free_list *f, int32_t item) {
    f->items[f->n++] = item;
}

static void push_device(hd_cache *c, hd_kv_group group, hd_device_page page) {
    cache_push(&c->free_pages[HD_TIER_DEVICE][group], page.n);
}

hd_host_page cache_pop_host(hd_cache *c, hd_kv_group group) {
    return (hd_host_page){cache_pop(&c->free_pages[HD_TIER_HOST][group])};
}

void cache_push_host(hd_cache *c, hd_kv_group group, hd_host_page page) {
    cache_push(&c->free_pages[HD_TIER_HOST][group], page.n);
}

void cache_add_copy(hd_cache *c, hd_kv_group group, bool save, hd_device_page device,
                    hd_host_page host) {
    assert(c->n_copies < c->cap_copies);
    c->copies[c->n_copies++] = (hd_page_copy){group, save, device, host};
    (save ? c->saved : c->loaded)[group]++;
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

int32_t cache_find_child(const hd_cache *c, int32_t parent, uint64_t salt, uint32_t epoch,
                         const int32_t *tokens) {
    const uint64_t hash = hash_page(c, parent, salt, tokens);
    for (int32_t n = *bucket_of(c, hash); n != NONE; n = c->nodes[n].hash_next) {
        const cache_node *k = &c->nodes[n];
        if (k->hash == hash && k->parent == parent && k->salt == salt && k->epoch == epoch &&
            memcmp(node_tokens(c, n), tokens, (size_t)c->o.page_tokens * sizeof *tokens) == 0) {
            return n;
        }
    }
    return NONE;
}

/* A page of host memory that is on the device too. It leaves first. */
static bool is_spare(const hd_cache *c, int32_t n, hd_tier tier, hd_kv_group group) {
    return tier == HD_TIER_HOST && cache_is_in(&c->nodes[n], HD_TIER_DEVICE, group);
}

static void put_or_remove(hd_heap *heap, int32_t n, bool put, int64_t key) {
    if (put) {
        hd_heap_put(heap, n, key);
    } else {
        hd_heap_remove(heap, n);
    }
}

/* The longest finished first, and of one sequence its beginning. */
static void finish_unwritten(hd_cache *c, int32_t n) {
    enum { DEPTH_BITS = 24 };
    const cache_node *k = &c->nodes[n];
    const int64_t key = (int64_t)((uint64_t)k->used << DEPTH_BITS) + k->depth;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        const bool unwritten = cache_is_unwritten(c, k, (hd_kv_group)l);
        const bool in_host = cache_is_in(k, HD_TIER_HOST, (hd_kv_group)l);
        put_or_remove(&c->writable[l], n, unwritten && in_host && c->has_names, key);
        put_or_remove(&c->unsaved[l], n, unwritten && !in_host, key);
    }
}

void cache_finish(hd_cache *c, int32_t n) {
    if (n == ROOT) return;
    if (c->has_names || c->o.write_through) finish_unwritten(c, n);
    for (int t = 0; t < HD_N_TIERS; t++) {
        for (int l = 0; l < HD_N_KV_GROUPS; l++) {
            const hd_tier tier = (hd_tier)t;
            const hd_kv_group group = (hd_kv_group)l;
            if (!cache_may_leave(&c->nodes[n], tier, group)) {
                hd_heap_remove(&c->evictable[t][l], n);
                continue;
            }
            hd_heap_put(&c->evictable[t][l], n,
                        cache_key(c, n, tier, group) -
                            (is_spare(c, n, tier, group) ? INT64_MAX : 0));
        }
    }
}

void cache_set_device(hd_cache *c, int32_t n, hd_kv_group group, hd_device_page page) {
    cache_node *k = &c->nodes[n];
    const int32_t more = (page.n != NONE) - (k->device[group].n != NONE);
    k->device[group] = page;
    if (group == HD_KV_FULL) {
        c->n_resident += more;
        c->nodes[k->parent].n_resident += more;
        cache_finish(c, k->parent);
    }
    cache_finish(c, n);
}

void cache_set_host(hd_cache *c, int32_t n, hd_kv_group group, hd_host_page page) {
    c->nodes[n].host[group] = page;
    cache_finish(c, n);
}

/* Frees the page of a node in a tier, if it has one. */
void cache_free_page(hd_cache *c, int32_t n, hd_tier tier, hd_kv_group group) {
    const cache_node *k = &c->nodes[n];
    if (!cache_is_in(k, tier, group)) return;
    if (tier == HD_TIER_DEVICE) {
        push_device(c, group, k->device[group]);
        cache_set_device(c, n, group, (hd_device_page){NONE});
    } else {
        cache_push_host(c, group, k->host[group]);
        cache_set_host(c, n, group, (hd_host_page){NONE});
    }
}

int32_t cache_add_node(hd_cache *c, int32_t parent, uint64_t salt, uint32_t epoch,
                       const int32_t *tokens) {
    const int32_t n = cache_pop(&c->free_nodes);
    assert(n != NONE); /* every node owns a FULL page in a tier: there are as many nodes */
    const int32_t id = n + 1;
    cache_node *k = &c->nodes[id], *p = &c->nodes[parent];
    *k = (cache_node){
        .parent = parent,
        .first_child = NONE,
        .next = p->first_child,
        .prev = NONE,
        .depth = p->depth + 1,
        .device = {{NONE}, {NONE}},
        .host = {{NONE}, {NONE}},
        .salt = salt,
        .epoch = epoch,
        .hash = hash_page(c, parent, salt, tokens)
    };
    cache_touch(c, k);
    if (p->first_child != NONE) c->nodes[p->first_child].prev = id;
    p->first_child = id;
    memcpy(node_tokens(c, id), tokens, (size_t)c->o.page_tokens * sizeof *tokens);
    if (c->has_names) {
        const hd_page_name above = parent == ROOT ? c->root : p->name;
        k->name = hd_page_name_of(c->name_key, above, salt, tokens, c->o.page_tokens);
    }
    int32_t *bucket = bucket_of(c, k->hash);
    k->hash_next = *bucket;
    *bucket = id;
    cache_finish(c, parent);
    return id;
}

static void unlink_hash(hd_cache *c, int32_t n) {
    int32_t *at = bucket_of(c, c->nodes[n].hash);
    while (*at != n) at = &c->nodes[*at].hash_next;
    *at = c->nodes[n].hash_next;
}

/* A page that is being written to the disk is freed when that has ended. */
static void keep_written_pages(hd_cache *c, int32_t n) {
    cache_node *k = &c->nodes[n];
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        if (!k->writing[l]) continue;
        c->reserved[l][k->host[l].n] = true;
        k->writing[l] = false;
        cache_set_host(c, n, (hd_kv_group)l, (hd_host_page){NONE});
    }
}

/* Removes an unpinned leaf from the tree and frees all its pages. */
static void drop_leaf(hd_cache *c, int32_t n) {
    cache_node *k = &c->nodes[n];
    assert(k->refs == 0 && k->window_refs == 0 && k->first_child == NONE);
    keep_written_pages(c, n);
    for (int t = 0; t < HD_N_TIERS; t++) {
        for (int l = 0; l < HD_N_KV_GROUPS; l++) {
            cache_free_page(c, n, (hd_tier)t, (hd_kv_group)l);
        }
    }
    unlink_hash(c, n);
    if (k->next != NONE) c->nodes[k->next].prev = k->prev;
    if (k->prev != NONE) c->nodes[k->prev].next = k->next;
    if (c->nodes[k->parent].first_child == n) c->nodes[k->parent].first_child = k->next;
    cache_finish(c, k->parent);
    k->released = false;
    k->name = (hd_page_name){0, 0};
    cache_finish(c, n);
    cache_push(&c->free_nodes, n - 1);
}

/* Removes an unpinned node from the tree, after all nodes below it. */
static void drop_branch(hd_cache *c, int32_t n) {
    for (int32_t leaf = NONE; leaf != n;) {
        leaf = n;
        while (c->nodes[leaf].first_child != NONE) leaf = c->nodes[leaf].first_child;
        drop_leaf(c, leaf);
    }
}

/* ---- pages ---- */

void cache_evict_host(hd_cache *c, int32_t n, hd_kv_group group) {
    if (!is_spare(c, n, HD_TIER_HOST, group)) cache_raise_floor(c, n, HD_TIER_HOST, group);
    if (group == HD_KV_FULL && cache_is_away(&c->nodes[n], group)) {
        drop_leaf(c, n);
    } else {
        cache_free_page(c, n, HD_TIER_HOST, group);
    }
}

/* Returns a page of host memory for a node that is about to lose its page on the device: a
 * free one, or that of a node of less worth. */
static hd_host_page take_host(hd_cache *c, int32_t for_node, hd_kv_group group) {
    if (!c->free_pages[HD_TIER_HOST][group].n) {
        const int32_t other = hd_heap_min(&c->evictable[HD_TIER_HOST][group]);
        if (other < 0) return (hd_host_page){NONE};
        if (!is_spare(c, other, HD_TIER_HOST, group) &&
            cache_key(c, other, HD_TIER_HOST, group) >
                cache_key(c, for_node, HD_TIER_HOST, group)) {
            return (hd_host_page){NONE};
        }
        cache_evict_host(c, other, group);
    }
    return cache_pop_host(c, group);
}

bool cache_save_page(hd_cache *c, int32_t n, hd_kv_group group) {
    cache_node *k = &c->nodes[n];
    if (!cache_is_in(k, HD_TIER_HOST, group) && c->o.n_host[group] &&
        c->n_copies < c->cap_copies) {
        const hd_host_page host = take_host(c, n, group);
        if (host.n == NONE) return false;
        cache_add_copy(c, group, true, k->device[group], host);
        if (!c->has_names) k->clean[group] = true;
        cache_set_host(c, n, group, host);
    }
    return cache_is_in(k, HD_TIER_HOST, group);
}

/* Evicts the page of least worth from the device, to host memory if possible. A FULL page
 * that is then nowhere goes with its branch. */
static bool evict(hd_cache *c, hd_kv_group group) {
    const int32_t n = hd_heap_min(&c->evictable[HD_TIER_DEVICE][group]);
    if (n < 0) return false;
    cache_raise_floor(c, n, HD_TIER_DEVICE, group);
    if (!cache_save_page(c, n, group) && group == HD_KV_FULL) {
        drop_branch(c, n);
    } else {
        cache_free_page(c, n, HD_TIER_DEVICE, group);
    }
    c->evicted[group]++;
    return true;
}

static hd_device_page take_page(hd_cache *c, hd_kv_group group) {
    cache_free_list *f = &c->free_pages[HD_TIER_DEVICE][group];
    if (f->n || evict(c, group)) return (hd_device_page){cache_pop(f)};
    c->lacking = group;
    return (hd_device_page){NONE};
}

/* ---- pinning ---- */

void cache_pin(hd_cache *c, int32_t n) {
    cache_node *k = &c->nodes[n];
    c->n_pinned += k->refs++ == 0;
    cache_touch(c, k);
    cache_finish(c, n);
}

void cache_unpin(hd_cache *c, int32_t n) {
    cache_node *k = &c->nodes[n];
    assert(k->refs > 0);
    c->n_pinned -= --k->refs == 0;
    cache_finish(c, n);
}

static void hold_window(hd_cache *c, int32_t n) {
    c->nodes[n].window_refs++;
    cache_finish(c, n);
}

static void drop_window(hd_cache *c, int32_t n) {
    assert(c->nodes[n].window_refs > 0);
    c->nodes[n].window_refs--;
    cache_finish(c, n);
}

/* Brings the page of a node to the device. A ref of the node, of a WINDOW page a window_ref,
 * keeps it from eviction meanwhile. */
static bool load_page(hd_cache *c, int32_t n, hd_kv_group group) {
    if (!cache_is_away(&c->nodes[n], group)) return true;
    if (c->n_copies + 2 > c->cap_copies) { /* an eviction may add a copy first */
        c->lacking = group;
        return false;
    }
    const hd_device_page page = take_page(c, group);
    if (page.n == NONE) return false;
    cache_add_copy(c, group, false, page, c->nodes[n].host[group]);
    if (group == HD_KV_FULL && c->nodes[n].from_disk) {
        c->disk_tokens += c->o.page_tokens;
        c->nodes[n].from_disk = false;
    }
    cache_set_device(c, n, group, page);
    return true;
}

/* Brings all pages of a sequence's path to the device that it reads. */
static bool load_path(hd_cache *c, int32_t id) {
    const cache_seq *l = &c->seqs[id];
    for (int32_t p = 0; p < l->n_nodes; p++) {
        const int32_t n = c->path[p];
        const hd_device_page *page = c->nodes[n].device;
        if (!load_page(c, n, HD_KV_FULL)) return false;
        cache_table(c, id, HD_KV_FULL)[p] = page[HD_KV_FULL];
        if (p < l->window_from || p < l->rebuilt || !c->lookback_pages) continue;
        if (!load_page(c, n, HD_KV_WINDOW)) return false;
        cache_table(c, id, HD_KV_WINDOW)[p] = page[HD_KV_WINDOW];
    }
    return true;
}

/* A sequence no longer reads the WINDOW page at `at` of its path, node n. */
static void leave_window(hd_cache *c, int32_t id, int32_t at, int32_t n) {
    hd_device_page *page = &cache_table(c, id, HD_KV_WINDOW)[at];
    if (at < c->seqs[id].rebuilt) {
        if (page->n != NONE) push_device(c, HD_KV_WINDOW, *page);
    } else if (cache_keeps_window(c, id, at, n)) {
        push_device(c, HD_KV_WINDOW, *page);
    } else {
        drop_window(c, n);
    }
    page->n = NONE;
}

static void let_go(hd_cache *c, cache_seq *l, int32_t id) {
    int32_t n = l->node;
    for (int32_t d = l->n_nodes - 1; d >= 0; d--) {
        if (d >= l->window_from && c->lookback_pages) leave_window(c, id, d, n);
        cache_unpin(c, n);
        n = c->nodes[n].parent;
    }
    for (int32_t p = l->n_nodes; p < l->n_pages; p++) {
        push_device(c, HD_KV_FULL, cache_table(c, id, HD_KV_FULL)[p]);
        if (c->lookback_pages) {
            push_device(c, HD_KV_WINDOW, cache_table(c, id, HD_KV_WINDOW)[p]);
        }
    }
    *l = (cache_seq){0};
}

static void clear_table(hd_cache *c, int32_t id) {
    for (int group = 0; group < HD_N_KV_GROUPS; group++) {
        hd_device_page *table = cache_table(c, id, (hd_kv_group)group);
        for (int32_t p = 0; p < c->o.seq_pages; p++) table[p].n = NONE;
    }
}

static hd_kv_ends ends_of(const hd_cache *c, const cache_match *m, int32_t n, int32_t from) {
    if (c->o.replayed) return (hd_kv_ends){.outputs = n - 1, .windows_from = from};
    if (m->rebuilds) return (hd_kv_ends){.rebuilt = m->best * c->o.page_tokens};
    if (!c->o.tail) return (hd_kv_ends){0};
    return (hd_kv_ends){.outputs = n - 1,
                        .branch = m->known > m->best ? m->known * c->o.page_tokens : 0};
}

hd_kv_ends hd_cache_ends(const hd_cache *c, int32_t id) {
    return c->seqs[id].ends;
}

int32_t hd_cache_first(const hd_cache *c, int32_t id) {
    return c->seqs[id].first;
}

/* Whether a sequence computes all layers of a page. */
static bool makes_whole(const hd_cache *c, const cache_seq *l, int32_t at) {
    const int32_t branch = l->ends.branch / c->o.page_tokens, back = c->lookback_pages;
    if (c->o.replayed) return true; /* of the layers that others read there */
    return at >= l->ends.outputs / c->o.page_tokens - back ||
           (at < branch && at >= branch - back);
}

hd_status hd_cache_acquire(hd_cache *c, int32_t id, uint64_t salt, const int32_t *tokens,
                           int32_t n, int32_t *hit) {
    return hd_cache_resume(c, id, salt, tokens, n, n, hit);
}

hd_status hd_cache_resume(hd_cache *c, int32_t id, uint64_t salt, const int32_t *tokens,
                          int32_t n, int32_t prompt, int32_t *hit) {
    cache_seq *l = &c->seqs[id];
    assert(!l->open);
    c->tick++;
    const int32_t from = cache_replay_from(c, hd_min_i32(n, prompt));
    const cache_match m = cache_walk(c, salt, tokens, n, from);
    const int32_t d = m.best, first = d * c->o.page_tokens - (m.rebuilds ? c->o.rebuild : 0);
    const int32_t window = m.rebuilds ? first / c->o.page_tokens : d - c->lookback_pages;
    *hit = 0;
    clear_table(c, id);
    *l = (cache_seq){.open = true,
                     .salt = salt,
                     .epoch = c->epoch,
                     .node = d ? c->path[d - 1] : ROOT,
                     .n_nodes = d,
                     .n_pages = d,
                     .window_from = hd_max_i32(0, window),
                     .window_to = hd_max_i32(0, window),
                     .rebuilt = m.rebuilds ? d : 0,
                     .first = first,
                     .prompt_pages = (hd_min_i32(n, prompt) - 1) / c->o.page_tokens,
                     .ends = ends_of(c, &m, n, from)};
    for (int32_t p = 0; p < d; p++) {
        cache_pin(c, c->path[p]);
        if (p < l->window_from || p < l->rebuilt || !c->lookback_pages) continue;
        hold_window(c, c->path[p]);
    }
    const int64_t loaded = c->loaded[HD_KV_FULL];
    if (!load_path(c, id)) {
        let_go(c, l, id);
        return HD_EAGAIN;
    }
    *hit = d * c->o.page_tokens;
    c->asked_tokens += n;
    c->declined += d < m.longest;
    c->matched_tokens += *hit;
    c->host_tokens += (c->loaded[HD_KV_FULL] - loaded) * c->o.page_tokens;
    return HD_OK;
}

static bool add_private_page(hd_cache *c, int32_t id, int32_t at) {
    const hd_device_page entries = take_page(c, HD_KV_FULL);
    if (entries.n == NONE) return false;
    if (c->lookback_pages) {
        const hd_device_page window = take_page(c, HD_KV_WINDOW);
        if (window.n == NONE) {
            push_device(c, HD_KV_FULL, entries);
            return false;
        }
        cache_table(c, id, HD_KV_WINDOW)[at] = window;
    }
    cache_table(c, id, HD_KV_FULL)[at] = entries;
    return true;
}

static void drop_private_page(hd_cache *c, int32_t id, int32_t at) {
    for (int group = 0; group < HD_N_KV_GROUPS; group++) {
        hd_device_page *page = &cache_table(c, id, (hd_kv_group)group)[at];
        if (page->n != NONE) push_device(c, (hd_kv_group)group, *page);
        page->n = NONE;
    }
}

/* Takes the WINDOW pages before `want` that are rebuilt; all or none. */
static bool extend_rebuilt(hd_cache *c, int32_t id, int32_t want) {
    cache_seq *l = &c->seqs[id];
    const int32_t had = l->window_to, end = hd_min_i32(want, l->rebuilt);
    hd_device_page *table = cache_table(c, id, HD_KV_WINDOW);
    for (; l->window_to < end; l->window_to++) {
        table[l->window_to] = take_page(c, HD_KV_WINDOW);
        if (table[l->window_to].n != NONE) continue;
        while (l->window_to > had) {
            push_device(c, HD_KV_WINDOW, table[--l->window_to]);
            table[l->window_to].n = NONE;
        }
        return false;
    }
    return true;
}

hd_status hd_cache_extend(hd_cache *c, int32_t id, int32_t n_tokens) {
    cache_seq *l = &c->seqs[id];
    const int32_t want = (int32_t)hd_ceil_div(n_tokens, c->o.page_tokens), had = l->n_pages;
    assert(l->open && want <= c->o.seq_pages);
    if (!extend_rebuilt(c, id, want)) return HD_EAGAIN;
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

/* Gives all sequences that hold the WINDOW page of a node, which is not whole, the whole one of
 * another sequence: it has the same bits, and more. */
static void replace_window(hd_cache *c, int32_t n, hd_device_page page) {
    const hd_device_page old = c->nodes[n].device[HD_KV_WINDOW];
    const int32_t at = c->nodes[n].depth;
    for (int32_t id = 0; old.n != NONE && id < c->o.max_seqs; id++) {
        hd_device_page *held = &cache_table(c, id, HD_KV_WINDOW)[at];
        if (c->seqs[id].open && held->n == old.n) *held = page;
    }
    if (old.n != NONE) push_device(c, HD_KV_WINDOW, old);
    cache_free_page(c, n, HD_TIER_HOST, HD_KV_WINDOW);
    cache_set_device(c, n, HD_KV_WINDOW, page);
    c->nodes[n].whole = true;
    c->nodes[n].clean[HD_KV_WINDOW] = false;
    cache_finish(c, n);
}

/* Shares the WINDOW page of a node that is beside the sequence's own: the better one. Neither may
 * have what the other has if both are not whole: then each sequence keeps its own. */
static void share_window(hd_cache *c, int32_t id, int32_t at, int32_t n) {
    hd_device_page *own = &cache_table(c, id, HD_KV_WINDOW)[at];
    const cache_node *k = &c->nodes[n];
    const bool whole = makes_whole(c, &c->seqs[id], at);
    const int32_t from = c->seqs[id].ends.windows_from;
    /* what a replay leaves depends on where it begins */
    if (c->o.replayed && (at + 1) * c->o.page_tokens > from) return;
    if (whole && !k->whole) {
        replace_window(c, n, *own);
    } else if (!cache_is_cached(k, HD_KV_WINDOW) || (whole && cache_is_away(k, HD_KV_WINDOW))) {
        cache_set_device(c, n, HD_KV_WINDOW, *own);
        c->nodes[n].whole = whole;
        cache_finish(c, n);
    } else if (k->whole && !cache_is_away(k, HD_KV_WINDOW)) {
        push_device(c, HD_KV_WINDOW, *own);
        *own = k->device[HD_KV_WINDOW];
    }
}

/* Another sequence has already committed this sequence's first private page: share its node.
 * Equal prefixes have equal bits (design D8), so the exchange is invisible. */
static void share_page(hd_cache *c, int32_t id, int32_t at, int32_t n) {
    hd_device_page *own = &cache_table(c, id, HD_KV_FULL)[at];
    if (cache_is_away(&c->nodes[n], HD_KV_FULL)) {
        cache_set_device(c, n, HD_KV_FULL, *own);
    } else {
        push_device(c, HD_KV_FULL, *own);
        *own = c->nodes[n].device[HD_KV_FULL];
    }
    if (c->lookback_pages) share_window(c, id, at, n);
}

static void commit_page(hd_cache *c, int32_t id, const int32_t *tokens) {
    cache_seq *l = &c->seqs[id];
    const int32_t at = l->n_nodes;
    int32_t n = cache_find_child(c, l->node, l->salt, l->epoch, tokens);
    if (n != NONE) {
        share_page(c, id, at, n);
    } else {
        n = cache_add_node(c, l->node, l->salt, l->epoch, tokens);
        c->nodes[n].whole = makes_whole(c, l, at);
        for (int group = 0; group < HD_N_KV_GROUPS; group++) {
            cache_set_device(c, n, (hd_kv_group)group,
                             cache_table(c, id, (hd_kv_group)group)[at]);
        }
    }
    /* after a kill the same prompt comes again */
    if (c->o.write_through && at + 1 == l->prompt_pages) c->nodes[n].turn_end = true;
    cache_pin(c, n);
    if (c->lookback_pages && !cache_keeps_window(c, id, at, n)) hold_window(c, n);
    l->node = n;
    l->n_nodes++;
}

static void release_passed_windows(hd_cache *c, int32_t id, int32_t n_done) {
    cache_seq *l = &c->seqs[id];
    const int32_t first = hd_max_i32(0, n_done - c->o.lookback) / c->o.page_tokens;
    if (!c->lookback_pages || first <= l->window_from) return;
    int32_t n = l->node;
    for (int32_t p = l->n_nodes - 1; p >= l->window_from; p--, n = c->nodes[n].parent) {
        if (p < first) leave_window(c, id, p, n);
    }
    l->window_from = first;
}

/* The window is whole: its pages enter the tree. Those before it are passed. */
static void end_rebuild(hd_cache *c, int32_t id) {
    cache_seq *l = &c->seqs[id];
    const int32_t from = l->rebuilt - c->lookback_pages;
    for (int32_t p = l->n_nodes - 1, n = l->node; p >= l->window_from; p--) {
        if (p < from) {
            leave_window(c, id, p, n);
        } else {
            share_window(c, id, p, n);
            if (!cache_keeps_window(c, id, p, n)) hold_window(c, n);
        }
        n = c->nodes[n].parent;
    }
    l->window_from = hd_max_i32(l->window_from, from);
    l->rebuilt = 0;
    l->ends = (hd_kv_ends){0};
    c->rebuilt++;
    c->rebuilt_tokens += c->o.rebuild;
}

void hd_cache_commit(hd_cache *c, int32_t id, const int32_t *tokens, int32_t n_done) {
    cache_seq *l = &c->seqs[id];
    assert(l->open && hd_ceil_div(n_done, c->o.page_tokens) <= l->n_pages);
    if (l->rebuilt && n_done >= l->ends.rebuilt) end_rebuild(c, id);
    while ((int64_t)(l->n_nodes + 1) * c->o.page_tokens <= n_done) {
        commit_page(c, id, tokens + (int64_t)l->n_nodes * c->o.page_tokens);
    }
    release_passed_windows(c, id, n_done);
}

void hd_cache_release(hd_cache *c, int32_t id, bool end_of_turn) {
    cache_seq *l = &c->seqs[id];
    assert(l->open);
    c->tick++;
    if (end_of_turn && l->node != ROOT) c->nodes[l->node].turn_end = true;
    int32_t n = l->node;
    for (int32_t d = l->n_nodes; d > 0; d--, n = c->nodes[n].parent) {
        cache_touch(c, &c->nodes[n]);
        if (c->nodes[n].uses < UINT8_MAX) c->nodes[n].uses++;
        c->nodes[n].released = true;
    }
    let_go(c, l, id);
}

void hd_cache_renew(hd_cache *c) {
    c->epoch++;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        hd_heap_clear(&c->writable[l]);
        hd_heap_clear(&c->unsaved[l]);
    }
    hd_cache_flush(c);
}

void hd_cache_flush(hd_cache *c) {
    int32_t n;
    while ((n = hd_heap_min(&c->evictable[HD_TIER_DEVICE][HD_KV_FULL])) >= 0) drop_branch(c, n);
    while ((n = hd_heap_min(&c->evictable[HD_TIER_HOST][HD_KV_FULL])) >= 0) {
        cache_evict_host(c, n, HD_KV_FULL);
    }
}

/* ---- tables, copies, statistics ---- */

const int32_t *hd_cache_block_table(const hd_cache *c, int32_t id, hd_kv_group group) {
    _Static_assert(sizeof(hd_device_page) == sizeof(int32_t), "a table is one of numbers");
    return (const int32_t *)(const void *)cache_table(c, id, group);
}

const hd_page_copy *hd_cache_copies(const hd_cache *c, int32_t *n) {
    *n = c->n_copies;
    return c->copies;
}

void hd_cache_copied(hd_cache *c) {
    c->n_copies = 0;
}

hd_kv_group hd_cache_lacking(const hd_cache *c) {
    return c->lacking;
}

hd_cache_stats hd_cache_read_stats(const hd_cache *c) {
    hd_cache_stats s = {.nodes = c->n_nodes - c->free_nodes.n,
                        .matched_tokens = c->matched_tokens,
                        .asked_tokens = c->asked_tokens,
                        .host_tokens = c->host_tokens,
                        .disk_tokens = c->disk_tokens,
                        .rebuilt = c->rebuilt,
                        .rebuilt_tokens = c->rebuilt_tokens,
                        .declined = c->declined};
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        s.pages[l] = c->o.n_pages[l];
        s.free[l] = c->free_pages[HD_TIER_DEVICE][l].n;
        s.host[l] = c->o.n_host[l] - c->free_pages[HD_TIER_HOST][l].n;
        s.evicted[l] = c->evicted[l];
        s.saved[l] = c->saved[l];
        s.loaded[l] = c->loaded[l];
    }
    s.evictable[HD_KV_FULL] = c->n_resident - c->n_pinned;
    s.evictable[HD_KV_WINDOW] = c->evictable[HD_TIER_DEVICE][HD_KV_WINDOW].n;
    return s;
}
