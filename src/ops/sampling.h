/* sampling.h - choosing tokens and verifying drafts; docs/sampling.md. */
#ifndef HD_OPS_SAMPLING_H
#define HD_OPS_SAMPLING_H

#include "ops/types.h"

HD_BEGIN_C

/* ---- choosing tokens; docs/sampling.md ---- */

enum {
    HD_MAX_TOP_LOGPROBS = 20,
    HD_MAX_DRAFTED = 16, /* drafts of one request in a step */
    HD_TOKEN_NONE = -1,  /* every token was forbidden */
    HD_TOKEN_BROKEN = -2 /* a logit was NaN or +inf: something below is broken */
};

/* value is added to the logit of token id; -inf forbids it. */
typedef struct hd_logit_bias {
    int32_t id;
    float value;
} hd_logit_bias;

/* What one request asks of the sampler. All zero is greedy. The op trusts the numbers: finite,
 * temperature >= 0, top_p and min_p in [0, 1], repetition_penalty >= 0. */
typedef struct hd_sampling {
    uint64_t seed;
    float temperature;        /* 0: greedy */
    float top_p;              /* 0, 1: off */
    float min_p;              /* 0: off */
    float repetition_penalty; /* 0, 1: off; tokens of prompt and output */
    float presence_penalty;   /* 0: off; tokens of the output */
    float frequency_penalty;  /* 0: off; times each occurs in the output */
    int32_t top_k;            /* 0: off */
    int32_t counts_row;       /* of the counts table; see hd_has_penalty() */
    int32_t bias_at, n_bias;  /* its entries of the pool; they add up */
    int32_t ban_at, n_ban;    /* tokens forbidden before position ban_until, as entries of */
    int32_t ban_until;        /* the pool whose values do not count: end tokens, min_tokens */
    int32_t n_top;            /* alternatives to report, <= HD_MAX_TOP_LOGPROBS */
    bool logprob;             /* report the token's own */
    int32_t relaxed_top;      /* see hd_sample_args.draft; either 0: off */
    float relaxed_delta;
} hd_sampling;

/* Whether the row of counts is read at all. */
static inline bool hd_has_penalty(const hd_sampling *p) {
    return (p->repetition_penalty != 0.0f && p->repetition_penalty != 1.0f) ||
           p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f;
}

/* A row of counts: in how many places of the output a token is, and whether the prompt has it.
 * Counts stop at the largest that fits. */
enum { HD_COUNT_OUTPUT = 0x7fff, HD_COUNT_PROMPT = 0x8000 };

/* Zeroes rows clear[..] of counts, then notes token[i] in counts row row[i], as prompt or as
 * output. Negative tokens (a row that failed) are skipped. */
typedef struct hd_count_tokens_args {
    uint16_t *counts;     /* [*, vocab] */
    const int32_t *clear; /* [n_clear] */
    const int32_t *row;   /* [n] */
    const int32_t *token; /* [n] */
    int32_t n_clear, n, vocab;
    bool prompt;
} hd_count_tokens_args;

/* Chooses the token after each row. In this order: bias, bans and mask, penalties, temperature,
 * top-k, top-p, min-p, one draw of Philox keyed by (seed, position). Order ties by lower id.
 * Log-probabilities are those of the raw logits over the whole row, before any of it.
 * Ids from n_ids on have no token: never chosen, never listed. A row that fails says so in its
 * token, and its other outputs are not written; the rest of the step is not touched.
 * Drafts of a request that went in up to row r, input[r - n_drafted[r] + 1 .. r], are not in
 * its counts yet and are counted as output for this row. They are below n_ids.
 *
 * A row with a given token takes it as it is and reports its log-probability in any case. A row
 * with a draft (below n_ids) takes that instead of choosing, if it is one of the relaxed_top
 * largest scores after penalties, before the temperature, and its probability by the softmax of
 * those scores is at least the largest one's less relaxed_delta; it must be allowed. */
typedef struct hd_sample_args {
    int32_t *token;            /* [rows] or HD_TOKEN_NONE, HD_TOKEN_BROKEN */
    float *logprob;            /* [rows] written where asked for */
    int32_t *top_id;           /* [rows, HD_MAX_TOP_LOGPROBS] the first n_top written, most */
    float *top_logprob;        /* probable first; id -1 where the row has no more */
    const float *logits;       /* [rows, vocab] finite or -inf */
    const hd_sampling *params; /* [*] */
    const int32_t *slot;       /* [rows] of params */
    const int32_t *position;   /* [rows] of the token to choose */
    const hd_logit_bias *bias; /* the pool, or NULL */
    const uint32_t *mask;      /* [*, ceil(vocab / 32)] bit set: allowed; or NULL */
    const int32_t *mask_row;   /* [rows] of mask, -1: all allowed; read with mask */
    const uint16_t *counts;    /* [*, vocab] of count_tokens, or NULL without penalties */
    const int32_t *input;      /* [rows] the token that went into each row */
    const int32_t *n_drafted;  /* [rows] see above, or NULL: no drafts */
    const int32_t *given;      /* [rows] below vocab, -1: choose; or NULL: all choose */
    const int32_t *draft;      /* [rows] -1: none; or NULL: none */
    int32_t rows, vocab, n_ids;
} hd_sample_args;

/* Which drafts were right. Request s owns rows first_row[s] .. first_row[s + 1] - 1, at least
 * one; the inputs after the first are its drafts. accepted[s] of them equal the token sampled
 * one row earlier, without a gap, and next[s] is the token sampled after those. */
typedef struct hd_verify_args {
    int32_t *accepted;        /* [n] */
    int32_t *next;            /* [n] */
    const int32_t *token;     /* [rows] of sample */
    const int32_t *input;     /* [rows] */
    const int32_t *first_row; /* [n + 1] */
    int32_t n;
} hd_verify_args;

/* token[r] = the id < n_ids of the largest logit, the lower on a tie, of those that its mask
 * allows. For drafts: always an id, as NaN counts as -inf and id 0 stands in for nothing. */
typedef struct hd_argmax_args {
    int32_t *token;          /* [rows] */
    const float *logits;     /* [rows, vocab] */
    const uint32_t *mask;    /* as in hd_sample_args; NULL: all are allowed */
    const int32_t *mask_row; /* [rows] -1: all */
    int32_t rows, vocab, n_ids;
} hd_argmax_args;

HD_END_C

#endif
