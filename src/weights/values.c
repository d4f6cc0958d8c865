/* values.c - checks that no stored value of a tensor is NaN or infinite, in one pass. */
#include <string.h>

#include "weights/bind_internal.h"

/* Detects codes of NaN or infinity. Each loop is free of branches, because a large model has
 * hundreds of gigabytes of them. */
static bool any_bad_8(const uint8_t *data, size_t n) {
    uint8_t bad = 0;
    for (size_t i = 0; i < n; i++) bad |= (data[i] & 0x7f) == 0x7f;
    return bad;
}

static bool any_bad_16(const uint8_t *data, size_t n, uint16_t exponent) {
    uint8_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint16_t v;
        memcpy(&v, data + 2 * i, sizeof v);
        bad |= (v & exponent) == exponent;
    }
    return bad;
}

static bool any_bad_32(const uint8_t *data, size_t n) {
    uint8_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t v;
        memcpy(&v, data + 4 * i, sizeof v);
        bad |= (v & 0x7f800000u) == 0x7f800000u;
    }
    return bad;
}

static bool any_bad(hd_dtype type, const uint8_t *data, size_t n) {
    switch (type) {
    case HD_E4M3:
        return any_bad_8(data, n);
    case HD_F16:
        return any_bad_16(data, n, 0x7c00);
    case HD_BF16:
        return any_bad_16(data, n, 0x7f80);
    case HD_F32:
        return any_bad_32(data, n);
    case HD_NONE:
    case HD_E8M0: /* scales are checked as scales */
    case HD_E2M1: /* every code is a number */
    case HD_I8:
    case HD_U8:
    case HD_I32:
    case HD_I64:
    case HD_N_DTYPES:
        return false;
    }
    return false;
}

hd_status weights_check_values(const hd_checkpoint *c, const weights_bound *b, hd_err *err) {
    const hd_weight *w = &b->weight;
    const int32_t bits = hd_dtype_bits(w->type);
    const size_t n = bits ? (size_t)w->rows * (size_t)w->cols : 0;
    if (n == 0 || !any_bad(w->type, w->data, n)) return HD_OK;
    for (size_t i = 0; i < n; i++) {
        const uint8_t *at = (const uint8_t *)w->data + i * (size_t)bits / 8;
        if (!any_bad(w->type, at, 1)) continue;
        return weights_misfit(c, b->data, err, "bad value: [%zu, %zu] is NaN or infinite",
                              i / (size_t)w->cols, i % (size_t)w->cols);
    }
    return HD_OK;
}
