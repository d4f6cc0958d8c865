/* attention_sm90_internal.cuh - attention from bfloat16 at the real models' widths, on sm_90a; and what
 * its kernels share: softmax of scores in the registers of a product of a warpgroup, where four lanes
 * have a row. Scores are taken times log2(e). */
#ifndef HD_OPS_CUDA_ATTENTION_SM90_INTERNAL_CUH
#define HD_OPS_CUDA_ATTENTION_SM90_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"

/* Whether attention_sm90() has these widths, on Hopper's path; the same for any number of rows. */
bool attention_fits_sm90(const hd_attention_args *a);
void attention_sm90(hd_stream *s, const hd_attention_args *a);

/* The most keys that a row can have: the host does not know positions. */
static inline int64_t most_keys(const hd_attention_args *a) {
    if (a->selected) return (int64_t)a->window + a->n_selected;
    if (!a->ratio) return a->window;
    return a->window + (int64_t)a->entries.table_stride * a->entries.page_entries;
}

constexpr float LOG2_E = 1.44269504f;

static __device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float over_quad(float x, bool is_max) {
    for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, x, step);
        x = is_max ? fmaxf(x, other) : x + other;
    }
    return x;
}

#endif
