/* shared_device.h - a CPU device that opens memory of other processes as a GPU does: handles of equal
 * bytes 'A' and 'B' name a block each, and any other opens nothing. */
#ifndef HD_TESTS_SHARED_DEVICE_H
#define HD_TESTS_SHARED_DEVICE_H

#include "device/device.h"

enum { SHARED_BLOCK_BYTES = 4096 };

hd_device *shared_device_open(void); /* NULL: no memory */

/* Byte i of the block of a handle. */
uint8_t shared_device_byte(char handle, size_t i);

/* Device memory is full from now on, or not. */
void shared_device_fill(hd_device *d, bool full);

/* Its memory is none of the host's, as that of a GPU; what is discarded is overwritten. */
void shared_device_set_remote(hd_device *d);

/* Blocks that are open now; copies within the device; how often a stream waited for another process. */
int32_t shared_device_opened(const hd_device *d);
int32_t shared_device_copies(const hd_device *d);
int32_t shared_device_waits(const hd_device *d);

/* Pinned host memory of a remote device: at most so many bytes from now on; whether some is. */
enum { SHARED_MAX_PINS = 64 };
void shared_device_limit_pins(hd_device *d, size_t bytes);
/* It says that so many bytes are free. */
void shared_device_set_free(hd_device *d, size_t bytes);
bool shared_device_has_pinned(const hd_device *d, const void *p, size_t bytes);

#endif
