/* cuda.cuh - what kernels' launchers need of a stream of the CUDA backend. */
#ifndef HD_BACKEND_CUDA_CUH
#define HD_BACKEND_CUDA_CUH

#include <cuda_runtime.h>

#include "backend/backend.h"

/* Makes the stream's device the current one of this thread. */
cudaStream_t hd_cuda_stream(hd_stream *s);

/* After a launch: records its refusal, naming the op. */
void hd_cuda_check(hd_stream *s, const char *op);

#endif
