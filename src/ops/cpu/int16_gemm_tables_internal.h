/* int16_gemm_tables_internal.h - int16 GEMM: tables that convert FP8 and FP4 codes to
 * integers. */
#ifndef HD_OPS_CPU_INT16_GEMM_TABLES_INTERNAL_H
#define HD_OPS_CPU_INT16_GEMM_TABLES_INTERNAL_H

#include <stdint.h>

/* FP8 codes without their sign: the largest below 32, and NaN. */
enum { BELOW_32 = 0x5f, NO_NUMBER = 0x7f };

/* Units of the integers of W: for FP4 and small FP8, and for larger FP8. */
static const float fine = 0x1p-9f, coarse = 0x1p-5f;

/* Twice an element of FP4. */
static const int8_t int16_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

#endif
