/* drive_ranks.c - hadal serve whose rank fails at a point of its work.
 *
 *     FAULT=POINT:N:HOW drive_ranks serve MODEL_DIR [FLAGS...]
 *
 * POINT: start (before it meets the others), load (its shard), prefill, decode, draft (a pass begins),
 * dispatch, combine (its rows are on their way), idle (a command comes after a pause), anew (it begins
 * anew). At the Nth time the process is HOW: "kill"ed or "stop"ped, or from then on "slow": 50 ms later
 * each time. At "anew" it can also "fail".
 *
 * The linker sends the calls through here first (-Wl,--wrap in the Makefile). */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/commands.h"
#include "comm/ucx.h"
#include "model/model.h"
#include "weights/weights.h"

hd_status __real_hd_comm_ucx_open(hd_comm_ucx **out, const hd_comm_ucx_options *o,
                                  hd_device *device, hd_stream *stream, const hd_ops *ops,
                                  hd_err *err);
hd_status __real_hd_comm_ucx_begin_anew(hd_comm_ucx *u, hd_parallel_config *out,
                                        void (*waits)(void *ctx), hd_err *err);
const hd_comm *__real_hd_comm_ucx_interface(const hd_comm_ucx *u);
hd_status __real_hd_weights_open_shards(hd_weights **out, const hd_weights *whole,
                                        const hd_parallel_config *parallel, int32_t rank,
                                        hd_err *err);
void __real_hd_model_step(hd_model *m, const hd_kv *kv, const hd_batch *batch);
void __real_hd_model_draft(hd_model *m, const hd_kv *kv, const hd_batch *batch, bool again);
hd_status __wrap_hd_comm_ucx_open(hd_comm_ucx **out, const hd_comm_ucx_options *o,
                                  hd_device *device, hd_stream *stream, const hd_ops *ops,
                                  hd_err *err);
hd_status __wrap_hd_comm_ucx_begin_anew(hd_comm_ucx *u, hd_parallel_config *out,
                                        void (*waits)(void *ctx), hd_err *err);
const hd_comm *__wrap_hd_comm_ucx_interface(const hd_comm_ucx *u);
hd_status __wrap_hd_weights_open_shards(hd_weights **out, const hd_weights *whole,
                                        const hd_parallel_config *parallel, int32_t rank,
                                        hd_err *err);
void __wrap_hd_model_step(hd_model *m, const hd_kv *kv, const hd_batch *batch);
void __wrap_hd_model_draft(hd_model *m, const hd_kv *kv, const hd_batch *batch, bool again);

enum { IDLE_MS = 50 };

/* ---- the fault; only the rank's one thread comes to points ---- */

static char point[16], how[8];
static int left; /* times until then; 0: no fault */
static bool slow, failed;

static void fail(void) {
    if (strcmp(how, "slow") == 0)
        slow = true;
    else if (strcmp(how, "fail") == 0)
        failed = true;
    else
        raise(strcmp(how, "stop") == 0 ? SIGSTOP : SIGKILL);
}

static void pass_by(const char *where) {
    if (strcmp(point, where) != 0) return;
    if (left && --left == 0) fail();
    if (slow) nanosleep(&(struct timespec){0, 50000000}, NULL);
}

/* ---- points ---- */

hd_status __wrap_hd_comm_ucx_open(hd_comm_ucx **out, const hd_comm_ucx_options *o,
                                  hd_device *device, hd_stream *stream, const hd_ops *ops,
                                  hd_err *err) {
    pass_by("start");
    return __real_hd_comm_ucx_open(out, o, device, stream, ops, err);
}

hd_status __wrap_hd_comm_ucx_begin_anew(hd_comm_ucx *u, hd_parallel_config *out,
                                        void (*waits)(void *ctx), hd_err *err) {
    pass_by("anew");
    if (failed) return HD_FAIL(err, HD_ENOMEM, "no memory for another place");
    return __real_hd_comm_ucx_begin_anew(u, out, waits, err);
}

hd_status __wrap_hd_weights_open_shards(hd_weights **out, const hd_weights *whole,
                                        const hd_parallel_config *parallel, int32_t rank,
                                        hd_err *err) {
    pass_by("load");
    return __real_hd_weights_open_shards(out, whole, parallel, rank, err);
}

/* Rows that are verified are no prefill, however many a sequence has. */
static bool has_prefill(const hd_batch *b) {
    for (int32_t r = 0; r < b->n_rows; r++) {
        if (b->host.phase[r] == HD_ROW_PREFILL) return true;
    }
    return false;
}

void __wrap_hd_model_step(hd_model *m, const hd_kv *kv, const hd_batch *batch) {
    if (batch->n_rows) pass_by(has_prefill(batch) ? "prefill" : "decode");
    __real_hd_model_step(m, kv, batch);
}

void __wrap_hd_model_draft(hd_model *m, const hd_kv *kv, const hd_batch *batch, bool again) {
    pass_by("draft");
    __real_hd_model_draft(m, kv, batch, again);
}

static const hd_comm_table *real;

static void dispatch_send(void *ctx, hd_stream *s, const hd_dispatch_args *a) {
    real->dispatch_send(ctx, s, a);
    pass_by("dispatch");
}

static void combine_send(void *ctx, hd_stream *s, const hd_combine_args *a) {
    real->combine_send(ctx, s, a);
    pass_by("combine");
}

static void broadcast(void *ctx, hd_stream *s, const hd_broadcast_args *a) {
    struct timespec before, now;
    clock_gettime(CLOCK_MONOTONIC, &before);
    real->broadcast(ctx, s, a);
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t ms =
        (now.tv_sec - before.tv_sec) * 1000 + (now.tv_nsec - before.tv_nsec) / 1000000;
    if (ms >= IDLE_MS) pass_by("idle");
}

const hd_comm *__wrap_hd_comm_ucx_interface(const hd_comm_ucx *u) {
    static hd_comm_table table;
    static hd_comm comm;
    comm = *__real_hd_comm_ucx_interface(u);
    real = comm.table;
    table = *real;
    table.dispatch_send = dispatch_send;
    table.combine_send = combine_send;
    table.broadcast = broadcast;
    comm.table = &table;
    return &comm;
}

int main(int argc, char **argv) {
    const char *fault = getenv("FAULT");
    signal(SIGPIPE, SIG_IGN);
    if (fault && sscanf(fault, "%15[^:]:%d:%7s", point, &left, how) != 3) return 2;
    return argc > 1 ? cmd_serve(argc - 1, argv + 1) : 2;
}
