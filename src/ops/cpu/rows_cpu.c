/* rows_cpu.c - row-wise operators across threads: embedding, norms, RoPE, KV store, SwiGLU,
 * Engram.
 * If the reference is already as fast as memory, or the rows are few and narrow, a task runs
 * the reference on its own rows. */
#include <string.h>

#include "ops/cpu/cpu_internal.h"
#include "ops/ref/csa2_internal.h"
#include "ops/ref/ref_internal.h"

enum { TASK_STEPS = 32768, STRETCH = 256 };

static void run_task(const void *arg, int32_t task, int32_t worker) {
    const ops_job *job = arg;
    const int32_t first = task * job->per_task;
    const int32_t left = job->rows - first;
    job->fn(job, first, first + (left < job->per_task ? left : job->per_task), worker);
}

void ops_run_rows(const ops_job *job) {
    const int64_t n_tasks = ((int64_t)job->rows + job->per_task - 1) / job->per_task;
    hd_stream_tasks(job->stream, (int32_t)n_tasks, run_task, job);
}

int32_t ops_rows_per_task(int64_t steps) {
    return steps >= TASK_STEPS ? 1 : (int32_t)(TASK_STEPS / (steps > 0 ? steps : 1));
}

static void embed_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    const hd_embed_args *a = job->args;
    const int32_t cols = a->table->cols;
    for (int32_t r = first; r < end; r++) {
        float *out = act(a->out) + (int64_t)r * a->copies * cols;
        for (int32_t c = 0; c < cols; c += OPS_TILE_COLS) {
            const int32_t n = cols - c < OPS_TILE_COLS ? cols - c : OPS_TILE_COLS;
            ops_dequantize(job->k, out + c, a->table, a->tokens[r], c, n);
        }
        for (int32_t i = 1; i < a->copies; i++) {
            memcpy(out + (int64_t)i * cols, out, (size_t)cols * sizeof *out);
        }
    }
}

void ops_embed_cpu(hd_stream *s, const hd_embed_args *a, const ops_kernels *k) {
    if (a->copies < 1) return;
    ops_run_rows(
        &(ops_job){.stream = s,
                   .k = k,
                   .args = a,
                   .fn = embed_rows,
                   .rows = a->rows,
                   .per_task = ops_rows_per_task((int64_t)a->copies * a->table->cols)});
}

static void gather_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    hd_gather_args part = *(const hd_gather_args *)job->args;
    part.out = hd_rows_at(part.out, (int64_t)first * part.cols);
    part.index += first;
    part.rows = end - first;
    hd_gather_ref(job->stream, &part);
}

void ops_gather_cpu(hd_stream *s, const hd_gather_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = gather_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(a->cols)});
}

/* x += y */
static void add_row(float *restrict x, const float *restrict y, int32_t n) {
    int32_t i = 0;
    for (; i + OPS_LANES <= n; i += OPS_LANES) {
        for (int32_t u = 0; u < OPS_LANES; u++) x[i + u] += y[i + u];
    }
    for (; i < n; i++) x[i] += y[i];
}

/* A row here is a row of y: `repeat` rows of x. */
static void add_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    const hd_add_args *a = job->args;
    for (int64_t r = (int64_t)first * a->repeat; r < (int64_t)end * a->repeat; r++) {
        add_row(act(a->x) + r * a->cols, act_in(a->y) + r / a->repeat * a->cols, a->cols);
    }
}

void ops_add_cpu(hd_stream *s, const hd_add_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = add_rows,
                            .rows = a->rows / a->repeat,
                            .per_task = ops_rows_per_task((int64_t)a->repeat * a->cols)});
}

static void rms_norm_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    const hd_rms_norm_args *a = job->args;
    for (int32_t r = first; r < end; r++) {
        const float *x = act_in(a->x) + r * stride_of(a->x, a->cols);
        float *out = act(a->out) + r * stride_of(a->out, a->cols);
        const float scale = ops_inverse_rms(job->k, x, a->cols, a->eps);
        ops_scale(out, x, a->weight, scale, a->cols);
    }
}

void ops_rms_norm_cpu(hd_stream *s, const hd_rms_norm_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = rms_norm_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(a->cols)});
}

static void layer_norm_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    hd_layer_norm_args part = *(const hd_layer_norm_args *)job->args;
    part.out = hd_rows_at(part.out, (int64_t)first * part.cols);
    part.x = hd_rows_at(part.x, (int64_t)first * part.cols);
    part.rows = end - first;
    hd_layer_norm_ref(job->stream, &part);
}

