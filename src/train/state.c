/* state.c - writes and reads checkpoints of a training run. */
#include "train/state.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checksum.h"
#include "base/file.h"
#include "base/json.h"
#include "train/model_files.h"
#include "weights/export.h"

enum { PATH_BYTES = 2048, NAME_BYTES = 1100, MOST_BYTES = 256 << 20, FORMAT = 1 };

typedef struct path {
    char text[PATH_BYTES];
} path;

static hd_status join(path *out, const char *dir, const char *name, hd_err *err) {
    const int n = snprintf(out->text, sizeof out->text, "%s/%s", dir, name);
    if (n > 0 && (size_t)n < sizeof out->text) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "%.100s...: the path is too long", dir);
}

static hd_status refuse_io(const char *what, hd_err *err) {
    return HD_FAIL(err, HD_EIO, "%s: %s", what, strerror(errno));
}

/* ---- folders ---- */

static hd_status make_folder(const char *name, hd_err *err) {
    return mkdir(name, 0777) == 0 || errno == EEXIST ? HD_OK : refuse_io(name, err);
}

static hd_status flush_folder(const char *name, hd_err *err) {
    const int fd = open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool ok = fd >= 0 && fsync(fd) == 0;
    const hd_status st = ok ? HD_OK : refuse_io(name, err);
    if (fd >= 0) close(fd);
    return st;
}

static void remove_files(const char *name) {
    DIR *d = opendir(name);
    path at = {0};
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] != '.' && join(&at, name, e->d_name, NULL) == HD_OK) unlink(at.text);
    }
    if (d) closedir(d);
    rmdir(name);
}

/* A checkpoint: files, and files in model/ and model/encoding/. */
static void remove_checkpoint(const char *name) {
    path model = {0}, encoding = {0};
    if (join(&encoding, name, "model/encoding", NULL) != HD_OK) return;
    if (join(&model, name, "model", NULL) != HD_OK) return;
    remove_files(encoding.text);
    remove_files(model.text);
    remove_files(name);
}

/* Returns N of "step-N", or -1. */
static int64_t steps_of(const char *name) {
    static const char prefix[] = "step-";
    char *end;
    if (strncmp(name, prefix, sizeof prefix - 1) != 0) return -1;
    const char *digits = name + sizeof prefix - 1;
    if (*digits < '0' || *digits > '9') return -1;
    const int64_t n = strtoll(digits, &end, 10);
    return *end ? -1 : n;
}

/* The most steps below `below` that the folder has a checkpoint of, or -1. */
static int64_t last_below(const char *dir, int64_t below) {
    DIR *d = opendir(dir);
    int64_t last = -1;
    for (struct dirent *e; d && (e = readdir(d));) {
        const int64_t n = steps_of(e->d_name);
        if (n > last && n < below) last = n;
    }
    if (d) closedir(d);
    return last;
}

static hd_status name_checkpoint(path *out, const char *dir, int64_t steps, hd_err *err) {
    char name[40];
    snprintf(name, sizeof name, "step-%08" PRId64, steps);
    return join(out, dir, name, err);
}

static void remove_old(const char *dir, int32_t keep) {
    int64_t steps = INT64_MAX;
    path at = {0};
    for (int32_t i = 0; (steps = last_below(dir, steps)) >= 0; i++) {
        if (i >= keep && name_checkpoint(&at, dir, steps, NULL) == HD_OK) {
            remove_checkpoint(at.text);
        }
    }
}

/* ---- writing ---- */

static hd_status write_model(const char *dir, const hd_weights *w, const char *model_dir,
                             hd_err *err) {
    path weights = {0};
    HD_TRY(make_folder(dir, err));
    HD_TRY(hd_model_files_copy(dir, model_dir, err));
    HD_TRY(join(&weights, dir, "model.safetensors", err));
    HD_TRY(hd_weights_write(weights.text, w, err));
    return flush_folder(dir, err);
}

/* The arrays of a parameter in state.safetensors. */
enum { N_ARRAYS = HD_N_PARAMETER_ARRAYS };
static const char *const array_names[N_ARRAYS] = {[HD_PARAMETER_MASTER] = "master",
                                                  [HD_PARAMETER_FIRST] = "first",
                                                  [HD_PARAMETER_SECOND] = "second"};

static float *array_of(const hd_parameter *p, int which) {
    return which == HD_PARAMETER_MASTER  ? p->master
           : which == HD_PARAMETER_FIRST ? p->first
                                         : p->second;
}

static void name_array(char name[NAME_BYTES], const hd_parameter *p, int which) {
    snprintf(name, NAME_BYTES, "%s.%.1024s", array_names[which], p->name);
}

