/* weights_folder.c - an update from a folder: it must lie where it may, and be the same model with
 * other values. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "server/weight_updates.h"
#include "weights/config/drafter_folder.h"

enum { MAX_TOKENIZER = 100000000 };

/* Whether the folder is a root or lies below it; both are resolved. */
static bool lies_below(const char *path, const char *root) {
    char real[PATH_MAX];
    if (!root || !realpath(root, real)) return false;
    const size_t n = strlen(real);
    return strncmp(path, real, n) == 0 && (path[n] == '\0' || path[n] == '/' || n == 1);
}

static hd_status check_place(const server *s, const char *path, hd_err *err) {
    char real[PATH_MAX];
    if (!realpath(path, real)) {
        return HD_FAIL(err, HD_EINVAL, "model_path: %.300s cannot be opened", path);
    }
    if (lies_below(real, s->weights->weights_dir) || lies_below(real, s->weights->model_dir)) {
        return HD_OK;
    }
    return HD_FAIL(err, HD_EINVAL,
                   "model_path: %.300s lies neither below --weights-dir nor in the model's own "
                   "folder",
                   path);
}

static hd_status check_model(const server *s, const char *path, hd_err *err) {
    hd_model_spec *spec;
    HD_TRY(hd_model_spec_open(&spec, path, err));
    const char *key = hd_model_spec_difference(hd_engine_spec(s->engine), spec);
    if (key) {
        HD_FAIL(err, HD_EINVAL, "model_path: %.300s is another model: its %s differs", path,
                key);
    }
    hd_model_spec_close(spec);
    return key ? HD_EINVAL : HD_OK;
}

/* A folder with a tokenizer has the one of the model. */
static hd_status check_tokenizer(const server *s, const char *path, hd_err *err) {
    char *ours = hd_path_join(s->weights->model_dir, "tokenizer.json");
    char *theirs = hd_path_join(path, "tokenizer.json");
    char *a = NULL, *b = NULL;
    size_t n = 0, m = 0;
    hd_status st = ours && theirs ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    if (st == HD_OK && hd_file_exists(theirs)) {
        st = hd_file_read(&a, &n, ours, MAX_TOKENIZER, err);
        if (st == HD_OK) st = hd_file_read(&b, &m, theirs, MAX_TOKENIZER, err);
        if (st == HD_OK && (n != m || memcmp(a, b, n) != 0)) {
            st = HD_FAIL(err, HD_EINVAL, "model_path: %.300s has another tokenizer", path);
        }
    }
    free(a);
    free(b);
    free(ours);
    free(theirs);
    return st;
}

hd_status weights_read_folder(server *s, hd_weights_update **out, const char *path,
                              hd_weights_selector selector, hd_err *err) {
    const hd_weights_update_rule rule = {
        .selector = selector, .whole = true, .n_threads = hd_engine_threads(s->engine)};
    hd_checkpoint *c;
    HD_TRY(check_place(s, path, err));
    HD_TRY(check_model(s, path, err));
    HD_TRY(check_tokenizer(s, path, err));
    HD_TRY(
        hd_checkpoint_open_all(&c, path, hd_engine_spec(s->engine), hd_checkpoint_read, err));
    const hd_status st = hd_weights_update_open(out, hd_engine_weights(s->engine), err);
    if (st != HD_OK) {
        hd_checkpoint_close(c);
        return st;
    }
    return hd_weights_update_add(*out, c, &rule, err);
}
