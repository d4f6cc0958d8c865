/* bench_chart.c - see bench_chart.h. Lines differ in colour and in dashes or marks, so that a
 * print without colours is readable. */
#include "cli/bench/bench_chart.h"

#include <math.h>

#include "base/status.h"

const char chart_style[] =
    "svg{width:100%;height:auto;break-inside:avoid;font:13px system-ui,sans-serif}"
    "svg text{fill:#111}.grid{stroke:#ddd;stroke-width:1}.axis{stroke:#111;stroke-width:1.4;"
    "fill:none}.title{font-size:15px;font-weight:600}.name{font-size:13px}"
    ".label{font-size:11.5px}";

enum {
    WIDTH = 720,
    HEIGHT = 380,
    LEFT = 78,
    RIGHT = 190,
    TOP = 34,
    BOTTOM = 54,
    MAX_TICKS = 40
};

typedef struct axis {
    double low, high; /* of the data; on a logarithmic axis both are above 0 */
    bool log;
    double from, to; /* on the page */
    double ticks[MAX_TICKS];
    int n;
} axis;

static const char *const colours[] = {"#0b5394", "#c1440e", "#1b7a3d", "#7b2d8e",
                                      "#8a6d00", "#0f7c8a", "#a3195b", "#444444"};
static const char *const dashes[] = {"", "7 3", "2 3", "9 3 2 3"};

void html_text(const char *text, FILE *to) {
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '<') {
            fputs("&lt;", to);
        } else if (c == '>') {
            fputs("&gt;", to);
        } else if (c == '&') {
            fputs("&amp;", to);
        } else if (c == '"') {
            fputs("&quot;", to);
        } else {
            fputc(c < ' ' || c == 0x7f ? ' ' : c, to);
        }
    }
}

/* ---- axes ---- */

static double place(const axis *a, double v) {
    const double in = fmax(v, a->low);
    const double part =
        a->log ? log(in / a->low) / log(a->high / a->low) : (in - a->low) / (a->high - a->low);
    return a->from + part * (a->to - a->from);
}

/* An axis from 0 to a multiple of 1, 2 or 5 times a power of ten. */
static void linear_ticks(axis *a, double most) {
    const double raw = (most > 0 ? most : 1) / 6, power = pow(10, floor(log10(raw)));
    const double step = power * (raw > 5 * power   ? 10
                                 : raw > 2 * power ? 5
                                 : raw > power     ? 2
                                                   : 1);
    a->low = 0;
    for (a->n = 0; a->n < MAX_TICKS; a->n++) {
        a->ticks[a->n] = a->n * step;
        a->high = a->ticks[a->n];
        if (a->high >= most * (1 - 1e-9) && a->n) break;
    }
    a->n += a->n < MAX_TICKS;
}

/* Ticks at 1, 2 and 5 times powers of ten; over many decades at the powers alone. */
static void log_ticks(axis *a, double least, double most) {
    static const double steps[] = {1, 2, 5};
    const bool many = most / least > 3e3;
    a->low = least;
    a->high = most > least * 1.01 ? most : least * 1.01;
    for (int decade = (int)floor(log10(least)); pow(10, decade) <= a->high; decade++) {
        for (size_t i = 0; i < (many ? 1 : HD_LEN(steps)) && a->n < MAX_TICKS; i++) {
            const double v = pow(10, decade) * steps[i];
            if (v >= least * (1 - 1e-9) && v <= a->high) a->ticks[a->n++] = v;
        }
    }
}

/* A logarithmic axis shows three decades at most. */
static void set_axis(axis *a, bool log, double least, double most) {
    a->log = log && most > 0;
    if (a->log) {
        log_ticks(a, fmax(least, most * 1e-3), most);
    } else {
        linear_ticks(a, most);
    }
}

static bool is_drawn(const chart_series *s, int i) {
    return isfinite(s->x[i]) && isfinite(s->y[i]);
}

static void fit(const chart *c, axis *x, axis *y) {
    double least[2] = {HUGE_VAL, HUGE_VAL}, most[2] = {0, c->y_max};
    for (int s = 0; s < c->n; s++) {
        for (int i = 0; i < c->series[s].n; i++) {
            const double at[2] = {c->series[s].x[i], c->series[s].y[i]};
            for (int k = 0; k < 2 && is_drawn(&c->series[s], i); k++) {
                if (at[k] > 0) least[k] = fmin(least[k], at[k]);
                most[k] = fmax(most[k], at[k]);
            }
        }
    }
    *x = (axis){.from = LEFT, .to = WIDTH - RIGHT};
    *y = (axis){.from = HEIGHT - BOTTOM, .to = TOP};
    set_axis(x, c->log_x, least[0], most[0]);
    set_axis(y, c->log_y, least[1] * 0.8, most[1] * (c->log_y ? 1.25 : 1));
}

