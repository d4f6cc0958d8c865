/* grammar_opening.c - detects the opening of tool calls in reasoning or free content. The
 * first byte of a marker occurs in it only once, so a failed search restarts at once. */
#include "grammar/grammar_vocab_internal.h"

static bool completes(const gram_opening *o, uint8_t *met, uint8_t byte) {
    *met = byte == o->marker[*met] ? *met + 1 : byte == o->marker[0];
    if (*met < o->n_marker) return false;
    *met = 0;
    return true;
}

/* Whether the rest of a token may follow the marker. */
static bool enter(const hd_grammar *g, const gram_opening *o, hd_grammar_state *s,
                  const uint8_t *rest, size_t n) {
    hd_grammar_start(g, s);
    return hd_grammar_advance(g, s, o->lead, o->n_lead) &&
           hd_grammar_advance(g, s, o->marker, o->n_marker) &&
           hd_grammar_advance(g, s, rest, n);
}

bool hd_grammar_watch_token(const hd_grammar_vocab *v, const hd_grammar *g, hd_grammar_watch *w,
                            hd_grammar_state *s, int32_t id) {
    size_t n;
    const uint8_t *bytes = gram_vocab_bytes(v, id, &n);
    if (n == 0) *w = (hd_grammar_watch){0};
    for (uint32_t i = 0; i < g->n_openings; i++) {
        const gram_opening *o = &g->openings[i];
        for (size_t k = 0; k < n; k++) {
            if (!completes(o, &w->met[i], bytes[k])) continue;
            if (enter(g, o, s, bytes + k + 1, n - k - 1)) return true;
            hd_grammar_start(g, s);
        }
    }
    return false;
}
