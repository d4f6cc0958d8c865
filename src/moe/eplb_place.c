/* eplb_place.c - copies and a first placement, and what a repair starts from. The descent
 * improves both. */
#include <string.h>

#include "moe/eplb_internal.h"

double eplb_choose_copies(eplb_layer *l, int32_t node, int32_t slots, int32_t most) {
    const eplb_tree t = eplb_tree_of(l, l->experts);
    int32_t found = 0;
    double *cost = l->value, highest = 0;
    for (int32_t e = 0; e < l->experts; e++) {
        if (node >= 0 && l->home[e] != node) continue;
        cost[e] = eplb_cost(l, e, 1);
        l->copies[e] = 1;
        eplb_tree_fill(&t, e, eplb_falling_key(cost[e]));
        found++;
    }
    eplb_tree_build(&t);
    if (found > 0 && slots > (int64_t)found * most) most = (slots + found - 1) / found;
    int32_t left = l->args->phase == HD_EPLB_DECODE ? 0 : slots - found;
    eplb_entry top;
    while ((top = eplb_tree_top(&t)).key != EPLB_OUT) {
        const int64_t e = top.at;
        const bool full = l->copies[e] == most;
        if (cost[e] > highest && (full || left <= 0)) highest = cost[e];
        if (left <= 0) break;
        if (!full) {
            cost[e] = eplb_cost(l, (int32_t)e, ++l->copies[e]);
            left--;
        }
        eplb_tree_set(&t, e, full ? EPLB_OUT : eplb_falling_key(cost[e]));
    }
    for (int32_t e = 0; e < l->experts && l->args->phase == HD_EPLB_PREFILL; e++) {
        if (node >= 0 && l->home[e] != node) continue;
        while (l->copies[e] > 1 &&
               eplb_cost(l, e, l->copies[e] - 1) <= eplb_cost(l, e, l->copies[e])) {
            l->copies[e]--;
        }
    }
    return highest;
}

/* Groups to nodes, heaviest first, in equal numbers. */
static void choose_homes(eplb_layer *l) {
    const int32_t groups = l->nodes > 1 ? l->args->groups : 1, n = l->slots + l->ranks;
    const int32_t size = l->experts / groups, room = groups / l->nodes;
    double *load = l->value, *sum = l->value + n;
    int32_t *order = l->words, *filled = l->words + 2 * n;
    for (int32_t g = 0; g < groups; g++) {
        load[g] = 0;
        for (int32_t e = g * size; e < (g + 1) * size; e++) load[g] += eplb_cost(l, e, 1);
    }
    for (int32_t k = 0; k < l->nodes; k++) {
        sum[k] = 0;
        filled[k] = 0;
    }
    eplb_sort(l, load, groups, order, l->words + n);
    for (int32_t i = 0; i < groups; i++) {
        int32_t best = -1;
        for (int32_t k = 0; k < l->nodes; k++) {
            if (filled[k] < room && (best < 0 || sum[k] < sum[best])) best = k;
        }
        filled[best]++;
        sum[best] += load[order[i]];
        for (int32_t e = 0; e < size; e++) l->home[order[i] * size + e] = best;
    }
}

/* The rank of a node with room where a copy of e costs least; one without e, if there is. */
static int32_t choose_rank(const eplb_layer *l, int32_t node, int32_t e, const int32_t *room) {
    int32_t best = -1;
    bool best_held = true;
    for (int32_t d = 0; d < l->ranks; d++) {
        if (room[d] == 0 || l->node[d] != node) continue;
        const bool held = *eplb_held(l, d, e) > 0;
        if (best < 0 || held < best_held || (held == best_held && l->cost[d] < l->cost[best])) {
            best = d;
            best_held = held;
        }
    }
    return best;
}

static int32_t node_slots(const eplb_layer *l, int32_t node, int32_t *ranks) {
    int32_t slots = 0;
    *ranks = 0;
    for (int32_t d = 0; d < l->ranks; d++) {
        const int32_t n = l->first[d + 1] - l->first[d];
        if (l->node[d] != node || eplb_gone(l, d) || n == 0) continue;
        slots += n;
        ++*ranks;
    }
    return slots;
}

