/* constraint_internal.h - where a reply stands in what guides it, and which tokens may come next. */
#ifndef HD_RUNNER_CONSTRAINT_INTERNAL_H
#define HD_RUNNER_CONSTRAINT_INTERNAL_H

#include "runner/model_runner.h"

/* A reply under its guide: reasoning, then text of the grammar, whose beginning may be forced. */
typedef struct exec_reply {
    const hd_guide *guide; /* NULL: free, and nothing below means anything */
    bool begun;            /* it has a token */
    bool reasoning;
    bool free;                     /* content that comes is free */
    int32_t n_reasoning, n_forced; /* tokens of either so far */
    hd_grammar_watch watch;        /* of reasoning and free content */
    hd_grammar_state grammar;
} exec_reply;

/* What every reply's masks are made with; owned by the step thread. */
typedef struct exec_masks {
    const hd_grammar_vocab *vocab;
    hd_grammar_masks *cache;
    const int32_t *eos; /* [n_eos] of the model */
    int32_t n_eos;
    int32_t words; /* of a mask */
    hd_grammar_state *scratch;
} exec_masks;

/* Which tokens may come next. */
typedef enum exec_limit {
    EXEC_FREE,    /* any */
    EXEC_NO_END,  /* any but the end of the sequence: something must still follow */
    EXEC_BY_MASK, /* those of the mask that was written */
} exec_limit;

void exec_reply_start(exec_reply *r, const hd_guide *guide);
void exec_reply_copy(exec_reply *to, const exec_reply *from);
void exec_reply_advance(exec_reply *r, const exec_masks *m, int32_t token);

/* Nothing limits the tokens that come, until one of them says so: then this is no longer true. */
bool exec_reply_is_free(const exec_reply *r);

/* Writes mask [words] only for EXEC_BY_MASK. position: of the token that comes. */
exec_limit exec_reply_limit(const exec_reply *r, const exec_masks *m, int32_t position,
                            uint32_t *mask);

void exec_mask_no_end(const exec_masks *m, uint32_t *mask); /* the one of EXEC_NO_END */

static inline bool exec_mask_has(const uint32_t *mask, int32_t token) {
    return mask[token / 32] >> (token % 32) & 1u;
}

#endif
