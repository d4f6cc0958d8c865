/* runner.h - the interface between scheduler and model runner: sequence inputs and outputs
 * of a step.
 *
 * A hd_seq_input is one sequence's part of a batch: rows to compute (prefill or decode), its
 * block table, and how many of the last rows sample a token. Rows after the first sampling
 * row are drafts (speculative tokens). The draft in row i is accepted if it equals the token
 * sampled at row i - 1, so a step yields the accepted drafts and one more token. Sampling
 * depends on (seed, position) alone. The text is therefore the same with and without drafts,
 * and the distribution is exact. Relaxed acceptance, if a request enables it, accepts a
 * probable draft instead. */
#ifndef HD_RUNNER_RUNNER_H
#define HD_RUNNER_RUNNER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "hadal_types.h"
#include "kv/kv.h"

typedef struct hd_seq_input {
    int32_t slot; /* slot of the running request: index of its sampling state */
    /* [n] tokens to compute, drafts last: all tokens and drafts that the previous run
     * returned, unless the sequence ends before */
    const int32_t *tokens;
    int32_t n, start; /* rows, at positions start, start + 1, ... */
    int32_t n_sample; /* the last n_sample rows sample tokens; 0: prefill continues */
    /* Prompt rows, the last before the sampling ones, that report the log-probability of the
     * known token after each. The sequence has n_prompt_logprobs + n_sample logits rows. */
    int32_t n_prompt_logprobs;
    /* Of a prompt that goes on: the rows behind these that the next step has of it, and whether they
     * are its last. They may be computed with this step: it has exactly these, or the sequence leaves its
     * slot. Tokens and block tables reach so far. 0: not known */
    int32_t n_next;
    bool next_is_last;
    /* prompt token after the last row, if known; else -1 */
    int32_t after;
    /* Drafts to return for the next step, if a token is sampled. Then the block tables reach
     * as many positions beyond the rows, or a whole block if the drafter makes blocks. */
    int32_t want_drafts;
    int32_t left;    /* upper bound of the tokens still to come; 0: unknown */
    hd_kv_ends ends; /* hd_cache_ends(): what layers with tails compute the sequence for */
    /* [n_pages] block tables; they may reach beyond this step */
    const int32_t *pages[HD_N_KV_GROUPS];
    int32_t n_pages;
} hd_seq_input;

/* Result of one sequence. Pointers are valid until the next run. */
typedef struct hd_seq_output {
    hd_status status; /* HD_OK, or the failure of this sequence alone */
    /* Accepted drafts and one more token, none if n_sample is 0. The runner sets the tokens,
     * their log-probabilities and alternatives; the scheduler sets the other fields. */
    hd_step_tokens step;
    /* of the n_prompt_logprobs known tokens; the scheduler sets tokens and from */
    hd_prompt_logprobs prompt;
    int32_t n_drafts;
    int32_t drafts[HD_MAX_DRAFTS];
    /* of each draft the log-odds that it is accepted if those before it are; 0 of them if the
     * drafter does not know */
    int32_t n_confidence;
    float confidence[HD_MAX_DRAFTS];
} hd_seq_output;

/* Table of a runner: the model runner, the null runner, or a simulation in tests. */
typedef struct hd_runner {
    void *ctx;
    /* Runs the page copies in order, then the step, which may have no inputs. HD_EAGAIN: the step was given up and all
     * cached entries are lost; every sequence returns to the queue with its tokens. Another
     * error ends every sequence. */
    hd_status (*run)(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                     const hd_seq_input *inputs, int32_t n_inputs, hd_seq_output *outputs,
                     hd_err *err);
} hd_runner;

#endif
