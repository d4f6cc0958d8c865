/* decode_graph_internal.h - steps of a fixed shape: n sequences with as many drafts each, all of them
 * decoding, so that only the content of device memory differs from step to step.
 *
 * docs/graphs.md. A step that was launched is a flight until its outcome is collected; there
 * may be two, the later one continuing the earlier one, which the host has not seen yet. */
#ifndef HD_RUNNER_DECODE_GRAPH_INTERNAL_H
#define HD_RUNNER_DECODE_GRAPH_INTERNAL_H

#include "runner/model_runner.h"

/* Positions behind the longest sequence that rows of nobody's drafts may have: 2 * d behind a
 * last token, where others draft d deep. */
enum { RUNNER_LOOKAHEAD = 2 * HD_MAX_STEP_TOKENS };

typedef struct runner_graph_shape {
    int32_t n, n_drafts; /* sequences; drafts that are verified and made for each */
} runner_graph_shape;

/* What the host tells a step, one block of its shape. */
typedef struct runner_graph_inputs {
    int32_t *n_live;
    int32_t *inflight;               /* whose outcome this will be */
    int32_t *graph_outputs_bytes;    /* that the host wants */
    hd_step_seq *seqs;               /* [n] */
    int32_t *mask_row;               /* [rows] what guides a row; -1: nothing */
    int32_t *tables[HD_N_KV_GROUPS]; /* [n, table_stride] */
    size_t bytes;
} runner_graph_inputs;

/* What a step tells the host; rows as in ops.h. The alternatives are at the end, because they
 * are seldom asked for. */
typedef struct runner_graph_outputs {
    int64_t *begun, *ended; /* the device's clock */
    int32_t *token;         /* [rows] */
    float *logprob;         /* [rows] */
    int32_t *accepted;      /* [n] */
    int32_t *draft;         /* [n, n_drafts] */
    size_t top_at;
    int32_t *top_id;    /* [rows, HD_MAX_TOP_LOGPROBS] */
    float *top_logprob; /* likewise */
    size_t bytes;
} runner_graph_outputs;

/* Device memory between the ops of a step, for the largest shape. */
typedef struct runner_graph_state {
    int32_t *parity;   /* [1] which of the orders come next */
    hd_cursor *cursor; /* [n_slots] */
    int32_t *token, *next_token, *pos, *seq, *logit_row, *live; /* [rows] */
    int32_t *slot, *position, *n_drafted, *given;               /* [rows] */
    int32_t *first_row, *start, *verifiable, *wanted, *guess;   /* [n + 1], [n] ... */
    int32_t *chain_token, *chain_next, *chain_pos, *chain_seq;  /* [n] */
    int32_t *chain_logit_row, *chain_first_row, *chain_start;   /* [n], [n + 1], [n] */
    size_t bytes;
} runner_graph_state;

typedef struct runner_inflight_step {
    bool under_way;
    bool continues; /* it was queued behind the step before it, at once */
    bool tops;      /* somebody wants alternatives */
    bool as_graph;  /* not operator by operator */
    runner_graph_shape shape;
    int32_t *index;      /* [n_slots] its place in the step; -1: not in it */
    int32_t *capacity;   /* [n_slots] */
    void *graph_outputs; /* on the host, of the largest shape */
    hd_device_event *done;
} runner_inflight_step;

typedef struct runner_captured_graph {
    hd_graph *graph;
    int32_t launches;
} runner_captured_graph;

typedef struct runner_decode_graphs {
    bool on, queues; /* queues: op by op although the device records */
    runner_inflight_step inflight[2],
        *next;        /* next: whose outcome comes next, if it is under way */
    hd_cursor *known; /* [n_slots] the device's; position -1: not known */
    runner_graph_state graph_state;
    void *graph_inputs_host[2]; /* used in turn, as the device does by between.turn */
    int32_t parity;
    void *graph_inputs_device, *graph_outputs_device, *graph_state_device;
    size_t bytes;                    /* of the device and pinned, recorded graphs included */
    runner_captured_graph *recorded; /* [n_sizes, n_drafts + 1] */
    int32_t *sizes, n_sizes;         /* numbers of sequences that shapes have, ascending */
    int32_t scratch_page[HD_N_KV_GROUPS];
    int32_t page_tokens;
    int32_t table_stride; /* pages of a sequence and of the rows behind its end */
    int64_t last_ended;   /* the device's clock */
    hd_seq_input *rest;   /* [n_slots] works of a turn that no flight has */
    hd_seq_output *rest_outputs;
    int32_t *rest_of; /* [n_slots] their places in the turn */
    hd_model_runner_times times;
} runner_decode_graphs;

/* decode_graph.c */
hd_status runner_decode_graph_open(hd_model_runner *x, hd_err *err);
void runner_decode_graph_close(hd_model_runner *x);

/* Whether a step of this shape fits; the shape for n sequences. */
bool runner_decode_graph_shape(const hd_model_runner *x, int32_t n, int32_t n_drafts,
                               runner_graph_shape *out);

/* Launches works[n] as a flight: fresh from what the works say, or where the flight before
 * leaves them, without those that cannot outlive it; then no guide limits any of them. */
hd_status runner_decode_graph_launch(hd_model_runner *x, runner_inflight_step *f,
                                     const runner_graph_shape *shape,
                                     const hd_seq_input *inputs, int32_t n, bool fresh,
                                     hd_err *err);

/* Waits for f; then what it has won for a work in it. */
hd_status runner_decode_graph_wait(hd_model_runner *x, runner_inflight_step *f, hd_err *err);
void runner_decode_graph_output(hd_model_runner *x, const runner_inflight_step *f,
                                const hd_seq_input *w, hd_seq_output *c);

/* overlap.c: a turn with flights. */
hd_status runner_run_overlapped(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                                hd_seq_output *outputs, hd_err *err);
void runner_forget_slot(hd_model_runner *x, int32_t slot); /* another request has it now */

#endif
