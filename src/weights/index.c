/* index.c - opens a checkpoint directory: its safetensors shards, their tensors, lookup by
 * name.
 *
 * Files are mapped, or read into memory that only this process can change. A checkpoint may
 * also be tensors in memory that came from elsewhere. Only file names are taken from the index file. The shards' own headers say which tensors
 * they contain; an index that contradicts them is refused. Names are kept in a JSON object,
 * whose hash is seeded at random, so that no choice of names makes lookups slow. */
#include "weights/safetensors.h"

#include <dirent.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/file.h"
#include "base/json.h"

enum {
    MAX_INDEX_BYTES = 100000000,
    MAX_SHARDS = 16384,
    MAX_TENSORS = 4000000,
    MAX_FILE_NAME = 255,
    MAX_NOTICES = 8
};

typedef struct shard_file {
    const char *name; /* owned by the checkpoint's shard_names */
    char *path;
    hd_map map;
    hd_safetensors file; /* its tensors array moves into the checkpoint's */
} shard_file;

struct hd_checkpoint {
    bool copy; /* files are read into memory, not mapped */
    shard_file *shards;
    int32_t n_shards;
    json_t *shard_names; /* [n_shards] strings, sorted */
    hd_tensor *tensors;
    int32_t n;
    json_t *by_name; /* name: position in tensors */
    hd_device *device;
    void *device_memory; /* copies of tensors; NULL: there are none */
    int32_t n_notices;
    char notices[MAX_NOTICES][200];
};

HD_PRINTF(2, 3) static void note(hd_checkpoint *c, const char *fmt, ...) {
    if (c->n_notices == MAX_NOTICES) return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->notices[c->n_notices++], sizeof c->notices[0], fmt, args);
    va_end(args);
}

/* ---- the index file ---- */

/* Accepts a file name inside the directory: no path, nothing hidden, no control characters. */
static bool plain_file_name(const char *name) {
    size_t n = strlen(name);
    if (n == 0 || n > MAX_FILE_NAME || name[0] == '.') return false;
    for (size_t i = 0; i < n; i++) {
        uint8_t b = (uint8_t)name[i];
        if (b < 0x20 || b == 0x7f || b == '/' || b == '\\') return false;
    }
    return true;
}

static int by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Collects the values of weight_map, each once, sorted, in c->shard_names. */
static hd_status collect_shards(hd_checkpoint *c, json_t *weight_map, const char *path,
                                hd_err *err) {
    const char *tensor;
    json_t *value, *unique = json_object();
    hd_status st = HD_OK;
    json_object_foreach(weight_map, tensor, value) {
        const char *name = json_string_value(value);
        if (!name || !plain_file_name(name)) {
            st = HD_FAIL(err, HD_EFORMAT,
                         "%s: tensor %.200s: bad shard name %s%.100s%s: must be a plain file "
                         "name in this directory",
                         path, tensor, name ? "\"" : "", name ? name : "(not a string)",
                         name ? "\"" : "");
            break;
        }
        if (json_object_set_new(unique, name, json_true()) != 0) {
            st = HD_FAIL(err, HD_ENOMEM, "%s: no memory for its shards", path);
            break;
        }
    }
    size_t n = json_object_size(unique), i = 0;
    if (st == HD_OK && n > MAX_SHARDS) {
        st = HD_FAIL(err, HD_EFORMAT, "%s: names %zu shards, at most %d", path, n, MAX_SHARDS);
    }
    const char **names = malloc((n + 1) * sizeof *names);
    if (names && st == HD_OK) {
        json_object_foreach(unique, tensor, value) names[i++] = tensor;
        qsort(names, n, sizeof *names, by_text);
        for (i = 0; i < n; i++) json_array_append_new(c->shard_names, json_string(names[i]));
    }
    if (st == HD_OK && (!names || json_array_size(c->shard_names) != n)) {
        st = HD_FAIL(err, HD_ENOMEM, "%s: no memory for its shards", path);
    }
    free(names);
    json_decref(unique);
    return st;
}

