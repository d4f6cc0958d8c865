/* resident.c - which pools HiSparse keeps in host memory, and the memory of their buffers. */
#include "kv/resident.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_ROWS = 1 << 27 };

hd_pool_kind hd_kv_selected_pool(const hd_model_spec *spec, int32_t layer) {
    switch (spec->layers[layer].attention) {
    case HD_ATTN_MLA_SPARSE:
        return HD_POOL_LATENT;
    case HD_ATTN_CSA:
    case HD_ATTN_CSA2_FULL:
        return HD_POOL_COMPRESSED;
    default:
        return HD_N_POOL_KINDS;
    }
}

hd_status hd_kv_resident_rows(int32_t *rows, const char *text, const hd_model_spec *spec,
                              hd_err *err) {
    char *end = NULL;
    *rows = 0;
    if (!text || strcmp(text, "off") == 0) return HD_OK;
    const long long n = strtoll(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || n > MOST_ROWS) {
        return HD_FAIL(err, HD_EINVAL,
                       "hisparse is '%s'; must be off, a number of rows up to %d, or where an "
                       "engine runs auto",
                       text, MOST_ROWS);
    }
    if (hd_kv_selected_bytes(spec, spec->n_layers, HD_F32) == 0) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "hisparse is %lld: this model's attention reads all entries, and selects "
            "none",
            n);
    }
    *rows = (int32_t)n;
    if (n >= spec->index_topk) return HD_OK;
    return HD_FAIL(err, HD_EINVAL,
                   "hisparse is %lld; a position selects %d entries, and a buffer has at least "
                   "as many rows",
                   n, spec->index_topk);
}

static void *take(hd_arena *a, int64_t n, size_t each) {
    return hd_arena_take(a, (size_t)n * each, 256);
}

void hd_resident_scratch_place(hd_resident_scratch *x, hd_arena *a, int32_t n_rows) {
    int32_t **const all[] = {&x->missed, &x->victim, &x->selected};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        *all[i] = take(a, n_rows, sizeof **all[i]);
    }
    x->zero = take(a, 1, sizeof *x->zero);
}

void hd_resident_place(hd_resident *r, hd_arena *a, const hd_resident_scratch *x,
                       size_t entry_bytes, int32_t n_rows, int64_t n_entries) {
    r->rows.data = take(a, n_rows, entry_bytes);
    r->n = n_rows;
    r->row_of = take(a, n_entries, sizeof *r->row_of);
    r->owner = take(a, n_rows, sizeof *r->owner);
    r->used = take(a, n_rows, sizeof *r->used);
    r->state = take(a, 1, sizeof *r->state);
    r->missed = x->missed;
    r->victim = x->victim;
}
