/* model_path.c - see model_path.h. */
#include "cli/model_path.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/hub_env.h"
#include "hub/hub.h"

static const char WANTED[] = "hadal reads checkpoints as their makers publish them: a folder "
                             "with config.json, safetensors "
                             "files and a tokenizer, as 'hadal pull ORG/NAME' makes one";

static bool ends_with(const char *text, const char *tail) {
    const size_t n = strlen(text), k = strlen(tail);
    return n >= k && strcmp(text + n - k, tail) == 0;
}

/* ---- files ---- */

static size_t read_start(char *out, size_t size, const char *path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const ssize_t n = fd >= 0 ? read(fd, out, size) : -1;
    if (fd >= 0) close(fd);
    return n > 0 ? (size_t)n : 0;
}

/* Eight bytes of a length, then JSON. */
static bool begins_like_safetensors(const char *start, size_t n) {
    return n > 9 && start[8] == '{' && start[6] == 0 && start[7] == 0;
}

static hd_status explain_file(const char *path, model_part part, hd_err *err) {
    char start[200];
    const size_t n = read_start(start, sizeof start, path);
    if (n >= 4 && memcmp(start, "GGUF", 4) == 0) {
        return HD_FAIL(err, HD_EINVAL, "%s is a GGUF file, a format of llama.cpp; %s", path,
                       WANTED);
    }
    HD_TRY(hd_refuse_lfs_pointer(start, n, path, err));
    if (begins_like_safetensors(start, n)) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s is one file of weights; give the folder that holds it beside "
                       "config.json and the tokenizer",
                       path);
    }
    if (part == MODEL_CONFIG) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "%s is a file; %s", path, WANTED);
}

/* ---- folders ---- */

static int count_names(const char *folder, const char *tail) {
    DIR *dir = opendir(folder);
    int n = 0;
    for (const struct dirent *e = dir ? readdir(dir) : NULL; e; e = readdir(dir)) {
        n += ends_with(e->d_name, tail);
    }
    if (dir) closedir(dir);
    return n;
}

static bool has(const char *folder, const char *name) {
    struct stat info;
    char *path = hd_path_join(folder, name);
    const bool there = path && lstat(path, &info) == 0;
    free(path);
    return there;
}

/* Files of a tokenizer or a chat encoding. */
static bool has_text(const char *folder) {
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json",
                                        "chat_template.jinja", "encoding"};
    for (size_t i = 0; i < HD_LEN(names); i++) {
        if (has(folder, names[i])) return true;
    }
    return false;
}

static hd_status explain_folder(const char *path, model_part part, hd_err *err) {
    if (has(path, "config.json") || (part == MODEL_TEXT && has_text(path))) return HD_OK;
    if (has(path, "snapshots") && has(path, "blobs")) {
        return HD_FAIL(
            err, HD_EINVAL,
            "%s is a model's place in the Hugging Face cache; give the model's name, "
            "ORG/NAME, or a folder under its snapshots",
            path);
    }
    if (count_names(path, ".gguf")) {
        return HD_FAIL(err, HD_EINVAL, "%s holds GGUF files, a format of llama.cpp; %s", path,
                       WANTED);
    }
    return HD_FAIL(err, HD_EINVAL, "%s holds no %s%s; %s", path,
                   part == MODEL_TEXT ? "tokenizer.json" : "config.json",
                   count_names(path, ".safetensors") ? ", only weights" : "", WANTED);
}

/* ---- names ---- */

typedef struct kept_path {
    struct kept_path *next;
    char text[];
} kept_path;

/* Returns a copy that is reachable until the program ends. */
static hd_status keep_path(const char **out, const char *path, hd_err *err) {
    static kept_path *all;
    const size_t n = strlen(path) + 1;
    kept_path *k = malloc(sizeof *k + n);
    if (!k) return HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    memcpy(k->text, path, n);
    k->next = all;
    all = k;
    *out = k->text;
    return HD_OK;
}

static hd_status find_name(const char **path, const hub_name *name, hd_err *err) {
    hub_env env = {0};
    const bool is_main = strcmp(name->revision, "main") == 0;
    hd_status st = hub_env_read(&env, err);
    char *found = st == HD_OK ? hub_cache_find(env.cache, name) : NULL;
    if (st == HD_OK && !found) {
        st = HD_FAIL(err, HD_EINVAL,
                     "there is no folder %s, and no such model in the Hugging Face cache %s; "
                     "'hadal pull %s%s%s' downloads it",
                     *path, env.cache, name->repo, is_main ? "" : "@",
                     is_main ? "" : name->revision);
    }
    hub_env_deinit(&env);
    if (st == HD_OK) st = keep_path(path, found, err);
    free(found);
    return st;
}

hd_status model_path_find(const char **path, model_part part, hd_err *err) {
    struct stat info;
    hub_name name;
    if (stat(*path, &info) == 0) {
        if (S_ISDIR(info.st_mode)) return explain_folder(*path, part, err);
        return S_ISREG(info.st_mode) ? explain_file(*path, part, err) : HD_OK;
    }
    if (hub_name_parse(&name, *path, NULL) != HD_OK)
        return HD_OK; /* opening it gives the reason */
    return find_name(path, &name, err);
}
