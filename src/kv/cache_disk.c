/* cache_disk.c - the prefix cache's side of the disk tier; see cache_disk.h. */
#include "kv/cache_disk.h"

#include <assert.h>

#include "base/checked.h"
#include "kv/cache_internal.h"

enum { AT_DEVICE, AT_HOST, AT_DISK, NOWHERE };

void hd_cache_set_root(hd_cache *c, hd_page_name root) {
    c->root = root;
}

/* ---- writing ---- */

bool hd_cache_begin_write(hd_cache *c, hd_kv_group group, hd_cache_page *out) {
    const int32_t n = hd_heap_min(&c->writable[group]);
    assert(c->n_copies == 0);
    if (n < 0) return false;
    cache_node *k = &c->nodes[n];
    *out = (hd_cache_page){
        .group = group, .node = n, .host = k->host[group], .page = k->depth, .name = k->name};
    k->writing[group] = true;
    cache_finish(c, n);
    return true;
}

void hd_cache_end_write(hd_cache *c, const hd_cache_page *page, bool done) {
    cache_node *k = &c->nodes[page->node];
    if (c->reserved[page->group][page->host.n]) { /* its node is gone */
        hd_cache_unreserve(c, page->group, page->host);
        return;
    }
    assert(k->writing[page->group]);
    k->writing[page->group] = false;
    k->clean[page->group] = done;
    cache_finish(c, page->node);
}

/* A page for which host memory has no room is not tried again. */
void hd_cache_save_unwritten(hd_cache *c, hd_kv_group group, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        const int32_t at = hd_heap_min(&c->unsaved[group]);
        if (at < 0 || c->n_copies == c->cap_copies) return;
        if (cache_save_page(c, at, group)) continue;
        c->nodes[at].clean[group] = true;
        cache_finish(c, at);
    }
}

bool hd_cache_has_unwritten(const hd_cache *c, bool on_device) {
    const hd_heap *heaps = on_device ? c->unsaved : c->writable;
    return heaps[HD_KV_FULL].n || heaps[HD_KV_WINDOW].n;
}

/* ---- what to read ---- */

static uint8_t *tiers_of(const hd_cache *c, int32_t page) {
    return c->tiers + (int64_t)page * HD_N_KV_GROUPS;
}

static uint8_t tier_of(const cache_node *k, hd_kv_group group) {
    if (!cache_is_complete(k, group)) return NOWHERE;
    if (cache_is_in(k, HD_TIER_DEVICE, group)) return AT_DEVICE;
    return cache_is_in(k, HD_TIER_HOST, group) ? AT_HOST : NOWHERE;
}

/* Writes names and tiers of the pages of tokens[n] up to the first whose FULL page is nowhere.
 * Returns how many there are. */
static int32_t locate(const hd_cache *c, const hd_cache_lookup *disk, uint64_t salt,
                      const int32_t *tokens, int32_t n, hd_page_name *names) {
    const int32_t size = c->o.page_tokens;
    hd_page_name above = c->root;
    int32_t at = ROOT, d = 0;
    for (; d < c->o.seq_pages && (int64_t)(d + 1) * size < n; d++) {
        const int32_t *own = tokens + (int64_t)d * size;
        if (at != NONE) at = cache_find_child(c, at, salt, c->epoch, own);
        names[d] = at != NONE ? c->nodes[at].name
                              : hd_page_name_of(c->name_key, above, salt, own, size);
        above = names[d];
        for (int l = 0; l < HD_N_KV_GROUPS; l++) {
            const hd_kv_group group = (hd_kv_group)l;
            const bool there = disk->has(disk->ctx, group, above);
            uint8_t *tier = &tiers_of(c, d)[l];
            *tier = at != NONE ? tier_of(&c->nodes[at], group) : NOWHERE;
            if (*tier == NOWHERE && there) *tier = AT_DISK;
        }
        if (tiers_of(c, d)[HD_KV_FULL] == NOWHERE) break;
    }
    return d;
}

static double cost_of(const hd_cache *c, uint8_t tier, hd_kv_group group) {
    const double up = tier == AT_DEVICE ? 0 : c->costs.page[group];
    return up + (tier == AT_DISK ? c->costs.disk[group] : 0);
}

/* The first pages of a prefix, in whatever tiers. */
typedef struct candidate {
    int32_t pages;
    bool rebuilds; /* their window is rebuilt */
    double gain;
} candidate;

typedef struct best_match {
    candidate with, without; /* pages of the disk */
    int32_t longest;         /* with WINDOW pages */
} best_match;

/* Of two that are ready at the same time the longer one, but for one whose window is rebuilt. */
static void take_better(candidate *best, const candidate *k) {
    if (k->rebuilds ? k->gain > best->gain : k->gain >= best->gain) *best = *k;
}

/* Of the first d pages, `full` is the cost of bringing up the FULL ones. */
static void consider(const hd_cache *c, int32_t d, double full, bool reads, bool rebuilds,
                     best_match *m) {
    candidate k = {d, rebuilds, cache_saving(c, d, rebuilds) - full};
    for (int32_t p = hd_max_i32(0, d - c->lookback_pages); p < d && !rebuilds; p++) {
        const uint8_t tier = tiers_of(c, p)[HD_KV_WINDOW];
        k.gain -= cost_of(c, tier, HD_KV_WINDOW);
        reads = reads || tier == AT_DISK;
    }
    if (!rebuilds) m->longest = d;
    take_better(&m->with, &k);
    if (!reads) take_better(&m->without, &k);
}

