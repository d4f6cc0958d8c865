/* tensor_map_sm90_internal.cuh - what the bulk copies of the products on Hopper are told: tensor maps. */
#ifndef HD_OPS_CUDA_TENSOR_MAP_SM90_INTERNAL_CUH
#define HD_OPS_CUDA_TENSOR_MAP_SM90_INTERNAL_CUH

#include <cuda_runtime.h>

#include "ops/cuda/wgmma_sm90_internal.cuh"

namespace {

/* Experts' matrices have one tensor map, in which an address is a coordinate: steps of 128 bytes
 * from the lowest one, so that 256 GiB are in reach. A map per expert would have to be rewritten and fenced in device memory
 * when slots change; so, a slot is one address in the table, and neither the maps nor the other
 * arguments of a captured launch depend on it. It is read once per tile. */
constexpr int64_t PLACE_BYTES = HD_EXPERT_ALIGN, MAX_PLACE = INT32_MAX;

using encode_fn = decltype(&cuTensorMapEncodeTiled);

/* The driver's function, found once; NULL: none. */
inline encode_fn find_encode() {
    static encode_fn found;
    if (found) return found;
    void *at = nullptr;
    cudaDriverEntryPointQueryResult how;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at,
                                                                12000, cudaEnableDefault, &how);
    if (status == cudaSuccess && how == cudaDriverEntryPointSuccess) {
        found = reinterpret_cast<encode_fn>(at);
    }
    return found;
}

struct box {
    uint32_t rank;
    cuuint64_t dims[4], strides[3]; /* elements, the contiguous dimension first; bytes */
    cuuint32_t of[4];
};

inline bool describe_as(CUtensorMap *to, CUtensorMapDataType type, CUtensorMapSwizzle swizzle,
                        const void *base, const box &b) {
    static const cuuint32_t every[4] = {1, 1, 1, 1};
    const encode_fn encode = find_encode();
    return encode &&
           encode(to, type, b.rank, const_cast<void *>(base), b.dims, b.strides, b.of, every,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Rows of 128 bytes, swizzled. */
inline bool describe(CUtensorMap *to, const void *base, const box &b) {
    return describe_as(to, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, base, b);
}

/* As it lies; the first coordinate of a copy is a multiple of 16 bytes. */
inline bool describe_flat(CUtensorMap *to, CUtensorMapDataType type, const void *base,
                          const box &b) {
    return describe_as(to, type, CU_TENSOR_MAP_SWIZZLE_NONE, base, b);
}

/* Places of a tensor map over addresses that are `range` apart. */
inline cuuint64_t places_of(size_t range) {
    return range / PLACE_BYTES + 1;
}

} // namespace

#endif
