/* weights.h - loads model weights: the tensors of a schema, bound to a safetensors
 * checkpoint.
 *
 * Opening a checkpoint binds the schema to mapped safetensors files: each matrix becomes an
 * hd_weight that points into the map, in the file's format (quantized or not). A tensor's own
 * dtype and siblings (scale, weight_scale_inv, weight_scale_2) determine its format, not the
 * config. */
#ifndef HD_WEIGHTS_WEIGHTS_H
#define HD_WEIGHTS_WEIGHTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/device.h"
#include "base/dtype.h"
#include "base/expert_table.h"
#include "base/status.h"
#include "weights/parallel_config.h"
#include "weights/routing.h"
#include "weights/schema.h"
#include "weights/spec.h"

/* ---- bound weights ---- */

typedef struct hd_weights hd_weights;
typedef struct hd_weights_update hd_weights_update; /* update.h */
typedef struct hd_checkpoint hd_checkpoint;         /* safetensors.h */
typedef struct hd_tensor hd_tensor;                 /* safetensors.h */

/* Opens a checkpoint: maps MODEL_DIR's safetensors (single file or index), checks every
 * header against the format and every tensor against the schema, and binds them. Errors name
 * missing, misshapen or unreadable tensors. MTP layers whose tensors are all absent are left
 * out: then hd_weights_n_mtp() is smaller than spec->n_mtp. Every scale is read and must be
 * a positive number. The spec must outlive the weights. */
hd_status hd_weights_open(hd_weights **out, const char *model_dir, const hd_model_spec *spec,
                          hd_err *err);
void hd_weights_close(hd_weights *w); /* NULL is fine */

/* The same, in memory of this process: nobody else can change these weights, and update.h
 * can. */
hd_status hd_weights_open_updatable(hd_weights **out, const char *model_dir,
                                    const hd_model_spec *spec, hd_err *err);

/* The same, but routed experts stay elsewhere, in their files, and their scales are not read:
 * model/expert_disk.h fetches them. hd_weights_upload() then copies everything else to memory of the
 * device, also of the host. */
hd_status hd_weights_open_unstaged(hd_weights **out, const char *model_dir,
                                   const hd_model_spec *spec, hd_err *err);

typedef struct hd_dummy_options {
    hd_parallel_config parallel; /* all zero: one rank */
    int32_t rank;
    hd_routing routing; /* MODEL: routers use their logits, hash layers uniform experts */
    hd_device *device;  /* where they are generated; NULL: host memory, to be uploaded */
    hd_stream *stream;  /* stream of that device */
    /* without values: tensors have their shapes and formats, and no bytes to read */
    bool shapes_only;
    bool experts_later; /* on the host: hd_weights_hold_experts() makes their values */
    bool movable;       /* on a device: experts/expert_moves.h */
} hd_dummy_options;

/* Opens random weights (dummy weights) of a spec, in the formats it declares, for
 * benchmarks. Matrices preserve the magnitude of activations, norms are ones, and every
 * opening generates the same values. options NULL: all weights, on the host. */
hd_status hd_weights_open_dummy(hd_weights **out, const hd_model_spec *spec,
                                const hd_dummy_options *options, hd_err *err);

/* Opens one rank's shard of complete weights in host memory. Shards by rows point into
 * `whole`, which must outlive them; shards by columns are copied. */
hd_status hd_weights_open_shards(hd_weights **out, const hd_weights *whole,
                                 const hd_parallel_config *parallel, int32_t rank, hd_err *err);

/* Opens a view of complete weights without the routed experts: model/expert_fetch.h fetches those from
 * `whole`, which must outlive it. */
hd_status hd_weights_open_without_experts(hd_weights **out, const hd_weights *whole,
                                          hd_err *err);

/* Takes the values of `whole` again, after update u of it, NULL: all; also of experts that came from
 * other ranks. Addresses stay. Between two steps. On a device that is copied on s, and waited for. */
hd_status hd_weights_renew_shard(hd_weights *w, const hd_weights *whole,
                                 const hd_weights_update *u, hd_stream *s, hd_err *err);

/* The same of all, into a device's memory, which hd_weights_discard() has given back: HD_ENOMEM, there
 * is none. Else nothing. */
