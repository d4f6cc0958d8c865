/* comm_cases.c - see comm_cases.h. */
#include "comm_cases.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/random_fill.h"
#include "ops/ref/ref_internal.h"

enum { MAX_N = 3000, MAX_SLOTS = 24, MAX_ROWS = 12, MAX_TOP_K = 3 };
enum { MAX_RANKS = COMM_MAX_RANKS };

void comm_expect(comm_rank *r, bool holds, const char *what, int64_t at) {
    if (holds || r->wrong[0]) return;
    snprintf(r->wrong, sizeof r->wrong, "%.120s at %lld, seed %llu, tp %d dp %d ep %d", what,
             (long long)at, (unsigned long long)r->seed, r->parallel.tp, r->parallel.dp,
             r->parallel.ep);
}

static void expect_no_failure(comm_rank *r) {
    hd_err err = {0};
    if (hd_stream_sync(r->stream, &err) != HD_OK) comm_expect(r, false, err.msg, 0);
}

/* ---- data: every rank can compute that of the others ---- */

uint32_t comm_draw(uint64_t seed, int64_t i, uint32_t below) {
    return (uint32_t)(hd_random_fill_at(seed, (uint64_t)i) % below);
}

/* sums of such values depend on their order */
static float value(uint64_t seed, int32_t number, int64_t i) {
    return (float)comm_draw(1000 * seed + (uint64_t)number, i, 20011) / 10007.0f - 1.0f;
}

static hd_rank_group group_of(const comm_rank *r, hd_group g) {
    return hd_parallel_group(&r->parallel, r->number, g);
}

void *comm_take(const comm_rank *r, size_t bytes) {
    void *p;
    if (r->staged) return staged_comm_take(r->staged, bytes);
    if (hd_device_is_host(r->device)) return malloc(bytes + 1);
    return hd_device_alloc_host(r->device, &p, bytes, "a test", NULL) == HD_OK ? p : NULL;
}

/* On a GPU it goes with the device: others may be reading it. */
void comm_give(const comm_rank *r, void *p) {
    if (!r->staged && hd_device_is_host(r->device)) free(p);
}

static float *fill(const comm_rank *r, int64_t n) {
    float *x = comm_take(r, (size_t)n * sizeof *x);
    for (int64_t i = 0; x && i < n; i++) x[i] = value(r->seed, r->number, i);
    return x;
}

/* The sum that comm.h defines, of members [first, first + m). */
static float tree(const comm_rank *r, hd_group group, int32_t first, int32_t m, int64_t i) {
    const hd_rank_group g = group_of(r, group);
    if (m == 1) return value(r->seed, g.first + first * g.stride, i);
    const int32_t half = m <= 2 ? 1 : m <= 4 ? 2 : 4;
    return tree(r, group, first, half, i) + tree(r, group, first + half, m - half, i);
}

/* ---- the collectives ---- */

/* Sometimes more than GPUs send as few words. */
static int64_t floats_of(const comm_rank *r) {
    return (int64_t)comm_draw(r->seed, 1, MAX_N) * (comm_draw(r->seed, 6, 8) ? 1 : 60);
}

static void check_all_reduce(comm_rank *r, hd_group group) {
    const int64_t n = floats_of(r);
    float *x = fill(r, n);
    hd_comm_all_reduce(r->comm, r->stream, &(hd_all_reduce_args){group, hd_f32(x), n});
    hd_stream_wait(r->stream);
    for (int64_t i = 0; i < n; i++) {
        comm_expect(r, x[i] == tree(r, group, 0, group_of(r, group).n, i), "sum", i);
    }
    comm_give(r, x);
}

/* Member i's part of n elements; parts differ in size, and some are empty. */
static int64_t part(const comm_rank *r, int32_t i, int32_t members, int64_t n) {
    if (i == 0 || i == members) return i ? n : 0;
    const int64_t even = n * i / members;
    return even + (n * (i + 1) / members - even) * comm_draw(r->seed, 100 + i, 3) / 2;
}

static void check_reduce_scatter(comm_rank *r, hd_group group) {
    const hd_rank_group g = group_of(r, group);
    const int64_t n = floats_of(r);
    const int64_t first = part(r, g.index, g.n, n), end = part(r, g.index + 1, g.n, n);
    float *x = fill(r, n);
    hd_comm_reduce_scatter(r->comm, r->stream,
                           &(hd_reduce_scatter_args){group, hd_f32(x), n, first, end - first});
    hd_comm_all_gather(r->comm, r->stream,
                       &(hd_all_gather_args){group, x, 1, (int32_t)n, (int32_t)first,
                                             (int32_t)(end - first), false});
    hd_stream_wait(r->stream);
    for (int64_t i = 0; i < n; i++) {
        comm_expect(r, x[i] == tree(r, group, 0, g.n, i), "gathered parts of a sum", i);
    }
    comm_give(r, x);
}

