/* values.c - checks stored values: no element may be NaN or infinite, and scales are positive. */
#include <math.h>
#include <string.h>

#include "weights/bind_internal.h"

enum { CODES = 256 }; /* that are looked at together */

/* Codes are valid if, without the bits outside mask, they lie in [low, high]. */
typedef struct code_range {
    uint32_t mask, low, high;
} code_range;

/* Returns whether a code is not valid. The loops have no branches and, but for the last one, a
 * fixed length, so that compilers vectorize them: a large model has hundreds of gigabytes of codes,
 * and its scales are tens of gigabytes. */
#define ANY_OUTSIDE(type)                                                                 \
    static type farthest_##type(const uint8_t *data, size_t n, type mask, type low) {     \
        type most = 0;                                                                    \
        for (size_t i = 0; i < n; i++) {                                                  \
            type v;                                                                       \
            memcpy(&v, data + i * sizeof v, sizeof v);                                    \
            const type distance = (type)((type)(v & mask) - low);                         \
            most = distance > most ? distance : most;                                     \
        }                                                                                 \
        return most;                                                                      \
    }                                                                                     \
    static bool any_outside_##type(const uint8_t *data, size_t n, code_range r) {         \
        const type mask = (type)r.mask, low = (type)r.low, span = (type)(r.high - r.low); \
        bool bad = false;                                                                 \
        for (; n >= CODES; n -= CODES, data += CODES * sizeof(type)) {                    \
            bad |= farthest_##type(data, CODES, mask, low) > span;                        \
        }                                                                                 \
        return bad || farthest_##type(data, n, mask, low) > span;                         \
    }
ANY_OUTSIDE(uint8_t)
ANY_OUTSIDE(uint16_t)
ANY_OUTSIDE(uint32_t)

static bool any_outside(int32_t bits, const uint8_t *data, size_t n, code_range r) {
    switch (bits) {
    case 8:
        return any_outside_uint8_t(data, n, r);
    case 16:
        return any_outside_uint16_t(data, n, r);
    case 32:
        return any_outside_uint32_t(data, n, r);
    default: /* every code of smaller types is a number */
        return false;
    }
}

/* Returns the index of the first code that is not valid, or n. */
static size_t find_outside(int32_t bits, const uint8_t *data, size_t n, code_range r) {
    size_t i = 0;
    if (!any_outside(bits, data, n, r)) return n;
    while (!any_outside(bits, data + i * (size_t)bits / 8, 1, r)) i++;
    return i;
}

hd_status weights_check_values(const hd_checkpoint *c, const weights_bound *b, hd_err *err) {
    const hd_weight *w = &b->weight;
    const hd_dtype_row *row = &hd_dtypes[w->type];
    const size_t n = (size_t)w->rows * (size_t)w->cols;
    if (!row->decode) return HD_OK;
    const code_range numbers = {.mask = ~row->sign, .high = row->largest};
    const size_t i = find_outside(row->bits, w->data, n, numbers);
    if (i == n) return HD_OK;
    return weights_misfit(c, b->data, err, "bad value: [%zu, %zu] is NaN or infinite",
                          i / (size_t)w->cols, i % (size_t)w->cols);
}

static const char *fault_of(float v) {
    if (isnan(v)) return "NaN";
    if (isinf(v)) return "infinite";
    return v == 0 ? "zero" : "negative";
}

/* A zero scale is valid in NVFP4: exporters let the scale of a very small group underflow,
 * which means that the group is zero. */
hd_status weights_check_scales(const hd_checkpoint *c, const weights_bound *b, hd_err *err) {
    const hd_tensor *t = b->scale;
    if (!t || t->bytes == 0) return HD_OK;
    const hd_dtype_row *row = &hd_dtypes[t->dtype];
    const bool zero_is_bad = row->decode(0) == 0 && !b->format->zero_scales;
    const code_range positive = {.mask = UINT32_MAX, .low = zero_is_bad, .high = row->largest};
    const size_t n = t->bytes * 8 / (size_t)row->bits;
    const size_t i = find_outside(row->bits, t->data, n, positive);
    if (i == n) return HD_OK;
    return weights_misfit(c, t, err, "bad scale: [%zu, %zu] is %s", i / (size_t)t->shape[1],
                          i % (size_t)t->shape[1],
                          fault_of(hd_dtype_at(t->dtype, t->data, (int64_t)i)));
}
