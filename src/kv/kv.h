/* kv.h - what a model remembers of its sequences, in pages.
 *
 * Positions are grouped into virtual pages of page_tokens. A virtual page owns one physical
 * page in each of two lifetimes: ENTRIES lives as long as its prefix (MLA latents, V3.2 index
 * keys, V4 compressed entries), WINDOW only while the sliding window or a compressor can
 * still look back at it (V4 raw vectors and compressor state). All layers share page numbers.
 *
 * A slot is the place of one sequence. Every slot owns its pages from the start; nothing is
 * shared between sequences yet. */
#ifndef HD_KV_KV_H
#define HD_KV_KV_H

#include <stdint.h>

#include "backend/backend.h"
#include "ops/ops.h"
#include "weights/spec.h"

typedef enum hd_lifetime { HD_LIFE_ENTRIES, HD_LIFE_WINDOW, HD_N_LIFETIMES } hd_lifetime;

typedef enum hd_pool_kind {
    HD_POOL_LATENT,     /* MLA: [latent | roped key] per token */
    HD_POOL_INDEX,      /* indexer keys: per token (V3.2) or per CSA entry (V4) */
    HD_POOL_COMPRESSED, /* V4: one entry per compress_ratio tokens */
    HD_POOL_RECENT,     /* V4: one raw vector per token */
    HD_N_POOLS
} hd_pool_kind;

typedef struct hd_kv hd_kv;

typedef struct hd_kv_options {
    int32_t n_slots;
    int32_t slot_tokens; /* the longest sequence a slot can hold */
    int32_t act_bytes;   /* element size of the op table */
} hd_kv_options;

/* Takes all memory now. n_layers counts the MTP layers that are present. The spec must
 * outlive the kv. */
hd_status hd_kv_open(hd_kv **out, const hd_model_spec *spec, int32_t n_layers, hd_device *d,
                     const hd_kv_options *options, hd_err *err);
void hd_kv_close(hd_kv *kv); /* NULL is fine */

size_t hd_kv_bytes(const hd_kv *kv);
int32_t hd_kv_page_tokens(const hd_kv *kv);
int32_t hd_kv_slot_pages(const hd_kv *kv);

/* Physical pages of a slot's virtual pages into pages[hd_kv_slot_pages()]. */
void hd_kv_slot_table(const hd_kv *kv, int32_t slot, hd_lifetime life, int32_t *pages);

/* One layer's pool, with the page table of the step (device memory, [n_seqs, stride]).
 * data is NULL where the layer has no such pool. */
hd_paged hd_kv_pool(const hd_kv *kv, int32_t layer, hd_pool_kind pool,
                    const int32_t *const tables[HD_N_LIFETIMES], int32_t table_stride);

/* Compressor state of a V4 layer: of the attention's own entries, or of the indexer's. */
hd_ring hd_kv_state(const hd_kv *kv, int32_t layer, bool of_index,
                    const int32_t *const tables[HD_N_LIFETIMES], int32_t table_stride);

#endif
