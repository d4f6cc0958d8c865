/* indexer_cpu.c - the lightning indexer on the CPU: top-k keys of every row, without storing
 * all scores.
 *
 * A task is a few rows of one sequence and a part of their keys. It walks the keys in
 * blocks. A row keeps as candidates the scores above its threshold. When its buffer is full,
 * all but the top_k best are dropped, and the worst of those is the new threshold. The
 * worker that finishes the last part of a row selects among its parts' candidates. The
 * division into parts has no effect on the result: selection is by score and then by number,
 * and a score is computed from its key alone. */
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"
#include "ops/cpu/cpu_internal.h"
#include "ops/ref/csa2_internal.h"
#include "ops/ref/ref_internal.h"

enum {
    BLOCK_ROWS = 4,    /* rows that share transposed keys */
    PART_KEYS = 1024,  /* keys of a part, at least */
    ROOM = 256,        /* candidates besides the best, at least */
    MOST_ROOM = 65536, /* and at most */
    /* width of transposed keys, at most: more than any checkpoint has */
    MAX_WIDTH = 512
};

typedef struct candidate {
    uint32_t order;
    int32_t key;
} candidate;

/* The candidates of one row in one part, by ascending key. */
typedef struct pick {
    _Atomic int32_t left; /* unfinished parts; counted in the first pick of a block */
    int32_t n;
    uint32_t bar; /* threshold: candidates are above it */
    candidate c[];
} pick;

typedef struct index_job {
    hd_stream *stream;
    const ops_kernels *k;
    const hd_indexer_topk_args *a;
    int32_t block_rows, parts, most; /* most: candidates of a pick, at most */
    size_t transposed, pick_bytes; /* scratch bytes: keys, transposed and decoded, then picks */
    int32_t picks_each;            /* picks in a worker's scratch */
} index_job;

