/* rope.c - rotary frequencies with YaRN, and the scale of indexer scores.
 *
 * Peng et al., "YaRN" (2023), eq. 17 to 22, in the form of models.md 2.1.5. */
#include <math.h>

#include "model/model_internal.h"

/* The dimension whose wavelength turns `turns` times within the original context. */
static double turning_dim(const hd_rope_spec *r, double turns, double dim) {
    const double tau = 6.283185307179586;
    return dim * log(r->original_len / (tau * turns)) / (2.0 * log(r->theta));
}

void model_rope_freqs(const hd_rope_spec *rope, int32_t pairs, float *freq) {
    const double dim = 2.0 * pairs;
    double low = 0.0, high = 0.0;
    if (rope->factor > 1.0) {
        low = fmax(floor(turning_dim(rope, rope->beta_fast, dim)), 0.0);
        high = fmin(ceil(turning_dim(rope, rope->beta_slow, dim)), dim - 1.0);
        if (low == high) high += 0.001;
    }
    for (int32_t i = 0; i < pairs; i++) {
        double f = pow(rope->theta, -2.0 * i / dim);
        if (rope->factor > 1.0) {
            double ramp = fmin(fmax((i - low) / (high - low), 0.0), 1.0);
            f = f * (1.0 - ramp) + f / rope->factor * ramp;
        }
        freq[i] = (float)f;
    }
}

float model_index_scale(const hd_model_spec *spec) {
    if (!spec->index_heads) return 1.0f;
    return (float)(1.0 / sqrt((double)spec->index_dim * spec->index_heads));
}
