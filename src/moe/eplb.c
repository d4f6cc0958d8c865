/* eplb.c - checks the arguments of a plan, plans each layer, and makes the tables of the map. */
#include "moe/eplb.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "moe/eplb_internal.h"

#define SPLIT_ROWS 0x1p30 /* of a layer, where loads are split */

/* ---- arguments ---- */

static hd_status check_sizes(const hd_eplb_args *a, hd_err *err) {
    if (a->layers < 1 || a->layers > HD_EPLB_MAX_LAYERS || a->experts < 1 ||
        a->experts > HD_EPLB_MAX_EXPERTS || a->ranks < 1 || a->ranks > HD_EPLB_MAX_RANKS ||
        a->slots < 1 || a->slots > HD_EPLB_MAX_SLOTS) {
        return HD_FAIL(err, HD_EINVAL,
                       "a plan has 1 to %d layers, %d experts, %d slots and %d ranks, not %d, "
                       "%d, %d and %d",
                       HD_EPLB_MAX_LAYERS, HD_EPLB_MAX_EXPERTS, HD_EPLB_MAX_SLOTS,
                       HD_EPLB_MAX_RANKS, a->layers, a->experts, a->slots, a->ranks);
    }
    if (a->nodes < 0 || (a->nodes > 0 && a->ranks % a->nodes)) {
        return HD_FAIL(err, HD_EINVAL, "%d ranks cannot be divided among %d nodes", a->ranks,
                       a->nodes);
    }
    if (a->groups < 0 || (a->groups > 0 && a->experts % a->groups)) {
        return HD_FAIL(err, HD_EINVAL, "%d experts cannot be divided into %d groups",
                       a->experts, a->groups);
    }
    if (a->phase != HD_EPLB_ROWS && !(a->step_rows > 0 && isfinite(a->step_rows))) {
        return HD_FAIL(err, HD_EINVAL, "the phase needs the number of rows of a step");
    }
    if (a->target < 0 || a->target > 1) {
        return HD_FAIL(err, HD_EINVAL, "a target is a share of the bound, 0 to 1");
    }
    return HD_OK;
}

static hd_status check_loads(const hd_eplb_args *a, hd_err *err) {
    for (int32_t l = 0; l < a->layers; l++) {
        for (int32_t e = 0; e < a->experts; e++) {
            const double w = a->loads[(size_t)l * (size_t)a->experts + (size_t)e];
            if (!(w >= 0 && w <= HD_EPLB_MAX_LOAD)) {
                return HD_FAIL(err, HD_EINVAL, "the load of expert %d in layer %d is %g", e, l,
                               w);
            }
        }
    }
    return HD_OK;
}

static hd_status check_previous(const hd_eplb_args *a, hd_err *err) {
    if (!a->previous) return HD_OK;
    for (int32_t l = 0; l < a->layers; l++) {
        for (int32_t s = 0; s < a->slots; s++) {
            const int32_t e = a->previous[(size_t)l * (size_t)a->slots + (size_t)s];
            if (e < -1 || e >= a->experts) {
                return HD_FAIL(err, HD_EINVAL, "the previous map has expert %d in layer %d", e,
                               l);
            }
        }
    }
    return HD_OK;
}

static bool uses_nodes(const hd_eplb_args *a) {
    return a->nodes > 1 && a->groups > 0 && a->groups % a->nodes == 0;
}

/* Whether every rank, and every node if they count, has an equal number of slots. */
static bool divides(const hd_eplb_args *a) {
    if (a->slots % a->ranks) return false;
    for (int32_t d = 0; d < a->ranks; d++) {
        if (a->gone && a->gone[d]) return false;
        if (a->rank_slots && a->rank_slots[d] != a->slots / a->ranks) return false;
    }
    return true;
}

/* ---- memory ---- */

typedef struct planner {
    hd_eplb_args args; /* with defaults filled in */
    hd_eplb_map *map;
    int32_t *node, *rank; /* see eplb_layer */
    int32_t *nth;         /* [layers][slots] */
    eplb_layer layer;
} planner;

