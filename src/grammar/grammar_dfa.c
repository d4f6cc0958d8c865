/* grammar_dfa.c - determinizes each rule of a grammar by the subset construction and joins
 * them to an automaton. Calls of rules are symbols beside the bytes: two parses that call
 * the same rule next are one. Afterwards it finds left-recursive rules (refused) and the
 * frames on the shortest way out of a state (states without one are removed). It also finds
 * the bytes with which a rule may begin. */
#include "grammar/grammar_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

typedef struct set {
    uint32_t at, n; /* in members */
    uint32_t deny;  /* node of the rule's trie of denied words; UINT32_MAX: outside */
} set;

typedef struct maker {
    gram_builder *b;
    hd_grammar *g;
    uint32_t *members; /* of all sets, sorted within one */
    set *sets;         /* [n_states] */
    uint32_t *slots;   /* hash of sets, UINT32_MAX: empty */
    uint32_t *stamp;   /* [n_nodes] */
    uint32_t *stack, *targets, *gathered;
    uint32_t *calls;
    uint32_t now, mask;
    uint32_t n_members, n_targets, n_calls;
    size_t cap_members, cap_sets, cap_states, cap_arcs, cap_sites, cap_stack, cap_targets,
        cap_gathered, cap_calls, cap_stamp, cap_slots;
} maker;

static bool passes(const gram_builder *b, const gram_edge *e) {
    return e->rule == GRAM_EMPTY || (e->rule >= 0 && b->rules[e->rule].nullable);
}

/* Adds all nodes that are reached from the stack's nodes without a byte, and marks them with
 * the current stamp. */
static bool spread(maker *m, uint32_t n_stack, uint32_t *n_found) {
    gram_builder *b = m->b;
    *n_found = 0;
    while (n_stack > 0) {
        uint32_t node = m->stack[--n_stack];
        if (!gram_grow(b, &m->gathered, &m->cap_gathered, (size_t)*n_found + 1, 4))
            return false;
        m->gathered[(*n_found)++] = node;
        for (uint32_t e = b->heads[node]; e != UINT32_MAX; e = b->edges[e].next) {
            if (!gram_work(b, 1)) return false;
            uint32_t to = b->edges[e].to;
            if (!passes(b, &b->edges[e]) || m->stamp[to] == m->now) continue;
            m->stamp[to] = m->now;
            if (!gram_grow(b, &m->stack, &m->cap_stack, (size_t)n_stack + 1, 4)) return false;
            m->stack[n_stack++] = to;
        }
    }
    return true;
}

/* Finds rules that match the empty text, by iterating to a fixed point. */
static void find_nullable(maker *m) {
    gram_builder *b = m->b;
    for (bool changed = true; changed && b->status == HD_OK;) {
        changed = false;
        for (uint32_t i = 0; i < b->n_rules; i++) {
            uint32_t n;
            if (b->rules[i].nullable) continue;
            m->now++;
            m->stamp[b->rules[i].start] = m->now;
            if (!gram_grow(b, &m->stack, &m->cap_stack, 1, 4)) return;
            m->stack[0] = b->rules[i].start;
            if (!spread(m, 1, &n)) return;
            b->rules[i].nullable = m->stamp[b->rules[i].end] == m->now;
            changed |= b->rules[i].nullable;
        }
    }
}

