/* hisparse.c - HiSparse (docs/kv.md): the option, and when "auto" turns it on. */
#include "engine/hisparse.h"

#include <string.h>

#include "kv/hisparse_choice.h"
#include "engine/notices.h"
#include "kv/resident.h"

/* Of an H200: what its memory and its host link reach. */
static const double DEVICE_BYTES_S = 4.3e12, LINK_BYTES_S = 40e9;

static bool is_auto(const hd_engine_options *o) {
    return o->hisparse && strcmp(o->hisparse, "auto") == 0;
}

hd_status engine_hisparse_check(const hd_engine *e, const hd_engine_options *o, hd_err *err) {
    int32_t rows;
    if (is_auto(o)) return HD_OK;
    HD_TRY(hd_kv_resident_rows(&rows, o->hisparse, e->spec, err));
    if (rows == 0 || !o->backend || strcmp(o->backend, "null") != 0) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "hisparse is %d: the null backend has no entries",
                   rows);
}

static size_t least_free(const hd_engine *e) {
    size_t free = SIZE_MAX;
    for (int32_t i = 0; i < e->n_ranks; i++) {
        const size_t left = hd_device_free_bytes(e->ranks[i].device);
        if (left < free) free = left;
    }
    return free;
}

/* Of a step that reads all weights and, for each request, its index keys and the entries that it selects.
 * Bytes are what a decode step is bound by. */
static double step_seconds(const hd_engine *e, const hd_engine_sizes *z, int32_t n_layers,
                           hd_dtype type, double requests) {
    const double page =
        (double)hd_kv_page_bytes(e->spec, n_layers, HD_KV_FULL, type, z->drafts);
    const double selected = (double)hd_kv_selected_bytes(e->spec, n_layers, type);
    const double keys = (page - selected) * z->seq_pages;
    const double entries = selected * e->spec->index_topk / z->shape.page_tokens; /* or fewer */
    return ((double)hd_weights_bytes(e->ranks[0].weights) + requests * (keys + entries)) /
           DEVICE_BYTES_S;
}

void engine_hisparse_choose(hd_engine *e, const hd_engine_options *o, hd_engine_sizes *z) {
    if (!is_auto(o) || !e->has_model || hd_device_is_host(e->ranks[0].device)) return;
    const int32_t n_layers = e->spec->n_layers + hd_weights_n_mtp(e->whole);
    if (hd_kv_selected_bytes(e->spec, n_layers, HD_F32) == 0) return;
    const size_t free = least_free(e);
    const hd_dtype type = e->ranks[0].ops.kv_type;
    hd_engine_sizes with = *z, without = *z;
    hd_engine_sizes_fit(&with, e->spec, n_layers, type, free);
    if (with.resident == 0) return; /* all fits, so no request waits for memory */
    const bool any = hd_engine_sizes_shrink(&without, e->spec, n_layers, type, free);
    hd_hisparse_choice c = {.rows = with.resident,
                            .requests = hd_engine_sizes_requests(&with),
                            .fitting = any ? hd_engine_sizes_requests(&without) : 0};
    const double missed =
        hd_hisparse_miss_bytes(e->spec, n_layers, type, with.resident, z->context, c.requests) /
        LINK_BYTES_S;
    hd_hisparse_decide(&c, step_seconds(e, z, n_layers, type, c.requests),
                       step_seconds(e, z, n_layers, type, c.fitting), missed);
    *z = c.on ? with : without;
    engine_note_hisparse(e, &c, (int64_t)without.n_pages[HD_KV_FULL] * z->shape.page_tokens);
}

void engine_hisparse_read(engine_rank *rank) {
    hd_hisparse_figures *x = &rank->totals.hisparse;
    if (x->rows == 0) return;
    const hd_resident_counts c = hd_model_runner_read_resident(rank->model_runner);
    x->selected = c.selected;
    x->fetched = c.fetched;
}