/* Every member gets the bytes of the first one, by their number. More broadcasts than may travel at
 * once: the first member must not run away from the others. */
static void check_broadcast(comm_rank *r, hd_group group) {
    uint8_t got[MAX_N], want[MAX_N];
    const hd_rank_group *g = &r->comm->groups[group];
    for (uint64_t round = 0; round < 2 * HD_COMM_MAX_INFLIGHT; round++) {
        const size_t n = comm_draw(r->seed + round, 1, MAX_N);
        for (size_t i = 0; i < n; i++) {
            want[i] = (uint8_t)hd_random_fill_at(r->seed + round + (uint64_t)g->first, i);
            got[i] = g->index ? (uint8_t)~want[i] : want[i];
        }
        hd_comm_broadcast(r->comm, r->stream, &(hd_broadcast_args){group, got, n});
        for (size_t i = 0; i < n; i++) {
            comm_expect(r, got[i] == want[i], "broadcast", (int64_t)i);
        }
    }
}

static void check_all_gather(comm_rank *r, hd_group group) {
    const hd_rank_group g = group_of(r, group);
    const int32_t rows = (int32_t)comm_draw(r->seed, 1, 20);
    const int32_t cols =
        (int32_t)comm_draw(r->seed, 2, 90) * (comm_draw(r->seed, 6, 8) ? 1 : 100);
    const int32_t first = (int32_t)part(r, g.index, g.n, cols);
    const int32_t own = (int32_t)part(r, g.index + 1, g.n, cols) - first;
    float *x = fill(r, (int64_t)rows * cols);
    hd_comm_all_gather(r->comm, r->stream,
                       &(hd_all_gather_args){group, x, rows, cols, first, own, false});
    hd_stream_wait(r->stream);
    for (int32_t k = 0; k < g.n; k++) {
        for (int32_t c = (int32_t)part(r, k, g.n, cols); c < part(r, k + 1, g.n, cols); c++) {
            for (int64_t i = c; i < (int64_t)rows * cols; i += cols) {
                comm_expect(r, x[i] == value(r->seed, g.first + k * g.stride, i), "column", i);
            }
        }
    }
    comm_give(r, x);
}

/* ---- the residual and its norm behind a sum or a gather ---- */

enum { X_SEED = 5, WEIGHT_SEED = 6 };

static double norm_of(const hd_add_norm_args *a, int32_t row) {
    const float *x = (const float *)a->x.data + (int64_t)row * a->cols;
    double sum = 0;
    for (int32_t c = 0; c < a->cols; c++) sum += (double)x[c] * (double)x[c];
    return 1 / sqrt(sum / a->cols + (double)a->eps);
}

/* They are those of the norm alone, of the complete residual. */
static void check_bits_of_norm(comm_rank *r, const hd_add_norm_args *joined) {
    const size_t n = (size_t)joined->rows * (size_t)joined->cols;
    hd_add_norm_args alone = *joined;
    alone.out = hd_f32(fill(r, (int64_t)n));
    alone.y = (hd_rows){0};
    r->ops.add_norm(r->stream, &alone);
    hd_stream_wait(r->stream);
    comm_expect(r, memcmp(alone.out.data, joined->out.data, n * sizeof(float)) == 0,
                "bits of a norm", (int64_t)n);
    comm_give(r, alone.out.data);
}

static bool is_near(double a, double b) {
    return fabs(a - b) <= 1e-5 * fabs(b) + 1e-30;
}

/* Columns as of small rows, and as many as a thread of a GPU has one, eight or more of. */
static int32_t norm_cols(const comm_rank *r) {
    switch (comm_draw(r->seed, 7, 4)) {
    case 0:
        return 2000 + (int32_t)comm_draw(r->seed, 2, 100);
    case 1:
        return 4096;
    case 2:
        return 7168 + (int32_t)comm_draw(r->seed, 2, 1025);
    default:
        return 1 + (int32_t)comm_draw(r->seed, 2, 90);
    }
}

