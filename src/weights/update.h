/* update.h - replaces weights of an open model by others of the same shapes, whole or not at
 * all.
 *
 * An update is collected first: its tensors are checked against the model, and converted to
 * the formats that the model stores. Nothing of the model changes meanwhile. Then it is
 * applied between two steps, by copying into the arrays that operators read: their addresses
 * stay, so tables of experts and captured graphs stay valid. Copies between memories of one
 * process cannot fail, so an update cannot stop half-way.
 *
 * The weights must come from hd_weights_open_updatable(). Shards of them are renewed after it
 * (hd_weights_renew_shard). */
#ifndef HD_WEIGHTS_UPDATE_H
#define HD_WEIGHTS_UPDATE_H

#include "weights/safetensors.h"
#include "weights/weights.h"

typedef enum hd_weights_selector {
    HD_SELECT_ALL,
    HD_SELECT_TARGET, /* the model without its MTP layers */
    HD_SELECT_DRAFT   /* the MTP layers */
} hd_weights_selector;

typedef struct hd_weights_update_rule {
    hd_weights_selector selector; /* others of the tensors are left out */
    bool whole;                   /* every tensor of the selection must be there */
    bool once;                    /* none of the tensors was added before */
    int32_t n_threads;            /* that check and round; 0: one per core */
} hd_weights_update_rule;

hd_status hd_weights_update_open(hd_weights_update **out, const hd_weights *w, hd_err *err);
void hd_weights_update_close(hd_weights_update *u); /* NULL is fine */

/* Adds the tensors of c, which it takes, also on failure. Each has a name that the model's
 * files may use, the tensor's shape, and either its stored format, with its scales, or F32,
 * F16 or BF16, which are rounded to the stored format (quantize.h). HD_EFORMAT, with the
 * tensor's name: it is unknown, has another shape or format, or a value or scale that is no
 * finite number, or rule->once and it was added before; then nothing of c was added. A tensor that
 * was added before is replaced; memory of which nothing is left to be applied is freed. */
hd_status hd_weights_update_add(hd_weights_update *u, hd_checkpoint *c,
                                const hd_weights_update_rule *rule, hd_err *err);

/* Opens an update that its owner makes itself, when it is applied: fn queues on s what writes the arrays
 * that operators read, in device memory, and waits for it. Nothing may be added. A failure of fn is
 * that of the update. */
typedef hd_status hd_weights_change_fn(void *ctx, hd_stream *s, hd_err *err);
hd_status hd_weights_update_open_in_place(hd_weights_update **out, const hd_weights *w,
                                          hd_weights_change_fn *fn, void *ctx, hd_err *err);

int32_t hd_weights_update_count(const hd_weights_update *u); /* tensors so far */

/* Tensors of w whose values were lost, by hd_weights_discard() or by an update that failed, and that
 * no update has brought back. A model must not compute with any. */
int32_t hd_weights_lost(const hd_weights *w);

/* Gives the memory of w's tensors back to the system and keeps its addresses: all are lost. Of weights
 * on a device only the device's memory is given back, and nothing is lost: hd_weights_restore(). Adds
 * the bytes to *bytes. */
hd_status hd_weights_discard(hd_weights *w, size_t *bytes, hd_err *err);

/* Copies everything into w, the weights that it was opened with, between two steps. s: the
 * stream of the device that has them; copies of host memory are made at once, on the threads of a
 * CPU. An error is the device's; then the tensors of u are lost. */
hd_status hd_weights_update_apply(hd_weights_update *u, hd_weights *w, hd_stream *s,
                                  hd_err *err);

#endif
