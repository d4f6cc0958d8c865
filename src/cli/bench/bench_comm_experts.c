/* bench_comm_experts.c - time of a dispatch and of a combine: EXPERT_ROWS rows of EXPERT_COLS floats of each rank, each
 * to EXPERT_TOP_K of N_EXPERTS experts, drawn alike in every run. Nothing is computed between them.
 *
 * As many dispatches as may be under way follow each other, then their combines: on a GPU each run lies
 * between two events, behind a sum, which is a barrier. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "base/quantiles.h"
#include "base/random_fill.h"
#include "cli/bench/bench_comm_internal.h"

enum {
    N_EXPERTS = 64,
    CHOICES = COMM_EXPERT_ROWS * COMM_EXPERT_TOP_K,
    AT_ONCE = HD_COMM_MAX_INFLIGHT,
    COPIES = 20, /* in the queue of a GPU */
    MAX_ROUNDS = 200,
    QUEUE_US = 1000 /* a GPU begins when the host has queued all */
};

/* What a rank has, in one block of its device that the other ranks may read. */
typedef struct experts {
    const hd_comm *comm;
    hd_stream *stream;
    bool on_gpu;
    hd_dispatch_args out;
    hd_combine_args back;
    float *barrier;
    int32_t once; /* rows of other ranks that come here, each counted once */
    int32_t away; /* choices of this rank's rows that other ranks compute */
} experts;

/* ---- who chooses what ---- */

/* The experts of a row: the first of a shuffle. */
static void choose(int32_t rank, int32_t row, int32_t selected[COMM_EXPERT_TOP_K]) {
    int32_t order[N_EXPERTS];
    for (int32_t e = 0; e < N_EXPERTS; e++) order[e] = e;
    for (int32_t i = 0; i < COMM_EXPERT_TOP_K; i++) {
        const uint64_t draw =
            hd_random_fill_at((uint64_t)rank, (uint64_t)(row * N_EXPERTS + i));
        const int32_t k = i + (int32_t)(draw % (uint64_t)(N_EXPERTS - i));
        selected[i] = order[k];
        order[k] = order[i];
    }
}

/* offset [slots + 1], assignment [CHOICES]: as moe_permute makes them. Slots beyond the experts are empty. */
static void permute(int32_t rank, int32_t slots, int32_t *offset, int32_t *assignment) {
    int32_t expert[CHOICES], place = 0;
    for (int32_t r = 0; r < COMM_EXPERT_ROWS; r++) {
        choose(rank, r, expert + (int64_t)r * COMM_EXPERT_TOP_K);
    }
    for (int32_t q = 0; q < slots; q++) {
        offset[q] = place;
        for (int32_t i = 0; i < CHOICES; i++) {
            if (expert[i] == q) assignment[place++] = i;
        }
    }
    offset[slots] = place;
}

/* Rows that come to a rank: choices of all, and rows of the others, each once. */
static int32_t count_rows(const hd_rank_group *g, int32_t n_slots, int32_t *once) {
    int32_t n = 0;
    *once = 0;
    for (int32_t k = 0; k < g->n; k++) {
        for (int32_t r = 0; r < COMM_EXPERT_ROWS; r++) {
            int32_t selected[COMM_EXPERT_TOP_K], here = 0;
            choose(k, r, selected);
            for (int32_t i = 0; i < COMM_EXPERT_TOP_K; i++)
                here += selected[i] / n_slots == g->index;
            n += here;
            *once += here > 0 && k != g->index;
        }
    }
    return n;
}

/* ---- memory ---- */

/* The next `bytes` of a block; at NULL it is measured. */
static void *take(char *block, size_t *used, size_t bytes) {
    const size_t at = *used;
    *used += (bytes + 255) / 256 * 256;
    return block ? block + at : NULL;
}

static size_t place_arrays(experts *x, char *block) {
    const size_t row = COMM_EXPERT_COLS * sizeof(float), in = (size_t)x->out.in_rows;
    const size_t slots = (size_t)(x->out.n_slots * x->comm->groups[HD_GROUP_EP].n);
    hd_dispatch_args *o = &x->out;
    size_t used = 0;
    o->x = hd_f32(take(block, &used, COMM_EXPERT_ROWS * row));
    o->weight = take(block, &used, CHOICES * sizeof(float));
    o->offset = take(block, &used, (slots + 1) * sizeof(int32_t));
    o->assignment = take(block, &used, CHOICES * sizeof(int32_t));
    o->in_x = hd_f32(take(block, &used, in * row));
    o->in_weight = take(block, &used, in * sizeof(float));
    o->in_offset = take(block, &used, ((size_t)o->n_slots + 1) * sizeof(int32_t));
    x->back.in_y = o->in_x;
    x->back.y = hd_f32(take(block, &used, CHOICES * row));
    x->barrier = take(block, &used, sizeof(float));
    return used;
}

