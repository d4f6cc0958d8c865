/* cache_check.c - verifies every count and link of the prefix cache. */
#include "kv/cache.h"

#include <stdlib.h>

#include "kv/cache_internal.h"

typedef struct census {
    const hd_cache *c;
    int32_t *refs, *window_refs, *resident, *seen[HD_N_TIERS][HD_N_KV_GROUPS];
    hd_err *err;
} census;

static hd_status broken(const census *s, const char *what, int64_t number) {
    return HD_FAIL(s->err, HD_EINVAL, "prefix cache: %s (%lld)", what, (long long)number);
}

static void count_seq(const census *s, int32_t id) {
    const hd_cache *c = s->c;
    const cache_seq *l = &c->seqs[id];
    int32_t n = l->node;
    for (int32_t d = l->n_nodes - 1; d >= 0; d--, n = c->nodes[n].parent) {
        s->refs[n]++;
        const int32_t window = cache_table(c, id, HD_KV_WINDOW)[d].n;
        if (d < l->window_from || !c->lookback_pages) continue;
        if (d < l->rebuilt && window == NONE) continue; /* not taken yet */
        if (cache_keeps_window(c, id, d, n)) {
            s->seen[HD_TIER_DEVICE][HD_KV_WINDOW][window]++;
        } else {
            s->window_refs[n]++;
        }
    }
    for (int32_t p = l->n_nodes; p < l->n_pages; p++) {
        for (int group = 0; group < (c->lookback_pages ? HD_N_KV_GROUPS : 1); group++) {
            s->seen[HD_TIER_DEVICE][group][cache_table(c, id, (hd_kv_group)group)[p].n]++;
        }
    }
}

/* Counts the pages of a node and compares it with the heaps. */
static hd_status check_pages(const census *s, int32_t n) {
    const cache_node *k = &s->c->nodes[n];
    for (int t = 0; t < HD_N_TIERS; t++) {
        for (int l = 0; l < HD_N_KV_GROUPS; l++) {
            const bool may_leave = cache_may_leave(k, (hd_tier)t, (hd_kv_group)l);
            if (hd_heap_has(&s->c->evictable[t][l], n) != may_leave) {
                return broken(s, "a heap of evictable pages is wrong", n);
            }
        }
    }
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        if (k->device[l].n != NONE) s->seen[HD_TIER_DEVICE][l][k->device[l].n]++;
        if (k->host[l].n != NONE) s->seen[HD_TIER_HOST][l][k->host[l].n]++;
    }
    return HD_OK;
}

/* Compares a node with the heaps of pages to be written to the disk. */
static hd_status check_unwritten(const census *s, int32_t n) {
    const hd_cache *c = s->c;
    const cache_node *k = &c->nodes[n];
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        const bool unwritten = cache_is_unwritten(c, k, (hd_kv_group)l);
        const bool in_host = k->host[l].n != NONE;
        if (hd_heap_has(&c->writable[l], n) != (unwritten && in_host) ||
            hd_heap_has(&c->unsaved[l], n) != (unwritten && !in_host)) {
            return broken(s, "a heap of pages to be written is wrong", n);
        }
        if (k->writing[l] && !in_host) return broken(s, "a page in transfer is gone", n);
    }
    return HD_OK;
}

static hd_status check_node(const census *s, int32_t n) {
    const hd_cache *c = s->c;
    const cache_node *k = &c->nodes[n], *parent = &c->nodes[k->parent];
    const bool resident = k->device[HD_KV_FULL].n != NONE;
    if (s->refs[n] != k->refs) return broken(s, "refs differ from the sequences' paths", n);
    if (s->window_refs[n] != k->window_refs) return broken(s, "window refs differ", n);
    if (k->depth != parent->depth + 1) return broken(s, "wrong depth", n);
    if (k->window_refs > 0 && k->device[HD_KV_WINDOW].n == NONE) {
        return broken(s, "a held window page is gone", n);
    }
    if (k->refs > 0 && !resident) return broken(s, "a pinned page is not on the device", n);
    if (!resident && k->host[HD_KV_FULL].n == NONE) {
        return broken(s, "a node without a page", n);
    }
    if (resident && k->parent != ROOT && parent->device[HD_KV_FULL].n == NONE) {
        return broken(s, "a page on the device below one that is not", n);
    }
    s->resident[k->parent] += resident;
    HD_TRY(check_unwritten(s, n));
    return check_pages(s, n);
}

/* Every page of a tier is in exactly one place, after all nodes and sequences were counted. */
static hd_status check_tier(const census *s, int tier, int group) {
    const cache_free_list *f = &s->c->free_pages[tier][group];
    int32_t *seen = s->seen[tier][group];
    for (int32_t i = 0; i < f->n; i++) seen[f->items[i]]++;
    for (int32_t p = 0; p < cache_n_pages(s->c, tier, group); p++) {
        seen[p] += tier == HD_TIER_HOST && s->c->reserved[group][p];
        if (seen[p] != 1) return broken(s, "a page is not in exactly one place", p);
    }
    return HD_OK;
}

static hd_status check_all(const census *s) {
    const hd_cache *c = s->c;
    int32_t n_seen = 0, n_pinned = 0, n_resident = 0;
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
    for (int32_t n = ROOT; n <= c->n_nodes; n++) {
        n_resident += s->resident[n];
        if (s->resident[n] == c->nodes[n].n_resident) continue;
        return broken(s, "children on the device miscounted", n);
    }
    if (n_resident != c->n_resident) return broken(s, "pages of nodes miscounted", n_resident);
    for (int t = 0; t < HD_N_TIERS; t++) {
        for (int l = 0; l < HD_N_KV_GROUPS; l++) HD_TRY(check_tier(s, t, l));
    }
    return HD_OK;
}

static bool take_census(census *s) {
    const size_t n = (size_t)s->c->n_nodes + 1;
    s->refs = calloc(n, sizeof *s->refs);
    s->window_refs = calloc(n, sizeof *s->window_refs);
    s->resident = calloc(n, sizeof *s->resident);
    bool good = s->refs && s->window_refs && s->resident;
    for (int t = 0; t < HD_N_TIERS; t++) {
        for (int l = 0; l < HD_N_KV_GROUPS; l++) {
            s->seen[t][l] = calloc((size_t)cache_n_pages(s->c, t, l) + 1, sizeof(int32_t));
            good = good && s->seen[t][l];
        }
    }
    return good;
}

static void free_census(const census *s) {
    free(s->refs);
    free(s->window_refs);
    free(s->resident);
    for (int t = 0; t < HD_N_TIERS; t++) {
        for (int l = 0; l < HD_N_KV_GROUPS; l++) free(s->seen[t][l]);
    }
}

hd_status hd_cache_check(const hd_cache *c, bool idle, hd_err *err) {
    census s = {.c = c, .err = err};
    hd_status st =
        take_census(&s) ? check_all(&s) : HD_FAIL(err, HD_ENOMEM, "no memory for a check");
    for (int32_t id = 0; idle && st == HD_OK && id < c->o.max_seqs; id++) {
        if (c->seqs[id].open) st = broken(&s, "a sequence without an owner is open", id);
    }
    free_census(&s);
    return st;
}
