/* attention_cpu.c - attention over the paged KV cache on the CPU (flash attention, split
 * KV).
 *
 * A task is one row and a group of heads. Keys come in blocks counted from the start of the
 * row's own list, whatever else is in the step. The running maximum and the sums therefore
 * have the same values in any batch. A block's keys serve all heads of the group.
 *
 * A long list is split into parts, by its own length alone (split-K). Each part has its own
 * sums, which are merged in order. One task that computed all parts merges them. If few rows
 * would leave workers idle, each part is a task, and the last task to finish merges. */
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"
#include "ops/cpu/cpu_internal.h"

enum {
    HEADS = 16,
    FEW_HEADS = 4, /* heads of a task, at least, unless there are fewer */
    BLOCK_KEYS = 64,
    STRETCH = 128,
    PART_KEYS = 1024, /* keys of a part, at least, unless it is the only one */
    PARTS = 16,       /* parts of a list, at most */
    PART_OUT = 8192,  /* output values of a part, at most */
    /* widest rows of queries and keys that may be rounded (--precision fast) */
    NARROW_COLS = 1056
};
_Static_assert((int)BLOCK_KEYS <= (int)FAST_MIX_ROWS, "a mix takes a block");
_Static_assert((int)STRETCH <= (int)FAST_MIX_COLS, "and a stretch of its columns");
_Static_assert((int)OPS_TILE_ROWS == (int)FAST_KEYS, "keys are scored so many at once");

/* State for products in bf16. */
typedef struct narrow_state {
    uint16_t q[HEADS * NARROW_COLS], key[FAST_KEYS * NARROW_COLS];
    uint16_t pairs[FAST_MIX_ROWS * FAST_MIX_COLS], weights[HEADS * FAST_MIX_ROWS];
} narrow_state;

typedef struct attention_job {
    hd_stream *stream;
    const ops_kernels *k;
    const hd_attention_args *a;
    int32_t heads, groups; /* heads of a group, groups of a row */
    int32_t parts;         /* tasks of a group: 1, or one per part */
    size_t part_bytes;
    int32_t parts_each; /* parts in a worker's scratch */
} attention_job;

/* Scratch of one worker. */
typedef struct attention_state {
    float acc[HEADS * OPS_TILE_ROWS * OPS_LANES];
    float score[HEADS * BLOCK_KEYS];
    float down[HEADS]; /* factor by which earlier sums shrink */
    float sum[HEADS * STRETCH];
    const float *key[BLOCK_KEYS + 2 * OPS_TILE_ROWS]; /* with the next ones, for prefetching */
    float decoded[BLOCK_KEYS * HD_MAX_ENTRY_COLS];    /* keys that are not stored as float32 */
    _Alignas(HD_CACHE_LINE) narrow_state narrow;
} attention_state;
_Static_assert(sizeof(attention_state) % HD_CACHE_LINE == 0, "parts begin on a cache line");

/* Result of a part: out is the sum of exp(score - top) * value. */
typedef struct attention_part {
    _Atomic int32_t left; /* unfinished parts; counted in the first part */
    float top[HEADS];     /* largest score so far, with the sink in the first part */
    float total[HEADS];   /* sum of exp(score - top) */
    _Alignas(HD_CACHE_LINE) float out[]; /* [heads, v_dim] */
} attention_part;

/* One row and the heads of a task. */
typedef struct attention_row {
    int32_t row, seq, head, n_heads;
    int32_t first_recent, n_recent, n_keys, part_keys;
    const float *q[HEADS];
} attention_row;

static int32_t count_entries(const hd_attention_args *a, int32_t row) {
    if (!a->selected) return visible_entries(a->pos[row], a->ratio);
    const int32_t *selected_keys = a->selected + (int64_t)row * a->n_selected;
    int32_t n = 0;
    while (n < a->n_selected && selected_keys[n] >= 0) n++;
    return n;
}

/* Collects pointers to keys [first, first + n) of the row's list, padded to complete tiles. The first
 * n_used are read, and decoded if they are not float32. */
