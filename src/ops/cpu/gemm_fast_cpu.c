/* gemm_fast_cpu.c - --precision fast: selects the GEMMs that round x, and rounds x once for
 * all rows of W. */
#include "base/checked.h"
#include "ops/cpu/cpu_internal.h"

_Static_assert(sizeof(fast_space) <= OPS_STATE_BYTES, "it is a worker's scratch");

/* Small M computes as many rows of x as it has code for (small_m_count). */
enum { FAST_FINE_ROWS = 8 };

static bool takes_format(const fast_kernels *fast, const hd_weight *w) {
    switch (w->type) {
    case HD_BF16:
        return fast->takes_bf16 && !w->scale;
    case HD_E4M3:
        return !w->scale || w->block_cols == FAST_SEGMENT ||
               (w->block_cols == 32 && ops_fast_x_rows(w) >= FAST_FINE_ROWS);
    case HD_E2M1:
        return w->scale && (w->block_cols == 16 || w->block_cols == 32);
    default:
        return false;
    }
}

bool ops_fast_takes(const ops_kernels *k, const hd_weight *w) {
    return k->fast && takes_format(k->fast, w) && fast_scales(w) <= FAST_SCALES / FAST_ROWS &&
           ops_fast_x_rows(w) > 0;
}

int32_t ops_fast_x_rows(const hd_weight *w) {
    const int64_t rows = FAST_X_BYTES / 2 / fast_x_stride(w->cols);
    return rows < FAST_X_ROWS ? (int32_t)rows : FAST_X_ROWS;
}

void ops_multiply_fast(const ops_kernels *k, const ops_product *p, fast_space *s) {
    const hd_weight *w = p->w;
    const fast_product f = {.out = p->out,
                            .out_stride = p->out_stride,
                            .n_x = p->n_x,
                            .w = w,
                            .row = p->first_row,
                            .n_w = p->n_rows,
                            .row_bytes = (int64_t)w->cols * hd_dtype_bits(w->type) / 8,
                            .x_stride = fast_x_stride(w->cols),
                            .read_scales = ops_dequantizer(k, w->scale_type),
                            .space = s};
    for (int32_t i = 0; i < p->n_x && !p->same_x; i++) {
        k->fast->round(s->x + i * f.x_stride, s->x_scale + i * f.x_stride / FAST_SEGMENT,
                       p->x[i], w->cols, w->type);
    }
    k->fast->multiply(&f);
}