static int compare_nodes(const void *a, const void *b) {
    uint32_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

static uint32_t hash_set(const uint32_t *members, uint32_t n, uint32_t deny) {
    uint32_t h = 2166136261u ^ deny;
    for (uint32_t i = 0; i < n; i++) h = (h ^ members[i]) * 16777619u;
    return h ^ h >> 15;
}

static bool grow_slots(maker *m) {
    gram_builder *b = m->b;
    uint32_t n_slots = m->mask ? 2 * (m->mask + 1) : 1024;
    if (!gram_grow(b, &m->slots, &m->cap_slots, n_slots, 4)) return false;
    memset(m->slots, 0xff, n_slots * sizeof *m->slots);
    m->mask = n_slots - 1;
    for (uint32_t s = 1; s < m->g->n_states; s++) {
        const set *x = &m->sets[s];
        uint32_t at = hash_set(m->members + x->at, x->n, x->deny);
        while (m->slots[at & m->mask] != UINT32_MAX) at++;
        m->slots[at & m->mask] = s;
    }
    return true;
}

/* Returns the state of the set at the end of members; removes the set if the state exists. */
static uint32_t intern(maker *m, uint32_t at, uint32_t deny, const gram_rule *rule) {
    gram_builder *b = m->b;
    hd_grammar *g = m->g;
    const uint32_t *members = m->members + at;
    uint32_t n = m->n_members - at, slot = hash_set(members, n, deny);
    for (; m->slots[slot & m->mask] != UINT32_MAX; slot++) {
        uint32_t s = m->slots[slot & m->mask];
        const set *x = &m->sets[s];
        if (x->n != n || x->deny != deny || memcmp(m->members + x->at, members, n * 4) != 0)
            continue;
        m->n_members = at;
        return s;
    }
    if (g->n_states == HD_GRAMMAR_MAX_STATES) {
        gram_fail(b, HD_EINVAL, "schema_too_complex", "more than %d states",
                  HD_GRAMMAR_MAX_STATES);
        return 0;
    }
    if (!gram_grow(b, &m->sets, &m->cap_sets, (size_t)g->n_states + 1, sizeof *m->sets) ||
        !gram_grow(b, &g->states, &m->cap_states, (size_t)g->n_states + 1, sizeof *g->states)) {
        return 0;
    }
    uint32_t s = g->n_states++;
    m->sets[s] = (set){at, n, deny};
    bool denied = deny != UINT32_MAX && b->deny[deny].word;
    bool accept = bsearch(&rule->end, members, n, 4, compare_nodes) != NULL && !denied;
    g->states[s] = (gram_state){.accept = accept};
    m->slots[slot & m->mask] = s;
    if (2 * g->n_states > m->mask && !grow_slots(m)) return 0;
    return s;
}

/* Returns the state of targets[n] and all nodes reached from them without a byte. */
static uint32_t state_of(maker *m, const uint32_t *targets, uint32_t n, uint32_t deny,
                         const gram_rule *rule) {
    gram_builder *b = m->b;
    uint32_t n_stack = 0, n_found;
    m->now++;
    if (!gram_work(b, n) || !gram_grow(b, &m->stack, &m->cap_stack, (size_t)n + 1, 4)) return 0;
    for (uint32_t i = 0; i < n; i++) {
        if (m->stamp[targets[i]] == m->now) continue;
        m->stamp[targets[i]] = m->now;
        m->stack[n_stack++] = targets[i];
    }
    if (!spread(m, n_stack, &n_found)) return 0;
    uint32_t at = m->n_members;
    if (!gram_grow(b, &m->members, &m->cap_members, (size_t)at + n_found + 1, 4)) return 0;
    for (uint32_t i = 0; i < n_found; i++) {
        uint32_t node = m->gathered[i];
        bool useful = node == rule->end;
        for (uint32_t e = b->heads[node]; !useful && e != UINT32_MAX; e = b->edges[e].next) {
            useful = b->edges[e].rule != GRAM_EMPTY;
        }
        if (useful) m->members[m->n_members++] = node;
    }
    qsort(m->members + at, m->n_members - at, 4, compare_nodes);
    return intern(m, at, deny, rule);
}

static uint32_t deny_next(const gram_builder *b, uint32_t deny, uint8_t byte) {
    if (deny == UINT32_MAX) return UINT32_MAX;
    uint32_t child = b->deny[deny].child;
    while (child != UINT32_MAX && b->deny[child].byte != byte) child = b->deny[child].sibling;
    return child;
}

static bool add_arc(maker *m, uint32_t first, uint8_t lo, uint8_t hi, uint32_t to) {
    hd_grammar *g = m->g;
    if (g->n_arcs > first) {
        gram_arc *last = &g->arcs[g->n_arcs - 1];
        if (last->to == to && last->hi + 1 == lo) {
            last->hi = hi;
            return true;
        }
    }
    if (!gram_grow(m->b, &g->arcs, &m->cap_arcs, (size_t)g->n_arcs + 1, sizeof *g->arcs)) {
        return false;
    }
    g->arcs[g->n_arcs++] = (gram_arc){to, lo, hi};
    return true;
}

/* Finds the byte values where edges of a set begin, and where denied words branch off. */
static bool find_borders(maker *m, const set *s, bool *border) {
    const gram_builder *b = m->b;
    memset(border, 0, 257);
    border[0] = border[256] = true;
    for (uint32_t i = 0; i < s->n; i++) {
        for (uint32_t e = b->heads[m->members[s->at + i]]; e != UINT32_MAX;
             e = b->edges[e].next) {
            if (!gram_work(m->b, 1)) return false;
            if (b->edges[e].rule != GRAM_BYTES) continue;
            border[b->edges[e].lo] = border[b->edges[e].hi + 1] = true;
        }
    }
    if (s->deny == UINT32_MAX) return true;
    for (uint32_t c = b->deny[s->deny].child; c != UINT32_MAX; c = b->deny[c].sibling) {
        border[b->deny[c].byte] = border[b->deny[c].byte + 1] = true;
    }
    return true;
}

/* The edges of a set, sorted by the interval they serve: targets[begin[i] .. begin[i + 1]). */
static bool sort_edges(maker *m, const set *s, const uint8_t *interval_of, uint32_t n_intervals,
                       uint32_t *begin) {
    gram_builder *b = m->b;
    memset(begin, 0, 257 * sizeof *begin);
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < s->n; i++) {
            uint32_t e = b->heads[m->members[s->at + i]];
            for (; e != UINT32_MAX; e = b->edges[e].next) {
                const gram_edge *edge = &b->edges[e];
                if (edge->rule != GRAM_BYTES) continue;
                uint32_t last = interval_of[edge->hi];
                if (!gram_work(b, last - interval_of[edge->lo] + 1)) return false;
                for (uint32_t k = interval_of[edge->lo]; k <= last; k++) {
                    if (pass == 0) {
                        begin[k + 1]++;
                    } else {
                        m->targets[begin[k]++] = edge->to;
                    }
                }
            }
        }
        if (pass == 1) break;
        for (uint32_t k = 0; k < n_intervals; k++) begin[k + 1] += begin[k];
        size_t need = (size_t)begin[n_intervals] + 1;
        if (!gram_grow(b, &m->targets, &m->cap_targets, need, 4)) return false;
    }
    /* the second pass moved each begin to its end */
    memmove(begin + 1, begin, n_intervals * sizeof *begin);
    begin[0] = 0;
    return true;
}

