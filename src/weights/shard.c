/* shard.c - shards a stored matrix: a rectangle of it, rows in place, columns copied. Rows may
 * begin inside a quantization block. */
#include "weights/shard_internal.h"

#include <stdlib.h>

#include "base/checked.h"

void *weights_take_piece(weights_pieces *p, size_t bytes, hd_err *err) {
    if (p->taken < p->n) return p->blocks[p->taken++].data;
    if (p->n == p->cap) {
        const size_t cap = p->cap ? 2 * p->cap : 64;
        hd_block *more = realloc(p->blocks, cap * sizeof *more);
        if (!more) {
            HD_FAIL(err, HD_ENOMEM, "no memory for a piece of %zu bytes", bytes);
            return NULL;
        }
        p->blocks = more;
        p->cap = cap;
    }
    hd_block *block = &p->blocks[p->n];
    if (hd_block_init(block, bytes + 1, "a piece", err) != HD_OK) return NULL;
    p->taken = ++p->n;
    return block->data;
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
    uint8_t *copy = weights_take_piece(pieces, (size_t)g->rows * g->bytes, err);
    if (!copy) return HD_ENOMEM;
    for (int32_t r = 0; r < g->rows; r++) {
        memcpy(copy + (size_t)r * g->bytes, first + (size_t)r * g->row_bytes, g->bytes);
    }
    *out = copy;
    return HD_OK;
}

static int32_t common_divisor(int32_t a, int32_t b) {
    return b ? common_divisor(b, a % b) : a;
}

/* Scales of rows that begin inside a block: smaller blocks, with the scales of theirs repeated. */
static hd_status repeat_scales(hd_weight *w, const hd_slice *s, size_t row_bytes, size_t from,
                               size_t bytes, weights_pieces *pieces, hd_err *err) {
    const uint8_t *scale = w->scale;
    const int32_t small = common_divisor(w->block_rows, s->row0);
    const int32_t n = (int32_t)hd_ceil_div(s->rows, small);
    uint8_t *copy = weights_take_piece(pieces, (size_t)n * bytes, err);
    if (!copy) return HD_ENOMEM;
    for (int32_t i = 0; i < n; i++) {
        const size_t block = (size_t)((s->row0 + i * small) / w->block_rows);
        memcpy(copy + (size_t)i * bytes, scale + block * row_bytes + from, bytes);
    }
    w->scale = copy;
    w->block_rows = small;
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
        if (s->row0 % w->block_rows) {
            HD_TRY(repeat_scales(w, s, scale.row_bytes, scale.from, scale.bytes, pieces, err));
        } else {
            HD_TRY(narrow(&w->scale, &scale, pieces, err));
        }
    }
    w->rows = s->rows;
    w->cols = s->cols;
    return HD_OK;
}

size_t weights_pieces_discard(weights_pieces *p) {
    size_t bytes = 0;
    for (size_t i = 0; i < p->n; i++) bytes += hd_block_discard(&p->blocks[i]);
    return bytes;
}

void weights_pieces_deinit(weights_pieces *p) {
    for (size_t i = 0; i < p->n; i++) hd_block_deinit(&p->blocks[i]);
    free(p->blocks);
    *p = (weights_pieces){0};
}
