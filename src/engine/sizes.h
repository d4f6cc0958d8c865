/* sizes.h - the capacities of a rank, as engine options say or by default: rows of a step, pages of
 * the KV pools, buffers of sampling. A rank is opened with them (rank.c), and the memory of a rank
 * that does not exist yet is predicted from them (capacity/memory.h). */
#ifndef HD_ENGINE_SIZES_H
#define HD_ENGINE_SIZES_H

#include "hadal.h"
#include "runner/model_runner.h"
#include "weights/spec.h"

typedef struct hd_engine_sizes {
    int32_t running, context, chunk, prompt_ms, step_rows, sample_rows, queue, drafts, logprobs;
    hd_kv_shape shape;
    int32_t seq_pages, n_pages[HD_N_KV_GROUPS], n_host[HD_N_KV_GROUPS];
    int32_t resident; /* rows of each of HiSparse's buffers; 0: "off", or "auto" so far */
    bool write_through;
} hd_engine_sizes;

/* drafts: whether the engine drafts. */
hd_engine_sizes hd_engine_sizes_of(const hd_model_spec *spec, bool drafts,
                                   const hd_engine_options *o);

/* Divides kv_host_gb of host memory between the KV groups. page_bytes: of a page of each group
 * there. HD_EINVAL: a group that the model has gets no page. */
hd_status hd_engine_sizes_divide_host(hd_engine_sizes *z, const hd_engine_options *o,
                                      const double page_bytes[HD_N_KV_GROUPS], hd_err *err);

/* Returns the options of a model runner that follow from the sizes. */
hd_model_runner_options hd_engine_runner_options(const hd_engine_sizes *z);

/* Of free memory, for KV pools: activations and graphs take the rest. */
#define HD_POOLS_PART 0.875

/* Of the memory that is free beside weights and KV pools, for experts that are elsewhere. */
#define HD_EXPERTS_PART 0.8

/* If the pools do not fit into that part of the free bytes: entries that attention reads by choice go to host
 * memory (HiSparse), and the buffers get what the other pools leave. */
void hd_engine_sizes_fit(hd_engine_sizes *z, const hd_model_spec *spec, int32_t n_layers,
                         hd_dtype type, size_t free);
/* Or: the FULL pages become fewer. Returns false if not even one sequence would have room. */
bool hd_engine_sizes_shrink(hd_engine_sizes *z, const hd_model_spec *spec, int32_t n_layers,
                            hd_dtype type, size_t free);
/* Returns how many requests of the whole context run at a time. */
double hd_engine_sizes_requests(const hd_engine_sizes *z);

/* Returns the bytes of a rank's KV pools on its device. n_layers includes those of the drafter that are
 * present; type: of the entries that attention reads, HD_NONE for float32. */
size_t hd_engine_kv_bytes(const hd_engine_sizes *z, const hd_model_spec *spec, int32_t n_layers,
                          hd_dtype type);
/* And of those that HiSparse has in host memory. */
size_t hd_engine_mirror_bytes(const hd_engine_sizes *z, const hd_model_spec *spec,
                              int32_t n_layers, hd_dtype type);

#endif