static hd_status open_rows(experts *x, hd_device *device, hd_err *err) {
    const hd_rank_group *g = &x->comm->groups[HD_GROUP_EP];
    int32_t assignment[CHOICES], offset[2 * N_EXPERTS + 1];
    void *block;
    hd_dispatch_args *o = &x->out;
    *o = (hd_dispatch_args){.rows = COMM_EXPERT_ROWS,
                            .cols = COMM_EXPERT_COLS,
                            .top_k = COMM_EXPERT_TOP_K,
                            .n_slots = (int32_t)hd_ceil_div(N_EXPERTS, g->n)};
    o->in_rows = count_rows(g, o->n_slots, &x->once);
    x->back = (hd_combine_args){
        .rows = o->rows, .cols = o->cols, .top_k = o->top_k, .in_rows = o->in_rows};
    const size_t bytes = place_arrays(x, NULL);
    HD_TRY(hd_device_alloc(device, &block, bytes, "rows of experts", err));
    place_arrays(x, block);
    permute(g->index, o->n_slots * g->n, offset, assignment);
    x->away = CHOICES - (offset[(g->index + 1) * o->n_slots] - offset[g->index * o->n_slots]);
    hd_stream_upload(x->stream, (void *)(uintptr_t)o->assignment, assignment,
                     sizeof assignment);
    hd_stream_upload(x->stream, (void *)(uintptr_t)o->offset, offset,
                     ((size_t)(o->n_slots * g->n) + 1) * sizeof *offset);
    HD_TRY(hd_stream_sync(x->stream, err));
    return hd_comm_share_rows(x->comm, x->stream, block, bytes, err);
}

/* ---- calls ---- */

static void dispatch(const experts *x) {
    for (int i = 0; i < AT_ONCE; i++) {
        hd_comm_dispatch_send(x->comm, x->stream, &x->out);
        hd_comm_dispatch_arrive(x->comm, x->stream, &x->out);
    }
}

static void combine(const experts *x) {
    for (int i = 0; i < AT_ONCE; i++) {
        hd_comm_combine_send(x->comm, x->stream, &x->back);
        hd_comm_combine_arrive(x->comm, x->stream, &x->back);
    }
}

/* A copy of what a dispatch brings, within the memory of the device. */
static void copy(const experts *x, int n) {
    const int32_t half = x->out.in_rows / 2;
    const size_t bytes = (size_t)half * COMM_EXPERT_COLS * sizeof(float);
    char *at = x->out.in_x.data;
    for (int i = 0; i < 2 * n; i++) hd_stream_copy(x->stream, at + bytes, at, bytes);
}

static void barrier(const experts *x) {
    hd_comm_all_reduce(x->comm, x->stream,
                       &(hd_all_reduce_args){HD_GROUP_EP, hd_f32(x->barrier), 1});
}

static double since_us(int64_t start) {
    return (double)(hd_now_ns() - start) * 1e-3;
}

/* us of a dispatch, a combine, a copy. */
static hd_status time_on_host(const experts *x, double us[3], hd_err *err) {
    barrier(x);
    int64_t start = hd_now_ns();
    dispatch(x);
    us[0] = since_us(start) / AT_ONCE;
    barrier(x);
    start = hd_now_ns();
    combine(x);
    us[1] = since_us(start) / AT_ONCE;
    start = hd_now_ns();
    copy(x, 1);
    us[2] = since_us(start);
    return hd_stream_sync(x->stream, err);
}

static hd_status time_on_gpu(const experts *x, hd_device_event *const at[4], double us[3],
                             hd_err *err) {
    hd_stream_busy(x->stream, QUEUE_US);
    barrier(x);
    hd_stream_record_event(x->stream, at[0]);
    dispatch(x);
    hd_stream_record_event(x->stream, at[1]);
    combine(x);
    hd_stream_record_event(x->stream, at[2]);
    copy(x, COPIES);
    hd_stream_record_event(x->stream, at[3]);
    HD_TRY(hd_stream_sync(x->stream, err));
    us[0] = 1e6 * hd_device_event_seconds(at[0], at[1]) / AT_ONCE;
    us[1] = 1e6 * hd_device_event_seconds(at[1], at[2]) / AT_ONCE;
    us[2] = 1e6 * hd_device_event_seconds(at[2], at[3]) / COPIES;
    return HD_OK;
}

static hd_status time_rounds(const experts *x, hd_device_event *const at[4], int rounds,
                             comm_experts *out, hd_err *err) {
    double of[3][MAX_ROUNDS], us[3];
    const int n = rounds < 5 ? 5 : rounds > MAX_ROUNDS ? MAX_ROUNDS : rounds;
    for (int i = -1; i < n; i++) { /* the first one warms up */
        HD_TRY(x->on_gpu ? time_on_gpu(x, at, us, err) : time_on_host(x, us, err));
        for (int k = 0; k < 3 && i >= 0; k++) of[k][i] = us[k];
    }
    out->dispatch_us = hd_quantiles_of(of[0], n).median;
    out->combine_us = hd_quantiles_of(of[1], n).median;
    out->copy_us = hd_quantiles_of(of[2], n).median;
    return HD_OK;
}

hd_status comm_time_experts(const hd_comm *comm, hd_device *device, hd_stream *stream,
                            int rounds, comm_experts *out, hd_err *err) {
    experts x = {.comm = comm, .stream = stream, .on_gpu = !hd_device_is_host(device)};
    hd_device_event *at[4] = {0};
    hd_status st = open_rows(&x, device, err);
    for (int i = 0; i < 4 && st == HD_OK && x.on_gpu; i++) {
        st = hd_device_event_open(&at[i], device, true, err);
    }
    if (st == HD_OK) st = time_rounds(&x, at, rounds, out, err);
    const size_t row = COMM_EXPERT_COLS * sizeof(float);
    out->bytes = (size_t)x.out.in_rows * row;
    out->once = (size_t)x.once * row;
    out->back = (size_t)x.away * row;
    for (int i = 0; i < 4; i++) hd_device_event_close(at[i]);
    return st;
}
