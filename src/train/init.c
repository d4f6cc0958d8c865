/* init.c - random weights: numbers in float32, rounded to the stored formats as exporters do. */
#include "train/init.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/philox.h"
#include "train/model_files.h"
#include "weights/export.h"
#include "weights/quantize.h"
#include "weights/summary.h"

enum { VALUES = 6, EXPERTS = 7 /* high counter words, above the tensor's number */ };
enum { NAME_BYTES = 1100, MOST_CONFIG = 1 << 20 };

/* One tensor of the file, or the scales of one. */
typedef struct made {
    char name[NAME_BYTES];
    uint8_t *data; /* owned */
} made;

typedef struct model {
    const hd_model_spec *spec;
    uint64_t seed;
    hd_schema schema;
    hd_tensor *tensors; /* [2 * schema.n] */
    made *made;         /* of each */
    int32_t n;
    float *values; /* of one tensor */
} model;

/* ---- values ---- */

static void normal(float *out, int64_t n, uint64_t seed, uint64_t tensor) {
    static const double deviation = 0.02;
    const double turn = 2.0 * acos(-1.0);
    for (int64_t i = 0; i < n; i += 2) {
        const hd_philox r = hd_philox_at(seed, (uint64_t)VALUES << 28 | tensor, (uint64_t)i);
        const double size = deviation * sqrt(-2.0 * log((double)hd_philox_unit(r.v[0])));
        const double angle = turn * (double)hd_philox_unit(r.v[1]);
        out[i] = (float)(size * cos(angle));
        if (i + 1 < n) out[i + 1] = (float)(size * sin(angle));
    }
}

static void repeat(float *out, int64_t n, float value) {
    for (int64_t i = 0; i < n; i++) out[i] = value;
}

/* Before the sigmoid and the softmax: [streams] of the mixture, [streams] of the result, and
 * [streams, streams] of what stays. */
static void mix_base(float *out, int32_t streams) {
    for (int32_t i = 0; i < streams; i++) {
        out[i] = logf(1.0f / (float)(streams - 1)); /* sigmoid 1 / streams */
        out[streams + i] = 0.0f;
        for (int32_t k = 0; k < streams; k++) {
            out[2 * streams + i * streams + k] = i == k ? 2.0f : -2.0f;
        }
    }
}

static void fill(const model *m, int32_t i, int64_t n) {
    const hd_tensor_decl *d = &m->schema.decls[i];
    const int32_t streams = m->spec->hc_mult;
    switch (d->role) {
    case HD_INDEX_K_BIAS:
    case HD_SINK:
    case HD_ROUTER_BIAS:
    case HD_COMP_APE:
    case HD_INDEX_COMP_APE:
        repeat(m->values, n, 0.0f);
        break;
    case HD_HC_ATTN_SCALE:
    case HD_HC_FFN_SCALE:
    case HD_HC_HEAD_SCALE:
        repeat(m->values, n, 0.01f);
        break;
    case HD_HC_ATTN_BASE:
    case HD_HC_FFN_BASE:
        mix_base(m->values, streams);
        break;
    case HD_HC_HEAD_BASE:
        repeat(m->values, n, logf(1.0f / (float)(streams - 1)));
        break;
    default:
        if (d->rank == 1) {
            repeat(m->values, n, 1.0f); /* norms */
        } else {
            normal(m->values, n, m->seed, (uint64_t)i);
        }
    }
}

/* top_k different experts for every token */
static void fill_hashes(const model *m, int64_t *out, const hd_tensor_decl *d) {
    const int32_t experts = m->spec->route.n_experts;
    for (int32_t r = 0; r < d->rows; r++) {
        int64_t *row = out + (int64_t)r * d->cols;
        for (int32_t k = 0, tries = 0; k < d->cols; tries++) {
            const uint64_t at = (uint64_t)d->layer << 48 | (uint64_t)r << 16 | (uint32_t)tries;
            const uint64_t word = hd_philox_at(m->seed, (uint64_t)EXPERTS << 28, at).v[0];
            row[k] = (int64_t)(word * (uint64_t)experts >> 32);
            bool taken = false;
            for (int32_t j = 0; j < k; j++) taken = taken || row[j] == row[k];
            k += !taken;
        }
    }
}