static void check_join_norm(comm_rank *r, hd_group group) {
    const hd_rank_group g = group_of(r, group);
    const int32_t cols = norm_cols(r),
                  rows = (int32_t)comm_draw(r->seed, 1, cols < 100 ? 20 : 4);
    const int32_t first = (int32_t)part(r, g.index, g.n, cols);
    const int64_t n = (int64_t)rows * cols;
    const bool sums = comm_draw(r->seed, 8, 2);
    float *x = comm_take(r, (size_t)n * sizeof *x), *y = fill(r, n);
    float *out = comm_take(r, (size_t)n * sizeof *out);
    float *weight = comm_take(r, (size_t)cols * sizeof *weight);
    const hd_join_norm_args a = {
        .group = group,
        .sums = sums,
        .first = first,
        .own = (int32_t)part(r, g.index + 1, g.n, cols) - first,
        .norm = {.out = hd_f32(out),
                 .x = hd_f32(x),
                 .y = hd_f32(y),
                 .weight = weight,
                 .rows = rows,
                 .cols = cols,
                 .eps = 1e-6f}
    };
    for (int64_t i = 0; i < n; i++) x[i] = value(X_SEED, 0, i);
    for (int32_t c = 0; c < cols; c++) weight[c] = value(WEIGHT_SEED, 0, c);
    hd_comm_join_norm(r->comm, &r->ops, r->stream, &a);
    hd_stream_wait(r->stream);
    for (int64_t i = 0; i < n; i++) {
        int32_t of = 0;
        while (i % cols >= part(r, of + 1, g.n, cols)) of++;
        const float more =
            sums ? tree(r, group, 0, g.n, i) : value(r->seed, g.first + of * g.stride, i);
        comm_expect(r, x[i] == value(X_SEED, 0, i) + more, "residual", i);
    }
    for (int64_t i = 0; i < n; i++) {
        const double scale = norm_of(&a.norm, (int32_t)(i / cols));
        comm_expect(r, is_near(out[i], (double)x[i] * scale * (double)weight[i % cols]), "norm",
                    i);
        i += cols > 100 ? cols / 50 : 0;
    }
    if (!r->staged) check_bits_of_norm(r, &a.norm);
    comm_give(r, x);
    comm_give(r, y);
    comm_give(r, out);
    comm_give(r, weight);
}

/* ---- dispatch and combine ---- */

/* A micro-batch of a rank. */
typedef struct rows {
    int32_t slot[MAX_ROWS * MAX_TOP_K]; /* of the group, that each row chose */
    int32_t offset[MAX_SLOTS + 1], assignment[MAX_ROWS * MAX_TOP_K];
    int32_t in_offset[MAX_SLOTS + 1];
    float weight[MAX_ROWS * MAX_TOP_K], in_weight[MAX_RANKS * MAX_ROWS * MAX_TOP_K];
    float *x, *y, *in_x, *in_y;
    uint8_t *packed; /* NULL: x travels as it is */
    hd_dispatch_args out;
    hd_combine_args back;
} rows;

static float *nans(const comm_rank *r, int64_t n) {
    float *x = comm_take(r, (size_t)n * sizeof *x);
    for (int64_t i = 0; x && i < n; i++) x[i] = NAN;
    return x;
}

/* The seed of a rank's micro-batch. */
static uint64_t seed_of(const comm_rank *r, int32_t of_rank, int32_t batch) {
    return 77 * r->seed + 13 * (uint64_t)of_rank + (uint64_t)batch;
}

static int32_t top_k_of(const comm_rank *r) {
    return 1 + (int32_t)comm_draw(r->seed, 2, MAX_TOP_K);
}

static int32_t rows_of(uint64_t seed) {
    return (int32_t)comm_draw(seed, 1, MAX_ROWS + 1);
}

/* Expert slots of a rank. */
static int32_t slots_of(const comm_rank *r) {
    return 1 + (int32_t)comm_draw(r->seed, 4, MAX_SLOTS / MAX_RANKS);
}

static int32_t slot_of(const comm_rank *r, uint64_t seed, int32_t choice) {
    return (int32_t)comm_draw(seed, 100 + choice, (uint32_t)(slots_of(r) * r->parallel.ep));
}

/* Rows travel in FP8: x becomes what arrives. */
static void pack_rows(const comm_rank *r, rows *b) {
    static const hd_group_format formats[] = {
        {HD_E4M3, HD_E8M0, 32,  0},
        {HD_E4M3, HD_F32,  128, 0}
    };
    const hd_group_format f = formats[comm_draw(r->seed, 7, 2)];
    const size_t bytes = hd_packed_row_bytes(f, b->out.cols);
    b->packed = comm_take(r, (size_t)b->out.rows * bytes);
    hd_pack_rows_ref(NULL, &(hd_pack_rows_args){.out = b->packed,
                                                .x = b->out.x,
                                                .format = f,
                                                .rows = b->out.rows,
                                                .cols = b->out.cols});
    for (int32_t i = 0; i < b->out.rows; i++) {
        hd_unpack_row(b->x + i * b->out.cols, b->packed + (size_t)i * bytes, f, b->out.cols);
    }
    b->out.x = (hd_rows){.data = b->packed, .type = HD_E4M3};
    b->out.format = f;
}

