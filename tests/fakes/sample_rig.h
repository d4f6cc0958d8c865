/* sample_rig.h - fixture of the sampler tests: every operator table, streams, a step to
 * fill. */
#ifndef HD_TESTS_FAKES_SAMPLE_RIG_H
#define HD_TESTS_FAKES_SAMPLE_RIG_H

#include "check.h"

#include "ops/ops.h"

enum { RIG_TABLES = 5, RIG_STREAMS = 3, MAX_ROWS = 24, POOL = 64, N_MASKS = 3, N_COUNTS = 3 };
enum { RIG_TOPS = 3 * HD_MAX_ALTERNATIVES }; /* alternatives of all rows of a step */

typedef struct rig {
    hd_ops table[RIG_TABLES]; /* the reference first, CUDA last where there is a GPU */
    int32_t n_tables, n_host_tables;
    hd_device *device[RIG_STREAMS];
    hd_stream *stream[RIG_STREAMS]; /* 1, 2 and 5 threads */
    /* each kind of case once, for sanitizers under which a GPU is slow: tests/gpu.sh */
    bool brief;
} rig;

/* Returns the stream for a table: s, or the GPU's stream. */
hd_stream *rig_stream(const hd_ops *ops, hd_stream *s);

/* A step with space for everything that sample may read. */
typedef struct step {
    hd_sample_args a;
    float *logits;
    hd_sampling *params;
    int32_t *slot, *position, *mask_row, *input, *n_drafted, *given, *draft;
    hd_logit_bias *bias;
    uint32_t *mask;
    uint16_t *counts;
} step;

typedef struct answer {
    int32_t token[MAX_ROWS];
    float logprob[MAX_ROWS];
    int32_t top_id[RIG_TOPS];
    float top_logprob[RIG_TOPS];
} answer;

void open_rig(rig *r, int32_t vocab);
void close_rig(rig *r);

/* Row r is slot r at position r, without mask, drafts or given tokens; everything else is
 * zero. */
void make_step(step *s, int32_t rows, int32_t vocab);
void free_step(step *s);

/* The output buffer that every table can address, every byte 0x5a. */
answer *rig_answer(void);

/* Runs sample; every byte of out that it does not write is 0x5a. */
void run_sample(const hd_ops *ops, hd_stream *stream, const hd_sample_args *args, answer *out);

uint32_t rig_word(void);
int32_t rig_below(int32_t n);

/* Allocates memory that every table can address, zeroed or a copy. */
void *rig_zeros(size_t bytes);
void *rig_copy(const void *from, size_t bytes);
void rig_free(void *p);

#endif
