/* saved.c - the folder of saved conversations; see saved.h. */
#define _GNU_SOURCE
#include "kv/saved.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/checksum.h"

enum { VERSION = 1 };

static const char MAGIC[8] = "hadalKV";
static const char ENDING[] = ".kv", HALF[] = ".half-"; /* no name begins with a dot */

struct hd_saved {
    int dir, lock_file;
    char *where; /* for messages */
    uint64_t limit;
    pthread_mutex_t lock; /* guards used, number */
    uint64_t used;        /* bytes of all files, and of those that are being written */
    uint64_t number;      /* of the next file that is being written */
};

static hd_status fail(const hd_saved *s, const char *name, hd_err *err) {
    return HD_FAIL(err, HD_EIO, "%s/%s: %s", s->where, name, strerror(errno));
}

static bool may_be_in_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           c == '.' || c == '_' || c == '-';
}

hd_status hd_saved_check_name(const char *name, hd_err *err) {
    const size_t n = strlen(name);
    bool good = n >= 1 && n <= HD_SAVED_NAME && name[0] != '.';
    for (size_t i = 0; good && i < n; i++) good = may_be_in_name(name[i]);
    if (good) return HD_OK;
    return HD_FAIL(err, HD_EINVAL,
                   "name must have 1 to %d letters, digits or ._- and not begin with a dot",
                   HD_SAVED_NAME);
}

static void write_path(char out[HD_SAVED_NAME + 32], const char *name) {
    snprintf(out, HD_SAVED_NAME + 32, "%.*s%s", HD_SAVED_NAME, name, ENDING);
}

/* ---- the folder ---- */

/* Writes the name of a saved conversation; false: the file is none. */
static bool name_of(char out[HD_SAVED_NAME + 1], const char *file) {
    const size_t n = strlen(file), end = sizeof ENDING - 1;
    if (n <= end || n - end > HD_SAVED_NAME || strcmp(file + n - end, ENDING) != 0)
        return false;
    memcpy(out, file, n - end);
    out[n - end] = '\0';
    return hd_saved_check_name(out, NULL) == HD_OK;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const hd_saved_entry *)a)->name, ((const hd_saved_entry *)b)->name);
}

static hd_status add_entry(const hd_saved *s, const char *file, hd_saved_entry **all, size_t *n,
                           hd_err *err) {
    hd_saved_entry e;
    struct stat st;
    if (!name_of(e.name, file)) return HD_OK;
    if (fstatat(s->dir, file, &st, AT_SYMLINK_NOFOLLOW) != 0) return HD_OK; /* just deleted */
    e.bytes = (uint64_t)st.st_size;
    e.saved_s = st.st_mtime;
    hd_saved_entry *more = realloc(*all, (*n + 1) * sizeof **all);
    if (!more) return HD_FAIL(err, HD_ENOMEM, "no memory for a list of conversations");
    *all = more;
    more[(*n)++] = e;
    return HD_OK;
}

