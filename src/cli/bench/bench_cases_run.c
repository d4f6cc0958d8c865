/* bench_cases_run.c - cases of `hadal bench ops` without a config: shapes of V3 and V4, the
 * call of each operator, and the bytes and operations it needs at least (op cost). */
#include "base/checked.h"
#include "cli/bench/bench_cases_internal.h"

enum { PAGE_ENTRIES = 64, MAX_CASE_EXPERTS = 256, WINDOW = 128 };

/* ---- operands ---- */

/* Returns the next bytes of the pool. */
static const void *operand(op_bench *b, size_t bytes) {
    if (b->used + bytes > CASE_POOL) b->used = 0;
    const void *p = b->pool + b->used;
    b->used += (bytes + 255) / 256 * 256;
    return p;
}

static hd_act *act(float *x) {
    return (hd_act *)(void *)x;
}

static int32_t *positions(const op_bench *b) {
    return b->ints + 2 * CASE_INTS;
}

static int32_t *experts(const op_bench *b) {
    return b->ints + 3 * CASE_INTS;
}

/* Small arrays in the upper half of the output's memory. */
static int32_t *scratch_ints(const op_bench *b) {
    return (int32_t *)(void *)(b->out + CASE_FLOATS / 2);
}

static double matrix_bytes(const op_case *c) {
    const double n = (double)c->outs * c->cols;
    const double scales = c->format == HD_E2M1 ? n / 32 : c->format == HD_E4M3 ? n / 4096 : 0;
    return n * hd_dtype_bits(c->format) / 8 + scales;
}

static hd_weight matrix(op_bench *b, const op_case *c) {
    const size_t n = (size_t)c->outs * (size_t)c->cols;
    hd_weight w = {.type = c->format, .rows = c->outs, .cols = c->cols, .global = 1.0f};
    w.data = operand(b, n * (size_t)hd_dtype_bits(c->format) / 8);
    if (c->format == HD_E4M3) {
        w.scale_type = HD_F32;
        w.block_rows = w.block_cols = 128;
        w.scale = operand(b, n / 4096 + 4);
    } else if (c->format == HD_E2M1) {
        w.scale_type = HD_E8M0;
        w.block_rows = 1;
        w.block_cols = 32;
        w.scale = operand(b, n / 32);
    }
    return w;
}

static hd_paged pages(op_bench *b, int32_t entries, int32_t width) {
    const size_t bytes = (size_t)entries * (size_t)width * (size_t)b->ops.act_bytes;
    return (hd_paged){.data = (hd_act *)(uintptr_t)operand(b, bytes + PAGE_ENTRIES * 4096),
                      .table = b->ints + CASE_INTS,
                      .table_stride = entries / PAGE_ENTRIES + 1,
                      .page_entries = PAGE_ENTRIES,
                      .width = width};
}

/* ---- products ---- */

static void run_linear(op_bench *b, const op_case *c) {
    const hd_weight w = matrix(b, c);
    b->ops.linear(
        b->stream,
        &(hd_linear_args){.out = act(b->out), .x = act(b->in), .w = &w, .rows = c->rows});
}

static op_operands linear_operands(const op_bench *b, const op_case *c) {
    const double acts = (double)c->rows * ((double)c->outs + c->cols) * b->ops.act_bytes;
    return (op_operands){matrix_bytes(c) + acts, 2.0 * c->rows * c->outs * c->cols};
}

/* n heads; transposed: of each head's matrix [outs / n, cols]; else V4's groups, x of cols
 * each. */
static void run_heads(op_bench *b, const op_case *c) {
    const hd_weight w = matrix(b, c);
    const int32_t each = c->outs / c->n;
    const bool transposed = c->top_k > 0;
    b->ops.linear_heads(
        b->stream, &(hd_linear_heads_args){.out = act(b->out),
                                           .x = act(b->in),
                                           .w = &w,
                                           .rows = c->rows,
                                           .heads = c->n,
                                           .n_rows = each,
                                           .head_rows = each,
                                           .out_stride = transposed ? c->n * c->cols : c->outs,
                                           .out_head = transposed ? c->cols : each,
                                           .x_stride = transposed ? c->outs : c->n * c->cols,
                                           .x_head = transposed ? each : c->cols,
                                           .transpose = transposed});
}

static op_operands heads_operands(const op_bench *b, const op_case *c) {
    const double acts = (double)c->rows * (c->outs + (double)c->n * c->cols) * b->ops.act_bytes;
    return (op_operands){matrix_bytes(c) + acts, 2.0 * c->rows * c->outs * c->cols};
}

