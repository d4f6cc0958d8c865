/* eplb_descent.c - lowers the cost of the rank that costs most, step by step: by an exchange of
 * two slots, or by a copy over a slot whose expert has another one. Every step lowers the ranks it
 * raises to below that cost, so the sorted costs fall and the descent ends. */
#include <string.h>

#include "moe/eplb_internal.h"

enum { COLDEST = 6 }; /* ranks that are tried first */

typedef struct step {
    int32_t slot, other; /* other < 0: `slot` gets a copy of `copy` */
    int32_t copy;
    int32_t moves;
    double gain; /* per move */
} step;

static double highest(const eplb_layer *l, int32_t *rank) {
    *rank = 0;
    for (int32_t d = 1; d < l->ranks; d++) {
        if (l->cost[d] > l->cost[*rank]) *rank = d;
    }
    return l->cost[*rank];
}

/* ---- exchanges ---- */

static void exchange_with(const eplb_layer *l, int32_t h, int32_t d, int32_t most, step *best) {
    const double high = l->cost[h], low = l->cost[d];
    for (int32_t i = l->first[h]; i < l->first[h + 1]; i++) {
        const int32_t x = l->expert[i];
        if (x < 0 || *eplb_held(l, d, x)) continue;
        const double px = l->value[i];
        for (int32_t j = l->first[d]; j < l->first[d + 1]; j++) {
            const double delta = px - l->value[j];
            const double left = delta < high - low - delta ? delta : high - low - delta;
            const int32_t y = l->expert[j], moves = y < 0 ? 1 : 2;
            if (left <= best->gain * moves || moves > most) continue;
            if (y >= 0 && *eplb_held(l, h, y)) continue;
            *best = (step){i, j, -1, moves, left / moves};
        }
    }
}

static bool may_exchange(const eplb_layer *l, int32_t h, int32_t d) {
    return d != h && l->node[d] == l->node[h] && !eplb_gone(l, d) && l->cost[d] < l->cost[h];
}

/* With the coldest ranks first; with all if none of those helps. */
static void try_exchanges(const eplb_layer *l, int32_t h, int32_t most, step *best) {
    const double none = best->gain;
    int32_t coldest[COLDEST], n = 0;
    for (int32_t d = 0; d < l->ranks; d++) {
        if (!may_exchange(l, h, d)) continue;
        int32_t at = n < COLDEST ? n++ : COLDEST;
        for (; at > 0 && l->cost[coldest[at - 1]] > l->cost[d]; at--) {
            if (at < COLDEST) coldest[at] = coldest[at - 1];
        }
        if (at < COLDEST) coldest[at] = d;
    }
    for (int32_t k = 0; k < n; k++) exchange_with(l, h, coldest[k], most, best);
    if (best->gain > none) return;
    for (int32_t d = 0; d < l->ranks; d++) {
        if (may_exchange(l, h, d)) exchange_with(l, h, d, most, best);
    }
}

/* ---- copies ---- */

/* What a slot's expert costs once the slot gives it up: the ranks besides h with another copy at
 * most, and how much more h. */
typedef struct others {
    double most, more_h;
} others;

/* How much more another copy costs then. */
static double more_of(const eplb_layer *l, int32_t slot) {
    const int32_t y = l->expert[slot];
    return y < 0 ? 0 : eplb_cost(l, y, l->copies[y] - 1) - l->value[slot];
}

static others others_of(const eplb_layer *l, int32_t h, int32_t slot, double more) {
    const int32_t y = l->expert[slot];
    others o = {0, 0};
    if (y < 0) return o;
    for (int32_t d = 0; d < l->ranks; d++) {
        const int32_t n = *eplb_held(l, d, y) - (d == l->rank[slot]);
        if (n <= 0) continue;
        if (d == h) {
            o.more_h = n * more;
        } else if (l->cost[d] + n * more > o.most) {
            o.most = l->cost[d] + n * more;
        }
    }
    return o;
}

/* The experts of h, of which another rank may get a copy, in the order of slots. */
typedef struct candidates {
    int32_t *expert, n;
    double *cost;   /* of a copy then */
    double *relief; /* of h */
    double most;    /* the largest relief */
} candidates;

/* Further copies of experts of h in one slot elsewhere. What falls on ranks with the expert counts
 * on h only. */
static void copy_from(const eplb_layer *l, int32_t h, int32_t slot, const others *o,
                      const candidates *c, step *best) {
    const int32_t d = l->rank[slot];
    const double high = l->cost[h], left = l->cost[d] - l->value[slot];
    for (int32_t i = 0; i < c->n; i++) {
        const int32_t x = c->expert[i];
        if (x == l->expert[slot] || *eplb_held(l, d, x)) continue;
        double most = left + c->cost[i] > o->most ? left + c->cost[i] : o->most;
        const double relieved = high + o->more_h - c->relief[i];
        if (relieved > most) most = relieved;
        if (high - most > best->gain) *best = (step){slot, -1, x, 1, high - most};
    }
}

/* On h, lighter copies in the place of one that others hold too. */
static void copy_to(const eplb_layer *l, int32_t h, int32_t slot, const others *o, step *best) {
    const double high = l->cost[h], left = high - l->value[slot];
    for (int32_t x = 0; x < l->experts; x++) {
        if (*eplb_held(l, h, x) || (l->nodes > 1 && l->home[x] != l->node[h])) continue;
        const double cost = left + eplb_cost(l, x, l->copies[x] + 1) + o->more_h;
        const double most = cost > o->most ? cost : o->most;
        if (high - most > best->gain) *best = (step){slot, -1, x, 1, high - most};
    }
}

