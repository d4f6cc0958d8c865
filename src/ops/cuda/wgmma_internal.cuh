/* wgmma_internal.cuh - products of bfloat16 by a warpgroup, and what goes with them: barriers in shared
 * memory, fences, registers moved between warpgroups. One function per instruction, named as in PTX;
 * for sm_90a alone.
 *
 * Tiles in shared memory are rows of 128 bytes, 64 columns, in groups of eight rows that begin at
 * multiples of 1024 bytes; 16 bytes of a row are exchanged by the row's number, modulo 8. */
#ifndef HD_OPS_CUDA_WGMMA_INTERNAL_CUH
#define HD_OPS_CUDA_WGMMA_INTERNAL_CUH

#include <cuda_bf16.h>
#include <stdint.h>

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

/* ---- barriers in shared memory, by their address ---- */

static __device__ __forceinline__ void mbarrier_init(uint32_t b, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(arrivals) : "memory");
}

static __device__ __forceinline__ void mbarrier_arrive(uint32_t b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}

static __device__ __forceinline__ void mbarrier_wait(uint32_t b, uint32_t parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(b),
                 "r"(parity)
                 : "memory");
}

/* Named barriers: all of `threads` arrive, and those that sync wait for them. */
static __device__ __forceinline__ void bar_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

static __device__ __forceinline__ void bar_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/* Behind ordinary stores to shared memory that products read. */
static __device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int N>
static __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
static __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- products ----
 *
 * d [64, N]: register i of lane l in warp w is row 16 w + l / 4 + 8 (i / 2 % 2), column
 * 8 (i / 4) + 2 (l % 4) + i % 2. a in registers [64, 16], two columns each: 0 has row l / 4, columns
 * 2 (l % 4) and the next; 1 the row eight further; 2 and 3 the columns eight further. */

static __device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N>
static __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* A box whose columns are the inner dimension; 16 of them further it is 2 more. */
static __device__ __forceinline__ uint64_t box_descriptor(uint32_t at) {
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* Boxes side by side whose rows are the inner dimension; 16 of them further it is 128 more. */
static __device__ __forceinline__ uint64_t transposed_descriptor(uint32_t at) {
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)(BOX_BYTES >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* From a descriptor to that of the next box. */
constexpr uint64_t NEXT_BOX = BOX_BYTES >> 4;

#define FLOATS_8(d, i)                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
        "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLOATS_32(d, i) \
    FLOATS_8(d, i), FLOATS_8(d, i + 8), FLOATS_8(d, i + 16), FLOATS_8(d, i + 24)
#define FLOATS_128(d) FLOATS_32(d, 0), FLOATS_32(d, 32), FLOATS_32(d, 64), FLOATS_32(d, 96)
#define NAMES_32                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_128                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "       \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "       \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "       \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "       \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "       \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
    "%111, "                                                                                 \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "   \
    "%126, %127"

/* add 0: d = a b. */
static __device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], uint64_t a, uint64_t b,
                                                       int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32
                 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                 : FLOATS_32(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

static __device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], const uint32_t *a,
                                                       uint64_t b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : FLOATS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* b is turned: its rows are the inner dimension. */
static __device__ __forceinline__ void wgmma_m64n256k16_transposed(float (&d)[128], uint64_t a,
                                                                   uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_128
                 "}, %128, %129, 1, 1, 1, 0, 1;"
                 : FLOATS_128(d)
                 : "l"(a), "l"(b));
}

static __device__ __forceinline__ void wgmma_m64n256k16_transposed(float (&d)[128],
                                                                   const uint32_t *a,
                                                                   uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES_128
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : FLOATS_128(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#endif
