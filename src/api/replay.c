/* replay.c - routed experts and indexer choices in requests and replies. */
#include "api/replay.h"

#include <string.h>

#include "base/base64.h"
#include "base/checked.h"
#include "engine/engine.h"
#include "kv/kv.h"

const char *const api_routes_dtypes[] = {"uint8", "uint16", "int32", NULL};
const char *const api_indexer_dtypes[] = {"uint16", "int32", NULL};

static int32_t bytes_of(const char *dtype) {
    if (!dtype || strcmp(dtype, "int32") == 0) return 4;
    return strcmp(dtype, "uint16") == 0 ? 2 : 1;
}

static const char *dtype_of(int32_t bytes) {
    return bytes == 1 ? "uint8" : bytes == 2 ? "uint16" : "int32";
}

/* What only stands beside a request for choices. */
static bool take_dependents(api_request *r) {
    const bool experts = r->g.replay[HD_REPLAY_EXPERTS], keys = r->g.replay[HD_REPLAY_KEYS];
    if (r->routes_dtype && !experts) {
        return api_refuse(r, "invalid_value", "return_routed_experts",
                          "routed_experts_dtype wants return_routed_experts: true");
    }
    if ((r->indexer_dtype || r->w.replay[HD_REPLAY_KEYS].compact) && !keys) {
        return api_refuse(r, "invalid_value", "return_indexer_topk",
                          "indexer_topk_dtype and indexer_topk_compact want "
                          "return_indexer_topk: true");
    }
    if (r->g.replay_from == 0 || experts || keys) return true;
    return api_refuse(r, "invalid_value", "return_routed_experts",
                      "routed_experts_start_len wants return_routed_experts or "
                      "return_indexer_topk: true");
}

static bool take_dtype(api_request *r, hd_replay kind, const char *dtype, const char *param) {
    const hd_model_spec *spec = hd_engine_spec(r->ctx->engine);
    const int32_t bytes = r->w.replay[kind].number_bytes = bytes_of(dtype);
    if (!r->g.replay[kind] || bytes >= hd_replay_shape_of(spec, kind).number_bytes) return true;
    return api_refuse(r, "invalid_value", param, "%s %s is too small for the model's numbers",
                      param, dtype);
}

bool api_take_replay(api_request *r) {
    return take_dependents(r) &&
           take_dtype(r, HD_REPLAY_EXPERTS, r->routes_dtype, "routed_experts_dtype") &&
           take_dtype(r, HD_REPLAY_KEYS, r->indexer_dtype, "indexer_topk_dtype");
}

/* Whether a number is -1: all of its bits are set, and it is no expert. */
static bool is_none(const hd_model_spec *spec, hd_replay kind, const hd_replay_rows *rows,
                    int64_t i) {
    const uint8_t *number = rows->rows + i * rows->number_bytes;
    if (kind == HD_REPLAY_EXPERTS) {
        return hd_replay_layer(spec, kind, (int32_t)(i / rows->top_k % rows->layers)) < 0;
    }
    for (int32_t b = 0; b < rows->number_bytes; b++) {
        if (number[b] != 0xff) return false;
    }
    return true;
}

/* Three numbers make whole groups of four characters, of whatever type they are. */
static void put_numbers(api_text *out, const hd_model_spec *spec, hd_replay kind,
                        const hd_replay_rows *rows, int32_t number_bytes) {
    enum { SOME = 3 * 256 };
    uint8_t bytes[SOME * sizeof(int32_t)];
    char text[SOME * sizeof(int32_t) / 3 * 4];
    const int64_t n = (int64_t)rows->n * rows->layers * rows->top_k;
    const int32_t from = rows->number_bytes, used = hd_min_i32(from, number_bytes);
    for (int64_t first = 0; first < n; first += SOME) {
        const int64_t end = n - first < SOME ? n : first + SOME;
        uint8_t *at = bytes;
        for (int64_t i = first; i < end; i++, at += number_bytes) {
            const bool none = is_none(spec, kind, rows, i);
            memset(at, none ? 0xff : 0, (size_t)number_bytes);
            if (!none) memcpy(at, rows->rows + i * from, (size_t)used);
        }
        const size_t n_bytes = (size_t)(at - bytes);
        hd_base64_encode(text, bytes, n_bytes);
        api_put(out, text, hd_base64_length(n_bytes));
    }
}

/* Without the rows that are all keys. */
static hd_replay_rows compact(const hd_model_spec *spec, const hd_replay_rows *rows) {
    hd_replay_rows rest = *rows;
    const int32_t trivial = hd_max_i32(hd_replay_trivial(spec) - rows->from, 0);
    const int32_t cut = hd_min_i32(trivial, rows->n);
    rest.from += cut;
    rest.n -= cut;
    rest.rows += (int64_t)cut * rows->layers * rows->top_k * rows->number_bytes;
    return rest;
}

void api_put_replay(api_text *out, const hd_model_spec *spec, hd_replay kind,
                    const hd_replay_rows *rows, const api_replay_form *form) {
    const char *name = kind == HD_REPLAY_EXPERTS ? "routed_experts" : "indexer_topk";
    const hd_replay_rows shown = form->compact ? compact(spec, rows) : *rows;
    api_write(out, ",%s:", name);
    api_puts(out, "\"");
    put_numbers(out, spec, kind, &shown, form->number_bytes);
    api_puts(out, "\"");
    if (kind == HD_REPLAY_EXPERTS) {
        api_write(out, ",'routed_experts_dtype':%s,'routed_experts_shape':[%d,%d,%d]",
                  dtype_of(form->number_bytes), shown.n, shown.layers, shown.top_k);
    } else {
        api_write(out,
                  ",'indexer_topk_dtype':%s,'indexer_topk_shape':[%d,%d,%d],"
                  "'indexer_topk_start':%d",
                  dtype_of(form->number_bytes), shown.n, shown.layers, shown.top_k, shown.from);
    }
}
