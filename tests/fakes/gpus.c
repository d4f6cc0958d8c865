/* gpus.c - see gpus.h. */
#include "gpus.h"

#include <stdlib.h>
#include <string.h>

#ifdef HD_CUDA
#include "device/gpu_list.h"
#endif

bool gpus_are_wanted(void) {
    const char *backend = getenv("HADAL_BACKEND");
    return backend && strcmp(backend, "cuda") == 0;
}

int32_t gpus_for(int32_t rank) {
#ifdef HD_CUDA
    char why[200];
    const int32_t n = hd_cuda_devices(NULL, 0, why, sizeof why);
    return n ? rank % n : 0;
#else
    (void)rank;
    return 0;
#endif
}
