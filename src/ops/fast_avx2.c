/* fast_avx2.c - products in whole numbers as the compiler vectorizes fast_loops_internal.h for
 * AVX2. */
#include "ops/fast_loops_internal.h"

const fast_kernels fast_avx2 = {.quantize = quantize_row, .multiply = multiply_rows};
