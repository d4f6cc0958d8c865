/* expert_moves.h - experts that come from other ranks: in host memory as bytes, which may have
 * travelled; between devices of one process as addresses, from which they are copied. */
#ifndef HD_WEIGHTS_EXPERTS_EXPERT_MOVES_H
#define HD_WEIGHTS_EXPERTS_EXPERT_MOVES_H

#include "weights/weights.h"

/* Before hd_weights_upload(): experts of this shard may move between devices of this process, so the
 * upload takes spare memory for those of one layer. Host memory needs no such call. */
void hd_weights_make_movable(hd_weights *w);

/* Returns the bytes of an expert of a layer: its matrices with their scales. 0: a dense layer. */
size_t hd_weights_expert_bytes(const hd_weights *w, int32_t layer);

/* Returns the bytes of a packed expert of a layer: formats, the map's version, a checksum, and its
 * matrices with their scales; on a device their addresses. 0: a dense layer. */
size_t hd_weights_packed_bytes(const hd_weights *w, int32_t layer);

/* Packs an expert that this rank has. HD_EINVAL: it has none, or of another format than the
 * others of the layer. */
hd_status hd_weights_pack_expert(const hd_weights *w, int32_t layer, int32_t expert, void *out,
                                 hd_err *err);

/* Checks a packed expert and keeps a copy, for hd_weights_place_experts(). HD_EFORMAT, and
 * nothing is kept: it is not this expert, was packed under another version of the map, or has
 * another checksum or format. On a device the copy is queued on s into spare memory, HD_ENOMEM
 * if there is none: the last use of what lay there, and the expert at its source, must come before and
 * stay. Else s may be NULL. */
hd_status hd_weights_stage_expert(hd_weights *w, int32_t layer, int32_t expert,
                                  const void *packed, hd_stream *s, hd_err *err);

/* On a device: adds a checksum of an expert that this rank has, or that was staged, to *sum, in device
 * memory. */
void hd_weights_sum_expert(const hd_weights *w, int32_t layer, int32_t expert, hd_stream *s,
                           uint64_t *sum);

/* Checks a map as hd_weights_place_experts() does. */
hd_status hd_weights_check_map(const hd_weights *w, int32_t layer, const int32_t *expert,
                               hd_err *err);

/* Frees staged experts that no slot holds. */
void hd_weights_drop_staged(hd_weights *w);

#endif