hd_status hd_weights_restore_shard(hd_weights *w, const hd_weights *whole, hd_stream *s,
                                   hd_err *err);
/* Before an update of complete weights of which devices have shards. */
void hd_weights_are_on_devices(hd_weights *whole);

/* Gives the memory of a shard's own copies back to the system, until it is renewed; returns the
 * bytes. */
size_t hd_weights_discard_shard(hd_weights *w);

/* Returns the shard of these weights: the complete model, unless they were sharded. */
const hd_shard *hd_weights_shard(const hd_weights *w);

/* Progress callback of an upload; it may be called some thousand times. */
typedef struct hd_upload_watch {
    void (*moved)(void *ctx, size_t done, size_t total); /* bytes; NULL: none */
    void *ctx;
} hd_upload_watch;

/* Uploads everything that operators read to memory of the stream's device, unless that is
 * host memory and no expert is elsewhere, and redirects matrices, experts, vectors and tables to it; waits for the
 * copies. The device owns the memory. watch NULL: no progress callback. */
hd_status hd_weights_upload(hd_weights *w, hd_device *d, hd_stream *s,
                            const hd_upload_watch *watch, hd_err *err);
/* Takes the device's memory again after hd_weights_discard(), with the same values. HD_ENOMEM: there is
 * none. Host memory comes again when it is written. */
hd_status hd_weights_restore(hd_weights *w, hd_stream *s, hd_err *err);
/* Copies what operators read on the device to the host's arrays, which an update in place leaves. */
hd_status hd_weights_fetch(const hd_weights *w, hd_stream *s, hd_err *err);
/* The device with that memory, or NULL: operators read host memory. */
hd_device *hd_weights_device(const hd_weights *w);
int32_t hd_weights_n_mtp(const hd_weights *w);
size_t hd_weights_bytes(const hd_weights *w); /* of all tensors as stored */
/* Whether layers need experts that these weights do not have in memory. */
bool hd_weights_has_experts_elsewhere(const hd_weights *w);

/* Returns a matrix, or NULL if this layer has none of that role. If an MTP layer has no
 * EMBED or HEAD of its own, or the model no HEAD because it is tied, it returns the tensor
 * that replaces it. */
const hd_weight *hd_weights_matrix(const hd_weights *w, int32_t layer, hd_role role);

/* ---- experts in slots ---- */

/* Returns the matrices of one MoE layer in the shard's n_experts slots, or NULL if there are
 * none, as with any role but EXPERT_GATE, EXPERT_UP and EXPERT_DOWN. It stays the same struct. */
const hd_expert_table *hd_weights_experts(const hd_weights *w, int32_t layer, hd_role role);

/* Keeps the experts of layers below n_layers in host memory: makes those that were left for later, and
 * pins all until d is closed, which must be before w. *bytes: pinned, also after a failure. */
hd_status hd_weights_hold_experts(const hd_weights *w, int32_t n_layers, hd_device *d,
                                  size_t *bytes, hd_err *err);

/* Slots of device memory, one for each expert of a layer. */
typedef struct hd_expert_places {
    uint8_t *memory; /* [n_experts, slot_bytes] */
    size_t slot_bytes;
    const int64_t *data_at, *scale_at; /* [3] in a slot: of gate, up, down */
} hd_expert_places;

/* Copies the experts of a layer of complete weights, or makes random ones, in the stream's device memory. */
void hd_weights_copy_experts(const hd_weights *w, int32_t layer, const hd_expert_places *to,
                             hd_stream *s);

/* Returns the matrix of an expert where this rank has it, in device memory after an upload; NULL:
 * the layer is dense, or another rank has it. */
const hd_weight *hd_weights_held_expert(const hd_weights *w, int32_t layer, hd_role role,
                                        int32_t expert);

/* Which expert each slot of an MoE layer holds. The slots of all ep ranks are numbered in
 * one row, by rank; without expert parallelism they are this rank's. */
