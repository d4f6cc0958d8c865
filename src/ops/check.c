/* check.c - the check of the types, scales and strides of an operator's rows. */
#include "ops/check_internal.h"

#include <stdio.h>

static bool has_scales(hd_dtype type) {
    return hd_dtype_bits(type) <= 8;
}

/* Writes what is wrong with x, or nothing. */
static void find_fault(char *out, size_t size, uint32_t types, hd_rows_kind kind,
                       const hd_rows *x) {
    *out = '\0';
    if (!(types >> x->type & 1)) {
        size_t n = (size_t)snprintf(out, size, "has type %s, and this backend takes only",
                                    hd_dtype_name(x->type));
        for (int type = 0; type < HD_N_DTYPES && n < size; type++) {
            if (!(types >> type & 1)) continue;
            n += (size_t)snprintf(out + n, size - n, " %s", hd_dtype_name((hd_dtype)type));
        }
    } else if (!x->scale != !(has_scales(x->type) && kind <= HD_ROWS_STRIDED)) {
        snprintf(out, size, "has type %s %s scales", hd_dtype_name(x->type),
                 x->scale ? "with" : "without");
    } else if (x->stride != 0 && kind != HD_ROWS_STRIDED) {
        snprintf(out, size, "has a stride of %lld, and must be contiguous",
                 (long long)x->stride);
    }
}

bool ops_takes(hd_stream *s, const ops_types *types, const char *op, const char *field,
               hd_rows_kind kind, const hd_rows *x) {
    if (!x->data) return true;
    const uint32_t only_f32 = 1u << HD_F32;
    const uint32_t taken = kind == HD_ROWS_STATE  ? only_f32
                           : kind == HD_ROWS_POOL ? types->pool
                           : kind == HD_ROWS_KEYS ? types->keys
                                                  : types->act;
    char fault[160], text[256];
    find_fault(fault, sizeof fault, taken, kind, x);
    if (!*fault) return true;
    snprintf(text, sizeof text, "%s: %s %s", op, field, fault);
    hd_stream_fail(s, HD_EUNSUPPORTED, text);
    return false;
}

bool ops_fits_buffer(hd_stream *s, const hd_resident_args *a) {
    char text[100];
    if ((int64_t)a->rows * a->top_k <= a->buffer.n) return true;
    snprintf(text, sizeof text, "resident: %d rows of %d choices for a buffer of %d", a->rows,
             a->top_k, a->buffer.n);
    hd_stream_fail(s, HD_EINVAL, text);
    return false;
}
