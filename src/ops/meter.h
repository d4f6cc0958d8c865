/* meter.h - a table of operators that times another one, and what the machine can do.
 *
 * Lines are kept per (operator, shape, format) in the order of their first call. One table is
 * metered at a time, by one thread. */
#ifndef HD_OPS_METER_H
#define HD_OPS_METER_H

#include "ops/ops.h"

enum { HD_METER_LINES = 256 };

/* All calls of an operator with the same shape. A matrix product counts its stored matrix,
 * what it reads and what it writes; attention and indexer the keys that rows see; the rest,
 * which moves little, counts nothing but time. */
typedef struct hd_meter_line {
    const char *op, *format; /* format: of the stored matrix, or "" */
    int32_t rows;            /* of activations */
    int32_t outs, ins; /* of the matrix; heads and key width of attention; else 0, width */
    int64_t calls;
    double seconds, bytes, flops; /* sums */
} hd_meter_line;

/* Nanoseconds since some time: hd_now_ns, or a thread's own on a machine with other work. */
typedef int64_t hd_clock_fn(void);

typedef struct hd_meter {
    hd_meter_line line[HD_METER_LINES];
    int32_t n;
    int64_t lost; /* calls that found no line free */
} hd_meter;

/* out calls what inner names and notes it in m; both must outlive its use. Only for tables of
 * the CPU, whose operators are finished when they return. */
void hd_meter_init(hd_meter *m, hd_ops *out, const hd_ops *inner, hd_clock_fn *clock);
void hd_meter_reset(hd_meter *m);

/* ---- the machine, with all workers of a stream at once ---- */

/* Bytes a second of reading n words of memory once; the best of several passes. */
double hd_measure_read(hd_stream *s, const uint64_t *data, size_t n, hd_clock_fn *clock);

/* Floating-point operations a second of the products' inner loop on operands in the nearest
 * cache, with the kernels that cpu_flags choose. */
double hd_measure_flops(hd_stream *s, uint32_t cpu_flags, hd_clock_fn *clock);

#endif
