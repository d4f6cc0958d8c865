/* official_internal.cuh - --precision official: rows of x in E4M3, and the products that take them.
 *
 * A row's columns are quantised 128 at a time, each with a scale of its own. A product sums a block of 128
 * columns on the tensor cores, times both scales, and adds the blocks in order in float32: so an output has
 * the same bits whatever the tiles. */
#ifndef HD_OPS_CUDA_OFFICIAL_INTERNAL_CUH
#define HD_OPS_CUDA_OFFICIAL_INTERNAL_CUH

#include "ops/cuda/weight_internal.cuh"

constexpr int QUANTISED = 128; /* columns that share a scale */

/* Rows of x in E4M3, in the scratch. For FP4 matrices the even columns of every 32 come before the odd ones. */
struct quantised {
    uint8_t *x;   /* [rows, cols] */
    float *scale; /* [cols / 128, pitch] */
    int32_t rows;
    int32_t pitch; /* a multiple of 4 */
};

/* One matrix, or one in each expert slot, and where its outputs go. */
struct fp8_product {
    quantised x;
    const hd_weight *w; /* the matrix, or the shape of the slots' */
    float *out;
    int64_t out_stride;
    const int32_t *offset;        /* [n_experts + 1] rows of each slot; NULL: one matrix */
    int32_t n_experts, from;      /* x and out begin at row `from` of those */
    const hd_expert_table *table; /* of the slots, or NULL */
};

/* Whether the FP8 kernels take such a matrix, or such slots, whatever x is. */
bool fp8_fits(const hd_weight *w, const hd_expert_table *table);

/* The same of slots with FP4 matrices and a power of two per 32 columns. */
bool fp4_fits(const hd_expert_table *table);
void launch_grouped_fp4(hd_stream *s, const fp8_product &p);

/* Queues the product; the kernel before it on the stream is the one that quantised x. */
void launch_fp8(hd_stream *s, const fp8_product &p);

#endif
