/* plain.c - reads a model as stored, and writes its values in one number format. */
#include "train/plain.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/json.h"
#include "train/model_files.h"
#include "weights/export.h"
#include "weights/quantize.h"
#include "weights/summary.h"

enum { MOST_CONFIG = 1 << 20 };

const char *const hd_plain_names[] = {"stored", "bf16", "f32", NULL};

hd_dtype hd_plain_type(int i) {
    static const hd_dtype types[] = {HD_NONE, HD_BF16, HD_F32};
    return types[i];
}

void hd_plain_declare(hd_model_spec *spec, hd_dtype type) {
    spec->quant = (hd_quant_spec){.method = HD_QUANT_NONE};
    spec->dtype = type;
}

/* ---- the config ---- */

/* Names the format where it was named, and no other one. */
static bool declare(json_t *config, hd_dtype type) {
    const char *name = type == HD_F32 ? "float32" : "bfloat16";
    const char *key = json_object_get(config, "dtype") ? "dtype" : "torch_dtype";
    json_object_del(config, "quantization_config");
    json_object_del(config, "expert_dtype");
    return json_object_set_new(config, key, json_string(name)) == 0;
}

static hd_status change_config(const char *path, hd_dtype type, hd_err *err) {
    char *text;
    size_t n;
    json_t *config;
    HD_TRY(hd_file_read(&text, &n, path, MOST_CONFIG, err));
    hd_status st = hd_json_parse(&config, text, n, path, err);
    free(text);
    if (st != HD_OK) return st;
    text = declare(config, type) ? hd_json_write(config, JSON_INDENT(2)) : NULL;
    st = text ? hd_flushed_write(path, text, strlen(text), err)
              : HD_FAIL(err, HD_ENOMEM, "no memory for %s", path);
    free(text);
    json_decref(config);
    return st;
}

static hd_status write_config(const char *dir, hd_dtype type, hd_err *err) {
    char *path = hd_path_join(dir, "config.json");
    const hd_status st =
        path ? change_config(path, type, err) : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    free(path);
    return st;
}

/* ---- the weights ---- */

typedef struct conversion {
    const hd_model_spec *spec; /* what the new file declares */
    const hd_weights *w;
    hd_tensor *tensors; /* [schema.n] */
    void **made;        /* [schema.n] data that this file converted, owned */
    int32_t n;
    float *row; /* of the widest tensor */
} conversion;

static hd_status convert(conversion *c, const hd_weight *from, hd_dtype type, hd_tensor *t,
                         hd_err *err) {
    const size_t row_bytes = hd_dtype_bytes(type, from->cols);
    uint8_t *data = malloc((size_t)from->rows * row_bytes + 1);
    if (!data) return HD_FAIL(err, HD_ENOMEM, "no memory for %s", t->name);
    c->made[c->n] = data;
    for (int32_t r = 0; r < from->rows; r++) {
        for (int32_t k = 0; k < from->cols; k++) c->row[k] = hd_weight_at(from, r, k);
        if (!hd_convert(type, data + (size_t)r * row_bytes, HD_F32, c->row, from->cols)) {
            return HD_FAIL(err, HD_EFORMAT, "%s: a value that is too large for %s", t->name,
                           hd_dtypes[type].file_name);
        }
    }
    t->data = data;
    t->bytes = (size_t)from->rows * row_bytes;
    t->dtype = type;
    t->dtype_name = hd_dtypes[type].file_name;
    return HD_OK;
}

/* Tensor i of the schema, if the model has it. */
static hd_status add(conversion *c, int32_t i, hd_err *err) {
    const hd_tensor_decl *d = &hd_weights_schema(c->w)->decls[i];
    const hd_weight *from = hd_weights_stored(c->w, i);
    const hd_dtype type = hd_declared_format(c->spec, d).type;
    const hd_tensor *file = hd_weights_tensor(c->w, i);
    hd_tensor *t = &c->tensors[c->n];
    if (!file || d->unused) return HD_OK;
    *t = *file; /* a hash table, whatever its integers are */
    if (d->role != HD_ROUTER_HASH) {
        t->rank = d->rank;
        t->shape[0] = d->rank == 1 ? d->cols : d->rows;
        t->shape[1] = d->cols;
        HD_TRY(convert(c, from, type, t, err));
    }
    t->name = d->name;
    c->n++;
    return HD_OK;
}

static hd_status convert_all(conversion *c, const char *path, hd_err *err) {
    const hd_schema *schema = hd_weights_schema(c->w);
    int32_t widest = 1;
    for (int32_t i = 0; i < schema->n; i++) {
        if (schema->decls[i].cols > widest) widest = schema->decls[i].cols;
    }
    c->tensors = calloc((size_t)schema->n + 1, sizeof *c->tensors);
    c->made = calloc((size_t)schema->n + 1, sizeof *c->made);
    c->row = calloc((size_t)widest, sizeof *c->row);
    if (!c->tensors || !c->made || !c->row) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for weights in another format");
    }
    for (int32_t i = 0; i < schema->n; i++) HD_TRY(add(c, i, err));
    return hd_safetensors_write(path, c->tensors, c->n, err);
}

static hd_status write_weights(const char *path, const hd_model_spec *spec, const hd_weights *w,
                               hd_err *err) {
    conversion c = {.spec = spec, .w = w};
    const hd_status st = convert_all(&c, path, err);
    for (int32_t i = 0; c.made && i <= hd_weights_schema(w)->n; i++) free(c.made[i]);
    free((void *)c.made);
    free(c.tensors);
    free(c.row);
    return st;
}

/* ---- a folder ---- */

/* A model that is read. */
typedef struct source {
    hd_model_spec *spec;
    hd_weights *weights;
} source;

static void close_source(source *s) {
    hd_weights_close(s->weights);
    hd_model_spec_close(s->spec);
}

static hd_status open_source(source *out, const char *model_dir, hd_err *err) {
    *out = (source){.spec = NULL};
    HD_TRY(hd_model_spec_open(&out->spec, model_dir, err));
    if (out->spec->family == HD_FAMILY_V41) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "%s cannot be trained",
                       hd_family_name(out->spec->family));
    }
    return hd_weights_open(&out->weights, model_dir, out->spec, err);
}

hd_status hd_plain_check(const char *model_dir, hd_err *err) {
    source s;
    const hd_status st = open_source(&s, model_dir, err);
    close_source(&s);
    return st;
}

static hd_status write_folder(const char *dir, const char *model_dir, const source *s,
                              hd_dtype type, hd_err *err) {
    hd_model_spec plain = *s->spec;
    char *path = hd_path_join(dir, "model.safetensors");
    hd_status st = path ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    hd_plain_declare(&plain, type);
    if (st == HD_OK && mkdir(dir, 0777) != 0 && errno != EEXIST) {
        st = HD_FAIL(err, HD_EIO, "%s: %s", dir, strerror(errno));
    }
    if (st == HD_OK) st = hd_model_files_copy(dir, model_dir, err);
    if (st == HD_OK) st = write_config(dir, type, err);
    if (st == HD_OK) st = write_weights(path, &plain, s->weights, err);
    free(path);
    return st;
}

hd_status hd_plain_folder(const char *dir, const char *model_dir, hd_dtype type, hd_err *err) {
    source s;
    hd_status st = open_source(&s, model_dir, err);
    if (st == HD_OK) st = write_folder(dir, model_dir, &s, type, err);
    close_source(&s);
    return st;
}
