/* arrival_internal.h - one tensor of an update: the arrays that it replaces, and their next bytes. */
#ifndef HD_WEIGHTS_ARRIVAL_INTERNAL_H
#define HD_WEIGHTS_ARRIVAL_INTERNAL_H

#include "base/memory.h"
#include "weights/bind_internal.h"

enum { WEIGHTS_MOST_COPIES = 7, WEIGHTS_MOST_BLOCKS = 2 };

/* One array of the model and its next content. */
typedef struct weights_copy {
    void *to;
    const void *from;
    size_t bytes;
    bool on_device;
    bool from_device; /* `from` is memory of the same device */
} weights_copy;

typedef struct weights_arrival {
    weights_bound in;
    int32_t decl, n_copies, n_blocks;
    weights_copy copies[WEIGHTS_MOST_COPIES];
    hd_block blocks[WEIGHTS_MOST_BLOCKS]; /* what was converted */
} weights_arrival;

/* Binds the tensor of source that w's declaration asks for, by names, formats and shapes. */
hd_status weights_arrival_bind(weights_arrival *out, const hd_weights *w,
                               const hd_checkpoint *source, int32_t decl, const hd_tensor *data,
                               hd_err *err);

/* Checks every value, converts what the model stores otherwise, and lists the copies. Several
 * arrivals may be prepared at the same time. */
hd_status weights_arrival_prepare(weights_arrival *a, const hd_weights *w,
                                  const hd_checkpoint *source, hd_err *err);

void weights_arrival_deinit(weights_arrival *a); /* an all-zero one is fine */

#endif
