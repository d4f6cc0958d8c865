/* staged_comm.h - a rank's communication for tests whose arrays are the host's while the rank computes
 * on a device that the host cannot read: each call copies a block of host memory to the device, and
 * back when the call is done. Arrays of a call lie in that block. */
#ifndef HD_TESTS_FAKES_STAGED_COMM_H
#define HD_TESTS_FAKES_STAGED_COMM_H

#include "comm/comm.h"

enum { STAGED_BYTES = 16 << 20 };

typedef struct staged_comm {
    hd_comm comm; /* for the calls */
    const hd_comm *inner;
    const hd_ops *ops;
    char *host, *device; /* [STAGED_BYTES] */
    size_t used;
} staged_comm;

/* inner: of the device, which the ranks of the layout share their block by. Returns why not, or NULL. */
const char *staged_comm_open(staged_comm *s, const hd_comm *inner, hd_device *d,
                             const hd_ops *ops, hd_stream *stream);
void *staged_comm_take(staged_comm *s, size_t bytes); /* for ever; NULL: full */

#endif
