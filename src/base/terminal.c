/* terminal.c - terminal queries; see terminal.h. */
#include "base/terminal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/status.h"

enum { USUAL_WIDTH = 80, LEAST_WIDTH = 20 };

bool hd_terminal_is(int fd) {
    const char *kind = getenv("TERM");
    return isatty(fd) == 1 && !(kind && strcmp(kind, "dumb") == 0);
}

bool hd_terminal_has_color(int fd) {
    const char *off = getenv("NO_COLOR");
    return hd_terminal_is(fd) && !(off && *off);
}

int hd_terminal_width(int fd) {
    struct winsize size;
    if (isatty(fd) != 1) return 0;
    if (ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return USUAL_WIDTH;
    return size.ws_col < LEAST_WIDTH ? LEAST_WIDTH : size.ws_col;
}

const char *hd_bytes_text(char *out, size_t size, double bytes) {
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
    size_t unit = 0;
    while (bytes >= 999.995 && unit + 1 < HD_LEN(units)) {
        bytes /= 1000;
        unit++;
    }
    snprintf(out, size, unit ? "%.2f %s" : "%.0f %s", bytes, units[unit]);
    return out;
}
