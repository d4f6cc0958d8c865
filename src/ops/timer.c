/* timer.c - see timer.h; the host's way, for devices that compute while they are called. */
#include "ops/timer.h"

#include "base/progress.h"
#include "ops/timer_internal.h"

hd_status hd_time_ops(hd_stream *s, const hd_device *d, hd_timed_fn *fn, void *arg,
                      int32_t copies, int32_t rounds, double *seconds, hd_err *err) {
#ifdef HD_CUDA
    if (!hd_device_is_host(d)) return hd_time_cuda(s, fn, arg, copies, rounds, seconds, err);
#endif
    (void)d;
    for (int32_t round = -1; round < rounds; round++) {
        const int64_t begun = hd_now_ns();
        for (int32_t i = 0; i < copies; i++) fn(s, arg);
        HD_TRY(hd_stream_sync(s, err));
        if (round >= 0) seconds[round] = (double)(hd_now_ns() - begun) * 1e-9 / copies;
    }
    return HD_OK;
}
