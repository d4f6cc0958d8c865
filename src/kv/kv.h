/* kv.h - the paged KV cache of a model: device memory pools of every layer.
 *
 * Positions are grouped into virtual pages of page_tokens. A virtual page owns one physical
 * page in each of two KV groups. FULL pages live as long as their prefix: MLA latents, V3.2
 * index keys, V4 compressed entries. WINDOW pages live only while the sliding window or a
 * compressor can still read them: V4 raw vectors and compressor state. All layers share page
 * numbers.
 *
 * cache.h decides which page belongs to which sequence; this file holds the bytes. */
#ifndef HD_KV_KV_H
#define HD_KV_KV_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "hadal_types.h"
#include "ops/ops.h"
#include "weights/spec.h"

typedef enum hd_pool_kind {
    HD_POOL_LATENT,     /* MLA: [latent | rotated key] per token */
    HD_POOL_INDEX,      /* indexer keys: per token (V3.2) or per CSA entry (V4) */
    HD_POOL_COMPRESSED, /* V4: one entry per compress_ratio tokens */
    HD_POOL_SLIDING,    /* V4: one raw vector per token */
    HD_N_POOL_KINDS
} hd_pool_kind;

typedef struct hd_kv hd_kv;

typedef struct hd_kv_options {
    int32_t n_pages[HD_N_KV_GROUPS];
    int32_t n_snapshots; /* WINDOW pages that host memory can hold */
    int32_t max_drafts;  /* draft rows of a sequence in one step that may be rejected */
} hd_kv_options;

/* Page size and lookback that the family's layers need. */
typedef struct hd_kv_shape {
    int32_t page_tokens;
    /* positions before the next one whose WINDOW pages are still read; 0: none */
    int32_t lookback;
} hd_kv_shape;

hd_kv_shape hd_kv_shape_of(const hd_model_spec *spec);

/* Returns the bytes of one page of all layers in one KV group. */
size_t hd_kv_page_bytes(const hd_model_spec *spec, int32_t n_layers, hd_kv_group group,
                        int32_t max_drafts);

/* Allocates all pools and snapshots. n_layers includes the MTP layers that are present. The
 * spec must outlive the kv. */
hd_status hd_kv_open(hd_kv **out, const hd_model_spec *spec, int32_t n_layers, hd_device *d,
                     const hd_kv_options *options, hd_err *err);
void hd_kv_close(hd_kv *kv); /* NULL is fine */

/* Fills all pages with random values, to measure steps without a prefill. */
void hd_kv_random_fill(hd_kv *kv, hd_stream *s);

/* Copies a WINDOW page of all layers to a snapshot in host memory, or back. */
typedef struct hd_page_copy {
    bool save; /* page to snapshot; otherwise snapshot to page */
    int32_t page, snapshot;
} hd_page_copy;

void hd_kv_copy(hd_kv *kv, hd_stream *s, const hd_page_copy *copies, int32_t n);

/* Returns one layer's pool with the step's block tables (device memory, [n_seqs,
 * table_stride]). rows.data is NULL if the layer has no such pool. */
hd_paged hd_kv_pool(const hd_kv *kv, int32_t layer, hd_pool_kind pool,
                    const int32_t *const tables[HD_N_KV_GROUPS], int32_t table_stride);

/* Returns the compressor state of a V4 layer: of the attention's own entries, or of the
 * indexer's. */
hd_ring hd_kv_state(const hd_kv *kv, int32_t layer, bool of_index,
                    const int32_t *const tables[HD_N_KV_GROUPS], int32_t table_stride);

#endif
