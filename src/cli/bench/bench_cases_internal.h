/* bench_cases_internal.h - one benchmark case: how to run an operator at the sizes of a real
 * model, and the bytes and operations it needs at least (op cost). */
#ifndef HD_CLI_BENCH_BENCH_CASES_INTERNAL_H
#define HD_CLI_BENCH_BENCH_CASES_INTERNAL_H

#include "cli/bench/op_shapes.h"
#include "ops/ops.h"

enum { CASE_TABLES = 64 };

typedef struct op_bench {
    hd_ops ops;
    hd_device *device;
    hd_stream *stream;
    uint8_t *pool; /* stored matrices and keys, read in turn so that no cache holds them */
    size_t used;   /* in the pool, from the last operand on */
    float *in;     /* numbers around zero, each use from the same place */
    float *out;
    int32_t *ints; /* [4, CASE_INTS] zeros; 0, 1, 2, ...; the case's positions; its experts */
    hd_expert_table tables[CASE_TABLES]; /* matrices of the case's experts, used in turn */
    int32_t next_table;
    /* of a case of `resident`: its entries in host memory, and its buffer, which is in `buffer` */
    void *mirror, *buffer;
    hd_resident resident;
    int32_t pass;
} op_bench;

enum {
    CASE_INTS = 1 << 18,
    CASE_FLOATS = 160 << 20,
    CASE_IN = 160 << 20,
    CASE_SMALL = 8 << 20
};
#define CASE_POOL ((size_t)2 << 30)

typedef struct op_case op_case;
typedef void op_case_fn(op_bench *b, const op_case *c);

/* The least that a case reads, writes and computes. */
typedef struct op_operands {
    double bytes, flops;
} op_operands;

/* One shape of the table at one count of rows. */
struct op_case {
    const char *name, *op;
    op_case_fn *run;
    op_operands (*operands)(const op_bench *b, const op_case *c);
    hd_format format;             /* of stored matrices */
    int32_t rows;                 /* of activations */
    int32_t outs, cols, n, top_k; /* as in op_shapes.h */
    bool in_bf16;                 /* its products, whatever the format of the matrix */
};

op_case op_case_of(const op_shape *shape, int32_t rows);

/* Returns whether the backend has the operator. */
bool op_case_is_there(const op_bench *b, const op_case *c);

/* Uploads the case's integers and outputs. */
void op_case_prepare(op_bench *b, const op_case *c);

/* bench_split.c: moe_split */
hd_status op_split_prepare(op_bench *b, const op_case *c, hd_err *err);
void op_split_run(op_bench *b, const op_case *c);
op_operands op_split_operands(const op_bench *b, const op_case *c);

#endif
