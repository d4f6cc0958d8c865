/* op_timer.h - measures the time of queued operators on a device, without host overhead. */
#ifndef HD_OPS_PROFILE_OP_TIMER_H
#define HD_OPS_PROFILE_OP_TIMER_H

#include "ops/ops.h"

HD_BEGIN_C

/* Queues the measured operators once; no copies. On a GPU they are captured and run later. */
typedef void hd_timed_fn(hd_stream *s, void *arg);

/* Measures seconds per copy of `copies` that run one after another: seconds[rounds], after
 * one uncounted round. On a GPU the copies are one graph between two events. */
hd_status hd_time_ops(hd_stream *s, hd_device *d, hd_timed_fn *fn, void *arg, int32_t copies,
                      int32_t rounds, double *seconds, hd_err *err);

HD_END_C

#endif
