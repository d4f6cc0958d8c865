/* grammar_match.c - the matcher: advances through the automaton byte by byte. A thread is a
 * state and a stack frame. Calls and returns happen when a byte needs them. A call is
 * entered only if its rule may begin with the byte, so one thread suffices wherever the next
 * byte decides. Nodes are immutable once written, so copies and the backtracking of the mask
 * walk are cheap. */
#include "grammar/grammar_automaton_internal.h"

#include <string.h>

enum { MAX_ITEMS = 256 };

typedef struct item {
    uint32_t state, node;
    bool may_pop; /* consumed a byte since it was entered */
} item;

typedef struct stepper {
    gram_run *run;
    hd_grammar_thread *out;
    uint32_t n_out, n_items, n_new;
    item items[MAX_ITEMS];
} stepper;

static bool fits(gram_run *r, uint32_t depth, uint32_t state) {
    uint32_t need = depth + r->g->states[state].height;
    if (need > HD_GRAMMAR_MAX_DEPTH) {
        r->limited = true;
        return false;
    }
    if (need > r->deepest) r->deepest = need;
    return true;
}

static uint32_t follow(const hd_grammar *g, uint32_t state, uint8_t byte) {
    const gram_state *s = &g->states[state];
    const gram_arc *arcs = g->arcs + s->arcs_at;
    for (uint32_t i = 0; i < s->n_arcs; i++) {
        if (byte < arcs[i].lo) break;
        if (byte <= arcs[i].hi) return arcs[i].to;
    }
    return UINT32_MAX;
}

/* Whether thread a can do all that thread b can, if their upper frames are equal. Counts
 * differ only in the repetitions left; beyond the minimum, the smaller count has more. */
static bool covers(const gram_run *r, hd_grammar_thread a, hd_grammar_thread b) {
    if (a.state != b.state) return false;
    if (a.node == b.node) return true;
    const hd_grammar_node *x = &r->nodes[a.node], *y = &r->nodes[b.node];
    if (x->parent != y->parent || x->site != y->site || a.node == 0 || b.node == 0) {
        return false;
    }
    if (x->count == y->count) return true;
    const gram_site *site = &r->g->sites[x->site];
    if (r->open_loop && x->parent == r->barrier) return false;
    if (site->max == GRAM_NO_MAX) return x->count >= y->count;
    return x->count >= site->min && x->count <= y->count;
}

static void emit(stepper *s, uint32_t state, uint32_t node) {
    gram_run *r = s->run;
    if (!fits(r, r->nodes[node].depth, state)) return;
    hd_grammar_thread t = {state, node};
    for (uint32_t i = 0; i < s->n_out; i++) {
        if (covers(r, s->out[i], t)) return;
        if (covers(r, t, s->out[i])) {
            s->out[i] = t;
            return;
        }
    }
    if (s->n_out == HD_GRAMMAR_MAX_THREADS) {
        r->dropped = true;
        return;
    }
    s->out[s->n_out++] = t;
    if (s->n_out > r->most) r->most = s->n_out;
}

static void later(stepper *s, uint32_t state, uint32_t node, bool may_pop) {
    if (s->n_items == MAX_ITEMS) {
        s->run->dropped = true;
        return;
    }
    s->items[s->n_items++] = (item){state, node, may_pop};
}

/* Enters a site's body for the count-th time, on top of parent. */
static void enter(stepper *s, uint32_t parent, uint32_t site, uint32_t count, uint8_t byte) {
    gram_run *r = s->run;
    const gram_site *at = &r->g->sites[site];
    if (!gram_bytes_has(&r->g->first[at->rule], byte)) return;
    uint32_t depth = r->nodes[parent].depth;
    if (at->tail) {
        if (fits(r, depth, at->body)) later(s, at->body, parent, false);
        return;
    }
    if (!fits(r, depth + 1, at->body) || !fits(r, depth, at->ret)) return;
    if (s->n_new == HD_GRAMMAR_STEP_NODES || r->n_nodes == r->cap) {
        r->dropped = true;
        return;
    }
    s->n_new++;
    r->nodes[r->n_nodes] =
        (hd_grammar_node){parent, count, (uint16_t)site, (uint16_t)(depth + 1)};
    later(s, at->body, r->n_nodes++, false);
}

/* Whether a state may accept a byte, judged by the state alone. */
static bool may_take(const hd_grammar *g, uint32_t state, uint8_t byte) {
    const gram_state *at = &g->states[state];
    if (at->accept || follow(g, state, byte) != UINT32_MAX) return true;
    for (uint32_t k = 0; k < at->n_sites; k++) {
        if (gram_bytes_has(&g->first[g->sites[at->sites_at + k].rule], byte)) return true;
    }
    return false;
}

static void leave(stepper *s, uint32_t node, uint8_t byte) {
    gram_run *r = s->run;
    if (node == r->barrier) {
        r->hit = true;
        return;
    }
    if (r->looked && node < r->n_base) r->looked[node] = 1;
    if (node == 0) return;
    const hd_grammar_node at = r->nodes[node];
    const gram_site *site = &r->g->sites[at.site];
    if (r->open_loop && at.parent == r->barrier) {
        if (may_take(r->g, site->ret, byte)) {
            r->ambiguous |= r->hit && r->hit_count != at.count;
            r->hit = true;
            r->hit_count = at.count;
        }
        enter(s, at.parent, at.site, at.count + 1, byte);
        return;
    }
    if (at.count >= site->min) later(s, site->ret, at.parent, true);
    if (site->max == GRAM_NO_MAX) {
        enter(s, at.parent, at.site, at.count < site->min ? at.count + 1 : at.count, byte);
    } else if (at.count < site->max) {
        enter(s, at.parent, at.site, at.count + 1, byte);
    }
}

