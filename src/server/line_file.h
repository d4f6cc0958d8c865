/* line_file.h - an append-only file of lines (access log, request log) for many threads, on
 * a disk that may fill up. Each line is one write. A line that was cut off is terminated
 * before the next one is written. The server's log gets one message when writing begins to
 * fail and one when it works again. */
#ifndef HD_SERVER_LINE_FILE_H
#define HD_SERVER_LINE_FILE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct line_file {
    int fd;                       /* owned; -1: no file */
    const char *failed, *resumed; /* events of the log */
    atomic_bool broken;           /* the last line is incomplete */
} line_file;

/* Opens a file for appending; path NULL: none, and *fd is -1. */
hd_status line_file_open(int *fd, const char *path, hd_err *err);

/* line[n] must end with a line feed. */
void line_file_append(line_file *f, char *line, size_t n);
void line_file_close(line_file *f);

#endif
