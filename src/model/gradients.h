/* gradients.h - the gradients of a model's parameters, float32, in device memory. */
#ifndef HD_MODEL_GRADIENTS_H
#define HD_MODEL_GRADIENTS_H

#include "ops/ops.h"
#include "weights/weights.h"

typedef struct hd_gradients hd_gradients;

/* Returns whether a tensor is trained; of a layer's experts it is asked for one. */
typedef bool hd_trains_fn(void *ctx, const hd_tensor_decl *decl);

/* Returns false for what the model's loss has no gradient of: the indexer, the router's bias and hash
 * table. The indexer has one of a loss of its own (hd_loss). */
bool hd_gradients_exist(const hd_tensor_decl *decl);

/* Allocates gradients, zero, for the tensors of complete weights that are trained; trains NULL:
 * all of hd_gradients_exist(). MTP layers that the weights lack are left out. */
hd_status hd_gradients_open(hd_gradients **out, const hd_weights *w, hd_device *d,
                            hd_trains_fn *trains, void *ctx, hd_err *err);
void hd_gradients_close(hd_gradients *g); /* NULL is fine */

/* Returns the gradient of a tensor, [rows, cols] as in the schema; of a layer's experts
 * [n_experts, rows, cols]; NULL if it is not trained. A tensor that stands for another one (a
 * tied head, an MTP layer's embedding) shares the gradient of that one. */
float *hd_gradients_at(const hd_gradients *g, int32_t layer, hd_role role);

/* The part that the MTP layer's loss has in the gradient of EMBED, HEAD or FINAL_NORM of the main model;
 * NULL if that or the MTP layer is not trained. It is a sum over rows of its own, so that its bits do
 * not depend on how rows are divided into steps. */
float *hd_gradients_of_drafts(const hd_gradients *g, hd_role role);

/* Queues that these parts are added to the gradients of the main model, once after the last row, and
 * cleared. */
void hd_gradients_join_drafts(hd_gradients *g, const hd_ops *ops, hd_stream *s);

/* All gradients lie in one array; *n receives the number of its elements. */
float *hd_gradients_all(const hd_gradients *g, int64_t *n);

#endif
