/* op_timer.h - how long queued work takes on a device, without what the host does between. */
#ifndef HD_OPS_PROFILE_OP_TIMER_H
#define HD_OPS_PROFILE_OP_TIMER_H

#include "ops/ops.h"

HD_BEGIN_C

/* Queues the work once more, ops only; on a GPU it is recorded and runs later. */
typedef void hd_timed_fn(hd_stream *s, void *arg);

/* Seconds of one of `copies` that run behind each other: seconds[rounds], after one round that
 * does not count. On a GPU the copies are one graph between two events. */
hd_status hd_time_ops(hd_stream *s, hd_device *d, hd_timed_fn *fn, void *arg, int32_t copies,
                      int32_t rounds, double *seconds, hd_err *err);

HD_END_C

#endif
