/* cache_match.c - which pages of the tree a sequence continues behind: of those along its tokens, as many
 * as make it ready first. */
#include "base/checked.h"
#include "kv/cache_internal.h"

/* What a match of the first d nodes of c->path saves: its tokens, less the reading of its pages.
 * n_host: how many of its FULL pages are to be read; rebuilds: its window is rebuilt. */
static double gain_of(const hd_cache *c, int32_t d, int32_t n_host, bool rebuilds) {
    double gain = cache_saving(c, d, rebuilds) - n_host * c->costs.page[HD_KV_FULL];
    for (int32_t p = hd_max_i32(0, d - c->lookback_pages); p < d && !rebuilds; p++) {
        if (cache_is_away(&c->nodes[c->path[p]], HD_KV_WINDOW))
            gain -= c->costs.page[HD_KV_WINDOW];
    }
    return gain;
}

/* Writes the nodes along tokens to c->path. Returns how many there are. */
static int32_t follow(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n) {
    const int32_t page = c->o.page_tokens;
    int32_t at = ROOT, d = 0;
    while (d < c->o.seq_pages && (int64_t)(d + 1) * page < n) {
        at = cache_find_child(c, at, salt, c->epoch, tokens + (int64_t)d * page);
        if (at == NONE) break;
        c->path[d++] = at;
    }
    return d;
}

/* Whether the WINDOW pages that a match of the first d nodes of c->path reads are whole. */
static bool ends_whole(const hd_cache *c, int32_t d) {
    for (int32_t p = hd_max_i32(0, d - c->lookback_pages); p < d; p++) {
        if (!c->nodes[c->path[p]].whole) return false;
    }
    return true;
}

/* One whose pages are not whole ends before the tails of the sequence's end begin, and before those of
 * the branch: then the sequence makes that whole. One without WINDOW pages is taken only if it is sooner
 * than those with them. */
cache_match cache_walk(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n,
                       int32_t replay_from) {
    cache_match m = {.known = follow(c, salt, tokens, n)};
    const int32_t page = c->o.page_tokens;
    if (c->o.replayed) m.known = hd_min_i32(m.known, replay_from / page);
    const int32_t partial = hd_min_i32((n - 1) / page, m.known) * page - c->o.tail;
    int32_t live = 0, n_host = 0;
    double most = 0;
    for (int32_t d = 0; d < m.known; d++) {
        const cache_node *k = &c->nodes[c->path[d]];
        live = cache_is_cached(k, HD_KV_WINDOW) ? live + 1 : 0;
        n_host += cache_is_away(k, HD_KV_FULL);
        const bool rebuilds = live < hd_min_i32(c->lookback_pages, d + 1);
        if (rebuilds && !c->o.rebuild) continue;
        if (c->o.tail && (d + 1) * page > partial && !ends_whole(c, d + 1)) continue;
        if (!rebuilds) m.longest = d + 1;
        const double gain = gain_of(c, d + 1, n_host, rebuilds);
        if (rebuilds ? gain <= most : gain < most) continue;
        most = gain;
        m.best = d + 1;
        m.rebuilds = rebuilds;
    }
    return m;
}

void hd_cache_set_costs(hd_cache *c, const hd_cache_costs *costs) {
    c->costs = *costs;
}

int32_t hd_cache_match(const hd_cache *c, uint64_t salt, const int32_t *tokens, int32_t n) {
    return cache_walk(c, salt, tokens, n, cache_replay_from(c, n)).best * c->o.page_tokens;
}