/* cols and top_k are those of the round; every rank has its own number of rows, maybe none. */
static rows *make_rows(const comm_rank *r, int32_t number) {
    rows *b = comm_take(r, sizeof *b);
    memset(b, 0, sizeof *b);
    const uint64_t own = seed_of(r, r->number, number);
    const int32_t n = rows_of(own), top_k = top_k_of(r);
    const int32_t cols = 1 + (int32_t)comm_draw(r->seed, 3, 40), ep = r->parallel.ep;
    const int32_t in_rows = ep * MAX_ROWS * top_k;
    int32_t place = 0;
    b->x = fill(r, (int64_t)n * cols);
    b->y = nans(r, (int64_t)n * top_k * cols);
    b->in_x = nans(r, (int64_t)in_rows * cols);
    b->in_y = nans(r, (int64_t)in_rows * cols);
    for (int32_t i = 0; i < n * top_k; i++) {
        b->slot[i] = slot_of(r, own, i);
        b->weight[i] = value(own, 1, i);
    }
    for (int32_t q = 0; q < slots_of(r) * ep; q++) {
        b->offset[q] = place;
        for (int32_t i = 0; i < n * top_k; i++) {
            if (b->slot[i] == q) b->assignment[place++] = i;
        }
        b->offset[q + 1] = place;
    }
    b->out = (hd_dispatch_args){.x = hd_f32(b->x),
                                .weight = b->weight,
                                .offset = b->offset,
                                .assignment = b->assignment,
                                .rows = n,
                                .cols = cols,
                                .top_k = top_k,
                                .in_x = hd_f32(b->in_x),
                                .in_weight = b->in_weight,
                                .in_offset = b->in_offset,
                                .in_rows = in_rows,
                                .n_slots = slots_of(r)};
    b->back = (hd_combine_args){.in_y = hd_f32(b->in_y),
                                .y = hd_f32(b->y),
                                .rows = n,
                                .cols = cols,
                                .top_k = top_k,
                                .in_rows = in_rows};
    if (comm_draw(r->seed, 6, 2)) pack_rows(r, b);
    return b;
}

static void free_rows(const comm_rank *r, rows *b) {
    comm_give(r, b->x);
    comm_give(r, b->y);
    comm_give(r, b->in_x);
    comm_give(r, b->in_y);
    if (b->packed) comm_give(r, b->packed);
    comm_give(r, b);
}

static float computed(float x, float weight, int32_t slot) {
    return x * (float)(slot + 2) + weight;
}

/* What the experts of this rank make of the received rows. */
static void compute(const rows *b, const comm_rank *r) {
    const hd_dispatch_args *a = &b->out;
    hd_stream_wait(r->stream);
    for (int32_t q = 0; q < a->n_slots; q++) {
        const int32_t slot = group_of(r, HD_GROUP_EP).index * a->n_slots + q;
        for (int32_t i = b->in_offset[q]; i < b->in_offset[q + 1]; i++) {
            for (int32_t c = 0; c < a->cols; c++) {
                b->in_y[i * a->cols + c] =
                    computed(b->in_x[i * a->cols + c], b->in_weight[i], slot);
            }
        }
    }
}

static void check_results(comm_rank *r, const rows *b) {
    const hd_dispatch_args *a = &b->out;
    hd_stream_wait(r->stream);
    for (int32_t i = 0; i < a->rows * a->top_k; i++) {
        const int32_t choice = b->assignment[i];
        for (int32_t c = 0; c < a->cols; c++) {
            const float want = computed(b->x[choice / a->top_k * a->cols + c],
                                        b->weight[choice], b->slot[choice]);
            comm_expect(r, b->y[i * a->cols + c] == want, "result of an expert", i);
        }
    }
}

static void exchange_rows(comm_rank *r, rows *b) {
    hd_comm_dispatch_send(r->comm, r->stream, &b->out);
    hd_comm_dispatch_arrive(r->comm, r->stream, &b->out);
    compute(b, r);
    hd_comm_combine_send(r->comm, r->stream, &b->back);
    hd_comm_combine_arrive(r->comm, r->stream, &b->back);
}

/* Several micro-batches travel at once; in which order their stages run is drawn. */
static void check_experts(comm_rank *r) {
    enum { BATCHES = 7 };
    rows *b[BATCHES];
    int32_t sent = 0, computed_to = 0, combined = 0;
    for (int32_t i = 0; i < BATCHES; i++) b[i] = make_rows(r, i);
    for (int64_t turn = 0; combined < BATCHES; turn++) {
        switch (comm_draw(r->seed, 200 + turn, 3)) {
        case 0:
            if (sent == BATCHES || sent == combined + HD_COMM_MAX_INFLIGHT) break;
            hd_comm_dispatch_send(r->comm, r->stream, &b[sent++]->out);
            break;
        case 1:
            if (computed_to == sent) break;
            hd_comm_dispatch_arrive(r->comm, r->stream, &b[computed_to]->out);
            compute(b[computed_to], r);
            hd_comm_combine_send(r->comm, r->stream, &b[computed_to++]->back);
            break;
        default:
            if (combined == computed_to) break;
            hd_comm_combine_arrive(r->comm, r->stream, &b[combined]->back);
            check_results(r, b[combined++]);
        }
    }
    for (int32_t i = 0; i < BATCHES; i++) free_rows(r, b[i]);
}

