/* npy.c - the NumPy file format, version 1.0: magic, a Python dict as text, the data. */
#include "cli/npy.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static hd_status write_at(const hd_npy *f, const void *data, size_t bytes, int64_t at,
                          hd_err *err) {
    const char *p = data;
    while (bytes) {
        ssize_t n = pwrite(f->fd, p, bytes, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            return HD_FAIL(err, HD_EIO, "%s: cannot write: %s", f->path,
                           n < 0 ? strerror(errno) : "no space");
        }
        p += n;
        at += n;
        bytes -= (size_t)n;
    }
    return HD_OK;
}

hd_status hd_npy_create(hd_npy *out, const char *path, int64_t rows, int64_t cols,
                        hd_err *err) {
    return hd_npy_create_blocks(out, path, rows, 0, cols, err);
}

hd_status hd_npy_create_blocks(hd_npy *out, const char *path, int64_t blocks, int64_t rows,
                               int64_t cols, hd_err *err) {
    char header[128];
    memset(header, ' ', sizeof header);
    memcpy(header, "\x93NUMPY\x01\x00", 8);
    header[8] = (char)(sizeof header - 10); /* little-endian length of what follows */
    header[9] = 0;
    char inner[32] = "";
    if (rows > 0) snprintf(inner, sizeof inner, "%lld, ", (long long)rows);
    int n = snprintf(header + 10, sizeof header - 10,
                     "{'descr': '<f4', 'fortran_order': False, 'shape': (%lld, %s%lld), }",
                     (long long)blocks, inner, (long long)cols);
    header[10 + n] = ' ';
    header[sizeof header - 1] = '\n';
    *out = (hd_npy){.fd = -1, .path = path, .cols = cols, .data_at = sizeof header};
    out->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (out->fd < 0) {
        return HD_FAIL(err, HD_EIO, "%s: cannot create: %s", path, strerror(errno));
    }
    hd_status st = write_at(out, header, sizeof header, 0, err);
    if (st != HD_OK) hd_npy_close(out, NULL);
    return st;
}

hd_status hd_npy_write(hd_npy *f, int64_t first, const float *rows, int64_t n, hd_err *err) {
    const int64_t row_bytes = f->cols * (int64_t)sizeof(float);
    return write_at(f, rows, (size_t)(n * row_bytes), f->data_at + first * row_bytes, err);
}

hd_status hd_npy_close(hd_npy *f, hd_err *err) {
    if (!f->path || f->fd < 0) return HD_OK;
    int failed = close(f->fd);
    f->fd = -1;
    if (failed == 0) return HD_OK;
    return HD_FAIL(err, HD_EIO, "%s: cannot write: %s", f->path, strerror(errno));
}
