/* kv.h - the paged KV cache of a model: device memory pools of every layer.
 *
 * Positions are grouped into virtual pages of page_tokens. A virtual page owns one physical
 * page in each of two KV groups. FULL pages live as long as their prefix: MLA latents, V3.2
 * index keys, compressed entries of V4 and V4.1. WINDOW pages live only while the sliding window,
 * a compressor or an n-gram can still read them: raw vectors, compressor state, tokens. All layers
 * share page numbers. In V4.1 some layers write entries, and others read them there: the
 * layer's kv_layer has the pool.
 *
 * cache.h decides which page belongs to which sequence; this file holds the bytes. */
#ifndef HD_KV_KV_H
#define HD_KV_KV_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "hadal_types.h"
#include "kv/page.h"
#include "kv/replay.h"
#include "ops/ops.h"
#include "weights/spec.h"

typedef enum hd_pool_kind {
    HD_POOL_LATENT,     /* MLA: [latent | rotated key] per token */
    HD_POOL_INDEX,      /* indexer keys: per token (V3.2) or per compressed entry */
    HD_POOL_COMPRESSED, /* V4, V4.1: one entry per compress_ratio tokens */
    HD_POOL_SLIDING,    /* V4, V4.1: one raw vector per token */
    HD_POOL_TOKENS,     /* V4.1: the token itself, for n-grams; of the first Engram layer */
    HD_N_POOL_KINDS
} hd_pool_kind;

typedef struct hd_kv hd_kv;

typedef struct hd_kv_options {
    int32_t n_pages[HD_N_KV_GROUPS];
    int32_t n_host[HD_N_KV_GROUPS]; /* pages that host memory can hold */
    int32_t max_drafts;  /* draft rows of a sequence in one step that may be rejected */
    hd_dtype entry_type; /* of the entries that attention reads; HD_NONE: float32 */
    bool rounds; /* V4.1: what is written is rounded to the formats of its own program */
    bool replay[HD_N_REPLAYS]; /* choices of every position are kept beside its FULL page */
    /* HiSparse: entries that attention reads by choice lie in host memory, and of each pool of them
     * so many on the device; 0: all are there */
    int32_t resident;
} hd_kv_options;

/* Layers that may compute only the last positions before an end: their tails. Every layer reads a
 * window of the layer before, so that a tail is longer the earlier its layer is.
 *
 * V4.1: layers at its end that write nothing but WINDOW pages. Later positions read these through the
 * window only, so of a prompt the layers need only their tails.
 * V4 (rebuilds): all layers, and the drafter after them. They write entries too. Where the entries
 * before a page border exist and the windows do not, tails make these again. */
typedef struct hd_kv_tail {
    int32_t first, n; /* these layers; n 0: every layer computes every position */
    int32_t step;     /* by how many positions a tail is longer than that of the next layer */
    bool rebuilds;
} hd_kv_tail;

/* Page size and lookback that the family's layers need. */
typedef struct hd_kv_shape {
    int32_t page_tokens;
    /* positions before the next one whose WINDOW pages are still read; 0: none */
    int32_t lookback;
    hd_kv_tail tail;
} hd_kv_shape;

hd_kv_shape hd_kv_shape_of(const hd_model_spec *spec);

/* What layers with tails compute a sequence for. All 0: for every position. */
typedef struct hd_kv_ends {
    int32_t outputs; /* the first position whose output is needed */
    int32_t branch;  /* a page border where another sequence may continue; 0: none */
    /* V4: a page border. Of the positions before it windows are rebuilt, and no entry is written. 0:
     * every position writes entries */
    int32_t rebuilt;
    /* V4.1, a bounded replay: layers with tails compute the positions from here on, and their windows
     * and those of the layer before them begin here; 0: every window is whole */
    int32_t windows_from;
} hd_kv_ends;

/* Returns how many positions before the page of the first output, before the branch or before the
 * border of a rebuild layer tail.first + i computes. The last layer's tail is the lookback in whole
 * pages: so these pages are whole, and a sequence may continue after them. */
int32_t hd_kv_tail_length(const hd_kv_shape *shape, int32_t i);
int32_t hd_kv_longest_tail(const hd_kv_shape *shape); /* of prompts; 0: there are none */
/* Positions from which on the windows before a border are rebuilt; 0: they cannot be. */
int32_t hd_kv_rebuild_length(const hd_kv_shape *shape);

