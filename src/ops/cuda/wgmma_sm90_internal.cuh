/* wgmma_sm90_internal.cuh - Hopper's GEMM of a warpgroup, one function per instruction, named as
 * in PTX. */
#ifndef HD_OPS_CUDA_WGMMA_SM90_INTERNAL_CUH
#define HD_OPS_CUDA_WGMMA_SM90_INTERNAL_CUH

#include "ops/cuda/sm90_internal.cuh"

/* ---- GEMM of a warpgroup: d [64, N] += a [64, 32] b [N, 32] transposed, of E4M3 ----
 *
 * d: register i of lane l in warp w is row 16 w + l / 4 + 8 (i / 2 % 2), column
 * 8 (i / 4) + 2 (l % 4) + i % 2. a in registers: 0 has row l / 4, columns 4 (l % 4) and three on; 1
 * the row eight further; 2 and 3 the columns sixteen further. */

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

/* A tile of swizzled rows of 128 bytes, by its address in shared memory, which is the same in all lanes. */
struct wgmma_tile {
    uint32_t at;

    static __device__ __forceinline__ wgmma_tile of(uint32_t address) {
        return {(address >> 4 & 0x3fff) | 1u << 16};
    }

    /* bytes: whole groups of eight rows, and a multiple of 32 along a row. */
    __device__ __forceinline__ uint64_t descriptor(int bytes) const {
        constexpr uint32_t GROUP_STEP = 1024 >> 4, SWIZZLE_128B = 1u << 30;
        uint64_t d;
        asm("mov.b64 %0, {%1, %2};"
            : "=l"(d)
            : "r"(at + (uint32_t)(bytes >> 4)), "r"(GROUP_STEP | SWIZZLE_128B));
        return d;
    }
};

template <int N>
struct wgmma_e4m3;

#define ACCS_4 "%0, %1, %2, %3"
#define ACCS_8  \
    ACCS_4 ", " \
           "%4, %5, %6, %7"
#define ACCS_16 \
    ACCS_8 ", " \
           "%8, %9, %10, %11, %12, %13, %14, %15"
#define ACCS_32  \
    ACCS_16 ", " \
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ACCS_64                                                                      \
    ACCS_32 ", "                                                                     \
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
            "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
            "%60, %61, %62, %63"
#define ACCS_96                                                                      \
    ACCS_64 ", "                                                                     \
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, " \
            "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, " \
            "%92, %93, %94, %95"

#define ACCS_128                                                                               \
    ACCS_96 ", "                                                                               \
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
            "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "   \
            "%123, %124, %125, %126, %127"

#define OUTS_4(d, i)   "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUTS_8(d, i)   OUTS_4(d, i), OUTS_4(d, i + 4)
#define OUTS_16(d, i)  OUTS_8(d, i), OUTS_8(d, i + 8)
#define OUTS_32(d, i)  OUTS_16(d, i), OUTS_16(d, i + 16)
#define OUTS_64(d, i)  OUTS_32(d, i), OUTS_32(d, i + 32)
#define OUTS_96(d, i)  OUTS_64(d, i), OUTS_32(d, i + 64)
#define OUTS_128(d, i) OUTS_64(d, i), OUTS_64(d, i + 64)

/* M: N / 2, and M + 1 .. M + 5 as numbers; `add` 0: d = a b. */
#define WGMMA_E4M3(N, M, M1, M2, M3, M4, M5)                                                   \
    template <>                                                                                \
    struct wgmma_e4m3<N> {                                                                     \
        static __device__ __forceinline__ void tiles(float (&d)[M], uint64_t a, uint64_t b,    \
                                                     int add) {                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #M2 ", 0;\n"                     \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" ACCS_##M \
                         "}, %" #M ", %" #M1 ", p, 1, 1;\n}"                                   \
                         : OUTS_##M(d, 0)                                                      \
                         : "l"(a), "l"(b), "r"(add));                                          \
        }                                                                                      \
        static __device__ __forceinline__ void registers(float (&d)[M], const uint32_t *a,     \
                                                         uint64_t b, int add) {                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #M5 ", 0;\n"                     \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" ACCS_##M \
                         "}, {%" #M ", %" #M1 ", %" #M2 ", %" #M3 "}, %" #M4 ", p, 1, 1;\n}"   \
                         : OUTS_##M(d, 0)                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));      \
        }                                                                                      \
    }

WGMMA_E4M3(8, 4, 5, 6, 7, 8, 9);
WGMMA_E4M3(16, 8, 9, 10, 11, 12, 13);
WGMMA_E4M3(32, 16, 17, 18, 19, 20, 21);
WGMMA_E4M3(64, 32, 33, 34, 35, 36, 37);
WGMMA_E4M3(128, 64, 65, 66, 67, 68, 69);
WGMMA_E4M3(192, 96, 97, 98, 99, 100, 101);

#endif
