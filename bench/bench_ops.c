/* bench_ops.c - operators at the widths of real models: time, and how far from the hardware.
 *
 *     build-cuda/bench_ops [BACKEND [WORD]]    cuda by default; only cases with WORD in the name
 *
 * A case runs over operands that are never in the L2 cache twice in a row. The median of
 * RUNS runs counts. The limit is the larger of bytes / HBM and operations / dense BF16 of an
 * H200 (4.8 TB/s, 989 TFLOP/s): what the hardware needs at least. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "ops/ops.h"

enum { RUNS = 7, MAX_CALLS = 400, SEQ_PAGE = 64 };
static const size_t pool_bytes = (size_t)1 << 30;
static const double hbm = 4.8e12, bf16_peak = 989e12;

typedef struct bench {
    hd_ops ops;
    hd_device *device;
    hd_stream *stream;
    uint8_t *pool; /* operands that are only read: small positive numbers in any format */
    size_t used;   /* of the pool, from the last operand on */
    float *out, *in;
    int32_t *zeros, *numbers; /* [N_INTS] 0, 0, 0, ...; 0, 1, 2, ... */
    int32_t *last, *around;   /* [N_INTS] the case's n - 1; 0, 1, ... n - 1, 0, ... */
} bench;

enum { N_INTS = 1 << 18, OUT_FLOATS = 320 << 20, IN_FLOATS = 64 << 20 };

typedef struct bench_case bench_case;
struct bench_case {
    const char *name;
    void (*run)(bench *b, const bench_case *c);
    hd_dtype type;
    int32_t rows, outs, cols; /* outs: heads, where there are no weights */
    int32_t n, top_k;         /* experts, heads, keys or streams; chosen per row */
};

/* The next bytes of the pool. */
static const void *operand(bench *b, size_t bytes) {
    if (b->used + bytes > pool_bytes) b->used = 0;
    const void *p = b->pool + b->used;
    b->used += (bytes + 255) / 256 * 256;
    return p;
}

static size_t weight_bytes(const bench_case *c) {
    const size_t n = (size_t)c->outs * (size_t)c->cols;
    return n * (size_t)hd_dtype_bits(c->type) / 8 + (c->type == HD_E2M1   ? n / 32
                                                     : c->type == HD_E4M3 ? n / 4096
                                                                          : 0);
}

static hd_weight weight(bench *b, const bench_case *c) {
    const size_t n = (size_t)c->outs * (size_t)c->cols;
    hd_weight w = {.type = c->type, .rows = c->outs, .cols = c->cols, .global = 1.0f};
    w.data = operand(b, n * (size_t)hd_dtype_bits(c->type) / 8);
    if (c->type == HD_E4M3) {
        w.scale_type = HD_F32;
        w.block_rows = w.block_cols = 128;
        w.scale = operand(b, n / 4096);
    } else if (c->type == HD_E2M1) {
        w.scale_type = HD_E8M0;
        w.block_rows = 1;
        w.block_cols = 32;
        w.scale = operand(b, n / 32);
    }
    return w;
}

static hd_act *act(float *x) {
    return (hd_act *)(void *)x;
}

static const hd_act *act_in(const void *x) {
    return (const hd_act *)x;
}

static void run_linear(bench *b, const bench_case *c) {
    const hd_weight w = weight(b, c);
    b->ops.linear(
        b->stream,
        &(hd_linear_args){.out = act(b->out), .x = act(b->in), .w = &w, .rows = c->rows});
}

static void run_heads(bench *b, const bench_case *c) {
    const hd_weight w = weight(b, c);
    const int32_t each = c->outs / c->n;
    b->ops.linear_heads(b->stream, &(hd_linear_heads_args){.out = act(b->out),
                                                           .x = act(b->in),
                                                           .w = &w,
                                                           .rows = c->rows,
                                                           .heads = c->n,
                                                           .n_rows = each,
                                                           .head_rows = each,
                                                           .out_stride = c->n * c->cols,
                                                           .out_head = c->cols,
                                                           .x_stride = c->outs,
                                                           .x_head = each,
                                                           .transpose = true});
}

