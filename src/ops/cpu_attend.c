/* cpu_attend.c - attention over paged keys and the indexer's choice.
 *
 * A task is one row and a group of heads. Keys come in blocks counted from the start of the
 * row's own list, whatever lies in the step beside it, so the running maximum and the sums
 * take the same values in any batch. A block's keys serve all heads of the group. */
#include <string.h>

#include "base/checked.h"
#include "ops/cpu_internal.h"

enum { HEADS = 16, BLOCK_KEYS = 64, STRETCH = 128 };

typedef struct attend_job {
    hd_stream *stream;
    const ops_kernels *k;
    const hd_attend_args *a;
    int32_t groups; /* of heads in a row */
} attend_job;

/* Scratch of one worker. */
typedef struct attend_state {
    float acc[HEADS * OPS_TILE_ROWS * OPS_LANES];
    float score[HEADS * BLOCK_KEYS];
    float top[HEADS];   /* largest score so far, the sink included */
    float total[HEADS]; /* sum of exp(score - top) */
    float down[HEADS];  /* what sums from before this block shrink by */
    float sum[HEADS * STRETCH];
    const float *key[BLOCK_KEYS];
} attend_state;
_Static_assert(sizeof(attend_state) <= OPS_STATE_BYTES, "it is a worker's scratch");

/* One row and the heads of a task. */
typedef struct attend_row {
    int32_t row, seq, n_heads;
    int32_t first_recent, n_recent, n_keys;
    const float *q[HEADS];
    float *out; /* [n_heads, v_dim] */
} attend_row;

static int32_t count_entries(const hd_attend_args *a, int32_t row) {
    if (!a->selected) return visible_entries(a->pos[row], a->ratio);
    const int32_t *chosen = a->selected + (int64_t)row * a->n_selected;
    int32_t n = 0;
    while (n < a->n_selected && chosen[n] >= 0) n++;
    return n;
}

/* Pointers to keys [first, first + n) of the row's list. */
static void find_keys(const hd_attend_args *a, const attend_row *t, int32_t first, int32_t n,
                      const float **key) {
    const int32_t *chosen = a->selected ? a->selected + (int64_t)t->row * a->n_selected : NULL;
    for (int32_t i = 0; i < n; i++) {
        const int32_t e = first + i - t->n_recent;
        key[i] = e < 0 ? paged_entry(&a->recent, t->seq, t->first_recent + first + i)
                       : paged_entry(&a->entries, t->seq, chosen ? chosen[e] : e);
    }
}

static void score_block(const hd_attend_args *a, const ops_kernels *k, const attend_row *t,
                        attend_state *s, int32_t n) {
    for (int32_t u = 0; u < n; u += OPS_TILE_ROWS) {
        const int32_t n_w = hd_min_i32(OPS_TILE_ROWS, n - u);
        const float *w[OPS_TILE_ROWS];
        for (int32_t j = 0; j < OPS_TILE_ROWS; j++) w[j] = s->key[u + (j < n_w ? j : 0)];
        memset(s->acc, 0, sizeof s->acc);
        k->dots(s->acc, t->q, t->n_heads, 0, w, a->k_dim);
        k->fold(s->score + u, BLOCK_KEYS, s->acc, t->n_heads, n_w);
    }
}

/* Scores into exp(score - top), where top now covers this block. */
static void soften(const hd_attend_args *a, const ops_kernels *k, const attend_row *t,
                   attend_state *s, int32_t n) {
    for (int32_t h = 0; h < t->n_heads; h++) {
        float *score = s->score + h * BLOCK_KEYS;
        for (int32_t i = 0; i < n; i++) score[i] *= a->scale;
        const float best = k->max(score, n);
        s->down[h] = 1.0f;
        if (best > s->top[h]) {
            s->down[h] = expf(s->top[h] - best);
            s->top[h] = best;
        }
        s->total[h] = s->total[h] * s->down[h] + k->exp_sum(score, n, s->top[h]);
    }
}

