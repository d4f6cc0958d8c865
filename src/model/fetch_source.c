/* fetch_source.c - see fetch_source_internal.h. */
#include "model/fetch_source_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

hd_status fetch_sources_open(fetch_sources *f, const hd_fetch_source *all, int32_t n,
                             hd_err *err) {
    f->all = calloc((size_t)n, sizeof *f->all);
    f->n = n;
    if (!f->all) return HD_FAIL(err, HD_ENOMEM, "no memory for %d sources of experts", n);
    memcpy(f->all, all, (size_t)n * sizeof *f->all);
    return HD_OK;
}

void fetch_sources_close(fetch_sources *f) {
    free(f->all);
    *f = (fetch_sources){0};
}

static bool may_have(const hd_fetch_source *source, int32_t layer, int32_t expert) {
    if (source->held.n == 0) return true;
    return hd_shard_holds(source->held, expert,
                          hd_weights_expert_map(source->has, layer)->n_slots);
}

int32_t fetch_source_of(const fetch_sources *f, int32_t layer, int32_t expert) {
    for (int32_t i = 0; i < f->n; i++) {
        const hd_fetch_source *source = &f->all[i];
        if (may_have(source, layer, expert) &&
            hd_weights_held_expert(source->has, layer, HD_EXPERT_GATE, expert)) {
            return i;
        }
    }
    return -1;
}

const void *hd_expert_fetch_find(void *weights, int32_t layer, int32_t expert, int32_t array,
                                 size_t *bytes) {
    const hd_role role = (hd_role)((int32_t)HD_EXPERT_GATE + array / 2);
    const hd_weight *m = hd_weights_held_expert(weights, layer, role, expert);
    if (!m) return NULL;
    const hd_stored_format f = hd_weight_format(m);
    const bool scale = array % 2;
    if (scale && !m->scale) return NULL;
    *bytes = scale ? hd_stored_scale_bytes(&f, m->rows, m->cols)
                   : hd_stored_data_bytes(&f, m->rows, m->cols);
    return scale ? m->scale : m->data;
}

static uint64_t queue_read(const hd_fetch_source *source, int32_t layer,
                           const hd_fetch_copy *copy) {
    size_t bytes;
    const int32_t expert = copy->what / HD_PIECE_ARRAYS, array = copy->what % HD_PIECE_ARRAYS;
    void *weights = (void *)(uintptr_t)source->has; /* which is only read */
    const uint8_t *first = hd_expert_fetch_find(weights, layer, expert, array, &bytes);
    const hd_piece_read read = {.layer = layer,
                                .expert = expert,
                                .array = array,
                                .at = (uint64_t)((const uint8_t *)copy->from - first),
                                .to = copy->to,
                                .file = copy->from,
                                .bytes = copy->bytes};
    return hd_piece_reader_queue(source->reader, &read);
}

void fetch_queue(const fetch_sources *f, hd_stream *s, int32_t layer,
                 const hd_fetch_copy *copies, int32_t n, uint64_t *reads) {
    for (int32_t i = 0; i < n; i++) {
        const hd_fetch_source *source = &f->all[copies[i].peer];
        if (source->reader) {
            assert(reads);
            reads[copies[i].peer] = queue_read(source, layer, &copies[i]);
        } else {
            hd_stream_copy(s, copies[i].to, copies[i].from, copies[i].bytes);
        }
    }
}

void fetch_await(const fetch_sources *f, const uint64_t *reads) {
    for (int32_t i = 0; i < f->n; i++) {
        if (f->all[i].reader) hd_piece_reader_await(f->all[i].reader, reads[i]);
    }
}
