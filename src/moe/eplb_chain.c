/* eplb_chain.c - a placement for a split of every batch over copies.
 *
 * Ranks are nodes of a graph, and an expert with copies on two ranks is an edge over which rows can
 * be shifted. Rows can be evened out within a connected component only. So hot experts get copies
 * first, and the other spare slots close a cycle through all ranks. Only a primary is copied: a
 * chain of copies of one expert would share that expert's rows. */
#include <string.h>

#include "moe/eplb_internal.h"

#define HOT 0.7 /* of a rank's mean cost: an expert above it gets a copy before the cycle */

typedef struct chain {
    eplb_layer *l;
    int32_t *primaries; /* [ranks] */
    int32_t *quota;     /* [ranks] most primaries */
    int32_t *used;      /* [ranks] slots */
    int32_t *part;      /* [ranks] a rank of the same component */
    int32_t *order;     /* [ranks] */
    int32_t *primary;   /* [experts] rank */
    int32_t *sorted, *spare;
    double *heat; /* [ranks] */
} chain;

static int32_t n_slots(const chain *c, int32_t d) {
    return eplb_gone(c->l, d) ? 0 : c->l->first[d + 1] - c->l->first[d];
}

static int32_t root(const chain *c, int32_t d) {
    while (c->part[d] != d) d = c->part[d];
    return d;
}

static void put(chain *c, int32_t e, int32_t d, bool is_primary, double cost) {
    eplb_layer *l = c->l;
    l->expert[l->first[d] + c->used[d]++] = e;
    l->cost[d] += cost;
    ++*eplb_held(l, d, e);
    if (is_primary) {
        c->primaries[d]++;
        c->primary[e] = d;
    } else {
        const int32_t a = root(c, c->primary[e]), b = root(c, d);
        c->part[a > b ? a : b] = a < b ? a : b;
    }
}

static bool has_room(const chain *c, int32_t d, bool is_primary) {
    if (is_primary) return c->primaries[d] < c->quota[d];
    return c->used[d] - c->primaries[d] < n_slots(c, d) - c->quota[d];
}

/* The rank without e that costs least; -1: none has room. */
static int32_t coldest(const chain *c, int32_t e, bool is_primary) {
    int32_t best = -1;
    for (int32_t d = 0; d < c->l->ranks; d++) {
        if (!has_room(c, d, is_primary) || *eplb_held(c->l, d, e)) continue;
        if (best < 0 || c->l->cost[d] < c->l->cost[best]) best = d;
    }
    return best;
}

static void start(chain *c) {
    eplb_layer *l = c->l;
    const int32_t n = l->slots + l->ranks;
    int32_t *words = l->words;
    c->primaries = words + 2 * n;
    c->quota = words + 3 * n;
    c->used = words + 4 * n;
    c->part = words + 5 * n;
    c->order = words + 6 * n;
    c->primary = words + 7 * n;
    c->sorted = words + 8 * n;
    c->spare = words + 9 * n;
    c->heat = l->value + n;
    memset(l->held, 0, (size_t)l->ranks * (size_t)l->experts * sizeof *l->held);
    int64_t before = 0;
    for (int32_t d = 0; d < l->ranks; d++) {
        const int64_t after = before + n_slots(c, d);
        c->quota[d] =
            (int32_t)(l->experts * after / l->usable - l->experts * before / l->usable);
        c->primaries[d] = c->used[d] = 0;
        c->part[d] = d;
        l->cost[d] = 0;
        before = after;
    }
    for (int32_t s = 0; s < l->slots; s++) l->expert[s] = -1;
}

/* Copies of hot experts: as eplb_choose_copies, but no further than HOT. */
static void choose_hot(eplb_layer *l) {
    const eplb_tree t = eplb_tree_of(l, l->experts);
    double *cost = l->value;
    for (int32_t e = 0; e < l->experts; e++) {
        cost[e] = l->loads[e];
        l->copies[e] = 1;
        eplb_tree_fill(&t, e, eplb_falling_key(cost[e]));
    }
    eplb_tree_build(&t);
    for (int32_t left = l->usable - l->experts; left > 0;) {
        const eplb_entry top = eplb_tree_top(&t);
        const int64_t e = top.at;
        if (top.key == EPLB_OUT || cost[e] <= HOT * l->mean) break;
        const bool full = l->copies[e] >= l->alive;
        if (!full) {
            cost[e] = l->loads[e] / ++l->copies[e];
            left--;
        }
        eplb_tree_set(&t, e, full ? EPLB_OUT : eplb_falling_key(cost[e]));
    }
}

