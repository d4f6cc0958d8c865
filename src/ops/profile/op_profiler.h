/* op_profiler.h - a table of operators that times another one, and what the machine can do.
 *
 * Lines are kept per (part of the model, operator, shape, format) in the order of their first
 * call. One table is metered at a time, by one thread. */
#ifndef HD_OPS_PROFILE_OP_PROFILER_H
#define HD_OPS_PROFILE_OP_PROFILER_H

#include "ops/ops.h"

enum { HD_OP_PROFILER_LINES = 512, HD_OP_PROFILER_CALLS = 1 << 13 };

/* All calls of an operator with the same shape in the same part. A matrix product counts its
 * stored matrix, what it reads and what it writes; attention and indexer the keys that rows
 * see; the rest their rows in and out. */
typedef struct hd_op_profile {
    const char *part, *stage; /* as hd_op_profiler_at() said */
    const char *op, *format;  /* format: of the stored matrix, or "" */
    int32_t rows;             /* of activations */
    int32_t outs, ins; /* of the matrix; heads and key width of attention; else 0, width */
    hd_dtype type;     /* of the stored matrix; NONE: none */
    int64_t calls;
    double seconds, bytes, flops; /* sums */
} hd_op_profile;

/* Nanoseconds since some time: hd_now_ns, or a thread's own on a machine with other work. */
typedef int64_t hd_clock_fn(void);

typedef struct hd_op_call {
    int32_t line;
    int32_t used; /* experts that had rows */
    double bytes, flops;
    hd_device_event *before, *after;
} hd_op_call;

typedef struct hd_op_profiler {
    hd_op_profile line[HD_OP_PROFILER_LINES];
    int32_t n;
    int64_t lost; /* calls that found no line free, or no place among the calls */
    const char *part, *stage;

    /* of devices that run ops later than they are called */
    hd_op_call *calls; /* [HD_OP_PROFILER_CALLS] what each call of the counted pass was */
    int32_t n_calls, next;
    bool timing;
} hd_op_profiler;

/* out calls what inner names and notes it in m; both must outlive its use. For tables of the
 * CPU, whose operators are finished when they return. */
void hd_op_profiler_init(hd_op_profiler *m, hd_ops *out, const hd_ops *inner,
                         hd_clock_fn *clock);
void hd_op_profiler_reset(hd_op_profiler *m);

/* The same for any device, in two passes over the same calls: the first counts what each call
 * moves and computes, waiting for it and reading its arguments back, the second times them
 * with marks in the queue, which is kept full. */
hd_status hd_op_profiler_open(hd_op_profiler *m, hd_ops *out, const hd_ops *inner, hd_device *d,
                              hd_stream *s, hd_err *err);
void hd_op_profiler_close(hd_op_profiler *m); /* what hd_op_profiler_open took */
void hd_op_profiler_count(hd_op_profiler *m); /* forgets everything; a counting pass begins */
void hd_op_profiler_time(hd_op_profiler *m);  /* a timing pass begins */

/* After a timing pass and hd_stream_sync: adds its times to the lines. False when it was not
 * the same calls as the counted ones. */
bool hd_op_profiler_finish(hd_op_profiler *m);

/* What the calls that follow belong to; texts that stay. */
void hd_op_profiler_at(hd_op_profiler *m, const char *part, const char *stage);

/* ---- the machine, with all workers of a stream at once ---- */

/* Bytes a second of reading n words of memory once; the best of several passes. */
double hd_measure_read(hd_stream *s, const uint64_t *data, size_t n, hd_clock_fn *clock);

/* Floating-point operations a second of the products' inner loop on operands in the nearest
 * cache, with the kernels that cpu_flags choose. */
double hd_measure_flops(hd_stream *s, uint32_t cpu_flags, hd_clock_fn *clock);

#endif
