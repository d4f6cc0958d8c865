/* op_profiler.h - the operator profiler: an operator table that times another one; roofline
 * limits.
 *
 * Results are kept per (part of the model, operator, shape, format) in the order of their
 * first call. One table is profiled at a time, by one thread. */
#ifndef HD_OPS_PROFILE_OP_PROFILER_H
#define HD_OPS_PROFILE_OP_PROFILER_H

#include "ops/ops.h"

enum { HD_OP_PROFILER_LINES = 512, HD_OP_PROFILER_CALLS = 1 << 13 };

/* All calls of an operator with the same shape in the same part. A GEMM counts its stored
 * matrix, its input and its output; attention and indexer count the keys that rows see;
 * other operators their rows in and out. */
typedef struct hd_op_profile {
    const char *part, *stage; /* as set by hd_op_profiler_at() */
    const char *op, *format;  /* format: of the stored matrix, or "" */
    int32_t rows;             /* of activations */
    /* of the matrix; heads and key width for attention; otherwise 0 and the row width */
    int32_t outs, ins;
    hd_dtype type; /* of the stored matrix; NONE: none */
    int64_t calls;
    double seconds, bytes, flops; /* sums */
} hd_op_profile;

/* A clock in nanoseconds: hd_now_ns, or the thread's own on a machine with other load. */
typedef int64_t hd_clock_fn(void);

typedef struct hd_op_call {
    int32_t line;
    int32_t used; /* experts with rows */
    double bytes, flops;
    hd_device_event *before, *after;
} hd_op_call;

typedef struct hd_op_profiler {
    hd_op_profile line[HD_OP_PROFILER_LINES];
    int32_t n;
    int64_t lost; /* calls without a free line, or without space among the calls */
    const char *part, *stage;

    /* for asynchronous devices */
    hd_op_call *calls; /* [HD_OP_PROFILER_CALLS] the calls of the counting pass */
    int32_t n_calls, next;
    bool timing;
} hd_op_profiler;

/* Fills `out` with operators that call `inner` and record the call in m; both must outlive
 * its use. For CPU tables, whose operators are finished when they return. */
void hd_op_profiler_init(hd_op_profiler *m, hd_ops *out, const hd_ops *inner,
                         hd_clock_fn *clock);
void hd_op_profiler_reset(hd_op_profiler *m);

/* The same for any device, in two passes over the same calls. The first counts the bytes and
 * operations of each call; it waits for the call and reads its arguments back. The second
 * times the calls with events in the stream, whose queue is kept full. */
hd_status hd_op_profiler_open(hd_op_profiler *m, hd_ops *out, const hd_ops *inner, hd_device *d,
                              hd_stream *s, hd_err *err);
void hd_op_profiler_close(hd_op_profiler *m); /* frees what hd_op_profiler_open allocated */
/* resets all results and begins a counting pass */
void hd_op_profiler_count(hd_op_profiler *m);
void hd_op_profiler_time(hd_op_profiler *m); /* begins a timing pass */

/* After a timing pass and hd_stream_sync: adds its times to the lines. Returns false if its
 * calls differ from the counted ones. */
bool hd_op_profiler_finish(hd_op_profiler *m);

/* Sets the part and stage of the following calls; the texts must stay valid. */
void hd_op_profiler_at(hd_op_profiler *m, const char *part, const char *stage);

/* ---- roofline: the machine's limits, with all workers of a stream ---- */

/* Returns bytes per second of reading n words of memory once; the best of several passes. */
double hd_measure_read(hd_stream *s, const uint64_t *data, size_t n, hd_clock_fn *clock);

/* Returns floating-point operations per second of the GEMM inner loop on operands in the
 * nearest cache, with the kernels that cpu_flags select. */
double hd_measure_flops(hd_stream *s, uint32_t cpu_flags, hd_clock_fn *clock);

#endif
