/* file.c - file reading; every open is non-blocking and checked with fstat before use. */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)

static hd_status open_regular(int *fd, size_t *bytes, const char *path, hd_err *err) {
    struct stat info;
    *bytes = 0;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0 && errno == ENXIO) { /* a socket */
        return HD_FAIL(err, HD_EFORMAT, "%s: not a regular file", path);
    }
    if (*fd < 0) {
        bool missing =
            errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == ENAMETOOLONG;
        return HD_FAIL(err, missing ? HD_EINVAL : HD_EIO, "%s: %s", path, strerror(errno));
    }
    hd_status st = HD_OK;
    if (fstat(*fd, &info) != 0) {
        st = HD_FAIL(err, HD_EIO, "%s: %s", path, strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
        st = HD_FAIL(err, HD_EFORMAT, "%s: not a regular file", path);
    }
    if (st != HD_OK) {
        close(*fd);
        *fd = -1;
        return st;
    }
    *bytes = (size_t)info.st_size;
    return HD_OK;
}

/* Reads fd to its end into a growing buffer; what names the source in errors. */
static hd_status read_all(char **out, size_t *n, int fd, size_t hint, size_t max_bytes,
                          const char *what, hd_err *err) {
    size_t cap = (hint < max_bytes ? hint : max_bytes) + 2, used = 0;
    char *buf = malloc(cap);
    hd_status st = HD_OK;
    while (buf) {
        if (used + 1 == cap) {
            size_t wider = cap <= max_bytes ? cap * 2 : max_bytes + 2;
            char *grown = realloc(buf, wider);
            if (!grown) break;
            buf = grown;
            cap = wider;
        }
        ssize_t got = read(fd, buf + used, cap - 1 - used);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            st = HD_FAIL(err, HD_EIO, "%s: byte %zu: %s", what, used, strerror(errno));
            break;
        }
        if (got == 0) {
            buf[used] = '\0';
            *out = buf;
            *n = used;
            return HD_OK;
        }
        used += (size_t)got;
        if (used > max_bytes) {
            st = HD_FAIL(err, HD_EFORMAT, "%s: larger than %zu bytes", what, max_bytes);
            break;
        }
    }
    free(buf);
    return st != HD_OK ? st : HD_FAIL(err, HD_ENOMEM, "%s: no memory to read it", what);
}

hd_status hd_file_read(char **out, size_t *n, const char *path, size_t max_bytes, hd_err *err) {
    int fd;
    size_t bytes = 0;
    *out = NULL;
    *n = 0;
    HD_TRY(open_regular(&fd, &bytes, path, err));
    hd_status st = bytes > max_bytes
                       ? HD_FAIL(err, HD_EFORMAT, "%s: larger than %zu bytes", path, max_bytes)
                       : read_all(out, n, fd, bytes, max_bytes, path, err);
    close(fd);
    return st;
}

hd_status hd_stdin_read(char **out, size_t *n, size_t max_bytes, hd_err *err) {
    *out = NULL;
    *n = 0;
    return read_all(out, n, STDIN_FILENO, 1 << 16, max_bytes, "standard input", err);
}

hd_status hd_map_open(hd_map *out, const char *path, hd_err *err) {
    int fd;
    size_t bytes = 0;
    *out = (hd_map){0};
    HD_TRY(open_regular(&fd, &bytes, path, err));
    void *p = bytes ? mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    int failed = errno;
    close(fd);
    if (p == MAP_FAILED) {
        return HD_FAIL(err, HD_EIO, "%s: cannot map: %s", path, strerror(failed));
    }
    /* Advice: if the file system supports huge pages, the file is read in pieces of that
     * size, each of which takes one TLB entry. */
    if (bytes >= HUGE_PAGE) madvise(p, bytes, MADV_HUGEPAGE);
    *out = (hd_map){.data = p, .bytes = bytes};
    return HD_OK;
}

void hd_map_close(hd_map *m) {
    if (!m->data) return;
    union {
        const void *in;
        void *out;
    } p = {.in = m->data}; /* the mapping was writable before it was const */
    munmap(p.out, m->bytes);
    *m = (hd_map){0};
}

hd_status hd_refuse_lfs_pointer(const void *start, size_t n, const char *path, hd_err *err) {
    static const char mark[] = "version https://git-lfs.github.com/spec/v1\n";
    char text[200] = "";
    if (n < sizeof mark - 1 || memcmp(start, mark, sizeof mark - 1) != 0) return HD_OK;
    memcpy(text, start, n < sizeof text ? n : sizeof text - 1);
    const char *size = strstr(text, "\nsize ");
    const int digits = size ? (int)strspn(size + 6, "0123456789") : 0;
    return HD_FAIL(err, HD_EFORMAT,
                   "%s: a pointer of Git LFS; the file itself%s%.*s%s was not downloaded: "
                   "'git lfs pull' in its folder does that, or 'hadal pull ORG/NAME'",
                   path, digits ? ", of " : "", digits, digits ? size + 6 : "",
                   digits ? " bytes," : "");
}

bool hd_file_exists(const char *path) {
    return access(path, F_OK) == 0;
}

char *hd_path_join(const char *dir, const char *name) {
    size_t d = strlen(dir), n = strlen(name);
    bool slash = d > 0 && dir[d - 1] != '/';
    char *path = malloc(d + slash + n + 1);
    if (!path) return NULL;
    memcpy(path, dir, d);
    if (slash) path[d] = '/';
    memcpy(path + d + slash, name, n + 1);
    return path;
}
