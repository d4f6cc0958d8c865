/* export.h - writes safetensors files. */
#ifndef HD_WEIGHTS_EXPORT_H
#define HD_WEIGHTS_EXPORT_H

#include "weights/safetensors.h"

/* Writes the tensors, in their order, to a new file, and waits until the disk has it. Names,
 * dtype_name, rank, shape, data and bytes are read. What existed at path is replaced. */
hd_status hd_safetensors_write(const char *path, const hd_tensor *tensors, int32_t n,
                               hd_err *err);

/* Writes all tensors of opened weights as they are stored, and the checkpoint's names for
 * them: the weights of a model folder in one file. */
hd_status hd_weights_write(const char *path, const hd_weights *w, hd_err *err);

#endif
