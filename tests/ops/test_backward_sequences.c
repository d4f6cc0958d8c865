/* test_backward_sequences.c - gradients of matrices by sequences: micro-batches of them change no bit; and
 * products with transposed matrices of every format. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "ops/backward_fixture.h"

enum { SEQS = 5, MOST_ROWS = 1300 };

/* One is longer than a chunk, and one has one row. */
static const int32_t lengths[SEQS] = {17, 1, 1100, 130, 33};

static hd_seqs take_sequences(int32_t first, int32_t n, int32_t *rows) {
    int32_t *first_row = take_ints(n + 1);
    for (int32_t i = 0; i < n; i++) first_row[i + 1] = first_row[i] + lengths[first + i];
    *rows = first_row[n];
    return (hd_seqs){.n = n, .first_row = first_row};
}

/* ---- matrices ---- */

typedef struct matrix_shape {
    int32_t heads, n_rows, cols;
    bool parts;      /* memory for sums of parts */
    int32_t streams; /* rows for each of the batch's */
} matrix_shape;

static const matrix_shape matrix_shapes[] = {
    {1, 9,   31,  true,  1},
    {1, 9,   31,  false, 1},
    {1, 9,   31,  true,  4},
    {1, 9,   31,  false, 4},
    {1, 70,  130, true,  1},
    {3, 5,   66,  true,  1},
    {1, 500, 450, true,  1}, /* tiles enough */
};

/* The gradient after calls of `step` sequences each. */
static float *gradient_by(const matrix_shape *t, const float *left, const float *right,
                          int32_t step) {
    enum { PARTS = 40000 };
    const int64_t size = (int64_t)t->heads * t->n_rows * t->cols;
    float *dw = take_zeros(size), *parts = t->parts ? take_nan(PARTS) : NULL;
    int64_t row = 0;
    for (int32_t s = 0; s < SEQS; s += step) {
        int32_t rows;
        const hd_seqs seqs = take_sequences(s, s + step < SEQS ? step : SEQS - s, &rows);
        rows *= t->streams;
        hd_weight_grad_args a = {
            .dw = dw,
            .left = hd_f32(left + row * t->heads * t->n_rows),
            .right = hd_f32(right + row * t->heads * t->cols),
            .rows = rows,
            .heads = t->heads,
            .n_rows = t->n_rows,
            .cols = t->cols,
            .head_rows = t->n_rows,
            .left_head = t->n_rows,
            .right_head = t->cols,
            .sums = {seqs, parts, parts ? PARTS : 0}
        };
        backward_ops()->weight_grad(backward_stream(), &a);
        row += rows;
    }
    return dw;
}

static void check_close(const char *what, const float *x, const float *want, int64_t n) {
    double square = 0.0, off = 0.0;
    for (int64_t i = 0; i < n; i++) {
        square += (double)want[i] * (double)want[i];
        off += pow((double)x[i] - (double)want[i], 2);
    }
    if (!(sqrt(off) <= 1e-5 * sqrt(square))) {
        fail_msg("%s: %g away of %g", what, sqrt(off), sqrt(square));
    }
}

void sequences_are_summed_alone(void **state) {
    (void)state;
    hd_backward_ops ref;
    hd_backward_init_ref(&ref);
    for (size_t i = 0; i < HD_LEN(matrix_shapes); i++) {
        const matrix_shape *t = &matrix_shapes[i];
        int32_t rows;
        const hd_seqs all = take_sequences(0, SEQS, &rows);
        rows *= t->streams;
        const int64_t size = (int64_t)t->heads * t->n_rows * t->cols;
        const float *left = take_random((int64_t)rows * t->heads * t->n_rows, 1.0f);
        const float *right = take_random((int64_t)rows * t->heads * t->cols, 1.0f);
        float *want = take_zeros(size);
        ref.weight_grad(fix.stream[0], &(hd_weight_grad_args){.dw = want,
                                                              .left = hd_f32(left),
                                                              .right = hd_f32(right),
                                                              .rows = rows,
                                                              .heads = t->heads,
                                                              .n_rows = t->n_rows,
                                                              .cols = t->cols,
                                                              .head_rows = t->n_rows,
                                                              .left_head = t->n_rows,
                                                              .right_head = t->cols,
                                                              .sums = {.seqs = all}});
        const float *together = gradient_by(t, left, right, SEQS);
        check_close("weight_grad", together, want, size);
        check_bits("weight_grad of two", gradient_by(t, left, right, 2), together, size);
        check_bits("weight_grad of one", gradient_by(t, left, right, 1), together, size);
    }
}

