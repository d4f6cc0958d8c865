/* decode_graph_internal.h - steps of a fixed shape, captured as CUDA graphs.
 *
 * A shape is n sequences with the same number of drafts, and some rows of prompts. Only the content of
 * device memory differs from step to step; docs/graphs.md. A launched step is in flight
 * until its output is collected. There may be two in-flight steps; the later one continues
 * the earlier one, whose output the host has not read yet. */
#ifndef HD_RUNNER_DECODE_GRAPH_INTERNAL_H
#define HD_RUNNER_DECODE_GRAPH_INTERNAL_H

#include "runner/model_runner.h"

/* Returns whether a sequence is in the step after this one, as far as is known. */
static inline bool runner_continues(const hd_seq_input *w) {
    return w->n_sample ? w->left != 1 : w->n_next > 0;
}

/* Positions after the longest sequence that padding rows may have: 2 * d after the last
 * token, if other sequences draft d deep. */
enum { RUNNER_LOOKAHEAD = 2 * HD_MAX_STEP_TOKENS };

typedef struct runner_graph_shape {
    int32_t n, n_drafts; /* sequences; drafts verified and made for each */
    int32_t n_before;    /* rows of prompts before those of all sequences that sample */
} runner_graph_shape;

static inline int32_t runner_shape_logits(const runner_graph_shape *z) {
    return z->n * (1 + z->n_drafts);
}

static inline int32_t runner_shape_rows(const runner_graph_shape *z) {
    return runner_shape_logits(z) + z->n_before;
}

/* The rows of prompts that a shape has too many are padding of a sequence of their own. */
static inline int32_t runner_shape_seqs(const runner_graph_shape *z) {
    return z->n + (z->n_before > 0);
}

/* Inputs of a graph step, which the host writes: one block per shape. */
typedef struct runner_graph_inputs {
    int32_t *n_live;
    int32_t *inflight;            /* index of the in-flight step that gets the outputs */
    int32_t *graph_outputs_bytes; /* output bytes that the host reads */
    int32_t *choices_bytes;       /* bytes of choices of experts, likewise; 0: not recorded */
    hd_step_seq *seqs;            /* [n] */
    int32_t *mask_row;            /* [logits] mask row of each row that samples; -1: none */
    int32_t *before;              /* [n_before] tokens */
    int32_t *tables[HD_N_KV_GROUPS]; /* [seqs, table_stride] */
    size_t bytes;
} runner_graph_inputs;

/* Outputs of a graph step, which the host reads; rows as in ops.h. The top alternatives come
 * last because few requests ask for them. */
typedef struct runner_graph_outputs {
    int64_t *begun, *ended; /* the device's clock */
    int32_t *token;         /* [logits] */
    float *logprob;         /* [logits] */
    int32_t *accepted;      /* [n] */
    int32_t *draft;         /* [n, n_drafts] */
    size_t top_at;
    int32_t *top_id;    /* [logits, top_stride] */
    float *top_logprob; /* likewise */
    size_t bytes;
} runner_graph_outputs;

/* Device memory between the operators of a graph step, for the largest shape. */
typedef struct runner_graph_state {
    int32_t *parity;   /* [1] which of the two input blocks is next */
    hd_cursor *cursor; /* [n_slots] */
    int32_t *token, *next_token, *pos, *seq, *phase;                  /* [rows] */
    int32_t *logit_row, *slot, *position, *input, *n_drafted, *given; /* [logits] */
    int32_t *first_row, *verifiable, *wanted, *guess;                 /* [seqs + 1], [n] ... */
    int32_t *chain_token, *chain_next, *chain_pos, *chain_seq;        /* [n] */
    int32_t *chain_logit_row, *chain_first_row, *chain_phase;         /* [n], [n + 1], [n] */
    int32_t *block_token, *block_pos, *block_last, *block_seq; /* [n * block] of DSpark */
    int32_t *block_logit_row, *block_first_row, *block_phase;  /* [block, n], [n + 1], rows */
    size_t bytes;
} runner_graph_state;

/* What a step computes of a prompt; n 0: nothing. */
typedef struct runner_chunk {
    int32_t start, n;
    bool is_last;
} runner_chunk;

typedef struct runner_inflight_step {
    bool under_way;
    bool continues; /* it was queued directly after the step before it */
    bool mixed;     /* it has rows of prompts beside sequences that decode */
    bool tops;      /* a request wants top alternatives */
    bool as_graph;  /* launched as a graph, not operator by operator */
    runner_graph_shape shape;
    int32_t *index;      /* [n_slots] index of a slot's sequence in the step; -1: not in it */
    int32_t *capacity;   /* [n_slots] */
    runner_chunk *chunk; /* [n_slots] */
    void *graph_outputs; /* host memory, for the largest shape */
    bool recorded;       /* choices of experts come too */
    int32_t *choices;    /* host memory, for the largest shape */
    hd_device_event *done;
} runner_inflight_step;

