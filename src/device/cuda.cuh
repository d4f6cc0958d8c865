/* cuda.cuh - what kernels' launchers need of a stream of the CUDA backend. */
#ifndef HD_DEVICE_CUDA_CUH
#define HD_DEVICE_CUDA_CUH

#include <cuda_runtime.h>

#include "device/device.h"

/* Makes the stream's device the current one of this thread. */
cudaStream_t hd_cuda_stream(hd_stream *s);

/* What the ops keep with a device: one thing, given at most once, closed before the device. */
void hd_cuda_attach(hd_device *d, void *thing, void (*close)(void *thing));
void *hd_cuda_attached(hd_stream *s); /* NULL: nothing */

/* After a launch: records its refusal, naming the op. */
void hd_cuda_check(hd_stream *s, const char *op);

#endif