/* Maps scores to unsigned integers above 0 in the same order; NaN is chosen last. */
static uint32_t order_of(float score) {
    /* both zeros become one */
    const uint32_t bits = hd_f32_bits(isnan(score) ? -INFINITY : score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static int32_t count_keys(const hd_indexer_topk_args *a, int32_t row) {
    return visible_entries(a->pos[row], a->ratio);
}

static pick *pick_at(const index_job *job, int32_t worker, int32_t i) {
    uint8_t *scratch = hd_stream_scratch(job->stream, worker, 0);
    return (pick *)(void *)(scratch + job->transposed + (size_t)i * job->pick_bytes);
}

/* Returns a row's pick in a part: with one part it stays with its worker. */
static pick *pick_of(const index_job *job, int32_t row, int32_t part, int32_t worker) {
    if (job->parts == 1) return pick_at(job, worker, row % job->block_rows);
    const int32_t i = row * job->parts + part;
    return pick_at(job, i / job->picks_each, i % job->picks_each);
}

/* ---- selection ---- */

/* The top_k-th largest order among a row's candidates and, in *ties, how many of exactly that
 * order are among the best. Finds it byte by byte from the top: count the candidates per value
 * of the next byte and walk down from the largest. */
static uint32_t find_threshold(pick *const *p, int32_t n_picks, int32_t top_k, int32_t *ties) {
    uint32_t prefix = 0, known = 0; /* bits of the threshold found so far, and which */
    int32_t wanted = top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int32_t count[256] = {0};
        for (int32_t i = 0; i < n_picks; i++) {
            for (int32_t u = 0; u < p[i]->n; u++) {
                const uint32_t order = p[i]->c[u].order;
                if ((order & known) == prefix) count[order >> shift & 255]++;
            }
        }
        uint32_t byte = 255;
        while (wanted > count[byte]) wanted -= count[byte--];
        prefix |= byte << shift;
        known |= 255u << shift;
    }
    *ties = wanted;
    return prefix;
}

static void keep_best(pick *p, int32_t top_k) {
    int32_t kept = 0, ties;
    p->bar = find_threshold(&p, 1, top_k, &ties);
    for (int32_t u = 0; u < p->n; u++) {
        const candidate c = p->c[u];
        if (c.order > p->bar || (c.order == p->bar && ties-- > 0)) p->c[kept++] = c;
    }
    p->n = kept;
}

static void add_candidates(const index_job *job, pick *p, const float *score, int32_t key,
                           int32_t n) {
    for (int32_t u = 0; u < n; u++) {
        const uint32_t order = order_of(score[u]);
        if (order <= p->bar) continue;
        p->c[p->n++] = (candidate){order, key + u};
        if (p->n == job->most) keep_best(p, job->a->top_k);
    }
}

/* Writes the row's top-k from every part's candidates, by ascending key. */
static void write_row(const index_job *job, int32_t row, int32_t worker) {
    const hd_indexer_topk_args *a = job->a;
    const int32_t n = count_keys(a, row);
    int32_t *out = a->out + (int64_t)row * a->top_k, kept = 0, ties;
    pick *p[OPS_MAX_PARTS];
    if (n <= a->top_k) {
        for (; kept < a->top_k; kept++) out[kept] = kept < n ? kept : -1;
        return;
    }
    for (int32_t i = 0; i < job->parts; i++) p[i] = pick_of(job, row, i, worker);
    const uint32_t bar = find_threshold(p, job->parts, a->top_k, &ties);
    for (int32_t i = 0; i < job->parts; i++) {
        for (int32_t u = 0; u < p[i]->n; u++) {
            const candidate c = p[i]->c[u];
            if (c.order > bar || (c.order == bar && ties-- > 0)) out[kept++] = c.key;
        }
    }
}

/* ---- scoring ---- */

/* Scores rows [first, end) of one sequence against keys [from, to). */
static void score_part(const index_job *job, int32_t first, int32_t end, int32_t part,
                       int32_t from, int32_t to, int32_t worker) {
    const hd_indexer_topk_args *a = job->a;
    float *keys = hd_stream_scratch(job->stream, worker, job->transposed),
          score[OPS_TRANSPOSE_KEYS];
    float *decoded = keys + a->keys.width * OPS_TRANSPOSE_KEYS;
    const int64_t q_row = (int64_t)a->heads * a->keys.width;
    for (int32_t key = from; key < to; key += OPS_TRANSPOSE_KEYS) {
        const float *row[OPS_TRANSPOSE_KEYS];
        for (int32_t u = 0; u < OPS_TRANSPOSE_KEYS; u++) {
            row[u] = ops_entry_cpu(job->k, &a->keys, a->seq[first], hd_min_i32(key + u, to - 1),
                                   decoded + u * a->keys.width);
        }
        job->k->transpose(keys, row, a->keys.width);
        for (int32_t r = first; r < end; r++) {
            const int32_t n = count_keys(a, r), seen = hd_min_i32(n, to) - key;
            if (n <= a->top_k || seen <= 0) continue;
            job->k->index_scores(&(ops_index){.score = score,
                                              .keys = keys,
                                              .q = act_in(a->q) + r * q_row,
                                              .weight = a->weight + (int64_t)r * a->heads,
                                              .scale = a->scale,
                                              .heads = a->heads,
                                              .width = a->keys.width});
            add_candidates(job, pick_of(job, r, part, worker), score, key,
                           hd_min_i32(seen, OPS_TRANSPOSE_KEYS));
        }
    }
}

/* Returns the keys of a part, a multiple of the block size. */
static int32_t part_length(const index_job *job, int32_t n) {
    return (int32_t)(hd_ceil_div(hd_ceil_div(n, job->parts), OPS_TRANSPOSE_KEYS) *
                     OPS_TRANSPOSE_KEYS);
}

static void select_task(const void *arg, int32_t task, int32_t worker) {
    const index_job *job = arg;
    const hd_indexer_topk_args *a = job->a;
    const int32_t part = task % job->parts, begin = task / job->parts * job->block_rows;
    const int32_t end = hd_min_i32(begin + job->block_rows, a->rows);
    for (int32_t r = begin, next; r < end; r = next) {
        int32_t n = 0;
        for (next = r; next < end && a->seq[next] == a->seq[r]; next++) {
            pick *p = pick_of(job, next, part, worker);
            p->n = 0;
            p->bar = 0;
            n = hd_max_i32(n, count_keys(a, next));
        }
        if (n <= a->top_k) continue;
        const int64_t each = part_length(job, n), from = part * each;
        const int64_t to = from + each < n ? from + each : n;
        if (from < to) score_part(job, r, next, part, (int32_t)from, (int32_t)to, worker);
    }
    if (job->parts > 1) {
        pick *p = pick_of(job, begin, 0, worker);
        if (atomic_fetch_sub_explicit(&p->left, 1, memory_order_acq_rel) > 1) return;
    }
    for (int32_t r = begin; r < end; r++) write_row(job, r, worker);
}

/* Divides keys into parts if rows alone would leave workers idle. */
static void cut(index_job *job) {
    const hd_indexer_topk_args *a = job->a;
    const int32_t workers = hd_stream_workers(job->stream);
    const int32_t fair = (int32_t)hd_ceil_div(a->rows, 2 * (int64_t)workers);
    job->parts = 1;
    job->block_rows = hd_max_i32(1, hd_min_i32(hd_min_i32(BLOCK_ROWS, fair), job->picks_each));
    const int64_t blocks = hd_ceil_div(a->rows, job->block_rows);
    if (workers == 1 || blocks >= 2 * (int64_t)workers) return;
    int32_t n = 0;
    for (int32_t r = 0; r < a->rows; r++) n = hd_max_i32(n, count_keys(a, r));
    if (n <= a->top_k) return;
    const int64_t room = (int64_t)job->picks_each * workers / a->rows;
    const int64_t wanted = hd_ceil_div(4 * (int64_t)workers, blocks);
    const int64_t most = hd_ceil_div(n, PART_KEYS);
    const int64_t parts[] = {room, wanted, most};
    job->parts = OPS_MAX_PARTS;
    for (size_t i = 0; i < HD_LEN(parts); i++) {
        if (parts[i] < job->parts) job->parts = hd_max_i32(1, (int32_t)parts[i]);
    }
}

void ops_indexer_topk_cpu(hd_stream *s, const hd_indexer_topk_args *a, const ops_kernels *k) {
    if (a->keys.width > MAX_WIDTH) {
        hd_indexer_topk_ref(s, a);
        return;
    }
    index_job job = {.stream = s, .k = k, .a = a};
    job.most = a->top_k + hd_max_i32(ROOM, hd_min_i32(a->top_k, MOST_ROOM));
    job.transposed = 2 * (size_t)a->keys.width * OPS_TRANSPOSE_KEYS * sizeof(float);
    job.pick_bytes = sizeof(pick) + (size_t)job.most * sizeof(candidate);
    job.pick_bytes += (0 - job.pick_bytes) % HD_CACHE_LINE;
    job.transposed += (0 - job.transposed) % HD_CACHE_LINE;
    const size_t room = (hd_stream_scratch_bytes(s) - job.transposed) / job.pick_bytes;
    job.picks_each = hd_max_i32(1, room < 1024 ? (int32_t)room : 1024);
    cut(&job);
    const int32_t blocks = (int32_t)hd_ceil_div(a->rows, job.block_rows);
    for (int32_t b = 0; b < blocks && job.parts > 1; b++) {
        atomic_init(&pick_of(&job, b * job.block_rows, 0, 0)->left, job.parts);
    }
    hd_stream_tasks(s, blocks * job.parts, select_task, &job);
}

/* ---- with a pool of candidates: a task runs the reference on its rows ---- */

static void topk_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_pool_topk_args *a = job->args;
    for (int32_t r = first; r < end; r++) {
        const size_t bytes = ops_pool_topk_scratch(visible_entries(a->pos[r], a->ratio));
        ops_pool_topk_row(a, r, hd_stream_scratch(job->stream, worker, bytes));
    }
}

void ops_pool_topk_cpu(hd_stream *s, const hd_pool_topk_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){
        .stream = s, .k = k, .args = a, .fn = topk_rows, .rows = a->rows, .per_task = 1});
}
