/* ops.h - the operators (kernels) of the model: one argument struct and one table entry
 * each.
 *
 * Contract of every entry: it queues the operator on stream s and returns. It does not
 * allocate or synchronize, reports errors through the stream, and accepts zero rows. Shapes
 * are in brackets, row-major. Arrays must not overlap unless the struct says so.
 *
 * Activations and cached entries are hd_rows, because backends differ in their element types.
 * A table fails the stream, naming the operator and the field, if rows have a type, scales or
 * a stride that it does not take. What must be float32 everywhere (scores, mixing weights,
 * logits) is declared float. The result of a row depends only on that row, its sequence's keys and the weights,
 * not on how many rows, chunks or threads share the call (batch invariance, design D8).
 * hd_ops_options may disable that. */
#ifndef HD_OPS_OPS_H
#define HD_OPS_OPS_H

#include "ops/attention.h"
#include "ops/csa2.h"
#include "ops/exchange.h"
#include "ops/fetch.h"
#include "ops/kv_store.h"
#include "ops/linear.h"
#include "ops/mhc.h"
#include "ops/moe.h"
#include "ops/norm.h"
#include "ops/replay.h"
#include "ops/resident.h"
#include "ops/rope.h"
#include "ops/rows.h"
#include "ops/sampling.h"
#include "ops/step.h"
#include "ops/types.h"

HD_BEGIN_C

/* Operators of every table. */
#define HD_COMMON_OP_LIST(X) \
    HD_ROWS_OPS(X)           \
    HD_NORM_OPS(X)           \
    HD_LINEAR_OPS(X)         \
    HD_ROPE_OPS(X)           \
    HD_KV_STORE_OPS(X)       \
    HD_REPLAY_OPS(X)         \
    HD_ATTENTION_OPS(X)      \
    HD_RESIDENT_OPS(X)       \
    HD_MOE_OPS(X)            \
    HD_FETCH_OPS(X)          \
    HD_MHC_OPS(X)            \
    HD_CSA2_OPS(X)           \
    HD_SAMPLING_OPS(X)       \
    HD_STEP_OPS(X)

/* Operators that not every table has: NULL is none. CPU tables have all of them; those of a GPU
 * have attention_naive for HD_FAST and HD_OFFICIAL. */
#define HD_CPU_OP_LIST(X) X(attention_naive)

#define HD_OP_LIST(X)    \
    HD_COMMON_OP_LIST(X) \
    HD_CPU_OP_LIST(X)

#define X(op) typedef void hd_##op##_fn(hd_stream *s, const hd_##op##_args *a);
HD_OP_LIST(X)
#undef X

enum { HD_MAX_HC = 16 }; /* hyper-connection streams an op keeps on its stack */

/* Precision of matrix products: HD_EXACT multiplies float32 values, HD_FAST rounds to
 * narrower numbers. CPU: bfloat16 for x if the processor multiplies it; CUDA: bfloat16 and
 * half precision. HD_OFFICIAL, CUDA and the reference: FP8 activations for FP8 and FP4
 * weights, as the published inference programs compute (docs/numerics.md). HD_AUTO, of options
 * alone: HD_OFFICIAL on a GPU, HD_EXACT elsewhere. */
typedef enum hd_precision { HD_EXACT, HD_FAST, HD_OFFICIAL, HD_AUTO } hd_precision;

typedef struct hd_ops {
    const char *name;  /* "ref", "cpu avx512", ... */
    hd_dtype act_type; /* of activations */
    /* of the cached entries that attention reads; HD_NONE: float32. E4M3, E2M1: keys of the indexer,
     * too; E2M1: V4.1's own formats */
    hd_dtype kv_type;
    hd_precision precision;
    const char *activations; /* their number format in products, for people: "bfloat16" */
    const hd_exchange_ops *exchange; /* between GPUs; NULL: ranks have their memory in common */
#define X(op) hd_##op##_fn *op;
    HD_OP_LIST(X)
#undef X
} hd_ops;

/* Returns the bytes of an activation's element. */
static inline int32_t hd_act_bytes(const hd_ops *ops) {
    return hd_dtype_bits(ops->act_type) / 8;
}

/* Returns the type of cached entries on a GPU, where no other is asked for. */
static inline hd_dtype hd_cuda_kv_type(hd_precision p) {
    return p == HD_EXACT ? HD_F32 : HD_BF16;
}

