/* line_file.h - a file that gets whole lines, by many threads, and may run out of room.
 *
 * One write per line. What a full disk cut off is ended before the next line; the log gets one
 * alarm when it begins and one word when it is over, not one per line. */
#ifndef HD_SERVER_LINE_FILE_H
#define HD_SERVER_LINE_FILE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct line_file {
    int fd;                       /* owned; -1: none */
    const char *failed, *resumed; /* events of the log */
    atomic_bool broken;           /* the last line is not whole */
} line_file;

/* line[n] ends in a line feed. */
void line_file_append(line_file *f, char *line, size_t n);
void line_file_close(line_file *f);

#endif
