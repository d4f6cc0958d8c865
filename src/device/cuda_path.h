/* cuda_path.h - which kernels a GPU runs: those that use what Hopper alone has, or the generic ones.
 *
 * sm90 is for compute capability 9.0: wgmma, clusters, bulk copies, 227 KiB of shared memory. generic
 * runs from compute capability 8.0 on, also on Hopper: mma.sync, one block on its own, at most 99 KiB of
 * shared memory, which every such GPU has. */
#ifndef HD_DEVICE_CUDA_PATH_H
#define HD_DEVICE_CUDA_PATH_H

#include <stdint.h>

#include "base/status.h"

HD_BEGIN_C

typedef enum hd_cuda_path { HD_CUDA_AUTO, HD_CUDA_GENERIC, HD_CUDA_SM90 } hd_cuda_path;

/* "auto", "generic", "sm90"; NULL ends the list. */
extern const char *const hd_cuda_path_names[];

/* Parses one of them; NULL is "auto". */
hd_status hd_cuda_path_of(hd_cuda_path *out, const char *name, hd_err *err);

/* What a GPU of a compute capability runs: *path is what is asked for, and becomes generic or sm90.
 * archs: what the program has code for, as nvcc names it without "sm_": "80 89 90a 100". Code for X.Y
 * runs on X.Z, Z >= Y; with an "a" on X.Y alone. HD_EUNSUPPORTED, with GPU number `gpu` by name: there is
 * no code for it, or not of that path. */
hd_status hd_cuda_path_choose(hd_cuda_path *path, const char *archs, int32_t gpu, int32_t major,
                              int32_t minor, hd_err *err);

HD_END_C

#endif
