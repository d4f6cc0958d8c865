/* terminal.h - terminal capabilities (colour, width), and formatting of byte counts. */
#ifndef HD_BASE_TERMINAL_H
#define HD_BASE_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

HD_BEGIN_C

/* Returns whether fd is a terminal that supports escapes: not a file, not TERM=dumb. */
bool hd_terminal_is(int fd);

/* The same, and the user allows colour: NO_COLOR is not set. */
bool hd_terminal_has_color(int fd);

/* Returns the columns; 80 if the terminal does not say, 0 if fd is none. */
int hd_terminal_width(int fd);

/* "31.42 GB" in powers of 1000; returns out. */
const char *hd_bytes_text(char *out, size_t size, double bytes);

HD_END_C

#endif