void ops_layer_norm_cpu(hd_stream *s, const hd_layer_norm_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = layer_norm_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(8 * (int64_t)a->cols)});
}

static void rope_table_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    hd_rope_table_args part = *(const hd_rope_table_args *)job->args;
    part.out += (int64_t)first * 2 * part.pairs;
    part.position += first;
    part.rows = end - first;
    hd_rope_table_ref(job->stream, &part);
}

void ops_rope_table_cpu(hd_stream *s, const hd_rope_table_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = rope_table_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(64 * (int64_t)a->pairs)});
}

static void rope_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    hd_rope_args part = *(const hd_rope_args *)job->args;
    part.out =
        hd_rows_at(part.out, first * stride_of(part.out, (int64_t)part.heads * part.out_head));
    part.x = hd_rows_at(part.x, first * stride_of(part.x, (int64_t)part.heads * part.x_head));
    part.cos_sin += (int64_t)first * 2 * part.pairs;
    part.rows = end - first;
    hd_rope_ref(job->stream, &part);
}

void ops_rope_cpu(hd_stream *s, const hd_rope_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = rope_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(8 * (int64_t)a->heads * a->pairs)});
}

/* ---- cached entries; those that are not float32 are decoded by the kernels of stored matrices ---- */

enum { MOST_GROUPS = HD_MAX_ENTRY_COLS / OPS_LANES };

static void decode_groups(const ops_kernels *k, const hd_paged *p, const uint8_t *from,
                          float *out, const float *one) {
    const hd_group_format f = p->format;
    const int32_t codes = p->width - f.plain;
    const uint8_t *plain = from + hd_dtype_bytes(f.code, codes), *scale = plain + 2 * f.plain;
    float scales[MOST_GROUPS];
    for (int32_t i = 0; i * f.group < codes; i++) {
        scales[i] =
            f.scale_type == HD_E8M0 ? hd_e8m0_to_f32(scale[i]) : hd_e4m3_to_f32(scale[i]);
    }
    ops_dequantizer(k, f.code)(out, from, codes, scales, f.group);
    ops_dequantizer(k, HD_BF16)(out + codes, plain, f.plain, one, HD_MAX_ENTRY_COLS);
}

const float *ops_entry_cpu(const ops_kernels *k, const hd_paged *p, int32_t seq, int32_t entry,
                           float *room) {
    static const float one = 1.0f;
    if (p->rows.type == HD_F32) return paged_entry(p, seq, entry);
    const uint8_t *from = paged_bytes(p, seq, entry);
    if (hd_is_packed(p->rows.type)) {
        decode_groups(k, p, from, room, &one);
    } else {
        ops_dequantizer(k, p->rows.type)(room, from, p->width, &one, HD_MAX_ENTRY_COLS);
    }
    return room;
}

static void store_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    hd_kv_store_args part = *(const hd_kv_store_args *)job->args;
    part.x = hd_rows_at(part.x, first * stride_of(part.x, part.pool.width));
    part.seq += first;
    part.pos += first;
    part.rows = end - first;
    hd_kv_store_ref(job->stream, &part);
}

void ops_kv_store_cpu(hd_stream *s, const hd_kv_store_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = store_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(a->pool.width)});
}

static void round_some(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    hd_round_rows_args part = *(const hd_round_rows_args *)job->args;
    part.x = hd_rows_at(part.x, (int64_t)first * part.cols);
    part.rows = end - first;
    hd_round_rows_ref(job->stream, &part);
}

void ops_round_rows_cpu(hd_stream *s, const hd_round_rows_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = round_some,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(8 * (int64_t)a->cols)});
}

static void pack_some(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    hd_pack_rows_args part = *(const hd_pack_rows_args *)job->args;
    part.out =
        (uint8_t *)part.out + (size_t)first * hd_packed_row_bytes(part.format, part.cols);
    part.x = hd_rows_at(part.x, (int64_t)first * part.cols);
    part.rows = end - first;
    hd_pack_rows_ref(job->stream, &part);
}

void ops_pack_rows_cpu(hd_stream *s, const hd_pack_rows_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = pack_some,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(4 * (int64_t)a->cols)});
}

static void replay_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    hd_replay_store_args part = *(const hd_replay_store_args *)job->args;
    part.choice += (int64_t)first * part.top_k;
    part.log.seq += first;
    part.log.pos += first;
    part.rows = end - first;
    hd_replay_store_ref(job->stream, &part);
}

