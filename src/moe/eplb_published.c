/* eplb_published.c - the two greedy steps that DeepSeek published: each spare slot to the expert
 * with the largest load per copy, then copies to ranks, heaviest first, in equal numbers. Among
 * equals the lowest index comes first. */
#include <string.h>

#include "moe/eplb_internal.h"

/* ---- packing ---- */

/* Packs value[n] into bins of n / bins each; writes bin[n], and place[n], the order of
 * arrival in the bin. */
typedef struct packing {
    int32_t *bin, *place;
    int32_t *order, *spare; /* [n] */
    double *sum;            /* [bins] */
    int32_t *filled;        /* [bins] */
} packing;

static void pack(const eplb_layer *l, const packing *p, const double *value, int32_t n,
                 int32_t bins) {
    const int32_t capacity = n / bins;
    if (capacity == 1) {
        for (int32_t i = 0; i < n; i++) {
            p->bin[i] = i;
            p->place[i] = 0;
        }
        return;
    }
    eplb_sort(l, value, n, p->order, p->spare);
    const eplb_tree t = eplb_tree_of(l, bins);
    for (int32_t b = 0; b < bins; b++) {
        p->sum[b] = 0;
        p->filled[b] = 0;
        eplb_tree_fill(&t, b, eplb_key(0));
    }
    eplb_tree_build(&t);
    int32_t *bin = p->bin, *place = p->place, *filled = p->filled;
    double *sum = p->sum;
    for (int32_t k = 0; k < n; k++) {
        const int32_t i = p->order[k];
        const int64_t b = eplb_tree_top(&t).at;
        bin[i] = (int32_t)b;
        place[i] = filled[b]++;
        sum[b] += value[i];
        eplb_tree_set(&t, b, filled[b] == capacity ? EPLB_OUT : eplb_key(sum[b]));
    }
}

/* ---- one node ---- */

typedef struct node_plan {
    const int32_t *experts; /* [n] of the node, in its order */
    int32_t n, slots, ranks;
    int32_t slot0;
} node_plan;

typedef struct scratch {
    double *load, *key;
    int32_t *owner, *nth, *r;
    packing p;
} scratch;

static void replicate(const eplb_layer *l, const node_plan *n, const scratch *s) {
    const eplb_tree t = eplb_tree_of(l, n->n);
    for (int32_t i = 0; i < n->n; i++) {
        s->key[i] = l->loads[n->experts[i]];
        s->owner[i] = i;
        s->nth[i] = 0;
        s->r[i] = 1;
        eplb_tree_fill(&t, i, eplb_falling_key(s->key[i]));
    }
    if (n->slots == n->n) return;
    eplb_tree_build(&t);
    for (int32_t k = n->n; k < n->slots; k++) {
        const int64_t i = eplb_tree_top(&t).at;
        s->owner[k] = (int32_t)i;
        s->nth[k] = s->r[i]++;
        s->key[i] = l->loads[n->experts[i]] / s->r[i];
        eplb_tree_set(&t, i, eplb_falling_key(s->key[i]));
    }
}

static void plan_node(eplb_layer *l, const node_plan *n, const scratch *s) {
    replicate(l, n, s);
    for (int32_t k = 0; k < n->slots; k++) s->load[k] = s->key[s->owner[k]];
    pack(l, &s->p, s->load, n->slots, n->ranks);
    const int32_t each = n->slots / n->ranks;
    for (int32_t k = 0; k < n->slots; k++) {
        const int32_t slot = n->slot0 + s->p.bin[k] * each + s->p.place[k];
        l->expert[slot] = n->experts[s->owner[k]];
        l->nth[slot] = s->nth[k];
    }
}

void eplb_published(eplb_layer *l) {
    const int32_t n = l->slots + l->ranks;
    /* Arrays of the layer's memory, [n] each; published plans use no other. */
    int32_t *words = l->words;
    const scratch s = {
        .load = l->value,
        .key = l->value + n,
        .owner = words,
        .nth = words + n,
        .r = words + 2 * n,
        .p = {words + 3 * n, words + 4 * n, words + 5 * n, words + 6 * n, l->value + 2 * n,
              words + 7 * n},
    };
    int32_t *experts = words + 8 * n;
    const bool by_node = l->args->groups % l->args->nodes == 0;
    const int32_t groups = by_node ? l->args->groups : 1, nodes = by_node ? l->args->nodes : 1;
    const int32_t size = l->experts / groups, each = groups / nodes;
    for (int32_t g = 0; g < groups; g++) {
        s.load[g] = 0;
        for (int32_t e = 0; e < size && groups > nodes; e++)
            s.load[g] += l->loads[g * size + e];
    }
    pack(l, &s.p, s.load, groups, nodes);
    for (int32_t g = 0; g < groups; g++) {
        const int32_t at = (s.p.bin[g] * each + s.p.place[g]) * size;
        for (int32_t e = 0; e < size; e++) experts[at + e] = g * size + e;
    }
    node_plan np = {experts, l->experts / nodes, l->slots / nodes, l->ranks / nodes, 0};
    for (int32_t k = 0; k < nodes; k++) {
        plan_node(l, &np, &s);
        np.experts += np.n;
        np.slot0 += np.slots;
    }
}