static bool make_arcs(maker *m, uint32_t state, const gram_rule *rule) {
    const set s = m->sets[state];
    bool border[257];
    uint8_t interval_of[256], low[256], high[256];
    uint32_t begin[258], n = 0;
    if (!find_borders(m, &s, border)) return false;
    for (uint32_t c = 0; c < 256; c++) {
        if (border[c]) low[n++] = (uint8_t)c;
        interval_of[c] = (uint8_t)(n - 1);
        high[n - 1] = (uint8_t)c;
    }
    if (!sort_edges(m, &s, interval_of, n, begin)) return false;
    uint32_t first = m->g->n_arcs;
    for (uint32_t k = 0; k < n && m->b->status == HD_OK; k++) {
        if (begin[k] == begin[k + 1]) continue;
        uint32_t deny = deny_next(m->b, s.deny, low[k]);
        uint32_t to = state_of(m, m->targets + begin[k], begin[k + 1] - begin[k], deny, rule);
        if (m->b->status != HD_OK || !add_arc(m, first, low[k], high[k], to)) return false;
    }
    m->g->states[state].arcs_at = first;
    m->g->states[state].n_arcs = (uint16_t)(m->g->n_arcs - first);
    return m->b->status == HD_OK;
}

static bool same_call(const gram_edge *a, const gram_edge *b) {
    return a->rule == b->rule && a->min == b->min && a->max == b->max;
}

