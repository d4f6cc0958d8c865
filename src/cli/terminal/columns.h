/* columns.h - a table of figures: in a file or pipe a line per row; on a terminal that is too
 * narrow for that, a row's words and figures go to lines of their own. One thread owns it. */
#ifndef HD_CLI_TERMINAL_COLUMNS_H
#define HD_CLI_TERMINAL_COLUMNS_H

#include <stdbool.h>
#include <stdio.h>

typedef struct column {
    const char *title;
    int width;   /* at least; one space lies between two */
    bool figure; /* right-aligned; words come before figures */
} column;

typedef struct columns {
    FILE *to;
    const column *all;
    int n;
    int indent;   /* of rows */
    int terminal; /* its width; 0: rows are never divided */
    int next;     /* column of the next cell */
    int at;       /* characters of the line so far */
    int spaces;   /* owed before the next cell */
} columns;

/* As wide as the terminal that `to` is. */
columns columns_open(FILE *to, const column *all, int n, int indent);

/* The row of titles. */
void columns_head(columns *c);

/* The next cell of a row, and its end, also before the last cell. */
void columns_cell(columns *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
void columns_end(columns *c);

#endif
