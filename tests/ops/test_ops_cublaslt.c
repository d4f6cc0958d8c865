/* test_ops_cublaslt.c - --no-batch-invariance: GEMMs of many rows by cuBLASLt on a GPU.
 *
 * The test rounds the operands again, as docs/numerics.md says, and the reference multiplies
 * them. The remaining difference is the order of float32 sums, and the few bits that the tensor
 * cores keep of a sum of 128 FP8 products. Scales in wrong places then show; rounding x alone
 * would hide them. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fakes/gpus.h"
#include "ops/profile/op_timer.h"

enum { SPAN = 128, SMALL_SCRATCH = 2000 };

/* Of |want| + rms: tensor cores keep 13 bits of the sum of a span, and all bits of bfloat16
 * sums. */
static const double fp8_tolerance = 2e-3, bf16_tolerance = 1e-4;

typedef struct shape {
    int32_t format, rows, outs, cols, heads;
    int32_t more; /* columns between rows of the output */
} shape;

/* a device of its own: its large GEMMs are cuBLASLt's */
typedef struct rig {
    hd_ops ops;
    hd_device *device;
    hd_stream *stream;
} rig;

static bool open_rig(rig *r) {
    const hd_ops_options options = {
        .precision = HD_FAST, .no_batch_invariance = true, .cuda_path = gpus_path("cuda")};
    hd_err err = {0};
    *r = (rig){0};
    fix.n_cases = 1; /* no matrices at odd addresses */
    if (!fix.gpu) return false;
    if (hd_ops_open(&r->ops, &r->device, "cuda", &options, &err) != HD_OK) {
        hd_device_close(r->device);
        print_message("[  SKIPPED ] %s\n", err.msg);
        skip();
    }
    assert_int_equal(hd_stream_open(&r->stream, r->device, NULL), HD_OK);
    return true;
}

static void reserve(const rig *r, int32_t keys) {
    const size_t bytes = hd_ops_scratch_bytes(keys, keys);
    assert_int_equal(hd_stream_reserve(r->stream, bytes, NULL), HD_OK);
}

static void close_rig(rig *r) {
    hd_stream_close(r->stream);
    hd_device_close(r->device);
}

static void *on_device(const rig *r, const void *from, size_t bytes) {
    void *p;
    assert_int_equal(hd_device_alloc(r->device, &p, bytes, "a test", NULL), HD_OK);
    hd_stream_upload(r->stream, p, from, bytes);
    return p;
}

/* ---- x as the library multiplies it ---- */

static void round_fp8(float *x) {
    float most = 1e-30f;
    for (int32_t i = 0; i < SPAN; i++) most = fmaxf(most, fabsf(x[i]));
    const float times = 448.0f / most, scale = most / 448.0f;
    for (int32_t i = 0; i < SPAN; i++)
        x[i] = hd_e4m3_to_f32(hd_f32_to_e4m3(x[i] * times)) * scale;
}

/* FP8 if the library computes the row: of FP8 matrices it computes multiples of four rows, on Hopper. */
static float *rounded(const rig *r, const float *x, const shape *sh) {
    const int32_t width = sh->cols * sh->heads;
    const bool sm90 = hd_device_cuda_path(r->device) == HD_CUDA_SM90;
    float *y = take_copy(x, (size_t)sh->rows * (size_t)width * sizeof *y);
    const int32_t by_library = sh->format == BF16_PLAIN || !sm90 ? 0 : sh->rows / 4 * 4;
    for (int64_t i = 0; i < (int64_t)sh->rows * width; i++) {
        if (i / width >= by_library) {
            y[i] = hd_bf16_to_f32(hd_f32_to_bf16(y[i]));
        } else if (i % SPAN == 0) {
            round_fp8(y + i);
        }
    }
    return y;
}

/* Spans of many sizes, one of them zeros. */
static float *take_spans(int64_t n) {
    float *x = take_random(n, 1.0f);
    for (int64_t i = 0; i < n; i++) {
        const int64_t span = i / SPAN;
        x[i] *= span % 37 == 5 ? 0.0f : ldexpf(1.0f, (int)(span * 7 % 11) - 5);
    }
    return x;
}

/* ---- running ---- */

typedef struct work {
    const hd_ops *ops;
    const shape *sh;
    hd_weight w;
    const float *x;
    float *out;
    int32_t first, rows;
} work;

