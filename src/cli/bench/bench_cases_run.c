/* bench_cases_run.c - cases of `hadal bench ops` without a config: the call of each operator,
 * and the bytes and operations it needs at least (op cost). */
#include <string.h>

#include "base/checked.h"
#include "cli/bench/bench_cases_internal.h"
#include "kv/resident.h"

enum { PAGE_ENTRIES = 64, MAX_CASE_EXPERTS = 256, WINDOW = 128 };

/* ---- operands ---- */

/* Returns the next bytes of the pool. */
static const void *operand(op_bench *b, size_t bytes) {
    if (b->used + bytes > CASE_POOL) b->used = 0;
    const void *p = b->pool + b->used;
    b->used += (bytes + 255) / 256 * 256;
    return p;
}

static int32_t *positions(const op_bench *b) {
    return b->ints + 2 * CASE_INTS;
}

static int32_t *experts(const op_bench *b) {
    return b->ints + 3 * CASE_INTS;
}

/* Small arrays at the end of the output's memory. */
static int32_t *scratch_ints(const op_bench *b) {
    return (int32_t *)(void *)(b->out + CASE_FLOATS - CASE_SMALL);
}

static double matrix_bytes(const op_case *c) {
    const hd_stored_format f = hd_format_stored(c->format);
    return (double)hd_stored_data_bytes(&f, c->outs, c->cols) +
           (double)hd_stored_scale_bytes(&f, c->outs, c->cols);
}

static hd_weight matrix(op_bench *b, const op_case *c) {
    const hd_stored_format f = hd_format_stored(c->format);
    hd_weight w = {.data = operand(b, hd_stored_data_bytes(&f, c->outs, c->cols)),
                   .type = f.type,
                   .scale_type = f.scale_type,
                   .rows = c->outs,
                   .cols = c->cols,
                   .block_rows = f.block_rows,
                   .block_cols = f.block_cols,
                   .global = 1.0f};
    if (f.scale_type != HD_NONE) {
        w.scale = operand(b, hd_stored_scale_bytes(&f, c->outs, c->cols));
    }
    return w;
}

/* The type of cached entries; of the indexer's keys. */
static hd_dtype kv_type(const op_bench *b) {
    return b->ops.kv_type ? b->ops.kv_type : HD_F32;
}

static hd_dtype key_type(const op_bench *b) {
    return hd_is_packed(kv_type(b)) ? kv_type(b) : HD_F32;
}

/* As kv/ has them for entries and keys of these widths. */
static hd_group_format format_of(hd_dtype type, int32_t width) {
    const bool key = width == 128;
    if (type == HD_E4M3) {
        return (hd_group_format){HD_E4M3, HD_E8M0, width == 512 ? 64 : 128, key ? 0 : 64};
    }
    if (type != HD_E2M1) return (hd_group_format){.group = 0};
    return (hd_group_format){HD_E2M1, key ? HD_E8M0 : HD_E4M3, key ? 32 : 16, 0};
}

static double entry_bytes(hd_dtype type, int32_t width) {
    return (double)hd_entry_bytes(type, width, format_of(type, width));
}

static hd_paged pages(op_bench *b, int32_t entries, int32_t width, hd_dtype type) {
    const hd_group_format format = format_of(type, width);
    const size_t bytes = (size_t)entries * hd_entry_bytes(type, width, format);
    void *data = (void *)(uintptr_t)operand(b, bytes + PAGE_ENTRIES * 4096);
    return (hd_paged){
        .rows = {.data = data, .type = type},
        .table = b->ints + CASE_INTS,
        .table_stride = entries / PAGE_ENTRIES + 1,
        .page_entries = PAGE_ENTRIES,
        .width = width,
        .format = format
    };
}

/* ---- products ---- */

static void run_linear(op_bench *b, const op_case *c) {
    const hd_weight w = matrix(b, c);
    b->ops.linear(
        b->stream,
        &(hd_linear_args){.out = hd_f32(b->out), .x = hd_f32(b->in), .w = &w, .rows = c->rows});
}

static op_operands linear_operands(const op_bench *b, const op_case *c) {
    const double acts = (double)c->rows * ((double)c->outs + c->cols) * hd_act_bytes(&b->ops);
    return (op_operands){matrix_bytes(c) + acts, 2.0 * c->rows * c->outs * c->cols};
}