static void *take(size_t n, size_t size) {
    return calloc(n ? n : 1, size);
}

static hd_status open_map(planner *p, hd_err *err) {
    const hd_eplb_args *a = &p->args;
    const size_t layers = (size_t)a->layers, experts = (size_t)a->experts;
    hd_eplb_map *m = p->map;
    *m = (hd_eplb_map){.layers = a->layers,
                       .experts = a->experts,
                       .slots = a->slots,
                       .ranks = a->ranks,
                       .no_copies = a->phase == HD_EPLB_DECODE};
    m->slot_expert = take(layers * (size_t)a->slots, sizeof *m->slot_expert);
    m->n_copies = take(layers * experts, sizeof *m->n_copies);
    m->rank_slot0 = take((size_t)a->ranks + 1, sizeof *m->rank_slot0);
    m->balancedness = take(layers, sizeof *m->balancedness);
    m->bound = take(layers, sizeof *m->bound);
    m->moves = take(layers, sizeof *m->moves);
    m->lost = take(layers, sizeof *m->lost);
    if (!m->slot_expert || !m->n_copies || !m->rank_slot0 || !m->balancedness || !m->bound ||
        !m->moves || !m->lost) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a map of %d layers", a->layers);
    }
    return HD_OK;
}

static hd_status open_layer(planner *p, hd_err *err) {
    const hd_eplb_args *a = &p->args;
    const size_t slots = (size_t)a->slots, ranks = (size_t)a->ranks, n = slots + ranks;
    eplb_layer *l = &p->layer;
    *l = (eplb_layer){.args = a, .experts = a->experts, .slots = a->slots, .ranks = a->ranks};
    p->nth = take((size_t)a->layers * slots, sizeof *p->nth);
    p->node = take(ranks, sizeof *p->node);
    p->rank = take(slots, sizeof *p->rank);
    l->expert = take(slots, sizeof *l->expert);
    l->nth = take(slots, sizeof *l->nth);
    l->copies = take((size_t)a->experts, sizeof *l->copies);
    l->home = take((size_t)a->experts, sizeof *l->home);
    l->cost = take(ranks, sizeof *l->cost);
    l->held = take(ranks * (size_t)a->experts, sizeof *l->held);
    l->keys = take(n, sizeof *l->keys);
    l->tree = take(4 * n, sizeof *l->tree);
    l->value = take(3 * n, sizeof *l->value);
    l->words = take(11 * n, sizeof *l->words);
    l->saved = take(2 * slots, sizeof *l->saved);
    if (!p->nth || !p->node || !p->rank || !l->expert || !l->nth || !l->copies || !l->home ||
        !l->cost || !l->held || !l->keys || !l->tree || !l->value || !l->words || !l->saved) {
        return HD_FAIL(err, HD_ENOMEM, "no memory to plan %d slots", a->slots);
    }
    l->first = p->map->rank_slot0;
    l->node = p->node;
    l->rank = p->rank;
    return HD_OK;
}

static void close_planner(planner *p) {
    eplb_layer *l = &p->layer;
    free(p->nth);
    free(p->node);
    free(p->rank);
    free(l->expert);
    free(l->nth);
    free(l->copies);
    free(l->home);
    free(l->cost);
    free(l->held);
    free(l->keys);
    free(l->tree);
    free(l->value);
    free(l->words);
    free(l->saved);
}

