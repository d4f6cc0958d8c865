/* launch.cuh - how kernels are launched and begin, and what blocks of a cluster do together.
 *
 * Kernels are compiled for several GPUs (device/cuda_path.h). Instructions that not all of them have stand
 * in functions here, which mean the same without: a kernel that does not overlap need not wait, and a block
 * without a cluster is alone in its own. */
#ifndef HD_DEVICE_LAUNCH_CUH
#define HD_DEVICE_LAUNCH_CUH

#include <cooperative_groups.h>

#include "device/cuda.cuh"

/* Whether this code is for Hopper alone. Elsewhere what only its path launches is left out. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool FOR_SM90 = true;
#else
constexpr bool FOR_SM90 = false;
#endif

/* Of a kernel that only Hopper's path launches: blocks are clusters of n neighbors along x. */
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HD_CLUSTERS_OF(n)
#else
#define HD_CLUSTERS_OF(n) __cluster_dims__(n, 1, 1)
#endif

/* Until the kernels before are done, where the launch did not wait for them. */
static __device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* How a kernel begins that launch_kernel() starts: what the kernels before wrote is there. Every
 * such kernel waits, so one that is done stands for all before it. */
static __device__ __forceinline__ void begin_kernel() {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
}

template <typename... P>
static void launch_with(bool overlaps, cudaStream_t queue, void (*kernel)(P...), dim3 grid,
                        int threads, size_t shared, int cluster, P... args) {
    cudaLaunchAttribute how[2] = {};
    unsigned n = 0;
    if (overlaps) {
        how[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        how[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        how[n].id = cudaLaunchAttributeClusterDimension;
        how[n++].val.clusterDim = {(unsigned)cluster, 1, 1};
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared;
    config.stream = queue;
    config.attrs = how;
    config.numAttrs = n;
    cudaLaunchKernelEx(&config, kernel, args...);
}

/* Queues a kernel, which may start before the one before it on the stream is done: it waits on the
 * device before it reads or writes what others do (programmatic dependent launch). Blocks of
 * `cluster` neighbors along x are a cluster, which Hopper's path alone asks for. */
template <typename... P, typename... A>
static void launch_kernel(cudaStream_t queue, void (*kernel)(P...), dim3 grid, int threads,
                          size_t shared, int cluster, A &&...args) {
    launch_with(hd_cuda_overlaps_launches(), queue, kernel, grid, threads, shared, cluster,
                static_cast<P>(args)...);
}

/* Queues a kernel that starts when the one before it is done. */
template <typename... P, typename... A>
static void launch_in_order(cudaStream_t queue, void (*kernel)(P...), dim3 grid, int threads,
                            size_t shared, int cluster, A &&...args) {
    launch_with(false, queue, kernel, grid, threads, shared, cluster, static_cast<P>(args)...);
}

/* ---- clusters ---- */

#if __CUDA_ARCH__ >= 900

static __device__ __forceinline__ unsigned cluster_rank() {
    return cooperative_groups::this_cluster().block_rank();
}

static __device__ __forceinline__ unsigned cluster_size() {
    return cooperative_groups::this_cluster().num_blocks();
}

static __device__ __forceinline__ void cluster_arrive() {
    (void)cooperative_groups::this_cluster().barrier_arrive();
}

static __device__ __forceinline__ void cluster_wait() {
    cooperative_groups::this_cluster().barrier_wait();
}

/* The same place in the shared memory of block `rank`. */
template <typename T>
static __device__ __forceinline__ T *cluster_at(T *shared, unsigned rank) {
    return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
}

#else

static __device__ __forceinline__ unsigned cluster_rank() {
    return 0;
}

static __device__ __forceinline__ unsigned cluster_size() {
    return 1;
}

static __device__ __forceinline__ void cluster_arrive() {}

static __device__ __forceinline__ void cluster_wait() {
    __syncthreads();
}

template <typename T>
static __device__ __forceinline__ T *cluster_at(T *shared, unsigned) {
    return shared;
}

#endif

static __device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

#endif
