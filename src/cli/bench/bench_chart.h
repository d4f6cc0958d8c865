/* bench_chart.h - a chart of lines as SVG inside an HTML page. */
#ifndef HD_CLI_BENCH_BENCH_CHART_H
#define HD_CLI_BENCH_BENCH_CHART_H

#include <stdbool.h>
#include <stdio.h>

typedef struct chart_series {
    char name[96];
    const double *x,
        *y; /* [n]; on a logarithmic axis, values far below the rest are drawn at its end */
    int n;
    int colour;         /* any number; equal numbers look equal */
    bool dashed;        /* of a second set */
    bool apart;         /* no line between the points */
    bool points;        /* a mark at every point, with the text of labels beside it */
    char (*labels)[64]; /* [n] or NULL */
} chart_series;

typedef struct chart {
    const char *title, *x_label, *y_label; /* with units */
    bool log_x, log_y;
    double y_max; /* 0: by the data */
    const chart_series *series;
    int n;
} chart;

extern const char chart_style[]; /* of the page that has charts */

void chart_write(const chart *c, FILE *to);

/* Writes text as HTML, escaped. */
void html_text(const char *text, FILE *to);

#endif
