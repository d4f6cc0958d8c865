/* meter.c - times every operator of a table and counts what it had to move and compute. */
#include "ops/meter.h"

#include <string.h>

#include "base/checked.h"

/* An operator has no context, so the table in use is remembered here. */
static const hd_ops *metered;
static hd_meter *meter;
static hd_clock_fn *now;

/* What one call was. */
typedef struct cost {
    const hd_weight *w;
    int32_t rows, outs, ins;
    double bytes, flops;
} cost;

/* Bytes of `rows` rows of a stored matrix with their scales. */
static double stored_bytes(const hd_weight *w, double rows) {
    const double row = (double)w->cols * hd_dtype_bits(w->type) / 8;
    const double blocks = w->scale ? (double)hd_ceil_div(w->cols, w->block_cols) *
                                         hd_dtype_bits(w->scale_type) / 8 / w->block_rows
                                   : 0;
    return rows * (row + blocks);
}

static cost product(const hd_weight *w, double stored_rows, int32_t rows, int32_t outs,
                    int32_t ins, double times) {
    return (cost){.w = w,
                  .rows = rows,
                  .outs = outs,
                  .ins = ins,
                  .bytes = stored_bytes(w, stored_rows) +
                           (double)sizeof(float) * rows * times * ((double)outs + ins),
                  .flops = 2.0 * rows * times * outs * ins};
}

static cost linear_cost(const hd_linear_args *a) {
    return product(a->w, a->w->rows, a->rows, a->w->rows, a->w->cols, 1);
}

static cost linear_heads_cost(const hd_linear_heads_args *a) {
    return product(a->w, (double)a->heads * a->n_rows, a->rows,
                   a->transpose ? a->w->cols : a->n_rows, a->transpose ? a->n_rows : a->w->cols,
                   a->heads);
}

/* Only the experts that have a row are read. */
static cost linear_grouped_cost(const hd_linear_grouped_args *a) {
    int32_t used = 0;
    for (int32_t e = 0; e < a->n_experts; e++) used += a->offset[e + 1] > a->offset[e];
    return product(a->w, (double)used * a->w->rows, a->n_places, a->w->rows, a->w->cols, 1);
}

/* Keys that rows of one sequence share are read once: a prompt's last row sees them all. */
static cost keys_cost(int32_t rows, int32_t heads, int32_t width, double seen, double shared,
                      double per_key) {
    return (cost){.rows = rows,
                  .outs = heads,
                  .ins = width,
                  .bytes = shared * width * (double)sizeof(float),
                  .flops = 2.0 * heads * seen * per_key};
}

static double row_keys(const hd_attend_args *a, int32_t r) {
    const double window = a->window ? hd_min_i32(a->window, a->pos[r] + 1) : 0;
    if (a->ratio == 0) return window;
    const int32_t all = (a->pos[r] + 1) / a->ratio;
    return window + (a->selected ? hd_min_i32(a->n_selected, all) : all);
}

static cost attend_cost(const hd_attend_args *a) {
    double seen = 0, shared = 0;
    for (int32_t r = 0; r < a->rows; r++) {
        const double n = row_keys(a, r);
        seen += n;
        if (a->selected || r + 1 == a->rows || a->seq[r + 1] != a->seq[r]) shared += n;
    }
    return keys_cost(a->rows, a->heads, a->k_dim, seen, shared, (double)a->k_dim + a->v_dim);
}

static cost index_select_cost(const hd_index_select_args *a) {
    double seen = 0, shared = 0;
    for (int32_t r = 0; r < a->rows; r++) {
        const int32_t n = (a->pos[r] + 1) / a->ratio;
        seen += n;
        if (r + 1 == a->rows || a->seq[r + 1] != a->seq[r]) shared += n;
    }
    return keys_cost(a->rows, a->heads, a->keys.width, seen, shared, a->keys.width);
}

/* ---- the rest: rows and a width ---- */

#define SMALL(op, rows_, width)                         \
    static cost op##_cost(const hd_##op##_args *a) {    \
        return (cost){.rows = (rows_), .ins = (width)}; \
    }
SMALL(embed, a->rows, a->table->cols)
SMALL(gather, a->rows, a->cols)
SMALL(add, a->rows, a->cols)
SMALL(rms_norm, a->rows, a->cols)
SMALL(layer_norm, a->rows, a->cols)
SMALL(rope_table, a->rows, 2 * a->pairs)
SMALL(rope, a->rows, 2 * a->pairs * a->heads)
SMALL(store, a->rows, a->pool.width)
SMALL(compress, a->seqs.first_row[a->seqs.n], a->entries.width)
SMALL(route, a->rows, a->rule.n_experts)
SMALL(permute, a->rows, a->n_experts)
SMALL(swiglu, a->rows, a->cols)
SMALL(combine, a->rows, a->cols)
SMALL(hc_pre, a->rows, a->hc * a->cols)
SMALL(hc_post, a->rows, a->hc * a->cols)
SMALL(hc_head, a->rows, a->hc * a->cols)
SMALL(count_tokens, a->n, a->vocab)
SMALL(sample, a->rows, a->vocab)
SMALL(verify, a->n, 0)
SMALL(argmax, a->rows, a->vocab)
SMALL(lay_step, a->n, 0)
SMALL(settle_step, a->n, 0)
SMALL(lay_draft, a->n, 0)
SMALL(carry, 1, a->most)
SMALL(stamp, a->at != NULL, 0)
#undef SMALL

/* ---- noting ---- */

static hd_meter_line *find_line(const char *op, const cost *c) {
    const char *format = c->w ? hd_dtype_name(c->w->type) : "";
    for (int32_t i = 0; i < meter->n; i++) {
        hd_meter_line *l = &meter->line[i];
        if (l->op == op && l->format == format && l->rows == c->rows && l->outs == c->outs &&
            l->ins == c->ins) {
            return l;
        }
    }
    if (meter->n == HD_METER_LINES) return NULL;
    hd_meter_line *l = &meter->line[meter->n++];
    *l = (hd_meter_line){
        .op = op, .format = format, .rows = c->rows, .outs = c->outs, .ins = c->ins};
    return l;
}

static void note(const char *op, const cost *c, int64_t ns) {
    hd_meter_line *l = find_line(op, c);
    if (!l) {
        meter->lost++;
        return;
    }
    l->calls++;
    l->seconds += (double)ns * 1e-9;
    l->bytes += c->bytes;
    l->flops += c->flops;
}

#define X(op)                                                         \
    static void op##_metered(hd_stream *s, const hd_##op##_args *a) { \
        static const char name[] = #op;                               \
        const int64_t begun = now();                                  \
        metered->op(s, a);                                            \
        const int64_t ns = now() - begun;                             \
        const cost c = op##_cost(a);                                  \
        note(name, &c, ns);                                           \
    }
HD_OP_LIST(X)
#undef X

void hd_meter_init(hd_meter *m, hd_ops *out, const hd_ops *inner, hd_clock_fn *clock) {
    metered = inner;
    meter = m;
    now = clock;
    hd_meter_reset(m);
    *out = (hd_ops){.name = inner->name,
                    .act_bytes = inner->act_bytes,
#define X(op) .op = op##_metered,
                    HD_OP_LIST(X)
#undef X
    };
}

void hd_meter_reset(hd_meter *m) {
    m->n = 0;
    m->lost = 0;
}
