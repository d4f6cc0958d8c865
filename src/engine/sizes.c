/* sizes.c - the capacities of a rank by the options, and the bytes of its KV pools. */
#include "engine/sizes.h"

#include <math.h>
#include <stdlib.h>

#include "base/checked.h"

enum {
    DEFAULT_RUNNING = 16,
    DEFAULT_CONTEXT = 8192,
    DEFAULT_CHUNK = 256,
    DEFAULT_QUEUE = 1024,
    MIN_CHOICES = 64, /* rows of logits; more rows speed up prompt log-probabilities */
    MAX_HOST_PAGES = 1 << 27,
    /* windows in host memory: of branch points and ends of turns */
    MIN_SNAPSHOTS = 256,
    SNAPSHOTS_PER_RUNNING = 16
};

static int32_t or_default(int64_t value, int64_t standard) {
    const int64_t v = value > 0 ? value : standard;
    return v < INT32_MAX ? (int32_t)v : INT32_MAX;
}

static int32_t pages(const hd_engine_sizes *z, int64_t tokens) {
    /* for any number of tokens */
    return or_default((tokens - 1) / z->shape.page_tokens + 1, 1);
}

/* WINDOW pages: the lookback window and next rows of every running request, and as many
 * again for cached pages. */
hd_engine_sizes hd_engine_sizes_of(const hd_model_spec *spec, bool drafts,
                                   const hd_engine_options *o) {
    hd_engine_sizes z = {.running = or_default(o->max_running, DEFAULT_RUNNING),
                         .chunk = or_default(o->chunk_tokens, DEFAULT_CHUNK),
                         .prompt_ms = or_default(o->prompt_ms, 0),
                         .queue = or_default(o->queue_limit, DEFAULT_QUEUE),
                         .drafts = drafts ? HD_MAX_DRAFTS : 0,
                         .logprobs = or_default(o->max_logprobs, HD_DEFAULT_LOGPROBS),
                         .write_through = o->kv_write_through,
                         .shape = hd_kv_shape_of(spec)};
    if (o->hisparse) z.resident = or_default(strtoll(o->hisparse, NULL, 10), 0);
    z.context = or_default(o->max_context, hd_min_i32(DEFAULT_CONTEXT, spec->max_positions));
    z.step_rows = or_default(o->step_tokens, z.chunk + z.running * HD_MAX_STEP_TOKENS);
    z.sample_rows =
        hd_max_i32(z.running * HD_MAX_STEP_TOKENS, hd_min_i32(MIN_CHOICES, z.step_rows));
    z.seq_pages = pages(&z, (int64_t)z.context + HD_MAX_DRAFTS);
    const int64_t kv_tokens = o->kv_tokens > 0 ? o->kv_tokens : 2 * (int64_t)z.context;
    z.n_pages[HD_KV_FULL] = hd_max_i32(pages(&z, kv_tokens), z.seq_pages);
    if (z.shape.lookback) {
        const int32_t near = pages(&z, (int64_t)z.shape.lookback + z.chunk + HD_MAX_DRAFTS) + 1;
        const int32_t decode = pages(&z, (int64_t)z.shape.lookback + HD_MAX_STEP_TOKENS) + 1;
        z.n_pages[HD_KV_WINDOW] = 2 * (near + z.running * decode);
        const int32_t most = hd_max_i32(MIN_SNAPSHOTS, z.running * SNAPSHOTS_PER_RUNNING);
        z.n_host[HD_KV_WINDOW] = o->snapshot_tokens > 0
                                     ? pages(&z, o->snapshot_tokens)
                                     : hd_min_i32(pages(&z, kv_tokens), most);
    }
    return z;
}

static int32_t whole_pages(double memory, double page) {
    return (int32_t)fmin(fmax(memory / page, 0), MAX_HOST_PAGES);
}