/* ---- tensors ---- */

static hd_status add(model *m, const char *name, const char *more, hd_dtype type, int32_t rank,
                     int64_t rows, int64_t cols, size_t bytes, hd_err *err) {
    made *own = &m->made[m->n];
    static const char weight[] = ".weight";
    const size_t n = strlen(name), end = sizeof weight - 1;
    const bool cut = *more && n > end && strcmp(name + n - end, weight) == 0;
    own->data = malloc(bytes);
    if (!own->data) return HD_FAIL(err, HD_ENOMEM, "no memory for %s", name);
    snprintf(own->name, sizeof own->name, "%.*s%s", (int)(cut ? n - end : n), name, more);
    m->tensors[m->n++] = (hd_tensor){
        .name = own->name,
        .dtype_name = hd_dtypes[type].file_name,
        .dtype = type,
        .rank = rank,
        .shape = {rank == 1 ? cols : rows, cols},
        .data = own->data,
        .bytes = bytes
    };
    return HD_OK;
}

static const hd_format_row *row_of(const hd_stored_format *f) {
    for (int k = 0; k < HD_N_FORMATS; k++) {
        const hd_format_row *row = &hd_formats[k];
        if (row->type == f->type && row->n_scalars == f->n_scalars &&
            hd_format_lists(row->scale_types, f->scale_type)) {
            return row;
        }
    }
    return NULL;
}

static hd_status add_plain(model *m, const hd_tensor_decl *d, hd_dtype type, hd_err *err) {
    const int64_t n = (int64_t)d->rows * d->cols;
    HD_TRY(add(m, d->name, "", type, d->rank, d->rows, d->cols, hd_dtype_bytes(type, n), err));
    hd_convert(type, m->made[m->n - 1].data, HD_F32, m->values, n); /* none is too large */
    return HD_OK;
}

static hd_weight matrix_of(const hd_tensor_decl *d, const hd_stored_format *f) {
    return (hd_weight){.scale = "", /* it has some */
                       .type = f->type,
                       .scale_type = f->scale_type,
                       .rows = d->rows,
                       .cols = d->cols,
                       .block_rows = f->block_rows,
                       .block_cols = f->block_cols,
                       .global = 1.0f,
                       .power_scales = f->scale_type == HD_E8M0};
}

/* Before anything is made: whether the formats can be. */
static hd_status check_formats(const model *m, hd_err *err) {
    for (int32_t i = 0; i < m->schema.n; i++) {
        const hd_tensor_decl *d = &m->schema.decls[i];
        const hd_stored_format f = hd_declared_format(m->spec, d);
        const hd_weight like = matrix_of(d, &f);
        const hd_format_row *row = row_of(&f);
        if (d->duplicate || d->unused || f.scale_type == HD_NONE) continue;
        if (row && !row->global_name && hd_can_quantize(&like)) continue;
        return HD_FAIL(err, HD_EUNSUPPORTED, "%s: no %s weights are made here", d->name,
                       row ? row->name : "such");
    }
    return HD_OK;
}

static hd_status add_quantized(model *m, const hd_tensor_decl *d, const hd_stored_format *f,
                               hd_err *err) {
    const hd_format_row *row = row_of(f);
    const hd_weight like = matrix_of(d, f);
    const bool packed = row->file_types[1] != HD_NONE; /* two elements in a byte */
    const hd_dtype type = packed ? row->file_types[1] : f->type;
    const size_t bytes = hd_stored_data_bytes(f, d->rows, d->cols);
    const int64_t down = (d->rows + f->block_rows - 1) / f->block_rows;
    const int64_t along = (d->cols + f->block_cols - 1) / f->block_cols;
    HD_TRY(add(m, d->name, "", type, 2, d->rows, packed ? d->cols / 2 : d->cols, bytes, err));
    HD_TRY(add(m, d->name, row->scale_names[0], f->scale_type, 2, down, along,
               hd_stored_scale_bytes(f, d->rows, d->cols), err));
    return hd_quantize(&like, m->made[m->n - 2].data, m->made[m->n - 1].data, HD_F32, m->values,
                       err);
}

