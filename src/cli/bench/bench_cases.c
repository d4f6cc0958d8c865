/* bench_cases.c - cases of `hadal bench ops` without a config: times each operator alone at
 * the sizes of the released models (op_shapes.c), beside the roofline time of its bytes and
 * products. Copies of a case run in sequence over operands that no cache holds; on a GPU they
 * are one CUDA graph. The limits were measured on an H200: reading 4.55 TB/s, dense tensor
 * core products 814 TFLOP/s in BF16 and 1500 in FP8. */
#include "cli/bench/bench_cases.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "cli/bench/bench_cases_internal.h"
#include "cli/terminal/columns.h"
#include "cli/options.h"
#include "cli/terminal/screen.h"
#include "ops/profile/op_timer.h"

enum { MAX_ROUNDS = 15, MAX_COPIES = 40, UPLOAD_BYTES = 16 << 20 };

static const double read_rate = 4.55e12, bf16_rate = 814e12, fp8_rate = 1500e12;
static const double round_seconds = 0.02, warm_seconds = 0.5;

/* Measurements of one case. */
typedef struct case_result {
    const op_case *c;
    double seconds, spread; /* the median; largest less smallest, as a fraction of it */
    op_operands operands;
    double limit;
    bool memory_binds;
} case_result;

/* ---- operands ---- */