uint32_t gram_step(gram_run *r, const hd_grammar_thread *in, uint32_t n, uint8_t byte,
                   hd_grammar_thread *out) {
    const hd_grammar *g = r->g;
    if (n == 1) { /* the usual case: one step inside a rule */
        const gram_state *at = &g->states[in[0].state];
        uint32_t to = follow(g, in[0].state, byte);
        if (!at->accept && !at->n_sites) {
            if (to == UINT32_MAX || !fits(r, r->nodes[in[0].node].depth, to)) return 0;
            out[0] = (hd_grammar_thread){to, in[0].node};
            return 1;
        }
    }
    stepper s; /* not cleared, because that costs time */
    s.run = r;
    s.out = out;
    s.n_out = s.n_items = s.n_new = 0;
    for (uint32_t i = 0; i < n; i++) {
        later(&s, in[i].state, in[i].node, true);
        while (s.n_items > 0) {
            item it = s.items[--s.n_items];
            const gram_state *at = &g->states[it.state];
            if (it.may_pop && at->accept) leave(&s, it.node, byte);
            for (uint32_t k = 0; k < at->n_sites; k++) {
                enter(&s, it.node, at->sites_at + k, 1, byte);
            }
            uint32_t to = follow(g, it.state, byte);
            if (to != UINT32_MAX) emit(&s, to, it.node);
        }
    }
    return s.n_out;
}

void hd_grammar_start(const hd_grammar *g, hd_grammar_state *s) {
    s->n_nodes = 1;
    s->nodes[0] = (hd_grammar_node){0};
    s->n_threads = 1;
    s->threads[0] = (hd_grammar_thread){g->start, 0};
}

void hd_grammar_copy(hd_grammar_state *to, const hd_grammar_state *from) {
    if (to == from) return;
    to->n_nodes = from->n_nodes;
    to->n_threads = from->n_threads;
    memcpy(to->threads, from->threads, from->n_threads * sizeof *to->threads);
    memcpy(to->nodes, from->nodes, from->n_nodes * sizeof *to->nodes);
}

/* Removes the nodes that no thread uses, keeping their order. */
static void compact(hd_grammar_state *s) {
    uint16_t place[HD_GRAMMAR_MAX_NODES] = {0};
    place[0] = 1;
    for (uint32_t t = 0; t < s->n_threads; t++) {
        for (uint32_t at = s->threads[t].node; !place[at]; at = s->nodes[at].parent) {
            place[at] = 1;
        }
    }
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        if (!place[i]) continue;
        hd_grammar_node node = s->nodes[i];
        node.parent = place[node.parent];
        if (i == 0) node.parent = 0;
        place[i] = (uint16_t)n;
        s->nodes[n++] = node;
    }
    for (uint32_t t = 0; t < s->n_threads; t++) s->threads[t].node = place[s->threads[t].node];
    s->n_nodes = n;
}

/* Frees the nodes above the topmost thread, and sometimes those between. */
static void close_states(hd_grammar_state *s) {
    uint32_t top = 0;
    for (uint32_t t = 0; t < s->n_threads; t++) {
        if (s->threads[t].node > top) top = s->threads[t].node;
    }
    s->n_nodes = top + 1;
    if (s->n_nodes > HD_GRAMMAR_MAX_NODES - HD_GRAMMAR_STEP_NODES) compact(s);
}

bool hd_grammar_advance(const hd_grammar *g, hd_grammar_state *s, const uint8_t *bytes,
                        size_t n) {
    gram_run r = {
        .g = g, .nodes = s->nodes, .cap = HD_GRAMMAR_MAX_NODES, .barrier = UINT32_MAX};
    for (size_t i = 0; i < n && s->n_threads > 0; i++) {
        hd_grammar_thread out[HD_GRAMMAR_MAX_THREADS];
        r.n_nodes = s->n_nodes;
        s->n_threads = gram_step(&r, s->threads, s->n_threads, bytes[i], out);
        memcpy(s->threads, out, s->n_threads * sizeof *out);
        s->n_nodes = r.n_nodes;
        close_states(s);
    }
    if (s->n_nodes > 256) compact(s); /* keeps copies cheap */
    return s->n_threads > 0;
}

bool hd_grammar_can_end(const hd_grammar *g, const hd_grammar_state *s) {
    for (uint32_t t = 0; t < s->n_threads; t++) {
        uint32_t state = s->threads[t].state, node = s->threads[t].node;
        while (g->states[state].accept && node != 0) {
            const gram_site *site = &g->sites[s->nodes[node].site];
            if (s->nodes[node].count < site->min) break;
            state = site->ret;
            node = s->nodes[node].parent;
        }
        if (node == 0 && g->states[state].accept) return true;
    }
    return false;
}