/* n heads; transposed: of each head's matrix [outs / n, cols]; else V4's groups, x of cols
 * each. */
static void run_heads(op_bench *b, const op_case *c) {
    const hd_weight w = matrix(b, c);
    const int32_t each = c->outs / c->n;
    const bool transposed = c->top_k > 0;
    b->ops.linear_heads(b->stream,
                        &(hd_linear_heads_args){.out = hd_f32(b->out),
                                                .x = hd_f32(b->in),
                                                .w = &w,
                                                .rows = c->rows,
                                                .heads = c->n,
                                                .n_rows = each,
                                                .head_rows = each,
                                                .out_head = transposed ? c->cols : each,
                                                .x_head = transposed ? each : c->cols,
                                                .transpose = transposed});
}

static op_operands heads_operands(const op_bench *b, const op_case *c) {
    const double acts =
        (double)c->rows * (c->outs + (double)c->n * c->cols) * hd_act_bytes(&b->ops);
    return (op_operands){matrix_bytes(c) + acts, 2.0 * c->rows * c->outs * c->cols};
}

static void run_grouped(op_bench *b, const op_case *c) {
    int32_t *offset = scratch_ints(b), *assignment = offset + MAX_CASE_EXPERTS + 1;
    b->next_table = (b->next_table + 1) % CASE_TABLES;
    b->ops.grouped_gemm(b->stream, &(hd_grouped_gemm_args){.out = hd_f32(b->out),
                                                           .x = hd_f32(b->in),
                                                           .w = &b->tables[b->next_table],
                                                           .offset = offset,
                                                           .assignment = assignment,
                                                           .top_k = c->top_k,
                                                           .n_places = c->rows * c->top_k});
}

/* Row t has experts t * top_k, + 1, ...: as many distinct ones as possible. */
static op_operands grouped_operands(const op_bench *b, const op_case *c) {
    const double places = (double)c->rows * c->top_k, used = places < c->n ? places : c->n;
    const double acts = (c->rows * (double)c->cols + places * c->outs) * hd_act_bytes(&b->ops);
    return (op_operands){used * matrix_bytes(c) + acts, 2.0 * places * c->outs * c->cols};
}

static void run_gated(op_bench *b, const op_case *c) {
    const hd_weight gate = matrix(b, c), up = matrix(b, c);
    b->ops.linear_swiglu(b->stream,
                         &(hd_linear_swiglu_args){.out = hd_f32(b->out),
                                                  .gate = hd_f32(b->out),
                                                  .up = hd_f32(b->out + CASE_FLOATS / 2),
                                                  .x = hd_f32(b->in),
                                                  .gate_w = &gate,
                                                  .up_w = &up,
                                                  .rows = c->rows,
                                                  .limit = 10.0f});
}

static op_operands gated_operands(const op_bench *b, const op_case *c) {
    const double acts = (double)c->rows * ((double)c->outs + c->cols) * hd_act_bytes(&b->ops);
    return (op_operands){2 * matrix_bytes(c) + acts, 4.0 * c->rows * c->outs * c->cols};
}

static void run_gated_experts(op_bench *b, const op_case *c) {
    int32_t *offset = scratch_ints(b), *assignment = offset + MAX_CASE_EXPERTS + 1;
    const hd_expert_table *gate = &b->tables[b->next_table];
    b->next_table = (b->next_table + 1) % CASE_TABLES;
    b->ops.grouped_swiglu(b->stream,
                          &(hd_grouped_swiglu_args){.out = hd_f32(b->out),
                                                    .gate = hd_f32(b->out),
                                                    .up = hd_f32(b->out + CASE_FLOATS / 2),
                                                    .x = hd_f32(b->in),
                                                    .gate_w = gate,
                                                    .up_w = &b->tables[b->next_table],
                                                    .offset = offset,
                                                    .assignment = assignment,
                                                    .top_k = c->top_k,
                                                    .n_places = c->rows * c->top_k,
                                                    .limit = 10.0f});
    b->next_table = (b->next_table + 1) % CASE_TABLES;
}

static op_operands gated_experts_operands(const op_bench *b, const op_case *c) {
    const double places = (double)c->rows * c->top_k, used = places < c->n ? places : c->n;
    const double acts = (c->rows * (double)c->cols + places * c->outs) * hd_act_bytes(&b->ops);
    return (op_operands){2 * used * matrix_bytes(c) + acts, 4.0 * places * c->outs * c->cols};
}

