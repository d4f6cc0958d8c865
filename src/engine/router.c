/* router.c - chooses the attention group of a request: the one that has the fewest tokens to
 * compute before it, where the pages of its prompt that a group has computed before count as
 * cached.
 *
 * A table tells which groups had a page, by the hash of all tokens up to its end. It is a guess:
 * a group may have dropped the page, or another page may have taken its place in the table. A
 * wrong guess costs time and changes no answer. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/siphash.h"
#include "engine/engine_internal.h"

/* A choice that runs delays others by some tokens; it counts as so many. */
enum { CHOICE_TOKENS = 64, MIN_PLACES = 1024, MAX_PLACES = 1 << 22, MAX_GROUPS = 64 };

typedef struct seen_page {
    uint64_t hash, groups; /* a bit per group */
} seen_page;

struct engine_router {
    int32_t page_tokens;
    uint32_t n; /* a power of two */
    seen_page *seen;
};

hd_status engine_router_open(engine_router **out, const hd_engine *e, int64_t pages,
                             hd_err *err) {
    engine_router *t = calloc(1, sizeof *t);
    *out = t;
    if (!t) return HD_FAIL(err, HD_ENOMEM, "no memory for the router");
    t->page_tokens = hd_kv_shape_of(e->spec).page_tokens;
    t->n = MIN_PLACES;
    while (t->n < MAX_PLACES && t->n < 4 * pages) t->n *= 2;
    t->seen = calloc(t->n, sizeof *t->seen);
    if (!t->seen) return HD_FAIL(err, HD_ENOMEM, "no memory for a router of %u pages", t->n);
    return HD_OK;
}

void engine_router_close(engine_router *t) {
    if (!t) return;
    free(t->seen);
    free(t);
}

void engine_router_flush(engine_router *t) {
    if (t) memset(t->seen, 0, t->n * sizeof *t->seen);
}

hd_status engine_prefix_of(engine_prefix *out, const hd_engine *e, uint64_t salt,
                           const int32_t *tokens, int32_t n_tokens, hd_err *err) {
    *out = (engine_prefix){0};
    if (!e->router) return HD_OK;
    const int32_t page = e->router->page_tokens, n = n_tokens / page;
    out->hashes = calloc((size_t)n + 1, sizeof *out->hashes);
    if (!out->hashes) return HD_FAIL(err, HD_ENOMEM, "no memory for %d pages", n);
    hd_siphash s;
    hd_siphash_init_secret(&s);
    hd_siphash_add(&s, &salt, sizeof salt);
    for (out->n = 0; out->n < n; out->n++) {
        hd_siphash_add(&s, tokens + (int64_t)out->n * page, (size_t)page * sizeof *tokens);
        out->hashes[out->n] = hd_siphash_value(&s);
    }
    return HD_OK;
}

static seen_page *place_of(const engine_router *t, uint64_t hash) {
    return &t->seen[hash & (t->n - 1)];
}

/* Counts, for every group, the first pages of the prompt that it had. */
static void match(const engine_router *t, const engine_prefix *p, int32_t n_groups,
                  int32_t *pages) {
    uint64_t groups = n_groups < MAX_GROUPS ? (1ull << n_groups) - 1 : ~0ull;
    for (int32_t i = 0; groups && i < p->n; i++) {
        const seen_page *page = place_of(t, p->hashes[i]);
        groups &= page->hash == p->hashes[i] ? page->groups : 0;
        for (int32_t g = 0; g < n_groups; g++) pages[g] += (int32_t)(groups >> g & 1);
    }
}

static void remember(engine_router *t, const engine_prefix *p, int32_t group) {
    for (int32_t i = 0; i < p->n; i++) {
        seen_page *page = place_of(t, p->hashes[i]);
        if (page->hash != p->hashes[i]) *page = (seen_page){.hash = p->hashes[i]};
        page->groups |= 1ull << group;
    }
}

/* Of groups that have equally much to do, the one with fewer choices, then the next in turn.
 * *left: tokens of the prompt that it has to compute. */
static int32_t choose(hd_engine *e, const engine_prefix *prefix, int32_t n_prompt,
                      uint64_t turn, int64_t *left) {
    int32_t pages[MAX_GROUPS] = {0}, best = 0;
    int64_t least = INT64_MAX;
    if (e->router) match(e->router, prefix, e->n_present, pages);
    *left = 0;
    for (int32_t k = 0; k < e->n_present; k++) {
        const int32_t g = (int32_t)((turn + (uint64_t)k) % (uint64_t)e->n_present);
        const engine_group *group = &e->groups[g];
        const int64_t cached = e->router ? (int64_t)pages[g] * e->router->page_tokens : 0;
        const int64_t prompt = n_prompt - cached, tokens = group->load + prompt;
        const bool same = tokens == least;
        if (tokens > least || (same && group->n_living >= e->groups[best].n_living)) continue;
        best = g;
        least = tokens;
        *left = prompt;
    }
    if (e->router) remember(e->router, prefix, best);
    return best;
}

hd_status hd_engine_choose_group(hd_engine *e, int32_t *group, uint64_t salt,
                                 const int32_t *tokens, int32_t n, hd_err *err) {
    engine_prefix prefix;
    int64_t left;
    HD_TRY(engine_prefix_of(&prefix, e, salt, tokens, n, err));
    pthread_mutex_lock(&e->lock);
    *group = choose(e, &prefix, n, 0, &left);
    pthread_mutex_unlock(&e->lock);
    free(prefix.hashes);
    return HD_OK;
}

static void route(hd_engine *e, engine_request *r, const engine_prefix *prefix,
                  int32_t n_choices) {
    r->group = choose(e, prefix, r->n_prompt, r->arrival, &r->prompt_load);
    r->load = r->prompt_load + (int64_t)CHOICE_TOKENS * n_choices;
    e->groups[r->group].load += r->load;
    e->groups[r->group].n_living += n_choices;
}

void engine_route(hd_engine *e, engine_request *r, const engine_prefix *prefix) {
    route(e, r, prefix, r->n_choices);
}

void engine_route_again(hd_engine *e, engine_request *r) {
    const engine_prefix none = {0};
    e->groups[r->group].load -= r->load;
    e->groups[r->group].n_living -= r->n_left;
    route(e, r, &none, r->n_left);
}

static void take_load(hd_engine *e, engine_request *r, int64_t tokens) {
    e->groups[r->group].load -= tokens;
    r->load -= tokens;
}

void engine_route_prompt_done(hd_engine *e, engine_request *r) {
    take_load(e, r, r->prompt_load);
    r->prompt_load = 0;
}

void engine_route_choice_done(hd_engine *e, engine_request *r) {
    if (r->n_left == 0) engine_route_prompt_done(e, r);
    take_load(e, r, CHOICE_TOKENS);
    e->groups[r->group].n_living--;
}