/* Row t's choices are experts t, t + 1, ...: every expert has as many rows as any other. */
static void run_grouped(bench *b, const bench_case *c) {
    static hd_weight w[512];
    int32_t *offset = (int32_t *)(void *)(b->out + OUT_FLOATS / 2), *at = offset + 1024;
    const int32_t places = c->rows * c->top_k;
    for (int32_t e = 0; e < c->n; e++) w[e] = weight(b, c);
    b->ops.permute(b->stream, &(hd_permute_args){.offset = offset,
                                                 .assignment = at,
                                                 .place = at + places,
                                                 .expert = b->around,
                                                 .rows = c->rows,
                                                 .top_k = c->top_k,
                                                 .n_experts = c->n});
    b->ops.linear_grouped(b->stream, &(hd_linear_grouped_args){.out = act(b->out),
                                                               .x = act(b->in),
                                                               .w = w,
                                                               .offset = offset,
                                                               .assignment = at,
                                                               .n_experts = c->n,
                                                               .top_k = c->top_k,
                                                               .n_places = places});
}

static hd_paged pages(bench *b, int32_t entries, int32_t width) {
    const size_t bytes = (size_t)entries * (size_t)width * (size_t)b->ops.act_bytes;
    return (hd_paged){.data = (hd_act *)(uintptr_t)operand(b, bytes),
                      .table = b->numbers,
                      .table_stride = 0,
                      .page_entries = SEQ_PAGE,
                      .width = width};
}

static void run_attend(bench *b, const bench_case *c) {
    const bool v4 = c->top_k > 0;
    b->ops.attend(b->stream, &(hd_attend_args){.out = act(b->out),
                                               .q = act(b->in),
                                               .recent = pages(b, c->n, 512),
                                               .entries = pages(b, c->n, v4 ? 512 : 576),
                                               .selected = v4 ? b->around : NULL,
                                               .seq = b->zeros,
                                               .pos = b->last,
                                               .rows = c->rows,
                                               .heads = c->outs,
                                               .k_dim = v4 ? 512 : 576,
                                               .v_dim = 512,
                                               .window = v4 ? 128 : 0,
                                               .ratio = v4 ? 4 : 1,
                                               .n_selected = c->top_k,
                                               .scale = 0.04f});
}

static void run_index(bench *b, const bench_case *c) {
    b->ops.index_select(b->stream, &(hd_index_select_args){.out = (int32_t *)(void *)b->out,
                                                           .q = act(b->in),
                                                           .weight = b->in,
                                                           .keys = pages(b, c->n, c->cols),
                                                           .seq = b->zeros,
                                                           .pos = b->last,
                                                           .rows = c->rows,
                                                           .heads = c->outs,
                                                           .ratio = 1,
                                                           .top_k = c->top_k,
                                                           .scale = 0.1f});
}

static void run_hc_pre(bench *b, const bench_case *c) {
    const size_t fn = (size_t)(2 * c->n + c->n * c->n) * (size_t)(c->n * c->cols) * 4;
    const size_t x = (size_t)c->rows * (size_t)(c->n * c->cols) * 4;
    b->ops.hc_pre(b->stream, &(hd_hc_pre_args){.out = act(b->out),
                                               .post = b->in,
                                               .comb = b->in + 65536,
                                               .x = act_in(operand(b, x)),
                                               .fn = operand(b, fn),
                                               .scale = b->in + (1 << 20),
                                               .base = b->in + (1 << 20),
                                               .rows = c->rows,
                                               .cols = c->cols,
                                               .hc = c->n,
                                               .iters = 20,
                                               .norm_eps = 1e-6f,
                                               .eps = 1e-6f});
}

