/* listing.c - the hub's listing of a repository, and which of its files a model needs. Names
 * become local paths and digests become file names, so both are checked here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "hub/hub_internal.h"

enum { MAX_FILES = 100000 };

static const int64_t MAX_FILE_BYTES = (int64_t)1 << 50;

/* Reads size and digest: of Git LFS if the file is stored there, else of git. Older servers
 * list neither. */
static hd_status read_digest(hub_file *f, const json_t *entry, const char *what, hd_err *err) {
    const json_t *lfs = json_object_get(entry, "lfs");
    const json_t *size = json_object_get(json_is_object(lfs) ? lfs : entry, "size");
    const char *digest = json_is_object(lfs)
                             ? json_string_value(json_object_get(lfs, "sha256"))
                             : json_string_value(json_object_get(entry, "blobId"));
    const hub_digest_kind wanted = json_is_object(lfs) ? HUB_SHA256 : HUB_GIT_SHA1;
    f->bytes = json_is_integer(size) ? json_integer_value(size) : -1;
    if (f->bytes > MAX_FILE_BYTES || (json_is_integer(size) && f->bytes < 0)) {
        return HD_FAIL(err, HD_EFORMAT, "%s: %s: a size of %lld bytes", what, f->path,
                       (long long)f->bytes);
    }
    if (!digest) return HD_OK;
    f->kind = hub_digest_kind_of(digest);
    if (f->kind != wanted) {
        return HD_FAIL(err, HD_EFORMAT, "%s: %s: '%.80s' is no digest", what, f->path, digest);
    }
    snprintf(f->digest, sizeof f->digest, "%s", digest);
    return HD_OK;
}

static hd_status read_file(hub_file *f, const json_t *entry, const char *what, hd_err *err) {
    const char *path = json_string_value(json_object_get(entry, "rfilename"));
    if (!path) return HD_FAIL(err, HD_EFORMAT, "%s: a file without a name", what);
    if (!hub_path_is_plain(path)) {
        return HD_FAIL(err, HD_EFORMAT,
                       "%s: refused a file named '%.200s': it could lie outside "
                       "the model's folder",
                       what, path);
    }
    f->path = strdup(path);
    if (!f->path) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for names", what);
    return read_digest(f, entry, what, err);
}

static hd_status read_listing(hub_listing *out, const json_t *root, const char *what,
                              hd_err *err) {
    const char *commit = json_string_value(json_object_get(root, "sha"));
    const json_t *siblings = json_object_get(root, "siblings");
    const size_t n = json_array_size(siblings);
    if (!commit || !hub_is_hex(commit, sizeof out->commit - 1)) {
        return HD_FAIL(err, HD_EFORMAT, "%s: no commit under 'sha'; is this a hub?", what);
    }
    if (!json_is_array(siblings) || n > MAX_FILES) {
        return HD_FAIL(err, HD_EFORMAT, "%s: no list of at most %d files under 'siblings'",
                       what, MAX_FILES);
    }
    snprintf(out->commit, sizeof out->commit, "%s", commit);
    out->files = calloc(n + 1, sizeof *out->files);
    if (!out->files) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for %zu files", what, n);
    for (size_t i = 0; i < n; i++) {
        out->n++;
        HD_TRY(read_file(&out->files[i], json_array_get(siblings, i), what, err));
    }
    return HD_OK;
}

hd_status hub_listing_parse(hub_listing *out, const char *text, size_t n, const char *what,
                            hd_err *err) {
    json_t *root;
    *out = (hub_listing){0};
    HD_TRY(hd_json_parse(&root, text, n, what, err));
    const hd_status st = read_listing(out, root, what, err);
    json_decref(root);
    return st;
}

void hub_listing_deinit(hub_listing *l) {
    for (int32_t i = 0; i < l->n; i++) free(l->files[i].path);
    free(l->files);
    *l = (hub_listing){0};
}

/* ---- what a model needs ---- */

static bool ends_with(const char *text, const char *tail) {
    const size_t n = strlen(text), k = strlen(tail);
    return n >= k && strcmp(text + n - k, tail) == 0;
}

static bool is_needed(const char *path) {
    static const char *const tails[] = {".json", ".safetensors", ".jinja", ".model"};
    if (strchr(path, '/')) return false;
    for (size_t i = 0; i < HD_LEN(tails); i++) {
        if (ends_with(path, tails[i])) return true;
    }
    return false;
}

/* Explains why nothing can be loaded. */
static hd_status check_selection(const hub_listing *l, int32_t n_gguf, const char *repo,
                                 hd_err *err) {
    bool config = false, weights = false;
    for (int32_t i = 0; i < l->n; i++) {
        config = config || strcmp(l->files[i].path, "config.json") == 0;
        weights = weights || ends_with(l->files[i].path, ".safetensors");
    }
    if (config && weights) return HD_OK;
    if (n_gguf) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s holds GGUF files; hadal reads official checkpoints, safetensors "
                       "files beside a config.json: pull the model that these were made from",
                       repo);
    }
    return HD_FAIL(
        err, HD_EINVAL,
        "%s holds no %s, so hadal could not load it; --all downloads it all the same", repo,
        config ? "safetensors files" : "config.json");
}

hd_status hub_listing_select(hub_listing *l, const char *repo, hd_err *err) {
    int32_t n = 0, n_gguf = 0;
    for (int32_t i = 0; i < l->n; i++) {
        hub_file *f = &l->files[i];
        if (is_needed(f->path)) {
            l->files[n++] = *f;
        } else {
            n_gguf += ends_with(f->path, ".gguf");
            free(f->path);
        }
    }
    l->n = n;
    return check_selection(l, n_gguf, repo, err);
}
