/* gpu_list.h - lists the CUDA devices of this machine, for the user and for `auto`.
 *
 * Only in builds with HD_CUDA. */
#ifndef HD_DEVICE_GPU_LIST_H
#define HD_DEVICE_GPU_LIST_H

#include <stdint.h>

#include "device/cuda_path.h"

HD_BEGIN_C

typedef struct hd_cuda_device {
    char name[256];
    int64_t memory_bytes;
    int32_t n_sms;
    int32_t major, minor; /* compute capability */
    hd_cuda_path path; /* that it has by default; HD_CUDA_AUTO: no code for it in this build */
} hd_cuda_device;

/* Returns what this build has code for: "80 89 90a 100 120". */
const char *hd_cuda_archs(void);

/* Describes up to cap devices and returns how many there are, which may be more. If there
 * are none, why[why_cap] says what is missing (driver, device); otherwise it is empty. */
int32_t hd_cuda_devices(hd_cuda_device *out, int32_t cap, char *why, int32_t why_cap);

HD_END_C

#endif