/* ---- experts ---- */

enum { SLOTS = 3, TOP = 2 };

/* The second has tiles enough, so that chunks are longer. */
static const int32_t expert_shapes[][2] = {
    {20, 70  },
    {1,  2700}
};

/* Rows [row, row + rows) with two of three experts each, sorted by slot. */
static float *experts_by(const int32_t *shape, const int32_t *missing, const float *g,
                         const float *x, int32_t step, int64_t n_parts,
                         const hd_backward_ops *ops, hd_stream *stream) {
    const int32_t n_rows = shape[0], cols = shape[1];
    float *dw = take_zeros(SLOTS * n_rows * cols), *parts = n_parts ? take_nan(n_parts) : NULL;
    int32_t row = 0, rows;
    for (int32_t s = 0; s < SEQS; s += step, row += rows) {
        const hd_seqs seqs = take_sequences(s, s + step < SEQS ? step : SEQS - s, &rows);
        int32_t *offset = take_ints(SLOTS + 1), *assignment = take_ints(rows * TOP), n = 0;
        float *sorted = take((size_t)rows * TOP * (size_t)n_rows * sizeof *sorted);
        for (int32_t e = 0; e < SLOTS; e++) {
            for (int32_t r = 0; r < rows; r++) {
                if (missing[row + r] == e) continue;
                const int32_t choice = r * TOP + (e > missing[row + r] ? e - 1 : e);
                memcpy(sorted + (int64_t)n * n_rows, g + ((int64_t)row * TOP + choice) * n_rows,
                       (size_t)n_rows * sizeof *g);
                assignment[n++] = choice;
            }
            offset[e + 1] = n;
        }
        ops->grouped_weight_grad(stream, &(hd_grouped_weight_grad_args){
                                             .dw = dw,
                                             .g = hd_f32(sorted),
                                             .x = hd_f32(x + (int64_t)row * cols),
                                             .offset = offset,
                                             .assignment = assignment,
                                             .n_slots = SLOTS,
                                             .n_rows = n_rows,
                                             .cols = cols,
                                             .top_k = TOP,
                                             .rows = rows,
                                             .choice = assignment,
                                             .sums = {seqs, parts, n_parts}
        });
    }
    return dw;
}

static void check_experts(const int32_t *shape, const int32_t *missing) {
    hd_backward_ops ref;
    hd_backward_init_ref(&ref);
    const int64_t size = SLOTS * shape[0] * shape[1];
    const float *g = take_random(MOST_ROWS * TOP * shape[0], 1.0f);
    const float *x = take_random(MOST_ROWS * shape[1], 1.0f);
    const float *want = experts_by(shape, missing, g, x, SEQS, 0, &ref, fix.stream[0]);
    const float *own =
        experts_by(shape, missing, g, x, SEQS, 0, backward_ops(), backward_stream());
    check_close("grouped_weight_grad", own, want, size);
    for (int32_t step = 1; step <= SEQS; step++) { /* two chunks at once */
        check_bits("grouped_weight_grad",
                   experts_by(shape, missing, g, x, step, step == 2 ? 0 : 2 * size,
                              backward_ops(), backward_stream()),
                   own, size);
    }
}

void experts_are_summed_by_sequence(void **state) {
    (void)state;
    int32_t *missing = take_ints(MOST_ROWS);
    for (int32_t r = 0; r < MOST_ROWS; r++) missing[r] = random_below(8) ? 2 : 1;
    for (size_t i = 0; i < HD_LEN(expert_shapes); i++) check_experts(expert_shapes[i], missing);
}

/* ---- entries that attention sees ---- */

enum { KEY_DIM = 8, WINDOW = 5, EACH = 4 /* rows of an entry */ };

typedef struct entry_case {
    int32_t heads, n_selected; /* 0: a row sees all entries */
} entry_case;

