/* terminal.h - what the reader of a descriptor can show, and how numbers of bytes are written. */
#ifndef HD_BASE_TERMINAL_H
#define HD_BASE_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

HD_BEGIN_C

/* A terminal that obeys escapes: not a file, not TERM=dumb. */
bool hd_terminal_is(int fd);

/* The same, and the person wants colours and dimmed text: NO_COLOR is not set. */
bool hd_terminal_has_color(int fd);

/* Columns; 80 where the terminal does not say, 0 where fd is none. */
int hd_terminal_width(int fd);

/* "31.42 GB" in powers of 1000; returns out. */
const char *hd_bytes_text(char *out, size_t size, double bytes);

HD_END_C

#endif