static void find_keys(const hd_attention_args *a, const ops_kernels *k, const attention_row *t,
                      int32_t first, int32_t n, int32_t n_used, attention_state *s) {
    const int32_t *selected_keys =
        a->selected ? a->selected + (int64_t)t->row * a->n_selected : NULL;
    if (a->entries.rows.type != HD_F32 || a->recent.rows.type != HD_F32) n = n_used;
    for (int32_t i = 0; i < n; i++) {
        const int32_t e = first + i - t->n_recent;
        float *room = s->decoded + i % BLOCK_KEYS * HD_MAX_ENTRY_COLS;
        s->key[i] =
            e < 0 ? ops_entry_cpu(k, &a->recent, t->seq, t->first_recent + first + i, room)
                  : ops_entry_cpu(k, &a->entries, t->seq, selected_keys ? selected_keys[e] : e,
                                  room);
    }
    for (int32_t i = n; i < n_used + 2 * OPS_TILE_ROWS; i++) s->key[i] = s->key[n - 1];
}

/* Stride of rounded rows in elements: one cache line more than the row, so that rows use
 * different cache sets. */
static int32_t narrow_stride(const hd_attention_args *a) {
    return (a->k_dim + 31) / 32 * 32 + 32;
}

/* Returns whether products use rounded numbers. */
static bool narrows(const hd_attention_args *a, const ops_kernels *k) {
    return k->fast_attention && narrow_stride(a) <= NARROW_COLS;
}

static fast_narrow narrow_of(const hd_attention_args *a, attention_state *s) {
    return (fast_narrow){.q = s->narrow.q,
                         .key = s->narrow.key,
                         .stride = narrow_stride(a),
                         .pairs = s->narrow.pairs,
                         .weights = s->narrow.weights};
}

static void score_block(const hd_attention_args *a, const ops_kernels *k,
                        const attention_row *t, attention_state *s, int32_t n) {
    for (int32_t u = 0; u < n; u += OPS_TILE_ROWS) {
        const int32_t n_w = hd_min_i32(OPS_TILE_ROWS, n - u);
        const float *w[OPS_TILE_ROWS];
        for (int32_t j = 0; j < OPS_TILE_ROWS; j++) w[j] = s->key[u + (j < n_w ? j : 0)];
        const ops_scores scores = {.out = s->score + u,
                                   .q = t->q,
                                   .key = w,
                                   .next = s->key + u + OPS_TILE_ROWS,
                                   .out_stride = BLOCK_KEYS,
                                   .n_q = t->n_heads,
                                   .n_keys = n_w,
                                   .cols = a->k_dim};
        if (narrows(a, k)) {
            const fast_narrow narrow = narrow_of(a, s);
            k->fast_attention->score(&scores, &narrow);
            continue;
        }
        if (k->score) {
            k->score(&scores);
            continue;
        }
        memset(s->acc, 0, sizeof s->acc);
        k->dots(s->acc, t->q, t->n_heads, 0, w, a->k_dim);
        k->reduce(s->score + u, BLOCK_KEYS, s->acc, t->n_heads, n_w);
    }
}

/* Softmax step: turns scores into exp(score - top), where top now covers this block. */
static void soften(const hd_attention_args *a, const ops_kernels *k, const attention_row *t,
                   attention_state *s, attention_part *p, int32_t n) {
    for (int32_t h = 0; h < t->n_heads; h++) {
        s->down[h] =
            ops_soften(k, s->score + h * BLOCK_KEYS, n, a->scale, &p->top[h], &p->total[h]);
    }
}

/* out = out * down + scores . values. A block is summed on its own before it is added to the
 * others, which keeps the error of long lists small. */
static void add_values(const hd_attention_args *a, const ops_kernels *k, const attention_row *t,
                       attention_state *s, attention_part *p, int32_t n) {
    for (int32_t col = 0; col < a->v_dim; col += STRETCH) {
        const int32_t cols = hd_min_i32(STRETCH, a->v_dim - col);
        const ops_mix mix = {.out = s->sum,
                             .coef = s->score,
                             .row = s->key,
                             .out_stride = STRETCH,
                             .coef_stride = BLOCK_KEYS,
                             .at = col,
                             .n_out = t->n_heads,
                             .n_rows = n,
                             .cols = cols};
        memset(s->sum, 0, (size_t)(t->n_heads * STRETCH) * sizeof *s->sum);
        if (narrows(a, k)) {
            const fast_narrow narrow = narrow_of(a, s);
            k->fast_attention->mix(&mix, &narrow);
        } else {
            k->mix(&mix);
        }
        for (int32_t h = 0; h < t->n_heads; h++) {
            k->blend(p->out + (int64_t)h * a->v_dim + col, s->sum + h * STRETCH, s->down[h],
                     cols);
        }
    }
}