static uint32_t mixed(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

/* Stored numbers of every format: small, of both signs, no NaN. Where entries are E4M3 without signs: a byte may
 * be their scale, of which large ones are rare. */
static void fill_stored(op_bench *b, uint8_t *host) {
    const uint32_t keep = b->ops.kv_type == HD_E4M3 ? 0x37 : 0xb7;
    for (uint32_t i = 0; i < UPLOAD_BYTES; i++) host[i] = (uint8_t)(mixed(i) & keep);
    for (size_t at = 0; at < CASE_POOL; at += UPLOAD_BYTES) {
        hd_stream_upload(b->stream, b->pool + at, host, UPLOAD_BYTES);
    }
}

static void fill_numbers(op_bench *b, uint8_t *host) {
    float *f = (float *)(void *)host;
    for (uint32_t i = 0; i < UPLOAD_BYTES / sizeof(float); i++) {
        f[i] = (float)(mixed(i) >> 8) * 0x1p-22f - 2.0f;
    }
    for (size_t at = 0; at < CASE_IN; at += UPLOAD_BYTES / sizeof(float)) {
        hd_stream_upload(b->stream, b->in + at, host, UPLOAD_BYTES);
    }
    int32_t *numbers = (int32_t *)(void *)host;
    for (int32_t i = 0; i < CASE_INTS; i++) numbers[i] = i;
    hd_stream_upload(b->stream, b->ints + CASE_INTS, numbers, CASE_INTS * sizeof *numbers);
}

static hd_status take_all(op_bench *b, hd_err *err) {
    void *pool, *in, *out, *ints;
    HD_TRY(hd_device_alloc(b->device, &pool, CASE_POOL, "stored matrices", err));
    HD_TRY(hd_device_alloc(b->device, &in, CASE_IN * sizeof(float), "inputs", err));
    HD_TRY(hd_device_alloc(b->device, &out, CASE_FLOATS * sizeof(float), "outputs", err));
    HD_TRY(hd_device_alloc(b->device, &ints, 4 * CASE_INTS * sizeof(int32_t), "indices", err));
    b->pool = pool;
    b->in = in;
    b->out = out;
    b->ints = ints;
    uint8_t *host = malloc(UPLOAD_BYTES);
    if (!host) return HD_FAIL(err, HD_ENOMEM, "no memory for operands");
    fill_stored(b, host);
    fill_numbers(b, host);
    free(host);
    return hd_stream_sync(b->stream, err);
}

static hd_status open_bench(op_bench *b, const char *backend, const hd_ops_options *options,
                            hd_err *err) {
    HD_TRY(hd_ops_open(&b->ops, &b->device, backend, options, err));
    HD_TRY(hd_stream_open(&b->stream, b->device, err));
    HD_TRY(hd_stream_reserve(b->stream, hd_ops_scratch_bytes(CASE_INTS, CASE_INTS), err));
    return take_all(b, err);
}

static void close_bench(op_bench *b) {
    hd_stream_close(b->stream);
    hd_device_close(b->device);
}

/* ---- measuring ---- */

typedef struct timed_case {
    op_bench *b;
    const op_case *c;
} timed_case;

static void run_timed(hd_stream *s, void *arg) {
    const timed_case *t = arg;
    (void)s;
    t->c->run(t->b, t->c);
}

/* An idle GPU runs slowly at first. */
static hd_status warm_up(op_bench *b, hd_err *err) {
    const op_case first = op_case_of(&op_shapes[0], op_shapes[0].rows[0]), *c = &first;
    const int64_t until = hd_now_ns() + (int64_t)(warm_seconds * 1e9);
    op_case_prepare(b, c);
    while (hd_now_ns() < until) {
        for (int32_t i = 0; i < MAX_COPIES; i++) c->run(b, c);
        HD_TRY(hd_stream_sync(b->stream, err));
    }
    return HD_OK;
}

static int by_value(const void *x, const void *y) {
    const double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static hd_status measure(op_bench *b, const op_case *c, int32_t rounds, case_result *out,
                         hd_err *err) {
    timed_case timed = {b, c};
    double each[MAX_ROUNDS];
    op_case_prepare(b, c);
    HD_TRY(hd_time_ops(b->stream, b->device, run_timed, &timed, 2, 1, each, err));
    const double fit = round_seconds / each[0];
    const int32_t copies = fit < 2 ? 2 : fit > MAX_COPIES ? MAX_COPIES : (int32_t)fit;
    HD_TRY(hd_time_ops(b->stream, b->device, run_timed, &timed, copies, rounds, each, err));
    qsort(each, (size_t)rounds, sizeof each[0], by_value);
    const op_operands operands = c->operands(b, c);
    const int32_t bits = hd_dtype_bits(hd_formats[c->format].type);
    const bool narrow = bits > 0 && bits <= 8 && !c->in_bf16;
    const double moving = operands.bytes / read_rate;
    const double computing = operands.flops / (narrow ? fp8_rate : bf16_rate);
    *out = (case_result){.c = c,
                         .seconds = each[rounds / 2],
                         .spread = (each[rounds - 1] - each[0]) / each[rounds / 2],
                         .operands = operands,
                         .limit = moving > computing ? moving : computing,
                         .memory_binds = moving > computing};
    return HD_OK;
}

/* ---- reporting ---- */

static const char *dtype_of(const op_case *c) {
    return hd_dtype_name(hd_formats[c->format].type);
}

static void shape_of(const op_case *c, char *to, size_t size) {
    if (c->format != HD_FORMAT_NONE && c->n == 0) {
        snprintf(to, size, "%d x %d %s", c->outs, c->cols, dtype_of(c));
    } else if (c->format != HD_FORMAT_NONE) {
        snprintf(to, size, "%d of %d x %d %s", c->n, c->outs, c->cols, dtype_of(c));
    } else if (c->outs && c->n) {
        snprintf(to, size, "%d heads, %d keys, %d", c->outs, c->n, c->top_k);
    } else {
        snprintf(to, size, "%d", c->cols ? c->cols : c->n);
    }
}

static const column table[] = {
    {"case",     28, false},
    {"operator", 14, false},
    {"shape",    26, false},
    {"rows",     5,  true },
    {"us",       10, true },
    {"limit us", 10, true },
    {"binds",    5,  true },
    {"of limit", 8,  true },
    {"GB/s",     7,  true },
    {"TFLOP/s",  9,  true },
    {"spread",   7,  true }
};

static void print_head(const op_bench *b, columns *c) {
    screen out;
    screen_open(&out, stdout);
    screen_print(&out,
                 "%s; us: median of rounds; limit: the larger of bytes at %.2f TB/s (mem) and "
                 "products at %.0f, for FP8 and FP4 weights %.0f TFLOP/s (mma)\n",
                 b->ops.name, read_rate * 1e-12, bf16_rate * 1e-12, fp8_rate * 1e-12);
    screen_end(&out);
    columns_head(c);
}

static void print_result(const case_result *r, columns *c) {
    char shape[64];
    shape_of(r->c, shape, sizeof shape);
    columns_cell(c, "%s", r->c->name);
    columns_cell(c, "%s", r->c->op);
    columns_cell(c, "%s", shape);
    columns_cell(c, "%d", r->c->rows);
    columns_cell(c, "%.2f", 1e6 * r->seconds);
    columns_cell(c, "%.2f", 1e6 * r->limit);
    columns_cell(c, "%s", r->memory_binds ? "mem" : "mma");
    columns_cell(c, "%.1f%%", 100 * r->limit / r->seconds);
    columns_cell(c, "%.0f", r->operands.bytes / r->seconds * 1e-9);
    columns_cell(c, "%.2f", r->operands.flops / r->seconds * 1e-12);
    columns_cell(c, "%.1f%%", 100 * r->spread);
    columns_end(c);
    fflush(stdout);
}

/* Prints one object per line, with all that a peer needs to run the same case. */
static void print_json(const op_bench *b, const case_result *r) {
    const op_case *c = r->c;
    const bool stored = c->format != HD_FORMAT_NONE;
    json_t *j =
        json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:s}",
                  "backend", b->ops.name, "case", c->name, "op", c->op, "weights",
                  stored ? dtype_of(c) : "", "rows", c->rows, "outs", c->outs, "cols", c->cols,
                  "n", c->n, "top_k", c->top_k, "us", 1e6 * r->seconds, "spread", r->spread,
                  "bytes", r->operands.bytes, "flops", r->operands.flops, "limit_us",
                  1e6 * r->limit, "binds", r->memory_binds ? "mem" : "mma");
    json_dumpf(j, stdout, JSON_COMPACT);
    putchar('\n');
    fflush(stdout);
    json_decref(j);
}