static void run_grouped(op_bench *b, const op_case *c) {
    hd_weight w[MAX_CASE_EXPERTS];
    int32_t *offset = scratch_ints(b), *assignment = offset + MAX_CASE_EXPERTS + 1;
    for (int32_t e = 0; e < c->n; e++) w[e] = matrix(b, c);
    b->ops.grouped_gemm(b->stream, &(hd_grouped_gemm_args){.out = act(b->out),
                                                           .x = act(b->in),
                                                           .w = w,
                                                           .offset = offset,
                                                           .assignment = assignment,
                                                           .n_experts = c->n,
                                                           .top_k = c->top_k,
                                                           .n_places = c->rows * c->top_k});
}

/* Row t has experts t * top_k, + 1, ...: as many distinct ones as possible. */
static op_operands grouped_operands(const op_bench *b, const op_case *c) {
    const double places = (double)c->rows * c->top_k, used = places < c->n ? places : c->n;
    const double acts = (c->rows * (double)c->cols + places * c->outs) * b->ops.act_bytes;
    return (op_operands){used * matrix_bytes(c) + acts, 2.0 * places * c->outs * c->cols};
}

/* ---- attention and its keys ---- */

/* Rows at the last of n positions. top_k 0: V3, all keys; else V4 with a window and that many
 * entries, one in four of n. cols: the width of a key. */
