/* resident.h - HiSparse: entries that attention reads by choice lie in host memory, and a buffer on the
 * device has those that were chosen lately (ops/resident.h). Which pools, and the buffers' memory. */
#ifndef HD_KV_RESIDENT_H
#define HD_KV_RESIDENT_H

#include "base/arena.h"
#include "kv/kv.h"

/* Returns the layer's pool of which attention reads only entries that an indexer chose;
 * HD_N_POOL_KINDS: it has none. */
hd_pool_kind hd_kv_selected_pool(const hd_model_spec *spec, int32_t layer);

/* Parses a buffer's rows; "off" or NULL: 0. Refuses what is no number, a model that has no such pool, and
 * fewer rows than a position selects. */
hd_status hd_kv_resident_rows(int32_t *rows, const char *text, const hd_model_spec *spec,
                              hd_err *err);

/* What buffers that are used one after the other share. */
typedef struct hd_resident_scratch {
    int32_t *missed, *victim, *selected, *zero;
} hd_resident_scratch;

void hd_resident_scratch_place(hd_resident_scratch *x, hd_arena *a, int32_t n_rows);

/* Places a buffer of n_rows for a pool of n_entries; the type of rows is the caller's. */
void hd_resident_place(hd_resident *r, hd_arena *a, const hd_resident_scratch *x,
                       size_t entry_bytes, int32_t n_rows, int64_t n_entries);

#endif
