/* runner.h - one step: what the scheduler hands down, and what comes back.
 *
 * A hd_seq_input is one sequence's part of a step: some rows to compute, and how many of the last
 * rows to choose tokens at. Rows behind the first of those are drafts; row i's draft stands if
 * the token chosen at row i - 1 equals it, so a step yields the accepted drafts and one token
 * more. Choosing depends on (seed, position) alone, which makes the text the same with and
 * without drafts and keeps the distribution exact. Relaxed acceptance, where a request asks for
 * it, chooses a probable draft instead. */
#ifndef HD_RUNNER_RUNNER_H
#define HD_RUNNER_RUNNER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "kv/kv.h"

enum { HD_MAX_DRAFTS = 7, HD_MAX_STEP_TOKENS = HD_MAX_DRAFTS + 1 };

typedef struct hd_seq_input {
    int32_t slot;          /* which running request: index of its sampling state */
    const int32_t *tokens; /* [n] to compute, drafts last: all that the run before gave, unless
                              the sequence ends before */
    int32_t n, start;      /* at positions start, start + 1, ... */
    int32_t n_sample;      /* the last n_choose rows choose tokens; 0: a prompt goes on */
    int32_t
        n_prompt_logprobs; /* prompt rows, the last before the choosing ones, that report how probable
                        the known token behind each is; logits rows: n_score + n_choose */
    int32_t after;       /* the prompt token behind the last row, where one is known; else -1 */
    int32_t want_drafts; /* drafts wanted for the next step, if any token is chosen */
    int32_t left;        /* tokens until it ends at the latest; 0: not known */
    const int32_t *pages[HD_N_KV_GROUPS]; /* [n_pages] page tables, perhaps beyond this step */
    int32_t n_pages;
} hd_seq_input;

/* Pointers are valid until the next run. Tops: [.., HD_MAX_TOP_LOGPROBS], id -1 behind the
 * last; only where the request asked for alternatives. */
typedef struct hd_seq_output {
    hd_status status; /* HD_OK, or why this sequence alone failed */
    int32_t n_tokens; /* chosen: accepted drafts and one more; 0 when n_choose was 0 */
    int32_t tokens[HD_MAX_STEP_TOKENS];
    float logprobs[HD_MAX_STEP_TOKENS];
    const int32_t *top_ids; /* of tokens[], or NULL */
    const float *top_logprobs;
    const float *scores; /* [n_score] log-probabilities of known tokens, or NULL */
    const int32_t *score_top_ids;
    const float *score_top_logprobs;
    int32_t n_drafts;
    int32_t drafts[HD_MAX_DRAFTS];
} hd_seq_output;

/* Whoever can compute steps: the executor of a model, a null device, a simulation. */
typedef struct hd_runner {
    void *ctx;
    /* First runs the copies, in order. An error ends the rank: every sequence of it. */
    hd_status (*run)(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                     const hd_seq_input *inputs, int32_t n_inputs, hd_seq_output *outputs,
                     hd_err *err);
} hd_runner;

#endif