static bool make_sites(maker *m, uint32_t state, const gram_rule *rule) {
    gram_builder *b = m->b;
    hd_grammar *g = m->g;
    const set s = m->sets[state];
    m->n_calls = 0;
    for (uint32_t i = 0; i < s.n; i++) {
        for (uint32_t e = b->heads[m->members[s.at + i]]; e != UINT32_MAX;
             e = b->edges[e].next) {
            if (b->edges[e].rule < 0) continue;
            if (!gram_grow(b, &m->calls, &m->cap_calls, (size_t)m->n_calls + 1, 4))
                return false;
            m->calls[m->n_calls++] = e;
        }
    }
    uint32_t first = g->n_sites;
    for (uint32_t i = 0; i < m->n_calls; i++) {
        if (m->calls[i] == UINT32_MAX) continue;
        const gram_edge call = b->edges[m->calls[i]];
        uint32_t n = 0;
        if (!gram_work(b, m->n_calls) ||
            !gram_grow(b, &m->targets, &m->cap_targets, m->n_calls, 4)) {
            return false;
        }
        for (uint32_t k = i; k < m->n_calls; k++) {
            if (m->calls[k] == UINT32_MAX || !same_call(&call, &b->edges[m->calls[k]]))
                continue;
            m->targets[n++] = b->edges[m->calls[k]].to;
            m->calls[k] = UINT32_MAX;
        }
        uint32_t to = state_of(m, m->targets, n, UINT32_MAX, rule);
        if (b->status != HD_OK) return false;
        if (g->n_sites == GRAM_MAX_SITES) {
            gram_fail(b, HD_EINVAL, "schema_too_complex",
                      "more than %d places that call a rule", GRAM_MAX_SITES);
            return false;
        }
        if (!gram_grow(b, &g->sites, &m->cap_sites, (size_t)g->n_sites + 1, sizeof *g->sites)) {
            return false;
        }
        /* an empty body may repeat as often as required */
        uint32_t min = b->rules[call.rule].nullable ? 1 : call.min;
        g->sites[g->n_sites++] =
            (gram_site){.ret = to, .min = min, .max = call.max, .rule = (uint32_t)call.rule};
    }
    g->states[state].sites_at = first;
    g->states[state].n_sites = (uint16_t)(g->n_sites - first);
    return true;
}

static bool make_rule(maker *m, gram_rule *rule) {
    uint32_t next = m->g->n_states;
    rule->state = state_of(m, &rule->start, 1, rule->deny, rule);
    for (; next < m->g->n_states && m->b->status == HD_OK; next++) {
        if (!make_arcs(m, next, rule) || !make_sites(m, next, rule)) return false;
    }
    return m->b->status == HD_OK;
}

/* Orders rules behind those they may begin with; refuses cycles. */
static bool order_rules(maker *m, uint32_t *order) {
    gram_builder *b = m->b;
    const hd_grammar *g = m->g;
    uint32_t n_order = 0, *at = calloc(b->n_rules, sizeof *at);
    uint32_t *path = calloc(b->n_rules, sizeof *path);
    uint8_t *color = calloc(b->n_rules, 1); /* 1: on the path, 2: done */
    const bool enough = at && path && color;
    if (!enough) gram_fail(b, HD_ENOMEM, NULL, "no memory for the order of rules");
    for (uint32_t r = 0; enough && r < b->n_rules && b->status == HD_OK; r++) {
        uint32_t n_path = 0;
        if (color[r]) continue;
        path[n_path++] = r;
        color[r] = 1;
        while (n_path > 0 && gram_work(b, 1)) {
            uint32_t rule = path[n_path - 1];
            const gram_state *start = &g->states[b->rules[rule].state];
            if (at[rule] == start->n_sites) {
                color[rule] = 2;
                order[n_order++] = rule;
                n_path--;
                continue;
            }
            uint32_t next = g->sites[start->sites_at + at[rule]++].rule;
            if (color[next] == 1) {
                gram_fail(b, HD_EINVAL, "schema_cycle",
                          "a reference leads back to itself "
                          "before anything is written");
            } else if (color[next] == 0) {
                color[next] = 1;
                path[n_path++] = next;
            }
        }
    }
    free(at);
    free(path);
    free(color);
    return b->status == HD_OK;
}

