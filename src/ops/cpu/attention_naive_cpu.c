/* attention_naive_cpu.c - naive MLA attention for prefill: keys and values computed from
 * cached latents.
 *
 * A task is one head and some rows of one sequence. It computes a block of keys and values,
 * which all its rows then use, so only the rows' sums are kept. A cached prefix is
 * recomputed in every step. Blocks are counted from the start of the sequence, and a row's
 * sums take them in order, whatever rows are beside it. Keys are transposed, so that a score
 * is a mix like the values', without a horizontal reduction. */
#include <string.h>

#include "base/checked.h"
#include "ops/cpu/cpu_internal.h"
#include "ops/ref/ref_internal.h"

enum {
    KEYS = 2 * OPS_TRANSPOSE_KEYS, /* keys of a block */
    GROUP = 16,                    /* rows that use a block at once */
    TASK_ROWS = 64,                /* rows of a task, at least */
    MAX_TASK_ROWS = 2048,
    MAX_K_DIM = 320, /* more than any checkpoint has */
    MAX_V_DIM = 256,
    MAX_MADE = 512
};
_Static_assert((int)KEYS <= (int)OPS_X_ROWS, "a block's keys are made in one product");

typedef struct naive_job {
    hd_stream *stream;
    const ops_kernels *k;
    const hd_attention_naive_args *a;
    int32_t shares; /* tasks per sequence and head */
} naive_job;

/* Scratch of one worker. */
typedef struct naive_state {
    ops_tile tile;
    float made[KEYS * MAX_MADE];        /* [KEYS, nope_dim + v_dim] */
    float transposed[MAX_K_DIM * KEYS]; /* [k_dim, KEYS] */
    float half[MAX_K_DIM * OPS_TRANSPOSE_KEYS];
    float score[GROUP * KEYS];
    float sum[GROUP * MAX_V_DIM];
    float top[MAX_TASK_ROWS], total[MAX_TASK_ROWS]; /* for exp(score - top) */
    const float *key[MAX_K_DIM], *value[KEYS];      /* rows of transposed and of made */
    float decoded[KEYS * HD_MAX_ENTRY_COLS];        /* latents that are not stored as float32 */
} naive_state;
_Static_assert(sizeof(naive_state) <= OPS_STATE_BYTES, "it is a worker's scratch");

/* One head of rows [first, end) of a sequence. */
typedef struct naive_task {
    const hd_attention_naive_args *a;
    const ops_kernels *k;
    naive_state *s;
    int32_t seq, head, first, end;
    int32_t made, k_dim; /* elements made of a latent; elements of a key */
} naive_task;

static float *out_of(const naive_task *t, int32_t row) {
    const int64_t all = (int64_t)t->a->heads * t->a->v_dim;
    return act(t->a->out) + row * stride_of(t->a->out, all) + (int64_t)t->head * t->a->v_dim;
}

/* Computes n keys from `from` on, with their values. */
static void make_keys(const naive_task *t, int32_t from, int32_t n) {
    const hd_attention_naive_args *a = t->a;
    naive_state *s = t->s;
    ops_product p = {.out = s->made,
                     .out_stride = t->made,
                     .n_x = n,
                     .first_row = t->head * t->made,
                     .n_rows = t->made,
                     .w = a->w};
    for (int32_t i = 0; i < n; i++) {
        p.x[i] = ops_entry_cpu(t->k, &a->latents, t->seq, from + i,
                               s->decoded + i * HD_MAX_ENTRY_COLS);
    }
    ops_multiply(t->k, &p, &s->tile);
    for (int32_t first = 0; first < n; first += OPS_TRANSPOSE_KEYS) {
        const float *nope[OPS_TRANSPOSE_KEYS], *roped[OPS_TRANSPOSE_KEYS];
        for (int32_t u = 0; u < OPS_TRANSPOSE_KEYS; u++) {
            const int32_t i = hd_min_i32(first + u, n - 1);
            nope[u] = s->made + i * t->made;
            roped[u] = p.x[i] + a->w->cols;
        }
        t->k->transpose(s->half, nope, a->nope_dim);
        t->k->transpose(s->half + a->nope_dim * OPS_TRANSPOSE_KEYS, roped, a->rope_dim);
        for (int32_t c = 0; c < t->k_dim; c++) {
            memcpy(s->transposed + c * KEYS + first, s->half + c * OPS_TRANSPOSE_KEYS,
                   OPS_TRANSPOSE_KEYS * sizeof(float));
        }
    }
}