/* Reads the index; *map is its weight_map, borrowed from *root. */
static hd_status load_index(json_t **root, json_t **map, const char *path, hd_err *err) {
    HD_TRY(hd_json_load(root, path, MAX_INDEX_BYTES, err));
    if (!json_is_object(*root)) {
        return HD_FAIL(err, HD_EFORMAT, "%s: must hold a JSON object", path);
    }
    *map = json_object_get(*root, "weight_map");
    if (!json_is_object(*map) || json_object_size(*map) == 0) {
        return HD_FAIL(err, HD_EFORMAT, "%s: weight_map is missing, empty or no object", path);
    }
    if (json_object_size(*map) > MAX_TENSORS) {
        return HD_FAIL(err, HD_EFORMAT, "%s: too many tensors: %zu, at most %d", path,
                       json_object_size(*map), MAX_TENSORS);
    }
    return HD_OK;
}

/* Every tensor of the index must lie in the shard it names. */
static hd_status check_index(hd_checkpoint *c, json_t *root, json_t *weight_map,
                             const char *path, hd_err *err) {
    const char *name;
    json_t *value;
    json_object_foreach(weight_map, name, value) {
        const char *file = json_string_value(value);
        const hd_tensor *t = hd_checkpoint_find(c, name);
        if (t && strcmp(c->shards[t->shard].name, file) == 0) continue;
        return HD_FAIL(err, HD_EFORMAT, "%s: tensor %.200s: not in shard %.100s%s%.100s", path,
                       name, file, t ? ", but in " : "", t ? c->shards[t->shard].name : "");
    }
    size_t listed = json_object_size(weight_map), bytes = 0;
    if (listed < (size_t)c->n) {
        note(c, "%zu tensors lie in the shards but not in the index", (size_t)c->n - listed);
    }
    for (int32_t i = 0; i < c->n; i++) bytes += c->tensors[i].bytes;
    json_t *total = json_object_get(json_object_get(root, "metadata"), "total_size");
    if (json_is_number(total) && json_number_value(total) != (double)bytes) {
        note(c, "the index says %.0f bytes of tensors, the shards hold %zu",
             json_number_value(total), bytes);
    }
    return HD_OK;
}

/* ---- the shards ---- */

static hd_status open_shard_file(const hd_checkpoint *c, shard_file *s, const char *model_dir,
                                 const char *name, const char *index, hd_err *err) {
    s->name = name;
    s->path = hd_path_join(model_dir, name);
    if (!s->path) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for a path", model_dir);
    if (index && !hd_file_exists(s->path)) {
        return HD_FAIL(err, HD_EFORMAT, "%s: missing shard: %s is not there", index, s->path);
    }
    HD_TRY((c->copy ? hd_map_read : hd_map_open)(&s->map, s->path, err));
    return hd_safetensors_init(&s->file, s->map.data, s->map.bytes, s->path, err);
}

/* Adds t, the next of c->tensors, to the lookup by name. */
static hd_status enter(hd_checkpoint *c, const hd_tensor *t, hd_err *err) {
    const shard_file *s = &c->shards[t->shard];
    const hd_tensor *same = hd_checkpoint_find(c, t->name);
    if (same) {
        return HD_FAIL(err, HD_EFORMAT, "%s: tensor %.200s: duplicate tensor: also in %.100s",
                       s->path, t->name, c->shards[same->shard].name);
    }
    if (json_object_set_new_nocheck(c->by_name, t->name, json_integer(c->n)) != 0) {
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory for its names", s->path);
    }
    return HD_OK;
}

/* Moves the shards' lists into one, in which names must be unique. */
static hd_status gather(hd_checkpoint *c, hd_err *err) {
    size_t n = 0;
    for (int32_t i = 0; i < c->n_shards; i++) n += (size_t)c->shards[i].file.n;
    if (n > MAX_TENSORS) {
        return HD_FAIL(err, HD_EFORMAT, "%s: too many tensors: %zu in all shards, at most %d",
                       c->shards[0].path, n, MAX_TENSORS);
    }
    c->tensors = malloc((n + 1) * sizeof *c->tensors);
    if (!c->tensors) {
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory for %zu tensors", c->shards[0].path, n);
    }
    for (int32_t i = 0; i < c->n_shards; i++) {
        shard_file *s = &c->shards[i];
        for (int32_t k = 0; k < s->file.n; k++) {
            hd_tensor *t = &c->tensors[c->n];
            *t = s->file.tensors[k];
            t->shard = i;
            HD_TRY(enter(c, t, err));
            c->n++;
        }
        free(s->file.tensors);
        s->file.tensors = NULL;
    }
    return HD_OK;
}

