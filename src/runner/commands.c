/* commands.c - forward passes of several ranks: the leader broadcasts what to run, and the
 * followers run the same.
 *
 * A command is a fixed header, then page copies or a batch's host block. It has every page
 * number that a pass reads or writes, so the followers' KV pools mirror the leader's, and
 * scheduler, prefix cache and sampler are the leader's alone. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "runner/model_runner_internal.h"

enum { MAX_COPIES = 64, COMMAND_COPY = RUNNER_DRAFT_AGAIN + 1, COMMAND_LOADS, COMMAND_END };

typedef struct command_header {
    int32_t kind; /* a runner_pass or one of the above */
    int32_t n_copies;
    int32_t n_rows, n_seqs, n_logits, most_rows; /* of the batch */
} command_header;

static uint8_t *payload(const hd_model_runner *x) {
    return x->command + sizeof(command_header);
}

hd_status runner_commands_open(hd_model_runner *x, hd_err *err) {
    if (x->o.role == HD_RUNNER_ALONE) return HD_OK;
    assert(x->env.comm && !x->o.fixed_steps);
    const size_t copies = MAX_COPIES * sizeof(hd_page_copy);
    const size_t batch = x->batch.bytes > x->chain.bytes ? x->batch.bytes : x->chain.bytes;
    x->command_bytes = sizeof(command_header) + (copies > batch ? copies : batch);
    x->command = calloc(1, x->command_bytes);
    if (!x->command) return HD_FAIL(err, HD_ENOMEM, "no memory for commands");
    const int32_t parts = hd_model_row_parts(x->model);
    if (parts == 1 || !hd_model_expert_rows(x->model)) return HD_OK;
    return runner_mirrored_open(&x->loads, x->env.device,
                                (size_t)parts * runner_n_loads(x) * sizeof(int64_t),
                                "expert loads", err);
}

/* The batch that a pass runs. */
static hd_batch *batch_of(hd_model_runner *x, int32_t pass) {
    return pass == RUNNER_DRAFT_AGAIN ? &x->chain : &x->batch;
}

static void run_pass(hd_model_runner *x, int32_t pass) {
    hd_batch *b = batch_of(x, pass);
    hd_batch_upload(b, x->env.stream);
    if (pass == RUNNER_STEP) {
        hd_model_step(x->model, x->kv, &b, 1);
    } else {
        hd_model_draft(x->model, x->kv, &b, 1, pass == RUNNER_DRAFT_AGAIN);
    }
}

static void broadcast(hd_model_runner *x) {
    hd_comm_broadcast(x->env.comm, x->env.stream,
                      &(hd_broadcast_args){HD_GROUP_TP, x->command, x->command_bytes});
}

/* An all-gather of floats, whose bits are those of the counters. */
static void gather_loads(const hd_model_runner *x) {
    const size_t n = runner_n_loads(x);
    const int32_t part = x->env.comm->groups[HD_GROUP_TP].index;
    const int32_t words = (int32_t)(n * sizeof(int64_t) / sizeof(float));
    hd_stream_copy(x->env.stream, (int64_t *)x->loads.device + (size_t)part * n,
                   hd_model_expert_rows(x->model), n * sizeof(int64_t));
    hd_comm_all_gather(x->env.comm, x->env.stream,
                       &(hd_all_gather_args){.group = HD_GROUP_TP,
                                             .x = x->loads.device,
                                             .rows = 1,
                                             .cols = (int32_t)(x->loads.bytes / sizeof(float)),
                                             .first = part * words,
                                             .own = words});
}

/* ---- the leader ---- */

static void command(hd_model_runner *x, const command_header *h) {
    memcpy(x->command, h, sizeof *h);
    broadcast(x);
}

