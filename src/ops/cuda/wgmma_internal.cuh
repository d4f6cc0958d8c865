/* wgmma_internal.cuh - BF16 GEMM instructions of a warpgroup, and the tiles they read. For sm_90a
 * alone; barriers, fences and FP8 are in sm90_internal.cuh.
 *
 * Tiles in shared memory are rows of 128 bytes, 64 columns, in groups of eight rows that begin at
 * multiples of 1024 bytes; 16 bytes of a row are exchanged by the row's number, modulo 8. */
#ifndef HD_OPS_CUDA_WGMMA_INTERNAL_CUH
#define HD_OPS_CUDA_WGMMA_INTERNAL_CUH

#include <cuda_bf16.h>
#include <stdint.h>

#include "ops/cuda/wgmma_sm90_internal.cuh"

constexpr int WARPGROUP = 128;                     /* threads */
constexpr int BOX_ROWS = 64, BOX_BYTES = 64 * 128; /* a tile of 64 rows and 64 columns */
constexpr int BOX_COLS = 64;

/* Where 16 bytes lie in a box: columns 8 * chunk and on of a row. */
static __device__ __forceinline__ uint32_t box_at(int row, int chunk) {
    return (uint32_t)(row * 128 + ((chunk ^ (row & 7)) << 4));
}

/* ---- from float32 in memory ---- */

/* Of what is read once; where it stands, so that it does not wait for products behind it. */
static __device__ __forceinline__ float4 load_four(const float4 *p) {
    float4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(p));
    return x;
}

static __device__ __forceinline__ uint32_t bf16_pair(float a, float b) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

/* Four numbers of a row as bfloat16 in shared memory. */
static __device__ __forceinline__ void put_four(uint32_t at, float4 x) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(bf16_pair(x.x, x.y)),
                 "r"(bf16_pair(x.z, x.w))
                 : "memory");
}

/* ---- products ----
 *
 * d [64, N]: register i of lane l in warp w is row 16 w + l / 4 + 8 (i / 2 % 2), column
 * 8 (i / 4) + 2 (l % 4) + i % 2. a in registers [64, 16], two columns each: 0 has row l / 4, columns
 * 2 (l % 4) and the next; 1 the row eight further; 2 and 3 the columns eight further. */

/* A box whose columns are the inner dimension; 16 of them further it is 2 more. */
static __device__ __forceinline__ uint64_t box_descriptor(uint32_t at) {
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* Boxes side by side, box_bytes apart, whose rows are the inner dimension; 16 of them further it is
 * 128 more. */
static __device__ __forceinline__ uint64_t transposed_descriptor(uint32_t at,
                                                                 uint32_t box_bytes) {
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)(box_bytes >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* From a descriptor to that of the next box. */
constexpr uint64_t NEXT_BOX = BOX_BYTES >> 4;

/* add 0: d = a b. */
static __device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], uint64_t a, uint64_t b,
                                                       int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" ACCS_32
                 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                 : OUTS_32(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

static __device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], const uint32_t *a,
                                                       uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" ACCS_32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : OUTS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

static __device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], uint64_t a, uint64_t b,
                                                        int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" ACCS_64
                 "}, %64, %65, p, 1, 1, 0, 0;\n}"
                 : OUTS_64(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

static __device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], const uint32_t *a,
                                                        uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" ACCS_64
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
                 : OUTS_64(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

static __device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b,
                                                        int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" ACCS_128
                 "}, %128, %129, p, 1, 1, 0, 0;\n}"
                 : OUTS_128(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

/* b is transposed: its rows are the inner dimension. */
static __device__ __forceinline__ void wgmma_m64n128k16_transposed(float (&d)[64],
                                                                   const uint32_t *a,
                                                                   uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" ACCS_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : OUTS_64(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void wgmma_m64n256k16_transposed(float (&d)[128], uint64_t a,
                                                                   uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" ACCS_128
                 "}, %128, %129, 1, 1, 1, 0, 1;"
                 : OUTS_128(d, 0)
                 : "l"(a), "l"(b));
}

static __device__ __forceinline__ void wgmma_m64n256k16_transposed(float (&d)[128],
                                                                   const uint32_t *a,
                                                                   uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" ACCS_128
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : OUTS_128(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#endif
