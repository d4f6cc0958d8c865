/* cache_worth.c - in which order cached pages leave a tier: those of least worth first,
 *
 *     worth = chance of use * cost of getting the page again / bytes
 *
 * Pages of a heap have equal bytes. The chance grows with the sequences that used a page so far. The
 * cost is that of positions to compute, or of a read if the disk has the page and reads sooner.
 *
 * A page is as far above its tier's floor as it was worth when it was used last, and the floor rises
 * to the page that leaves: GreedyDual-Size-Frequency (L. Cherkasova, "Improving WWW proxies
 * performance with greedy-dual-size-frequency caching policy", 1998). So what was used often leaves
 * too, later. Ticks count a little, so that of pages of equal worth the least recently used leaves. */
#include <math.h>

#include "base/checked.h"
#include "kv/cache_internal.h"

enum {
    TICKS = 1 << 16, /* of one unit of worth */
    MOST_USES = 16,
    COST = 16,       /* of computing a page */
    MOST_PAGES = 64, /* that a lost window is believed to cost */
    JUNCTION = 64,   /* times as probably used as pages between junctions */
};

/* Pages that a sequence computes if the window of a node is gone: those behind the window before it, or a
 * rebuild. */
static int32_t pages_of_window(const hd_cache *c, int32_t n) {
    const int32_t rebuild = (int32_t)hd_ceil_div(c->o.rebuild, c->o.page_tokens);
    const int32_t most = rebuild ? hd_min_i32(rebuild, MOST_PAGES) : MOST_PAGES;
    int32_t pages = 1;
    for (int32_t p = c->nodes[n].parent; p != ROOT && pages < most; p = c->nodes[p].parent) {
        if (pages >= c->lookback_pages && cache_is_complete(&c->nodes[p], HD_KV_WINDOW)) break;
        pages++;
    }
    return pages;
}

/* What reading a page of the disk costs, in the unit of `cost`, which is that of computing it. */
static int64_t cost_of_read(const hd_cache *c, hd_kv_group group, int64_t cost) {
    const double page = c->costs.token * c->o.page_tokens;
    if (page <= 0 || c->costs.disk[group] <= 0) return cost;
    return (int64_t)fmin(fmax(COST * c->costs.disk[group] / page, 1), (double)cost);
}

static int64_t worth_of(const hd_cache *c, int32_t n, hd_tier tier, hd_kv_group group) {
    const cache_node *k = &c->nodes[n];
    const bool junction = group == HD_KV_WINDOW && cache_is_junction(c, k);
    const int64_t chance =
        hd_max_i32(1, hd_min_i32(k->uses, MOST_USES)) * (junction ? JUNCTION : 1);
    int64_t cost = COST * (junction ? pages_of_window(c, n) : 1);
    if (tier == HD_TIER_HOST && k->clean[group]) cost = cost_of_read(c, group, cost);
    return chance * cost * TICKS;
}

int64_t cache_key(const hd_cache *c, int32_t n, hd_tier tier, hd_kv_group group) {
    return c->nodes[n].floor[tier][group] + worth_of(c, n, tier, group);
}

void cache_touch(const hd_cache *c, cache_node *k) {
    k->used = c->tick;
    for (int t = 0; t < HD_N_TIERS; t++) {
        for (int l = 0; l < HD_N_KV_GROUPS; l++) k->floor[t][l] = c->floor[t][l] + c->tick;
    }
}

void cache_raise_floor(hd_cache *c, int32_t n, hd_tier tier, hd_kv_group group) {
    int64_t *floor = &c->floor[tier][group];
    *floor = hd_max_i64(*floor, cache_key(c, n, tier, group) - c->tick);
}