/* out = out * down + scores . values; a block is summed on its own before it joins the others,
 * which keeps the error of long lists small. */
static void add_values(const hd_attend_args *a, const ops_kernels *k, const attend_row *t,
                       attend_state *s, int32_t n) {
    for (int32_t col = 0; col < a->v_dim; col += STRETCH) {
        const int32_t cols = hd_min_i32(STRETCH, a->v_dim - col);
        memset(s->sum, 0, sizeof s->sum);
        k->mix(&(ops_mix){.out = s->sum,
                          .coef = s->score,
                          .row = s->key,
                          .out_stride = STRETCH,
                          .coef_stride = BLOCK_KEYS,
                          .at = col,
                          .n_out = t->n_heads,
                          .n_rows = n,
                          .cols = cols});
        for (int32_t h = 0; h < t->n_heads; h++) {
            float *out = t->out + (int64_t)h * a->v_dim + col;
            const float *sum = s->sum + h * STRETCH, down = s->down[h];
            for (int32_t c = 0; c < cols; c++) out[c] = out[c] * down + sum[c];
        }
    }
}

static void attend_heads(const hd_attend_args *a, const ops_kernels *k, const attend_row *t,
                         attend_state *s) {
    memset(t->out, 0, (size_t)t->n_heads * (size_t)a->v_dim * sizeof *t->out);
    for (int32_t first = 0; first < t->n_keys; first += BLOCK_KEYS) {
        const int32_t n = hd_min_i32(BLOCK_KEYS, t->n_keys - first);
        find_keys(a, t, first, n, s->key);
        score_block(a, k, t, s, n);
        soften(a, k, t, s, n);
        add_values(a, k, t, s, n);
    }
    for (int32_t h = 0; h < t->n_heads && t->n_keys > 0; h++) {
        const float whole = 1.0f / s->total[h];
        float *out = t->out + (int64_t)h * a->v_dim;
        for (int32_t c = 0; c < a->v_dim; c++) out[c] *= whole;
    }
}

static void attend_task(const void *arg, int32_t task, int32_t worker) {
    const attend_job *job = arg;
    const hd_attend_args *a = job->a;
    attend_state *s = hd_stream_scratch(job->stream, worker, sizeof *s);
    const int32_t row = task / job->groups, head = task % job->groups * HEADS;
    attend_row t = {
        .row = row, .seq = a->seq[row], .n_heads = hd_min_i32(HEADS, a->heads - head)};
    if (a->window) {
        t.first_recent = hd_max_i32(0, a->pos[row] + 1 - a->window);
        t.n_recent = a->pos[row] + 1 - t.first_recent;
    }
    t.n_keys = t.n_recent + count_entries(a, row);
    t.out = act(a->out) + ((int64_t)row * a->heads + head) * a->v_dim;
    for (int32_t h = 0; h < t.n_heads; h++) {
        t.q[h] = act_in(a->q) + ((int64_t)row * a->heads + head + h) * a->k_dim;
        s->top[h] = a->sink ? a->sink[head + h] : -INFINITY;
        s->total[h] = s->top[h] > -INFINITY ? 1.0f : 0.0f; /* exp(sink - top), or no sink */
    }
    attend_heads(a, job->k, &t, s);
}

void ops_attend_cpu(hd_stream *s, const hd_attend_args *a, const ops_kernels *k) {
    attend_job job = {s, k, a, (int32_t)hd_ceil_div(a->heads, HEADS)};
    hd_stream_tasks(s, a->rows * job.groups, attend_task, &job);
}

/* ---- the indexer ---- */

