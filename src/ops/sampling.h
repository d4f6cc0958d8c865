/* sampling.h - the sampler (penalties, temperature, top-k, top-p, min-p) and speculative
 * verification. */
#ifndef HD_OPS_SAMPLING_H
#define HD_OPS_SAMPLING_H

#include "hadal_types.h"
#include "ops/types.h"

HD_BEGIN_C

/* ---- sampling; docs/sampling.md ---- */

enum {
    HD_TOKEN_NONE = -1,  /* no token is allowed */
    HD_TOKEN_BROKEN = -2 /* a logit was NaN or +inf: a model error */
};

/* Sampling parameters of one request. All zero is greedy. The operator does not check the
 * numbers: finite, temperature >= 0, top_p and min_p in [0, 1], repetition_penalty >= 0. */
typedef struct hd_sampling {
    uint64_t seed;
    float temperature;        /* 0: greedy */
    float top_p;              /* 0, 1: off */
    float min_p;              /* 0: off */
    float repetition_penalty; /* 0, 1: off; tokens of prompt and output */
    float presence_penalty;   /* 0: off; tokens of the output */
    float frequency_penalty;  /* 0: off; times its count in the output */
    int32_t top_k;            /* 0: off */
    int32_t counts_row;       /* row of the counts table; see hd_has_penalty() */
    int32_t bias_at, n_bias;  /* its entries of the bias pool; they add up */
    /* Tokens banned before position ban_until (for min_tokens), as entries of the bias pool
     * whose values are ignored. */
    int32_t ban_at, n_ban;
    int32_t ban_until;
    int32_t n_top; /* top alternatives to report, <= top_stride */
    bool logprob;  /* report the token's log-probability */
    /* of reported log-probabilities; with temperature 0 they are raw */
    hd_logprob_mode logprob_mode;
    int32_t relaxed_top; /* see hd_sample_args.draft; either 0: off */
    float relaxed_delta;
} hd_sampling;

/* Returns whether the row of counts is read. */
static inline bool hd_has_penalty(const hd_sampling *p) {
    return (p->repetition_penalty != 0.0f && p->repetition_penalty != 1.0f) ||
           p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f;
}

/* A row of counts: how often a token occurs in the output, and whether the prompt contains
 * it. Counts saturate. */
enum { HD_COUNT_OUTPUT = 0x7fff, HD_COUNT_PROMPT = 0x8000 };

/* Zeroes rows clear[..] of counts, then counts token[i] in row row[i], as prompt or as
 * output. Negative tokens (of failed rows) are skipped. */
typedef struct hd_count_tokens_args {
    uint16_t *counts;     /* [*, vocab] */
    const int32_t *clear; /* [n_clear] */
    const int32_t *row;   /* [n] */
    const int32_t *token; /* [n] */
    int32_t n_clear, n, vocab;
    bool prompt;
} hd_count_tokens_args;

#define HD_ROWS_count_tokens(T)

/* Samples the token after each row, in this order: bias, bans and mask, penalties,
 * temperature, top-k, top-p, min-p, one Philox draw keyed by (seed, position). Ties are
 * ordered by lower id. Log-probabilities are those of the raw logits over the whole row,
 * before any of these steps; or, by logprob_mode, of the scores at the temperature over the
 * whole row; or of these over the tokens that could be drawn, -inf for all others. Ids from
 * n_ids on have no token: they are never sampled or listed. A failed row reports it in its token, and its other outputs are not written; other
 * rows are not affected. A request's drafts that are inputs up to row r, input[r -
 * n_drafted[r] + 1 .. r], are not in its counts yet and count as output for this row. They
 * are below n_ids.
 *
 * A row with a given token takes it unchanged and always reports its log-probability; its
 * scores are the logits. A row
 * with a draft (below n_ids) takes the draft instead of sampling (relaxed acceptance) under
 * these conditions. The draft is allowed and among the relaxed_top largest scores after
 * penalties, before the temperature. Its probability, by the softmax of those scores, is at
 * least the largest one's less relaxed_delta. */
typedef struct hd_sample_args {
    int32_t *token;            /* [rows] or HD_TOKEN_NONE, HD_TOKEN_BROKEN */
    float *logprob;            /* [rows] written where requested */
    int32_t *top_id;           /* [rows, top_stride] the first n_top written, most probable */
    float *top_logprob;        /* first; id -1 where the row has no more */
    const float *logits;       /* [rows, vocab] finite or -inf */
    const hd_sampling *params; /* [*] */
    const int32_t *slot;       /* [rows] of params */
    const int32_t *position;   /* [rows] of the token to sample */
    const hd_logit_bias *bias; /* the pool, or NULL */
    const uint32_t *mask;      /* [*, ceil(vocab / 32)] bit set: allowed; or NULL */
    const int32_t *mask_row;   /* [rows] of mask, -1: all allowed; read with mask */
    const uint16_t *counts;    /* [*, vocab] of count_tokens, or NULL without penalties */
    const int32_t *input;      /* [rows] the input token of each row */
    const int32_t *n_drafted;  /* [rows] see above, or NULL: no drafts */
    const int32_t *given;      /* [rows] below vocab, -1: sample; or NULL: all sample */
    const int32_t *draft;      /* [rows] -1: none; or NULL: none */
    int32_t rows, vocab, n_ids;
    int32_t top_stride; /* at most HD_MAX_ALTERNATIVES */
} hd_sample_args;

#define HD_ROWS_sample(T)

/* Verifies drafts (speculative decoding). Request s owns rows first_row[s] .. first_row[s +
 * 1] - 1, at least one; its inputs after the first are drafts. accepted[s] is the number of
 * leading drafts that equal the token sampled one row earlier. next[s] is the token sampled
 * after those. */
typedef struct hd_verify_args {
    int32_t *accepted;        /* [n] */
    int32_t *next;            /* [n] */
    const int32_t *token;     /* [rows] of sample */
    const int32_t *input;     /* [rows] */
    const int32_t *first_row; /* [n + 1] */
    int32_t n;
} hd_verify_args;

#define HD_ROWS_verify(T)

/* Greedy: token[r] = the id < n_ids of the largest logit, the lower id on a tie, among those
 * its mask allows. Used for drafts. It always returns an id: NaN counts as -inf, and id 0 is
 * the fallback. */
typedef struct hd_argmax_args {
    int32_t *token;          /* [rows] */
    const float *logits;     /* [rows, vocab] */
    const uint32_t *mask;    /* as in hd_sample_args; NULL: all are allowed */
    const int32_t *mask_row; /* [rows] -1: all */
    int32_t rows, vocab, n_ids;
} hd_argmax_args;

#define HD_ROWS_argmax(T)

#define HD_SAMPLING_OPS(X) X(count_tokens) X(sample) X(verify) X(argmax)

HD_END_C

#endif
