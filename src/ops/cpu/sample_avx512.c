/* sample_avx512.c - the weights of candidates, sixteen at a time: the loop of sample_internal.h as
 * the compiler vectorizes it for this instruction set, to the same bits. */
#include "ops/cpu/kernels_internal.h"
#include "ops/ref/sample_internal.h"

void ops_weigh_avx512(float *z, uint64_t *weight, const float *y, int32_t n, float max,
                      float inverse) {
    ops_weigh(z, weight, y, n, max, inverse);
}
