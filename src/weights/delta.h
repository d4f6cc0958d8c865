/* delta.h - an update that brings only the elements that changed.
 *
 * For each tensor NAME of the model's files that changes, a delta has two tensors: NAME.indices,
 * I32 or I64 [n], numbers of elements in rising order, row-major; and NAME.values [n], what these
 * are now, in the type that the file has. Elements of half a byte cannot be named. */
#ifndef HD_WEIGHTS_DELTA_H
#define HD_WEIGHTS_DELTA_H

#include "weights/safetensors.h"
#include "weights/weights.h"

/* Makes whole tensors of a delta, which it takes, also on failure, and of what w has now: those that
 * change, and the scales or data that belong to them. For hd_weights_update_add(), before anything
 * else is applied to w, into which *out points. HD_EFORMAT, with the tensor's name: it is unknown,
 * has another type, or an index that is too large or out of order. HD_EAGAIN: values of w are
 * lost. */
hd_status hd_weights_delta_read(hd_checkpoint **out, const hd_weights *w, hd_checkpoint *delta,
                                hd_err *err);

#endif
