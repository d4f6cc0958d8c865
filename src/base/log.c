/* log.c - formats a line on the stack and writes it in one call. If nobody reads a full
 * pipe, lines are lost, but no time. */
#include "base/log.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 4096, NAME_MAX_BYTES = 96 };

static char name[NAME_MAX_BYTES]; /* of the rank, with a space behind it; empty: none */
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int64_t n_dropped; /* changed under writing */
static int64_t n_told;            /* dropped lines that were reported; changed under writing */

typedef struct line {
    char text[LINE_MAX_BYTES];
    size_t n; /* always leaves space for the line feed */
} line;

static void put(line *l, char c) {
    if (l->n < sizeof l->text - 1) l->text[l->n++] = c;
}

static void put_text(line *l, const char *s) {
    while (*s) put(l, *s++);
}

static bool is_plain(const char *s) {
    if (!*s) return false;
    for (; *s; s++) {
        if ((unsigned char)*s <= ' ' || *s == '"' || *s == '=' || *s == '\\' || *s == 0x7f) {
            return false;
        }
    }
    return true;
}

static void put_value(line *l, const char *s) {
    static const char hex[] = "0123456789abcdef";
    if (is_plain(s)) {
        put_text(l, s);
        return;
    }
    put(l, '"');
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\') {
            put(l, '\\');
            put(l, *s);
        } else if (c < 0x20 || c == 0x7f) {
            put_text(l, "\\x");
            put(l, hex[c >> 4]);
            put(l, hex[c & 15]);
        } else {
            put(l, *s);
        }
    }
    put(l, '"');
}

static void put_time(line *l) {
    struct timespec now;
    struct tm utc;
    char stamp[40], frac[16];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(frac, sizeof frac, ".%03dZ ", (int)(now.tv_nsec / 1000000));
    put_text(l, stamp);
    put_text(l, frac);
}

static void format(line *l, hd_log_level level, const char *event, const hd_log_field *fields,
                   int n) {
    static const char *const names[] = {"info", "warn", "error"};
    l->n = 0;
    put_time(l);
    put_text(l, names[level]);
    put(l, ' ');
    put_text(l, name);
    put_text(l, event);
    for (int i = 0; i < n; i++) {
        char number[40];
        put(l, ' ');
        put_text(l, fields[i].key);
        put(l, '=');
        switch (fields[i].kind) {
        case HD_LOG_TEXT:
            put_value(l, fields[i].text ? fields[i].text : "");
            break;
        case HD_LOG_INT:
            snprintf(number, sizeof number, "%lld", (long long)fields[i].integer);
            put_text(l, number);
            break;
        case HD_LOG_REAL:
            snprintf(number, sizeof number, "%.6g", fields[i].real);
            put_text(l, number);
            break;
        }
    }
    l->text[l->n++] = '\n';
}

/* A pipe that polls as writable accepts a complete line, which is no longer than PIPE_BUF. */
static bool write_line(const line *l) {
    struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&p, 1, 0) != 1 || !(p.revents & POLLOUT)) return false;
    return write(p.fd, l->text, l->n) == (ssize_t)l->n;
}

void hd_log_write(hd_log_level level, const char *event, const hd_log_field *fields, int n) {
    line l, gap;
    format(&l, level, event, fields, n);
    pthread_mutex_lock(&writing);
    if (n_dropped > n_told) { /* first report the dropped lines */
        const hd_log_field lines = hd_log_int("lines", n_dropped - n_told);
        format(&gap, HD_LOG_WARN, "log_dropped", &lines, 1);
        if (write_line(&gap)) n_told = n_dropped;
    }
    if (n_dropped > n_told || !write_line(&l)) n_dropped++;
    pthread_mutex_unlock(&writing);
}

void hd_log_name_rank(int32_t rank, const char *host) {
    snprintf(name, sizeof name, "rank %d@%.64s ", rank, host);
}

int64_t hd_log_dropped(void) {
    return atomic_load(&n_dropped);
}