void ops_replay_store_cpu(hd_stream *s, const hd_replay_store_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = replay_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(a->top_k)});
}

static void fetch_entries(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    for (int32_t i = first; i < end; i++) ops_resident_fetch(job->args, i);
}

void ops_resident_cpu(hd_stream *s, const hd_resident_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = fetch_entries,
                            .rows = ops_resident_plan(s, a),
                            .per_task = ops_rows_per_task(a->entries.width)});
}

void ops_forget_entries_cpu(hd_stream *s, const hd_forget_entries_args *a,
                            const ops_kernels *k) {
    (void)k;
    hd_forget_entries_ref(s, a);
}

static float at_most(float x, float limit) {
    return x > limit ? limit : x;
}

/* n <= STRETCH elements; silu(g) = g / (1 + exp(-g)) */
static void swiglu_stretch(const hd_swiglu_args *a, const ops_kernels *k, float *out,
                           int64_t at, int32_t n, float weight) {
    const float *gate = act_in(a->gate) + at, *up = act_in(a->up) + at;
    const float limit = a->limit > 0.0f ? a->limit : INFINITY;
    float e[STRETCH];
    for (int32_t c = 0; c < n; c++) e[c] = -at_most(gate[c], limit);
    k->exp_sum(e, n, 0.0f);
    for (int32_t c = 0; c < n; c++) {
        const float u = -at_most(-at_most(up[c], limit), limit);
        out[c] = at_most(gate[c], limit) / (1.0f + e[c]) * u * weight;
    }
}

static void swiglu_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    const hd_swiglu_args *a = job->args;
    for (int32_t r = first; r < end; r++) {
        const float weight = a->weight ? a->weight[a->assignment ? a->assignment[r] : r] : 1.0f;
        float *out = act(a->out) + r * stride_of(a->out, a->cols);
        for (int32_t c = 0; c < a->cols; c += STRETCH) {
            const int32_t n = a->cols - c < STRETCH ? a->cols - c : STRETCH;
            swiglu_stretch(a, job->k, out + c, (int64_t)r * a->cols + c, n, weight);
        }
    }
}

void ops_swiglu_cpu(hd_stream *s, const hd_swiglu_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = swiglu_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(4 * (int64_t)a->cols)});
}

/* ---- rows that are kept ---- */

static void keep_words(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    ops_keep_words(job->args, first, end);
}

/* A task moves some columns of all rows, in order, so that no row is overwritten before it moved. */
void ops_keep_rows_cpu(hd_stream *s, const hd_keep_rows_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){
        .stream = s, .k = k, .args = a, .fn = keep_words, .rows = a->words, .per_task = 1024});
}

/* ---- Engram ---- */

static void class_seqs(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    for (int32_t q = first; q < end; q++) ops_ngram_classes_seq(job->args, q);
}

void ops_ngram_classes_cpu(hd_stream *s, const hd_ngram_classes_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){
        .stream = s, .k = k, .args = a, .fn = class_seqs, .rows = a->seqs.n, .per_task = 64});
}

static void engram_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_engram_embed_args *a = job->args;
    const int32_t columns = a->heads * (a->max_ngram - 1), cols = a->table->cols;
    (void)worker;
    for (int64_t r = first; r < end; r++) {
        for (int32_t c = 0; c < columns; c++) {
            const int32_t row = hd_engram_row(a, a->classes + r * a->max_ngram, c);
            float *out = a->out + (r * columns + c) * cols;
            for (int32_t i = 0; i < cols; i += OPS_TILE_COLS) {
                const int32_t n = cols - i < OPS_TILE_COLS ? cols - i : OPS_TILE_COLS;
                ops_dequantize(job->k, out + i, a->table, row, i, n);
            }
        }
    }
}

void ops_engram_embed_cpu(hd_stream *s, const hd_engram_embed_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){
        .stream = s, .k = k, .args = a, .fn = engram_rows, .rows = a->rows, .per_task = 4});
}

static void gate_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    hd_engram_gate_args part = *(const hd_engram_gate_args *)job->args;
    part.x = hd_rows_at(part.x, (int64_t)first * part.hc * part.cols);
    part.kv += (int64_t)first * (part.hc + 1) * part.cols;
    part.rows = end - first;
    hd_engram_gate_ref(job->stream, &part);
}

void ops_engram_gate_cpu(hd_stream *s, const hd_engram_gate_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = gate_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(4 * (int64_t)a->hc * a->cols)});
}
