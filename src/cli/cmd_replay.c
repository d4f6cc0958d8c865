/* cmd_replay.c - `hadal replay`: runs the requests of a request log or crash dump again and
 * compares the texts. It starts a server on a free local port, so that a request passes
 * through the same code. A line of a log contains body and reply; a line of a dump is
 * followed by the body. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/engine_options.h"
#include "cli/replay_links.h"
#include "cli/replay_text.h"
#include "cli/serving/serve_settings.h"
#include "tokenizer/tokenizer.h"

enum { MAX_FILE_BYTES = 1 << 30, MAX_ANSWER_BYTES = 256 << 20 };

typedef struct tally {
    int64_t same, different, unknown, skipped;
    json_t *links; /* of responses, see replay_links.h */
    bool quiet;
} tally;

static hd_status connect_to(int *fd, int32_t port, hd_err *err) {
    const struct sockaddr_in to = {.sin_family = AF_INET,
                                   .sin_port = htons((uint16_t)port),
                                   .sin_addr = {htonl(INADDR_LOOPBACK)}};
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*fd >= 0 && connect(*fd, (const struct sockaddr *)&to, sizeof to) == 0) return HD_OK;
    return HD_FAIL(err, HD_EIO, "cannot reach our own server: %s", strerror(errno));
}

static bool send_all(int fd, const char *bytes, size_t n) {
    while (n) {
        const ssize_t sent = write(fd, bytes, n);
        if (sent <= 0) return false;
        bytes += sent;
        n -= (size_t)sent;
    }
    return true;
}

/* HTTP/1.0: the connection's end is the reply's end. request: a body to post, or NULL. *body
 * points into out. */
static hd_status ask(int32_t port, const char *path, const char *request, hd_bytes *out,
                     const char **body, int *status, hd_err *err) {
    const char *method = request ? "POST" : "GET";
    if (!request) request = "";
    char head[2048], buffer[8192];
    int fd;
    HD_TRY(connect_to(&fd, port, err));
    const int n = snprintf(head, sizeof head,
                           "%s %s HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: "
                           "application/json\r\nContent-Length: %zu\r\n\r\n",
                           method, path, strlen(request));
    hd_status st = HD_OK;
    if (n >= (int)sizeof head || !send_all(fd, head, (size_t)n) ||
        !send_all(fd, request, strlen(request))) {
        st = HD_FAIL(err, HD_EIO, "cannot send to our own server");
    }
    for (ssize_t got; st == HD_OK && (got = read(fd, buffer, sizeof buffer)) > 0;) {
        st = hd_bytes_append(out, buffer, (size_t)got, err);
    }
    close(fd);
    if (st == HD_OK) st = hd_bytes_append(out, "", 1, err);
    if (st != HD_OK) return st;
    *body = strstr(out->data, "\r\n\r\n");
    if (strncmp(out->data, "HTTP/1.", 7) != 0 || !*body) {
        return HD_FAIL(err, HD_EFORMAT, "our own server gave no complete response");
    }
    *body += 4;
    *status = (int)strtol(out->data + 9, NULL, 10);
    return HD_OK;
}

/* Returns the request with its original seed and with the name of the loaded model. *previous:
 * a response that it continues, or NULL. */
static char *restore(const tally *t, const char *line, const char *body, const char *path,
                     json_int_t seed, const char **previous) {
    json_t *request = hd_json_read(body, strlen(body), JSON_ALLOW_NUL, NULL);
    *previous = NULL;
    if (!json_is_object(request)) {
        json_decref(request);
        return NULL;
    }
    if (!replay_relink(t->links, request, previous)) {
        printf("%s: continues a response that is not in the file before it\n", line);
        json_decref(request);
        return NULL;
    }
    json_object_del(request, "model");
    json_t *params = request;
    const bool native = strcmp(path, "/generate") == 0;
    if (native) {
        params = json_object_get(request, "sampling_params");
        if (!params) {
            params = json_object();
            json_object_set_new(request, "sampling_params", params);
        }
    }
    const char *name = native ? "sampling_seed" : "seed";
    if (json_is_object(params) && !json_is_integer(json_object_get(params, name))) {
        json_object_set_new(params, name, json_integer(seed));
    }
    char *text = hd_json_write(request, JSON_COMPACT);
    json_decref(request);
    return text;
}

static void compare(tally *t, const char *name, const char *path, const char *before,
                    const char *now) {
    char *a = replay_text(path, before), *b = replay_text(path, now);
    if (a && b && strcmp(a, b) == 0) {
        t->same++;
    } else if (a && b) {
        size_t at = 0;
        while (a[at] && a[at] == b[at]) at++;
        t->different++;
        printf("%s differs at byte %zu of its text:\n  then: %.60s\n  now:  %.60s\n", name, at,
               a + at, b + at);
    } else {
        t->skipped++;
        printf("%s: a response is not JSON\n", name);
    }
    free(a);
    free(b);
}

/* A background response is continued after it has ended. */
static hd_status wait_for(int32_t port, const char *response, hd_err *err) {
    static const struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    char path[256];
    snprintf(path, sizeof path, "/v1/responses/%s", response);
    for (bool runs = true; runs; nanosleep(&pause, NULL)) {
        hd_bytes answer = {.max = MAX_ANSWER_BYTES};
        const char *body = NULL;
        int status = 0;
        const hd_status st = ask(port, path, NULL, &answer, &body, &status, err);
        json_t *o = st == HD_OK ? hd_json_read(body, strlen(body), JSON_ALLOW_NUL, NULL) : NULL;
        const char *word = json_string_value(json_object_get(o, "status"));
        runs = word && (strcmp(word, "queued") == 0 || strcmp(word, "in_progress") == 0);
        json_decref(o);
        hd_bytes_deinit(&answer);
        HD_TRY(st);
    }
    return HD_OK;
}

