/* cuda.cuh - access to the CUDA stream behind a hd_stream, for kernel launchers. */
#ifndef HD_DEVICE_CUDA_CUH
#define HD_DEVICE_CUDA_CUH

#include <cuda_runtime.h>

#include "device/device.h"

/* Before the first call of CUDA in a process: all kernels are loaded at once. One that is loaded when
 * it is first launched may wait until the GPU is idle, and so for a rank that waits for this one.
 * Streams get queues of their own: in one of several streams, a kernel that waits for another rank
 * could stand before what that rank has queued. */
void hd_cuda_begin(void);

/* Makes the stream's device the current one of this thread. */
cudaStream_t hd_cuda_stream(hd_stream *s);

/* Whether the current device runs kernels for Hopper; else all that it launches are generic. */
bool hd_cuda_is_sm90(void);

/* Shared memory that a block may have, its static part included. */
constexpr size_t HD_CUDA_SHARED_SM90 = 227 << 10, HD_CUDA_SHARED_GENERIC = 99 << 10;
static inline size_t hd_cuda_shared_limit(void) {
    return hd_cuda_is_sm90() ? HD_CUDA_SHARED_SM90 : HD_CUDA_SHARED_GENERIC;
}

/* Whether the current device may begin a kernel before those before it are done (programmatic
 * dependent launch). */
bool hd_cuda_overlaps_launches(void);

/* Allows launches of a kernel on the current device so much dynamic shared memory. What was allowed
 * stays allowed: ranks that share a GPU launch the same kernel side by side. More than the limit is not
 * allowed, and such a launch fails. */
void hd_cuda_allow_shared(const void *kernel, size_t bytes);

/* Operator state kept with a device: one object, attached at most once, closed before the
 * device. */
void hd_cuda_attach(hd_device *d, void *thing, void (*close)(void *thing));
void *hd_cuda_attached(hd_stream *s); /* NULL: none attached */

/* The GPU's clock in nanoseconds. */
static __device__ __forceinline__ uint64_t hd_cuda_clock_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

/* Call after a kernel launch: records a launch error, with the operator's name. */
void hd_cuda_check(hd_stream *s, const char *op);

#endif
