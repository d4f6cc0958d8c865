/* buffer.c - growing lists of token ids and of bytes, each with a maximum. */
#include "tokenizer/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

/* Returns the capacity for n more elements of `width` bytes after `used`; false if it exceeds
 * the maximum. */
static bool next_capacity(size_t used, size_t n, size_t cap, size_t width, size_t *out,
                          size_t *bytes) {
    size_t need;
    if (!hd_add_size(used, n, &need)) return false;
    *out = cap < 64 ? 64 : cap;
    while (*out < need) {
        if (!hd_add_size(*out, *out / 2, out)) return false;
    }
    return hd_mul_size(*out, width, bytes);
}

hd_status hd_ids_append(hd_ids *v, const int32_t *ids, size_t n, hd_err *err) {
    if (v->max && n > v->max - v->n) {
        return HD_REFUSE(err, HD_EINVAL, "text_too_long", NULL,
                         "the text has more than %zu tokens", v->max);
    }
    if (n > v->cap - v->n) {
        size_t cap, bytes;
        int32_t *wider = next_capacity(v->n, n, v->cap, sizeof *v->ids, &cap, &bytes)
                             ? realloc(v->ids, bytes)
                             : NULL;
        if (!wider) return HD_FAIL(err, HD_ENOMEM, "no memory for %zu tokens", v->n);
        v->ids = wider;
        v->cap = cap;
    }
    if (n) memcpy(v->ids + v->n, ids, n * sizeof *ids);
    v->n += n;
    return HD_OK;
}

void hd_ids_deinit(hd_ids *v) {
    free(v->ids);
    *v = (hd_ids){0};
}

hd_status hd_bytes_append(hd_bytes *v, const void *data, size_t n, hd_err *err) {
    if (v->max && n > v->max - v->n) {
        return HD_REFUSE(err, HD_EINVAL, "text_too_long", NULL,
                         "the text has more than %zu bytes", v->max);
    }
    if (n > v->cap - v->n) {
        size_t cap, bytes;
        char *wider =
            next_capacity(v->n, n, v->cap, 1, &cap, &bytes) ? realloc(v->data, bytes) : NULL;
        if (!wider) return HD_FAIL(err, HD_ENOMEM, "no memory for %zu bytes of text", v->n);
        v->data = wider;
        v->cap = cap;
    }
    if (n) memcpy(v->data + v->n, data, n);
    v->n += n;
    return HD_OK;
}

void hd_bytes_deinit(hd_bytes *v) {
    free(v->data);
    *v = (hd_bytes){0};
}