/* First slots, nodes and ranks of slots. */
static hd_status prepare_slots(planner *p, hd_err *err) {
    const hd_eplb_args *a = &p->args;
    eplb_layer *l = &p->layer;
    int32_t *first = p->map->rank_slot0;
    int64_t at = 0;
    l->nodes = uses_nodes(a) ? a->nodes : 1;
    for (int32_t d = 0; d < a->ranks; d++) {
        const int32_t equal = a->slots / a->ranks + (d < a->slots % a->ranks);
        const int32_t n = a->rank_slots ? a->rank_slots[d] : equal;
        if (n < 0 || at + n > a->slots) {
            return HD_FAIL(err, HD_EINVAL, "the ranks' slots do not add up to %d", a->slots);
        }
        const bool gone = a->gone && a->gone[d];
        first[d] = (int32_t)at;
        p->node[d] = l->nodes > 1 ? d / (a->ranks / a->nodes) : 0;
        for (int32_t s = 0; s < n; s++) p->rank[at + s] = d;
        at += n;
        first[d + 1] = (int32_t)at;
        if (gone) continue;
        l->alive += n > 0;
        l->usable += n;
    }
    if (at != a->slots) {
        return HD_FAIL(err, HD_EINVAL, "the ranks' slots do not add up to %d", a->slots);
    }
    if (l->usable < a->experts) {
        return HD_FAIL(err, HD_EINVAL, "%d slots cannot hold %d experts", l->usable,
                       a->experts);
    }
    /* A node too small for its groups: placement ignores nodes. */
    for (int32_t k = 0; k < l->nodes; k++) {
        int32_t n = 0;
        for (int32_t d = 0; d < a->ranks; d++) {
            if (p->node[d] == k && !(a->gone && a->gone[d])) n += first[d + 1] - first[d];
        }
        if (n >= a->experts / l->nodes) continue;
        l->nodes = 1;
        memset(p->node, 0, (size_t)a->ranks * sizeof *p->node);
    }
    return HD_OK;
}

/* ---- one layer ---- */

double eplb_recount(eplb_layer *l) {
    memset(l->copies, 0, (size_t)l->experts * sizeof *l->copies);
    memset(l->held, 0, (size_t)l->ranks * (size_t)l->experts * sizeof *l->held);
    for (int32_t s = 0; s < l->slots; s++) {
        if (l->expert[s] >= 0) l->copies[l->expert[s]]++;
    }
    double most = 0;
    for (int32_t d = 0; d < l->ranks; d++) {
        double cost = 0;
        for (int32_t s = l->first[d]; s < l->first[d + 1]; s++) {
            const int32_t e = l->expert[s];
            if (e < 0) continue;
            cost += eplb_cost(l, e, l->copies[e]);
            ++*eplb_held(l, d, e);
        }
        l->cost[d] = cost;
        most = cost > most ? cost : most;
    }
    return most;
}

/* The mean and the bound: copies cannot lower the sum, and the greedy choice of copies, at most
 * one per rank, lowers the largest cost of a copy best. */
static void set_bound(eplb_layer *l) {
    double total = 0, rows = 0;
    for (int32_t e = 0; e < l->experts; e++) rows += l->loads[e];
    l->scale = rows > 0 ? l->args->step_rows / rows : 0;
    for (int32_t e = 0; e < l->experts; e++) {
        l->value[e] = eplb_cost(l, e, 1);
        total += l->value[e];
    }
    l->mean = total / l->alive;
    l->least = l->mean;
    if (l->args->algorithm == HD_EPLB_FLOW) {
        /* Free split: the k hottest experts live on at most as many ranks as they have copies. */
        int32_t *order = l->words;
        eplb_sort(l, l->value, l->experts, order, l->words + l->slots + l->ranks);
        double sum = 0;
        const int32_t spare = l->usable - l->experts;
        for (int32_t k = 0; k < l->experts && spare + k + 1 < l->alive; k++) {
            sum += l->value[order[k]];
            const double least = sum / (spare + k + 1);
            l->least = least > l->least ? least : l->least;
        }
        return;
    }
    const double tau = eplb_choose_copies(l, -1, l->usable, l->alive);
    l->least = tau > l->least ? tau : l->least;
}

/* Copies in the order of slots, where the planner does not say. */
static void number_copies(eplb_layer *l) {
    memset(l->copies, 0, (size_t)l->experts * sizeof *l->copies);
    for (int32_t s = 0; s < l->slots; s++) {
        l->nth[s] = l->expert[s] < 0 ? -1 : l->copies[l->expert[s]]++;
    }
}