static const entry_case entry_cases[] = {
    {2,  0 },
    {3,  20},
    {32, 40}, /* a tile of queries is of one row */
};

typedef struct entry_gradients {
    float *dq, *dentries;
} entry_gradients;

/* Calls of one sequence after another, or one of all; with memory for so many chunks. */
static entry_gradients entries_by(hd_attention_back_args a, const entry_case *t, bool apart,
                                  int32_t chunks, const hd_backward_ops *ops,
                                  hd_stream *stream) {
    const hd_paged recent = a.recent, entries = a.entries;
    const int64_t wide = (int64_t)MOST_ROWS * t->heads * KEY_DIM;
    float *q = (float *)a.q.data, *g = (float *)a.g.data, *out = (float *)a.out.data;
    const int32_t *selected = a.selected;
    entry_gradients to = {take_nan(wide), take_nan(MOST_ROWS * KEY_DIM)};
    int32_t row = 0, entry = 0, rows;
    for (int32_t s = 0; s < SEQS; s += apart ? 1 : SEQS) {
        a.seqs = take_sequences(s, apart ? 1 : SEQS, &rows);
        int32_t *pos = take_ints(rows), *first_entry = take_ints(a.seqs.n), n = 0;
        for (int32_t i = 0; i < a.seqs.n; i++) {
            first_entry[i] = n;
            n += lengths[s + i] / EACH;
            a.seqs.most_rows = hd_max_i32(a.seqs.most_rows, lengths[s + i]);
            for (int32_t p = 0; p < lengths[s + i]; p++) pos[a.seqs.first_row[i] + p] = p;
        }
        const int64_t at = (int64_t)row * t->heads * KEY_DIM;
        a.seqs.pos = pos;
        a.first_entry = first_entry;
        a.rows = rows;
        a.recent.table = recent.table + (int64_t)s * recent.table_stride;
        a.entries.table = entries.table + (int64_t)s * entries.table_stride;
        a.q = hd_f32(q + at);
        a.g = hd_f32(g + at);
        a.out = hd_f32(out + at);
        a.selected = selected ? selected + (int64_t)row * t->n_selected : NULL;
        a.dq = to.dq + at;
        a.dentries = to.dentries + (int64_t)entry * KEY_DIM;
        a.n_parts = (int64_t)chunks * (rows / EACH) * KEY_DIM;
        a.parts = chunks ? take_nan(a.n_parts) : NULL;
        ops->attention_back(stream, &a);
        row += rows;
        entry += n;
    }
    return to;
}

static void check_entries(const entry_case *t) {
    hd_backward_ops ref;
    int32_t n_entries[SEQS], rows = 0, n = 0;
    for (int32_t s = 0; s < SEQS; s++) {
        n_entries[s] = lengths[s] / EACH;
        rows += lengths[s];
        n += n_entries[s];
    }
    const int64_t wide = (int64_t)MOST_ROWS * t->heads;
    int32_t *selected = t->n_selected ? take_ints(MOST_ROWS * t->n_selected) : NULL;
    for (int32_t s = 0, r = 0; selected && s < SEQS; s++) {
        for (int32_t p = 0; p < lengths[s]; p++, r++) { /* every other one, from the last on */
            const int32_t seen = (p + 1) / EACH;
            const int32_t some = hd_min_i32(t->n_selected, (seen + 1) / 2);
            int32_t *to = selected + (int64_t)r * t->n_selected;
            for (int32_t i = 0; i < t->n_selected; i++) {
                to[i] = i < some ? seen - 1 - 2 * (some - 1 - i) : -1;
            }
        }
    }
    const hd_attention_back_args a = {.drecent = take_nan(MOST_ROWS * KEY_DIM),
                                      .lse = take_nan(wide),
                                      .delta = take_nan(wide),
                                      .g = hd_f32(take_random(wide * KEY_DIM, 1.0f)),
                                      .out = hd_f32(take_random(wide * KEY_DIM, 1.0f)),
                                      .q = hd_f32(take_random(wide * KEY_DIM, 1.0f)),
                                      .recent = take_pages(SEQS, lengths, 4, KEY_DIM, 1.0f),
                                      .entries = take_pages(SEQS, n_entries, 4, KEY_DIM, 1.0f),
                                      .selected = selected,
                                      .heads = t->heads,
                                      .k_dim = KEY_DIM,
                                      .v_dim = KEY_DIM,
                                      .window = WINDOW,
                                      .ratio = EACH,
                                      .n_selected = t->n_selected,
                                      .scale = 0.4f};
    hd_backward_init_ref(&ref);
    const int64_t n_q = (int64_t)rows * t->heads * KEY_DIM, n_all = (int64_t)n * KEY_DIM;
    const entry_gradients want = entries_by(a, t, false, 0, &ref, fix.stream[0]);
    const entry_gradients own = entries_by(a, t, false, 0, backward_ops(), backward_stream());
    check_close("attention_back, queries", own.dq, want.dq, n_q);
    check_close("attention_back, entries", own.dentries, want.dentries, n_all);
    for (int32_t chunks = 0; chunks <= 4; chunks++) {
        const entry_gradients other =
            entries_by(a, t, chunks % 2, chunks, backward_ops(), backward_stream());
        check_bits("attention_back, queries", other.dq, own.dq, n_q);
        check_bits("attention_back, entries", other.dentries, own.dentries, n_all);
    }
}