void runner_forward(hd_model_runner *x, runner_pass pass) {
    const hd_batch *b = batch_of(x, (int32_t)pass);
    if (x->o.role == HD_RUNNER_LEADS) {
        memcpy(payload(x), b->host_block, b->bytes);
        command(x, &(command_header){.kind = (int32_t)pass,
                                     .n_rows = b->n_rows,
                                     .n_seqs = b->n_seqs,
                                     .n_logits = b->n_logits,
                                     .most_rows = b->most_rows});
    }
    run_pass(x, (int32_t)pass);
}

void runner_copy_pages(hd_model_runner *x, const hd_page_copy *copies, int32_t n) {
    for (int32_t i = 0; x->o.role == HD_RUNNER_LEADS && i < n; i += MAX_COPIES) {
        const int32_t some = hd_min_i32(n - i, MAX_COPIES);
        memcpy(payload(x), copies + i, (size_t)some * sizeof *copies);
        command(x, &(command_header){.kind = COMMAND_COPY, .n_copies = some});
    }
    hd_kv_copy(x->kv, x->env.stream, copies, n);
}

void runner_gather_loads(hd_model_runner *x) {
    command(x, &(command_header){.kind = COMMAND_LOADS});
    gather_loads(x);
}

void hd_model_runner_end(hd_model_runner *x) {
    if (x->o.role == HD_RUNNER_LEADS) command(x, &(command_header){.kind = COMMAND_END});
}

/* ---- a follower ---- */

static bool within(int32_t n, int32_t least, int32_t most) {
    return n >= least && n <= most;
}

static bool fits_batch(const hd_batch *b, const command_header *h) {
    return within(h->n_rows, 1, b->limits.rows) && within(h->n_seqs, 1, b->limits.seqs) &&
           within(h->n_logits, 0, h->n_rows) && within(h->most_rows, 1, h->n_rows);
}

/* Runs a command. Its lengths are checked, its contents are the leader's. */
static hd_status run_command(hd_model_runner *x, const command_header *h, hd_err *err) {
    if (h->kind == COMMAND_COPY && within(h->n_copies, 0, MAX_COPIES)) {
        hd_page_copy copies[MAX_COPIES];
        memcpy(copies, payload(x), sizeof copies);
        hd_kv_copy(x->kv, x->env.stream, copies, h->n_copies);
        return HD_OK;
    }
    if (h->kind == COMMAND_LOADS && x->loads.bytes) {
        gather_loads(x);
        return HD_OK;
    }
    if (!within(h->kind, RUNNER_STEP, RUNNER_DRAFT_AGAIN) ||
        !fits_batch(batch_of(x, h->kind), h)) {
        return HD_FAIL(err, HD_EPEER, "a command of kind %d with %d rows of %d sequences",
                       h->kind, h->n_rows, h->n_seqs);
    }
    hd_batch *b = batch_of(x, h->kind);
    b->n_rows = h->n_rows;
    b->n_seqs = h->n_seqs;
    b->n_logits = h->n_logits;
    b->most_rows = h->most_rows;
    memcpy(b->host_block, payload(x), b->bytes);
    run_pass(x, h->kind);
    return HD_OK;
}

static hd_status follow(hd_model_runner *x, hd_err *err) {
    command_header h;
    for (;;) {
        broadcast(x);
        HD_TRY(hd_stream_sync(x->env.stream, err));
        memcpy(&h, x->command, sizeof h);
        if (h.kind == COMMAND_END) return HD_OK;
        HD_TRY(run_command(x, &h, err));
        HD_TRY(hd_stream_sync(x->env.stream, err));
    }
}

hd_status hd_model_runner_follow(hd_model_runner *x, hd_err *err) {
    char why[160];
    assert(x->o.role == HD_RUNNER_FOLLOWS);
    const hd_status st = follow(x, err);
    if (st == HD_OK) return HD_OK;
    snprintf(why, sizeof why, "rank %d: %.140s", x->env.comm->rank, err->msg);
    hd_comm_abort(x->env.comm, why);
    return st;
}
