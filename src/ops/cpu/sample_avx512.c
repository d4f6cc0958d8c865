/* sample_avx512.c - AVX-512: sampling weights of candidates, sixteen at a time. The compiler
 * vectorizes the loop of sample_internal.h for this instruction set, with the same bits. */
#include "ops/cpu/kernels_internal.h"
#include "ops/ref/sample_internal.h"

void ops_weigh_avx512(float *z, uint64_t *weight, const float *y, int32_t n, float max,
                      float inverse) {
    ops_weigh(z, weight, y, n, max, inverse);
}
