/* delay.h - a delay of one stream, as if it waited for another device. */
#ifndef HD_DEVICE_DELAY_H
#define HD_DEVICE_DELAY_H

#include "device/device.h"

/* What is queued behind it begins after this time. It takes no part of a GPU, on which other streams go
 * on; a CPU does not wait. */
void hd_stream_delay(hd_stream *s, int32_t microseconds);

#endif
