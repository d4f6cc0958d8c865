/* hisparse.c - HiSparse (docs/kv.md): the option, and when "auto" turns it on. */
#include "engine/hisparse.h"

#include <stdlib.h>
#include <string.h>

#include "engine/notices.h"

enum { MOST_ROWS = 1 << 27 };

static bool is_auto(const hd_engine_options *o) {
    return o->hisparse && strcmp(o->hisparse, "auto") == 0;
}

static hd_status check_rows(const hd_engine *e, const char *text, hd_err *err) {
    char *end = NULL;
    const long long rows = strtoll(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || rows > MOST_ROWS) {
        return HD_FAIL(err, HD_EINVAL,
                       "hisparse is '%s'; must be off, auto or a number of rows, at most %d",
                       text, MOST_ROWS);
    }
    if (rows >= e->spec->index_topk) return HD_OK;
    return HD_FAIL(err, HD_EINVAL,
                   "hisparse is %lld; a position chooses %d entries, and a buffer has at least "
                   "as many rows",
                   rows, e->spec->index_topk);
}

static bool chooses(const hd_engine *e) {
    return hd_kv_selected_bytes(e->spec, e->spec->n_layers, HD_F32) > 0;
}

hd_status engine_hisparse_check(const hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const char *why = NULL;
    if (!o->hisparse || strcmp(o->hisparse, "off") == 0 || is_auto(o)) return HD_OK;
    if (o->backend && strcmp(o->backend, "null") == 0) why = "the null backend has none";
    if (!chooses(e)) why = "attention reads all of them, and chooses none";
    if (!why) return check_rows(e, o->hisparse, err);
    return HD_FAIL(err, HD_EUNSUPPORTED, "entries cannot lie in host memory here: %s", why);
}

void engine_hisparse_choose(hd_engine *e, const hd_engine_options *o, hd_engine_sizes *z) {
    if (!is_auto(o) || !e->has_model || !chooses(e)) return;
    const int32_t n_layers = e->spec->n_layers + hd_weights_n_mtp(e->whole);
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
