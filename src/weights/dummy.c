/* dummy.c - made-up tensors of a schema, in the formats its config declares.
 *
 * Codes are copied from one random page, begun at another place for every tensor, so gigabytes
 * are written as fast as memory takes them. A matrix of c columns has elements of mean square
 * 1 / c, as far as its scales allow, so that activations neither vanish nor overflow. */
#include "weights/dummy_internal.h"

#include <math.h>
#include <stdlib.h>

#include "base/checked.h"
#include "base/philox.h"
#include "weights/summary.h"

enum { PAGE = 1 << 16, ALIGN = 64 };

/* Root mean squares of uniformly drawn codes: E4M3 without the upper half of its exponents,
 * and E2M1. */
static const double rms_e4m3 = 0.62, rms_e2m1 = 2.93;

typedef struct filler {
    uint8_t page[PAGE]; /* random bytes: E2M1 codes, choices among 256 numbers */
    uint8_t e4m3[PAGE]; /* the same without NaN and large exponents */
    size_t at;          /* where the next tensor begins in them */
} filler;

static void init_filler(filler *f) {
    for (size_t i = 0; i < PAGE; i += sizeof(hd_philox)) {
        const hd_philox four = hd_philox_at(0, 0, i);
        memcpy(f->page + i, &four, sizeof four);
    }
    for (size_t i = 0; i < PAGE; i++) f->e4m3[i] = f->page[i] & 0xbf;
    f->at = 0;
}

static uint8_t next_byte(filler *f) {
    f->at = (f->at + 1) % PAGE;
    return f->page[f->at];
}

/* ---- how large ---- */

/* As declared; F16 becomes BF16, which is as large and has an encoder here. */
static hd_stored_format format_of(const hd_model_spec *spec, const hd_tensor_decl *d) {
    hd_stored_format f = hd_declared_format(spec, d);
    if (f.type == HD_F16) f.type = HD_BF16;
    return f;
}

static size_t data_bytes(const hd_tensor_decl *d, const hd_stored_format *f) {
    const size_t n = (size_t)d->rows * (size_t)d->cols;
    return d->role == HD_ROUTER_HASH ? n * sizeof(int32_t)
                                     : n * (size_t)hd_dtype_bits(f->type) / 8;
}

static size_t n_scales(const hd_tensor_decl *d, const hd_stored_format *f) {
    if (f->scale_type == HD_NONE) return 0;
    return (size_t)hd_ceil_div(d->rows, f->block_rows) *
           (size_t)hd_ceil_div(d->cols, f->block_cols);
}