/* Lists the files of the folder that are saved conversations. */
static hd_status list(const hd_saved *s, bool delete_unfinished, hd_saved_entry **all,
                      size_t *n, hd_err *err) {
    hd_status st = HD_OK;
    const int copy = openat(s->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = copy < 0 ? NULL : fdopendir(copy);
    *all = NULL;
    *n = 0;
    if (!dir) {
        fail(s, ".", err);
        if (copy >= 0) close(copy);
        return HD_EIO;
    }
    for (const struct dirent *e = readdir(dir); e && st == HD_OK; e = readdir(dir)) {
        if (strncmp(e->d_name, HALF, sizeof HALF - 1) == 0) {
            if (delete_unfinished) unlinkat(s->dir, e->d_name, 0);
        } else {
            st = add_entry(s, e->d_name, all, n, err);
        }
    }
    closedir(dir);
    if (st == HD_OK && *n) qsort(*all, *n, sizeof **all, by_name);
    if (st == HD_OK) return HD_OK;
    free(*all);
    *all = NULL;
    return st;
}

hd_status hd_saved_list(hd_saved *s, hd_saved_entry **out, size_t *n, hd_err *err) {
    return list(s, false, out, n, err);
}

static hd_status open_folder(hd_saved *s, const char *dir, hd_err *err) {
    hd_saved_entry *all;
    size_t n;
    s->dir = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->dir < 0) return HD_FAIL(err, HD_EIO, "%s: %s", dir, strerror(errno));
    s->lock_file = openat(s->dir, ".lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (s->lock_file < 0) return fail(s, ".lock", err);
    if (flock(s->lock_file, LOCK_EX | LOCK_NB) != 0) {
        return HD_FAIL(err, HD_EIO, "%s: another process uses this folder", dir);
    }
    HD_TRY(list(s, true, &all, &n, err));
    for (size_t i = 0; i < n; i++) s->used += all[i].bytes;
    free(all);
    return HD_OK;
}

hd_status hd_saved_open(hd_saved **out, const char *dir, uint64_t bytes, hd_err *err) {
    *out = NULL;
    hd_saved *s = calloc(1, sizeof *s);
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory for saved conversations");
    s->dir = s->lock_file = -1;
    s->limit = bytes;
    pthread_mutex_init(&s->lock, NULL);
    s->where = strdup(dir);
    const hd_status st =
        s->where ? open_folder(s, dir, err) : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    if (st == HD_OK) {
        *out = s;
    } else {
        hd_saved_close(s);
    }
    return st;
}

void hd_saved_close(hd_saved *s) {
    if (!s) return;
    if (s->lock_file >= 0) close(s->lock_file);
    if (s->dir >= 0) close(s->dir);
    pthread_mutex_destroy(&s->lock);
    free(s->where);
    free(s);
}

void hd_saved_usage(hd_saved *s, uint64_t *used, uint64_t *limit) {
    pthread_mutex_lock(&s->lock);
    *used = s->used;
    *limit = s->limit;
    pthread_mutex_unlock(&s->lock);
}

static void give_back(hd_saved *s, uint64_t bytes) {
    pthread_mutex_lock(&s->lock);
    s->used -= bytes < s->used ? bytes : s->used;
    pthread_mutex_unlock(&s->lock);
}

static uint64_t size_of(const hd_saved *s, const char *path) {
    struct stat st;
    return fstatat(s->dir, path, &st, AT_SYMLINK_NOFOLLOW) == 0 ? (uint64_t)st.st_size : 0;
}

hd_status hd_saved_delete(hd_saved *s, const char *name, hd_err *err) {
    char path[HD_SAVED_NAME + 32];
    HD_TRY(hd_saved_check_name(name, err));
    write_path(path, name);
    pthread_mutex_lock(&s->lock);
    const uint64_t bytes = size_of(s, path);
    const bool deleted = unlinkat(s->dir, path, 0) == 0;
    const int why = errno;
    if (deleted) s->used -= bytes < s->used ? bytes : s->used;
    pthread_mutex_unlock(&s->lock);
    if (deleted) return HD_OK;
    errno = why;
    return why == ENOENT ? HD_FAIL(err, HD_EINVAL, "no conversation '%s' is saved", name)
                         : fail(s, path, err);
}

/* ---- the format ---- */

static uint64_t check_of(const hd_saved_head *head, const int32_t *tokens) {
    const uint64_t sum = hd_checksum(0, head, offsetof(hd_saved_head, check));
    return hd_checksum(sum, tokens, (size_t)head->n_tokens * sizeof *tokens);
}

static uint64_t bytes_of(const hd_saved_head *head) {
    uint64_t bytes = sizeof *head + (uint64_t)head->n_tokens * sizeof(int32_t);
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        bytes += head->n[g] * (sizeof(hd_page_head) + head->page_bytes[g]);
    }
    return bytes;
}

/* What the numbers of a head may be; it may still be of another server. */
static const char *what_is_wrong(const hd_saved_head *head, const hd_saved_head *own,
                                 uint64_t bytes) {
    if (memcmp(head->magic, MAGIC, sizeof MAGIC) != 0) return "is no saved conversation";
    if (head->version != VERSION) return "is of another version of the program";
    if (memcmp(head->identity, own->identity, sizeof own->identity) != 0) {
        return "has pages of another model or program";
    }
    if (head->page_tokens != own->page_tokens ||
        memcmp(head->page_bytes, own->page_bytes, sizeof own->page_bytes) != 0) {
        return "has pages of another size";
    }
    const uint64_t n = head->n[HD_KV_FULL];
    if (n == 0 || n > INT32_MAX / head->page_tokens ||
        head->n_tokens != n * head->page_tokens || head->n[HD_KV_WINDOW] > n ||
        bytes_of(head) != bytes) {
        return "is damaged, or was cut";
    }
    return NULL;
}

/* ---- writing ---- */

static hd_status put(hd_saved_file *f, const void *data, size_t n, hd_err *err) {
    for (size_t done = 0; done < n;) {
        const ssize_t some = write(f->fd, (const uint8_t *)data + done, n - done);
        if (some < 0 && errno == EINTR) continue;
        if (some <= 0) return fail(f->store, f->path, err);
        done += (size_t)some;
    }
    f->at += n;
    return HD_OK;
}

static hd_status reserve(hd_saved *s, uint64_t bytes, uint64_t *number, hd_err *err) {
    pthread_mutex_lock(&s->lock);
    const uint64_t used = s->used;
    const bool fits = bytes <= s->limit && used <= s->limit - bytes;
    if (fits) s->used += bytes;
    *number = s->number++;
    pthread_mutex_unlock(&s->lock);
    if (fits) return HD_OK;
    return HD_FAIL(
        err, HD_ENOMEM, "the conversation has %llu bytes; saved ones have %llu of at most %llu",
        (unsigned long long)bytes, (unsigned long long)used, (unsigned long long)s->limit);
}