/* ---- rows that have no room at once ---- */

/* What each rank may send to each other one in a round; the same on all ranks. */
static void draw_most(const comm_rank *r, int32_t *most) {
    const hd_rank_group g = group_of(r, HD_GROUP_EP);
    for (int32_t k = 0; k < g.n; k++) {
        const int32_t rank = g.first + k * g.stride;
        const bool none = rows_of(seed_of(r, rank, 0)) == 0;
        most[k] = none ? 0 : 1 + (int32_t)comm_draw(r->seed, 300 + rank, 4);
    }
}

/* Every choice is of the same slot, which is not this rank's alone to know. */
static void choose_one_slot(rows *b, const comm_rank *r) {
    const int32_t n = b->out.rows * b->out.top_k, slots = b->out.n_slots * r->parallel.ep;
    const int32_t hot = (int32_t)comm_draw(r->seed, 400, (uint32_t)slots);
    for (int32_t i = 0; i < n; i++) {
        b->slot[i] = hot;
        b->assignment[i] = i;
    }
    for (int32_t q = 0; q <= slots; q++) b->offset[q] = q > hot ? n : 0;
}

/* The most rounds that a pair of ranks needs: every rank can tell. */
static int32_t rounds_needed(const comm_rank *r, const int32_t *most, bool one_slot) {
    const hd_rank_group g = group_of(r, HD_GROUP_EP);
    int32_t rounds = 1;
    for (int32_t k = 0; k < g.n; k++) {
        const uint64_t seed = seed_of(r, g.first + k * g.stride, 0);
        const int32_t n = rows_of(seed) * top_k_of(r);
        for (int32_t to = 0; to < g.n; to++) {
            int32_t sent = 0;
            for (int32_t i = 0; i < n; i++) sent += slot_of(r, seed, i) / slots_of(r) == to;
            if (one_slot) sent = n;
            if (sent) {
                rounds = hd_max_i32(rounds, (int32_t)hd_ceil_div(sent, most[k]));
            }
        }
    }
    return rounds;
}

/* Results are those of one round, and each round has as many rows as fit. */
void comm_dispatch_in_rounds(comm_rank *r) {
    int32_t most[MAX_RANKS] = {0}, rounds = 1, room = 0;
    const bool one_slot = r->seed % 2;
    rows *b = make_rows(r, 0);
    if (one_slot) choose_one_slot(b, r);
    draw_most(r, most);
    for (int32_t k = 0; k < r->parallel.ep; k++) room += most[k];
    b->out.in_rows = b->back.in_rows = room;
    b->out.most = most;
    b->out.rounds = &rounds;
    if (r->staged) rounds = rounds_needed(r, most, one_slot); /* GPUs do not say */
    for (int32_t i = 0; i < rounds; i++) {
        b->out.round = i;
        exchange_rows(r, b);
        comm_expect(r, b->in_offset[b->out.n_slots] <= room, "rows of a round", i);
    }
    check_results(r, b);
    comm_expect(r, rounds == rounds_needed(r, most, one_slot), "rounds", rounds);
    expect_no_failure(r);
    free_rows(r, b);
}

/* ---- more rows than a block of a GPU takes at once ---- */

enum { MANY = 700, MANY_CHOICES = MANY * MAX_TOP_K, MANY_COLS = 5, MANY_SLOTS = 2 };

static int32_t slot_of_many(const comm_rank *r, int32_t rank, int32_t choice) {
    return (int32_t)comm_draw((uint64_t)rank, choice, (uint32_t)(MANY_SLOTS * r->parallel.ep));
}

/* Choices of a slot, in their order; offset [slots + 1]. */
static void permute_many(const comm_rank *r, int32_t *offset, int32_t *assignment) {
    int32_t place = 0;
    for (int32_t q = 0; q < MANY_SLOTS * r->parallel.ep; q++) {
        offset[q] = place;
        for (int32_t i = 0; i < MANY_CHOICES; i++) {
            if (slot_of_many(r, r->number, i) == q) assignment[place++] = i;
        }
    }
    offset[MANY_SLOTS * r->parallel.ep] = place;
}

/* What came, slot by slot and of each the ranks in order; it becomes the result. */
static void check_many(comm_rank *r, const hd_dispatch_args *a) {
    float *x = a->in_x.data;
    int32_t at = 0;
    for (int32_t e = 0; e < MANY_SLOTS; e++) {
        const int32_t slot = MANY_SLOTS * r->number + e;
        comm_expect(r, a->in_offset[e] == at, "the first row of a slot", e);
        for (int32_t k = 0; k < r->parallel.ep; k++) {
            for (int32_t i = 0; i < MANY_CHOICES; i++) {
                if (slot_of_many(r, k, i) != slot) continue;
                comm_expect(r, a->in_weight[at] == value(2, k, i), "weight of a row", at);
                for (int32_t c = 0; c < MANY_COLS; c++, x++) {
                    const float want = value(1, k, i / MAX_TOP_K * MANY_COLS + c);
                    comm_expect(r, *x == want, "one row of many", at);
                    *x = computed(*x, a->in_weight[at], slot);
                }
                at++;
            }
        }
    }
    comm_expect(r, a->in_offset[MANY_SLOTS] == at, "rows of all slots", at);
}

