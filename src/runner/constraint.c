/* constraint.c - advances an answer's constraint state token by token and computes its
 * masks.
 *
 * The state depends on the answer's tokens alone, so it can be rebuilt after a retraction
 * and tried along drafts. After a token that the constraint forbids (a draft that will be
 * rejected) the state is undefined, but no row after it counts. */
#include "runner/constraint_internal.h"

#include <string.h>

static bool awaits_forced(const runner_constraint *r) {
    return r->n_forced < r->constraint->n_forced;
}

/* Returns whether content must follow the reasoning. */
static bool must_follow(const runner_constraint *r) {
    return r->constraint->grammar && !r->free &&
           !hd_grammar_can_end(r->constraint->grammar, &r->grammar);
}

/* Returns whether tool calls open with this token, which then need no forced opening. */
static bool opens_calls(runner_constraint *r, const runner_masks *m, int32_t token) {
    const hd_constraint *g = r->constraint;
    if (!g->grammar ||
        !hd_grammar_watch_token(m->vocab, g->grammar, &r->watch, &r->grammar, token)) {
        return false;
    }
    r->n_forced = g->n_forced;
    return true;
}

/* A model that begins reasoning by itself does so with its first token or never. */
static bool may_think(const runner_constraint *r) {
    return !r->begun && !r->reasoning && r->constraint->think >= 0;
}

static bool must_stop_thinking(const runner_constraint *r) {
    const hd_constraint *g = r->constraint;
    return r->reasoning && g->unthink >= 0 && g->max_reasoning > 0 &&
           r->n_reasoning >= g->max_reasoning;
}

void runner_constraint_start(runner_constraint *r, const hd_constraint *constraint) {
    r->constraint = constraint;
    if (!constraint) return;
    r->begun = false;
    r->reasoning = constraint->reasoning;
    r->free = constraint->free;
    r->n_reasoning = r->n_forced = 0;
    r->watch = (hd_grammar_watch){0};
    if (constraint->grammar) hd_grammar_start(constraint->grammar, &r->grammar);
}

void runner_constraint_copy(runner_constraint *to, const runner_constraint *from) {
    to->constraint = from->constraint;
    if (!from->constraint) return;
    to->begun = from->begun;
    to->reasoning = from->reasoning;
    to->free = from->free;
    to->n_reasoning = from->n_reasoning;
    to->n_forced = from->n_forced;
    to->watch = from->watch;
    if (from->constraint->grammar) hd_grammar_copy(&to->grammar, &from->grammar);
}

void runner_constraint_advance(runner_constraint *r, const runner_masks *m, int32_t token) {
    const hd_constraint *g = r->constraint;
    if (!g) return;
    const bool thinks = may_think(r) && token == g->think;
    r->begun = true;
    if (thinks) {
        r->reasoning = true;
    } else if (r->reasoning && token == g->unthink) {
        r->reasoning = false;
        r->watch = (hd_grammar_watch){0};
    } else if (r->reasoning || r->free) {
        r->n_reasoning += r->reasoning;
        if (opens_calls(r, m, token)) r->reasoning = r->free = false;
    } else if (g->grammar) {
        r->n_forced += awaits_forced(r);
        hd_grammar_advance_token(m->vocab, g->grammar, &r->grammar, token);
    }
}

static void allow(uint32_t *mask, int32_t token) {
    mask[token / 32] |= 1u << (token % 32);
}

static void allow_one(const runner_masks *m, uint32_t *mask, int32_t token) {
    memset(mask, 0, (size_t)m->words * sizeof *mask);
    allow(mask, token);
}

/* Returns the limit by the constraint state alone. */
static runner_token_limit limit_by_state(const runner_constraint *r, const runner_masks *m,
                                         uint32_t *mask) {
    const hd_constraint *g = r->constraint;
    if (r->reasoning && !must_stop_thinking(r)) {
        return must_follow(r) ? RUNNER_NO_EOS : RUNNER_ANY_TOKEN;
    }
    if (must_stop_thinking(r)) {
        allow_one(m, mask, g->unthink);
    } else if (r->free) {
        return RUNNER_ANY_TOKEN;
    } else if (awaits_forced(r)) {
        allow_one(m, mask, g->forced[r->n_forced]);
    } else if (g->grammar) {
        hd_grammar_mask(m->cache, g->grammar, &r->grammar, mask);
    } else {
        return RUNNER_ANY_TOKEN;
    }
    if (may_think(r)) allow(mask, g->think);
    return RUNNER_BY_MASK;
}

bool runner_constraint_is_free(const runner_constraint *r) {
    const hd_constraint *g = r->constraint;
    if (!g) return true;
    if (g->n_ban > 0 || may_think(r)) return false;
    if (!r->reasoning) return r->free || !g->grammar;
    return g->max_reasoning == 0 && g->relaxed_top == 0 && !must_follow(r);
}

static bool allows_others(const hd_constraint *g, const runner_masks *m, const uint32_t *mask) {
    int32_t n = 0;
    for (int32_t i = 0; i < m->words; i++) n += __builtin_popcount(mask[i]);
    for (int32_t i = 0; i < g->n_ban; i++) n -= runner_mask_has(mask, g->ban[i]);
    return n > 0;
}

runner_token_limit runner_constraint_limit(const runner_constraint *r, const runner_masks *m,
                                           int32_t position, uint32_t *mask) {
    const hd_constraint *g = r->constraint;
    if (!g) return RUNNER_ANY_TOKEN;
    const runner_token_limit limit = limit_by_state(r, m, mask);
    if (g->n_ban == 0 || position >= g->ban_until) return limit;
    /* only the grammar limits this token */
    if (limit == RUNNER_BY_MASK && !r->reasoning && !awaits_forced(r)) {
        hd_grammar_mask_least(m->vocab, g->grammar, &r->grammar,
                              (uint32_t)(g->ban_until - position - 1), m->scratch, mask);
    }
    if (limit == RUNNER_ANY_TOKEN) memset(mask, 0xff, (size_t)m->words * sizeof *mask);
    if (limit == RUNNER_NO_EOS) runner_mask_no_end(m, mask);
    if (!allows_others(g, m, mask)) return limit;
    for (int32_t i = 0; i < g->n_ban; i++) mask[g->ban[i] / 32] &= ~(1u << (g->ban[i] % 32));
    return RUNNER_BY_MASK;
}

void runner_mask_no_end(const runner_masks *m, uint32_t *mask) {
    memset(mask, 0xff, (size_t)m->words * sizeof *mask);
    for (int32_t i = 0; i < m->n_eos; i++) mask[m->eos[i] / 32] &= ~(1u << (m->eos[i] % 32));
}