static size_t aligned(size_t n) {
    return (n + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t bytes_of(const hd_tensor_decl *d, const hd_stored_format *f) {
    const size_t scale = n_scales(d, f) * (size_t)hd_dtype_bits(f->scale_type) / 8;
    return aligned(data_bytes(d, f)) + aligned(scale);
}

/* ---- values ---- */

/* Of vectors: norms and the strengths of hyper-connections are 1, what is added is 0. */
static bool is_one(const hd_tensor_decl *d) {
    switch (d->role) {
    case HD_INDEX_K_BIAS:
    case HD_SINK:
    case HD_ROUTER_BIAS:
    case HD_HC_HEAD_BASE:
    case HD_HC_ATTN_BASE:
    case HD_HC_FFN_BASE:
        return false;
    default:
        return true;
    }
}

static void put_number(uint8_t *to, hd_dtype type, float v) {
    const uint32_t wide = hd_f32_bits(v);
    const uint16_t half = hd_f32_to_bf16(v);
    if (type == HD_F32) memcpy(to, &wide, sizeof wide);
    if (type == HD_BF16) memcpy(to, &half, sizeof half);
}

static void fill_plain(filler *f, uint8_t *to, const hd_tensor_decl *d, hd_dtype type) {
    const size_t n = (size_t)d->rows * (size_t)d->cols;
    const size_t size = (size_t)hd_dtype_bits(type) / 8;
    const float top = sqrtf(3.0f / (float)d->cols); /* uniform in +-top */
    uint8_t codes[256][sizeof(float)];
    for (int i = 0; i < 256; i++) {
        const float v = d->rank == 1 ? (float)is_one(d) : top * ((float)i - 127.5f) / 127.5f;
        put_number(codes[i], type, v);
    }
    for (size_t i = 0; i < n; i++) memcpy(to + i * size, codes[next_byte(f)], size);
}

static void fill_codes(filler *f, uint8_t *to, size_t bytes, const uint8_t page[PAGE]) {
    size_t at = next_byte(f);
    for (size_t i = 0; i < bytes;) {
        const size_t n = bytes - i < PAGE - at ? bytes - i : PAGE - at;
        memcpy(to + i, page + at, n);
        i += n;
        at = 0;
    }
}

/* All scales of a tensor are one power of two, or one number where they can hold it. */
static void fill_scales(uint8_t *to, size_t n, hd_dtype type, double value) {
    const size_t size = (size_t)hd_dtype_bits(type) / 8;
    uint8_t code[sizeof(float)] = {0};
    put_number(code, type, (float)value);
    if (type == HD_E8M0) code[0] = (uint8_t)(127 + (int)lround(log2(value)));
    if (type == HD_E4M3) code[0] = hd_f32_to_e4m3((float)value);
    for (size_t i = 0; i < n; i++) memcpy(to + i * size, code, size);
}

/* Every token its own experts, all of them in turn. */
static void fill_table(uint8_t *to, const hd_tensor_decl *d, int32_t n_experts) {
    for (int64_t i = 0; i < (int64_t)d->rows * d->cols; i++) {
        const int32_t id = (int32_t)(i % n_experts);
        memcpy(to + i * (int64_t)sizeof id, &id, sizeof id);
    }
}

static void fill(filler *f, weights_bound *b, uint8_t *data, const hd_tensor_decl *d,
                 const hd_stored_format *stored, int32_t n_experts) {
    const size_t n = data_bytes(d, stored);
    uint8_t *scale = data + aligned(n);
    const double wanted = 1 / sqrt((double)d->cols);
    const double of_codes = stored->type == HD_E2M1 ? rms_e2m1 : rms_e4m3;
    const bool global = stored->scale_type == HD_E4M3;
    if (d->role == HD_ROUTER_HASH) {
        fill_table(data, d, n_experts);
    } else if (stored->scale_type == HD_NONE) {
        fill_plain(f, data, d, stored->type);
    } else {
        fill_codes(f, data, n, stored->type == HD_E4M3 ? f->e4m3 : f->page);
        fill_scales(scale, n_scales(d, stored), stored->scale_type,
                    global ? 1 : wanted / of_codes);
    }
    b->weight = (hd_weight){.data = data,
                            .scale = stored->scale_type == HD_NONE ? NULL : scale,
                            .type = stored->type,
                            .scale_type = stored->scale_type,
                            .rows = d->rows,
                            .cols = d->cols,
                            .block_rows = stored->block_rows,
                            .block_cols = stored->block_cols,
                            .global = global ? (float)(wanted / of_codes) : 1.0f};
}

static void describe(hd_tensor *t, const hd_tensor_decl *d, const weights_bound *b,
                     size_t bytes) {
    *t = (hd_tensor){
        .name = d->name,
        .dtype_name = hd_dtype_name(b->weight.type),
        .dtype = d->role == HD_ROUTER_HASH ? HD_I32 : b->weight.type,
        .rank = d->rank,
        .shape = {d->rank == 2 ? d->rows : d->cols, d->cols},
        .data = b->weight.data,
        .bytes = bytes
    };
}

hd_status weights_dummies_init(weights_dummies *out, weights_bound *bound,
                               const hd_model_spec *spec, const hd_schema *schema,
                               hd_err *err) {
    *out = (weights_dummies){0};
    size_t total = 0;
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        const hd_stored_format stored = format_of(spec, d);
        if (!d->duplicate) total += bytes_of(d, &stored);
    }
    filler *f = malloc(sizeof *f);
    out->tensors = calloc((size_t)schema->n + 1, sizeof *out->tensors);
    hd_status st = hd_block_init(&out->block, total, "dummy weights", err);
    if (st == HD_OK && (!f || !out->tensors)) {
        st = HD_FAIL(err, HD_ENOMEM, "no memory for dummy weights");
    }
    if (st != HD_OK) {
        free(f);
        return st;
    }
    init_filler(f);
    uint8_t *at = out->block.data;
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        const hd_stored_format stored = format_of(spec, d);
        if (d->duplicate) continue;
        fill(f, &bound[i], at, d, &stored, spec->route.n_experts);
        describe(&out->tensors[i], d, &bound[i], data_bytes(d, &stored));
        bound[i].data = &out->tensors[i];
        at += bytes_of(d, &stored);
    }
    free(f);
    return HD_OK;
}

void weights_dummies_deinit(weights_dummies *d) {
    hd_block_deinit(&d->block);
    free(d->tensors);
    *d = (weights_dummies){0};
}
