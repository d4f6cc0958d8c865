/* columns.c - see columns.h. */
#include "cli/terminal/columns.h"

#include <stdarg.h>
#include <string.h>

#include "base/status.h"
#include "base/terminal.h"

enum { FURTHER = 4 }; /* indent of the further lines of a row */

columns columns_open(FILE *to, const column *all, int n, int indent) {
    columns c = {.to = to, .all = all, .n = n, .indent = indent};
    int whole = indent - 1;
    for (int i = 0; i < n; i++) whole += 1 + all[i].width;
    const int terminal = hd_terminal_width(fileno(to));
    if (whole > terminal) c.terminal = terminal;
    return c;
}

/* Figures begin a line, and so does what finds no room in the one before. */
static bool breaks(const columns *c, int width) {
    if (!c->terminal || c->next == 0) return false;
    const bool first_figure = c->all[c->next].figure && !c->all[c->next - 1].figure;
    return first_figure || c->at + c->spaces + 1 + width > c->terminal;
}

void columns_cell(columns *c, const char *format, ...) {
    const column *its = &c->all[c->next];
    char text[200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const int length = (int)strlen(text);
    const int width = length > its->width ? length : its->width;
    if (breaks(c, width)) {
        fputc('\n', c->to);
        c->at = 0;
        c->spaces = c->indent + FURTHER;
    } else {
        c->spaces += c->next ? 1 : c->indent;
    }
    const int before = c->spaces + (its->figure ? width - length : 0);
    fprintf(c->to, "%*s%s", before, "", text);
    c->at += before + length;
    c->spaces = its->figure ? 0 : width - length;
    c->next++;
}

void columns_head(columns *c) {
    while (c->next < c->n) columns_cell(c, "%s", c->all[c->next].title);
    columns_end(c);
}

void columns_end(columns *c) {
    fputc('\n', c->to);
    c->next = c->at = c->spaces = 0;
}
