/* constraint_internal.h - the constraint state of an answer (structured output), and its
 * token masks. */
#ifndef HD_RUNNER_CONSTRAINT_INTERNAL_H
#define HD_RUNNER_CONSTRAINT_INTERNAL_H

#include "runner/model_runner.h"

/* State of an answer under a constraint: reasoning, then text of the grammar, which may
 * begin with forced tokens. */
typedef struct runner_constraint {
    const hd_constraint *constraint; /* NULL: unconstrained; the fields below are unused */
    bool begun;                      /* the answer has a token */
    bool reasoning;
    bool free;                     /* the content from here on is unconstrained */
    int32_t n_reasoning, n_forced; /* reasoning tokens and forced tokens so far */
    hd_grammar_watch watch;        /* watches reasoning and unconstrained content for calls */
    hd_grammar_state grammar;
} runner_constraint;

/* What all masks are computed with; owned by the step thread. */
typedef struct runner_masks {
    const hd_grammar_vocab *vocab;
    hd_grammar_masks *cache;
    const int32_t *eos; /* [n_eos] end-of-sequence ids of the model */
    int32_t n_eos;
    int32_t words; /* 32-bit words of a mask */
    hd_grammar_state *scratch;
} runner_masks;

/* Which tokens are allowed next. */
typedef enum runner_token_limit {
    RUNNER_ANY_TOKEN, /* any token */
    RUNNER_NO_EOS,    /* any but end-of-sequence ids: the answer is not complete */
    RUNNER_BY_MASK,   /* the tokens of the mask that was written */
} runner_token_limit;

void runner_constraint_start(runner_constraint *r, const hd_constraint *constraint);
void runner_constraint_copy(runner_constraint *to, const runner_constraint *from);
void runner_constraint_advance(runner_constraint *r, const runner_masks *m, int32_t token);

/* Returns whether no token is limited now. A later token may change that. */
bool runner_constraint_is_free(const runner_constraint *r);

/* Returns the limit of the next token, at `position`. Writes mask [words] only for
 * RUNNER_BY_MASK. */
runner_token_limit runner_constraint_limit(const runner_constraint *r, const runner_masks *m,
                                           int32_t position, uint32_t *mask);

void runner_mask_no_end(const runner_masks *m, uint32_t *mask); /* the mask of RUNNER_NO_EOS */

static inline bool runner_mask_has(const uint32_t *mask, int32_t token) {
    return mask[token / 32] >> (token % 32) & 1u;
}

#endif