static int32_t out_stride(const shape *sh) {
    return sh->outs * sh->heads + sh->more;
}

static void run(hd_stream *s, void *arg) {
    const work *k = arg;
    const shape *sh = k->sh;
    const hd_rows x = hd_f32(k->x + (int64_t)k->first * sh->cols * sh->heads);
    const hd_rows out = hd_rows_strided(hd_f32(k->out), out_stride(sh));
    if (sh->heads == 1) {
        k->ops->linear(s, &(hd_linear_args){.out = out, .x = x, .w = &k->w, .rows = k->rows});
        return;
    }
    k->ops->linear_heads(s, &(hd_linear_heads_args){.out = out,
                                                    .x = x,
                                                    .w = &k->w,
                                                    .rows = k->rows,
                                                    .heads = sh->heads,
                                                    .n_rows = sh->outs,
                                                    .head_rows = sh->outs,
                                                    .out_head = sh->outs,
                                                    .x_head = sh->cols});
}

/* Columns between rows are unchanged: NaN. */
static float *output(const work *k) {
    return take_nan((int64_t)k->rows * out_stride(k->sh));
}

static float *result(work k, hd_stream *s) {
    k.out = output(&k);
    run(s, &k);
    finish("a product", s);
    return k.out;
}

static void check_graph(const rig *r, work k, const float *want) {
    hd_err err = {0};
    k.out = output(&k);
    if (hd_time_ops(r->stream, r->device, run, &k, 1, 0, NULL, &err) != HD_OK)
        fail_msg("%s", err.msg);
    check_bits("recorded", k.out, want, (int64_t)k.rows * out_stride(k.sh));
}

/* Compares with the exact table on all rows, and with the reference on some. */
static void check_result(const char *what, const work *k, const float *got, const float *x) {
    const shape *sh = k->sh;
    const int32_t rows[] = {0, sh->rows / 2, sh->rows - 1}, width = out_stride(sh);
    const double tolerance = sh->format == BF16_PLAIN ? bf16_tolerance : fp8_tolerance;
    work exact = *k;
    exact.ops = &fix.table[fix.n_tables - 1];
    exact.x = x;
    check_near(what, got, result(exact, fix.gpu_stream), (int64_t)sh->rows * width, tolerance);
    exact.ops = &fix.table[0];
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        exact.first = rows[i];
        exact.rows = 1;
        const float *want = result(exact, fix.stream[0]);
        check_near(what, got + (int64_t)rows[i] * width, want, width, tolerance);
    }
}

static hd_weight uploaded(const rig *r, const hd_weight *w) {
    hd_weight d = *w;
    const size_t n = (size_t)w->rows * (size_t)w->cols;
    d.data = on_device(r, w->data, n * (size_t)hd_dtype_bits(w->type) / 8);
    if (!w->scale) return d;
    const int32_t rows = (w->rows + w->block_rows - 1) / w->block_rows;
    const int32_t cols = (w->cols + w->block_cols - 1) / w->block_cols;
    const size_t scales = (size_t)rows * (size_t)cols;
    d.scale = on_device(r, w->scale, scales * (size_t)hd_dtype_bits(w->scale_type) / 8);
    return d;
}

static void check_shape(const rig *r, const shape *sh) {
    char what[128];
    snprintf(what, sizeof what, "%d rows, %d x %d x %d %s, library", sh->rows, sh->heads,
             sh->outs, sh->cols, weight_format_of(sh->format)->name);
    const hd_weight *w =
        take_weight(weight_format_of(sh->format), sh->outs * sh->heads, sh->cols, false);
    const int64_t n = (int64_t)sh->rows * sh->cols * sh->heads;
    const float *x = take_spans(n);
    work k = {.ops = &r->ops, .sh = sh, .w = *w, .x = x, .rows = sh->rows};
    const work on_host = k;
    k.w = uploaded(r, w);
    k.x = on_device(r, x, (size_t)n * sizeof *x);
    const float *got = result(k, r->stream);
    check_result(what, &on_host, got, rounded(r, x, sh));
    check_bits("once more", result(k, r->stream), got, (int64_t)sh->rows * out_stride(sh));
    check_graph(r, k, got);
    hd_device_release(r->device, (void *)(uintptr_t)k.w.data);
    hd_device_release(r->device, (void *)(uintptr_t)k.w.scale);
    hd_device_release(r->device, (void *)(uintptr_t)k.x);
    forget_all(NULL);
}