static hd_status open_shard_files(hd_checkpoint *c, const char *model_dir, const char *index,
                                  hd_err *err) {
    size_t n = json_array_size(c->shard_names);
    c->shards = calloc(n, sizeof *c->shards);
    if (!c->shards) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for shards", model_dir);
    for (size_t i = 0; i < n; i++) {
        const char *name = json_string_value(json_array_get(c->shard_names, i));
        c->n_shards++;
        HD_TRY(open_shard_file(c, &c->shards[i], model_dir, name, index, err));
    }
    return gather(c, err);
}

/* ---- the directory ---- */

static bool ends_with(const char *text, const char *tail) {
    size_t n = strlen(text), k = strlen(tail);
    return n >= k && strcmp(text + n - k, tail) == 0;
}

bool hd_checkpoint_exists(const char *model_dir) {
    DIR *dir = opendir(model_dir);
    if (!dir) return false;
    bool found = false;
    for (struct dirent *e = readdir(dir); e && !found; e = readdir(dir)) {
        found = ends_with(e->d_name, ".safetensors") ||
                ends_with(e->d_name, ".safetensors.index.json");
    }
    closedir(dir);
    return found;
}

static hd_status open_indexed(hd_checkpoint *c, const char *model_dir, const char *index,
                              hd_err *err) {
    json_t *root = NULL, *map = NULL;
    hd_status st = load_index(&root, &map, index, err);
    if (st == HD_OK) st = collect_shards(c, map, index, err);
    if (st == HD_OK) st = open_shard_files(c, model_dir, index, err);
    if (st == HD_OK) st = check_index(c, root, map, index, err);
    json_decref(root);
    return st;
}

static hd_status open_single(hd_checkpoint *c, const char *model_dir, hd_err *err) {
    static const char name[] = "model.safetensors";
    char *path = hd_path_join(model_dir, name);
    bool here = path && hd_file_exists(path);
    free(path);
    if (!here) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s: holds no weights: neither model.safetensors nor "
                       "model.safetensors.index.json is there%s",
                       model_dir,
                       hd_checkpoint_exists(model_dir)
                           ? ", and other .safetensors files need that index"
                           : "");
    }
    if (json_array_append_new(c->shard_names, json_string(name)) != 0) {
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory for its name", model_dir);
    }
    return open_shard_files(c, model_dir, NULL, err);
}

static hd_checkpoint *new_checkpoint(void) {
    hd_checkpoint *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->shard_names = json_array();
    c->by_name = json_object();
    if (c->shard_names && c->by_name) return c;
    hd_checkpoint_close(c);
    return NULL;
}

/* Returns c in *out, or closes it and returns the failure. */
static hd_status hand_over(hd_checkpoint **out, hd_checkpoint *c, hd_status st) {
    if (st != HD_OK) {
        hd_checkpoint_close(c);
        c = NULL;
    }
    *out = c;
    return st;
}

static hd_status open_directory(hd_checkpoint **out, const char *model_dir, bool copy,
                                hd_err *err) {
    hd_checkpoint *c = new_checkpoint();
    char *index = hd_path_join(model_dir, "model.safetensors.index.json");
    hd_status st = HD_OK;
    if (c) c->copy = copy;
    if (!c || !index) {
        st = HD_FAIL(err, HD_ENOMEM, "%s: no memory for a checkpoint", model_dir);
    } else if (hd_file_exists(index)) {
        st = open_indexed(c, model_dir, index, err);
    } else {
        st = open_single(c, model_dir, err);
    }
    free(index);
    return hand_over(out, c, st);
}

hd_status hd_checkpoint_open(hd_checkpoint **out, const char *model_dir, hd_err *err) {
    return open_directory(out, model_dir, false, err);
}

hd_status hd_checkpoint_read(hd_checkpoint **out, const char *model_dir, hd_err *err) {
    return open_directory(out, model_dir, true, err);
}

/* ---- tensors in memory ---- */