static void draw_axes(const chart *c, const axis *x, const axis *y, FILE *to) {
    for (int i = 0; i < x->n; i++) {
        const double at = place(x, x->ticks[i]);
        fprintf(to,
                "<line class=\"grid\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/>"
                "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.10g</text>\n",
                at, TOP, at, HEIGHT - BOTTOM, at, HEIGHT - BOTTOM + 17, x->ticks[i]);
    }
    for (int i = 0; i < y->n; i++) {
        const double at = place(y, y->ticks[i]);
        fprintf(to,
                "<line class=\"grid\" x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\"/>"
                "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.10g</text>\n",
                LEFT, at, WIDTH - RIGHT, at, LEFT - 7, at + 4.5, y->ticks[i]);
    }
    fprintf(to,
            "<path class=\"axis\" d=\"M%d %dV%dH%d\"/>"
            "<text class=\"name\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">",
            LEFT, TOP, HEIGHT - BOTTOM, WIDTH - RIGHT, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14);
    html_text(c->x_label, to);
    fprintf(to,
            "</text><text class=\"name\" transform=\"translate(20 %d) rotate(-90)\" "
            "text-anchor=\"middle\">",
            (TOP + HEIGHT - BOTTOM) / 2);
    html_text(c->y_label, to);
    fprintf(to, "</text><text class=\"title\" x=\"%d\" y=\"18\">", LEFT);
    html_text(c->title, to);
    fputs("</text>\n", to);
}

/* ---- lines ---- */

static const char *colour_of(const chart_series *s) {
    return colours[(size_t)s->colour % HD_LEN(colours)];
}

/* Every second set of eight colours, and the second document, has dashes. */
static const char *dash_of(const chart_series *s) {
    const size_t again = (size_t)s->colour / HD_LEN(colours);
    return dashes[(2 * again + s->dashed) % HD_LEN(dashes)];
}

static void draw_mark(const chart_series *s, double x, double y, FILE *to) {
    if (s->dashed) {
        fprintf(to,
                "<rect x=\"%.1f\" y=\"%.1f\" width=\"7\" height=\"7\" fill=\"#fff\" "
                "stroke=\"%s\" stroke-width=\"1.6\"/>",
                x - 3.5, y - 3.5, colour_of(s));
    } else {
        fprintf(to, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\"/>", x, y,
                colour_of(s));
    }
}

static void draw_line(const chart_series *s, const axis *x, const axis *y, FILE *to) {
    char move = 'M';
    fprintf(to,
            "<path fill=\"none\" stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\" "
            "d=\"",
            colour_of(s), dash_of(s));
    for (int i = 0; i < s->n; i++) {
        if (!is_drawn(s, i)) continue;
        fprintf(to, "%c%.1f %.1f", move, place(x, s->x[i]), place(y, s->y[i]));
        move = 'L';
    }
    fputs("\"/>\n", to);
}

static void draw_series(const chart_series *s, const axis *x, const axis *y, FILE *to) {
    if (!s->apart) draw_line(s, x, y, to);
    for (int i = 0; s->points && i < s->n; i++) {
        if (!is_drawn(s, i)) continue;
        const double px = place(x, s->x[i]), py = place(y, s->y[i]);
        draw_mark(s, px, py, to);
        if (s->labels) {
            fprintf(to, "<text class=\"label\" x=\"%.1f\" y=\"%.1f\">", px + 6,
                    s->dashed ? py + 15 : py - 7);
            html_text(s->labels[i], to);
            fputs("</text>", to);
        }
        fputc('\n', to);
    }
}

static void draw_legend(const chart *c, FILE *to) {
    for (int i = 0; i < c->n; i++) {
        const chart_series *s = &c->series[i];
        const int y = TOP + 12 + 19 * i, x = WIDTH - RIGHT + 16;
        if (!s->apart) {
            fprintf(to,
                    "<line x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\" stroke=\"%s\" "
                    "stroke-width=\"2\" stroke-dasharray=\"%s\"/>",
                    x, y, x + 26, y, colour_of(s), dash_of(s));
        }
        if (s->points) draw_mark(s, x + 13, y, to);
        fprintf(to, "<text x=\"%d\" y=\"%d\">", x + 33, y + 4);
        html_text(s->name, to);
        fputs("</text>\n", to);
    }
}

void chart_write(const chart *c, FILE *to) {
    axis x, y;
    const int legend = TOP + 12 + 19 * c->n;
    fit(c, &x, &y);
    fprintf(to, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH,
            legend > HEIGHT ? legend : HEIGHT);
    html_text(c->title, to);
    fputs("\">\n", to);
    draw_axes(c, &x, &y, to);
    for (int i = 0; i < c->n; i++) draw_series(&c->series[i], &x, &y, to);
    draw_legend(c, to);
    fputs("</svg>\n", to);
}
