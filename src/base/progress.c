/* progress.c - draws with plain ASCII, carriage return and one escape to clear the line. */
#include "base/progress.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

int64_t hd_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void hd_progress_init(hd_progress *p, const char *label, const char *unit, int64_t total,
                      bool quiet) {
    *p = (hd_progress){.label = label,
                       .unit = unit,
                       .total = total > 0 ? total : 1,
                       .start_ns = hd_now_ns(),
                       .terminal = isatty(STDERR_FILENO) == 1,
                       .quiet = quiet};
}

static double per_second(const hd_progress *p, int64_t now) {
    double seconds = (double)(now - p->start_ns) * 1e-9;
    return seconds > 0 ? (double)p->done / seconds : 0;
}

static void draw_bar(const hd_progress *p, int64_t now) {
    enum { WIDTH = 30 };
    char bar[WIDTH + 1];
    int filled = (int)(p->done * WIDTH / p->total);
    for (int i = 0; i < WIDTH; i++) bar[i] = i < filled ? '#' : '.';
    bar[WIDTH] = '\0';
    fprintf(stderr, "\r\033[K%s [%s] %3d%%  %lld/%lld %s  %.0f/s", p->label, bar,
            (int)(p->done * 100 / p->total), (long long)p->done, (long long)p->total, p->unit,
            per_second(p, now));
}

void hd_progress_add(hd_progress *p, int64_t amount) {
    p->done = p->done + amount < p->total ? p->done + amount : p->total;
    if (p->quiet) return;
    int64_t now = hd_now_ns();
    if (p->terminal) {
        if (now - p->drawn_ns < 100000000) return;
        draw_bar(p, now);
        p->drawn_ns = now;
    } else if (p->done * 10 / p->total > p->tenths) {
        p->tenths = (int32_t)(p->done * 10 / p->total);
        fprintf(stderr, "%s: %d%% (%lld/%lld %s)\n", p->label, p->tenths * 10,
                (long long)p->done, (long long)p->total, p->unit);
    }
}

void hd_progress_end(hd_progress *p) {
    if (p->quiet) return;
    if (p->terminal) {
        fputs("\r\033[K", stderr);
        return;
    }
    int64_t now = hd_now_ns();
    fprintf(stderr, "%s: done, %lld %s in %.2f s\n", p->label, (long long)p->done, p->unit,
            (double)(now - p->start_ns) * 1e-9);
}
