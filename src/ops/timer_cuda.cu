/* timer_cuda.cu - the time of recorded work between two events. */
#include "backend/cuda.cuh"
#include "ops/timer_internal.h"

namespace {

struct recording {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
};

cudaError_t record(recording *r, hd_stream *s, hd_timed_fn *fn, void *arg, int32_t copies) {
    cudaStream_t queue = hd_cuda_stream(s);
    cudaError_t status = cudaStreamBeginCapture(queue, cudaStreamCaptureModeThreadLocal);
    if (status != cudaSuccess) return status;
    for (int32_t i = 0; i < copies; i++) fn(s, arg);
    status = cudaStreamEndCapture(queue, &r->graph);
    if (status == cudaSuccess) status = cudaGraphInstantiate(&r->exec, r->graph, 0);
    if (status == cudaSuccess) status = cudaEventCreate(&r->begin);
    if (status == cudaSuccess) status = cudaEventCreate(&r->end);
    return status;
}

cudaError_t run(const recording &r, cudaStream_t queue, double *seconds) {
    float ms = 0.0f;
    cudaError_t status = cudaEventRecord(r.begin, queue);
    if (status == cudaSuccess) status = cudaGraphLaunch(r.exec, queue);
    if (status == cudaSuccess) status = cudaEventRecord(r.end, queue);
    if (status == cudaSuccess) status = cudaEventSynchronize(r.end);
    if (status == cudaSuccess) status = cudaEventElapsedTime(&ms, r.begin, r.end);
    *seconds = (double)ms * 1e-3;
    return status;
}

void close(recording *r) {
    if (r->begin) cudaEventDestroy(r->begin);
    if (r->end) cudaEventDestroy(r->end);
    if (r->exec) cudaGraphExecDestroy(r->exec);
    if (r->graph) cudaGraphDestroy(r->graph);
}

} // namespace

hd_status hd_time_cuda(hd_stream *s, hd_timed_fn *fn, void *arg, int32_t copies, int32_t rounds,
                       double *seconds, hd_err *err) {
    recording r = {};
    HD_TRY(hd_stream_sync(s, err)); /* a failure before is not ours */
    cudaError_t status = record(&r, s, fn, arg, copies);
    for (int32_t round = -1; round < rounds && status == cudaSuccess; round++) {
        double all;
        status = run(r, hd_cuda_stream(s), &all);
        if (round >= 0) seconds[round] = all / copies;
    }
    close(&r);
    HD_TRY(hd_stream_sync(s, err)); /* an op that was refused */
    if (status == cudaSuccess) return HD_OK;
    cudaGetLastError();
    return HD_FAIL(err, HD_EDEVICE, "timing: %s", cudaGetErrorString(status));
}
