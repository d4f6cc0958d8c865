/* ops.h - the mathematics, one argument struct and one table entry per operator.
 *
 * Contract of every entry: queue the work on s and return; allocate nothing; synchronize
 * nothing; report trouble through the stream; accept zero rows. Shapes are in brackets,
 * row-major; a *_stride counts elements between rows, and where there are no heads 0 means
 * the natural one. Nothing may overlap unless the struct says so.
 *
 * Activations are hd_act: an incomplete type, because the element is the backend's affair
 * (float on the CPU). What must be float32 everywhere (scores, mixing weights, logits) says
 * float. A row's result depends on that row, its sequence's keys and the weights alone: never
 * on how many rows, chunks or threads share the call (design D8), but where that was given up
 * (hd_ops_options). */
#ifndef HD_OPS_OPS_H
#define HD_OPS_OPS_H

#include "ops/attention.h"
#include "ops/kv_store.h"
#include "ops/linear.h"
#include "ops/mhc.h"
#include "ops/moe.h"
#include "ops/norm.h"
#include "ops/rope.h"
#include "ops/rows.h"
#include "ops/sampling.h"
#include "ops/step.h"
#include "ops/types.h"

HD_BEGIN_C

/* What every table has. */
#define HD_COMMON_OP_LIST(X) \
    X(embed)                 \
    X(gather)                \
    X(add)                   \
    X(rms_norm)              \
    X(layer_norm)            \
    X(linear)                \
    X(linear_heads)          \
    X(rope_table)            \
    X(rope)                  \
    X(kv_store)              \
    X(indexer_topk)          \
    X(attention)             \
    X(compress)              \
    X(moe_topk)              \
    X(moe_permute)           \
    X(grouped_gemm)          \
    X(swiglu)                \
    X(moe_combine)           \
    X(hc_pre)                \
    X(hc_post)               \
    X(hc_head)               \
    X(count_tokens)          \
    X(sample)                \
    X(verify)                \
    X(argmax)                \
    X(prepare_step)          \
    X(commit_step)           \
    X(prepare_draft)         \
    X(mirror)                \
    X(timestamp)

/* attention_naive is the CPU's alone, as its gain is, and NULL in other tables. */
#define HD_OP_LIST(X)    \
    HD_COMMON_OP_LIST(X) \
    X(attention_naive)

#define X(op) typedef void hd_##op##_fn(hd_stream *s, const hd_##op##_args *a);
HD_OP_LIST(X)
#undef X

enum { HD_MAX_HC = 16 }; /* hyper-connection streams an op keeps on its stack */

/* How products are made: of the values as they are, in float32, or of narrower numbers near them.
 * Fast: on a CPU bfloat16 for x, where the processor multiplies it; on CUDA bfloat16 and half
 * precision. Official, CUDA's alone: FP8 for x where the official programs have it
 * (docs/numerics.md). */
typedef enum hd_precision { HD_EXACT, HD_FAST, HD_OFFICIAL } hd_precision;

typedef struct hd_ops {
    const char *name;  /* "ref", "cpu avx512", ... */
    int32_t act_bytes; /* size of one hd_act element */
    hd_precision precision;
#define X(op) hd_##op##_fn *op;
    HD_OP_LIST(X)
#undef X
} hd_ops;

/* Element `at` of an activation array. */
static inline hd_act *hd_act_at(const hd_ops *ops, hd_act *x, int64_t at) {
    return (hd_act *)((uint8_t *)x + at * ops->act_bytes);
}

/* What the ops of a backend are opened with. Zero is the default everywhere. */
typedef struct hd_ops_options {
    hd_cpu_options cpu;
    hd_precision precision; /* "ref" has HD_EXACT only, "cpu" not HD_OFFICIAL */
    bool
        no_batch_invariance; /* of "cuda" with HD_FAST: many rows at once may be multiplied in an
                                 order of their number's own, and from narrower numbers
                                 (docs/numerics.md) */
    const char *needs_cpu;   /* what is asked for and no GPU does, "mla naive"; NULL: nothing */
    hd_err *no_gpu;          /* NULL, or gets why "auto" took the CPU */
} hd_ops_options;

/* By name, "exact", "fast" or "official"; NULL is the default. */
hd_status hd_precision_of(hd_precision *out, const char *name, hd_err *err);

/* How MLA's attention is computed over long prompts (docs/numerics.md): over the latents themselves,
 * or over keys and values made from them. */
typedef enum hd_mla_form { HD_MLA_ABSORBED, HD_MLA_NAIVE } hd_mla_form;

/* By name, "absorbed" or "naive"; NULL is the default. */
hd_status hd_mla_form_of(hd_mla_form *out, const char *name, hd_err *err);

/* Each fills every entry: the reference first, then what cpu_flags (base/cpu.h) allow. */
void hd_ops_init_ref(hd_ops *t);
void hd_ops_init_cpu(hd_ops *t, uint32_t cpu_flags, hd_precision precision);
void hd_ops_init_cuda(hd_ops *t, hd_precision precision, bool library);

/* Loads the library that a table with `library` needs, and keeps it with the device. Its products use
 * the scratch of the stream that they are queued on. The two above are in builds with HD_CUDA. */
hd_status hd_ops_open_cublaslt(hd_device *d, hd_err *err);

/* Opens the device of a backend, "ref", "cpu" or "cuda", and fills the table of its ops. "auto" is
 * "cuda" where that can be opened with these options, else "cpu". On failure *d may be open: close
 * it. */
hd_status hd_ops_open(hd_ops *t, hd_device **d, const char *backend,
                      const hd_ops_options *options, hd_err *err);

/* Scratch per worker that the tables need: max_keys bounds window + entries that one row
 * may attend to or score, max_cols the widest row of any op (the vocabulary where sampled). */
size_t hd_ops_scratch_bytes(int32_t max_keys, int32_t max_cols);

HD_END_C

#endif