void eplb_place(eplb_layer *l) {
    const int32_t n = l->slots + l->ranks;
    choose_homes(l);
    for (int32_t k = 0; k < l->nodes; k++) {
        int32_t ranks;
        const int32_t slots = node_slots(l, k, &ranks);
        eplb_choose_copies(l, k, slots, ranks);
    }
    memset(l->held, 0, (size_t)l->ranks * (size_t)l->experts * sizeof *l->held);
    int32_t *order = l->words, *room = l->words + 2 * n;
    for (int32_t d = 0; d < l->ranks; d++) {
        l->cost[d] = 0;
        room[d] = eplb_gone(l, d) ? 0 : l->first[d + 1] - l->first[d];
    }
    for (int32_t s = 0; s < l->slots; s++) l->expert[s] = -1;
    for (int32_t e = 0; e < l->experts; e++) l->value[e] = eplb_cost(l, e, l->copies[e]);
    eplb_sort(l, l->value, l->experts, order, l->words + n);
    for (int32_t i = 0; i < l->experts; i++) {
        const int32_t e = order[i];
        for (int32_t k = 0; k < l->copies[e]; k++) {
            const int32_t d = choose_rank(l, l->home[e], e, room);
            l->expert[l->first[d + 1] - room[d]--] = e;
            l->cost[d] += l->value[e];
            ++*eplb_held(l, d, e);
        }
    }
}

/* ---- the start of a repair ---- */

/* An empty slot, or one whose expert has another copy: where the largest cost rises least. */
static int32_t choose_slot(const eplb_layer *l, int32_t e) {
    int32_t best = -1;
    double least = 0;
    for (int32_t s = 0; s < l->slots; s++) {
        const int32_t d = l->rank[s], y = l->expert[s];
        if (eplb_gone(l, d) || (y >= 0 && l->copies[y] < 2)) continue;
        double cost = l->cost[d] + eplb_cost(l, e, 1);
        if (y >= 0) cost += l->mean; /* rather an empty slot */
        if (best < 0 || cost < least) {
            best = s;
            least = cost;
        }
    }
    return best;
}

int32_t eplb_restore(eplb_layer *l, const int32_t *previous) {
    const int32_t n = l->slots + l->ranks;
    const bool copied = l->args->phase != HD_EPLB_DECODE;
    memset(l->copies, 0, (size_t)l->experts * sizeof *l->copies);
    for (int32_t s = 0; s < l->slots; s++) {
        const int32_t e = previous[s];
        const bool kept = e >= 0 && !eplb_gone(l, l->rank[s]) && (copied || l->copies[e] == 0);
        l->expert[s] = kept ? e : -1;
        if (!kept) continue;
        l->copies[e]++;
        l->home[e] = l->node[l->rank[s]];
    }
    int32_t *order = l->words, lost = 0;
    for (int32_t e = 0; e < l->experts; e++) {
        l->value[e] = l->loads[e];
        lost += l->copies[e] == 0;
    }
    if (lost == 0) return 0;
    eplb_sort(l, l->value, l->experts, order, l->words + n);
    eplb_recount(l);
    for (int32_t i = 0; i < l->experts; i++) {
        const int32_t e = order[i];
        if (l->copies[e] > 0) continue;
        const int32_t s = choose_slot(l, e);
        l->expert[s] = e;
        l->home[e] = l->node[l->rank[s]];
        eplb_recount(l);
    }
    return lost;
}

void eplb_fill(eplb_layer *l, int64_t moves) {
    int32_t empty = 0;
    for (int32_t s = 0; s < l->slots; s++) {
        empty += l->expert[s] < 0 && !eplb_gone(l, l->rank[s]);
    }
    if (empty == 0 || l->args->phase != HD_EPLB_ROWS) return;
    const double most = eplb_recount(l);
    for (int32_t s = 0; s < l->slots && moves != 0; s++) {
        const int32_t d = l->rank[s];
        if (l->expert[s] >= 0 || eplb_gone(l, d)) continue;
        int32_t best = -1;
        double highest = -1;
        for (int32_t e = 0; e < l->experts; e++) {
            const double after = eplb_cost(l, e, l->copies[e] + 1);
            if (*eplb_held(l, d, e) || l->cost[d] + after > most || after <= highest) continue;
            best = e;
            highest = after;
        }
        if (best < 0) continue;
        l->expert[s] = best;
        moves--;
        eplb_recount(l);
    }
}
