/* file.h - reads or maps complete regular files.
 *
 * Devices, pipes and directories are refused: opening one could block for ever or have side
 * effects. Maps are read-only and private. */
#ifndef HD_BASE_FILE_H
#define HD_BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Reads all of path. *out is malloc'ed, NUL-terminated and owned by the caller; *n excludes
 * the NUL. A file above max_bytes is refused (HD_EFORMAT). A missing file is HD_EINVAL, an
 * unreadable one HD_EIO. */
hd_status hd_file_read(char **out, size_t *n, const char *path, size_t max_bytes, hd_err *err);

/* Reads standard input to its end, at most max_bytes; the caller owns *out. */
hd_status hd_stdin_read(char **out, size_t *n, size_t max_bytes, hd_err *err);

typedef struct hd_map {
    const uint8_t *data; /* NULL for an empty file */
    size_t bytes;
} hd_map;

hd_status hd_map_open(hd_map *out, const char *path, hd_err *err);

/* Reads the file into memory of this process instead: nobody else can change it there. HD_EIO: it is
 * shorter than it was, or was changed meanwhile, as its time says. */
hd_status hd_map_read(hd_map *out, const char *path, hd_err *err);

/* The same of an object of POSIX shared memory, which must belong to this process's user; name
 * with or without a slash in front. */
hd_status hd_map_read_shared(hd_map *out, const char *name, hd_err *err);

/* Takes memory for n bytes, all zero. who names it in the error. */
hd_status hd_map_take(hd_map *out, size_t n, const char *who, hd_err *err);

/* Keeps the first n bytes of memory of hd_map_take(), 1 or more. */
void hd_map_shorten(hd_map *m, size_t n);

/* Where memory of hd_map_read() or hd_map_take() may be written. */
uint8_t *hd_map_writable(const hd_map *m);

/* Gives the pages of [start, start + n) of memory of hd_map_read() or hd_map_take() back to the
 * system, as far as they are whole, and returns how many bytes. They read as zeros, until they are
 * written again. */
size_t hd_map_discard(const hd_map *m, size_t start, size_t n);

void hd_map_close(hd_map *m);

bool hd_file_exists(const char *path);

/* Refuses a Git LFS pointer, the text that Git leaves if LFS did not fetch the file:
 * HD_EFORMAT, with the file's size and how to get it. start[n] is the beginning of the file
 * at path. */
hd_status hd_refuse_lfs_pointer(const void *start, size_t n, const char *path, hd_err *err);

/* Returns "dir/name" as a malloc'ed string, NULL without memory. */
char *hd_path_join(const char *dir, const char *name);

#endif
