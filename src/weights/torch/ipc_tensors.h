/* ipc_tensors.h - the plain form of tensors on a GPU, for senders without PyTorch: a list of objects
 *
 *     {"name": ..., "dtype": "BF16", "shape": [...], "handle": ..., "offset": 0}
 *
 * dtype is a safetensors type, handle the base64 of the 64 bytes of a cudaIpcMemHandle_t, and offset
 * the place of the first byte in its memory. Elements lie row-major and without gaps, and are
 * complete when the list is sent. */
#ifndef HD_WEIGHTS_IPC_TENSORS_H
#define HD_WEIGHTS_IPC_TENSORS_H

#include <jansson.h>

#include "weights/safetensors.h"

/* Copies all of them. device: the GPU of the weights; NULL: they are refused. */
hd_status hd_ipc_tensors_read(hd_checkpoint **out, const json_t *list, hd_device *device,
                              hd_err *err);

#endif