/* out: NULL prints JSON. */
static hd_status run_case(op_bench *b, const op_case *c, int32_t rounds, columns *out,
                          hd_err *err) {
    case_result r;
    HD_TRY(measure(b, c, rounds, &r, err));
    if (out) {
        print_result(&r, out);
    } else {
        print_json(b, &r);
    }
    return HD_OK;
}

hd_status bench_cases(const char *backend, const hd_ops_options *options, const char *only,
                      int32_t rounds, bool json, hd_err *err) {
    op_bench *b = calloc(1, sizeof *b);
    if (!b) return HD_FAIL(err, HD_ENOMEM, "no memory for a bench");
    hd_status st = open_bench(b, backend, options, err);
    if (st == HD_OK) st = warm_up(b, err);
    columns out = columns_open(stdout, table, (int)HD_LEN(table), 0);
    if (st == HD_OK && !json) print_head(b, &out);
    for (int32_t i = 0; i < n_op_shapes && st == HD_OK; i++) {
        const op_shape *shape = &op_shapes[i];
        if (only && !strstr(shape->name, only) && !strstr(shape->op, only)) continue;
        for (int32_t k = 0; k < OP_SHAPE_ROWS && shape->rows[k] && st == HD_OK; k++) {
            const op_case c = op_case_of(shape, shape->rows[k]);
            if (!op_case_is_there(b, &c)) continue;
            st = run_case(b, &c, rounds < MAX_ROUNDS ? rounds : MAX_ROUNDS, json ? NULL : &out,
                          err);
        }
    }
    close_bench(b);
    free(b);
    return st;
}
