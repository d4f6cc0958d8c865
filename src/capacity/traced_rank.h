/* traced_rank.h - one rank of a layout whose steps are traced: the model's own forward pass, with
 * tensors that have shapes and no values, operators that report their cost and compute nothing,
 * and exchanges that send nothing. The cost of an operator is that of the operator profiler
 * (ops/profile/op_profiler.h). */
#ifndef HD_CAPACITY_TRACED_RANK_H
#define HD_CAPACITY_TRACED_RANK_H

#include "capacity/gpu.h"
#include "comm/shm.h"
#include "weights/parallel_config.h"
#include "weights/spec.h"

typedef struct hd_traced_rank hd_traced_rank;

typedef struct hd_traced_rank_options {
    const hd_model_spec *spec; /* must outlive the rank */
    const hd_parallel_config *parallel;
    int32_t rank;
    const hd_gpu *gpu;
    hd_dtype act_type, kv_type; /* of activations and of entries that attention reads */
    int32_t rows, seqs;         /* the most of a step of an attention group */
    int32_t positions;          /* the longest sequence */
    /* Rows of the mean rank / rows of the busiest one, of the experts; 1: balanced. */
    double balancedness;
    comm_shm_most *messages; /* raised by every step's, of ranks that are processes; or NULL */
} hd_traced_rank_options;

hd_status hd_traced_rank_open(hd_traced_rank **out, const hd_traced_rank_options *o,
                              hd_err *err);
void hd_traced_rank_close(hd_traced_rank *r); /* NULL is fine */

/* A step of an attention group: `rows` rows of each of `seqs` sequences from position `start` on,
 * whose last `logits` need logits; then as many drafts of each sequence as given. All groups have
 * such a step. */
typedef struct hd_step_shape {
    int32_t seqs, rows, start, logits, drafts;
} hd_step_shape;

/* All calls of an operator or exchange with the same shape in the same stage. */
typedef struct hd_step_line {
    const char *part, *stage; /* of the model: "mla", "experts" */
    const char *op;           /* or the name of an exchange */
    const char *format;       /* of the stored matrix, or "" */
    int32_t rows, outs, ins;  /* as in hd_op_profile; 0 of an exchange */
    bool exchange;
    int64_t calls;
    double bytes, flops; /* sums; of an exchange: bytes sent inside the node */
    double outside;      /* of an exchange: bytes sent to other nodes */
    double seconds;      /* predicted */
} hd_step_line;

enum { HD_STEP_LINES = 640 };

/* Sums over the lines; exchanges are not in bytes and flops. */
typedef struct hd_step_cost {
    double bytes, flops, kernel_s, exchange_s;
    double sent;                 /* bytes */
    double fetch_bytes, fetch_s; /* of experts that are elsewhere; not traced */
    bool fetches_first;          /* kernels wait for them */
    int64_t kernels;
    hd_step_line lines[HD_STEP_LINES];
    int32_t n;
} hd_step_cost;

/* Traces one step. HD_EINVAL: it has more rows, sequences or positions than the rank was opened
 * for. One thread may trace at a time. */
hd_status hd_traced_rank_step(hd_traced_rank *r, const hd_step_shape *shape, hd_step_cost *out,
                              hd_err *err);

#endif