/* Attends to keys [from, to) of the row's list; from = 0 begins with the sink. */
static void attention_keys(const hd_attention_args *a, const ops_kernels *k,
                           const attention_row *t, attention_state *s, attention_part *p,
                           int32_t from, int32_t to) {
    memset(p->out, 0, (size_t)t->n_heads * (size_t)a->v_dim * sizeof *p->out);
    for (int32_t h = 0; h < t->n_heads && narrows(a, k); h++) {
        k->fast_attention->narrow(s->narrow.q + h * narrow_stride(a), t->q[h], a->k_dim);
    }
    for (int32_t h = 0; h < t->n_heads; h++) {
        p->top[h] = a->sink && from == 0 ? a->sink[t->head + h] : -INFINITY;
        p->total[h] = p->top[h] > -INFINITY ? 1.0f : 0.0f; /* exp(sink - top), or no sink */
    }
    for (int32_t first = from; first < to; first += BLOCK_KEYS) {
        const int32_t n = hd_min_i32(BLOCK_KEYS, to - first);
        find_keys(a, k, t, first, hd_min_i32(BLOCK_KEYS + OPS_TILE_ROWS, to - first), n, s);
        score_block(a, k, t, s, n);
        soften(a, k, t, s, p, n);
        add_values(a, k, t, s, p, n);
    }
}

/* Returns the keys per part of a list of n. It depends on the list alone, so its sums do
 * too. */
static int32_t part_keys(int32_t n) {
    const int32_t fair = (int32_t)hd_ceil_div(hd_ceil_div(n, PARTS), BLOCK_KEYS) * BLOCK_KEYS;
    return hd_max_i32(PART_KEYS, fair);
}

static void join(const hd_attention_args *a, const attention_row *t, attention_part *sum,
                 const attention_part *p) {
    for (int32_t h = 0; h < t->n_heads; h++) {
        const float top = sum->top[h] > p->top[h] ? sum->top[h] : p->top[h];
        if (!(top > -INFINITY)) continue; /* no key has weight so far */
        const float mine = expf(sum->top[h] - top), other = expf(p->top[h] - top);
        float *out = sum->out + (int64_t)h * a->v_dim;
        const float *more = p->out + (int64_t)h * a->v_dim;
        for (int32_t c = 0; c < a->v_dim; c++) out[c] = out[c] * mine + more[c] * other;
        sum->total[h] = sum->total[h] * mine + p->total[h] * other;
        sum->top[h] = top;
    }
}

static void write_heads(const hd_attention_args *a, const attention_row *t,
                        const attention_part *sum) {
    for (int32_t h = 0; h < t->n_heads; h++) {
        const float inverse = t->n_keys > 0 ? 1.0f / sum->total[h] : 0.0f;
        float *to = act(a->out) + ((int64_t)t->row * a->heads + t->head + h) * a->v_dim;
        ops_scale(to, sum->out + (int64_t)h * a->v_dim, NULL, inverse, a->v_dim);
    }
}

/* ---- tasks ---- */

static int32_t recent_keys(const hd_attention_args *a, int32_t row) {
    const int32_t from = a->window_from ? a->window_from[a->seq[row]] : 0;
    return a->window ? hd_min_i32(a->pos[row] + 1 - from, a->window) : 0;
}

static attention_row row_of(const attention_job *job, int32_t row, int32_t head) {
    const hd_attention_args *a = job->a;
    attention_row t = {.row = row,
                       .seq = a->seq[row],
                       .head = head,
                       .n_heads = hd_min_i32(job->heads, a->heads - head),
                       .n_recent = recent_keys(a, row)};
    t.first_recent = a->pos[row] + 1 - t.n_recent;
    t.n_keys = t.n_recent + count_entries(a, row);
    t.part_keys = part_keys(t.n_keys);
    for (int32_t h = 0; h < t.n_heads; h++) {
        t.q[h] = act_in(a->q) + ((int64_t)row * a->heads + head + h) * a->k_dim;
    }
    return t;
}

/* Returns part i of those after a worker's own state. */
static attention_part *part_at(const attention_job *job, int32_t worker, int32_t i) {
    uint8_t *scratch = hd_stream_scratch(job->stream, worker, sizeof(attention_state));
    return (attention_part *)(void *)(scratch + sizeof(attention_state) +
                                      (size_t)i * job->part_bytes);
}

static attention_part *shared_part(const attention_job *job, int32_t group, int32_t part) {
    const int32_t i = group * job->parts + part;
    return part_at(job, i / job->parts_each, i % job->parts_each);
}