/* Gives c one shard that is no file but memory, and takes it. */
static hd_status take_shard(hd_checkpoint *c, hd_map *memory, const char *label, hd_err *err) {
    c->shards = calloc(1, sizeof *c->shards);
    if (!c->shards || json_array_append_new(c->shard_names, json_string(label)) != 0) {
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory for its name", label);
    }
    c->n_shards = 1;
    c->shards[0].name = json_string_value(json_array_get(c->shard_names, 0));
    c->shards[0].path = strdup(label);
    c->shards[0].map = *memory;
    *memory = (hd_map){0};
    if (!c->shards[0].path) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for it", label);
    return HD_OK;
}

hd_status hd_checkpoint_of_bytes(hd_checkpoint **out, hd_map *file, const char *label,
                                 hd_err *err) {
    hd_checkpoint *c = new_checkpoint();
    hd_status st = c ? take_shard(c, file, label, err)
                     : HD_FAIL(err, HD_ENOMEM, "%s: no memory for a checkpoint", label);
    if (st == HD_OK) {
        shard_file *s = &c->shards[0];
        st = hd_safetensors_init(&s->file, s->map.data, s->map.bytes, label, err);
    }
    if (st == HD_OK) st = gather(c, err);
    hd_map_close(file);
    return hand_over(out, c, st);
}

/* Copies tensors with their names, as a file's list would be. */
static hd_status copy_list(hd_safetensors *to, const hd_tensor *tensors, int32_t n,
                           const char *label, hd_err *err) {
    size_t bytes = 0, used = 0;
    for (int32_t i = 0; i < n; i++) bytes += strlen(tensors[i].name) + 1;
    to->tensors = calloc((size_t)n + 1, sizeof *to->tensors);
    to->names = malloc(bytes + 1);
    if (!to->tensors || !to->names) {
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory for %d tensors", label, n);
    }
    for (int32_t i = 0; i < n; i++) {
        const size_t length = strlen(tensors[i].name) + 1;
        to->tensors[i] = tensors[i];
        to->tensors[i].name = memcpy(to->names + used, tensors[i].name, length);
        used += length;
    }
    to->n = n;
    return HD_OK;
}

hd_status hd_checkpoint_of_tensors(hd_checkpoint **out, const hd_tensor *tensors, int32_t n,
                                   hd_map *memory, const char *label, hd_err *err) {
    hd_checkpoint *c = new_checkpoint();
    hd_status st = c ? take_shard(c, memory, label, err)
                     : HD_FAIL(err, HD_ENOMEM, "%s: no memory for a checkpoint", label);
    if (st == HD_OK) st = copy_list(&c->shards[0].file, tensors, n, label, err);
    if (st == HD_OK) st = gather(c, err);
    hd_map_close(memory);
    return hand_over(out, c, st);
}

/* ---- tensors of two checkpoints ---- */

static bool begins_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

static hd_status take_shards(hd_checkpoint *c, hd_checkpoint *by, hd_err *err) {
    const size_t n = (size_t)c->n_shards, more = (size_t)by->n_shards;
    shard_file *shards = realloc(c->shards, (n + more) * sizeof *shards);
    if (shards) c->shards = shards;
    if (!shards || json_array_extend(c->shard_names, by->shard_names) != 0) {
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory for its shards", by->shards[0].path);
    }
    memcpy(c->shards + n, by->shards, more * sizeof *shards);
    c->n_shards += by->n_shards;
    by->n_shards = 0;
    return HD_OK;
}

/* The list of c without what begins with prefix, and then that of `by`. */
static hd_status join_lists(hd_checkpoint *c, const char *prefix, hd_checkpoint *by,
                            int32_t first_shard, hd_err *err) {
    hd_tensor *own = c->tensors;
    const int32_t n = c->n;
    hd_status st = HD_OK;
    hd_tensor *all = malloc(((size_t)n + (size_t)by->n + 1) * sizeof *all);
    if (!all) return HD_FAIL(err, HD_ENOMEM, "no memory for %d tensors", n + by->n);
    json_object_clear(c->by_name);
    c->tensors = all;
    c->n = 0;
    for (int32_t i = 0; st == HD_OK && i < n + by->n; i++) {
        if (i < n && begins_with(own[i].name, prefix)) continue;
        all[c->n] = i < n ? own[i] : by->tensors[i - n];
        if (i >= n) all[c->n].shard += first_shard;
        st = enter(c, &all[c->n], err);
        if (st == HD_OK) c->n++;
    }
    free(own);
    return st;
}

