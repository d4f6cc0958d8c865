/* bench_cases_internal.h - one benchmark case: how to run an operator at the sizes of a real
 * model, and the bytes and operations it needs at least (op cost). */
#ifndef HD_CLI_BENCH_BENCH_CASES_INTERNAL_H
#define HD_CLI_BENCH_BENCH_CASES_INTERNAL_H

#include "ops/ops.h"

typedef struct op_bench {
    hd_ops ops;
    hd_device *device;
    hd_stream *stream;
    uint8_t *pool; /* stored matrices and keys, read in turn so that no cache holds them */
    size_t used;   /* in the pool, from the last operand on */
    float *in;     /* numbers around zero, each use from the same place */
    float *out;
    int32_t *ints; /* [4, CASE_INTS] zeros; 0, 1, 2, ...; the case's positions; its experts */
} op_bench;

enum { CASE_INTS = 1 << 18, CASE_FLOATS = 160 << 20, CASE_IN = 160 << 20 };
#define CASE_POOL ((size_t)2 << 30)

typedef struct op_case op_case;
typedef void op_case_fn(op_bench *b, const op_case *c);

/* The least that a case reads, writes and computes. */
typedef struct op_operands {
    double bytes, flops;
} op_operands;

struct op_case {
    const char *name, *op;
    op_case_fn *run;
    op_operands (*operands)(const op_bench *b, const op_case *c);
    hd_dtype format;          /* of stored matrices */
    int32_t rows, outs, cols; /* of activations; of a matrix, or heads and width */
    int32_t n, top_k;         /* experts, heads, keys or streams; selected per row */
};

extern const op_case op_cases[];
extern const int32_t n_op_cases;

/* Uploads the case's integers and outputs. */
void op_case_prepare(op_bench *b, const op_case *c);

#endif