static void all_parts(const attention_job *job, const attention_row *t, int32_t worker) {
    const hd_attention_args *a = job->a;
    attention_state *s = hd_stream_scratch(job->stream, worker, sizeof *s);
    attention_part *sum = part_at(job, worker, 0), *p = part_at(job, worker, 1);
    attention_keys(a, job->k, t, s, sum, 0, hd_min_i32(t->part_keys, t->n_keys));
    for (int32_t from = t->part_keys; from < t->n_keys; from += t->part_keys) {
        const int32_t to = hd_min_i32(from + t->part_keys, t->n_keys);
        attention_keys(a, job->k, t, s, p, from, to);
        join(a, t, sum, p);
    }
    write_heads(a, t, sum);
}

static void one_part(const attention_job *job, const attention_row *t, int32_t group,
                     int32_t part, int32_t worker) {
    attention_state *s = hd_stream_scratch(job->stream, worker, sizeof *s);
    attention_part *sum = shared_part(job, group, 0);
    const int64_t from = (int64_t)part * t->part_keys;
    if (from < t->n_keys || part == 0) {
        const int32_t to = hd_min_i32((int32_t)from + t->part_keys, t->n_keys);
        attention_keys(job->a, job->k, t, s, shared_part(job, group, part), (int32_t)from, to);
    }
    if (atomic_fetch_sub_explicit(&sum->left, 1, memory_order_acq_rel) > 1) return;
    for (int32_t i = 1; (int64_t)i * t->part_keys < t->n_keys; i++) {
        join(job->a, t, sum, shared_part(job, group, i));
    }
    write_heads(job->a, t, sum);
}

static void attention_task(const void *arg, int32_t task, int32_t worker) {
    const attention_job *job = arg;
    const int32_t group = task / job->parts;
    const attention_row t = row_of(job, group / job->groups, group % job->groups * job->heads);
    if (job->parts == 1) {
        all_parts(job, &t, worker);
    } else {
        one_part(job, &t, group, task % job->parts, worker);
    }
}

static int64_t place_tiles(attention_job *job, int32_t heads) {
    job->heads = heads;
    job->groups = (int32_t)hd_ceil_div(job->a->heads, heads);
    const size_t n_out = (size_t)heads * (size_t)job->a->v_dim;
    job->part_bytes = sizeof(attention_part) + n_out * sizeof(float);
    job->part_bytes += (0 - job->part_bytes) % HD_CACHE_LINE;
    const size_t room =
        (hd_stream_scratch_bytes(job->stream) - sizeof(attention_state)) / job->part_bytes;
    job->parts_each = room < 1024 ? (int32_t)room : 1024;
    return (int64_t)job->a->rows * job->groups;
}

static int32_t most_parts(const hd_attention_args *a) {
    int32_t most = 1;
    for (int32_t r = 0; r < a->rows; r++) {
        const int32_t n = recent_keys(a, r) + count_entries(a, r);
        most = hd_max_i32(most, (int32_t)hd_ceil_div(n, part_keys(n)));
    }
    return most;
}

/* If the rows' groups of heads would leave workers idle, parts become tasks, so that a key
 * is still read once. If that is not enough, groups become smaller. */
static void cut(attention_job *job) {
    const hd_attention_args *a = job->a;
    const int32_t workers = hd_stream_workers(job->stream);
    int32_t heads = hd_max_i32(1, hd_min_i32(HEADS, PART_OUT / hd_max_i32(1, a->v_dim)));
    int64_t groups = place_tiles(job, hd_min_i32(heads, hd_max_i32(1, a->heads)));
    job->parts = 1;
    if (workers == 1 || groups >= 2 * (int64_t)workers) return;
    const int32_t most = most_parts(a);
    while (groups * most < workers && job->heads > FEW_HEADS) {
        groups = place_tiles(job, (job->heads / 2 + FEW_HEADS - 1) / FEW_HEADS * FEW_HEADS);
    }
    if (groups * most > (int64_t)workers * job->parts_each) return; /* too little scratch */
    job->parts = most;
    for (int32_t g = 0; g < groups && most > 1; g++) {
        atomic_init(&shared_part(job, g, 0)->left, most);
    }
}

void ops_attention_cpu(hd_stream *s, const hd_attention_args *a, const ops_kernels *k) {
    attention_job job = {.stream = s, .k = k, .a = a};
    cut(&job);
    hd_stream_tasks(s, a->rows * job.groups * job.parts, attention_task, &job);
}