static hd_status replay_one(tally *t, int32_t port, const json_t *line, const char *body,
                            hd_err *err) {
    const char *path = json_string_value(json_object_get(line, "path"));
    const char *before = json_string_value(json_object_get(line, "answer"));
    const char *finish = json_string_value(json_object_get(line, "finish"));
    const char *name = json_string_value(json_object_get(line, "request_id")), *previous;
    const json_t *then = json_object_get(line, "status");
    const json_int_t seed = json_integer_value(json_object_get(line, "seed"));
    if (!name) name = path;
    char *request = path && body ? restore(t, name, body, path, seed, &previous) : NULL;
    if (!request || (then && json_integer_value(then) != 200) ||
        (before && (!finish || strcmp(finish, "abort") == 0))) {
        t->skipped++; /* refused, aborted, or cut by length then */
        free(request);
        return HD_OK;
    }
    hd_bytes answer = {.max = MAX_ANSWER_BYTES};
    const char *now = NULL;
    int status = 0;
    hd_status st = previous ? wait_for(port, previous, err) : HD_OK;
    if (st == HD_OK) st = ask(port, path, request, &answer, &now, &status, err);
    if (st == HD_OK && before) replay_link(t->links, before, now);
    if (st == HD_OK && status != 200) {
        t->different++;
        printf("%s: status %d now\n", name, status);
    } else if (st == HD_OK && before) {
        compare(t, name, path, before, now);
    } else if (st == HD_OK) {
        char *text = replay_text(path, now);
        t->unknown++;
        if (!t->quiet) printf("%s: %s\n", name, text ? text : "(no text)");
        free(text);
    }
    hd_bytes_deinit(&answer);
    free(request);
    return st;
}

/* Reads lines of a log, and lines of a dump with the bodies after them. */
static hd_status replay_all(tally *t, int32_t port, const char *file, char *text, size_t n,
                            hd_err *err) {
    size_t at = 0;
    for (int number = 1; at < n; number++) {
        const size_t length = strcspn(text + at, "\n");
        if (length == 0) { /* an incomplete last line, after a full disk */
            at++;
            continue;
        }
        json_t *line = hd_json_read(text + at, length, JSON_ALLOW_NUL, NULL);
        if (!json_is_object(line)) {
            json_decref(line);
            return HD_FAIL(err, HD_EFORMAT, "%s: line %d is no JSON object", file, number);
        }
        at += length + (at + length < n);
        const char *body = json_string_value(json_object_get(line, "body"));
        const json_t *bytes = json_object_get(line, "bytes");
        hd_status st = HD_OK;
        if (bytes) {
            const json_int_t m = json_integer_value(bytes);
            if (m < 0 || (size_t)m > n - at) {
                st = HD_FAIL(err, HD_EFORMAT, "%s: the body behind line %d is cut short", file,
                             number);
            } else {
                body = text + at;
                at += (size_t)m;
                text[at] = '\0';
                at += at < n;
            }
        }
        if (st == HD_OK) st = replay_one(t, port, line, body, err);
        json_decref(line);
        HD_TRY(st);
    }
    return HD_OK;
}

static hd_status replay(tally *t, const server_options *options, const char *file,
                        hd_err *err) {
    char *text;
    size_t n;
    server *s = NULL;
    HD_TRY(hd_file_read(&text, &n, file, MAX_FILE_BYTES, err));
    hd_status st = server_open(&s, options, err);
    if (st == HD_OK) st = server_start(s, err);
    if (st == HD_OK) st = replay_all(t, server_port(s), file, text, n, err);
    server_close(s);
    free(text);
    return st;
}

int cmd_replay(int argc, char **argv) {
    const char *file = NULL;
    engine_settings engine = engine_settings_default();
    int code;
    tally t = {.links = json_object()};
    hd_err err = {0};
    const option options[] = {
        with_letter(option_flag("quiet", &t.quiet, "no texts that have nothing to compare"),
                    'q'),
    };
    const positional positionals[] = {
        {"FILE",      &file,                     false, POSITIONAL_PLAIN},
        {"MODEL_DIR", &engine.options.model_dir, false, POSITIONAL_MODEL}
    };
    const command_line line = {.command = "replay",
                               .summary = "Runs a request log or a crash dump again and "
                                          "compares the texts.",
                               .positionals = positionals,
                               .n_positionals = (int)HD_LEN(positionals),
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    if (!engine_options_parse(&line, ENGINE_REPLAY, &engine, argc, argv, &code)) {
        json_decref(t.links);
        return code;
    }
    const server_options so = serve_settings_plain(&engine);
    const hd_status st = replay(&t, &so, file, &err);
    json_decref(t.links);
    if (st != HD_OK) return report_error(&err);
    printf("%lld the same, %lld different, %lld without an answer to compare, %lld skipped\n",
           (long long)t.same, (long long)t.different, (long long)t.unknown,
           (long long)t.skipped);
    return t.different ? 1 : 0;
}
