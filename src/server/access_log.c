/* access_log.c - see access_log.h. A line is built on the stack, so that a request is logged
 * also when memory has run out. */
#include "server/access_log.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { MAX_LINE = 2048, MAX_TEXT = 512 };

typedef struct line {
    char text[MAX_LINE];
    size_t n;
} line;

__attribute__((format(printf, 2, 3))) static void put(line *l, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(l->text + l->n, sizeof l->text - l->n, format, args);
    va_end(args);
    l->n += (size_t)n < sizeof l->text - l->n ? (size_t)n : sizeof l->text - l->n - 1;
}

/* Writes text as JSON; bytes beyond ASCII are escaped by number, and long text is truncated. */
static void put_text(line *l, const char *key, const char *text) {
    put(l, ", \"%s\": \"", key);
    for (size_t i = 0; i < MAX_TEXT && text[i]; i++) {
        const unsigned char c = (unsigned char)text[i];
        const bool plain = c > 0x20 && c < 0x7f && c != '"' && c != '\\';
        put(l, plain ? "%c" : "\\u%04x", c);
    }
    put(l, "\"");
}

static void put_time(line *l) {
    struct timespec now;
    struct tm utc;
    char stamp[40];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);
    put(l, "{\"time\": \"%s.%03dZ\"", stamp, (int)(now.tv_nsec / 1000000));
}

static double milliseconds(int64_t ns) {
    return (double)ns * 1e-6;
}

void access_log_write(void *file, const http_ended *e) {
    line l = {.n = 0};
    put_time(&l);
    put_text(&l, "method", e->method);
    put_text(&l, "path", e->path);
    put(&l, ", \"status\": %d", e->status);
    if (e->left) put(&l, ", \"left\": true");
    if (e->prompt_tokens >= 0) {
        put(&l, ", \"prompt_tokens\": %d, \"output_tokens\": %d", (int)e->prompt_tokens,
            (int)e->output_tokens);
    }
    if (e->first_ns)
        put(&l, ", \"first_token_ms\": %.3f", milliseconds(e->first_ns - e->start_ns));
    put(&l, ", \"ms\": %.3f", milliseconds(e->end_ns - e->start_ns));
    put_text(&l, "request_id", e->request_id);
    put(&l, "}\n");
    line_file_append(file, l.text, l.n);
}