/* Returns whether layer tail.first + i computes a position. */
bool hd_kv_is_needed(const hd_kv_shape *shape, int32_t i, const hd_kv_ends *ends, int32_t pos);

/* Returns whether a model's entries may have a type: E2M1 stands for the formats of V4.1's own program,
 * window vectors in E4M3, entries in E2M1 with E4M3 scales, keys of the indexer in MXFP4. */
hd_status hd_kv_check_type(const hd_model_spec *spec, hd_dtype type, hd_err *err);

/* Returns whether a GPU that has so many heads of a model may have entries of a type: where attention
 * reads all latents (V2, V3), packed ones are read by more than 16 heads. */
hd_status hd_kv_check_heads(const hd_model_spec *spec, int32_t heads, hd_dtype type,
                            hd_err *err);

/* Returns the bytes of one page of all layers in one KV group. */
size_t hd_kv_page_bytes(const hd_model_spec *spec, int32_t n_layers, hd_kv_group group,
                        hd_dtype entry_type, int32_t max_drafts);

/* Of a FULL page: the bytes of entries that attention reads by choice, 0 if it reads all; and the bytes
 * on the device of the buffers of so many rows that HiSparse has in their place. */
size_t hd_kv_selected_bytes(const hd_model_spec *spec, int32_t n_layers, hd_dtype entry_type);
size_t hd_kv_resident_bytes(const hd_model_spec *spec, int32_t n_layers, hd_dtype entry_type,
                            int32_t rows, int32_t n_pages);

/* Allocates all pools, and the pages of host memory. n_layers includes the MTP layers that are present. The
 * spec must outlive the kv. */
hd_status hd_kv_open(hd_kv **out, const hd_model_spec *spec, int32_t n_layers, hd_device *d,
                     const hd_kv_options *options, hd_err *err);
void hd_kv_close(hd_kv *kv); /* NULL is fine */

/* Gives the memory of all pages, in both tiers, and choices back and keeps its addresses. Nothing may be
 * cached, and no sequence open. Adds the bytes to *bytes. */
hd_status hd_kv_discard(hd_kv *kv, size_t *bytes, hd_err *err);
hd_status hd_kv_restore(hd_kv *kv, hd_err *err); /* takes it again */

/* Fills all pages with random values, to measure steps without a prefill. */
void hd_kv_random_fill(hd_kv *kv, hd_stream *s);

/* Copies a page of all layers, with its choices, to a page of host memory, or back. */
typedef struct hd_page_copy {
    hd_kv_group group;
    bool save; /* device to host; otherwise host to device */
    hd_device_page device;
    hd_host_page host;
} hd_page_copy;

void hd_kv_copy(hd_kv *kv, hd_stream *s, const hd_page_copy *copies, int32_t n);

/* Returns a page of host memory and its bytes. Between copies. */
void *hd_kv_host_page(const hd_kv *kv, hd_kv_group group, hd_host_page host, size_t *bytes);

/* Returns what is kept of a kind of choices; rows is NULL if nothing is. */
const hd_replay_store *hd_kv_replay(const hd_kv *kv, hd_replay kind);

/* Returns one layer's pool with the step's block tables (device memory, [n_seqs,
 * table_stride]). rows.data is NULL if the layer has no such pool. */
hd_paged hd_kv_pool(const hd_kv *kv, int32_t layer, hd_pool_kind pool,
                    const int32_t *const tables[HD_N_KV_GROUPS], int32_t table_stride);

/* Returns the buffer of a layer's pool that attention reads by choice, as entries of one page; and room
 * for numbers of so many rows, until the next layer. n is 0 without HiSparse. */
typedef struct hd_kv_buffer {
    hd_resident resident;
    hd_paged entries;
    int32_t *selected; /* [resident.n] */
} hd_kv_buffer;

hd_kv_buffer hd_kv_resident(const hd_kv *kv, int32_t layer);

/* Returns what all buffers have counted. Between two steps. */
hd_resident_counts hd_kv_read_resident(const hd_kv *kv);

/* Returns the compressor state of a V4 layer: of the attention's own entries, or of the
 * indexer's. */
hd_ring hd_kv_state(const hd_kv *kv, int32_t layer, bool of_index,
                    const int32_t *const tables[HD_N_KV_GROUPS], int32_t table_stride);

#endif