static candidates candidates_of(const eplb_layer *l, int32_t h) {
    const int32_t n = l->slots + l->ranks;
    candidates c = {.expert = l->words, .cost = l->value + n, .relief = l->value + 2 * n};
    for (int32_t i = l->first[h]; i < l->first[h + 1]; i++) {
        const int32_t x = l->expert[i];
        if (x < 0) continue;
        const double cost = eplb_cost(l, x, l->copies[x] + 1);
        const double relief = *eplb_held(l, h, x) * (eplb_cost(l, x, l->copies[x]) - cost);
        c.expert[c.n] = x;
        c.cost[c.n] = cost;
        c.relief[c.n++] = relief;
        if (relief > c.most) c.most = relief;
    }
    return c;
}

/* The least cost of a rank besides h that has experts. */
static double coldest(const eplb_layer *l, int32_t h) {
    double least = l->cost[h];
    for (int32_t d = 0; d < l->ranks; d++) {
        if (d != h && !eplb_gone(l, d) && l->cost[d] < least) least = l->cost[d];
    }
    return least;
}

/* Further copies in the slots of a rank besides h. least: of all those. */
static void try_copies_on(const eplb_layer *l, int32_t h, int32_t d, double least,
                          const candidates *c, step *best) {
    const double high = l->cost[h];
    for (int32_t slot = l->first[d]; slot < l->first[d + 1]; slot++) {
        const int32_t y = l->expert[slot];
        if (y >= 0 && l->copies[y] < 2) continue;
        const double more = more_of(l, slot);
        /* Of the other copies one is on a rank that costs `least` or more, or all are on h. */
        const bool heats = y >= 0 && least + more >= high - best->gain &&
                           high - (high + more - c->most) <= best->gain;
        if (heats) continue;
        const others o = others_of(l, h, slot, more);
        if (o.most < high - best->gain) copy_from(l, h, slot, &o, c, best);
    }
}

static void try_copies_to(const eplb_layer *l, int32_t h, step *best) {
    for (int32_t slot = l->first[h]; slot < l->first[h + 1]; slot++) {
        const int32_t y = l->expert[slot];
        if (y < 0 || l->copies[y] < 2) continue;
        const others o = others_of(l, h, slot, more_of(l, slot));
        if (o.most < l->cost[h] - best->gain) copy_to(l, h, slot, &o, best);
    }
}

static void try_copies(const eplb_layer *l, int32_t h, step *best) {
    const double least = coldest(l, h);
    const candidates c = candidates_of(l, h);
    for (int32_t d = 0; d < l->ranks; d++) {
        if (d == h) {
            try_copies_to(l, h, best);
        } else if (may_exchange(l, h, d)) {
            try_copies_on(l, h, d, least, &c, best);
        }
    }
}

/* ---- steps ---- */

static void recount_rank(eplb_layer *l, int32_t d) {
    double cost = 0;
    for (int32_t s = l->first[d]; s < l->first[d + 1]; s++) {
        const int32_t e = l->expert[s];
        l->value[s] = e < 0 ? 0 : eplb_cost(l, e, l->copies[e]);
        cost += l->value[s];
    }
    l->cost[d] = cost;
}

static void take_step(eplb_layer *l, const step *t) {
    const int32_t d = l->rank[t->slot];
    const int32_t y = l->expert[t->slot];
    if (t->other >= 0) {
        const int32_t c = l->rank[t->other], x = l->expert[t->other];
        l->expert[t->slot] = x;
        l->expert[t->other] = y;
        --*eplb_held(l, d, y);
        ++*eplb_held(l, c, y);
        if (x >= 0) {
            --*eplb_held(l, c, x);
            ++*eplb_held(l, d, x);
        }
        recount_rank(l, c);
        recount_rank(l, d);
        return;
    }
    l->expert[t->slot] = t->copy;
    if (y >= 0) {
        l->copies[y]--;
        --*eplb_held(l, d, y);
    }
    l->copies[t->copy]++;
    ++*eplb_held(l, d, t->copy);
    for (int32_t k = 0; k < l->ranks; k++) {
        if (*eplb_held(l, k, t->copy) || (y >= 0 && *eplb_held(l, k, y)) || k == d) {
            recount_rank(l, k);
        }
    }
}

int64_t eplb_descend(eplb_layer *l, double goal, int64_t moves) {
    int64_t used = 0;
    const bool limited = moves >= 0 || l->args->previous;
    const bool copied = l->args->phase != HD_EPLB_DECODE;
    for (int32_t d = 0; d < l->ranks; d++) recount_rank(l, d);
    for (int32_t steps = 0; steps < 4 * l->slots; steps++) {
        int32_t h;
        const double high = highest(l, &h);
        if (high <= goal) break;
        const int64_t left = moves < 0 ? 2 : moves - used;
        step best = {.gain = high * 1e-9};
        const double none = best.gain;
        if (left > 0) try_exchanges(l, h, left < 2 ? 1 : 2, &best);
        if (copied && left > 0 && (limited || best.gain <= none)) try_copies(l, h, &best);
        if (best.gain <= none) break;
        take_step(l, &best);
        used += best.moves;
    }
    return used;
}