typedef struct hd_expert_map {
    /* [n_experts, n_choices] where this rank's rows go, each by its number modulo n_choices; device
     * memory */
    const int32_t *slot;
    /* hd_split_graph (moe/split.h) of the slots on ranks; device memory; NULL: experts have no copies */
    const int32_t *graph;
    const int32_t *expert; /* [n_slots] the expert in each slot; host memory */
    int32_t n_slots, n_ranks, n_choices;
    uint32_t version; /* how many times the map has been replaced */
} hd_expert_map;

/* Returns the map of a layer, or NULL if it is dense. It stays the same struct. */
const hd_expert_map *hd_weights_expert_map(const hd_weights *w, int32_t layer);

/* Replaces, between two steps, which expert each slot holds: expert [n_slots], each at least
 * once; the slots of this rank only such experts as it has from the start, or were staged. Others
 * that were staged, and are in no slot of the layer, are freed. Ranks must replace
 * between the same two steps. Steps that are queued on s before this call use the old map,
 * later ones the new map and the new matrices; captured graphs stay valid. Logits keep their
 * bits. After an error the old map stays. */
hd_status hd_weights_place_experts(hd_weights *w, int32_t layer, const int32_t *expert,
                                   hd_stream *s, hd_err *err);

/* ---- vectors and tables ---- */

/* Returns a small tensor (norm, bias, sink, position bias, hyper-connection) as float32 in
 * row-major order, or NULL. The weights own it, or it is in the map if the file has float32. */
const float *hd_weights_vector(const hd_weights *w, int32_t layer, hd_role role);

/* Returns ROUTER_HASH, or the random choices of dummy weights, as [vocab, top_k] expert ids,
 * checked to be in range, or NULL. */
const int32_t *hd_weights_table(const hd_weights *w, int32_t layer);

/* Returns the class of every token for Engram's hashes [vocab], or NULL without Engram. Those of a
 * checkpoint come from its tokenizer; dummy weights have classes by number. */
const int32_t *hd_weights_token_classes(const hd_weights *w);

/* ---- inspecting a checkpoint that may be incomplete ---- */

/* Like hd_weights_open, but a tensor that is missing or does not fit is only recorded, and
 * no scale is read. Files that violate their format are still refused. */
hd_status hd_weights_survey(hd_weights **out, const char *model_dir, const hd_model_spec *spec,
                            hd_err *err);

/* Returns the error that hd_weights_open would report (without scales); code HD_OK if there
 * is none. */
const hd_err *hd_weights_problem(const hd_weights *w);

const hd_schema *hd_weights_schema(const hd_weights *w);
const hd_checkpoint *hd_weights_checkpoint(const hd_weights *w); /* NULL: dummies */

/* Returns whether schema->decls[decl] is required but absent from the files. */
bool hd_weights_missing(const hd_weights *w, int32_t decl);

/* Returns schema->decls[decl] as stored, vectors as one row; NULL if it is missing or does
 * not fit. */
const hd_weight *hd_weights_stored(const hd_weights *w, int32_t decl);

/* Checks every scale of decls[decl]: none may be zero, negative, infinite or NaN. */
hd_status hd_weights_check_scales(const hd_weights *w, int32_t decl, hd_err *err);

/* Returns the tensor of the checkpoint that decls[decl] is or is part of, and the one that its
 * block scales are, or NULL. */
const hd_tensor *hd_weights_tensor(const hd_weights *w, int32_t decl);
const hd_tensor *hd_weights_scale_tensor(const hd_weights *w, int32_t decl);

/* The same of a copy of its scales; scales NULL: it has none. */
hd_status hd_weights_check_copied_scales(const hd_weights *w, int32_t decl, const void *scales,
                                         hd_err *err);

/* Checks every value of decls[decl]: none may be infinite or NaN. */
hd_status hd_weights_check_values(const hd_weights *w, int32_t decl, hd_err *err);

typedef enum hd_use {
    HD_USE_UNKNOWN, /* not part of this model */
    HD_USE_DATA,
    HD_USE_SCALE,  /* scale of a quantized tensor */
    HD_USE_IGNORED /* known but unused: calibration of activations and caches */
} hd_use;

/* Returns the use of tensor i of the checkpoint. *decl is its index in the schema, or -1. */
hd_use hd_weights_use(const hd_weights *w, int32_t i, int32_t *decl);

#endif
