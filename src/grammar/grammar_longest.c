/* grammar_longest.c - computes how much text may still follow a state, and removes from
 * masks the tokens after which too little may follow. Counts characters, because a token can
 * be as short as one. */
#include "grammar/grammar_vocab_internal.h"

#include <stdlib.h>

static bool begins_character(uint8_t byte) {
    return (byte & 0xc0) != 0x80;
}

static uint32_t plus(uint32_t a, uint32_t b) {
    return a > GRAM_NO_END - b ? GRAM_NO_END : a + b;
}

static uint32_t times(uint32_t n, uint32_t each) {
    const uint64_t all = (uint64_t)n * each;
    return each && (n == GRAM_NO_MAX || all > GRAM_NO_END) ? GRAM_NO_END : (uint32_t)all;
}

/* ---- of a grammar ---- */

static uint32_t by_site(const hd_grammar *g, const gram_site *site) {
    return plus(times(site->max, g->longest[site->body]), g->longest[site->ret]);
}

static uint32_t longest_of(const hd_grammar *g, uint32_t state) {
    const gram_state *s = &g->states[state];
    uint32_t most = 0;
    for (uint32_t i = 0; i < s->n_arcs; i++) {
        const gram_arc *arc = &g->arcs[s->arcs_at + i];
        const uint32_t own = plus(begins_character(arc->hi), g->longest[arc->to]);
        if (own > most) most = own;
    }
    for (uint32_t i = 0; i < s->n_sites; i++) {
        const uint32_t own = by_site(g, &g->sites[s->sites_at + i]);
        if (own > most) most = own;
    }
    return most;
}

static void add_range(gram_bytes *to, uint8_t lo, uint8_t hi) {
    for (uint32_t c = lo; c <= hi; c++) to->bits[c >> 6] |= (uint64_t)1 << (c & 63);
}

static void add_bytes(gram_bytes *to, const gram_bytes *from) {
    for (int w = 0; w < 4; w++) to->bits[w] |= from->bits[w];
}

/* Adds what a state can do next, byte for byte. */
static void add_next(const hd_grammar *g, uint32_t state, gram_bytes *to) {
    const gram_state *s = &g->states[state];
    for (uint32_t i = 0; i < s->n_arcs; i++) {
        add_range(to, g->arcs[s->arcs_at + i].lo, g->arcs[s->arcs_at + i].hi);
    }
    for (uint32_t i = 0; i < s->n_sites; i++) {
        add_bytes(to, &g->first[g->sites[s->sites_at + i].rule]);
    }
}

/* Finds bytes that may reduce what can follow by more than one character: they choose the
 * shorter of several ways, or end a text that could continue. */
static void find_costly(hd_grammar *g) {
    for (uint32_t state = 0; state < g->n_states; state++) {
        const gram_state *s = &g->states[state];
        for (uint32_t i = 0; i < s->n_arcs; i++) {
            const gram_arc *arc = &g->arcs[s->arcs_at + i];
            const uint32_t own = plus(begins_character(arc->lo), g->longest[arc->to]);
            if (own < g->longest[state]) add_range(&g->costly, arc->lo, arc->hi);
        }
        for (uint32_t i = 0; i < s->n_sites; i++) {
            const gram_site *site = &g->sites[s->sites_at + i];
            if (by_site(g, site) < g->longest[state])
                add_bytes(&g->costly, &g->first[site->rule]);
            add_next(g, site->ret, &g->costly);
        }
    }
}

/* Starts with no bound everywhere; a state gets one when all its successors have one. */
void gram_find_longest(gram_builder *b, hd_grammar *g) {
    for (uint32_t s = 0; s < g->n_states; s++) g->longest[s] = GRAM_NO_END;
    for (bool changed = true; changed;) {
        changed = false;
        if (!gram_work(b, g->n_states / 4 + 1)) return;
        for (uint32_t s = g->n_states; s-- > 0;) {
            if (g->longest[s] != GRAM_NO_END) continue;
            g->longest[s] = longest_of(g, s);
            changed |= g->longest[s] != GRAM_NO_END;
        }
    }
    find_costly(g);
}

/* ---- of a text ---- */

static uint32_t of_thread(const hd_grammar *g, const hd_grammar_state *s, uint32_t thread) {
    uint32_t sum = g->longest[s->threads[thread].state];
    for (uint32_t at = s->threads[thread].node; at != 0; at = s->nodes[at].parent) {
        const gram_site *site = &g->sites[s->nodes[at].site];
        const uint32_t again =
            site->max == GRAM_NO_MAX ? GRAM_NO_MAX : site->max - s->nodes[at].count;
        sum = plus(sum, plus(times(again, g->longest[site->body]), g->longest[site->ret]));
    }
    return sum;
}

static uint32_t of_text(const hd_grammar *g, const hd_grammar_state *s) {
    uint32_t most = 0;
    for (uint32_t t = 0; t < s->n_threads; t++) {
        const uint32_t own = of_thread(g, s, t);
        if (own > most) most = own;
    }
    return most;
}

typedef struct question {
    const hd_grammar *g;
    const hd_grammar_state *s;
    hd_grammar_state *scratch;
    uint32_t now, least; /* characters that may follow now, and that must after a token */
} question;

static bool leaves_enough(const question *q, const uint8_t *bytes, size_t n) {
    bool costly = false;
    for (size_t i = 0; i < n; i++) costly |= gram_bytes_has(&q->g->costly, bytes[i]);
    if (!costly && (q->now == GRAM_NO_END || q->now >= plus(q->least, (uint32_t)n)))
        return true;
    hd_grammar_copy(q->scratch, q->s);
    hd_grammar_advance(q->g, q->scratch, bytes, n);
    return of_text(q->g, q->scratch) >= q->least;
}

/* Processes the text tokens of the mask, or removes those that leave too little. */
static bool walk_mask(const hd_grammar_vocab *v, const question *q, uint32_t *mask, bool take) {
    for (int32_t id = 0; id < v->n_pieces; id++) {
        size_t n;
        if (!(mask[id / 32] >> (id % 32) & 1u)) continue;
        const uint8_t *bytes = gram_vocab_bytes(v, id, &n);
        if (n == 0) continue;
        const bool enough = leaves_enough(q, bytes, n);
        if (enough && !take) return true;
        if (!enough && take) mask[id / 32] &= ~(1u << (id % 32));
    }
    return false;
}

void hd_grammar_mask_least(const hd_grammar_vocab *v, const hd_grammar *g,
                           const hd_grammar_state *s, uint32_t least, hd_grammar_state *scratch,
                           uint32_t *mask) {
    const question q = {g, s, scratch, of_text(g, s), least};
    if (q.now > least && walk_mask(v, &q, mask, false)) walk_mask(v, &q, mask, true);
}