typedef struct listing {
    hd_tensor *tensors;
    char (*names)[NAME_BYTES];
    int32_t n;
} listing;

static void free_listing(listing *l) {
    free(l->tensors);
    free(l->names);
}

static hd_status list_state(listing *out, const hd_parameter *all, int32_t n, hd_err *err) {
    *out = (listing){.tensors = calloc((size_t)n * N_ARRAYS, sizeof *out->tensors),
                     .names = calloc((size_t)n * N_ARRAYS, sizeof *out->names)};
    if (!out->tensors || !out->names) {
        free_listing(out);
        return HD_FAIL(err, HD_ENOMEM, "no memory for the list of a checkpoint");
    }
    for (int32_t i = 0; i < n * N_ARRAYS; i++) {
        const hd_parameter *q = &all[i / N_ARRAYS];
        const float *array = array_of(q, i % N_ARRAYS);
        if (!array) continue;
        name_array(out->names[out->n], q, i % N_ARRAYS);
        out->tensors[out->n] = (hd_tensor){
            .name = out->names[out->n],
            .dtype_name = hd_dtypes[HD_F32].file_name,
            .dtype = HD_F32,
            .rank = 2,
            .shape = {q->rows, q->cols},
            .data = (const uint8_t *)array,
            .bytes = (size_t)q->rows * (size_t)q->cols * sizeof *array
        };
        out->n++;
    }
    return HD_OK;
}

static void add_hash(json_t *hashes, const hd_tensor *t) {
    char hex[17];
    snprintf(hex, sizeof hex, "%016" PRIx64, hd_checksum(0, t->data, t->bytes));
    json_object_set_new(hashes, t->name, json_string(hex));
}

static json_t *describe(int64_t steps, const listing *l, const hd_weights *w,
                        const json_t *run) {
    const hd_checkpoint *c = hd_weights_checkpoint(w);
    json_t *state = json_object(), *model = json_object();
    for (int32_t i = 0; i < l->n; i++) add_hash(state, &l->tensors[i]);
    for (int32_t i = 0; i < hd_checkpoint_count(c); i++)
        add_hash(model, hd_checkpoint_at(c, i));
    return json_pack("{s:i, s:I, s:O, s:o, s:o}", "format", FORMAT, "steps", (json_int_t)steps,
                     "run", run, "state", state, "model", model);
}

static hd_status write_state(const char *dir, int64_t steps, const listing *l,
                             const hd_weights *w, const json_t *run, hd_err *err) {
    path tensors = {0}, json = {0};
    HD_TRY(join(&tensors, dir, "state.safetensors", err));
    HD_TRY(join(&json, dir, "state.json", err));
    HD_TRY(hd_safetensors_write(tensors.text, l->tensors, l->n, err));
    json_t *all = describe(steps, l, w, run);
    char *text = all ? hd_json_write(all, JSON_INDENT(1)) : NULL;
    const hd_status st = text ? hd_flushed_write(json.text, text, strlen(text), err)
                              : HD_FAIL(err, HD_ENOMEM, "no memory for state.json");
    free(text);
    json_decref(all);
    return st == HD_OK ? flush_folder(dir, err) : st;
}

hd_status hd_state_save(const char *dir, int64_t steps, const hd_parameter *all, int32_t n,
                        const hd_weights *w, const char *model_dir, const json_t *run,
                        int32_t keep, hd_err *err) {
    path partial = {0}, whole = {0}, model = {0};
    HD_TRY(make_folder(dir, err));
    HD_TRY(join(&partial, dir, ".partial", err));
    HD_TRY(join(&model, partial.text, "model", err));
    HD_TRY(name_checkpoint(&whole, dir, steps, err));
    remove_checkpoint(partial.text);
    HD_TRY(make_folder(partial.text, err));
    HD_TRY(write_model(model.text, w, model_dir, err));
    listing l;
    HD_TRY(list_state(&l, all, n, err));
    const hd_status st = write_state(partial.text, steps, &l, w, run, err);
    free_listing(&l);
    HD_TRY(st);
    remove_checkpoint(whole.text);
    if (rename(partial.text, whole.text) != 0) return refuse_io(whole.text, err);
    HD_TRY(flush_folder(dir, err));
    remove_old(dir, keep);
    return HD_OK;
}

/* ---- reading ---- */

hd_status hd_state_find(char **out, const char *dir, hd_err *err) {
    path at = {0};
    *out = NULL;
    const int64_t steps = last_below(dir, INT64_MAX);
    if (steps < 0) return HD_OK;
    HD_TRY(name_checkpoint(&at, dir, steps, err));
    *out = strdup(at.text);
    return *out ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
}

