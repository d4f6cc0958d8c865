/* quantize.h - rounds a matrix to a stored format, as the checkpoints' exporters do.
 *
 * A block's scale is amax / 448 of FP8 or amax / 6 of FP4, at least 1e-12 / 448 or / 6. Where
 * scales are powers of two it is the next one up. Of NVFP4 it is amax / (6 global), rounded to
 * E4M3; 1 for a block of zeros. The matrix keeps its global scale, amax / (6 * 448) of the
 * matrices that share it when they were exported. An element is the quotient, rounded to the
 * nearest code, ties to even. So what is loaded from an exported checkpoint equals, bit for
 * bit, what this makes of the tensors that it was exported from. */
#ifndef HD_WEIGHTS_QUANTIZE_H
#define HD_WEIGHTS_QUANTIZE_H

#include "base/dtype.h"
#include "base/status.h"

/* Returns whether matrices of like's format can be made of plain ones: FP8, FP4 and NVFP4. */
bool hd_can_quantize(const hd_weight *like);

/* Rounds values [rows, cols] of type F32, F16 or BF16, all finite, to the shape and format of
 * like, of which data and scale are not read. data and scale receive the arrays, of
 * hd_stored_data_bytes() and hd_stored_scale_bytes(). HD_ENOMEM: no memory for a row of
 * blocks. HD_EFORMAT: a value is too large for the global scale of NVFP4: it would not round to
 * the largest number but be cut to it. */
hd_status hd_quantize(const hd_weight *like, uint8_t *data, uint8_t *scale, hd_dtype type,
                      const void *values, hd_err *err);

/* Rounds n plain values to another plain type, to nearest, ties to even. Returns false if one
 * is too large for it. */
bool hd_convert(hd_dtype to, uint8_t *out, hd_dtype from, const void *values, int64_t n);

#endif