/* ---- attention and its keys ---- */

/* Rows at the last of n positions. top_k 0: V3, all keys; else V4 with a window and that many
 * entries, one in four of n. cols: the width of a key. */
static void run_attention(op_bench *b, const op_case *c) {
    const bool windowed = c->cols == 512;
    const hd_dtype type = kv_type(b);
    b->ops.attention(b->stream, &(hd_attention_args){.out = hd_f32(b->out),
                                                     .q = hd_f32(b->in),
                                                     .recent = pages(b, c->n, 512, type),
                                                     .entries = pages(b, c->n, c->cols, type),
                                                     .selected = c->top_k ? experts(b) : NULL,
                                                     .seq = b->ints,
                                                     .pos = positions(b),
                                                     .rows = c->rows,
                                                     .heads = c->outs,
                                                     .k_dim = c->cols,
                                                     .v_dim = 512,
                                                     .window = windowed ? WINDOW : 0,
                                                     .ratio = windowed ? 4 : 1,
                                                     .n_selected = c->top_k,
                                                     .scale = 0.04f});
}

static op_operands attention_operands(const op_bench *b, const op_case *c) {
    const double keys = c->top_k ? c->top_k + (c->cols == 512 ? WINDOW : 0) : c->n;
    const double q_and_out =
        (double)c->rows * c->outs * (c->cols + 512) * hd_act_bytes(&b->ops);
    return (op_operands){keys * entry_bytes(kv_type(b), c->cols) + q_and_out,
                         2.0 * c->rows * c->outs * keys * (c->cols + 512)};
}

/* V3's naive form: a prompt of all rows, of n heads, without keys of earlier steps. */
enum { NOPE = 128, ROPE = 64, VALUE = 128 };

static void run_naive(op_bench *b, const op_case *c) {
    const hd_weight w = matrix(b, c);
    b->ops.attention_naive(
        b->stream,
        &(hd_attention_naive_args){
            .out = hd_f32(b->out),
            .q = hd_f32(b->in),
            .latents = pages(b, c->rows, c->cols + ROPE, kv_type(b)),
            .w = &w,
            .seqs = {.n = 1, .first_row = scratch_ints(b), .pos = b->ints + CASE_INTS},
            .most_rows = c->rows,
            .most_keys = c->rows,
            .heads = c->n,
            .nope_dim = NOPE,
            .rope_dim = ROPE,
            .v_dim = VALUE,
            .scale = 0.07f
    });
}

/* Keys and values are made of every row; a row then reads those before it. */
static op_operands naive_operands(const op_bench *b, const op_case *c) {
    const double keys = c->rows, seen = keys * (keys + 1) / 2, elements = NOPE + ROPE + VALUE;
    const double latents = keys * entry_bytes(kv_type(b), c->cols + ROPE);
    return (op_operands){matrix_bytes(c) + latents +
                             keys * c->n * elements * hd_act_bytes(&b->ops),
                         2.0 * c->n * seen * elements + 2.0 * keys * c->outs * c->cols};
}

static void run_index(op_bench *b, const op_case *c) {
    b->ops.indexer_topk(b->stream,
                        &(hd_indexer_topk_args){.out = (int32_t *)(void *)b->out,
                                                .q = hd_f32(b->in),
                                                .weight = b->in,
                                                .keys = pages(b, c->n, c->cols, key_type(b)),
                                                .seq = b->ints,
                                                .pos = positions(b),
                                                .rows = c->rows,
                                                .heads = c->outs,
                                                .ratio = 1,
                                                .top_k = c->top_k,
                                                .scale = 0.1f});
}

static op_operands index_operands(const op_bench *b, const op_case *c) {
    const double q = (double)c->rows * c->outs * c->cols * hd_act_bytes(&b->ops);
    return (op_operands){c->n * entry_bytes(key_type(b), c->cols) + q,
                         2.0 * c->rows * c->outs * c->cols * c->n};
}

/* V4's compressor of n positions to an entry of cols; a row alone is the last of a block, many are a
 * prompt. Of 4 positions the block before takes part. */
static int32_t block_parts(const op_case *c) {
    return c->n == 4 ? 2 : 1;
}

