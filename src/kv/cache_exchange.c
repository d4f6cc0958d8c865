/* cache_exchange.c - pages of the prefix cache that go to another cache, or come from one. */
#include <assert.h>

#include "base/checked.h"
#include "kv/cache_internal.h"

int32_t cache_node_at(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n) {
    int32_t at = ROOT;
    for (int32_t p = 0; p < n && at != NONE; p++) {
        at = cache_find_child(c, at, salt, c->epoch, tokens + (int64_t)p * c->o.page_tokens);
    }
    return at;
}

bool hd_cache_has(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t page,
                  hd_kv_group group) {
    const int32_t n = cache_node_at(c, salt, tokens, page + 1);
    return n != NONE && cache_is_complete(&c->nodes[n], group);
}

int32_t hd_cache_first_lacking(const hd_cache *c, uint64_t salt, const int32_t *tokens,
                               int32_t from, int32_t n_pages, hd_kv_group group) {
    for (int32_t p = 0, at = ROOT; p < n_pages; p++) {
        at = cache_find_child(c, at, salt, c->epoch, tokens + (int64_t)p * c->o.page_tokens);
        if (at == NONE) return hd_max_i32(p, from);
        if (p >= from && !cache_is_complete(&c->nodes[at], group)) return p;
    }
    return n_pages;
}

int32_t hd_cache_usable(const hd_cache *c, uint64_t salt, const int32_t *tokens,
                        int32_t n_pages) {
    int32_t usable = 0;
    for (int32_t p = 0, at = ROOT, live = 0; p < n_pages; p++) {
        const int32_t *own = tokens + (int64_t)p * c->o.page_tokens;
        at = cache_find_child(c, at, salt, c->epoch, own);
        if (at == NONE) break;
        live = cache_is_complete(&c->nodes[at], HD_KV_WINDOW) ? live + 1 : 0;
        if (live >= hd_min_i32(c->lookback_pages, p + 1)) usable = p + 1;
    }
    return usable;
}

/* Returns a page of host memory for what was just used; the node keeps its own pages. */
static hd_host_page take_host_beside(hd_cache *c, int32_t n, hd_kv_group group) {
    if (c->free_pages[HD_TIER_HOST][group].n) return cache_pop_host(c, group);
    cache_pin(c, n);
    const int32_t other = hd_heap_min(&c->evictable[HD_TIER_HOST][group]);
    if (other >= 0) cache_evict_host(c, other, group);
    cache_unpin(c, n);
    if (other < 0) return (hd_host_page){NONE};
    return cache_pop_host(c, group);
}

bool cache_drop_partial(hd_cache *c, int32_t n) {
    if (c->nodes[n].window_refs > 0) return false;
    for (int t = 0; t < HD_N_TIERS; t++) cache_free_page(c, n, (hd_tier)t, HD_KV_WINDOW);
    return true;
}

hd_host_page hd_cache_export(hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t page,
                             hd_kv_group group) {
    const hd_host_page none = {NONE};
    const int32_t n = cache_node_at(c, salt, tokens, page + 1);
    if (n == NONE || !cache_is_complete(&c->nodes[n], group)) return none;
    const cache_node *k = &c->nodes[n];
    if (cache_is_in(k, HD_TIER_HOST, group)) return k->host[group];
    if (c->n_copies == c->cap_copies) return none;
    const hd_host_page host = take_host_beside(c, n, group);
    if (host.n == NONE) return none;
    cache_add_copy(c, group, true, k->device[group], host);
    cache_set_host(c, n, group, host);
    return host;
}

hd_host_page hd_cache_import(hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t page,
                             hd_kv_group group) {
    const hd_host_page none = {NONE};
    const int32_t *own = tokens + (int64_t)page * c->o.page_tokens;
    const int32_t parent = cache_node_at(c, salt, tokens, page);
    if (parent == NONE) return none;
    c->tick++;
    int32_t n = cache_find_child(c, parent, salt, c->epoch, own);
    if (n == NONE && group != HD_KV_FULL) return none;
    assert(c->n_copies == 0 && (n == NONE || !cache_is_complete(&c->nodes[n], group)));
    if (group == HD_KV_WINDOW && !cache_drop_partial(c, n)) return none;
    const hd_host_page host = take_host_beside(c, n == NONE ? parent : n, group);
    if (host.n == NONE) return none;
    if (n == NONE) n = cache_add_node(c, parent, salt, c->epoch, own);
    cache_set_host(c, n, group, host);
    if (group == HD_KV_WINDOW) c->nodes[n].whole = true;
    cache_finish(c, n);
    return host;
}