typedef struct runner_captured_graph {
    hd_graph *graph;
    int32_t launches;
} runner_captured_graph;

/* Graphs of shapes with rows of prompts: these many, the one used longest ago is replaced. */
enum { RUNNER_CHUNK_GRAPHS = 16 };

typedef struct runner_chunk_graph {
    runner_graph_shape shape; /* n 0: none */
    runner_captured_graph captured;
    int64_t used; /* number of the launch of such shapes */
} runner_chunk_graph;

typedef struct runner_decode_graphs {
    bool on, queues; /* queues: operator by operator although the device can capture */
    runner_inflight_step inflight[2],
        *next;        /* next: the in-flight step to collect next, if it is under way */
    hd_cursor *known; /* [n_slots] the device's cursors; position -1: unknown */
    runner_graph_state graph_state;
    /* used alternately; the device alternates by graph_state.parity */
    void *graph_inputs_host[2];
    int32_t parity;
    void *graph_inputs_device, *graph_outputs_device, *graph_state_device;
    size_t bytes;                    /* device and pinned memory, captured graphs included */
    runner_captured_graph *captured; /* [n_sizes, n_drafts + 1] */
    runner_chunk_graph chunk_graphs[RUNNER_CHUNK_GRAPHS];
    int64_t chunk_launches;
    /* batch sizes of the shapes, ascending */
    int32_t *sizes, n_sizes;
    int32_t scratch_page[HD_N_KV_GROUPS];
    int32_t page_tokens;
    int32_t table_stride;       /* pages of a sequence and of the positions after its end */
    int64_t last_ended;         /* the device's clock */
    int64_t *stamps;            /* [2] host memory: when an eager step began and ended */
    hd_seq_input *eager_inputs; /* [n_slots] sequence inputs that no in-flight step has */
    hd_seq_output *eager_outputs;
    int32_t *eager_index; /* [n_slots] their indices in the step */
    hd_model_runner_times times;
} runner_decode_graphs;

/* decode_graph.c */
hd_status runner_decode_graph_open(hd_model_runner *x, hd_err *err);
void runner_decode_graph_close(hd_model_runner *x);

/* Return the batch of a step's rows, and one of one row per sequence for further drafts. */
hd_batch runner_graph_rows(const hd_model_runner *x, const runner_graph_inputs *o,
                           const runner_graph_shape *z);
hd_batch runner_graph_chain(const hd_model_runner *x, const runner_graph_inputs *o,
                            const runner_graph_shape *z);

/* Returns whether a step of this shape fits; *out is the shape for n sequences. */
bool runner_decode_graph_shape(const hd_model_runner *x, int32_t n, int32_t n_drafts,
                               int32_t n_before, runner_graph_shape *out);

/* Returns whether the host can queue this shape while another step runs, and is not held up: it is one
 * launch, or the device cannot capture. Always so without rows of prompts. */
bool runner_decode_graph_is_short(const hd_model_runner *x, const runner_graph_shape *shape);

/* Launches inputs[n] as in-flight step f. If `fresh`, sequences start from the inputs;
 * otherwise each continues where the step before leaves it, a prompt with its next rows. Sequences
 * that cannot outlive that step are left out, and no constraint may limit any of them. */
hd_status runner_decode_graph_launch(hd_model_runner *x, runner_inflight_step *f,
                                     const runner_graph_shape *shape,
                                     const hd_seq_input *inputs, int32_t n, bool fresh,
                                     hd_err *err);

/* What a follower gets of a launch, at most; and such a launch. */
size_t runner_decode_graph_input_bytes(const hd_model_runner *x);
hd_status runner_decode_graph_follow(hd_model_runner *x, const runner_graph_shape *shape,
                                     const void *inputs, hd_err *err);

/* Counts a step in which prompts run beside decoding, with the time that the device was idle before. */
void runner_note_mixed(hd_model_runner *x, int64_t begun, bool ahead);

/* After a failure the device's state is unknown, including its parity. */
void runner_decode_graph_reset(hd_model_runner *x);

/* Waits for f; after that, returns the output of one sequence in it. */
hd_status runner_decode_graph_wait(hd_model_runner *x, runner_inflight_step *f, hd_err *err);
void runner_decode_graph_output(hd_model_runner *x, const runner_inflight_step *f,
                                const hd_seq_input *w, hd_seq_output *c);

/* overlap.c: runs a step while the next one is in flight (overlap schedule). */
hd_status runner_run_overlapped(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                                hd_seq_output *outputs, hd_err *err);
/* another request has the slot now */
void runner_forget_slot(hd_model_runner *x, int32_t slot);

#endif
