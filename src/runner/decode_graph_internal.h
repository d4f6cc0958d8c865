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
enum { EXEC_REACH_AHEAD = 2 * HD_MAX_CHOSEN };

typedef struct exec_shape {
    int32_t n, n_drafts; /* sequences; drafts that are verified and made for each */
} exec_shape;

/* What the host tells a step, one block of its shape. */
typedef struct exec_orders {
    int32_t *n_live;
    int32_t *flight;                 /* whose outcome this will be */
    int32_t *outcome_bytes;          /* that the host wants */
    hd_step_seq *seqs;               /* [n] */
    int32_t *mask_row;               /* [rows] what guides a row; -1: nothing */
    int32_t *tables[HD_N_LIFETIMES]; /* [n, table_stride] */
    size_t bytes;
} exec_orders;

/* What a step tells the host; rows as in ops.h. The alternatives are at the end, because they
 * are seldom asked for. */
typedef struct exec_outcome {
    int64_t *begun, *ended; /* the device's clock */
    int32_t *token;         /* [rows] */
    float *logprob;         /* [rows] */
    int32_t *accepted;      /* [n] */
    int32_t *draft;         /* [n, n_drafts] */
    size_t top_at;
    int32_t *top_id;    /* [rows, HD_MAX_TOP_LOGPROBS] */
    float *top_logprob; /* likewise */
    size_t bytes;
} exec_outcome;

/* Device memory between the ops of a step, for the largest shape. */
typedef struct exec_between {
    int32_t *turn;     /* [1] which of the orders come next */
    hd_cursor *cursor; /* [n_slots] */
    int32_t *token, *next_token, *pos, *seq, *logit_row, *live; /* [rows] */
    int32_t *slot, *position, *n_drafted, *given;               /* [rows] */
    int32_t *first_row, *start, *standing, *wanted, *guess;     /* [n + 1], [n] ... */
    int32_t *chain_token, *chain_next, *chain_pos, *chain_seq;  /* [n] */
    int32_t *chain_logit_row, *chain_first_row, *chain_start;   /* [n], [n + 1], [n] */
    size_t bytes;
} exec_between;

typedef struct exec_flight {
    bool under_way;
    bool continues; /* it was queued behind the step before it, at once */
    bool tops;      /* somebody wants alternatives */
    bool as_graph;  /* not operator by operator */
    exec_shape shape;
    int32_t *index; /* [n_slots] its place in the step; -1: not in it */
    int32_t *room;  /* [n_slots] */
    void *outcome;  /* on the host, of the largest shape */
    hd_mark *done;
} exec_flight;

typedef struct exec_recorded {
    hd_graph *graph;
    int32_t launches;
} exec_recorded;

typedef struct exec_fixed {
    bool on, queues;              /* queues: op by op although the device records */
    exec_flight flight[2], *next; /* next: whose outcome comes next, if it is under way */
    hd_cursor *known;             /* [n_slots] the device's; position -1: not known */
    exec_between between;
    void *orders_host[2]; /* used in turn, as the device does by between.turn */
    int32_t turn;
    void *orders_device, *outcome_device, *between_device;
    size_t bytes;            /* of the device and pinned, recorded graphs included */
    exec_recorded *recorded; /* [n_sizes, n_drafts + 1] */
    int32_t *sizes, n_sizes; /* numbers of sequences that shapes have, ascending */
    int32_t scratch_page[HD_N_LIFETIMES];
    int32_t page_tokens;
    int32_t table_stride; /* pages of a sequence and of the rows behind its end */
    int64_t last_ended;   /* the device's clock */
    hd_work *rest;        /* [n_slots] works of a turn that no flight has */
    hd_chosen *rest_chosen;
    int32_t *rest_of; /* [n_slots] their places in the turn */
    hd_executor_times times;
} exec_fixed;

/* decode_graph.c */
hd_status exec_fixed_open(hd_executor *x, hd_err *err);
void exec_fixed_close(hd_executor *x);

/* Whether a step of this shape fits; the shape for n sequences. */
bool exec_fixed_shape(const hd_executor *x, int32_t n, int32_t n_drafts, exec_shape *out);

/* Launches works[n] as a flight: fresh from what the works say, or where the flight before
 * leaves them, without those that cannot outlive it; then no guide limits any of them. */
hd_status exec_fixed_launch(hd_executor *x, exec_flight *f, const exec_shape *shape,
                            const hd_work *works, int32_t n, bool fresh, hd_err *err);

/* Waits for f; then what it has won for a work in it. */
hd_status exec_fixed_land(hd_executor *x, exec_flight *f, hd_err *err);
void exec_fixed_collect(hd_executor *x, const exec_flight *f, const hd_work *w, hd_chosen *c);

/* overlap.c: a turn with flights. */
hd_status exec_run_ahead(hd_executor *x, const hd_work *works, int32_t n, hd_chosen *chosen,
                         hd_err *err);
void exec_forget_slot(hd_executor *x, int32_t slot); /* another request has it now */

#endif