void comm_dispatch_many(comm_rank *r) {
    const int32_t all = MANY_CHOICES * r->parallel.ep;
    const size_t slots = (size_t)(MANY_SLOTS * r->parallel.ep), each = sizeof(float);
    float *x = comm_take(r, MANY * MANY_COLS * each);
    float *y = comm_take(r, MANY_CHOICES * MANY_COLS * each);
    float *weight = comm_take(r, MANY_CHOICES * each);
    float *in_x = comm_take(r, (size_t)all * MANY_COLS * each);
    float *in_weight = comm_take(r, (size_t)all * each);
    int32_t *offset = comm_take(r, (slots + 1) * each);
    int32_t *assignment = comm_take(r, MANY_CHOICES * each);
    int32_t *in_offset = comm_take(r, (MANY_SLOTS + 1) * each);
    const hd_dispatch_args out = {.x = hd_f32(x),
                                  .weight = weight,
                                  .offset = offset,
                                  .assignment = assignment,
                                  .rows = MANY,
                                  .cols = MANY_COLS,
                                  .top_k = MAX_TOP_K,
                                  .in_x = hd_f32(in_x),
                                  .in_weight = in_weight,
                                  .in_offset = in_offset,
                                  .in_rows = all,
                                  .n_slots = MANY_SLOTS};
    const hd_combine_args back = {.in_y = hd_f32(in_x),
                                  .y = hd_f32(y),
                                  .rows = MANY,
                                  .cols = MANY_COLS,
                                  .top_k = MAX_TOP_K,
                                  .in_rows = all};
    for (int32_t i = 0; i < MANY * MANY_COLS; i++) x[i] = value(1, r->number, i);
    for (int32_t i = 0; i < MANY_CHOICES; i++) weight[i] = value(2, r->number, i);
    permute_many(r, offset, assignment);
    hd_comm_dispatch_send(r->comm, r->stream, &out);
    hd_comm_dispatch_arrive(r->comm, r->stream, &out);
    hd_stream_wait(r->stream);
    check_many(r, &out);
    hd_comm_combine_send(r->comm, r->stream, &back);
    hd_comm_combine_arrive(r->comm, r->stream, &back);
    expect_no_failure(r);
    for (int32_t i = 0; i < MANY_CHOICES; i++) {
        const int32_t choice = assignment[i];
        const float want = computed(x[choice / MAX_TOP_K * MANY_COLS], weight[choice],
                                    slot_of_many(r, r->number, choice));
        comm_expect(r, y[i * MANY_COLS] == want, "one result of many", i);
    }
    hd_comm_all_reduce(r->comm, r->stream,
                       &(hd_all_reduce_args){HD_GROUP_EP, hd_f32(y), 1}); /* all have read */
    expect_no_failure(r);
    void *const taken[] = {x, y, weight, in_x, in_weight, offset, assignment, in_offset};
    for (size_t i = 0; i < HD_LEN(taken); i++) comm_give(r, taken[i]);
}

/* ---- all of it ---- */

void comm_call_at_random(comm_rank *r) {
    for (int32_t i = 0; i < r->rounds; i++, r->seed++) {
        const hd_group group = (hd_group)comm_draw(r->seed, 0, HD_N_GROUPS);
        switch (comm_draw(r->seed, 5, 6)) {
        case 0:
            check_all_reduce(r, group);
            break;
        case 1:
            check_reduce_scatter(r, group);
            break;
        case 2:
            check_broadcast(r, group);
            break;
        case 3:
            check_all_gather(r, group);
            break;
        case 4:
            check_join_norm(r, HD_GROUP_TP);
            break;
        default:
            check_experts(r);
        }
        expect_no_failure(r);
    }
}