static void run_compress(op_bench *b, const op_case *c) {
    const int32_t width = block_parts(c) * c->cols, ring = block_parts(c) * c->n;
    const size_t state = (size_t)ring * 2 * (size_t)width * sizeof(float);
    b->ops.compress(b->stream,
                    &(hd_compress_args){
                        .entries = pages(b, c->rows, c->cols, kv_type(b)),
                        .state = {.rows = hd_f32((void *)(uintptr_t)operand(b, state)),
                                  .table = b->ints,
                                  .page_tokens = CASE_INTS,
                                  .ring = ring,
                                  .width = 2 * width},
                        .kv = b->in,
                        .gate = b->in + CASE_IN / 2,
                        .ape = (const float *)(const void *)b->ints, /* zeros */
                        .norm = b->in,
                        .freq = b->in,
                        .seqs = {.n = 1,
                                  .first_row = scratch_ints(b),
                                  .pos = c->rows == 1 ? positions(b) : b->ints + CASE_INTS,
                                  .most_rows = c->rows},
                        .ratio = c->n,
                        .pairs = 32,
                        .overlap = block_parts(c) > 1,
                        .eps = 1e-6f
    });
}

/* Rows are read, and those of an unfinished block kept; a row alone reads its block. */
static op_operands compress_operands(const op_bench *b, const op_case *c) {
    const double width = block_parts(c) * c->cols, ring = block_parts(c) * c->n;
    const double seen = c->rows < ring ? ring : c->rows;
    const double kept = c->rows < ring ? c->rows : ring;
    const double made = c->rows < c->n ? 1 : c->rows / c->n;
    return (op_operands){8 * width * (seen + kept) + made * entry_bytes(kv_type(b), c->cols),
                         0};
}

/* ---- hyper-connections: n streams of cols ---- */

static void run_hc_pre(op_bench *b, const op_case *c) {
    const size_t mixes = (size_t)(2 * c->n + c->n * c->n);
    const size_t fn = mixes * (size_t)(c->n * c->cols) * sizeof(float);
    float *small = b->out + CASE_FLOATS / 2;
    b->ops.hc_pre(b->stream, &(hd_hc_pre_args){.out = hd_f32(b->out),
                                               .post = small,
                                               .comb = small + (1 << 20),
                                               .x = hd_f32(b->in),
                                               .fn = operand(b, fn),
                                               .scale = b->in,
                                               .base = b->in,
                                               .rows = c->rows,
                                               .cols = c->cols,
                                               .hc = c->n,
                                               .iters = 20,
                                               .norm_eps = 1e-6f,
                                               .eps = 1e-6f});
}

static op_operands hc_pre_operands(const op_bench *b, const op_case *c) {
    const double mixes = 2.0 * c->n + (double)c->n * c->n, all = (double)c->n * c->cols;
    const double acts = c->rows * (all + c->cols) * hd_act_bytes(&b->ops);
    return (op_operands){acts + mixes * all * sizeof(float), 2 * mixes * c->rows * all};
}

static void run_hc_post(op_bench *b, const op_case *c) {
    b->ops.hc_post(b->stream, &(hd_hc_post_args){.x = hd_f32(b->out),
                                                 .y = hd_f32(b->in),
                                                 .post = b->in,
                                                 .comb = b->in,
                                                 .rows = c->rows,
                                                 .cols = c->cols,
                                                 .hc = c->n});
}

static op_operands hc_post_operands(const op_bench *b, const op_case *c) {
    const double all = (double)c->n * c->cols;
    return (op_operands){c->rows * (2 * all + c->cols) * hd_act_bytes(&b->ops),
                         2.0 * c->rows * all * (c->n + 1)};
}

static void run_hc_next(op_bench *b, const op_case *c) {
    const size_t mixes = (size_t)(2 * c->n + c->n * c->n);
    const size_t fn = mixes * (size_t)(c->n * c->cols) * sizeof(float);
    float *small = b->out + CASE_FLOATS / 2;
    b->ops.hc_next(b->stream, &(hd_hc_next_args){.out = hd_f32(b->out),
                                                 .x = hd_f32(small + (2 << 20)),
                                                 .y = hd_f32(b->in),
                                                 .post = small,
                                                 .comb = small + (1 << 20),
                                                 .fn = operand(b, fn),
                                                 .scale = b->in,
                                                 .base = b->in,
                                                 .weight = b->in,
                                                 .rows = c->rows,
                                                 .cols = c->cols,
                                                 .hc = c->n,
                                                 .iters = 20,
                                                 .norm_eps = 1e-6f,
                                                 .eps = 1e-6f});
}