hd_status hd_saved_create(hd_saved_file *f, hd_saved *s, const char *name, hd_saved_head *head,
                          const int32_t *tokens, hd_err *err) {
    uint64_t number;
    *f = (hd_saved_file){.store = s, .fd = -1};
    HD_TRY(hd_saved_check_name(name, err));
    memcpy(head->magic, MAGIC, sizeof MAGIC);
    head->version = VERSION;
    head->unused = 0;
    head->check = check_of(head, tokens);
    f->bytes = bytes_of(head);
    snprintf(f->name, sizeof f->name, "%s", name);
    HD_TRY(reserve(s, f->bytes, &number, err));
    snprintf(f->path, sizeof f->path, "%s%llu", HALF, (unsigned long long)number);
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
    f->fd = openat(s->dir, f->path, flags, 0600);
    if (f->fd < 0) {
        give_back(s, f->bytes);
        return fail(s, f->path, err);
    }
    hd_status st = put(f, head, sizeof *head, err);
    if (st == HD_OK) st = put(f, tokens, (size_t)head->n_tokens * sizeof *tokens, err);
    if (st != HD_OK) hd_saved_drop(f);
    return st;
}

hd_status hd_saved_add(hd_saved_file *f, const void *message, size_t n, hd_err *err) {
    return put(f, message, n, err);
}

/* The older file and its bytes leave together. */
static hd_status take_place(hd_saved_file *f, hd_err *err) {
    hd_saved *s = f->store;
    char path[HD_SAVED_NAME + 32];
    write_path(path, f->name);
    pthread_mutex_lock(&s->lock);
    const uint64_t before = size_of(s, path);
    const bool renamed = renameat(s->dir, f->path, s->dir, path) == 0;
    const int why = errno;
    if (renamed) s->used -= before < s->used ? before : s->used;
    pthread_mutex_unlock(&s->lock);
    if (renamed) return HD_OK;
    errno = why;
    return fail(s, path, err);
}

hd_status hd_saved_finish(hd_saved_file *f, hd_err *err) {
    hd_status st = HD_OK;
    if (f->at != f->bytes) st = HD_FAIL(err, HD_EINVAL, "pages are missing");
    if (st == HD_OK && fsync(f->fd) != 0) st = fail(f->store, f->path, err);
    if (st == HD_OK) st = take_place(f, err);
    if (st != HD_OK) {
        hd_saved_drop(f);
        return st;
    }
    close(f->fd);
    f->fd = -1;
    /* otherwise a power cut may bring the old file back */
    return fsync(f->store->dir) == 0 ? HD_OK : fail(f->store, ".", err);
}

void hd_saved_drop(hd_saved_file *f) {
    if (f->fd < 0) return;
    close(f->fd);
    f->fd = -1;
    unlinkat(f->store->dir, f->path, 0);
    give_back(f->store, f->bytes);
}

/* ---- reading ---- */

static bool get(hd_saved_file *f, void *out, size_t n) {
    for (size_t done = 0; done < n;) {
        const ssize_t some = read(f->fd, (uint8_t *)out + done, n - done);
        if (some < 0 && errno == EINTR) continue;
        if (some <= 0) return false;
        done += (size_t)some;
    }
    f->at += n;
    return true;
}

static hd_status refuse(hd_saved_file *f, const char *why, hd_err *err) {
    hd_saved_end(f);
    return HD_FAIL(err, HD_EFORMAT, "the file %s", why);
}

hd_status hd_saved_take(hd_saved_file *f, int fd, const hd_saved_head *own, hd_saved_head *head,
                        int32_t **tokens, hd_err *err) {
    struct stat st;
    *f = (hd_saved_file){.fd = fd};
    *tokens = NULL;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) return refuse(f, "is no file", err);
    f->bytes = (uint64_t)st.st_size;
    if (!get(f, head, sizeof *head)) return refuse(f, "is damaged, or was cut", err);
    const char *why = what_is_wrong(head, own, f->bytes);
    if (why) return refuse(f, why, err);
    const size_t n = (size_t)head->n_tokens;
    *tokens = calloc(n + 1, sizeof **tokens);
    if (!*tokens) {
        hd_saved_end(f);
        return HD_FAIL(err, HD_ENOMEM, "no memory for %zu tokens", n);
    }
    if (get(f, *tokens, n * sizeof **tokens) && check_of(head, *tokens) == head->check) {
        return HD_OK;
    }
    free(*tokens);
    *tokens = NULL;
    return refuse(f, "is damaged, or was cut", err);
}

hd_status hd_saved_read(hd_saved_file *f, hd_saved *s, const char *name,
                        const hd_saved_head *own, hd_saved_head *head, int32_t **tokens,
                        hd_err *err) {
    char path[HD_SAVED_NAME + 32];
    *tokens = NULL;
    HD_TRY(hd_saved_check_name(name, err));
    write_path(path, name);
    const int fd = openat(s->dir, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT) {
        return HD_FAIL(err, HD_EINVAL, "no conversation '%s' is saved", name);
    }
    return fd < 0 ? fail(s, path, err) : hd_saved_take(f, fd, own, head, tokens, err);
}

hd_status hd_saved_next(hd_saved_file *f, void *message, size_t n, hd_err *err) {
    if (get(f, message, n)) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "the file is damaged, or was cut");
}

void hd_saved_end(hd_saved_file *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}
