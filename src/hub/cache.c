/* cache.c - the folders of the hub cache: layout, finding a snapshot, adding to one. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "hub/hub_internal.h"

enum { COMMIT_DIGITS = 40, MAX_REFERENCE_BYTES = 4096 };

static const char PREFIX[] = "models--";

char *hub_cache_path(const char *root, const char *repo, const char *kind, const char *name) {
    const size_t n =
        strlen(root) + sizeof PREFIX + strlen(repo) + strlen(kind) + strlen(name) + 8;
    const int owner = (int)strcspn(repo, "/");
    char *path = malloc(n);
    if (!path) return NULL;
    snprintf(path, n, "%s/%s%.*s--%s/%s%s%s", root, PREFIX, owner, repo, repo + owner + 1, kind,
             *name ? "/" : "", name);
    return path;
}

static bool is_folder(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

/* Reads the commit that the cache records for a branch or tag; false: none. */
static bool read_reference(char commit[COMMIT_DIGITS + 1], const char *root,
                           const hub_name *name) {
    char *path = hub_cache_path(root, name->repo, "refs", name->revision), *text = NULL;
    size_t n = 0;
    bool good = path && hd_file_read(&text, &n, path, MAX_REFERENCE_BYTES, NULL) == HD_OK;
    if (good) {
        text[strcspn(text, " \r\n")] = '\0';
        good = hub_is_hex(text, COMMIT_DIGITS);
    }
    if (good) memcpy(commit, text, COMMIT_DIGITS + 1);
    free(text);
    free(path);
    return good;
}

char *hub_cache_find(const char *root, const hub_name *name) {
    char commit[COMMIT_DIGITS + 1];
    if (hub_is_hex(name->revision, COMMIT_DIGITS)) {
        memcpy(commit, name->revision, sizeof commit);
    } else if (!read_reference(commit, root, name)) {
        return NULL;
    }
    char *path = hub_cache_path(root, name->repo, "snapshots", commit);
    if (path && is_folder(path)) return path;
    free(path);
    return NULL;
}

char *hub_cache_repo_of(const char *path) {
    const char *at = strstr(path, PREFIX);
    if (!at || (at != path && at[-1] != '/')) return NULL;
    at += sizeof PREFIX - 1;
    const size_t n = strcspn(at, "/");
    const char *middle = strstr(at, "--");
    if (strncmp(at + n, "/snapshots/", 11) != 0 || !middle || middle >= at + n) return NULL;
    const size_t owner = (size_t)(middle - at);
    char *repo = malloc(n);
    if (repo) snprintf(repo, n, "%.*s/%.*s", (int)owner, at, (int)(n - owner - 2), middle + 2);
    return repo;
}

/* ---- writing ---- */

static hd_status cannot_write(const char *path, hd_err *err) {
    return HD_FAIL(err, HD_EIO, "cannot write %s: %s", path, strerror(errno));
}

hd_status hub_make_folders(const char *file, hd_err *err) {
    char *path = strdup(file);
    hd_status st = path ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    for (char *slash = path ? strchr(path + 1, '/') : NULL; slash && st == HD_OK;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST) st = cannot_write(path, err);
        *slash = '/';
    }
    free(path);
    return st;
}

/* Makes the relative path from a file of a snapshot to its blob, over the repository's
 * folder. */
static char *link_target(const hub_file *f) {
    static const char up[] = "../../", step[] = "../", blobs[] = "blobs/";
    size_t depth = 0;
    for (const char *p = f->path; *p; p++) depth += *p == '/';
    const size_t n = sizeof up + depth * (sizeof step - 1) + sizeof blobs + HUB_HEX_BYTES;
    char *target = malloc(n);
    if (!target) return NULL;
    size_t used = (size_t)snprintf(target, n, "%s", up);
    for (size_t i = 0; i < depth; i++) {
        used += (size_t)snprintf(target + used, n - used, "%s", step);
    }
    snprintf(target + used, n - used, "%s%s", blobs, f->digest);
    return target;
}

/* Makes a name beside path that no other program uses, for a file that is renamed to path. */
static char *temporary_of(const char *path) {
    const size_t n = strlen(path) + 32;
    char *out = malloc(n);
    if (out) snprintf(out, n, "%s.%ld.tmp", path, (long)getpid());
    return out;
}

hd_status hub_cache_link(const char *root, const char *repo, const char *commit,
                         const hub_file *f, hd_err *err) {
    char *folder = hub_cache_path(root, repo, "snapshots", commit);
    char *path = folder ? hd_path_join(folder, f->path) : NULL;
    char *temporary = path ? temporary_of(path) : NULL, *target = link_target(f);
    hd_status st = HD_OK;
    if (!temporary || !target) st = HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    if (st == HD_OK) st = hub_make_folders(path, err);
    if (st == HD_OK) {
        unlink(temporary);
        if (symlink(target, temporary) != 0 || rename(temporary, path) != 0) {
            st = cannot_write(path, err);
            unlink(temporary);
        }
    }
    free(target);
    free(temporary);
    free(path);
    free(folder);
    return st;
}

hd_status hub_cache_refer(const char *root, const hub_name *name, const char *commit,
                          hd_err *err) {
    if (strcmp(name->revision, commit) == 0) return HD_OK; /* a commit is its own reference */
    char *path = hub_cache_path(root, name->repo, "refs", name->revision);
    char *temporary = path ? temporary_of(path) : NULL;
    hd_status st = temporary ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    if (st == HD_OK) st = hub_make_folders(path, err);
    if (st == HD_OK) {
        FILE *f = fopen(temporary, "w");
        bool good = f && fputs(commit, f) >= 0;
        if (f && fclose(f) != 0) good = false;
        if (!good || rename(temporary, path) != 0) {
            st = cannot_write(path, err);
            unlink(temporary);
        }
    }
    free(temporary);
    free(path);
    return st;
}
