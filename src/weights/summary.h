/* summary.h - counts parameters and bytes of a model by part (memory footprint).
 *
 * It counts from a config alone, in the formats it declares, or from a checkpoint by adding
 * each bound tensor in its real format. The same count sizes one rank's shard. */
#ifndef HD_WEIGHTS_SUMMARY_H
#define HD_WEIGHTS_SUMMARY_H

#include <stdint.h>

#include "base/dtype.h"
#include "weights/spec.h"
#include "weights/weights.h"

/* X(part, name) */
#define HD_PARAM_GROUP_LIST(X)                    \
    X(EMBEDDING, "embedding")                     \
    X(HEAD, "output head")                        \
    X(ATTENTION, "attention projections")         \
    X(INDEXER, "indexer")                         \
    X(COMPRESSOR, "compressors")                  \
    X(HYPER, "hyper-connections")                 \
    X(DENSE, "dense MLP layers")                  \
    X(ROUTER, "router")                           \
    X(HASH, "hash tables")                        \
    X(EXPERTS, "routed experts")                  \
    X(SHARED, "shared experts")                   \
    X(NORMS, "norms")                             \
    X(PROJECTION, "drafter input projections")    \
    X(DRAFT_HEADS, "Markov and confidence heads") \
    X(ENGRAM, "Engram tables and gates")          \
    X(VISION, "image tower (not run)")

typedef enum hd_param_group {
#define X(part, name) HD_PARAM_GROUP_##part,
    HD_PARAM_GROUP_LIST(X)
#undef X
        HD_N_PARAM_GROUPS
} hd_param_group;

const char *hd_param_group_name(hd_param_group p);
hd_param_group hd_param_group_of(hd_role r);

/* Returns the format that the config declares for a tensor, by the conventions of the
 * official files. */
hd_stored_format hd_declared_format(const hd_model_spec *spec, const hd_tensor_decl *decl);

typedef struct hd_param_group_sum {
    int64_t params; /* elements, without scales, hash tables and router biases */
    int64_t active; /* parameters that one token uses (active parameters) */
    int64_t bytes;  /* bytes of all arrays */
    /* number of arrays by dtype, as files count tensors, scales included */
    int64_t n_arrays[HD_N_DTYPES];
    int64_t bytes_by_type[HD_N_DTYPES]; /* bytes of these arrays */
} hd_param_group_sum;

/* MTP layers are counted separately; there EMBEDDING and HEAD are duplicates of the main
 * ones. */
typedef struct hd_summary {
    hd_param_group_sum main[HD_N_PARAM_GROUPS], mtp[HD_N_PARAM_GROUPS];
} hd_summary;

/* Adds rows x cols of a tensor; the complete tensor is decl->rows x decl->cols. */
void hd_summary_add(hd_summary *sum, const hd_model_spec *spec, const hd_tensor_decl *decl,
                    int32_t rows, int32_t cols, const hd_stored_format *format);

/* Counts all tensors of a schema as declared. An LM head tied to the embedding counts
 * nothing. */
void hd_summarize(hd_summary *out, const hd_model_spec *spec, const hd_schema *schema);

/* Return the sum over parts. */
hd_param_group_sum hd_summary_main(const hd_summary *s);
hd_param_group_sum hd_summary_mtp(const hd_summary *s);

#endif
