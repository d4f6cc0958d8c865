/* gpus.c - see gpus.h. */
#include "gpus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"

bool gpus_are_wanted(void) {
    const char *backend = getenv("HADAL_BACKEND");
    return backend && strcmp(backend, "cuda") == 0;
}

hd_cuda_path gpus_path(const char *backend) {
    hd_cuda_path path;
    hd_err err = {0};
    if (!backend || strcmp(backend, "cuda") != 0) return HD_CUDA_AUTO;
    if (hd_cuda_path_of(&path, getenv("HADAL_CUDA_PATH"), &err) == HD_OK) return path;
    fprintf(stderr, "HADAL_CUDA_PATH: %s\n", err.msg);
    exit(2);
}

const char *gpus_precision(const char *backend) {
    const char *named =
        backend && strcmp(backend, "cuda") == 0 ? getenv("HADAL_PRECISION") : NULL;
    return named ? named : "exact";
}

int32_t gpus_for(int32_t rank) {
    const int32_t n = hd_device_count_gpus();
    return n ? rank % n : 0;
}
