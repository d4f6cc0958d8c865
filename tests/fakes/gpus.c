/* gpus.c - see gpus.h. */
#include "gpus.h"

#include <stdlib.h>
#include <string.h>

#include "device/device.h"

bool gpus_are_wanted(void) {
    const char *backend = getenv("HADAL_BACKEND");
    return backend && strcmp(backend, "cuda") == 0;
}

int32_t gpus_for(int32_t rank) {
    const int32_t n = hd_device_count_gpus();
    return n ? rank % n : 0;
}
