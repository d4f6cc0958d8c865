/* op_shapes.c - the table of operator shapes in V2-Lite, V3, V3.2 and V4-Flash. */
#include "cli/bench/op_shapes.h"

#include "base/status.h"

#define LIST(...) \
    { __VA_ARGS__ }

/* A stored matrix: the rows of one role, or of two. */
#define MATRIX(shape, file, operator, form, o, c, count, k, divided, role, ...)                \
    {                                                                                          \
        .name = shape, .config = file, .op = #operator, .format = HD_FORMAT_##form, .outs = o, \
        .cols = c, .n = count, .top_k = k, .parts = divided, .roles = {HD_##role},             \
        .n_roles = 1, .rows = LIST(__VA_ARGS__)                                                \
    }
#define MATRICES(shape, file, operator, form, o, c, role, other, ...)                          \
    {                                                                                          \
        .name = shape, .config = file, .op = #operator, .format = HD_FORMAT_##form, .outs = o, \
        .cols = c, .roles = {HD_##role, HD_##other}, .n_roles = 2, .rows = LIST(__VA_ARGS__)   \
    }
#define OTHER(shape, file, operator, o, c, count, k, divided, ...)                        \
    {                                                                                     \
        .name = shape, .config = file, .op = #operator, .outs = o, .cols = c, .n = count, \
        .top_k = k, .parts = divided, .rows = LIST(__VA_ARGS__)                           \
    }

/* clang-format off */
const op_shape op_shapes[] = {
    MATRIX("V2-Lite q", "v2_lite", linear, BF16, 3072, 2048, 0, 0, 0, Q, 1, 16, 512),
    MATRIX("V2-Lite kv_a", "v2_lite", linear, BF16, 576, 2048, 0, 0, 0, KV_A, 1, 16, 512),
    MATRIX("V2-Lite o", "v2_lite", linear, BF16, 2048, 2048, 0, 0, 0, O, 1, 16, 512),
    MATRIX("V2-Lite gate", "v2_lite", linear, BF16, 10944, 2048, 0, 0, 0, DENSE_GATE, 1, 16, 512),
    MATRIX("V2-Lite head", "v2_lite", linear, BF16, 102400, 2048, 0, 0, 0, HEAD, 1, 16),
    MATRICES("V3 q_a, kv_a", "v3", linear, FP8, 2112, 7168, Q_A, KV_A, 1, 4, 16, 64, 128, 256, 1024, 4096),
    MATRIX("V3 q_b", "v3", linear, FP8, 24576, 1536, 0, 0, 0, Q_B, 1, 4, 16, 128, 256, 1024, 4096),
    MATRIX("V3 o", "v3", linear, FP8, 7168, 16384, 0, 0, 0, O, 1, 4, 16, 64, 128, 256, 1024, 4096),
    MATRIX("V3 gate", "v3", linear, FP8, 18432, 7168, 0, 0, 0, DENSE_GATE, 1, 128),
    MATRIX("V3 router", "v3", linear, BF16, 256, 7168, 0, 0, 0, ROUTER, 1, 128),
    MATRIX("V3 head", "v3", linear, BF16, 129280, 7168, 0, 0, 0, HEAD, 1, 64),
    MATRIX("V4 q_a", "v4_flash", linear, FP8, 1024, 4096, 0, 0, 0, Q_A, 1, 4, 64, 128),
    MATRIX("V4 q_b", "v4_flash", linear, FP8, 32768, 1024, 0, 0, 0, Q_B, 1, 4, 128, 256, 1024, 4096),
    MATRIX("V4 q_b, 1 of 4", "v4_flash", linear, FP8, 8192, 1024, 0, 0, 4, Q_B, 1, 4),
    MATRIX("V4 o_b", "v4_flash", linear, FP8, 4096, 8192, 0, 0, 0, O_B, 1, 4, 16, 128, 256, 1024, 4096),
    MATRIX("V4 o_b, 1 of 4", "v4_flash", linear, FP8, 4096, 2048, 0, 0, 4, O_B, 1, 4),
    MATRIX("V4 shared up", "v4_flash", linear, FP8, 2048, 4096, 0, 0, 0, SHARED_UP, 1, 4, 64, 128),
    MATRIX("V4 shared gate and up", "v4_flash", linear_swiglu, FP8, 2048, 4096, 0, 0, 0, SHARED_GATE, 4, 64),
    MATRIX("V4 shared, 1 of 4", "v4_flash", linear_swiglu, FP8, 512, 4096, 0, 0, 4, SHARED_GATE, 4),
    MATRICES("V4 compressor", "v4_flash", linear, BF16, 2048, 4096, COMP_KV, COMP_GATE, 1, 4, 128, 256, 1024, 4096),
    MATRIX("V4 router", "v4_flash", linear, BF16, 256, 4096, 0, 0, 0, ROUTER, 1, 4, 128),
    MATRIX("V4 head", "v4_flash", linear, BF16, 129280, 4096, 0, 0, 0, HEAD, 1, 4),
    MATRIX("V4 head, 1 of 4", "v4_flash", linear, BF16, 32320, 4096, 0, 0, 4, HEAD, 1, 4),
    {.name = "odd", .op = "linear", .format = HD_FORMAT_FP8, .outs = 4096, .cols = 7168, .rows = LIST(7, 129)},
    MATRIX("V3 absorb", "v3", linear_heads, FP8, 16384, 512, 128, 1, 2, KV_B, 1, 4, 128, 256),
    MATRIX("V3 value", "v3", linear_heads, FP8, 16384, 512, 128, 0, 2, KV_B, 1, 4, 128, 256),
    MATRIX("V4 o_a", "v4_flash", linear_heads, FP8, 8192, 4096, 8, 0, 0, O_A, 1, 4, 128, 256, 1024, 4096),
    MATRIX("V2-Lite experts up", "v2_lite", grouped_gemm, BF16, 1408, 2048, 64, 6, 0, EXPERT_UP, 1, 16),
    MATRIX("V2-Lite experts down", "v2_lite", grouped_gemm, BF16, 2048, 1408, 64, 6, 0, EXPERT_DOWN, 1, 16),
    MATRIX("V4 experts up", "v4_flash", grouped_gemm, FP4, 2048, 4096, 256, 6, 0, EXPERT_UP, 1, 4, 16, 128),
    MATRIX("V4 experts down", "v4_flash", grouped_gemm, FP4, 4096, 2048, 256, 6, 0, EXPERT_DOWN, 1, 4, 128),
    MATRIX("V4 experts up, 1 of 4", "v4_flash", grouped_gemm, FP4, 512, 4096, 256, 6, 4, EXPERT_UP, 1, 4),
    MATRIX("V4 experts, EP4", "v4_flash", grouped_gemm, FP4, 2048, 4096, 64, 6, 0, EXPERT_UP, 128, 8192),
    MATRIX("V4 gate and up", "v4_flash", grouped_swiglu, FP4, 2048, 4096, 256, 6, 0, EXPERT_GATE, 4, 128),
    MATRIX("V4 gate and up, 1 of 4", "v4_flash", grouped_swiglu, FP4, 512, 4096, 256, 6, 4, EXPERT_GATE, 4),
    MATRIX("V3 experts up", "v3", grouped_gemm, FP8, 2048, 7168, 64, 8, 0, EXPERT_UP, 1, 4, 64, 6144),
    MATRIX("V3 experts, EP72", "v3", grouped_gemm, FP8, 2048, 7168, 4, 8, 0, EXPERT_UP, 256),
    OTHER("V2-Lite all keys", "v2_lite", attention, 16, 576, 4096, 0, 0, 1, 16),
    OTHER("V3 all keys", "v3", attention, 128, 576, 4096, 0, 0, 1, 4),
    OTHER("V3 all keys", "v3", attention, 128, 576, 8192, 0, 0, 1, 256),
    OTHER("V3 all keys", "v3", attention, 128, 576, 2048, 0, 0, 128),
    OTHER("V3 all keys, 1 of 8", "v3", attention, 16, 576, 4096, 0, 8, 1),
    MATRIX("V3 prompt", "v3", attention_naive, FP8, 32768, 512, 128, 0, 0, KV_B, 512, 4096),
    MATRIX("V3 prompt, 1 of 4", "v3", attention_naive, FP8, 8192, 512, 32, 0, 4, KV_B, 4096),
    OTHER("V3.2 selected", "v3_2_exp", attention, 128, 576, 32768, 2048, 0, 1, 4, 128),
    OTHER("V4 window, selected", "v4_flash", attention, 64, 512, 32768, 512, 0, 1, 4, 16, 128, 512),
    OTHER("V4 window, selected, 1 of 4", "v4_flash", attention, 16, 512, 32768, 512, 4, 1, 4),
    OTHER("V4 window, entries", "v4_flash", attention, 64, 512, 28160, 0, 0, 1),
    OTHER("V4 indexer", "v4_flash", indexer_topk, 64, 128, 2048, 512, 0, 1, 128),
    OTHER("V4 indexer", "v4_flash", indexer_topk, 64, 128, 7500, 512, 0, 1, 4, 128),
    OTHER("V3.2 indexer", "v3_2_exp", indexer_topk, 64, 128, 65536, 2048, 0, 1),
    OTHER("V4 indexer", "v4_flash", indexer_topk, 64, 128, 225000, 512, 0, 1, 4),
    {.name = "one head", .op = "indexer_topk", .outs = 1, .cols = 16, .n = 262144, .top_k = 512, .rows = LIST(1, 4)},
    OTHER("V4 compressor of 4", "v4_flash", compress, 0, 512, 4, 0, 0, 1, 4096),
    OTHER("V4 compressor of 128", "v4_flash", compress, 0, 512, 128, 0, 0, 1, 4096),
    OTHER("V4 entries that are there", "v4_flash", resident, 0, 512, 0, 512, 0, 1, 64),
    OTHER("V4 entries, 10 % missing", "v4_flash", resident, 10, 512, 0, 512, 0, 1, 64),
    OTHER("V4 hc_pre", "v4_flash", hc_pre, 0, 4096, 4, 0, 0, 1, 4, 128, 4096),
    OTHER("V4 hc_post", "v4_flash", hc_post, 0, 4096, 4, 0, 0, 1, 128, 4096),
    OTHER("V4 hc_next", "v4_flash", hc_next, 0, 4096, 4, 0, 0, 1, 4, 64, 4096),
    OTHER("V3 add_norm", "v3", add_norm, 0, 7168, 0, 0, 0, 4, 4096),
    OTHER("V3 rms_norm", "v3", rms_norm, 0, 7168, 0, 0, 0, 1, 128, 4096),
    OTHER("V4 swiglu", "v4_flash", swiglu, 0, 2048, 0, 0, 0, 8, 1024),
    OTHER("V3 route", "v3", moe_topk, 0, 256, 8, 8, 0, 1, 128),
    OTHER("V4 route", "v4_flash", moe_topk, 0, 256, 0, 6, 0, 1, 128),
    OTHER("V4 permute", "v4_flash", moe_permute, 0, 0, 256, 6, 0, 1, 128, 4096),
    OTHER("V3 split, 32 ranks", "v3", moe_split, 32, 32, 256, 8, 0, 8, 128, 1024),
    OTHER("V3 split, 72 ranks", "v3", moe_split, 32, 72, 256, 8, 0, 128),
    OTHER("V4 combine", "v4_flash", moe_combine, 0, 4096, 0, 6, 0, 1, 128, 1024),
    OTHER("argmax", "v3", argmax, 0, 129280, 0, 0, 0, 1, 64),
    OTHER("sample, top-k, top-p", "v3", sample, 0, 129280, 0, 0, 0, 1, 64),
};
/* clang-format on */
const int32_t n_op_shapes = HD_LEN(op_shapes);