static hd_status add_tensor(model *m, int32_t i, hd_err *err) {
    const hd_tensor_decl *d = &m->schema.decls[i];
    const hd_stored_format f = hd_declared_format(m->spec, d);
    const int64_t n = (int64_t)d->rows * d->cols;
    if (d->duplicate || d->unused) return HD_OK;
    if (d->role == HD_ROUTER_HASH) {
        HD_TRY(
            add(m, d->name, "", f.type, 2, d->rows, d->cols, (size_t)n * sizeof(int64_t), err));
        fill_hashes(m, (int64_t *)(void *)m->made[m->n - 1].data, d);
        return HD_OK;
    }
    fill(m, i, n);
    return f.scale_type == HD_NONE ? add_plain(m, d, f.type, err)
                                   : add_quantized(m, d, &f, err);
}

static hd_status make_all(model *m, hd_err *err) {
    int64_t most = 0;
    HD_TRY(check_formats(m, err));
    for (int32_t i = 0; i < m->schema.n; i++) {
        const hd_tensor_decl *d = &m->schema.decls[i];
        const int64_t n = (int64_t)d->rows * d->cols;
        if (n > most) most = n;
    }
    m->tensors = calloc(2 * (size_t)m->schema.n + 1, sizeof *m->tensors);
    m->made = calloc(2 * (size_t)m->schema.n + 1, sizeof *m->made);
    m->values = calloc((size_t)most + 1, sizeof *m->values);
    if (!m->tensors || !m->made || !m->values) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for random weights");
    }
    for (int32_t i = 0; i < m->schema.n; i++) HD_TRY(add_tensor(m, i, err));
    return HD_OK;
}

hd_status hd_init_write(const char *path, const hd_model_spec *spec, uint64_t seed,
                        hd_err *err) {
    model m = {.spec = spec, .seed = seed};
    if (spec->family == HD_FAMILY_V41) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "%s cannot be trained",
                       hd_family_name(spec->family));
    }
    HD_TRY(hd_schema_open(&m.schema, spec, err));
    hd_status st = make_all(&m, err);
    if (st == HD_OK) st = hd_safetensors_write(path, m.tensors, m.n, err);
    for (int32_t i = 0; i < m.n; i++) free(m.made[i].data);
    free(m.made);
    free(m.tensors);
    free(m.values);
    hd_schema_close(&m.schema);
    return st;
}

/* ---- a folder ---- */

static hd_status write_config(const char *dir, const char *config, hd_err *err) {
    char *text, *to = hd_path_join(dir, "config.json");
    size_t n;
    hd_status st = to ? hd_file_read(&text, &n, config, MOST_CONFIG, err)
                      : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    if (st == HD_OK) {
        st = hd_flushed_write(to, text, n, err);
        free(text);
    }
    free(to);
    return st;
}

static hd_status write_weights(const char *dir, uint64_t seed, hd_err *err) {
    hd_model_spec *spec;
    HD_TRY(hd_model_spec_open(&spec, dir, err));
    char *path = hd_path_join(dir, "model.safetensors");
    const hd_status st = path ? hd_init_write(path, spec, seed, err)
                              : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    free(path);
    hd_model_spec_close(spec);
    return st;
}

hd_status hd_init_folder(const char *dir, const char *config, const char *tokenizer_dir,
                         uint64_t seed, hd_err *err) {
    if (mkdir(dir, 0777) != 0 && errno != EEXIST) {
        return HD_FAIL(err, HD_EIO, "%s: %s", dir, strerror(errno));
    }
    HD_TRY(hd_model_files_copy(dir, tokenizer_dir, err));
    HD_TRY(write_config(dir, config, err));
    return write_weights(dir, seed, err);
}
