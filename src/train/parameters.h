/* parameters.h - the trained tensors of a model: float32 master weights, their gradients and
 * the optimizer's moments, and the way back into the stored formats.
 *
 * Of N ranks each has all gradients, but masters and moments of its slice: the elements of all
 * parameters lie in one order, which begins with that of hd_gradients_all(), and a slice is a
 * contiguous part of it.
 *
 * The model computes from its stored weights (FP8, FP4, BF16, F32), which are the masters,
 * rounded. Their gradient counts as the masters' (straight-through). Rounding is that of
 * weight updates (weights/update.h), so training, serving and exported files have the same
 * bytes. */
#ifndef HD_TRAIN_PARAMETERS_H
#define HD_TRAIN_PARAMETERS_H

#include "model/gradients.h"
#include "train/optimizer.h"
#include "weights/update.h"

typedef struct hd_parameters hd_parameters;

/* The words of --freeze: groups of tensors by role, comma-separated; NULL or "" or "none":
 * nothing. Fails with the unknown word and the known ones. */
hd_status hd_frozen_of(uint32_t *out, const char *words, hd_err *err);

typedef struct hd_parameters_options {
    uint32_t frozen;         /* of hd_frozen_of() */
    hd_update_kind matrices; /* the rule of hidden matrices; AdamW updates all else */
    int32_t threads;         /* that round to the stored formats; 0: one per core */
    bool drafts;             /* the MTP layer, too */
    bool indexer;            /* the indexer, too, by a loss of its own */
    bool shapes_only;        /* without masters and moments: only their size is asked for */
    bool biases;             /* the routers' biases change by hd_parameters_balance() */
    int32_t rank, n_ranks;   /* whose slice; 0 ranks: 1 */
} hd_parameters_options;

/* Opens the parameters of w, which must be updatable: the masters are the stored values. The
 * indexer, unless o says so, and hash tables are not trained. Gradients, masters and moments are in memory of d, whose stream
 * is s; ops are its operators and must outlive p. */
hd_status hd_parameters_open(hd_parameters **out, const hd_model_spec *spec,
                             const hd_weights *w, hd_device *d, hd_stream *s,
                             const hd_backward_ops *ops, const hd_parameters_options *o,
                             hd_err *err);
void hd_parameters_close(hd_parameters *p); /* NULL is fine */

const hd_gradients *hd_parameters_gradients(const hd_parameters *p);
/* In the order of all elements. Arrays are device memory; gradients are complete after
 * hd_parameters_finish_gradients(). */
const hd_parameter *hd_parameters_all(const hd_parameters *p, int32_t *n);
bool hd_parameters_is_draft(const hd_parameters *p, int32_t i); /* all[i] is the MTP layer's */
int64_t hd_parameters_count(const hd_parameters *p);            /* elements of all ranks */
void hd_parameters_clear_gradients(hd_parameters *p, hd_stream *s);
/* hd_gradients_join_drafts(), and waits for the gradients. */
hd_status hd_parameters_finish_gradients(hd_parameters *p, const hd_ops *ops, hd_stream *s,
                                         hd_err *err);

/* Changes the masters of the routers' biases by +rate or -rate: towards experts that fewer rows chose
 * than the mean of their layer (docs/training.md). selected [layers, n_experts], MTP layers last. */
hd_status hd_parameters_balance(hd_parameters *p, const int64_t *selected, double rate,
                                hd_err *err);

typedef enum hd_parameter_array {
    HD_PARAMETER_MASTER,
    HD_PARAMETER_FIRST,
    HD_PARAMETER_SECOND,
    HD_N_PARAMETER_ARRAYS
} hd_parameter_array;

/* Returns this rank's slice of an array: elements *first .. *first + *n - 1 of all; device memory. */
float *hd_parameters_slice(const hd_parameters *p, hd_parameter_array which, int64_t *first,
                           int64_t *n);

/* Returns the gradients of this rank's slice, *n; device memory. Biases, the last elements, have none. */
float *hd_parameters_gradient_slice(const hd_parameters *p, int64_t *n);
int64_t hd_parameters_summed(
    const hd_parameters *p); /* elements that have a gradient, the first ones */

/* Replaces an array of parameter i by this rank's part of values [rows, cols], in host memory. */
void hd_parameters_set(const hd_parameters *p, int32_t i, hd_parameter_array which,
                       const float *values);

/* Lists all parameters, complete, in out [n] of hd_parameters_all(), without gradients. whole
 * [HD_N_PARAMETER_ARRAYS]: the arrays of all ranks. */
void hd_parameters_list(const hd_parameters *p, float *const *whole, hd_parameter *out);

/* Opens an update of w by the masters of all ranks, memory of hd_map_take(), which it takes; without any
 * by those of this rank, in host memory, which must have all and may not change before it is closed. */
hd_status hd_parameters_update(const hd_parameters *p, hd_map *masters, hd_weights_update **out,
                               hd_err *err);

/* Opens an update that rounds the masters on the device, where operators read the weights, when it is
 * applied, which must be before the next step: of one rank, on a GPU. The host's copy of the weights is old
 * then: hd_weights_fetch(). */
hd_status hd_parameters_update_in_place(hd_parameters *p, hd_weights_update **out, hd_err *err);

#endif