/* Attends up to GROUP rows to the first n keys of the block. */
static void small_m_keys(const naive_task *t, int32_t row, int32_t n_rows, int32_t n) {
    const hd_attention_naive_args *a = t->a;
    naive_state *s = t->s;
    const int32_t v_dim = a->v_dim;
    memset(s->score, 0, (size_t)(n_rows * KEYS) * sizeof *s->score);
    t->k->mix(&(ops_mix){.out = s->score,
                         .coef = act_in(a->q) + ((int64_t)row * a->heads + t->head) * t->k_dim,
                         .row = s->key,
                         .out_stride = KEYS,
                         .coef_stride = (int64_t)a->heads * t->k_dim,
                         .n_out = n_rows,
                         .n_rows = t->k_dim,
                         .cols = n});
    float down[GROUP];
    for (int32_t i = 0; i < n_rows; i++) {
        const int32_t at = row - t->first + i;
        down[i] =
            ops_soften(t->k, s->score + i * KEYS, n, a->scale, &s->top[at], &s->total[at]);
    }
    memset(s->sum, 0, (size_t)(n_rows * v_dim) * sizeof *s->sum);
    t->k->mix(&(ops_mix){.out = s->sum,
                         .coef = s->score,
                         .row = s->value,
                         .out_stride = v_dim,
                         .coef_stride = KEYS,
                         .at = a->nope_dim,
                         .n_out = n_rows,
                         .n_rows = n,
                         .cols = v_dim});
    for (int32_t i = 0; i < n_rows; i++) {
        t->k->blend(out_of(t, row + i), s->sum + i * v_dim, down[i], v_dim);
    }
}

/* Rows that see part of the block are computed one by one: keys that they do not see must
 * not affect them. */
static void small_m_block(const naive_task *t, int32_t from, int32_t n) {
    const hd_seqs *seqs = &t->a->seqs;
    const int32_t some = hd_max_i32(t->first, row_from(seqs, t->seq, from));
    const int32_t all = hd_max_i32(t->first, row_from(seqs, t->seq, from + n - 1));
    for (int32_t r = some; r < hd_min_i32(all, t->end); r++) {
        small_m_keys(t, r, 1, seqs->pos[r] - from + 1);
    }
    for (int32_t r = all; r < t->end; r += GROUP) {
        small_m_keys(t, r, hd_min_i32(GROUP, t->end - r), n);
    }
}

static void attention_rows(const naive_task *t) {
    const hd_attention_naive_args *a = t->a;
    naive_state *s = t->s;
    const size_t bytes = (size_t)a->v_dim * sizeof(float);
    /* keys that the last row sees */
    const int32_t n_keys = a->seqs.pos[t->end - 1] + 1;
    for (int32_t c = 0; c < t->k_dim; c++) s->key[c] = s->transposed + c * KEYS;
    for (int32_t i = 0; i < KEYS; i++) s->value[i] = s->made + i * t->made;
    for (int32_t r = t->first; r < t->end; r++) {
        memset(out_of(t, r), 0, bytes);
        s->top[r - t->first] = -INFINITY;
        s->total[r - t->first] = 0.0f;
    }
    for (int32_t from = 0; from < n_keys; from += KEYS) {
        const int32_t n = hd_min_i32(KEYS, n_keys - from);
        make_keys(t, from, n);
        small_m_block(t, from, n);
    }
    for (int32_t r = t->first; r < t->end; r++) {
        const float int16 = 1.0f / s->total[r - t->first];
        float *out = out_of(t, r);
        for (int32_t c = 0; c < a->v_dim; c++) out[c] *= int16;
    }
}

static void naive_share(const void *arg, int32_t task, int32_t worker) {
    const naive_job *job = arg;
    const hd_attention_naive_args *a = job->a;
    const int32_t share = task / a->heads % job->shares;
    const int32_t seq = task / a->heads / job->shares, first = a->seqs.first_row[seq];
    const int64_t n = a->seqs.first_row[seq + 1] - first;
    const naive_task t = {.a = a,
                          .k = job->k,
                          .s = hd_stream_scratch(job->stream, worker, sizeof(naive_state)),
                          .seq = seq,
                          .head = task % a->heads,
                          .first = first + (int32_t)(n * share / job->shares),
                          .end = first + (int32_t)(n * (share + 1) / job->shares),
                          .made = a->nope_dim + a->v_dim,
                          .k_dim = a->nope_dim + a->rope_dim};
    if (t.first < t.end) attention_rows(&t);
}

/* Every task of a sequence computes all keys itself, so there are no more tasks than keep
 * the workers busy. */
static int32_t count_shares(const naive_job *job) {
    const hd_attention_naive_args *a = job->a;
    int32_t longest = 1;
    for (int32_t s = 0; s < a->seqs.n; s++) {
        longest = hd_max_i32(longest, a->seqs.first_row[s + 1] - a->seqs.first_row[s]);
    }
    const int64_t tasks = (int64_t)a->seqs.n * a->heads;
    const int32_t wanted = (int32_t)hd_ceil_div(2 * hd_stream_workers(job->stream), tasks);
    const int32_t worth = hd_max_i32(1, longest / TASK_ROWS);
    return hd_max_i32(hd_min_i32(wanted, worth), (int32_t)hd_ceil_div(longest, MAX_TASK_ROWS));
}

void ops_attention_naive_cpu(hd_stream *s, const hd_attention_naive_args *a,
                             const ops_kernels *k) {
    if (a->seqs.n == 0 || a->heads == 0) return;
    if (a->nope_dim + a->rope_dim > MAX_K_DIM || a->nope_dim + a->v_dim > MAX_MADE ||
        a->v_dim > MAX_V_DIM) {
        hd_attention_naive_ref(s, a);
        return;
    }
    naive_job job = {.stream = s, .k = k, .a = a};
    job.shares = count_shares(&job);
    hd_stream_tasks(s, a->seqs.n * a->heads * job.shares, naive_share, &job);
}