const hd_parallel_config comm_layouts[COMM_LAYOUTS] = {
    {1, 1, 1, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
    {2, 1, 1, 2, 2, 2, 0, 0, 0, false, false, 0, 0},
    {3, 1, 1, 3, 3, 3, 0, 0, 0, false, false, 0, 0},
    {5, 1, 1, 1, 1, 5, 0, 0, 0, false, false, 0, 0},
    {8, 1, 1, 8, 8, 8, 0, 0, 0, false, false, 0, 0},
    {2, 2, 1, 2, 2, 4, 0, 0, 0, false, false, 0, 0},
    {1, 7, 7, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
    {1, 4, 4, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
    {1, 3, 3, 1, 1, 1, 0, 0, 0, false, false, 0, 0},
    {2, 4, 4, 2, 4, 8, 0, 0, 0, false, false, 0, 0},
    {1, 8, 4, 1, 2, 2, 0, 0, 0, false, false, 0,
     0                                            }, /* all experts in two halves of the world */
};

/* ---- eight terms, added on 1, 2, 4 and 8 ranks ---- */

enum { TERMS = COMM_TERMS, TERM_N = 1000 };

static float sum_terms(int32_t first, int32_t m, int64_t i) {
    if (m == 1) return value(5, first, i);
    return sum_terms(first, m / 2, i) + sum_terms(first + m / 2, m / 2, i);
}

void comm_add_terms(comm_rank *r) {
    const int32_t own = TERMS / r->parallel.tp;
    float *x = comm_take(r, TERM_N * sizeof *x);
    for (int64_t i = 0; i < TERM_N; i++) x[i] = sum_terms(r->number * own, own, i);
    hd_comm_all_reduce(r->comm, r->stream,
                       &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(x), TERM_N});
    hd_stream_wait(r->stream);
    for (int64_t i = 0; i < TERM_N; i++)
        comm_expect(r, x[i] == sum_terms(0, TERMS, i), "term", i);
    comm_give(r, x);
}

/* ---- failures ---- */

void comm_sleep_ms(int32_t ms) {
    nanosleep(&(struct timespec){0, ms * 1000000L}, NULL);
}

typedef struct loss {
    float *x;
    rows *b;
} loss;

/* A round of calls, the first of them only with `some`. Returns false after a failure. */
static bool make_calls(comm_rank *r, loss *l, bool some, hd_err *err) {
    const hd_dispatch_args *out = &l->b->out;
    const hd_combine_args *back = &l->b->back;
    hd_comm_all_reduce(r->comm, r->stream,
                       &(hd_all_reduce_args){HD_GROUP_DP, hd_f32(l->x), MAX_N});
    if (hd_stream_sync(r->stream, err) != HD_OK) return false;
    hd_comm_dispatch_send(r->comm, r->stream, out);
    if (some) return true;
    hd_comm_dispatch_arrive(r->comm, r->stream, out);
    if (hd_stream_sync(r->stream, err) != HD_OK) return false;
    compute(l->b, r);
    hd_comm_combine_send(r->comm, r->stream, back);
    hd_comm_combine_arrive(r->comm, r->stream, back);
    return hd_stream_sync(r->stream, err) == HD_OK;
}

static void expect_lost(comm_rank *r, const hd_err *err, int64_t round) {
    comm_expect(r, err->status == HD_EPEER && strstr(err->msg, "rank out of order"), err->msg,
                round);
}

/* The victim ends before or in a round of calls and frees what the others may be reading. They
 * cannot finish that round, and no call after it. */
void comm_lose_a_rank(comm_rank *r) {
    const int64_t last = comm_draw(r->seed, 9, 6);
    const bool some = comm_draw(r->seed, 10, 2), is_victim = r->number == r->victim;
    loss l = {.x = fill(r, MAX_N)};
    hd_err err = {0};
    int64_t round = 0;
    l.b = make_rows(r, 0);
    while (round < last && make_calls(r, &l, false, &err)) round++;
    if (is_victim) {
        comm_expect(r, round == last, err.msg, round);
        if (some) make_calls(r, &l, true, &err);
        if (r->seed % 3 == 0) comm_sleep_ms(20); /* the others sleep by then */
        hd_comm_abort(r->comm, "rank out of order");
    } else {
        if (err.status == HD_OK) make_calls(r, &l, false, &err);
        expect_lost(r, &err, round);
        err = (hd_err){0};
        make_calls(r, &l, false, &err);
        expect_lost(r, &err, round);
    }
    memset(l.x, 0, MAX_N * sizeof *l.x);
    comm_give(r, l.x);
    free_rows(r, l.b);
}

/* The last rank has room for fewer rows than arrive: no rank gets a result. */
void comm_overflow(comm_rank *r) {
    loss l = {.x = fill(r, MAX_N)};
    hd_err err = {0};
    l.b = make_rows(r, 0);
    if (r->number == 1) l.b->out.in_rows = 1;
    make_calls(r, &l, false, &err);
    comm_expect(r, err.status == HD_EPEER && strstr(err.msg, "rank 1 receives"), err.msg, 0);
    comm_expect(r, r->number == 0 || isnan(l.b->in_x[l.b->out.cols]), "a row beyond the room",
                1);
    comm_give(r, l.x);
    free_rows(r, l.b);
}

/* ---- waiting ---- */

enum { LATE_MS = 200 };

int64_t comm_cpu_time_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void comm_come_late(comm_rank *r) {
    float x[1] = {1};
    if (r->number == r->victim) comm_sleep_ms(LATE_MS);
    const int64_t before = comm_cpu_time_ns();
    hd_comm_all_reduce(r->comm, r->stream, &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(x), 1});
    comm_expect(r, x[0] == 2, "sum", 0);
    comm_expect(r, comm_cpu_time_ns() - before < LATE_MS * 1000000 / 4, "a wait that spins", 0);
}

/* ---- figures ---- */

static void expect_counted(comm_rank *r, hd_comm_op kind, int64_t calls, int64_t bytes) {
    hd_rank_figures f;
    hd_comm_read_figures(r->comm, &f);
    const hd_comm_op_figures *x = &f.of[kind];
    comm_expect(r, x->calls == calls, "counted calls of kind", (int64_t)kind);
    comm_expect(r, x->bytes == bytes, "counted bytes of kind", (int64_t)kind);
    comm_expect(r, x->wait_ns <= x->ns && (x->ns > 0) == (calls > 0), "counted time of kind",
                (int64_t)kind);
}

/* Floats that other ranks send to this one besides their counts: every rank can tell. Each choice of a slot has a
 * weight and a row; in messages a weight and the row's number, and each row is there once. */
static int64_t floats_from_others(const comm_rank *r, int32_t cols) {
    const hd_rank_group g = group_of(r, HD_GROUP_EP);
    int64_t choices = 0, once = 0;
    for (int32_t k = 0; k < g.n; k++) {
        const uint64_t seed = seed_of(r, g.first + k * g.stride, 0);
        for (int32_t row = 0; k != g.index && row < rows_of(seed); row++) {
            const int64_t before = choices;
            for (int32_t i = row * top_k_of(r); i < (row + 1) * top_k_of(r); i++) {
                choices += slot_of(r, seed, i) / slots_of(r) == g.index;
            }
            once += choices > before;
        }
    }
    return r->in_messages ? 2 * choices + once * cols : choices * (1 + cols);
}

/* This rank's rows that others compute. */
static int64_t rows_to_others(const comm_rank *r, const rows *b) {
    int64_t n = 0;
    for (int32_t i = 0; i < b->out.rows * b->out.top_k; i++) {
        n += b->slot[i] / b->out.n_slots != group_of(r, HD_GROUP_EP).index;
    }
    return n;
}

/* The others wait in a pass for the victim. */
static void wait_in_a_pass(comm_rank *r) {
    hd_rank_figures f;
    float x[1] = {1};
    const hd_all_reduce_args sum = {HD_GROUP_EP, hd_f32(x), 1};
    hd_comm_all_reduce(r->comm, r->stream, &sum);
    if (r->number == r->victim) comm_sleep_ms(LATE_MS);
    const int64_t begun = hd_comm_begin_pass(r->comm);
    hd_comm_all_reduce(r->comm, r->stream, &sum);
    hd_comm_end_pass(r->comm, begun);
    hd_comm_read_figures(r->comm, &f);
    const int64_t waited = f.of[HD_COMM_OP_ALL_REDUCE].wait_ns, late = LATE_MS * 1000000LL;
    comm_expect(r, r->number == r->victim || waited > late / 4, "a wait not counted", waited);
    comm_expect(r, f.passes == 1 && f.compute_ns >= 0 && f.compute_ns < late / 4,
                "time of a pass without its exchanges", f.compute_ns);
}

/* That travels to an expert. */
static int32_t floats_of_row(const rows *b) {
    if (!b->packed) return b->out.cols;
    return (int32_t)(hd_packed_row_bytes(b->out.format, b->out.cols) / sizeof(float));
}

void comm_count_exchanges(comm_rank *r) {
    enum { ROWS = 3, OWN = 5 };
    const int32_t n = r->parallel.ep;
    const int64_t size = (int64_t)sizeof(float), others = n - 1;
    float *x = fill(r, (int64_t)ROWS * OWN * n);
    rows *b = make_rows(r, 0);
    exchange_rows(r, b);
    expect_counted(r, HD_COMM_OP_DISPATCH, 1,
                   (others * slots_of(r) + floats_from_others(r, floats_of_row(b))) * size);
    expect_counted(r, HD_COMM_OP_COMBINE, 1, rows_to_others(r, b) * b->out.cols * size);
    hd_comm_all_gather(
        r->comm, r->stream,
        &(hd_all_gather_args){HD_GROUP_EP, x, ROWS, OWN * n, OWN * r->number, OWN, false});
    expect_counted(r, HD_COMM_OP_ALL_GATHER, 1, others * ROWS * OWN * size);
    hd_comm_broadcast(r->comm, r->stream, &(hd_broadcast_args){HD_GROUP_EP, x, 7});
    expect_counted(r, HD_COMM_OP_BROADCAST, 1, r->number ? 7 : 0);
    expect_counted(r, HD_COMM_OP_REDUCE_SCATTER, 0, 0);
    wait_in_a_pass(r);
    expect_no_failure(r);
    comm_give(r, x);
    free_rows(r, b);
}
