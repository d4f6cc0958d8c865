/* torch_tensors.h - the tensors in a pickle that PyTorch's multiprocessing wrote, as trainers
 * send them to SGLang: a list of (name, tensor), or one flattened tensor with the names,
 * shapes and places of its parts.
 *
 * The pickle describes the tensors; their bytes lie in POSIX shared memory, by name (the
 * sharing strategy file_system), or on a GPU, by CUDA IPC handle. They are copied, and the
 * sender is told so as PyTorch's receivers do: by counting down the users that its memory has.
 * Nothing in the pickle is run: names of functions are compared with the few that describe
 * tensors, and any other is refused, with its name. File descriptors are refused, too: this
 * process could not open them. */
#ifndef HD_WEIGHTS_TORCH_TENSORS_H
#define HD_WEIGHTS_TORCH_TENSORS_H

#include "weights/safetensors.h"

/* flattened: the pickle is a bucket, SGLang's load_format flattened_bucket. device: the GPU of the
 * weights, on which tensors may lie, too; NULL: these are refused. */
hd_status hd_torch_tensors_read(hd_checkpoint **out, const uint8_t *pickle, size_t n,
                                bool flattened, hd_device *device, hd_err *err);

#endif
