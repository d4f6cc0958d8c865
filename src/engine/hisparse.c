/* hisparse.c - HiSparse (docs/kv.md): the option, and when "auto" turns it on. */
#include "engine/hisparse.h"

#include <string.h>

#include "engine/notices.h"
#include "kv/resident.h"

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

void engine_hisparse_choose(hd_engine *e, const hd_engine_options *o, hd_engine_sizes *z) {
    if (!is_auto(o) || !e->has_model) return;
    const int32_t n_layers = e->spec->n_layers + hd_weights_n_mtp(e->whole);
    if (hd_kv_selected_bytes(e->spec, n_layers, HD_F32) == 0) return;
    size_t free = SIZE_MAX;
    for (int32_t i = 0; i < e->n_ranks; i++) {
        if (hd_device_is_host(e->ranks[i].device)) return; /* host memory is what it has */
        const size_t left = hd_device_free_bytes(e->ranks[i].device);
        if (left < free) free = left;
    }
    const hd_dtype type = e->ranks[0].ops.kv_type;
    const size_t all = hd_engine_kv_bytes(z, e->spec, n_layers, type);
    hd_engine_sizes_fit(z, e->spec, n_layers, type, free);
    if (z->resident) engine_note_hisparse(e, z->resident, all, free);
}

void engine_hisparse_read(engine_rank *rank) {
    hd_hisparse_figures *x = &rank->totals.hisparse;
    if (x->rows == 0) return;
    const hd_resident_counts c = hd_model_runner_read_resident(rank->model_runner);
    x->selected = c.selected;
    x->fetched = c.fetched;
}