static op_operands hc_next_operands(const op_bench *b, const op_case *c) {
    const double mixes = 2.0 * c->n + (double)c->n * c->n, all = (double)c->n * c->cols;
    const double acts = c->rows * (2 * all + 2.0 * c->cols) * hd_act_bytes(&b->ops);
    return (op_operands){acts + mixes * all * sizeof(float),
                         2 * (mixes + c->n + 1) * c->rows * all};
}

/* ---- entries in host memory ---- */

static int32_t missing_entries(const op_case *c) {
    return (int32_t)((int64_t)c->rows * c->top_k * c->outs / 100);
}

/* Every second pass selects the same entries, and the others as many, some of them others. The buffer has
 * room for one pass. */
static void run_resident(op_bench *b, const op_case *c) {
    const hd_paged entries = {
        .rows = {.data = b->mirror, .type = kv_type(b)},
        .table = b->ints,
        .page_entries = CASE_INTS,
        .width = c->cols,
        .format = format_of(kv_type(b), c->cols)
    };
    const int32_t first = b->pass++ % 2 * missing_entries(c);
    b->ops.resident(b->stream, &(hd_resident_args){.out = scratch_ints(b),
                                                   .selected = b->ints + CASE_INTS + first,
                                                   .entries = entries,
                                                   .buffer = b->resident,
                                                   .seq = b->ints,
                                                   .rows = c->rows,
                                                   .top_k = c->top_k});
}

static op_operands resident_operands(const op_bench *b, const op_case *c) {
    const double entry = entry_bytes(kv_type(b), c->cols);
    return (op_operands){
        4.0 * c->rows * c->top_k * sizeof(int32_t) + 2 * entry * missing_entries(c), 0};
}

static void place_resident(op_bench *b, const op_case *c, hd_arena *a) {
    const int32_t n = c->rows * c->top_k;
    hd_resident_scratch x = {0};
    hd_resident_scratch_place(&x, a, n);
    b->resident.rows.type = kv_type(b);
    hd_resident_place(&b->resident, a, &x, (size_t)entry_bytes(kv_type(b), c->cols), n,
                      n + missing_entries(c));
}

static hd_status open_resident(op_bench *b, const op_case *c, hd_err *err) {
    const int64_t n = (int64_t)c->rows * c->top_k + missing_entries(c);
    const size_t bytes = ((size_t)n * (size_t)entry_bytes(kv_type(b), c->cols) + 7) / 8 * 8;
    hd_arena a = hd_arena_measure();
    hd_device_release(b->device, b->mirror);
    hd_device_release(b->device, b->buffer);
    b->mirror = b->buffer = NULL;
    place_resident(b, c, &a);
    HD_TRY(hd_device_alloc(b->device, &b->buffer, a.peak, "a buffer", err));
    HD_TRY(hd_device_alloc_host(b->device, &b->mirror, bytes + sizeof *b->resident.counts,
                                "entries", err));
    a = hd_arena_over(b->buffer, a.peak);
    place_resident(b, c, &a);
    b->resident.counts = (hd_resident_counts *)(void *)((uint8_t *)b->mirror + bytes);
    return HD_OK;
}

/* ---- rows ---- */

static op_operands rows_operands(const op_bench *b, const op_case *c) {
    return (op_operands){2.0 * c->rows * c->cols * hd_act_bytes(&b->ops), 0};
}

static void run_norm(op_bench *b, const op_case *c) {
    b->ops.rms_norm(b->stream, &(hd_rms_norm_args){.out = hd_f32(b->out),
                                                   .x = hd_f32(b->in),
                                                   .weight = b->in,
                                                   .rows = c->rows,
                                                   .cols = c->cols,
                                                   .eps = 1e-6f});
}

static void run_add_norm(op_bench *b, const op_case *c) {
    b->ops.add_norm(b->stream, &(hd_add_norm_args){.out = hd_f32(b->out),
                                                   .x = hd_f32(b->out + CASE_FLOATS / 2),
                                                   .y = hd_f32(b->in),
                                                   .weight = b->in,
                                                   .rows = c->rows,
                                                   .cols = c->cols,
                                                   .eps = 1e-6f});
}

static op_operands add_norm_operands(const op_bench *b, const op_case *c) {
    return (op_operands){4.0 * c->rows * c->cols * hd_act_bytes(&b->ops), 0};
}