void cublaslt_products(void **state) {
    (void)state;
    static const shape shapes[] = {
        {FP8_E8M0,   263,  200,  640,   1, 8}, /* an edge of W, five spans, rows after a multiple of four */
        {BF16_PLAIN, 257,  136,  264,   1, 4},
        {FP8_F32,    257,  2112, 7168,  1, 0}, /* V3 q_a, kv_a */
        {FP8_F32,    67,   576,  7168,  1, 0},
        {FP8_F32,    1000, 2048, 1536,  1, 0}, /* q_b */
        {FP8_F32,    260,  1024, 16384, 1, 0}, /* o */
        {FP8_F32,    258,  896,  18432, 1, 0}, /* down */
        {BF16_PLAIN, 257,  256,  7168,  1, 0}, /* router */
        {FP8_E8M0,   1000, 4096, 1024,  1, 0}, /* V4 q_b */
        {FP8_E8M0,   300,  1024, 8192,  1, 0}, /* o_b */
        {FP8_E8M0,   301,  64,   4096,  1, 0},
        {FP8_E8M0,   260,  1024, 4096,  2, 0}, /* o_a */
        {BF16_PLAIN, 1000, 1024, 4096,  1, 0}, /* compressor */
    };
    rig r;
    if (!open_rig(&r)) return;
    reserve(&r, 1 << 15);
    for (size_t i = 0; i < (fix.brief ? 2 : HD_LEN(shapes)); i++) check_shape(&r, &shapes[i]);
    close_rig(&r);
}

/* more rows than the scratch holds at once */
void cublaslt_in_pieces(void **state) {
    (void)state;
    static const shape shapes[] = {
        {BF16_PLAIN, 1001, 128, 4096, 1, 0},
        {FP8_E8M0,   1203, 128, 4096, 1, 0},
    };
    rig r;
    if (fix.brief || !open_rig(&r)) return;
    reserve(&r, SMALL_SCRATCH);
    for (size_t i = 0; i < HD_LEN(shapes); i++) check_shape(&r, &shapes[i]);
    close_rig(&r);
}

/* Few rows, other formats, and unaligned operands: the bits of `fast`. */
void library_leaves_the_rest(void **state) {
    (void)state;
    static const shape shapes[] = {
        {FP8_F32,    63,  384, 512, 1, 0},
        {BF16_PLAIN, 63,  128, 512, 1, 0},
        {FP4_E8M0,   300, 128, 512, 1, 0},
        {FP8_F32,    300, 129, 512, 1, 0}, /* rows of the output at any address */
        {FP8_F32,    300, 128, 576, 1, 0}, /* half a span */
        {FP8_F32,    300, 128, 512, 4, 0}, /* small heads */
    };
    rig r;
    if (!open_rig(&r)) return;
    reserve(&r, 1 << 15);
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const shape *sh = &shapes[i];
        const hd_weight *w =
            take_weight(weight_format_of(sh->format), sh->outs * sh->heads, sh->cols, false);
        work k = {.ops = &r.ops,
                  .sh = sh,
                  .w = *w,
                  .x = take_random((int64_t)sh->rows * sh->cols * sh->heads, 1.0f),
                  .rows = sh->rows};
        const float *got = result(k, r.stream);
        k.ops = &fix.gpu_fast;
        check_bits(weight_format_of(sh->format)->name, got, result(k, fix.gpu_stream),
                   (int64_t)sh->rows * out_stride(sh));
    }
    close_rig(&r);
}

/* Options that are refused before a device is opened. */
void library_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *backend;
        hd_precision precision;
        const char *why;
    } cases[] = {
        {"cpu",  HD_FAST,  "backend 'cpu'" },
        {"ref",  HD_EXACT, "backend 'ref'" },
        {"cuda", HD_EXACT, "precision fast"},
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        const hd_ops_options options = {.precision = cases[i].precision,
                                        .no_batch_invariance = true};
        hd_err err = {0};
        hd_ops ops;
        hd_device *device;
        assert_int_equal(hd_ops_open(&ops, &device, cases[i].backend, &options, &err),
                         HD_EUNSUPPORTED);
        assert_null(device);
        assert_non_null(strstr(err.msg, "no-batch-invariance"));
        assert_non_null(strstr(err.msg, cases[i].why));
    }
}