/* Returns whether a GPU can have cached entries of a type; HD_NONE: that of the precision. */
static inline bool hd_cuda_has_kv_type(hd_precision p, hd_dtype type) {
    return type == HD_NONE || type == hd_cuda_kv_type(p) || (type == HD_E4M3 && p != HD_EXACT);
}

/* "float32", or "bfloat16 or fp8". */
static inline const char *hd_cuda_kv_types(hd_precision p) {
    return p == HD_EXACT ? "float32" : "bfloat16 or fp8";
}

/* Options of a backend's operators. Zero is the default everywhere. */
typedef struct hd_ops_options {
    hd_cpu_options cpu;
    /* which GPU, as CUDA numbers them; "cpu" and "ref" have none, and "auto" with another than
     * the first is "cuda" */
    int32_t gpu;
    /* of "cuda": which kernels; of "auto", if not HD_CUDA_AUTO: for a GPU alone */
    hd_cuda_path cuda_path;
    /* "ref" has no HD_FAST, "cpu" no HD_OFFICIAL; HD_AUTO: HD_EXACT also on a GPU where only that has
     * kv_type */
    hd_precision precision;
    /* of cached entries; HD_NONE: float32, on a GPU hd_cuda_kv_type(); hd_cuda_has_kv_type() */
    hd_dtype kv_type;
    /* "cuda" with HD_FAST: large-M GEMMs may use an order of summation that depends on the
     * number of rows, and narrower numbers (docs/numerics.md) */
    bool no_batch_invariance;
    /* a requested feature that no GPU supports, "mla naive" of exact precision; NULL: none */
    const char *needs_cpu;
    hd_err *no_gpu; /* NULL, or receives why "auto" chose the CPU */
} hd_ops_options;

/* By hd_precision; NULL ends the list. */
extern const char *const hd_precision_names[];

/* Parses one of them; NULL is "auto". */
hd_status hd_precision_of(hd_precision *out, const char *name, hd_err *err);

/* Returns the format that a precision gives to activations in products on this machine's
 * "cpu", or on a GPU for "cuda": "14-bit integers (AVX2)". NULL: backend and build refuse it. */
const char *hd_ops_activations(const char *backend, hd_precision precision);

/* "auto" (HD_NONE), "float32", "bfloat16", "fp8" (E4M3), "fp4" (E2M1); NULL ends the list. */
extern const char *const hd_kv_type_names[];

/* Parses one of them; NULL is "auto". */
hd_status hd_kv_type_of(hd_dtype *out, const char *name, hd_err *err);
const char *hd_kv_type_name(hd_dtype type); /* HD_NONE: "float32" */

/* How MLA's attention is computed over long prompts (docs/numerics.md): absorbed, over the
 * latents themselves; or naive, over keys and values computed from them. */
typedef enum hd_mla_form { HD_MLA_ABSORBED, HD_MLA_NAIVE } hd_mla_form;

/* Parses "absorbed" or "naive"; NULL is the default. */
hd_status hd_mla_form_of(hd_mla_form *out, const char *name, hd_err *err);

/* Returns whether no GPU has the form in a precision. */
static inline bool hd_mla_needs_cpu(hd_mla_form form, hd_precision precision) {
    return form == HD_MLA_NAIVE && precision == HD_EXACT;
}

/* Each fills every entry of a table: the reference first, then faster versions that
 * cpu_flags (base/cpu.h) allow. */
void hd_ops_init_ref(hd_ops *t, hd_precision precision);
void hd_ops_init_cpu(hd_ops *t, uint32_t cpu_flags, hd_precision precision);
void hd_ops_init_cuda(hd_ops *t, hd_precision precision, bool library, hd_cuda_path path);

/* Loads cuBLASLt, which a table with `library` needs; the device keeps it. Its GEMMs use the
 * scratch of the stream that they are queued on. This and hd_ops_init_cuda exist only in
 * builds with HD_CUDA. */
hd_status hd_ops_open_cublaslt(hd_device *d, hd_err *err);

/* Opens the device of a backend, "ref", "cpu" or "cuda", and fills its operator table.
 * "auto" is "cuda" if that opens with these options, else "cpu". After a failure *d may be
 * open; the caller closes it. */
hd_status hd_ops_open(hd_ops *t, hd_device **d, const char *backend,
                      const hd_ops_options *options, hd_err *err);

/* Returns the scratch bytes per worker that the operators need. max_keys bounds the keys
 * (window + entries) that one row reads; max_cols is the widest row of any operator (the
 * vocabulary when sampling). */
size_t hd_ops_scratch_bytes(int32_t max_keys, int32_t max_cols);

HD_END_C

#endif
