/* replay.c - choices of layers beside the pages: their memory and rows. */
#include "kv/replay.h"

#include <string.h>

#include "base/checked.h"

hd_status hd_replay_store_open(hd_replay_store *r, hd_device *d, int32_t n_pages, hd_err *err) {
    static const char *const what[HD_N_REPLAYS] = {"routes", "indexer choices"};
    return hd_device_alloc_host(d, &r->rows, hd_replay_page_bytes(r) * (size_t)n_pages,
                                what[r->kind], err);
}

size_t hd_replay_page_bytes(const hd_replay_store *r) {
    return (size_t)r->page_tokens * (size_t)r->shape.row_bytes;
}

static int32_t layer_bytes(const hd_replay_store *r) {
    return r->shape.top_k * r->shape.number_bytes;
}

hd_replay_log hd_replay_log_of(const hd_replay_store *r, int32_t layer, const int32_t *table,
                               int32_t table_stride) {
    const int32_t index = r->rows ? hd_replay_layer(r->spec, r->kind, layer) : -1;
    if (index < 0) return (hd_replay_log){.data = NULL};
    return (hd_replay_log){.data = (uint8_t *)r->rows + (ptrdiff_t)index * layer_bytes(r),
                           .table = table,
                           .table_stride = table_stride,
                           .page_tokens = r->page_tokens,
                           .row_bytes = r->shape.row_bytes,
                           .number_bytes = r->shape.number_bytes};
}

/* The layers without experts. */
static void fill_dense(const hd_replay_store *r, uint8_t *out, int32_t n) {
    for (int32_t layer = 0; layer < r->shape.layers; layer++) {
        if (hd_replay_layer(r->spec, HD_REPLAY_EXPERTS, layer) >= 0) continue;
        for (int32_t i = 0; i < n; i++) {
            memset(out + (size_t)i * (size_t)r->shape.row_bytes +
                       (size_t)(layer * layer_bytes(r)),
                   0xff, (size_t)layer_bytes(r));
        }
    }
}

void hd_replay_read(const hd_replay_store *r, const int32_t *pages, int32_t first, int32_t n,
                    uint8_t *out) {
    const size_t row = (size_t)r->shape.row_bytes;
    for (int32_t pos = first, some; pos < first + n; pos += some) {
        const int32_t at = pos % r->page_tokens;
        some = hd_min_i32(first + n - pos, r->page_tokens - at);
        const size_t entry =
            (size_t)pages[pos / r->page_tokens] * (size_t)r->page_tokens + (size_t)at;
        memcpy(out + (size_t)(pos - first) * row, (const uint8_t *)r->rows + entry * row,
               (size_t)some * row);
    }
    if (r->kind == HD_REPLAY_EXPERTS) fill_dense(r, out, n);
}
