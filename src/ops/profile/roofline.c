/* roofline.c - measures the machine's limits: memory read bandwidth, and GEMM operations per
 * second from the nearest cache. */
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "ops/cpu/kernels_internal.h"
#include "ops/profile/op_profiler.h"

enum { PASSES = 5, SLICE = 1 << 17, X_ROWS = 12, COLS = 512, ROUNDS = 1000 };
enum { LINE = 8 /* words */, AHEAD = 64 * LINE };

/* ---- reading ---- */

typedef struct read_job {
    const uint64_t *data;
    size_t n;
    hd_stream *stream;
} read_job;

static void read_slice(const void *arg, int32_t task, int32_t worker) {
    const read_job *job = arg;
    const size_t at = (size_t)task * SLICE;
    const size_t end = job->n - at < SLICE ? job->n : at + SLICE;
    const uint64_t *data = job->data;
    uint64_t sum = 0;
    for (size_t i = at; i + LINE <= end; i += LINE) { /* complete cache lines suffice */
        __builtin_prefetch(data + i + AHEAD);
        for (size_t j = 0; j < LINE; j++) sum += data[i + j];
    }
    uint64_t *sink = hd_stream_scratch(job->stream, worker, sizeof *sink);
    *sink = sum; /* keeps the compiler from removing the loop */
}

double hd_measure_read(hd_stream *s, const uint64_t *data, size_t n, hd_clock_fn *clock) {
    const read_job job = {data, n, s};
    double best = 0;
    for (int i = 0; i < PASSES; i++) {
        const int64_t begun = clock();
        hd_stream_tasks(s, (int32_t)((n + SLICE - 1) / SLICE), read_slice, &job);
        const double bytes = (double)n * sizeof *data;
        const double rate = bytes / (double)(clock() - begun) * 1e9;
        best = rate > best ? rate : best;
    }
    return best;
}

/* ---- multiplying ---- */

typedef struct spin_job {
    const ops_kernels *k;
    hd_stream *stream;
} spin_job;

typedef struct spin_scratch {
    float acc[X_ROWS * OPS_TILE_ROWS * OPS_LANES], x[X_ROWS * COLS], w[COLS];
} spin_scratch;

static void spin(const void *arg, int32_t task, int32_t worker) {
    (void)task;
    const spin_job *job = arg;
    spin_scratch *t = hd_stream_scratch(job->stream, worker, sizeof *t);
    memset(t, 0, sizeof *t);
    const float *x[X_ROWS], *w[OPS_TILE_ROWS];
    for (int32_t i = 0; i < X_ROWS; i++) x[i] = t->x + i * COLS;
    for (int32_t j = 0; j < OPS_TILE_ROWS; j++) w[j] = t->w;
    for (int32_t i = 0; i < ROUNDS; i++) job->k->dots(t->acc, x, X_ROWS, 0, w, COLS);
}

static const ops_kernels *kernels_for(uint32_t cpu_flags) {
#if defined(__x86_64__)
    if (cpu_flags & HD_CPU_AVX2) {
        return cpu_flags & HD_CPU_AVX512 ? &ops_kernels_avx512 : &ops_kernels_avx2;
    }
#else
    (void)cpu_flags;
#endif
    return &ops_kernels_plain;
}

double hd_measure_flops(hd_stream *s, uint32_t cpu_flags, hd_clock_fn *clock) {
    const spin_job job = {kernels_for(cpu_flags), s};
    const int32_t n = hd_stream_workers(s);
    double best = 0;
    for (int i = 0; i < PASSES; i++) {
        const int64_t begun = clock();
        hd_stream_tasks(s, n, spin, &job);
        const double operands = 2.0 * n * ROUNDS * X_ROWS * OPS_TILE_ROWS * COLS;
        const double rate = operands / (double)(clock() - begun) * 1e9;
        best = rate > best ? rate : best;
    }
    return best;
}
