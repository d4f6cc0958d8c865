/* norm.h - RMS norm and layer norm. */
#ifndef HD_OPS_NORM_H
#define HD_OPS_NORM_H

#include "ops/types.h"

HD_BEGIN_C

/* out = w * x / sqrt(mean(x^2) + eps); models.md 2.1.1 */
typedef struct hd_rms_norm_args {
    hd_rows out;         /* [rows, cols], may be x */
    hd_rows x;           /* [rows, cols] */
    const float *weight; /* [cols], NULL: ones */
    int32_t rows, cols;
    float eps;
} hd_rms_norm_args;

#define HD_ROWS_rms_norm(T) T(out, STRIDED) T(x, STRIDED)

/* out = w * (x - mean) / sqrt(var + eps) + b, biased variance; models.md 2.1.2 */
typedef struct hd_layer_norm_args {
    hd_rows out; /* [rows, cols], may be x */
    hd_rows x;   /* [rows, cols] */
    const float *weight, *bias;
    int32_t rows, cols;
    float eps;
} hd_layer_norm_args;

#define HD_ROWS_layer_norm(T) T(out, PLAIN) T(x, PLAIN)

/* Fused: x += y, unless y is none, then rms_norm of x. */
typedef struct hd_add_norm_args {
    hd_rows out;         /* [rows, cols] */
    hd_rows x;           /* [rows, cols] */
    hd_rows y;           /* [rows, cols] or none */
    const float *weight; /* [cols] */
    int32_t rows, cols;
    float eps;
} hd_add_norm_args;

#define HD_ROWS_add_norm(T) T(out, PLAIN) T(x, PLAIN) T(y, PLAIN)

#define HD_NORM_OPS(X) X(rms_norm) X(layer_norm) X(add_norm)

HD_END_C

#endif
