/* timer_internal.h - the GPU's way of timer.c. */
#ifndef HD_OPS_TIMER_INTERNAL_H
#define HD_OPS_TIMER_INTERNAL_H

#include "ops/timer.h"

HD_BEGIN_C

hd_status hd_time_cuda(hd_stream *s, hd_timed_fn *fn, void *arg, int32_t copies, int32_t rounds,
                       double *seconds, hd_err *err);

HD_END_C

#endif
