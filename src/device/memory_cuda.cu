/* memory_cuda.cu - see memory_cuda.cuh. The functions are the driver's; they are looked up by the
 * runtime, so that nothing links the driver. */
#include "device/memory_cuda.cuh"

#include <string.h>

namespace {

/* A function of the driver, or NULL. */
template <class F>
F entry(const char *name) {
    void *at = nullptr;
    cudaDriverEntryPointQueryResult how;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion(name, &at, 12000, cudaEnableDefault, &how);
    return status == cudaSuccess && how == cudaDriverEntryPointSuccess ? reinterpret_cast<F>(at)
                                                                       : nullptr;
}

#define DRIVER(function) entry<decltype(&function)>(#function)

cudaError_t result_of(CUresult r) {
    if (r == CUDA_SUCCESS) return cudaSuccess;
    return r == CUDA_ERROR_OUT_OF_MEMORY ? cudaErrorMemoryAllocation : cudaErrorInvalidValue;
}

CUmemAllocationProp properties(int ordinal) {
    CUmemAllocationProp p;
    memset(&p, 0, sizeof p);
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = ordinal;
    return p;
}

} // namespace

cudaError_t cuda_pages_show(const cuda_pages *p, int ordinal) {
    const auto access = DRIVER(cuMemSetAccess);
    CUmemAccessDesc both;
    if (!access) return cudaErrorSymbolNotFound;
    memset(&both, 0, sizeof both);
    both.location = properties(ordinal).location;
    both.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return result_of(access(p->at, p->bytes, &both, 1));
}

cudaError_t cuda_range_of(CUdeviceptr *start, size_t *bytes, const void *p) {
    const auto get_range = DRIVER(cuMemGetAddressRange);
    if (!get_range) return cudaErrorSymbolNotFound;
    return result_of(get_range(start, bytes, reinterpret_cast<CUdeviceptr>(p)));
}

cudaError_t cuda_pages_map(cuda_pages *p, int ordinal, uint64_t readers) {
    const auto create = DRIVER(cuMemCreate);
    const auto map = DRIVER(cuMemMap);
    const auto release = DRIVER(cuMemRelease);
    if (!create || !map || !release) return cudaErrorSymbolNotFound;
    const CUmemAllocationProp prop = properties(ordinal);
    cudaError_t status = result_of(create(&p->handle, p->bytes, &prop, 0));
    if (status != cudaSuccess) return status;
    status = result_of(map(p->at, p->bytes, 0, p->handle, 0));
    p->mapped = status == cudaSuccess;
    readers |= UINT64_C(1) << ordinal;
    for (int i = 0; i < 64 && status == cudaSuccess; i++) {
        if (readers >> i & 1) status = cuda_pages_show(p, i);
    }
    if (status == cudaSuccess) return status;
    if (p->mapped) {
        cuda_pages_unmap(p);
    } else {
        release(p->handle);
    }
    return status;
}

cudaError_t cuda_pages_unmap(cuda_pages *p) {
    const auto unmap = DRIVER(cuMemUnmap);
    const auto release = DRIVER(cuMemRelease);
    if (!unmap || !release) return cudaErrorSymbolNotFound;
    cudaError_t status = result_of(unmap(p->at, p->bytes));
    if (status == cudaSuccess) status = result_of(release(p->handle));
    p->mapped = p->mapped && status != cudaSuccess;
    return status;
}

cudaError_t cuda_pages_take(cuda_pages *out, int ordinal, uint64_t readers, size_t n) {
    const auto granularity = DRIVER(cuMemGetAllocationGranularity);
    const auto reserve = DRIVER(cuMemAddressReserve);
    if (!granularity || !reserve) return cudaErrorSymbolNotFound;
    const CUmemAllocationProp prop = properties(ordinal);
    cuda_pages p = {};
    size_t page = 0;
    cudaError_t status =
        result_of(granularity(&page, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    if (status != cudaSuccess) return status;
    p.bytes = (n + page - 1) / page * page;
    status = result_of(reserve(&p.at, p.bytes, 0, 0, 0));
    if (status != cudaSuccess) return status;
    status = cuda_pages_map(&p, ordinal, readers);
    if (status != cudaSuccess) {
        cuda_pages_free(&p);
        return status;
    }
    *out = p;
    return status;
}

void cuda_pages_free(cuda_pages *p) {
    const auto release_address = DRIVER(cuMemAddressFree);
    if (p->mapped) cuda_pages_unmap(p);
    if (release_address) release_address(p->at, p->bytes);
    *p = {};
}