static void save(eplb_layer *l) {
    const size_t bytes = (size_t)l->slots * sizeof *l->saved;
    memcpy(l->saved, l->expert, bytes);
    memcpy(l->saved + l->slots, l->nth, bytes);
}

static void restore(eplb_layer *l) {
    const size_t bytes = (size_t)l->slots * sizeof *l->saved;
    memcpy(l->expert, l->saved, bytes);
    memcpy(l->nth, l->saved + l->slots, bytes);
}

static void plan_even(eplb_layer *l) {
    double published = HUGE_VAL;
    if (divides(l->args) && l->args->phase != HD_EPLB_DECODE) {
        eplb_published(l);
        published = eplb_recount(l);
        save(l);
    }
    eplb_place(l);
    eplb_recount(l);
    eplb_descend(l, l->least * (1 + 1e-4), -1);
    number_copies(l);
    double cost = eplb_recount(l);
    if (cost > published) {
        restore(l);
        cost = eplb_recount(l);
    }
    if (eplb_search(l, cost)) number_copies(l);
}

static int32_t count_moves(eplb_layer *l, const int32_t *previous) {
    int32_t moves = 0;
    for (int32_t d = 0; d < l->ranks; d++) {
        for (int32_t s = l->first[d]; s < l->first[d + 1]; s++) {
            const int32_t e = l->expert[s];
            bool known = e < 0;
            for (int32_t t = l->first[d]; t < l->first[d + 1] && !known; t++) {
                known = previous[t] == e;
            }
            for (int32_t t = l->first[d]; t < s && !known; t++) known = l->expert[t] == e;
            moves += !known;
        }
    }
    return moves;
}

static double plan_layer(eplb_layer *l, const int32_t *previous, int32_t *lost) {
    const hd_eplb_args *a = l->args;
    set_bound(l);
    if (previous) {
        *lost = eplb_restore(l, previous);
        eplb_recount(l);
        const int32_t forced = *lost ? count_moves(l, previous) : 0;
        const int64_t left = a->max_moves < 0        ? -1
                             : a->max_moves > forced ? a->max_moves - forced
                                                     : 0;
        const int64_t used = eplb_descend(l, l->least / a->target, left);
        eplb_fill(l, left < 0 ? -1 : left - used);
        number_copies(l);
    } else if (a->algorithm == HD_EPLB_PUBLISHED) {
        eplb_published(l);
    } else if (a->algorithm == HD_EPLB_FLOW) {
        eplb_chain(l);
        number_copies(l);
    } else {
        plan_even(l);
    }
    return eplb_recount(l);
}

/* The largest cost with a free split. */
static hd_status flow_cost(eplb_layer *l, double *most, hd_err *err) {
    double total = 0;
    for (int32_t e = 0; e < l->experts; e++) total += l->loads[e];
    if (total <= 0) return HD_OK;
    hd_eplb_splitter *s;
    HD_TRY(hd_eplb_splitter_open(&s, l->expert, l->first, l->experts, l->ranks, err));
    const double unit = SPLIT_ROWS / total;
    int32_t *rows = l->words;
    for (int32_t e = 0; e < l->experts; e++) rows[e] = (int32_t)(l->loads[e] * unit);
    *most = (double)hd_eplb_split(s, rows, rows + l->slots + l->ranks, NULL) / unit;
    hd_eplb_splitter_close(s);
    if (*most < l->least) *most = l->least; /* rows were rounded down */
    return HD_OK;
}

