/* queue_device.h - a device whose streams are real queues: operators and copies run when a
 * stream is synchronized, and streams run in the order that the test prefers. Whatever no
 * event orders then runs in the wrong order, the same one each time.
 *
 * Operators are those of a CPU table. An argument struct is copied when it is queued; what it
 * points to must stay, as on a GPU. One device at a time, by one thread. */
#ifndef HD_TESTS_FAKES_QUEUE_DEVICE_H
#define HD_TESTS_FAKES_QUEUE_DEVICE_H

#include "ops/ops.h"

enum { QUEUE_STREAMS = 3 };

/* Opens the device; t becomes its operators, from a CPU table. */
hd_device *queue_device_open(hd_ops *t);

/* order: stream numbers, in the order they were opened. Of the streams that can go on, the
 * first of it runs. */
void queue_device_prefer(hd_device *d, const int32_t order[QUEUE_STREAMS]);

/* Makes hd_stream_wait_event do nothing, so that a test can show that it is needed. */
void queue_device_ignore_events(hd_device *d, bool ignore);
/* The same for one stream alone, by its number. */
void queue_device_ignore_events_on(hd_device *d, int32_t stream, bool ignore);

/* Returns how many times a stream waited for an event since the device was opened. */
int32_t queue_device_waits(const hd_device *d);

#endif
