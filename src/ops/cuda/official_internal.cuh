/* official_internal.cuh - --precision official: rows of x in E4M3, and the products that take them.
 *
 * A row's columns are quantised 128 at a time, each with a scale of its own, or 32 at a time (V4.1). A
 * product sums a block of 128 columns on the tensor cores, or of 32, times both scales, and adds the blocks
 * in order in float32: so an output has the same bits whatever the tiles. */
#ifndef HD_OPS_CUDA_OFFICIAL_INTERNAL_CUH
#define HD_OPS_CUDA_OFFICIAL_INTERNAL_CUH

#include "ops/cuda/weight_internal.cuh"

constexpr int QUANTISED = 128; /* columns of a span, which share a scale or have four */

/* Rows of x in E4M3, in the scratch. For FP4 matrices the even columns of every 32 come before the odd ones. */
struct quantised {
    uint8_t *x;   /* [rows, cols] */
    float *scale; /* [cols / group, pitch] */
    int32_t rows, group;
    int32_t pitch; /* a multiple of 4 */
};

/* swiglu of two products, as hd_swiglu_args has it. */
struct fp8_swiglu {
    bool on;
    float limit;
    const float *weight; /* of places, or of assignments; NULL: ones */
    const int32_t *assignment;
};

/* One matrix, or one in each expert slot, and where its outputs go; or two of them. */
struct fp8_product {
    quantised x;
    const hd_weight *w; /* the matrix, or the shape of the slots' */
    float *out;
    int64_t out_stride;
    const int32_t *offset;        /* [n_experts + 1] rows of each slot; NULL: one matrix */
    int32_t n_experts, from;      /* x and out begin at row `from` of those */
    const hd_expert_table *table; /* of the slots, or NULL */
    /* The second matrix, or NULL: with outputs of its own, or with swiglu, of the same shape. */
    const hd_weight *other;
    float *other_out;
    int64_t other_stride;
    const hd_expert_table *other_table;
    fp8_swiglu swiglu;
};

/* Whether the FP8 kernels of Hopper take such a matrix, or such slots, whatever x is. */
bool fp8_fits(const hd_weight *w, const hd_expert_table *table);

/* The same of slots with FP4 matrices and a power of two per 32 columns. */
bool fp4_fits(const hd_expert_table *table);
void launch_grouped_fp4(hd_stream *s, const fp8_product &p);

/* Queues the product. */
void launch_fp8(hd_stream *s, const fp8_product &p);

/* Whether there are kernels for two matrices at once, for so many rows of x, or places. */
bool fp8_takes_two(hd_stream *s, const fp8_product &p);
bool fp4_takes_two(const fp8_product &p);

#endif