static void run_norm(bench *b, const bench_case *c) {
    const size_t x = (size_t)c->rows * (size_t)c->cols * 4;
    b->ops.rms_norm(b->stream, &(hd_rms_norm_args){.out = act(b->out),
                                                   .x = act_in(operand(b, x)),
                                                   .weight = b->in,
                                                   .rows = c->rows,
                                                   .cols = c->cols,
                                                   .eps = 1e-6f});
}

static float *logits_of(const bench *b) {
    return b->out + OUT_FLOATS / 4;
}

static void run_sample(bench *b, const bench_case *c) {
    static hd_sampling p = {.temperature = 1.0f, .top_p = 0.95f, .top_k = 50};
    hd_sampling *on_device = (hd_sampling *)(void *)(b->out + (1 << 20));
    hd_stream_upload(b->stream, on_device, &p, sizeof p);
    b->ops.sample(b->stream, &(hd_sample_args){.token = (int32_t *)(void *)b->out,
                                               .logits = logits_of(b),
                                               .params = on_device,
                                               .slot = b->zeros,
                                               .position = b->zeros,
                                               .input = b->zeros,
                                               .rows = c->rows,
                                               .vocab = c->cols,
                                               .n_ids = c->cols});
}

static const bench_case cases[] = {
    {"V3 q_b 24576x1536 FP8",        run_linear,  HD_E4M3, 1,    24576,  1536,   0,    0  },
    {"V3 q_b 24576x1536 FP8",        run_linear,  HD_E4M3, 16,   24576,  1536,   0,    0  },
    {"V3 q_b 24576x1536 FP8",        run_linear,  HD_E4M3, 2048, 24576,  1536,   0,    0  },
    {"V3 o 7168x16384 FP8",          run_linear,  HD_E4M3, 1,    7168,   16384,  0,    0  },
    {"V3 o 7168x16384 FP8",          run_linear,  HD_E4M3, 64,   7168,   16384,  0,    0  },
    {"V4 q_a 1024x4096 FP8",         run_linear,  HD_E4M3, 1,    1024,   4096,   0,    0  },
    {"V4 wo_b 4096x8192 FP8",        run_linear,  HD_E4M3, 1,    4096,   8192,   0,    0  },
    {"V4 wo_b 4096x8192 FP8",        run_linear,  HD_E4M3, 4,    4096,   8192,   0,    0  },
    {"V4 wo_b 4096x8192 FP8",        run_linear,  HD_E4M3, 2048, 4096,   8192,   0,    0  },
    {"V4 compressor 2048x4096 BF16", run_linear,  HD_BF16, 1,    2048,   4096,   0,    0  },
    {"V4 compressor 2048x4096 BF16", run_linear,  HD_BF16, 2048, 2048,   4096,   0,    0  },
    {"V4 head 129280x4096 BF16",     run_linear,  HD_BF16, 1,    129280, 4096,   0,    0  },
    {"V3 router 256x7168 F32",       run_linear,  HD_F32,  1,    256,    7168,   0,    0  },
    {"V3 absorb 128 of 128x512 FP8", run_heads,   HD_E4M3, 1,    16384,  512,    128,  0  },
    {"V3 absorb 128 of 128x512 FP8", run_heads,   HD_E4M3, 512,  16384,  512,    128,  0  },
    {"V4 expert 2048x4096 FP4",      run_grouped, HD_E2M1, 1,    2048,   4096,   256,  6  },
    {"V4 expert 2048x4096 FP4",      run_grouped, HD_E2M1, 32,   2048,   4096,   256,  6  },
    {"V4 expert 2048x4096 FP4",      run_grouped, HD_E2M1, 2048, 2048,   4096,   256,  6  },
    {"V3 expert 2048x7168 FP8",      run_grouped, HD_E4M3, 1,    2048,   7168,   64,   8  },
    {"V3 expert 2048x7168 FP8",      run_grouped, HD_E4M3, 64,   2048,   7168,   64,   8  },
    {"V3 attend, all keys",          run_attend,  HD_NONE, 1,    128,    0,      8192, 0  },
    {"V3 attend, all keys",          run_attend,  HD_NONE, 256,  128,    0,      2048, 0  },
    {"V4 attend, 128 and 512 keys",  run_attend,  HD_NONE, 1,    64,     0,      8192, 512},
    {"V4 attend, 128 and 512 keys",  run_attend,  HD_NONE, 256,  64,     0,      8192, 512},
    {"V4 indexer",                   run_index,   HD_NONE, 1,    64,     128,    8192, 512},
    {"V4 indexer",                   run_index,   HD_NONE, 128,  64,     128,    8192, 512},
    {"V4 hc_pre",                    run_hc_pre,  HD_NONE, 1,    0,      4096,   4,    0  },
    {"V4 hc_pre",                    run_hc_pre,  HD_NONE, 2048, 0,      4096,   4,    0  },
    {"V3 rms_norm",                  run_norm,    HD_NONE, 2048, 0,      7168,   0,    0  },
    {"sample, top-k and top-p",      run_sample,  HD_NONE, 1,    0,      129280, 0,    0  },
    {"sample, top-k and top-p",      run_sample,  HD_NONE, 64,   0,      129280, 0,    0  },
};