static hd_status replace(hd_checkpoint *c, const char *prefix, hd_checkpoint *by, hd_err *err) {
    const int32_t first_shard = c->n_shards;
    for (int32_t i = 0; i < by->n; i++) {
        const hd_tensor *t = &by->tensors[i];
        if (begins_with(t->name, prefix)) continue;
        return HD_FAIL(err, HD_EFORMAT,
                       "%s: tensor %.200s: the names of these files begin with %s",
                       by->shards[t->shard].path, t->name, prefix);
    }
    HD_TRY(take_shards(c, by, err));
    HD_TRY(join_lists(c, prefix, by, first_shard, err));
    for (int32_t i = 0; i < by->n_notices; i++) note(c, "%s", by->notices[i]);
    return HD_OK;
}

hd_status hd_checkpoint_replace(hd_checkpoint *c, const char *prefix, hd_checkpoint *by,
                                hd_err *err) {
    const hd_status st = replace(c, prefix, by, err);
    hd_checkpoint_close(by);
    return st;
}

void hd_checkpoint_keep_device(hd_checkpoint *c, hd_device *d, void *memory) {
    c->device = d;
    c->device_memory = memory;
}

/* Everything behind the first tensor of a file; its header stays. */
hd_map hd_checkpoint_memory(const hd_checkpoint *c, int32_t shard) {
    const hd_map *map = &c->shards[shard].map;
    size_t first = map->bytes;
    for (int32_t i = 0; c->copy && i < c->n; i++) {
        const uint8_t *data = c->tensors[i].data;
        const bool here = data >= map->data && data < map->data + map->bytes;
        if (here && (size_t)(data - map->data) < first) first = (size_t)(data - map->data);
    }
    return (hd_map){map->data ? map->data + first : NULL, map->bytes - first};
}

size_t hd_checkpoint_discard(hd_checkpoint *c) {
    size_t bytes = 0;
    for (int32_t s = 0; s < c->n_shards; s++) {
        const hd_map *map = &c->shards[s].map, tensors = hd_checkpoint_memory(c, s);
        bytes += hd_map_discard(map, map->bytes - tensors.bytes, tensors.bytes);
    }
    return bytes;
}

void hd_checkpoint_close(hd_checkpoint *c) {
    if (!c) return;
    if (c->device_memory) hd_device_release(c->device, c->device_memory);
    for (int32_t i = 0; i < c->n_shards; i++) {
        hd_safetensors_deinit(&c->shards[i].file);
        hd_map_close(&c->shards[i].map);
        free(c->shards[i].path);
    }
    free(c->shards);
    free(c->tensors);
    json_decref(c->shard_names);
    json_decref(c->by_name);
    free(c);
}

int32_t hd_checkpoint_count(const hd_checkpoint *c) {
    return c->n;
}

const hd_tensor *hd_checkpoint_at(const hd_checkpoint *c, int32_t i) {
    return &c->tensors[i];
}

const hd_tensor *hd_checkpoint_find(const hd_checkpoint *c, const char *name) {
    const json_t *i = json_object_get(c->by_name, name);
    return i ? &c->tensors[json_integer_value(i)] : NULL;
}

int32_t hd_checkpoint_shards(const hd_checkpoint *c) {
    return c->n_shards;
}

const char *hd_checkpoint_shard_path(const hd_checkpoint *c, int32_t i) {
    return c->shards[i].path;
}

const char *hd_checkpoint_shard_name(const hd_checkpoint *c, int32_t i) {
    return c->shards[i].name;
}

size_t hd_checkpoint_shard_bytes(const hd_checkpoint *c, int32_t shard) {
    return c->shards[shard].map.bytes;
}

size_t hd_checkpoint_offset(const hd_checkpoint *c, int32_t shard, const void *byte) {
    return (size_t)((const uint8_t *)byte - c->shards[shard].map.data);
}

int32_t hd_checkpoint_notices(const hd_checkpoint *c) {
    return c->n_notices;
}

const char *hd_checkpoint_notice(const hd_checkpoint *c, int32_t i) {
    return c->notices[i];
}
