/* memory_cuda.cuh - memory of a GPU whose pages can go back to the driver while its address stays. */
#ifndef HD_DEVICE_MEMORY_CUDA_CUH
#define HD_DEVICE_MEMORY_CUDA_CUH

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdint.h>

struct cuda_pages {
    CUdeviceptr at;
    size_t bytes; /* whole pages; 0: no such memory */
    CUmemGenericAllocationHandle handle;
    bool mapped;
};

/* Takes at least n bytes of GPU `ordinal`, not zeroed, that this one uses and those whose bits readers
 * has. cudaErrorMemoryAllocation: there are none. */
cudaError_t cuda_pages_take(cuda_pages *out, int ordinal, uint64_t readers, size_t n);
void cuda_pages_free(cuda_pages *p);

/* Gives pages back, or takes new ones, not zeroed, at the same address. Nothing uses them. */
cudaError_t cuda_pages_unmap(cuda_pages *p);
cudaError_t cuda_pages_map(cuda_pages *p, int ordinal, uint64_t readers);

/* Lets GPU `ordinal` read and write mapped pages. */
cudaError_t cuda_pages_show(const cuda_pages *p, int ordinal);

/* The allocation that contains p. */
cudaError_t cuda_range_of(CUdeviceptr *start, size_t *bytes, const void *p);

#endif
