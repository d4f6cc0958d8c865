/* progress.c - draws the bar with plain ASCII, a carriage return and one escape that clears
 * the line. */
#include "base/progress.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/terminal.h"

enum { MOST_BAR = 30, LEAST_BAR = 8, MAX_WIDTH = 400, REDRAW_NS = 100000000 };

typedef struct amount_text {
    char s[40];
} amount_text;

int64_t hd_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t hd_thread_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void hd_progress_init(hd_progress *p, const char *label, const char *unit, int64_t total,
                      bool quiet) {
    *p = (hd_progress){.label = label,
                       .unit = unit,
                       .total = total > 0 ? total : 1,
                       .start_ns = hd_now_ns(),
                       .terminal = hd_terminal_is(STDERR_FILENO),
                       .quiet = quiet};
}

/* Formats an amount; bytes get a unit of their own. */
static amount_text amount_of(const hd_progress *p, double n) {
    amount_text a = {0};
    if (strcmp(p->unit, "bytes") == 0) {
        hd_bytes_text(a.s, sizeof a.s, n);
    } else {
        snprintf(a.s, sizeof a.s, "%.0f", n);
    }
    return a;
}

/* "3/8 tokens", "1.2 GB/31.4 GB" */
static void part_text(char *out, size_t size, const hd_progress *p) {
    const bool bytes = strcmp(p->unit, "bytes") == 0;
    snprintf(out, size, "%s/%s%s%s", amount_of(p, (double)p->done).s,
             amount_of(p, (double)p->total).s, bytes ? "" : " ", bytes ? "" : p->unit);
}

static double per_second(const hd_progress *p, int64_t now) {
    const double seconds = (double)(now - p->start_ns) * 1e-9;
    const int64_t n = p->done - p->begun;
    return seconds > 0 && n > 0 ? (double)n / seconds : 0;
}

/* The bar takes the width that the text leaves, and is omitted if that is none. */
static void draw_bar(const hd_progress *p, int64_t now) {
    char line[MAX_WIDTH + 1], bar[MOST_BAR + 4] = "", part[100];
    const int columns = hd_terminal_width(STDERR_FILENO) - 1;
    const int width = columns < MAX_WIDTH ? columns : MAX_WIDTH;
    const int percent = (int)((double)p->done * 100 / (double)p->total);
    part_text(part, sizeof part, p);
    snprintf(line, sizeof line, " %3d%%  %s  %s/s", percent, part,
             amount_of(p, per_second(p, now)).s);
    int room = width - (int)strlen(p->label) - (int)strlen(line) - 3;
    if (room > MOST_BAR) room = MOST_BAR;
    if (room >= LEAST_BAR) {
        const int filled = (int)((double)p->done * room / (double)p->total);
        bar[0] = ' ';
        bar[1] = '[';
        for (int i = 0; i < room; i++) bar[i + 2] = i < filled ? '#' : '.';
        bar[room + 2] = ']';
        bar[room + 3] = '\0';
    }
    const int cut = width - (int)strlen(bar) - (int)strlen(line);
    fprintf(stderr, "\r\033[K%.*s%s%.*s", cut > 0 ? cut : 0, p->label, bar, width, line);
}

void hd_progress_add(hd_progress *p, int64_t amount) {
    p->done = p->done + amount < p->total ? p->done + amount : p->total;
    if (p->done < p->begun) p->begun = p->done;
    if (p->quiet) return;
    const int64_t now = hd_now_ns();
    const int32_t tenths = (int32_t)((double)p->done * 10 / (double)p->total);
    if (p->terminal) {
        if (now - p->drawn_ns < REDRAW_NS) return;
        draw_bar(p, now);
        p->drawn_ns = now;
    } else if (tenths > p->tenths) {
        char part[100];
        p->tenths = tenths;
        part_text(part, sizeof part, p);
        fprintf(stderr, "%s: %d%% (%s)\n", p->label, p->tenths * 10, part);
    }
}

void hd_progress_clear(hd_progress *p) {
    if (p->quiet || !p->terminal) return;
    fputs("\r\033[K", stderr);
    p->drawn_ns = 0;
}

void hd_progress_end(hd_progress *p) {
    hd_progress_clear(p);
    if (p->quiet || p->terminal) return;
    const bool bytes = strcmp(p->unit, "bytes") == 0;
    fprintf(stderr, "%s: done, %s%s%s in %.2f s\n", p->label, amount_of(p, (double)p->done).s,
            bytes ? "" : " ", bytes ? "" : p->unit, (double)(hd_now_ns() - p->start_ns) * 1e-9);
}
