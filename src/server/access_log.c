/* access_log.c - see access_log.h. A line is built on the stack, so that a request is logged
 * also when memory has run out. */
#include "server/access_log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

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

static void write_line(void *file, const http_ended *e) {
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

/* "-": a duplicate of standard error, so that closing it leaves the log's descriptor open. */
hd_status access_log_open(line_file *file, const char *path, http_options *http, hd_err *err) {
    *file =
        (line_file){.fd = -1, .failed = "access_log_failed", .resumed = "access_log_goes_on"};
    if (!path) return HD_OK;
    if (strcmp(path, "-") != 0) {
        HD_TRY(line_file_open(&file->fd, path, err));
    } else if ((file->fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3)) < 0) {
        return HD_FAIL(err, HD_EIO, "no descriptor for the access log: %s", strerror(errno));
    }
    http->on_end = write_line;
    http->on_end_user = file;
    return HD_OK;
}
