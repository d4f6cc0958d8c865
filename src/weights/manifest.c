/* manifest.c - checks a model's files against a list of SHA-256 digests, and finds unlisted
 * files. */
#include "weights/manifest.h"

#include <dirent.h>
#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/checked.h"
#include "base/file.h"
#include "base/progress.h"
#include "weights/config/drafter_folder.h"

enum {
    MAX_BYTES = 8 << 20,
    DIGEST_BYTES = 32,
    DIGITS = 2 * DIGEST_BYTES,
    PIECE_BYTES = 4 << 20,
    QUIET_BYTES = 1 << 30 /* files below this size are read without a progress bar */
};

typedef struct manifest {
    const char *path, *model_dir;
    json_t *digests; /* by name */
    hd_err *err;
} manifest;

/* ---- parsing lines ---- */

/* Accepts "a/b.json": no part is hidden, empty or "..". */
static bool is_plain_path(const char *name) {
    for (const char *part = name;; part += strcspn(part, "/") + 1) {
        if (*part == '/' || *part == '.' || *part == '\0') return false;
        if (!part[strcspn(part, "/")]) return true;
    }
}

static hd_status read_line(const manifest *m, char *line, int number) {
    const size_t n = strlen(line);
    const bool shaped = n > DIGITS + 2 && strspn(line, "0123456789abcdefABCDEF") == DIGITS &&
                        line[DIGITS] == ' ' && strchr(" *", line[DIGITS + 1]);
    const char *name = shaped ? line + DIGITS + 2 : "";
    if (strncmp(name, "./", 2) == 0) name += 2;
    if (!shaped || !is_plain_path(name)) {
        return HD_FAIL(
            m->err, HD_EFORMAT,
            "%s: line %d: must be 64 hexadecimal digits, two spaces and the name of a "
            "file of the model",
            m->path, number);
    }
    if (json_object_get(m->digests, name)) {
        return HD_FAIL(m->err, HD_EFORMAT, "%s: line %d: %s is there twice", m->path, number,
                       name);
    }
    if (json_object_set_new(m->digests, name, json_stringn(line, DIGITS)) == 0) return HD_OK;
    return HD_FAIL(m->err, HD_EFORMAT, "%s: line %d: its name is no UTF-8", m->path, number);
}

static hd_status read_lines(const manifest *m) {
    char *text;
    size_t n;
    hd_status st = hd_file_read(&text, &n, m->path, MAX_BYTES, m->err);
    int number = 0;
    if (st == HD_OK && memchr(text, '\0', n)) {
        st = HD_FAIL(m->err, HD_EFORMAT, "%s: holds a NUL byte", m->path);
    }
    for (char *line = text, *next; st == HD_OK && line < text + n; line = next) {
        next = line + strcspn(line, "\n");
        const bool last = next >= text + n;
        *next = '\0';
        next += !last;
        number++;
        if (*line) st = read_line(m, line, number);
    }
    free(text);
    if (st == HD_OK && json_object_size(m->digests) == 0) {
        st = HD_FAIL(m->err, HD_EFORMAT, "%s: names no file", m->path);
    }
    return st;
}

/* ---- listed files ---- */

static hd_status digest_of(char *digits, const hd_map *map, const char *path, hd_progress *bar,
                           hd_err *err) {
    uint8_t digest[DIGEST_BYTES];
    gnutls_hash_hd_t hash;
    bool good = gnutls_hash_init(&hash, GNUTLS_DIG_SHA256) == 0;
    if (!good) return HD_FAIL(err, HD_EIO, "%s: no digest can be computed", path);
    for (size_t at = 0; good && at < map->bytes; at += PIECE_BYTES) {
        const size_t left = map->bytes - at, n = left < PIECE_BYTES ? left : PIECE_BYTES;
        good = gnutls_hash(hash, map->data + at, n) == 0;
        hd_progress_add(bar, (int64_t)n);
    }
    gnutls_hash_deinit(hash, digest);
    if (!good) return HD_FAIL(err, HD_EIO, "%s: no digest can be computed", path);
    for (size_t i = 0; i < DIGEST_BYTES; i++) {
        snprintf(digits + 2 * i, 3, "%02x", (unsigned)digest[i]);
    }
    return HD_OK;
}

static hd_status check_file(const manifest *m, const char *name, const char *wanted) {
    char *path = hd_path_join(m->model_dir, name), found[DIGITS + 1];
    hd_map map;
    hd_progress bar;
    if (!path) return HD_FAIL(m->err, HD_ENOMEM, "no memory for the path of %s", name);
    hd_status st = hd_map_open(&map, path, m->err);
    if (st == HD_OK) {
        hd_progress_init(&bar, name, "bytes", (int64_t)map.bytes, map.bytes < QUIET_BYTES);
        st = digest_of(found, &map, path, &bar, m->err);
        hd_progress_end(&bar);
        hd_map_close(&map);
    }
    if (st == HD_OK && strncasecmp(found, wanted, DIGITS) != 0) {
        st = HD_FAIL(m->err, HD_EFORMAT, "%s: digest mismatch: %s, but %s says %s", path, found,
                     m->path, wanted);
    }
    free(path);
    return st;
}

static hd_status check_files(const manifest *m) {
    const char *name;
    json_t *digest;
    json_object_foreach(m->digests, name, digest) {
        HD_TRY(check_file(m, name, json_string_value(digest)));
    }
    return HD_OK;
}

/* ---- unlisted files ---- */

static bool ends_with(const char *text, const char *tail) {
    const size_t n = strlen(text), k = strlen(tail);
    return n > k && strcmp(text + n - k, tail) == 0;
}

static bool is_of_model(const char *name, bool scripts) {
    if (scripts) return ends_with(name, ".py");
    return ends_with(name, ".safetensors") || ends_with(name, ".json") ||
           ends_with(name, ".jinja");
}

/* below: "" or a folder of the model's directory, with its slash */
static hd_status check_folder(const manifest *m, const char *below, bool scripts) {
    char *folder = hd_path_join(m->model_dir, below);
    if (!folder) return HD_FAIL(m->err, HD_ENOMEM, "no memory for a path");
    DIR *dir = opendir(folder);
    hd_status st = HD_OK;
    for (struct dirent *e = dir ? readdir(dir) : NULL; e && st == HD_OK; e = readdir(dir)) {
        char name[300];
        snprintf(name, sizeof name, "%s%s", below, e->d_name);
        if (!is_of_model(name, scripts) || json_object_get(m->digests, name)) continue;
        st = HD_FAIL(m->err, HD_EFORMAT, "%s: does not list %s of %s", m->path, name,
                     m->model_dir);
    }
    if (dir) closedir(dir);
    free(folder);
    return st;
}

hd_status hd_manifest_check(const char *path, const char *model_dir, hd_err *err) {
    const manifest m = {path, model_dir, json_object(), err};
    if (!m.digests) return HD_FAIL(err, HD_ENOMEM, "%s: no memory to read it", path);
    hd_status st = read_lines(&m);
    if (st == HD_OK) st = check_folder(&m, "", false);
    if (st == HD_OK) st = check_folder(&m, HD_DRAFTER_FOLDER "/", false);
    if (st == HD_OK) st = check_folder(&m, "encoding/", true);
    if (st == HD_OK) st = check_files(&m);
    json_decref(m.digests);
    return st;
}