static uint32_t height_of(const hd_grammar *g, uint32_t state) {
    const gram_state *s = &g->states[state];
    uint32_t best = s->accept ? 0 : GRAM_ENDLESS_HEIGHT;
    for (uint32_t i = 0; i < s->n_arcs && best > 0; i++) {
        uint32_t h = g->states[g->arcs[s->arcs_at + i].to].height;
        if (h < best) best = h;
    }
    for (uint32_t i = 0; i < s->n_sites && best > 0; i++) {
        const gram_site *site = &g->sites[s->sites_at + i];
        uint32_t inside = g->states[site->body].height + !site->tail,
                 after = g->states[site->ret].height;
        uint32_t h = inside > after ? inside : after;
        if (h < best) best = h;
    }
    return best;
}

/* Iterates backwards, because edges mostly lead to later states, until nothing changes. */
static void find_heights(maker *m) {
    hd_grammar *g = m->g;
    for (uint32_t s = 0; s < g->n_states; s++) g->states[s].height = GRAM_ENDLESS_HEIGHT;
    for (bool changed = true; changed;) {
        changed = false;
        if (!gram_work(m->b, g->n_states / 4 + 1)) return;
        for (uint32_t s = g->n_states; s-- > 0;) {
            uint32_t h = height_of(g, s);
            if (h > HD_GRAMMAR_MAX_DEPTH) h = GRAM_ENDLESS_HEIGHT;
            if (h >= g->states[s].height) continue;
            g->states[s].height = (uint8_t)h;
            changed = true;
        }
    }
}

/* Removes states and arcs that lead nowhere. */
static void prune(hd_grammar *g) {
    for (uint32_t i = 0; i < g->n_states; i++) {
        gram_state *s = &g->states[i];
        uint16_t n = 0;
        for (uint32_t k = 0; k < s->n_arcs; k++) {
            gram_arc arc = g->arcs[s->arcs_at + k];
            if (g->states[arc.to].height == GRAM_ENDLESS_HEIGHT) continue;
            g->arcs[s->arcs_at + n++] = arc;
        }
        s->n_arcs = n;
        n = 0;
        for (uint32_t k = 0; k < s->n_sites; k++) {
            gram_site site = g->sites[s->sites_at + k];
            if (g->states[site.body].height == GRAM_ENDLESS_HEIGHT ||
                g->states[site.ret].height == GRAM_ENDLESS_HEIGHT) {
                continue;
            }
            g->sites[s->sites_at + n++] = site;
        }
        s->n_sites = n;
    }
}

static void find_first(maker *m, const uint32_t *order) {
    hd_grammar *g = m->g;
    for (uint32_t i = 0; i < g->n_rules; i++) {
        const gram_state *start = &g->states[m->b->rules[order[i]].state];
        gram_bytes *first = &g->first[order[i]];
        for (uint32_t k = 0; k < start->n_arcs; k++) {
            const gram_arc *arc = &g->arcs[start->arcs_at + k];
            for (uint32_t c = arc->lo; c <= arc->hi; c++) {
                first->bits[c >> 6] |= (uint64_t)1 << (c & 63);
            }
        }
        for (uint32_t k = 0; k < start->n_sites; k++) {
            const gram_bytes *other = &g->first[g->sites[start->sites_at + k].rule];
            for (int w = 0; w < 4; w++) first->bits[w] |= other->bits[w];
        }
    }
}

