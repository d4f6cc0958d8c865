/* shard.c - shards a stored matrix: a rectangle of it, rows in place, columns copied. */
#include "weights/shard_internal.h"

#include <stdlib.h>

#include "base/checked.h"

static void *take_piece(weights_pieces *p, size_t bytes, hd_err *err) {
    if (p->n == p->cap) {
        const size_t cap = p->cap ? 2 * p->cap : 64;
        void **more = realloc(p->blocks, cap * sizeof *more);
        if (!more) {
            HD_FAIL(err, HD_ENOMEM, "no memory for a piece of %zu bytes", bytes);
            return NULL;
        }
        p->blocks = more;
        p->cap = cap;
    }
    void *block = malloc(bytes + 1);
    if (block) {
        p->blocks[p->n++] = block;
    } else {
        HD_FAIL(err, HD_ENOMEM, "no memory for a piece of %zu bytes", bytes);
    }
    return block;
}

/* An array of rows: a matrix's elements, or its scales. */
typedef struct grid {
    const uint8_t *data;
    size_t row_bytes;
    int32_t row0, rows;
    size_t from, bytes; /* of each row */
} grid;

static hd_status narrow(const void **out, const grid *g, weights_pieces *pieces, hd_err *err) {
    const uint8_t *first = g->data + (size_t)g->row0 * g->row_bytes + g->from;
    if (g->bytes == g->row_bytes) {
        *out = first;
        return HD_OK;
    }
    uint8_t *copy = take_piece(pieces, (size_t)g->rows * g->bytes, err);
    if (!copy) return HD_ENOMEM;
    for (int32_t r = 0; r < g->rows; r++) {
        memcpy(copy + (size_t)r * g->bytes, first + (size_t)r * g->row_bytes, g->bytes);
    }
    *out = copy;
    return HD_OK;
}

hd_status weights_shard(hd_weight *w, const hd_slice *s, weights_pieces *pieces, hd_err *err) {
    const grid data = {.data = w->data,
                       .row_bytes = hd_dtype_bytes(w->type, w->cols),
                       .row0 = s->row0,
                       .rows = s->rows,
                       .from = hd_dtype_bytes(w->type, s->col0),
                       .bytes = hd_dtype_bytes(w->type, s->cols)};
    HD_TRY(narrow(&w->data, &data, pieces, err));
    if (w->scale) {
        const grid scale = {
            .data = w->scale,
            .row_bytes = hd_dtype_bytes(w->scale_type, hd_ceil_div(w->cols, w->block_cols)),
            .row0 = s->row0 / w->block_rows,
            .rows = (int32_t)hd_ceil_div(s->rows, w->block_rows),
            .from = hd_dtype_bytes(w->scale_type, s->col0 / w->block_cols),
            .bytes = hd_dtype_bytes(w->scale_type, hd_ceil_div(s->cols, w->block_cols))};
        HD_TRY(narrow(&w->scale, &scale, pieces, err));
    }
    w->rows = s->rows;
    w->cols = s->cols;
    return HD_OK;
}

void weights_pieces_deinit(weights_pieces *p) {
    for (size_t i = 0; i < p->n; i++) free(p->blocks[i]);
    free(p->blocks);
    *p = (weights_pieces){0};
}
