/* sm90_internal.cuh - Hopper's own instructions, one function each, named as in PTX: barriers in shared
 * memory, bulk copies of tensors, products of a warpgroup, dependent launches. For sm_90a alone.
 *
 * Tiles in shared memory are rows of 128 bytes, swizzled as bulk copies write them, in groups of eight
 * rows that begin at multiples of 1024 bytes. */
#ifndef HD_OPS_CUDA_SM90_INTERNAL_CUH
#define HD_OPS_CUDA_SM90_INTERNAL_CUH

#include <cuda.h> /* types of tensor maps; nothing of it is linked */
#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- barriers in shared memory, by their address ---- */

static __device__ __forceinline__ void mbarrier_init(uint32_t b, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(arrivals) : "memory");
}

static __device__ __forceinline__ void mbarrier_init(uint64_t *b, uint32_t arrivals) {
    mbarrier_init(shared_address(b), arrivals);
}

static __device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void mbarrier_arrive(uint32_t b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}

static __device__ __forceinline__ void mbarrier_arrive(uint64_t *b) {
    mbarrier_arrive(shared_address(b));
}

/* Arrives on the barrier at the same place in another block of the cluster. It orders no writes
 * there: for blocks that have only read. */
static __device__ __forceinline__ void mbarrier_arrive_at(uint64_t *b, uint32_t block) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(shared_address(b)),
                 "r"(block)
                 : "memory");
}

static __device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t *b, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
        "r"(bytes)
        : "memory");
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

static __device__ __forceinline__ void mbarrier_wait(uint64_t *b, uint32_t parity) {
    mbarrier_wait(shared_address(b), parity);
}

/* Makes ordinary stores to shared memory visible to the tensor cores and to bulk copies. */
static __device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Named barriers of a block: all of `threads` arrive, and those that sync wait for them. */
static __device__ __forceinline__ void bar_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

static __device__ __forceinline__ void bar_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

/* ---- clusters, registers, dependent launches ---- */

static __device__ __forceinline__ void barrier_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

static __device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

template <int N>
static __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
static __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* Until the kernels before are done, where the launch did not wait for them. */
static __device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

static __device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- bulk copies of boxes of a tensor; coordinates count elements, the contiguous dimension first ---- */

constexpr uint64_t EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12f0000000000000,
                   EVICT_LAST = 0x14f0000000000000;

static __device__ __forceinline__ void prefetch_tensormap(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

#define BULK_COPY "cp.async.bulk.tensor."
#define BULK_INTO ".shared::cluster.global.mbarrier::complete_tx::bytes"

static __device__ __forceinline__ void bulk_copy_2d(void *to, const CUtensorMap *map,
                                                    uint64_t *b, int32_t c0, int32_t c1,
                                                    uint64_t keep) {
    asm volatile(BULK_COPY
                 "2d" BULK_INTO
                 ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(b)), "r"(c0), "r"(c1), "l"(keep)
                 : "memory");
}

static __device__ __forceinline__ void bulk_copy_3d(void *to, const CUtensorMap *map,
                                                    uint64_t *b, int32_t c0, int32_t c1,
                                                    int32_t c2, uint64_t keep) {
    asm volatile(BULK_COPY "3d" BULK_INTO
                           ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(
                               shared_address(to)),
                 "l"(map), "r"(shared_address(b)), "r"(c0), "r"(c1), "r"(c2), "l"(keep)
                 : "memory");
}

static __device__ __forceinline__ void bulk_copy_4d(void *to, const CUtensorMap *map,
                                                    uint64_t *b, int32_t c0, int32_t c1,
                                                    int32_t c2, int32_t c3, uint64_t keep) {
    asm volatile(BULK_COPY "4d" BULK_INTO
                           ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(
                               shared_address(to)),
                 "l"(map), "r"(shared_address(b)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(keep)
                 : "memory");
}

/* To the same place in all blocks of `mask`, and their barriers at the same place. */
static __device__ __forceinline__ void bulk_multicast_3d(void *to, const CUtensorMap *map,
                                                         uint64_t *b, int32_t c0, int32_t c1,
                                                         int32_t c2, uint16_t mask,
                                                         uint64_t keep) {
    asm volatile(BULK_COPY "3d" BULK_INTO
                           ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], "
                           "%6, %7;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(b)), "r"(c0), "r"(c1), "r"(c2), "h"(mask),
                 "l"(keep)
                 : "memory");
}

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