static best_match find_best(const hd_cache *c, int32_t n_pages) {
    best_match m = {0};
    double full = 0;
    bool reads = false;
    for (int32_t p = 0, live = 0; p < n_pages; p++) {
        const uint8_t *tiers = tiers_of(c, p);
        full += cost_of(c, tiers[HD_KV_FULL], HD_KV_FULL);
        reads = reads || tiers[HD_KV_FULL] == AT_DISK;
        live = tiers[HD_KV_WINDOW] == NOWHERE ? 0 : live + 1;
        if (live >= hd_min_i32(c->lookback_pages, p + 1)) {
            consider(c, p + 1, full, reads, false, &m);
        }
        if (c->o.rebuild) consider(c, p + 1, full, reads, true, &m);
    }
    return m;
}

static int32_t saved_by(const hd_cache *c, const candidate *k) {
    return k->pages * c->o.page_tokens - (k->rebuilds ? c->o.rebuild : 0);
}

bool hd_cache_plan_reads(const hd_cache *c, const hd_cache_lookup *disk, uint64_t salt,
                         const int32_t *tokens, int32_t n, hd_page_name *names,
                         hd_cache_reads *out) {
    const best_match m = find_best(c, locate(c, disk, salt, tokens, n, names));
    out->from = out->to = m.with.pages;
    out->saved = saved_by(c, &m.with);
    out->without = saved_by(c, &m.without);
    out->n_windows = 0;
    out->declined = m.with.pages < m.longest;
    while (out->from > 0 && tiers_of(c, out->from - 1)[HD_KV_FULL] == AT_DISK) out->from--;
    const int32_t window = hd_max_i32(0, out->to - c->lookback_pages);
    for (int32_t p = window; p < out->to && !m.with.rebuilds; p++) {
        if (tiers_of(c, p)[HD_KV_WINDOW] == AT_DISK) out->windows[out->n_windows++] = p;
    }
    return out->from < out->to || out->n_windows;
}

/* ---- pages that are read ---- */

hd_host_page hd_cache_reserve(hd_cache *c, hd_kv_group group) {
    assert(c->n_copies == 0);
    if (!c->free_pages[HD_TIER_HOST][group].n) {
        const int32_t other = hd_heap_min(&c->evictable[HD_TIER_HOST][group]);
        if (other < 0) return (hd_host_page){NONE};
        cache_evict_host(c, other, group);
    }
    const hd_host_page host = cache_pop_host(c, group);
    if (host.n != NONE) c->reserved[group][host.n] = true;
    return host;
}

void hd_cache_unreserve(hd_cache *c, hd_kv_group group, hd_host_page host) {
    assert(c->reserved[group][host.n]);
    c->reserved[group][host.n] = false;
    cache_push_host(c, group, host);
}

/* Returns the node above a page: the hint, if it still is that node. */
static int32_t node_above(const hd_cache *c, uint64_t salt, const int32_t *tokens,
                          const hd_page_name *names, int32_t page, int32_t hint) {
    if (page == 0) return ROOT;
    if (hint > 0 && c->nodes[hint].epoch == c->epoch &&
        hd_page_name_equal(c->nodes[hint].name, names[page - 1])) {
        return hint;
    }
    return cache_node_at(c, salt, tokens, page);
}

static int32_t find_or_add(hd_cache *c, uint64_t salt, const int32_t *tokens,
                           const hd_page_name *names, int32_t page, hd_kv_group group,
                           int32_t hint) {
    if (group != HD_KV_FULL) return cache_node_at(c, salt, tokens, page + 1);
    const int32_t *own = tokens + (int64_t)page * c->o.page_tokens;
    const int32_t above = node_above(c, salt, tokens, names, page, hint);
    if (above == NONE) return NONE;
    const int32_t n = cache_find_child(c, above, salt, c->epoch, own);
    return n != NONE ? n : cache_add_node(c, above, salt, c->epoch, own);
}

bool hd_cache_adopt(hd_cache *c, uint64_t salt, const int32_t *tokens,
                    const hd_page_name *names, int32_t page, hd_kv_group group,
                    hd_host_page host, int32_t *node) {
    assert(c->n_copies == 0);
    c->tick++;
    const int32_t n = find_or_add(c, salt, tokens, names, page, group, *node);
    if (n == NONE || cache_is_complete(&c->nodes[n], group) ||
        (group == HD_KV_WINDOW && !cache_drop_partial(c, n))) {
        hd_cache_unreserve(c, group, host);
        if (n != NONE && group == HD_KV_FULL) *node = n;
        return n != NONE;
    }
    if (group == HD_KV_FULL) {
        *node = n;
        c->nodes[n].from_disk = true;
    }
    c->reserved[group][host.n] = false;
    cache_touch(c, &c->nodes[n]);
    c->nodes[n].clean[group] = true;
    if (group == HD_KV_WINDOW) c->nodes[n].whole = true;
    cache_set_host(c, n, group, host);
    return true;
}
