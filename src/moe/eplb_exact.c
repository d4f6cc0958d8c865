/* eplb_exact.c - a small layer's plan of least cost, by search with bounds: for each expert, hottest
 * first, every number of copies and every choice of ranks that can still be below the best cost so
 * far. Ends after a number of steps that layers of 8 slots on 3 ranks never need.
 *
 * A copy beside another one on its rank wastes a slot, but divides the load unevenly, which can be
 * the only way to the least cost. It is made in the smallest layers only. */
#include <string.h>

#include "moe/eplb_internal.h"

enum { MOST_SLOTS = 32, MOST_RANKS = 8, MOST_STEPS = 100000, MOST_TWICE = 8 /* slots */ };

#define BELOW (1 - 1e-9) /* of a cost: less, and not by rounding */

/* Of expert i of the order: the state of ranks before it is placed. */
typedef struct before {
    int32_t room[MOST_RANKS], slots; /* empty slots of each, of all */
    double cost[MOST_RANKS];
    int32_t copies[MOST_RANKS]; /* of expert i, once it is placed */
} before;

typedef struct search {
    const eplb_layer *layer;
    int32_t order[MOST_SLOTS];   /* [experts] hottest first */
    double rest[MOST_SLOTS + 1]; /* rows of the experts from i on */
    before at[MOST_SLOTS + 1];
    int32_t best[MOST_SLOTS][MOST_RANKS];
    double limit; /* costs below are looked for */
    bool twice;   /* an expert may be twice on a rank */
    bool found;
    int32_t steps;
} search;

static bool ended(const search *s) {
    return s->steps >= MOST_STEPS || s->limit <= s->layer->least;
}

static void keep(search *s) {
    const eplb_layer *l = s->layer;
    const double *cost = s->at[l->experts].cost;
    s->limit = 0;
    for (int32_t d = 0; d < l->ranks; d++) {
        if (cost[d] > s->limit) s->limit = cost[d];
    }
    s->limit *= BELOW;
    s->found = true;
    for (int32_t i = 0; i < l->experts; i++) {
        memcpy(s->best[i], s->at[i].copies, sizeof s->best[i]);
    }
}

/* Whether the rows that are left fit below the limit where there is room. */
static bool may_fit(const search *s, int32_t i) {
    const before *b = &s->at[i];
    double room = 0;
    for (int32_t d = 0; d < s->layer->ranks; d++) {
        if (b->room[d] > 0) room += s->limit - b->cost[d];
    }
    return room > s->rest[i] * BELOW;
}

static void place(search *s, int32_t i);

/* Distributes `left` copies of expert i over ranks from d on. Of ranks in the same state the first
 * gets most. */
static void distribute(search *s, int32_t i, double each, int32_t d, int32_t left) {
    const before *b = &s->at[i];
    before *after = &s->at[i + 1];
    if (++s->steps, ended(s)) return;
    if (d >= MOST_RANKS || d == s->layer->ranks) {
        if (left == 0) place(s, i + 1);
        return;
    }
    int32_t most = b->room[d] < left ? b->room[d] : left;
    if (!s->twice && most > 1) most = 1;
    const bool same = d > 0 && b->room[d] == b->room[d - 1] && !(b->cost[d] < b->cost[d - 1]) &&
                      !(b->cost[d] > b->cost[d - 1]);
    if (same && most > b->copies[d - 1]) most = b->copies[d - 1];
    for (int32_t n = most; n >= 0; n--) {
        const double cost = b->cost[d] + n * each;
        if (cost >= s->limit) continue;
        after->cost[d] = cost;
        after->room[d] = b->room[d] - n;
        s->at[i].copies[d] = n;
        distribute(s, i, each, d + 1, left - n);
    }
}

/* Places expert i and those behind it. */
static void place(search *s, int32_t i) {
    const eplb_layer *l = s->layer;
    if (i == l->experts) {
        keep(s);
        return;
    }
    if (!may_fit(s, i)) return;
    const int32_t others = l->experts - i - 1, slots = s->at[i].slots;
    for (int32_t r = others ? 1 : slots; r <= slots - others && !ended(s); r++) {
        const double each = eplb_cost(l, s->order[i], r);
        if (each >= s->limit) continue;
        s->at[i + 1].slots = slots - r;
        distribute(s, i, each, 0, r);
    }
}

/* ---- a layer ---- */

static void start(search *s, eplb_layer *l) {
    const int32_t n = l->slots + l->ranks;
    before *first = &s->at[0];
    *s = (search){.layer = l};
    for (int32_t e = 0; e < l->experts; e++) l->value[e] = l->loads[e];
    eplb_sort(l, l->value, l->experts, l->words, l->words + n);
    memcpy(s->order, l->words, (size_t)l->experts * sizeof *s->order);
    for (int32_t i = l->experts - 1; i >= 0; i--) {
        s->rest[i] = s->rest[i + 1] + l->loads[s->order[i]];
    }
    first->slots = l->usable;
    for (int32_t d = 0; d < l->ranks; d++) {
        first->room[d] = eplb_gone(l, d) ? 0 : l->first[d + 1] - l->first[d];
    }
}

static bool has_twice(const eplb_layer *l) {
    for (int32_t d = 0; d < l->ranks; d++) {
        for (int32_t e = 0; e < l->experts; e++) {
            if (*eplb_held(l, d, e) > 1) return true;
        }
    }
    return false;
}

static void take_best(const search *s, eplb_layer *l) {
    for (int32_t d = 0; d < l->ranks; d++) {
        int32_t slot = l->first[d];
        for (int32_t i = 0; i < l->experts; i++) {
            for (int32_t k = 0; k < s->best[i][d]; k++) l->expert[slot++] = s->order[i];
        }
    }
}

bool eplb_search(eplb_layer *l, double cost) {
    if (l->slots > MOST_SLOTS || l->ranks > MOST_RANKS || l->nodes > 1 ||
        l->args->phase != HD_EPLB_ROWS) {
        return false;
    }
    const bool twice = has_twice(l);
    search s;
    start(&s, l);
    s.limit = twice ? cost / BELOW : cost * BELOW;
    place(&s, 0);
    if (twice && !s.found) s.limit = cost * BELOW;
    if (l->slots <= MOST_TWICE) {
        s.twice = true;
        s.steps = 0;
        place(&s, 0);
    }
    if (s.found) take_best(&s, l);
    return s.found;
}