hd_status hd_state_parse(json_t **all, const char *text, size_t n, const char *label,
                         hd_err *err) {
    HD_TRY(hd_json_parse(all, text, n, label, err));
    const json_t *o = *all;
    const bool ok = json_integer_value(json_object_get(o, "format")) == FORMAT &&
                    json_is_integer(json_object_get(o, "steps")) &&
                    json_integer_value(json_object_get(o, "steps")) >= 0 &&
                    json_is_object(json_object_get(o, "run")) &&
                    json_is_object(json_object_get(o, "state"));
    if (ok) return HD_OK;
    json_decref(*all);
    *all = NULL;
    return HD_FAIL(err, HD_EFORMAT, "%s: not the state of a training run", label);
}

static hd_status load_json(json_t **out, const char *dir, hd_err *err) {
    path at = {0};
    char *text;
    size_t n;
    HD_TRY(join(&at, dir, "state.json", err));
    HD_TRY(hd_file_read(&text, &n, at.text, MOST_BYTES, err));
    const hd_status st = hd_state_parse(out, text, n, at.text, err);
    free(text);
    return st;
}

hd_status hd_state_read(const char *dir, int64_t *steps, json_t **run, hd_err *err) {
    json_t *all;
    HD_TRY(load_json(&all, dir, err));
    *steps = json_integer_value(json_object_get(all, "steps"));
    *run = json_incref(json_object_get(all, "run"));
    json_decref(all);
    return HD_OK;
}

static const hd_tensor *find(const hd_safetensors *f, const char *name) {
    for (int32_t i = 0; i < f->n; i++) {
        if (strcmp(f->tensors[i].name, name) == 0) return &f->tensors[i];
    }
    return NULL;
}

/* *values: the array of a parameter. */
static hd_status check_array(const float **values, const hd_safetensors *f,
                             const json_t *hashes, const char *file, const hd_parameter *p,
                             int which, hd_err *err) {
    char name[NAME_BYTES], hex[17];
    name_array(name, p, which);
    const hd_tensor *t = find(f, name);
    if (!t) return HD_FAIL(err, HD_EFORMAT, "%s: missing tensor %s", file, name);
    if (t->dtype != HD_F32 || t->rank != 2 || t->shape[0] != p->rows ||
        t->shape[1] != p->cols) {
        return HD_FAIL(err, HD_EFORMAT, "%s: tensor %s: of another type or shape than %d x %d",
                       file, name, p->rows, p->cols);
    }
    snprintf(hex, sizeof hex, "%016" PRIx64, hd_checksum(0, t->data, t->bytes));
    const char *want = json_string_value(json_object_get(hashes, name));
    if (!want || strcmp(want, hex) != 0) {
        return HD_FAIL(err, HD_EFORMAT, "%s: tensor %s: its checksum is not that of state.json",
                       file, name);
    }
    *values = (const float *)(const void *)t->data;
    return HD_OK;
}

static hd_status load_arrays(const hd_safetensors *f, const json_t *hashes, const char *file,
                             const hd_parameters *p, hd_err *err) {
    int32_t n, used = 0;
    const hd_parameter *all = hd_parameters_all(p, &n);
    for (int32_t i = 0; i < n * N_ARRAYS; i++) {
        const hd_parameter *q = &all[i / N_ARRAYS];
        if (!array_of(q, i % N_ARRAYS)) continue;
        const float *values = NULL;
        HD_TRY(check_array(&values, f, hashes, file, q, i % N_ARRAYS, err));
        hd_parameters_set(p, i / N_ARRAYS, (hd_parameter_array)(i % N_ARRAYS), values);
        used++;
    }
    if (used == f->n) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT,
                   "%s: %d tensors; this run has %d (other --freeze or "
                   "--optimizer?)",
                   file, f->n, used);
}

hd_status hd_state_load(const char *dir, const hd_parameters *p, hd_err *err) {
    path file = {0};
    json_t *all;
    hd_map map;
    hd_safetensors f = {0};
    HD_TRY(join(&file, dir, "state.safetensors", err));
    HD_TRY(load_json(&all, dir, err));
    hd_status st = hd_map_open(&map, file.text, err);
    if (st == HD_OK) {
        st = hd_safetensors_init(&f, map.data, map.bytes, file.text, err);
        if (st == HD_OK) st = load_arrays(&f, json_object_get(all, "state"), file.text, p, err);
        hd_safetensors_deinit(&f);
        hd_map_close(&map);
    }
    json_decref(all);
    return st;
}