/* What must be read and computed at least. */
static void count(const bench *b, const bench_case *c, double *bytes, double *flops) {
    const double rows = c->rows, element = b->ops.act_bytes;
    *flops = 0;
    if (c->run == run_attend) {
        const double keys = c->top_k ? c->top_k + 128 : c->n, k_dim = c->top_k ? 512 : 576;
        const double lists = c->top_k ? rows : 1; /* all rows share one list, or none */
        *bytes = lists * keys * k_dim * element + rows * c->outs * (k_dim + 512) * element;
        *flops = 2 * rows * c->outs * keys * (k_dim + 512);
    } else if (c->run == run_index) {
        *bytes = (double)c->n * c->cols * element + rows * c->outs * c->cols * element;
        *flops = 2 * rows * c->outs * c->cols * c->n;
    } else if (c->run == run_hc_pre) {
        *bytes = (rows * (c->n + 1) + 24.0 * c->n) * c->cols * 4;
        *flops = 2 * 24 * rows * c->n * c->cols;
    } else if (c->run == run_norm) {
        *bytes = 2 * rows * c->cols * element;
    } else if (c->run == run_sample) {
        *bytes = rows * c->cols * 4;
    } else if (c->run == run_grouped) {
        const double places = rows * c->top_k, used = places < c->n ? places : c->n;
        *bytes = used * (double)weight_bytes(c) + rows * c->cols * element +
                 places * c->outs * element;
        *flops = 2 * places * c->outs * c->cols;
    } else {
        *bytes = (double)weight_bytes(c) + rows * ((double)c->outs + c->cols) * element;
        *flops = 2 * rows * c->outs * c->cols;
    }
}

static double seconds_of(bench *b, const bench_case *c, int32_t calls) {
    const int64_t start = hd_now_ns();
    hd_err err = {0};
    for (int32_t i = 0; i < calls; i++) c->run(b, c);
    if (hd_stream_sync(b->stream, &err) != HD_OK) {
        fprintf(stderr, "error: %s: %s\n", c->name, err.msg);
        exit(1);
    }
    return (double)(hd_now_ns() - start) * 1e-9;
}