static void run_swiglu(op_bench *b, const op_case *c) {
    b->ops.swiglu(b->stream, &(hd_swiglu_args){.out = hd_f32(b->out),
                                               .gate = hd_f32(b->in),
                                               .up = hd_f32(b->in + CASE_IN / 2),
                                               .rows = c->rows,
                                               .cols = c->cols,
                                               .limit = 10.0f});
}

static op_operands swiglu_operands(const op_bench *b, const op_case *c) {
    return (op_operands){3.0 * c->rows * c->cols * hd_act_bytes(&b->ops), 0};
}

static void run_route(op_bench *b, const op_case *c) {
    const bool grouped = c->n > 0;
    b->ops.moe_topk(b->stream,
                    &(hd_moe_topk_args){
                        .expert = (int32_t *)(void *)b->out,
                        .weight = b->out + CASE_FLOATS / 2,
                        .logits = b->in,
                        .bias = b->in + CASE_IN / 2,
                        .rows = c->rows,
                        .rule = {.score = grouped ? HD_SCORE_SIGMOID : HD_SCORE_SQRT_SOFTPLUS,
                                 .group_rule = grouped ? HD_GROUPS_TOP2SUM : HD_GROUPS_NONE,
                                 .n_experts = c->cols,
                                 .top_k = c->top_k,
                                 .n_groups = grouped ? c->n : 1,
                                 .top_groups = grouped ? c->n / 2 : 1,
                                 .normalize = true,
                                 .scale = 2.5f}
    });
}

static op_operands route_operands(const op_bench *b, const op_case *c) {
    (void)b;
    return (op_operands){4.0 * c->rows * (c->cols + 2.0 * c->top_k), 0};
}

static void run_permute(op_bench *b, const op_case *c) {
    int32_t *offset = scratch_ints(b), *assignment = offset + MAX_CASE_EXPERTS + 1;
    b->ops.moe_permute(b->stream, &(hd_moe_permute_args){.offset = offset,
                                                         .assignment = assignment,
                                                         .place = assignment + CASE_INTS,
                                                         .expert = experts(b),
                                                         .rows = c->rows,
                                                         .top_k = c->top_k,
                                                         .n_experts = c->n,
                                                         .n_slots = c->n});
}

static op_operands permute_operands(const op_bench *b, const op_case *c) {
    (void)b;
    return (op_operands){12.0 * c->rows * c->top_k, 0};
}

static void run_combine(op_bench *b, const op_case *c) {
    b->ops.moe_combine(b->stream, &(hd_moe_combine_args){.out = hd_f32(b->out),
                                                         .y = hd_f32(b->in),
                                                         .shared = hd_f32(b->in + CASE_IN / 2),
                                                         .weight = b->in,
                                                         .expert = experts(b),
                                                         .place = b->ints + CASE_INTS,
                                                         .rows = c->rows,
                                                         .cols = c->cols,
                                                         .top_k = c->top_k});
}

static op_operands combine_operands(const op_bench *b, const op_case *c) {
    return (op_operands){(c->top_k + 2.0) * c->rows * c->cols * hd_act_bytes(&b->ops), 0};
}

static void run_argmax(op_bench *b, const op_case *c) {
    b->ops.argmax(b->stream, &(hd_argmax_args){.token = (int32_t *)(void *)b->out,
                                               .logits = b->in,
                                               .rows = c->rows,
                                               .vocab = c->cols,
                                               .n_ids = c->cols});
}

static void run_sample(op_bench *b, const op_case *c) {
    b->ops.sample(b->stream,
                  &(hd_sample_args){.token = (int32_t *)(void *)b->out,
                                    .logits = b->in,
                                    .params = (const hd_sampling *)(void *)scratch_ints(b),
                                    .slot = b->ints,
                                    .position = b->ints,
                                    .input = b->ints,
                                    .rows = c->rows,
                                    .vocab = c->cols,
                                    .n_ids = c->cols});
}

static op_operands logits_operands(const op_bench *b, const op_case *c) {
    (void)b;
    return (op_operands){4.0 * c->rows * c->cols, 0};
}

/* ---- the operators ---- */

