/* sm90_internal.cuh - Hopper's own instructions, one function each, named as in PTX: barriers in shared
 * memory, bulk copies of tensors. For sm_90a alone.
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

/* Whether a wait would return at once. */
static __device__ __forceinline__ bool mbarrier_test(uint32_t b, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(done)
                 : "r"(b), "r"(parity)
                 : "memory");
    return done != 0;
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

/* ---- clusters, registers ---- */

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

/* ---- bulk copies of boxes of a tensor; coordinates count elements, the contiguous dimension first ---- */

constexpr uint64_t EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12f0000000000000,
                   EVICT_LAST = 0x14f0000000000000;

static __device__ __forceinline__ void prefetch_tensormap(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Bytes that lie in a row; both addresses and the count are multiples of 16. */
static __device__ __forceinline__ void bulk_copy(void *to, const void *from, uint32_t bytes,
                                                 uint64_t *b, uint64_t keep) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(keep)
                 : "memory");
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

#endif
