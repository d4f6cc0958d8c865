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

enum { MAX_SHM_NAME = 255 };

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

hd_status hd_map_take(hd_map *out, size_t n, const char *who, hd_err *err) {
    *out = (hd_map){0};
    if (n == 0) return HD_OK;
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        return HD_FAIL(err, HD_ENOMEM, "%s: no memory for its %zu bytes", who, n);
    }
    if (n >= HUGE_PAGE) madvise(p, n, MADV_HUGEPAGE);
    *out = (hd_map){.data = p, .bytes = n};
    return HD_OK;
}

/* The pages behind are given back; unmapping the rest needs the new length only. */
void hd_map_shorten(hd_map *m, size_t n) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), keep = (n + page - 1) / page * page;
    if (keep < m->bytes) munmap(hd_map_writable(m) + keep, m->bytes - keep);
    m->bytes = n;
}

/* Reads m->bytes bytes; fewer in the file are an error. */
static hd_status read_whole(const hd_map *m, int fd, const char *path, hd_err *err) {
    uint8_t *to = hd_map_writable(m);
    for (size_t done = 0; done < m->bytes;) {
        const ssize_t got = pread(fd, to + done, m->bytes - done, (off_t)done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return HD_FAIL(err, HD_EIO, "%s: cannot read: %s", path, strerror(errno));
        if (got == 0) {
            return HD_FAIL(err, HD_EIO, "%s: ends after %zu of %zu bytes: it was cut short",
                           path, done, m->bytes);
        }
        done += (size_t)got;
    }
    return HD_OK;
}

/* Bytes that are read while a file is cut and written again may be zeros of neither version. */
static hd_status read_unchanged(const hd_map *m, int fd, const char *path, hd_err *err) {
    struct stat before, after;
    if (fstat(fd, &before) != 0) return HD_FAIL(err, HD_EIO, "%s: %s", path, strerror(errno));
    HD_TRY(read_whole(m, fd, path, err));
    if (fstat(fd, &after) == 0 && after.st_size == before.st_size &&
        after.st_mtim.tv_sec == before.st_mtim.tv_sec &&
        after.st_mtim.tv_nsec == before.st_mtim.tv_nsec) {
        return HD_OK;
    }
    return HD_FAIL(err, HD_EIO, "%s: was changed while it was read", path);
}

hd_status hd_map_read(hd_map *out, const char *path, hd_err *err) {
    int fd;
    size_t bytes = 0;
    *out = (hd_map){0};
    HD_TRY(open_regular(&fd, &bytes, path, err));
    hd_status st = hd_map_take(out, bytes, path, err);
    if (st == HD_OK) st = read_unchanged(out, fd, path, err);
    close(fd);
    if (st != HD_OK) hd_map_close(out);
    return st;
}

hd_status hd_map_read_shared(hd_map *out, const char *name, hd_err *err) {
    char path[MAX_SHM_NAME + 16];
    struct stat info;
    const char *plain = name[0] == '/' ? name + 1 : name;
    *out = (hd_map){0};
    if (!plain[0] || plain[0] == '.' || strchr(plain, '/') || strlen(plain) > MAX_SHM_NAME) {
        return HD_FAIL(err, HD_EINVAL, "%.100s is no name of shared memory", name);
    }
    snprintf(path, sizeof path, "/dev/shm/%s", plain);
    if (lstat(path, &info) != 0 || !S_ISREG(info.st_mode)) {
        return HD_FAIL(err, HD_EINVAL, "shared memory %.100s is not there", name);
    }
    if (info.st_uid != geteuid()) {
        return HD_FAIL(err, HD_EINVAL, "shared memory %.100s belongs to another user", name);
    }
    return hd_map_read(out, path, err);
}

/* The mapping was writable before it was const. */
uint8_t *hd_map_writable(const hd_map *m) {
    union {
        const uint8_t *in;
        uint8_t *out;
    } p = {.in = m->data};
    return p.out;
}

size_t hd_map_discard(const hd_map *m, size_t start, size_t n) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t first = (start + page - 1) / page * page, end = (start + n) / page * page;
    if (!m->data || first >= end) return 0;
    return madvise(hd_map_writable(m) + first, end - first, MADV_DONTNEED) == 0 ? end - first
                                                                                : 0;
}

void hd_map_close(hd_map *m) {
    if (m->data) munmap(hd_map_writable(m), m->bytes);
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