static hd_status plan_all(planner *p, hd_err *err) {
    const hd_eplb_args *a = &p->args;
    eplb_layer *l = &p->layer;
    hd_eplb_map *m = p->map;
    for (int32_t i = 0; i < a->layers; i++) {
        const size_t slot0 = (size_t)i * (size_t)a->slots;
        const size_t expert0 = (size_t)i * (size_t)a->experts;
        const int32_t *previous = a->previous ? a->previous + slot0 : NULL;
        l->loads = a->loads + expert0;
        double most = plan_layer(l, previous, &m->lost[i]);
        memcpy(m->slot_expert + slot0, l->expert, (size_t)a->slots * sizeof *l->expert);
        memcpy(m->n_copies + expert0, l->copies, (size_t)a->experts * sizeof *l->copies);
        memcpy(p->nth + slot0, l->nth, (size_t)a->slots * sizeof *l->nth);
        if (a->algorithm == HD_EPLB_FLOW) HD_TRY(flow_cost(l, &most, err));
        m->balancedness[i] = most > 0 ? l->mean / most : 1;
        m->bound[i] = l->least > 0 ? l->mean / l->least : 1;
        m->n_reached += most * a->target <= l->least * (1 + 1e-9);
        if (previous) m->moves[i] = count_moves(l, previous);
    }
    return HD_OK;
}

/* The slots of each expert, in the order of its copies. */
static hd_status index_copies(planner *p, hd_err *err) {
    hd_eplb_map *m = p->map;
    const size_t n = (size_t)m->layers * (size_t)m->experts;
    for (size_t i = 0; i < n; i++) {
        if (m->n_copies[i] > m->most_copies) m->most_copies = m->n_copies[i];
    }
    const size_t most = (size_t)m->most_copies;
    m->expert_slots = take(n * most, sizeof *m->expert_slots);
    if (!m->expert_slots) return HD_FAIL(err, HD_ENOMEM, "no memory for the tables of a map");
    memset(m->expert_slots, -1, n * most * sizeof *m->expert_slots);
    for (size_t i = 0; i < (size_t)m->layers; i++) {
        for (int32_t s = 0; s < m->slots; s++) {
            const size_t at = i * (size_t)m->slots + (size_t)s;
            if (m->slot_expert[at] < 0) continue;
            const size_t e = i * (size_t)m->experts + (size_t)m->slot_expert[at];
            m->expert_slots[e * most + (size_t)p->nth[at]] = s;
        }
    }
    return HD_OK;
}

static hd_status run(planner *p, hd_err *err) {
    const hd_eplb_args *a = &p->args;
    HD_TRY(check_loads(a, err));
    HD_TRY(check_previous(a, err));
    if (a->algorithm != HD_EPLB_HADAL && (a->previous || a->phase != HD_EPLB_ROWS)) {
        return HD_FAIL(err, HD_EINVAL, "only the algorithm hadal repairs a map or has phases");
    }
    if (a->algorithm == HD_EPLB_PUBLISHED && !divides(a)) {
        return HD_FAIL(err, HD_EINVAL,
                       "the published algorithm needs equal numbers of slots on all ranks; %d "
                       "slots on %d ranks are not",
                       a->slots, a->ranks);
    }
    HD_TRY(open_map(p, err));
    HD_TRY(open_layer(p, err));
    HD_TRY(prepare_slots(p, err));
    HD_TRY(plan_all(p, err));
    return index_copies(p, err);
}

hd_status hd_eplb_plan(hd_eplb_map *out, const hd_eplb_args *a, hd_err *err) {
    *out = (hd_eplb_map){0};
    HD_TRY(check_sizes(a, err));
    planner p = {.args = *a, .map = out};
    if (p.args.nodes == 0) p.args.nodes = 1;
    if (p.args.groups == 0) p.args.groups = 1;
    if (p.args.target <= 0) p.args.target = HD_EPLB_TARGET;
    const hd_status st = run(&p, err);
    close_planner(&p);
    if (st != HD_OK) hd_eplb_map_close(out);
    return st;
}

void hd_eplb_map_close(hd_eplb_map *m) {
    free(m->slot_expert);
    free(m->expert_slots);
    free(m->n_copies);
    free(m->rank_slot0);
    free(m->balancedness);
    free(m->bound);
    free(m->moves);
    free(m->lost);
    *m = (hd_eplb_map){0};
}
