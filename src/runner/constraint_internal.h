/* constraint_internal.h - where a reply stands in what guides it, and which tokens may come next. */
#ifndef HD_RUNNER_CONSTRAINT_INTERNAL_H
#define HD_RUNNER_CONSTRAINT_INTERNAL_H

#include "runner/model_runner.h"

/* A reply under its guide: reasoning, then text of the grammar, whose beginning may be forced. */
typedef struct runner_constraint {
    const hd_constraint *constraint; /* NULL: free, and nothing below means anything */
    bool begun;                      /* it has a token */
    bool reasoning;
    bool free;                     /* content that comes is free */
    int32_t n_reasoning, n_forced; /* tokens of either so far */
    hd_grammar_watch watch;        /* of reasoning and free content */
    hd_grammar_state grammar;
} runner_constraint;

/* What every reply's masks are made with; owned by the step thread. */
typedef struct runner_masks {
    const hd_grammar_vocab *vocab;
    hd_grammar_masks *cache;
    const int32_t *eos; /* [n_eos] of the model */
    int32_t n_eos;
    int32_t words; /* of a mask */
    hd_grammar_state *scratch;
} runner_masks;

/* Which tokens may come next. */
typedef enum runner_token_limit {
    RUNNER_ANY_TOKEN, /* any */
    RUNNER_NO_EOS,    /* any but the end of the sequence: something must still follow */
    RUNNER_BY_MASK,   /* those of the mask that was written */
} runner_token_limit;

void runner_reply_start(runner_constraint *r, const hd_constraint *constraint);
void runner_reply_copy(runner_constraint *to, const runner_constraint *from);
void runner_reply_advance(runner_constraint *r, const runner_masks *m, int32_t token);

/* Nothing limits the tokens that come, until one of them says so: then this is no longer true. */
bool runner_reply_is_free(const runner_constraint *r);

/* Writes mask [words] only for RUNNER_BY_MASK. position: of the token that comes. */
runner_token_limit runner_reply_limit(const runner_constraint *r, const runner_masks *m,
                                      int32_t position, uint32_t *mask);

void runner_mask_no_end(const runner_masks *m, uint32_t *mask); /* the one of RUNNER_NO_EOS */

static inline bool runner_mask_has(const uint32_t *mask, int32_t token) {
    return mask[token / 32] >> (token % 32) & 1u;
}

#endif
