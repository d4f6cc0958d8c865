/* npy.h - writes float32 matrices as NumPy files, row by row in any order. */
#ifndef HD_CLI_NPY_H
#define HD_CLI_NPY_H

#include <stdint.h>

#include "base/status.h"

typedef struct hd_npy {
    int fd;
    const char *path; /* the caller's */
    int64_t cols;
    int64_t data_at; /* file offset of row 0 */
} hd_npy;

/* Creates path for [rows, cols] float32, little-endian, C order. */
hd_status hd_npy_create(hd_npy *out, const char *path, int64_t rows, int64_t cols, hd_err *err);

/* The same for [blocks, rows, cols], whose rows are counted through all blocks. */
hd_status hd_npy_create_blocks(hd_npy *out, const char *path, int64_t blocks, int64_t rows,
                               int64_t cols, hd_err *err);

/* Writes n rows from row number `first`. */
hd_status hd_npy_write(hd_npy *f, int64_t first, const float *rows, int64_t n, hd_err *err);

/* Reports what a deferred write lost. Safe on a file that was never created. */
hd_status hd_npy_close(hd_npy *f, hd_err *err);

#endif
