/* expert_files.h - reads the matrices of an expert from the files in which they lie.
 *
 * A piece is one array of an expert: the elements or the scales of a matrix. Pieces that lie near
 * each other in a file are read at once, as a span: with O_DIRECT where the file system has it,
 * past the page cache, so that memory holds one copy of an expert and not two. */
#ifndef HD_MOE_EXPERT_FILES_H
#define HD_MOE_EXPERT_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum {
    HD_EXPERT_PIECES = 6, /* gate, up and down, each with scales */
    HD_EXPERT_PAGE = 4096 /* spans begin and end at multiples of it */
};

typedef struct hd_expert_piece {
    int32_t file;
    size_t at, bytes; /* in the file; bytes 0: the expert has no such array */
    size_t to;        /* where it lies in the memory that hd_expert_files_read() fills */
} hd_expert_piece;

/* Sets `to` of each of the n pieces, HD_EXPERT_PIECES at most. Returns the bytes of memory that
 * they take, a multiple of HD_EXPERT_PAGE. */
size_t hd_expert_files_plan(hd_expert_piece *pieces, int32_t n);

typedef struct hd_expert_files hd_expert_files;

/* Opens files for reading. direct: with O_DIRECT, if the file system can. bytes [n]: the lengths
 * that they must have; HD_EIO: another length. */
hd_status hd_expert_files_open(hd_expert_files **out, const char *const *paths,
                               const size_t *bytes, int32_t n, bool direct, hd_err *err);
void hd_expert_files_close(hd_expert_files *f); /* NULL is fine */

/* Returns how many of the files are read with O_DIRECT. */
int32_t hd_expert_files_direct(const hd_expert_files *f);

/* Reads pieces that were planned into `to`, which is aligned to HD_EXPERT_PAGE. Any number of
 * threads may read. HD_EIO names the file: it cannot be read, was cut short, or was changed since
 * it was opened, as its time of change says. */
hd_status hd_expert_files_read(const hd_expert_files *f, const hd_expert_piece *pieces,
                               int32_t n, uint8_t *to, hd_err *err);

#endif
