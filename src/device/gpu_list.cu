/* gpu_list.cu - queries the CUDA runtime for devices; creates no context on any device. */
#include "device/gpu_list.h"

#include <stdio.h>
#include <stdlib.h>

#include "device/cuda.cuh"

void hd_cuda_begin(void) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

static void describe(hd_cuda_device *d, int id) {
    cudaDeviceProp prop;
    *d = {};
    if (cudaGetDeviceProperties(&prop, id) != cudaSuccess) {
        snprintf(d->name, sizeof d->name, "device %d does not answer", id);
        return;
    }
    snprintf(d->name, sizeof d->name, "%s", prop.name);
    d->memory_bytes = (int64_t)prop.totalGlobalMem;
    d->n_sms = prop.multiProcessorCount;
    d->major = prop.major;
    d->minor = prop.minor;
    hd_cuda_path path = HD_CUDA_AUTO;
    if (hd_cuda_path_choose(&path, hd_cuda_archs(), id, prop.major, prop.minor, nullptr) ==
        HD_OK) {
        d->path = path;
    }
}

extern "C" const char *hd_cuda_archs(void) {
    return HD_CUDA_ARCHS;
}

extern "C" int32_t hd_cuda_devices(hd_cuda_device *out, int32_t cap, char *why,
                                   int32_t why_cap) {
    int n = 0;
    hd_cuda_begin();
    cudaError_t status = cudaGetDeviceCount(&n);
    if (status != cudaSuccess) n = 0;
    snprintf(why, (size_t)why_cap, "%s",
             status != cudaSuccess ? cudaGetErrorString(status)
             : n == 0              ? "no device"
                                   : "");
    for (int i = 0; i < n && i < cap; i++) describe(&out[i], i);
    return n;
}