hd_status hd_engine_sizes_divide_host(hd_engine_sizes *z, const hd_engine_options *o,
                                      const double page_bytes[HD_N_KV_GROUPS], hd_err *err) {
    const bool windows = z->shape.lookback > 0;
    double left = o->kv_host_gb * 1e9;
    if (windows) {
        int32_t *n = &z->n_host[HD_KV_WINDOW];
        if (o->snapshot_tokens <= 0) *n = whole_pages(left / 2, page_bytes[HD_KV_WINDOW]);
        left -= *n * page_bytes[HD_KV_WINDOW];
    }
    z->n_host[HD_KV_FULL] = whole_pages(left, page_bytes[HD_KV_FULL]);
    if (z->n_host[HD_KV_FULL] && (!windows || z->n_host[HD_KV_WINDOW])) return HD_OK;
    return HD_FAIL(
        err, HD_EINVAL,
        "kv_host_gb %g holds no page: one of entries has %.0f bytes, %d of windows %.0f",
        o->kv_host_gb, page_bytes[HD_KV_FULL], hd_max_i32(z->n_host[HD_KV_WINDOW], windows),
        page_bytes[HD_KV_WINDOW]);
}

hd_model_runner_options hd_engine_runner_options(const hd_engine_sizes *z) {
    return (hd_model_runner_options){
        .n_slots = z->running,
        .step_rows = z->step_rows,
        .positions = z->context + HD_MAX_DRAFTS,
        .seq_pages = z->seq_pages,
        .n_pages = {z->n_pages[HD_KV_FULL], z->n_pages[HD_KV_WINDOW]},
        .n_host = {z->n_host[HD_KV_FULL],  z->n_host[HD_KV_WINDOW] },
        .resident = z->resident,
        .max_drafts = z->drafts,
        .sample_rows = z->sample_rows,
        .top_stride = z->logprobs
    };
}

size_t hd_engine_kv_bytes(const hd_engine_sizes *z, const hd_model_spec *spec, int32_t n_layers,
                          hd_dtype type) {
    size_t bytes = 0;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        bytes += (size_t)z->n_pages[g] *
                 hd_kv_page_bytes(spec, n_layers, (hd_kv_group)g, type, z->drafts);
    }
    if (z->resident == 0) return bytes;
    return bytes - hd_engine_mirror_bytes(z, spec, n_layers, type) +
           hd_kv_resident_bytes(spec, n_layers, type, z->resident, z->n_pages[HD_KV_FULL]);
}

size_t hd_engine_mirror_bytes(const hd_engine_sizes *z, const hd_model_spec *spec,
                              int32_t n_layers, hd_dtype type) {
    if (z->resident == 0) return 0;
    return (size_t)z->n_pages[HD_KV_FULL] * hd_kv_selected_bytes(spec, n_layers, type);
}

bool hd_engine_sizes_shrink(hd_engine_sizes *z, const hd_model_spec *spec, int32_t n_layers,
                            hd_dtype type, size_t free) {
    const double room = (double)free * HD_POOLS_PART;
    const double page = (double)hd_kv_page_bytes(spec, n_layers, HD_KV_FULL, type, z->drafts);
    const double all = (double)hd_engine_kv_bytes(z, spec, n_layers, type);
    if (all > room) {
        z->n_pages[HD_KV_FULL] -=
            (int32_t)fmin(ceil((all - room) / page), z->n_pages[HD_KV_FULL]);
    }
    return z->n_pages[HD_KV_FULL] >= z->seq_pages;
}

double hd_engine_sizes_requests(const hd_engine_sizes *z) {
    return fmin(z->running, floor((double)z->n_pages[HD_KV_FULL] / z->seq_pages));
}

void hd_engine_sizes_fit(hd_engine_sizes *z, const hd_model_spec *spec, int32_t n_layers,
                         hd_dtype type, size_t free) {
    const double room = (double)free * HD_POOLS_PART;
    const int32_t least = spec->index_topk;
    const int64_t all = (int64_t)z->n_pages[HD_KV_FULL] * z->shape.page_tokens;
    hd_engine_sizes one = *z, two = *z;
    if ((double)hd_engine_kv_bytes(z, spec, n_layers, type) <= room) return;
    one.resident = least;
    two.resident = 2 * least;
    const double bytes = (double)hd_engine_kv_bytes(&one, spec, n_layers, type);
    const double more = (double)hd_engine_kv_bytes(&two, spec, n_layers, type) - bytes;
    const double rows = least * (1 + fmax(0, (room - bytes) / more));
    z->resident = (int32_t)fmin(rows, (double)(all > least ? all : least));
}
