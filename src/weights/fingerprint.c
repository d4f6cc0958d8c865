/* fingerprint.c - see fingerprint.h. */
#include "weights/fingerprint.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/siphash.h"
#include "weights/config/drafter_folder.h"

enum { START_BYTES = 64 << 10, SAMPLES = 64, SAMPLE_BYTES = 4 << 10 };

static bool has_end(const char *name, const char *end) {
    const size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

static bool belongs(const char *name) {
    return strcmp(name, "config.json") == 0 || strcmp(name, "tokenizer.json") == 0 ||
           has_end(name, ".safetensors");
}

/* Of a file that is longer than its start. */
static void add_samples(hd_siphash *s, const hd_map *map) {
    const size_t size = map->bytes < SAMPLE_BYTES ? map->bytes : SAMPLE_BYTES;
    const size_t room = map->bytes - size;
    for (size_t i = 1; i <= SAMPLES; i++) {
        const size_t at = room / SAMPLES * i + room % SAMPLES * i / SAMPLES;
        hd_siphash_add(s, (const char *)map->data + at, size);
    }
}

static hd_status hash_file(uint64_t *out, const char *path, const char *name, hd_err *err) {
    hd_map map;
    hd_siphash s;
    HD_TRY(hd_map_open(&map, path, err));
    const bool whole = !has_end(name, ".safetensors");
    const size_t n = whole || map.bytes < START_BYTES ? map.bytes : START_BYTES;
    hd_siphash_init(&s, (const uint64_t[2]){0});
    hd_siphash_add_part(&s, name);
    hd_siphash_add(&s, &map.bytes, sizeof map.bytes);
    if (n) hd_siphash_add(&s, map.data, n);
    if (n < map.bytes) add_samples(&s, &map);
    *out = hd_siphash_value(&s);
    hd_map_close(&map);
    return HD_OK;
}

static hd_status hash_time(uint64_t *out, const char *path, const char *name, hd_err *err) {
    struct stat st;
    hd_siphash s;
    *out = 0;
    if (!has_end(name, ".safetensors")) return HD_OK;
    if (stat(path, &st) != 0) return HD_FAIL(err, HD_EIO, "%s: %s", path, strerror(errno));
    hd_siphash_init(&s, (const uint64_t[2]){0});
    hd_siphash_add_part(&s, name);
    hd_siphash_add(&s, &st.st_mtim.tv_sec, sizeof st.st_mtim.tv_sec);
    hd_siphash_add(&s, &st.st_mtim.tv_nsec, sizeof st.st_mtim.tv_nsec);
    *out = hd_siphash_value(&s);
    return HD_OK;
}

typedef hd_status file_hash(uint64_t *out, const char *path, const char *name, hd_err *err);

/* The sum of the files' hashes does not depend on the order in which a folder lists them. label: of
 * the names in the hash. */
static hd_status add_files(uint64_t *out, DIR *dir, const char *folder, const char *label,
                           file_hash *hash, hd_err *err) {
    hd_status st = HD_OK;
    for (struct dirent *e = readdir(dir); e && st == HD_OK; e = readdir(dir)) {
        uint64_t one = 0;
        char name[300];
        if (!belongs(e->d_name)) continue;
        char *path = hd_path_join(folder, e->d_name);
        snprintf(name, sizeof name, "%s%s", label, e->d_name);
        st = path ? hash(&one, path, name, err)
                  : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
        free(path);
        *out += one;
    }
    return st;
}

/* The model's folder, and that of a drafter if there is one. */
static hd_status hash_folders(uint64_t *out, const char *model_dir, file_hash *hash,
                              hd_err *err) {
    DIR *dir = opendir(model_dir);
    if (!dir) return HD_FAIL(err, HD_EIO, "%s: %s", model_dir, strerror(errno));
    hd_status st = add_files(out, dir, model_dir, "", hash, err);
    closedir(dir);
    if (st != HD_OK) return st;
    char *drafter = hd_path_join(model_dir, HD_DRAFTER_FOLDER);
    if (!drafter) return HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    dir = opendir(drafter);
    if (dir) {
        st = add_files(out, dir, drafter, HD_DRAFTER_FOLDER "/", hash, err);
        closedir(dir);
    }
    free(drafter);
    return st;
}

hd_status hd_model_fingerprint(uint64_t *out, const char *model_dir, hd_err *err) {
    struct stat at;
    *out = 0;
    if (stat(model_dir, &at) == 0 && !S_ISDIR(at.st_mode)) {
        return hash_file(out, model_dir, "config.json", err);
    }
    return hash_folders(out, model_dir, hash_file, err);
}

hd_status hd_weights_change_times(uint64_t *out, const char *model_dir, hd_err *err) {
    *out = 0;
    return hash_folders(out, model_dir, hash_time, err);
}