void entries_are_summed_by_sequence(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(entry_cases); i++) check_entries(&entry_cases[i]);
}

/* ---- vectors ---- */

enum { NORM_COLS = 70, RATIO = 4, WIDTH = 34, BIASES = 2 * RATIO * WIDTH };

/* Inputs of all rows; gradients, and memory for their parts. */
typedef struct vectors {
    const float *x, *g, *ape, *freq;
    float *dnorm, *dcompress, *dbias;
    float *parts;
    int64_t n_parts;
} vectors;

static void norm_sequences(const vectors *v, int32_t row, int32_t rows, hd_seqs seqs,
                           const hd_backward_ops *ops, hd_stream *stream) {
    const int64_t at = (int64_t)row * NORM_COLS;
    ops->rms_norm_back(stream, &(hd_rms_norm_back_args){
                                   .dx = hd_f32(take_nan(rows * NORM_COLS)),
                                   .dweight = v->dnorm,
                                   .g = hd_f32(v->g + at),
                                   .x = hd_f32(v->x + at),
                                   .scale = take((size_t)rows * sizeof(double)),
                                   .rows = rows,
                                   .cols = NORM_COLS,
                                   .eps = 1e-6f,
                                   .sums = {seqs, v->parts, v->n_parts}
    });
}

/* Blocks of RATIO rows with those before. */
static void compress_sequences(const vectors *v, int32_t row, int32_t rows, hd_seqs seqs,
                               const hd_backward_ops *ops, hd_stream *stream) {
    const int64_t at = (int64_t)row * 2 * WIDTH;
    int32_t *first_entry = take_ints(seqs.n + 1);
    float *g = take_nan((int64_t)rows / RATIO * WIDTH);
    for (int32_t i = 0; i < seqs.n; i++) {
        const int32_t first = seqs.first_row[i], n = (seqs.first_row[i + 1] - first) / RATIO;
        first_entry[i + 1] = first_entry[i] + n;
        for (int32_t e = 0; e < n; e++) { /* any numbers of its own */
            memcpy(g + (int64_t)(first_entry[i] + e) * WIDTH,
                   v->x + (int64_t)(row + first + e * RATIO) * NORM_COLS, WIDTH * sizeof *g);
        }
    }
    ops->compress_back(stream,
                       &(hd_compress_back_args){.dkv = take_nan((int64_t)rows * 2 * WIDTH),
                                                .dgate = take_nan((int64_t)rows * 2 * WIDTH),
                                                .dape = v->dbias,
                                                .dnorm = v->dcompress,
                                                .g = g,
                                                .kv = v->x + at,
                                                .gate = v->g + at,
                                                .ape = v->ape,
                                                .norm = v->ape,
                                                .freq = v->freq,
                                                .first_entry = first_entry,
                                                .seqs = seqs,
                                                .rows = rows,
                                                .width = WIDTH,
                                                .ratio = RATIO,
                                                .pairs = 1,
                                                .overlap = true,
                                                .eps = 1e-6f,
                                                .parts = v->parts,
                                                .n_parts = v->n_parts});
}