static void check_ends(gram_builder *b, const hd_grammar *g) {
    for (uint32_t i = 0; i < b->n_rules; i++) {
        const gram_rule *r = &b->rules[i];
        if (!r->tool || g->states[r->state].height < GRAM_ENDLESS_HEIGHT) continue;
        gram_fail(b, HD_EINVAL, "unsatisfiable", "no arguments have the form of the tool '%s'",
                  r->tool);
    }
    if (g->states[g->start].height == GRAM_ENDLESS_HEIGHT) {
        gram_fail(b, HD_EINVAL, "unsatisfiable", "no text has this form");
    }
}

static void finish(maker *m, int32_t root) {
    gram_builder *b = m->b;
    hd_grammar *g = m->g;
    uint32_t *order = calloc(b->n_rules, sizeof *order);
    g->n_rules = b->n_rules;
    g->first = calloc(b->n_rules, sizeof *g->first);
    g->longest = calloc(g->n_states, sizeof *g->longest);
    if (!order || !g->first || !g->longest)
        gram_fail(b, HD_ENOMEM, NULL, "no memory for %u rules", b->n_rules);
    for (uint32_t i = 0; i < g->n_sites; i++) {
        gram_site *site = &g->sites[i];
        const gram_state *ret = &g->states[site->ret];
        site->body = b->rules[site->rule].state;
        site->tail = site->max == 1 && ret->accept && ret->n_arcs == 0 && ret->n_sites == 0;
    }
    g->start = b->rules[root].state;
    g->bytes = sizeof *g + g->n_states * (sizeof *g->states + sizeof *g->longest) +
               g->n_arcs * sizeof *g->arcs + g->n_sites * sizeof *g->sites +
               g->n_rules * sizeof *g->first;
    if (g->bytes > HD_GRAMMAR_MAX_BYTES) {
        gram_fail(b, HD_EINVAL, "schema_too_complex", "an automaton of %zu bytes, more than %d",
                  g->bytes, HD_GRAMMAR_MAX_BYTES);
    }
    if (b->status == HD_OK && order_rules(m, order)) {
        find_heights(m);
        if (b->status == HD_OK) check_ends(b, g);
        prune(g);
        find_first(m, order);
        gram_find_longest(b, g);
    }
    free(order);
}

/* Frees memory allocated in advance. */
static void trim(void *data, size_t bytes) {
    void *old, *new;
    memcpy(&old, data, sizeof old);
    new = bytes ? realloc(old, bytes) : NULL;
    if (new) memcpy(data, &new, sizeof new);
}

hd_status gram_compile(gram_builder *b, hd_grammar *out, int32_t root) {
    maker m = {.b = b, .g = out};
    if (gram_grow(b, &m.stamp, &m.cap_stamp, (size_t)b->n_nodes + 1, 4)) {
        memset(m.stamp, 0, b->n_nodes * sizeof *m.stamp);
        find_nullable(&m);
    }
    if (b->status == HD_OK && grow_slots(&m) &&
        gram_grow(b, &m.sets, &m.cap_sets, 1, sizeof *m.sets) &&
        gram_grow(b, &out->arcs, &m.cap_arcs, 1, sizeof *out->arcs) &&
        gram_grow(b, &out->sites, &m.cap_sites, 1, sizeof *out->sites) &&
        gram_grow(b, &out->states, &m.cap_states, 1, sizeof *out->states)) {
        m.sets[0] = (set){0, 0, UINT32_MAX};
        out->states[0] = (gram_state){.accept = true};
        out->n_states = 1;
    }
    for (uint32_t r = 0; r < b->n_rules && b->status == HD_OK; r++) make_rule(&m, &b->rules[r]);
    if (b->status == HD_OK) finish(&m, root);
    if (b->status == HD_OK) {
        trim(&out->states, out->n_states * sizeof *out->states);
        trim(&out->arcs, out->n_arcs * sizeof *out->arcs);
        trim(&out->sites, out->n_sites * sizeof *out->sites);
    }
    free(m.members);
    free(m.sets);
    free(m.slots);
    free(m.stamp);
    free(m.stack);
    free(m.targets);
    free(m.gathered);
    free(m.calls);
    return b->status;
}