static void place_experts(chain *c) {
    eplb_layer *l = c->l;
    for (int32_t e = 0; e < l->experts; e++) l->value[e] = l->loads[e];
    eplb_sort(l, l->value, l->experts, c->sorted, c->spare);
    for (int32_t hot = 1; hot >= 0; hot--) {
        for (int32_t i = 0; i < l->experts; i++) {
            const int32_t e = c->sorted[i], r = l->copies[e];
            if ((r > 1) != hot) continue;
            const double cost = l->loads[e] / r;
            put(c, e, coldest(c, e, true), true, cost);
            for (int32_t k = 1; k < r; k++) {
                const int32_t d = coldest(c, e, false);
                if (d >= 0) put(c, e, d, false, cost);
            }
        }
    }
}

/* ---- the cycle ---- */

/* Hottest, coldest, second hottest, second coldest, ... of the ranks, or of the components with one
 * rank for each: its hottest. Returns their number. */
static int32_t zigzag(chain *c, bool components) {
    eplb_layer *l = c->l;
    int32_t n = 0;
    for (int32_t d = 0; d < l->ranks; d++) {
        if (n_slots(c, d) == 0 || (components && root(c, d) != d)) continue;
        int32_t best = d, members = 0;
        double sum = 0;
        for (int32_t k = 0; k < l->ranks && components; k++) {
            if (n_slots(c, k) == 0 || root(c, k) != d) continue;
            sum += l->cost[k];
            members++;
            if (l->cost[k] > l->cost[best]) best = k;
        }
        c->heat[n] = components ? sum / members : l->cost[d];
        c->spare[n++] = best;
    }
    int32_t *sorted = c->sorted, *more = c->sorted + n;
    eplb_sort(l, c->heat, n, sorted, more);
    for (int32_t i = 0; i < n; i++) {
        c->order[i] = c->spare[sorted[i % 2 ? n - 1 - i / 2 : i / 2]];
    }
    return n;
}

/* Of b's component the coldest rank with room; of ranks, b itself. */
static int32_t receiver(const chain *c, int32_t b, bool components) {
    if (!components) return has_room(c, b, false) ? b : -1;
    int32_t best = -1;
    for (int32_t d = 0; d < c->l->ranks; d++) {
        if (root(c, d) != root(c, b) || !has_room(c, d, false)) continue;
        if (best < 0 || c->l->cost[d] < c->l->cost[best]) best = d;
    }
    return best;
}

/* Copies the heaviest primary of a that b lacks. */
static bool link_ranks(chain *c, int32_t a, int32_t b, bool components) {
    eplb_layer *l = c->l;
    const int32_t to = receiver(c, b, components);
    int32_t best = -1;
    if (to < 0) return false;
    for (int32_t s = l->first[a]; s < l->first[a] + c->used[a]; s++) {
        const int32_t e = l->expert[s];
        if (c->primary[e] != a || *eplb_held(l, to, e)) continue;
        if (best < 0 || l->loads[e] > l->loads[best]) best = e;
    }
    if (best >= 0) put(c, best, to, false, 0);
    return best >= 0;
}

static bool link_all(chain *c, bool components, int32_t stride) {
    const int32_t n = zigzag(c, components);
    bool linked = false;
    for (int32_t i = 0; i < n && n > 1; i++) {
        const int32_t a = c->order[i], b = c->order[(i + stride) % n];
        linked |= a != b && link_ranks(c, a, b, components);
    }
    return linked;
}

/* Slots that no link of the cycle could fill: the heaviest expert that the rank lacks. */
static void fill_rest(chain *c) {
    eplb_layer *l = c->l;
    for (int32_t d = 0; d < l->ranks; d++) {
        while (c->used[d] < n_slots(c, d)) {
            int32_t best = -1;
            for (int32_t e = 0; e < l->experts; e++) {
                if (*eplb_held(l, d, e)) continue;
                if (best < 0 || l->loads[e] > l->loads[best]) best = e;
            }
            put(c, best < 0 ? l->expert[l->first[d]] : best, d, false, 0);
        }
    }
}

void eplb_chain(eplb_layer *l) {
    chain c = {.l = l};
    choose_hot(l);
    start(&c);
    place_experts(&c);
    for (bool more = true; more;) more = link_all(&c, true, 1);
    for (int32_t stride = 1; stride < l->ranks; stride += 2) link_all(&c, false, stride);
    fill_rest(&c);
}