/* score[u] for the n visible keys of a row, four keys at a time. */
static void score_keys(const hd_index_select_args *a, const ops_kernels *k, int32_t row,
                       int32_t n, float *acc, float *score) {
    const float *weight = a->weight + (int64_t)row * a->heads;
    for (int32_t u = 0; u < n; u += OPS_TILE_ROWS) {
        const int32_t n_w = hd_min_i32(OPS_TILE_ROWS, n - u);
        const float *w[OPS_TILE_ROWS];
        for (int32_t j = 0; j < OPS_TILE_ROWS; j++) {
            w[j] = paged_entry(&a->keys, a->seq[row], u + (j < n_w ? j : 0));
        }
        float sum[OPS_TILE_ROWS] = {0}, hit[HEADS * OPS_TILE_ROWS];
        for (int32_t h = 0; h < a->heads; h += HEADS) {
            const int32_t n_heads = hd_min_i32(HEADS, a->heads - h);
            const float *q[HEADS];
            for (int32_t i = 0; i < n_heads; i++) {
                q[i] = act_in(a->q) + ((int64_t)row * a->heads + h + i) * a->keys.width;
            }
            memset(acc, 0, HEADS * OPS_TILE_ROWS * OPS_LANES * sizeof *acc);
            k->dots(acc, q, n_heads, 0, w, a->keys.width);
            k->fold(hit, OPS_TILE_ROWS, acc, n_heads, OPS_TILE_ROWS);
            for (int32_t i = 0; i < n_heads; i++) {
                const float each = weight[h + i] * a->scale;
                for (int32_t j = 0; j < OPS_TILE_ROWS; j++) {
                    const float x = hit[i * OPS_TILE_ROWS + j];
                    sum[j] += x > 0.0f ? each * x : 0.0f;
                }
            }
        }
        memcpy(score + u, sum, (size_t)n_w * sizeof *score);
    }
}

/* Unsigned integers in the order of the scores; what is not a number is chosen last. */
static uint32_t order_of(float score) {
    const uint32_t bits = hd_f32_bits(isnan(score) ? -INFINITY : score + 0.0f); /* one zero */
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The top_k-th largest order and, in *ties, how many of exactly that order are among the best.
 * Finds it byte by byte from the top: count the candidates per value of the next byte and walk
 * down from the largest. Four passes, whatever the scores. */
static uint32_t find_threshold(const float *score, int32_t n, int32_t top_k, int32_t *ties) {
    uint32_t prefix = 0, known = 0; /* bits of the threshold found so far, and which */
    int32_t wanted = top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int32_t count[256] = {0};
        for (int32_t u = 0; u < n; u++) {
            const uint32_t order = order_of(score[u]);
            if ((order & known) == prefix) count[order >> shift & 255]++;
        }
        uint32_t byte = 255;
        while (wanted > count[byte]) wanted -= count[byte--];
        prefix |= byte << shift;
        known |= 255u << shift;
    }
    *ties = wanted;
    return prefix;
}

static void select_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_index_select_args *a = job->args;
    const size_t n_acc = HEADS * OPS_TILE_ROWS * OPS_LANES;
    for (int32_t r = first; r < end; r++) {
        int32_t *out = a->out + (int64_t)r * a->top_k, kept = 0, ties = 0;
        const int32_t n = visible_entries(a->pos[r], a->ratio);
        const bool all = n <= a->top_k;
        float *acc = hd_stream_scratch(job->stream, worker,
                                       (n_acc + (all ? 0 : (size_t)n)) * sizeof *acc);
        float *score = acc + n_acc;
        uint32_t threshold = 0;
        if (!all) {
            score_keys(a, job->k, r, n, acc, score);
            threshold = find_threshold(score, n, a->top_k, &ties);
        }
        for (int32_t u = 0; u < n && kept < a->top_k; u++) {
            const uint32_t order = all ? 1 : order_of(score[u]);
            if (order > threshold || (order == threshold && ties-- > 0)) out[kept++] = u;
        }
        while (kept < a->top_k) out[kept++] = -1;
    }
}

void ops_index_select_cpu(hd_stream *s, const hd_index_select_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){
        .stream = s, .k = k, .args = a, .fn = select_rows, .rows = a->rows, .per_task = 1});
}