static int by_value(const void *x, const void *y) {
    const double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

/* Logits spread over 20 units, the same for every row. */
static void upload_logits(bench *b, const bench_case *c) {
    static float x[1 << 18];
    for (int32_t i = 0; i < c->cols; i++) {
        x[i] = 20.0f * (float)((uint32_t)i * 2654435761u >> 8) / (float)(1 << 24);
    }
    for (int32_t r = 0; r < c->rows; r++) {
        hd_stream_upload(b->stream, logits_of(b) + (size_t)r * (size_t)c->cols, x,
                         (size_t)c->cols * sizeof *x);
    }
}

static void upload_ints(bench *b, const bench_case *c) {
    static int32_t last[N_INTS], around[N_INTS];
    for (int32_t i = 0; i < N_INTS; i++) {
        last[i] = c->n - 1;
        around[i] = c->n ? i % c->n : 0;
    }
    hd_stream_upload(b->stream, b->last, last, sizeof last);
    hd_stream_upload(b->stream, b->around, around, sizeof around);
}

static void measure(bench *b, const bench_case *c) {
    upload_ints(b, c);
    if (c->run == run_sample) upload_logits(b, c);
    double each[RUNS], bytes, flops;
    const double first = seconds_of(b, c, 3) / 3;
    int32_t calls = (int32_t)(0.01 / first) + 1;
    if (calls > MAX_CALLS) calls = MAX_CALLS;
    for (int r = 0; r < RUNS; r++) each[r] = seconds_of(b, c, calls) / calls;
    qsort(each, RUNS, sizeof each[0], by_value);
    const double time = each[RUNS / 2];
    count(b, c, &bytes, &flops);
    const double limit = bytes / hbm > flops / bf16_peak ? bytes / hbm : flops / bf16_peak;
    printf("%-30s %5d %11.1f %11.1f %8.0f %9.2f %7.1f %%\n", c->name, c->rows, time * 1e6,
           limit * 1e6, bytes / time * 1e-9, flops / time * 1e-12, 100 * limit / time);
    fflush(stdout);
}

static hd_status take(bench *b, void **to, size_t bytes, hd_err *err) {
    return hd_device_alloc(b->device, to, bytes, "operands", err);
}

static hd_status take_all(bench *b, hd_err *err) {
    void *pool, *out, *in, *ints;
    HD_TRY(take(b, &pool, pool_bytes, err));
    HD_TRY(take(b, &out, (size_t)OUT_FLOATS * sizeof(float), err));
    HD_TRY(take(b, &in, (size_t)IN_FLOATS * sizeof(float), err));
    HD_TRY(take(b, &ints, 4 * (size_t)N_INTS * sizeof(int32_t), err));
    b->pool = pool;
    b->out = out;
    b->in = in;
    b->zeros = ints;
    b->numbers = b->zeros + N_INTS;
    b->last = b->numbers + N_INTS;
    b->around = b->last + N_INTS;
    return HD_OK;
}

static hd_status open_bench(bench *b, const char *backend, hd_err *err) {
    const hd_cpu_options cpu = {0};
    static int32_t numbers[N_INTS];
    static uint8_t bytes[16 << 20];
    HD_TRY(hd_ops_open(&b->ops, &b->device, backend, &cpu, HD_EXACT, err));
    HD_TRY(hd_stream_open(&b->stream, b->device, err));
    HD_TRY(hd_stream_reserve(b->stream, hd_ops_scratch_bytes(1 << 17, 1 << 18), err));
    HD_TRY(take_all(b, err));
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (uint8_t)(i * 2654435761u >> 13 & 0x37);
    }
    for (size_t i = 0; i < pool_bytes; i += sizeof bytes) {
        hd_stream_upload(b->stream, b->pool + i, bytes, sizeof bytes);
    }
    hd_stream_upload(b->stream, b->in, bytes, sizeof bytes);
    for (int32_t i = 0; i < N_INTS; i++) numbers[i] = i;
    hd_stream_upload(b->stream, b->numbers, numbers, sizeof numbers);
    return hd_stream_sync(b->stream, err);
}

int main(int argc, char **argv) {
    bench b = {0};
    hd_err err = {0};
    if (open_bench(&b, argc > 1 ? argv[1] : "cuda", &err) != HD_OK) {
        fprintf(stderr, "error: %s\n", err.msg);
        return 1;
    }
    printf("%-30s %5s %11s %11s %8s %9s %9s\n", b.ops.name, "rows", "us", "limit us", "GB/s",
           "TFLOP/s", "of limit");
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        if (argc > 2 && !strstr(cases[i].name, argv[2])) continue;
        measure(&b, &cases[i]);
    }
    hd_stream_close(b.stream);
    hd_device_close(b.device);
    return 0;
}