static const struct {
    const char *op;
    op_case_fn *run;
    op_operands (*operands)(const op_bench *b, const op_case *c);
} kinds[] = {
    {"linear",          run_linear,        linear_operands       },
    {"linear_heads",    run_heads,         heads_operands        },
    {"grouped_gemm",    run_grouped,       grouped_operands      },
    {"linear_swiglu",   run_gated,         gated_operands        },
    {"grouped_swiglu",  run_gated_experts, gated_experts_operands},
    {"hc_next",         run_hc_next,       hc_next_operands      },
    {"add_norm",        run_add_norm,      add_norm_operands     },
    {"attention",       run_attention,     attention_operands    },
    {"attention_naive", run_naive,         naive_operands        },
    {"indexer_topk",    run_index,         index_operands        },
    {"compress",        run_compress,      compress_operands     },
    {"resident",        run_resident,      resident_operands     },
    {"hc_pre",          run_hc_pre,        hc_pre_operands       },
    {"hc_post",         run_hc_post,       hc_post_operands      },
    {"rms_norm",        run_norm,          rows_operands         },
    {"swiglu",          run_swiglu,        swiglu_operands       },
    {"moe_topk",        run_route,         route_operands        },
    {"moe_permute",     run_permute,       permute_operands      },
    {"moe_split",       op_split_run,      op_split_operands     },
    {"moe_combine",     run_combine,       combine_operands      },
    {"argmax",          run_argmax,        logits_operands       },
    {"sample",          run_sample,        logits_operands       },
};

op_case op_case_of(const op_shape *shape, int32_t rows) {
    size_t k = 0;
    while (strcmp(kinds[k].op, shape->op) != 0) k++; /* a test looks for each */
    return (op_case){.name = shape->name,
                     .op = shape->op,
                     .run = kinds[k].run,
                     .operands = kinds[k].operands,
                     .format = shape->format,
                     .rows = rows,
                     .outs = shape->outs,
                     .cols = shape->cols,
                     .n = shape->n,
                     .top_k = shape->top_k,
                     .in_bf16 = kinds[k].run == run_naive};
}

bool op_case_is_there(const op_bench *b, const op_case *c) {
    return c->run != run_naive || b->ops.attention_naive;
}

/* ---- before a case ---- */

static void upload_ints(op_bench *b, const op_case *c) {
    static int32_t at[CASE_INTS], expert[CASE_INTS];
    const int32_t n = c->n > 0 ? c->n : 1;
    for (int32_t i = 0; i < CASE_INTS; i++) {
        at[i] = c->n - 1;
        expert[i] = i % n;
    }
    hd_stream_upload(b->stream, positions(b), at, sizeof at);
    hd_stream_upload(b->stream, experts(b), expert, sizeof expert);
}

/* Uploads tables of matrices behind the small arrays of permute. */
static void upload_tables(op_bench *b, const op_case *c) {
    hd_weight w[MAX_CASE_EXPERTS];
    const size_t bytes = (size_t)c->n * sizeof *w;
    uint8_t *to = (uint8_t *)(scratch_ints(b) + 4 * CASE_INTS);
    for (int32_t t = 0; t < CASE_TABLES; t++, to += bytes) {
        for (int32_t e = 0; e < c->n; e++) w[e] = matrix(b, c);
        hd_expert_table_init(&b->tables[t], w, c->n);
        b->tables[t].slots = (const hd_weight *)(void *)to;
        hd_stream_upload(b->stream, to, w, bytes);
    }
}

void op_case_prepare(op_bench *b, const op_case *c) {
    static const hd_sampling nucleus = {.temperature = 1.0f, .top_p = 0.95f, .top_k = 50};
    hd_err err = {0};
    upload_ints(b, c);
    if (c->run == run_resident && open_resident(b, c, &err) != HD_OK) {
        hd_stream_fail(b->stream, err.status, err.msg);
    }
    if (c->run == op_split_run && op_split_prepare(b, c, &err) != HD_OK) {
        hd_stream_fail(b->stream, err.status, err.msg);
    }
    if (c->run == run_grouped || c->run == run_gated_experts) {
        run_permute(b, c);
        upload_tables(b, c);
    }
    if (c->run == run_naive || c->run == run_compress) {
        const int32_t first_row[2] = {0, c->rows};
        hd_stream_upload(b->stream, scratch_ints(b), first_row, sizeof first_row);
    }
    if (c->run == run_sample) {
        hd_stream_upload(b->stream, scratch_ints(b), &nucleus, sizeof nucleus);
    }
}