static void run_attention(op_bench *b, const op_case *c) {
    const bool windowed = c->cols == 512;
    b->ops.attention(b->stream, &(hd_attention_args){.out = act(b->out),
                                                     .q = act(b->in),
                                                     .recent = pages(b, c->n, 512),
                                                     .entries = pages(b, c->n, c->cols),
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
    const double q_and_out = (double)c->rows * c->outs * (c->cols + 512) * b->ops.act_bytes;
    return (op_operands){keys * c->cols * b->ops.act_bytes + q_and_out,
                         2.0 * c->rows * c->outs * keys * (c->cols + 512)};
}

static void run_index(op_bench *b, const op_case *c) {
    b->ops.indexer_topk(b->stream, &(hd_indexer_topk_args){.out = (int32_t *)(void *)b->out,
                                                           .q = act(b->in),
                                                           .weight = b->in,
                                                           .keys = pages(b, c->n, c->cols),
                                                           .seq = b->ints,
                                                           .pos = positions(b),
                                                           .rows = c->rows,
                                                           .heads = c->outs,
                                                           .ratio = 1,
                                                           .top_k = c->top_k,
                                                           .scale = 0.1f});
}

static op_operands index_operands(const op_bench *b, const op_case *c) {
    const double q = (double)c->rows * c->outs * c->cols * b->ops.act_bytes;
    return (op_operands){(double)c->n * c->cols * b->ops.act_bytes + q,
                         2.0 * c->rows * c->outs * c->cols * c->n};
}

/* ---- hyper-connections: n streams of cols ---- */

static void run_hc_pre(op_bench *b, const op_case *c) {
    const size_t mixes = (size_t)(2 * c->n + c->n * c->n);
    const size_t fn = mixes * (size_t)(c->n * c->cols) * sizeof(float);
    float *small = b->out + CASE_FLOATS / 2;
    b->ops.hc_pre(b->stream, &(hd_hc_pre_args){.out = act(b->out),
                                               .post = small,
                                               .comb = small + (1 << 20),
                                               .x = act(b->in),
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
    const double acts = c->rows * (all + c->cols) * b->ops.act_bytes;
    return (op_operands){acts + mixes * all * sizeof(float), 2 * mixes * c->rows * all};
}

static void run_hc_post(op_bench *b, const op_case *c) {
    b->ops.hc_post(b->stream, &(hd_hc_post_args){.x = act(b->out),
                                                 .y = act(b->in),
                                                 .post = b->in,
                                                 .comb = b->in,
                                                 .rows = c->rows,
                                                 .cols = c->cols,
                                                 .hc = c->n});
}

static op_operands hc_post_operands(const op_bench *b, const op_case *c) {
    const double all = (double)c->n * c->cols;
    return (op_operands){c->rows * (2 * all + c->cols) * b->ops.act_bytes,
                         2.0 * c->rows * all * (c->n + 1)};
}

/* ---- rows ---- */

static op_operands rows_operands(const op_bench *b, const op_case *c) {
    return (op_operands){2.0 * c->rows * c->cols * b->ops.act_bytes, 0};
}

static void run_norm(op_bench *b, const op_case *c) {
    b->ops.rms_norm(b->stream, &(hd_rms_norm_args){.out = act(b->out),
                                                   .x = act(b->in),
                                                   .weight = b->in,
                                                   .rows = c->rows,
                                                   .cols = c->cols,
                                                   .eps = 1e-6f});
}

static void run_swiglu(op_bench *b, const op_case *c) {
    b->ops.swiglu(b->stream, &(hd_swiglu_args){.out = act(b->out),
                                               .gate = act(b->in),
                                               .up = act(b->in + CASE_IN / 2),
                                               .rows = c->rows,
                                               .cols = c->cols,
                                               .limit = 10.0f});
}

static op_operands swiglu_operands(const op_bench *b, const op_case *c) {
    return (op_operands){3.0 * c->rows * c->cols * b->ops.act_bytes, 0};
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
                                                         .n_experts = c->n});
}

static op_operands permute_operands(const op_bench *b, const op_case *c) {
    (void)b;
    return (op_operands){12.0 * c->rows * c->top_k, 0};
}

static void run_combine(op_bench *b, const op_case *c) {
    b->ops.moe_combine(b->stream, &(hd_moe_combine_args){.out = act(b->out),
                                                         .y = act(b->in),
                                                         .shared = act(b->in + CASE_IN / 2),
                                                         .weight = b->in,
                                                         .place = b->ints + CASE_INTS,
                                                         .rows = c->rows,
                                                         .cols = c->cols,
                                                         .top_k = c->top_k});
}

static op_operands combine_operands(const op_bench *b, const op_case *c) {
    return (op_operands){(c->top_k + 2.0) * c->rows * c->cols * b->ops.act_bytes, 0};
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

/* ---- the table ---- */

#define LINEAR(name, format, rows, outs, cols) \
    { name, "linear", run_linear, linear_operands, format, rows, outs, cols, 0, 0 }
#define GROUPED(name, format, rows, outs, cols, n, top_k) \
    { name, "grouped_gemm", run_grouped, grouped_operands, format, rows, outs, cols, n, top_k }
#define ATTENTION(name, rows, heads, width, keys, top_k)                                   \
    {                                                                                      \
        name, "attention", run_attention, attention_operands, HD_NONE, rows, heads, width, \
            keys, top_k                                                                    \
    }
#define INDEX(name, rows, keys, top_k) \
    { name, "indexer_topk", run_index, index_operands, HD_NONE, rows, 64, 128, keys, top_k }

const op_case op_cases[] = {
    LINEAR("V3 q_a, kv_a", HD_E4M3, 1, 2112, 7168),
    LINEAR("V3 q_a, kv_a", HD_E4M3, 4, 2112, 7168),
    LINEAR("V3 q_a, kv_a", HD_E4M3, 16, 2112, 7168),
    LINEAR("V3 q_a, kv_a", HD_E4M3, 64, 2112, 7168),
    LINEAR("V3 q_a, kv_a", HD_E4M3, 128, 2112, 7168),
    LINEAR("V3 q_a, kv_a", HD_E4M3, 256, 2112, 7168),
    LINEAR("V3 q_a, kv_a", HD_E4M3, 1024, 2112, 7168),
    LINEAR("V3 q_a, kv_a", HD_E4M3, 4096, 2112, 7168),
    LINEAR("V3 q_b", HD_E4M3, 1, 24576, 1536),
    LINEAR("V3 q_b", HD_E4M3, 4, 24576, 1536),
    LINEAR("V3 q_b", HD_E4M3, 16, 24576, 1536),
    LINEAR("V3 q_b", HD_E4M3, 128, 24576, 1536),
    LINEAR("V3 q_b", HD_E4M3, 256, 24576, 1536),
    LINEAR("V3 q_b", HD_E4M3, 1024, 24576, 1536),
    LINEAR("V3 q_b", HD_E4M3, 4096, 24576, 1536),
    LINEAR("V3 o", HD_E4M3, 1, 7168, 16384),
    LINEAR("V3 o", HD_E4M3, 4, 7168, 16384),
    LINEAR("V3 o", HD_E4M3, 16, 7168, 16384),
    LINEAR("V3 o", HD_E4M3, 64, 7168, 16384),
    LINEAR("V3 o", HD_E4M3, 128, 7168, 16384),
    LINEAR("V3 o", HD_E4M3, 256, 7168, 16384),
    LINEAR("V3 o", HD_E4M3, 1024, 7168, 16384),
    LINEAR("V3 o", HD_E4M3, 4096, 7168, 16384),
    LINEAR("V3 gate", HD_E4M3, 1, 18432, 7168),
    LINEAR("V3 gate", HD_E4M3, 128, 18432, 7168),
    LINEAR("V3 router", HD_BF16, 1, 256, 7168),
    LINEAR("V3 router", HD_BF16, 128, 256, 7168),
    LINEAR("V3 head", HD_BF16, 1, 129280, 7168),
    LINEAR("V3 head", HD_BF16, 64, 129280, 7168),
    LINEAR("V4 q_a", HD_E4M3, 1, 1024, 4096),
    LINEAR("V4 q_a", HD_E4M3, 4, 1024, 4096),
    LINEAR("V4 q_a", HD_E4M3, 64, 1024, 4096),
    LINEAR("V4 q_a", HD_E4M3, 128, 1024, 4096),
    LINEAR("V4 q_b", HD_E4M3, 1, 32768, 1024),
    LINEAR("V4 q_b", HD_E4M3, 4, 32768, 1024),
    LINEAR("V4 q_b", HD_E4M3, 128, 32768, 1024),
    LINEAR("V4 q_b", HD_E4M3, 256, 32768, 1024),
    LINEAR("V4 q_b", HD_E4M3, 1024, 32768, 1024),
    LINEAR("V4 q_b", HD_E4M3, 4096, 32768, 1024),
    LINEAR("V4 q_b, 1 of 4", HD_E4M3, 1, 8192, 1024),
    LINEAR("V4 q_b, 1 of 4", HD_E4M3, 4, 8192, 1024),
    LINEAR("V4 o_b", HD_E4M3, 1, 4096, 8192),
    LINEAR("V4 o_b", HD_E4M3, 4, 4096, 8192),
    LINEAR("V4 o_b", HD_E4M3, 16, 4096, 8192),
    LINEAR("V4 o_b", HD_E4M3, 128, 4096, 8192),
    LINEAR("V4 o_b", HD_E4M3, 256, 4096, 8192),
    LINEAR("V4 o_b", HD_E4M3, 1024, 4096, 8192),
    LINEAR("V4 o_b", HD_E4M3, 4096, 4096, 8192),
    LINEAR("V4 o_b, 1 of 4", HD_E4M3, 1, 4096, 2048),
    LINEAR("V4 o_b, 1 of 4", HD_E4M3, 4, 4096, 2048),
    LINEAR("V4 shared up", HD_E4M3, 1, 2048, 4096),
    LINEAR("V4 shared up", HD_E4M3, 4, 2048, 4096),
    LINEAR("V4 shared up", HD_E4M3, 64, 2048, 4096),
    LINEAR("V4 shared up", HD_E4M3, 128, 2048, 4096),
    LINEAR("V4 compressor", HD_BF16, 1, 2048, 4096),
    LINEAR("V4 compressor", HD_BF16, 4, 2048, 4096),
    LINEAR("V4 compressor", HD_BF16, 128, 2048, 4096),
    LINEAR("V4 compressor", HD_BF16, 256, 2048, 4096),
    LINEAR("V4 compressor", HD_BF16, 1024, 2048, 4096),
    LINEAR("V4 compressor", HD_BF16, 4096, 2048, 4096),
    LINEAR("V4 router", HD_BF16, 1, 256, 4096),
    LINEAR("V4 router", HD_BF16, 4, 256, 4096),
    LINEAR("V4 router", HD_BF16, 128, 256, 4096),
    LINEAR("V4 head", HD_BF16, 1, 129280, 4096),
    LINEAR("V4 head", HD_BF16, 4, 129280, 4096),
    LINEAR("V4 head, 1 of 4", HD_BF16, 1, 32320, 4096),
    LINEAR("V4 head, 1 of 4", HD_BF16, 4, 32320, 4096),
    LINEAR("odd", HD_E4M3, 7, 4096, 7168),
    LINEAR("odd", HD_E4M3, 129, 4096, 7168),
    {"V3 absorb",            "linear_heads", run_heads,   heads_operands,   HD_E4M3, 1,    16384, 512,    128, 1},
    {"V3 absorb",            "linear_heads", run_heads,   heads_operands,   HD_E4M3, 4,    16384, 512,    128, 1},
    {"V3 absorb",            "linear_heads", run_heads,   heads_operands,   HD_E4M3, 128,  16384, 512,    128, 1},
    {"V3 absorb",            "linear_heads", run_heads,   heads_operands,   HD_E4M3, 256,  16384, 512,    128, 1},
    {"V3 value",             "linear_heads", run_heads,   heads_operands,   HD_E4M3, 1,    16384, 512,    128, 0},
    {"V3 value",             "linear_heads", run_heads,   heads_operands,   HD_E4M3, 4,    16384, 512,    128, 0},
    {"V3 value",             "linear_heads", run_heads,   heads_operands,   HD_E4M3, 128,  16384, 512,    128, 0},
    {"V3 value",             "linear_heads", run_heads,   heads_operands,   HD_E4M3, 256,  16384, 512,    128, 0},
    {"V4 o_a",               "linear_heads", run_heads,   heads_operands,   HD_E4M3, 1,    8192,  4096,   8,   0},
    {"V4 o_a",               "linear_heads", run_heads,   heads_operands,   HD_E4M3, 4,    8192,  4096,   8,   0},
    {"V4 o_a",               "linear_heads", run_heads,   heads_operands,   HD_E4M3, 128,  8192,  4096,   8,   0},
    {"V4 o_a",               "linear_heads", run_heads,   heads_operands,   HD_E4M3, 256,  8192,  4096,   8,   0},
    {"V4 o_a",               "linear_heads", run_heads,   heads_operands,   HD_E4M3, 1024, 8192,  4096,   8,   0},
    {"V4 o_a",               "linear_heads", run_heads,   heads_operands,   HD_E4M3, 4096, 8192,  4096,   8,   0},
    GROUPED("V4 experts up", HD_E2M1, 1, 2048, 4096, 256, 6),
    GROUPED("V4 experts up", HD_E2M1, 4, 2048, 4096, 256, 6),
    GROUPED("V4 experts up", HD_E2M1, 16, 2048, 4096, 256, 6),
    GROUPED("V4 experts up", HD_E2M1, 128, 2048, 4096, 256, 6),
    GROUPED("V4 experts down", HD_E2M1, 1, 4096, 2048, 256, 6),
    GROUPED("V4 experts down", HD_E2M1, 4, 4096, 2048, 256, 6),
    GROUPED("V4 experts down", HD_E2M1, 128, 4096, 2048, 256, 6),
    GROUPED("V4 experts up, 1 of 4", HD_E2M1, 1, 512, 4096, 256, 6),
    GROUPED("V4 experts up, 1 of 4", HD_E2M1, 4, 512, 4096, 256, 6),
    GROUPED("V4 experts, EP4", HD_E2M1, 128, 2048, 4096, 64, 6),
    GROUPED("V3 experts up", HD_E4M3, 1, 2048, 7168, 64, 8),
    GROUPED("V3 experts up", HD_E4M3, 4, 2048, 7168, 64, 8),
    GROUPED("V3 experts up", HD_E4M3, 64, 2048, 7168, 64, 8),
    GROUPED("V3 experts, EP72", HD_E4M3, 256, 2048, 7168, 4, 8),
    ATTENTION("V3 all keys", 1, 128, 576, 4096, 0),
    ATTENTION("V3 all keys", 4, 128, 576, 4096, 0),
    ATTENTION("V3 all keys", 1, 128, 576, 8192, 0),
    ATTENTION("V3 all keys", 256, 128, 576, 8192, 0),
    ATTENTION("V3 all keys", 128, 128, 576, 2048, 0),
    ATTENTION("V3 all keys, 1 of 8", 1, 16, 576, 4096, 0),
    ATTENTION("V3.2 selected", 1, 128, 576, 32768, 2048),
    ATTENTION("V3.2 selected", 4, 128, 576, 32768, 2048),
    ATTENTION("V3.2 selected", 128, 128, 576, 32768, 2048),
    ATTENTION("V4 window, selected", 1, 64, 512, 32768, 512),
    ATTENTION("V4 window, selected", 4, 64, 512, 32768, 512),
    ATTENTION("V4 window, selected", 16, 64, 512, 32768, 512),
    ATTENTION("V4 window, selected", 128, 64, 512, 32768, 512),
    ATTENTION("V4 window, selected, 1 of 4", 1, 16, 512, 32768, 512),
    ATTENTION("V4 window, selected, 1 of 4", 4, 16, 512, 32768, 512),
    ATTENTION("V4 window, entries", 1, 64, 512, 28160, 0),
    INDEX("indexer", 1, 2048, 512),
    INDEX("indexer", 1, 7500, 512),
    INDEX("indexer", 4, 7500, 512),
    INDEX("indexer", 1, 65536, 2048),
    INDEX("indexer", 1, 225000, 512),
    INDEX("indexer", 4, 225000, 512),
    INDEX("indexer", 128, 2048, 512),
    INDEX("indexer", 128, 7500, 512),
    {"V4 hc_pre",            "hc_pre",       run_hc_pre,  hc_pre_operands,  HD_NONE, 1,    0,     4096,   4,   0},
    {"V4 hc_pre",            "hc_pre",       run_hc_pre,  hc_pre_operands,  HD_NONE, 4,    0,     4096,   4,   0},
    {"V4 hc_pre",            "hc_pre",       run_hc_pre,  hc_pre_operands,  HD_NONE, 128,  0,     4096,   4,   0},
    {"V4 hc_pre",            "hc_pre",       run_hc_pre,  hc_pre_operands,  HD_NONE, 4096, 0,     4096,   4,   0},
    {"V4 hc_post",           "hc_post",      run_hc_post, hc_post_operands, HD_NONE, 1,    0,     4096,   4,   0},
    {"V4 hc_post",           "hc_post",      run_hc_post, hc_post_operands, HD_NONE, 128,  0,     4096,   4,   0},
    {"V4 hc_post",           "hc_post",      run_hc_post, hc_post_operands, HD_NONE, 4096, 0,     4096,   4,   0},
    {"V3 rms_norm",          "rms_norm",     run_norm,    rows_operands,    HD_NONE, 1,    0,     7168,   0,   0},
    {"V3 rms_norm",          "rms_norm",     run_norm,    rows_operands,    HD_NONE, 128,  0,     7168,   0,   0},
    {"V3 rms_norm",          "rms_norm",     run_norm,    rows_operands,    HD_NONE, 4096, 0,     7168,   0,   0},
    {"V4 swiglu",            "swiglu",       run_swiglu,  swiglu_operands,  HD_NONE, 8,    0,     2048,   0,   0},
    {"V4 swiglu",            "swiglu",       run_swiglu,  swiglu_operands,  HD_NONE, 1024, 0,     2048,   0,   0},
    {"V3 expert top-k",      "moe_topk",     run_route,   route_operands,   HD_NONE, 1,    0,     256,    8,   8},
    {"V3 expert top-k",      "moe_topk",     run_route,   route_operands,   HD_NONE, 128,  0,     256,    8,   8},
    {"V4 expert top-k",      "moe_topk",     run_route,   route_operands,   HD_NONE, 1,    0,     256,    0,   6},
    {"V4 expert top-k",      "moe_topk",     run_route,   route_operands,   HD_NONE, 128,  0,     256,    0,   6},
    {"V4 permute",           "moe_permute",  run_permute, permute_operands, HD_NONE, 1,    0,     0,      256, 6},
    {"V4 permute",           "moe_permute",  run_permute, permute_operands, HD_NONE, 128,  0,     0,      256, 6},
    {"V4 permute",           "moe_permute",  run_permute, permute_operands, HD_NONE, 4096, 0,     0,      256, 6},
    {"V4 combine",           "moe_combine",  run_combine, combine_operands, HD_NONE, 1,    0,     4096,   0,   6},
    {"V4 combine",           "moe_combine",  run_combine, combine_operands, HD_NONE, 128,  0,     4096,   0,   6},
    {"V4 combine",           "moe_combine",  run_combine, combine_operands, HD_NONE, 1024, 0,     4096,   0,   6},
    {"argmax",               "argmax",       run_argmax,  logits_operands,  HD_NONE, 1,    0,     129280, 0,   0},
    {"argmax",               "argmax",       run_argmax,  logits_operands,  HD_NONE, 64,   0,     129280, 0,   0},
    {"sample, top-k, top-p", "sample",       run_sample,  logits_operands,  HD_NONE, 1,    0,     129280, 0,
                                       0                                                                                                          },
    {"sample, top-k, top-p", "sample",       run_sample,  logits_operands,  HD_NONE, 64,   0,     129280, 0,
                                       0                                                                                                          },
};
const int32_t n_op_cases = HD_LEN(op_cases);

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

void op_case_prepare(op_bench *b, const op_case *c) {
    static const hd_sampling nucleus = {.temperature = 1.0f, .top_p = 0.95f, .top_k = 50};
    upload_ints(b, c);
    if (c->run == run_grouped) run_permute(b, c);
    if (c->run == run_sample) {
        hd_stream_upload(b->stream, scratch_ints(b), &nucleus, sizeof nucleus);
    }
}