/* v's gradients after calls of `step` sequences each. */
static vectors vectors_by(vectors v, int32_t step, int64_t n_parts, const hd_backward_ops *ops,
                          hd_stream *stream) {
    int32_t row = 0, rows;
    v.dnorm = take_zeros(NORM_COLS);
    v.dcompress = take_zeros(WIDTH);
    v.dbias = take_zeros(BIASES);
    v.parts = n_parts ? take_nan(n_parts) : NULL;
    v.n_parts = n_parts;
    for (int32_t s = 0; s < SEQS; s += step, row += rows) {
        const hd_seqs seqs = take_sequences(s, s + step < SEQS ? step : SEQS - s, &rows);
        norm_sequences(&v, row, rows, seqs, ops, stream);
        compress_sequences(&v, row, rows, seqs, ops, stream);
    }
    return v;
}

void vectors_are_summed_by_sequence(void **state) {
    (void)state;
    hd_backward_ops ref;
    hd_backward_init_ref(&ref);
    const vectors in = {.x = take_random(MOST_ROWS * NORM_COLS, 1.0f),
                        .g = take_random(MOST_ROWS * NORM_COLS, 1.0f),
                        .ape = take_random(BIASES, 1.0f),
                        .freq = take_random(1, 1.0f)};
    const vectors want = vectors_by(in, SEQS, 0, &ref, fix.stream[0]);
    const vectors own = vectors_by(in, SEQS, 0, backward_ops(), backward_stream());
    check_close("rms_norm_back", own.dnorm, want.dnorm, NORM_COLS);
    check_close("compress_back, norm", own.dcompress, want.dcompress, WIDTH);
    check_close("compress_back, bias", own.dbias, want.dbias, BIASES);
    for (int32_t step = 1; step <= SEQS; step++) { /* two chunks of the biases at once */
        const vectors v = vectors_by(in, step, step == 2 ? 0 : 2 * BIASES + 1, backward_ops(),
                                     backward_stream());
        check_bits("rms_norm_back by sequences", v.dnorm, own.dnorm, NORM_COLS);
        check_bits("compress_back's norm by sequences", v.dcompress, own.dcompress, WIDTH);
        check_bits("compress_back's bias by sequences", v.dbias, own.dbias, BIASES);
    }
}

/* ---- products with transposed matrices ---- */

typedef struct product_shape {
    int32_t rows, heads, n_rows, cols, pad;
} product_shape;

static const product_shape product_shapes[] = {
    {1,   1, 7,   13,  0},
    {65,  1, 96,  128, 0},
    {130, 1, 128, 192, 4},
    {70,  3, 16,  64,  2},
};

static void check_product(const weight_format *f, const product_shape *t) {
    const int32_t head_rows = t->n_rows, x_head = t->n_rows + t->pad, out_head = t->cols;
    const hd_weight *w = take_weight(f, t->heads * head_rows, t->cols, false);
    const int64_t n = (int64_t)t->rows * t->heads * out_head;
    float *out = take_nan(n), *want = take_nan(n);
    hd_linear_heads_args a = {
        .out = hd_f32(want),
        .x = hd_f32(take_random((int64_t)t->rows * t->heads * x_head, 1.0f)),
        .w = w,
        .rows = t->rows,
        .heads = t->heads,
        .n_rows = t->n_rows,
        .head_rows = head_rows,
        .out_head = out_head,
        .x_head = x_head,
        .transpose = true};
    fix.table[0].linear_heads(fix.stream[0], &a);
    a.out = hd_f32(out);
    backward_ops()->linear_back(backward_stream(), &a);
    finish("linear_back", backward_stream());
    check_close("linear_back", out, want, n);
}

void transposed_products(void **state) {
    (void)state;
    if (!backward_ops()->linear_back) return; /* linear_heads does it */
    for (int32_t f = 0; f < n_weight_formats; f++) {
        for (size_t i = 0; i < HD_LEN(product_shapes); i++) {
            if (weight_formats[f].type == HD_E2M1 && product_shapes[i].cols % 2) continue;
            check_product(&weight_formats[f], &product_shapes[i]);
        }
    }
}
