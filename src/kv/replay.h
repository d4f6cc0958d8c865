/* replay.h - what the layers chose for each position, kept in host memory beside the FULL pages:
 * experts (routing replay), keys (indexer replay). Owned by the step thread. */
#ifndef HD_KV_REPLAY_H
#define HD_KV_REPLAY_H

#include "device/device.h"
#include "hadal_types.h"
#include "ops/replay.h"
#include "weights/spec.h"

/* The choices of a position: [layers, top_k] numbers of number_bytes each. Experts: of all
 * decoder layers; those without experts have -1, all bits set. Keys: of the layers that have an
 * indexer, in ascending order, then -1. */
typedef struct hd_replay_shape {
    int32_t layers, top_k;
    int32_t number_bytes; /* 1, 2 or 4 */
    int32_t row_bytes;    /* 0: the model chooses nothing of this kind */
} hd_replay_shape;

hd_replay_shape hd_replay_shape_of(const hd_model_spec *spec, hd_replay kind);

/* Returns the index of a layer in such a row, or -1 if the layer chooses nothing, or its choices
 * are not kept, as those of an MTP layer. */
int32_t hd_replay_layer(const hd_model_spec *spec, hd_replay kind, int32_t layer);

/* Returns how many first positions of a sequence see no more keys than an indexer selects, in
 * every layer: their rows are all keys. */
int32_t hd_replay_trivial(const hd_model_spec *spec);

/* The rows of all pages. */
typedef struct hd_replay_store {
    const hd_model_spec *spec;
    hd_replay kind;
    hd_replay_shape shape;
    int32_t page_tokens;
    void *rows; /* [pages, page_tokens, row_bytes] host memory; NULL: nothing is kept */
} hd_replay_store;

hd_status hd_replay_store_open(hd_replay_store *r, hd_device *d, int32_t n_pages, hd_err *err);

/* Returns the bytes of a page. */
size_t hd_replay_page_bytes(const hd_replay_store *r);

/* Returns where a layer keeps its choices, without seq and pos; data is NULL if they are not
 * kept. table: the FULL block tables. */
hd_replay_log hd_replay_log_of(const hd_replay_store *r, int32_t layer, const int32_t *table,
                               int32_t table_stride);

/* Copies the rows of positions first .. first + n - 1 to out [n, row_bytes]. pages: the FULL block
 * table of their sequence. Between steps. */
void hd_replay_read(const hd_replay_store *r, const int32_t *pages, int32_t first, int32_t n,
                    uint8_t *out);

#endif
