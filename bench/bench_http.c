/* bench_http.c - a load generator for HTTP servers with OpenAI-style completions.
 *
 *     bench_http PORT short  CONNECTIONS SECONDS            requests of one token, kept alive
 *     bench_http PORT stream CONNECTIONS SECONDS TOKENS     streams of so many tokens
 *     bench_http PORT idle   CONNECTIONS                    connections that say nothing
 *
 * One thread, epoll. Prints one JSON object: requests and tokens per second, times of arrival,
 * and the server's own figures before and after, where it has /metrics. A seventh argument
 * names the model. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <netinet/tcp.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 512, READ_BYTES = 64 << 10, HEAD_BYTES = 2048, KEPT_TIMES = 1 << 20 };

typedef struct peer {
    int fd;
    bool in_body;
    size_t n_head, body_left; /* body_left: of a reply with a length */
    char head[HEAD_BYTES];
    char tail[16]; /* the last bytes of the stream, to see its end across reads */
    size_t n_tail;
    int64_t sent_ns, last_ns;
} peer;

typedef struct load {
    int port, n, tokens;
    bool stream;
    double seconds;
    char request[1024];
    size_t n_request;
    peer *peers;
    int64_t requests, failures, events, bytes;
    float *gaps, *firsts; /* milliseconds */
    size_t n_gaps, n_firsts;
    bool stopping;
} load;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int connect_to(int port) {
    const struct sockaddr_in to = {.sin_family = AF_INET,
                                   .sin_port = htons((uint16_t)port),
                                   .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&to, sizeof to)) {
        fprintf(stderr, "error: cannot connect to port %d: %s\n", port, strerror(errno));
        exit(1);
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

/* ---- the server's own figures ---- */

/* The first of the name, with that text among its labels. */
static double figure(const char *text, const char *name, const char *label) {
    const size_t n = strlen(name);
    for (const char *p = text; (p = strstr(p, name)); p += n) {
        if (p != text && p[-1] != '\n') continue;
        const char *value = p + n, *found = strstr(value, label);
        if (*value == '{') value = strchr(value, '}') + 1;
        if (*value == ' ' && (!*label || (found && found < value))) return strtod(value, NULL);
    }
    return 0;
}

typedef struct server_figures {
    double resident, device_seconds, tokens, steps;
} server_figures;

static server_figures ask_server(int port) {
    static const char request[] = "GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n";
    static char text[1 << 20];
    size_t n = 0;
    const int fd = connect_to(port);
    if (write(fd, request, sizeof request - 1) < 0) return (server_figures){0};
    for (ssize_t got;
         n + 1 < sizeof text && (got = read(fd, text + n, sizeof text - n - 1)) > 0;)
        n += (size_t)got;
    text[n] = '\0';
    close(fd);
    return (server_figures){figure(text, "process_resident_memory_bytes", ""),
                            figure(text, "hadal_step_seconds_total", "part=\"device\""),
                            figure(text, "hadal_generation_tokens_total", ""),
                            figure(text, "hadal_steps_total", "")};
}

/* ---- one connection ---- */

static void send_request(load *l, peer *p) {
    p->n_head = p->n_tail = 0;
    p->in_body = false;
    p->sent_ns = now_ns();
    p->last_ns = 0;
    if (write(p->fd, l->request, l->n_request) != (ssize_t)l->n_request) l->failures++;
}

static void finish(load *l, peer *p) {
    l->requests++;
    if (!l->stopping) send_request(l, p);
}

static void keep(float *list, size_t *n, int64_t ns) {
    if (*n < KEPT_TIMES) list[(*n)++] = (float)ns * 1e-6f;
}

/* The last chunk of a stream is empty; the tail is looked at across reads. */
static bool stream_ended(peer *p, const char *data, size_t n) {
    static const char end[] = "\r\n0\r\n\r\n";
    const size_t keep_n = sizeof p->tail < n ? sizeof p->tail : n;
    if (keep_n < sizeof p->tail) {
        const size_t old =
            p->n_tail < sizeof p->tail - keep_n ? p->n_tail : sizeof p->tail - keep_n;
        memmove(p->tail, p->tail + p->n_tail - old, old);
        p->n_tail = old;
    } else {
        p->n_tail = 0;
    }
    memcpy(p->tail + p->n_tail, data + n - keep_n, keep_n);
    p->n_tail += keep_n;
    return p->n_tail >= sizeof end - 1 &&
           !memcmp(p->tail + p->n_tail - (sizeof end - 1), end, sizeof end - 1);
}

static int64_t count_events(const char *data, size_t n) {
    int64_t found = 0;
    for (const char *p = data, *end = data + n;
         (p = memmem(p, (size_t)(end - p), "data: {", 7)); p += 7) {
        found++;
    }
    return found;
}

static void take_body(load *l, peer *p, const char *data, size_t n) {
    if (!l->stream) {
        if (n < p->body_left) {
            p->body_left -= n;
        } else {
            finish(l, p);
        }
        return;
    }
    const int64_t now = now_ns(), events = count_events(data, n);
    if (events) {
        if (p->last_ns) {
            keep(l->gaps, &l->n_gaps, (now - p->last_ns) / events);
        } else {
            keep(l->firsts, &l->n_firsts, now - p->sent_ns);
        }
        p->last_ns = now;
    }
    l->events += events;
    if (stream_ended(p, data, n)) finish(l, p);
}

static void take(load *l, peer *p, const char *data, size_t n) {
    l->bytes += (int64_t)n;
    if (p->in_body) {
        take_body(l, p, data, n);
        return;
    }
    const size_t room = HEAD_BYTES - 1 - p->n_head, used = n < room ? n : room;
    memcpy(p->head + p->n_head, data, used);
    const size_t before = p->n_head;
    p->n_head += used;
    p->head[p->n_head] = '\0';
    const char *end = strstr(p->head, "\r\n\r\n");
    if (!end) return;
    if (strncmp(p->head + 9, "200", 3) != 0) l->failures++;
    const char *length = strcasestr(p->head, "content-length:");
    p->body_left = length ? strtoul(length + 15, NULL, 10) : 0;
    p->in_body = true;
    const size_t skipped = (size_t)(end + 4 - p->head) - before;
    if (n > skipped || (!l->stream && !p->body_left))
        take_body(l, p, data + skipped, n - skipped);
}

/* ---- the whole ---- */

static void make_request(load *l, const char *model) {
    char body[512];
    const int n =
        snprintf(body, sizeof body,
                 "{\"model\":\"%s\",\"prompt\":\"Once upon a time\",\"max_tokens\":%d,"
                 "\"ignore_eos\":true,\"temperature\":1%s}",
                 model, l->tokens, l->stream ? ",\"stream\":true" : "");
    l->n_request =
        (size_t)snprintf(l->request, sizeof l->request,
                         "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                         "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                         n, body);
}

static void raise_limit(int n) {
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < (rlim_t)n + 16) {
        fprintf(stderr, "error: %d connections need more open files than %llu\n", n,
                (unsigned long long)limit.rlim_cur);
        exit(1);
    }
}

static void run(load *l) {
    static char buffer[READ_BYTES];
    struct epoll_event events[EVENTS];
    const int epoll = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < l->n; i++) {
        peer *p = &l->peers[i];
        struct epoll_event want = {.events = EPOLLIN, .data.ptr = p};
        epoll_ctl(epoll, EPOLL_CTL_ADD, p->fd, &want);
        send_request(l, p);
    }
    const int64_t start = now_ns(), end = start + (int64_t)(l->seconds * 1e9);
    while (now_ns() < end) {
        const int n = epoll_wait(epoll, events, EVENTS, 100);
        for (int i = 0; i < n; i++) {
            peer *p = events[i].data.ptr;
            const ssize_t got = read(p->fd, buffer, sizeof buffer);
            if (got > 0) {
                take(l, p, buffer, (size_t)got);
            } else if (got == 0 || errno != EAGAIN) {
                l->failures++;
                epoll_ctl(epoll, EPOLL_CTL_DEL, p->fd, NULL);
            }
        }
    }
    l->seconds = (double)(now_ns() - start) * 1e-9;
    close(epoll);
}

static int by_value(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double quantile(float *list, size_t n, double q) {
    if (!n) return 0;
    qsort(list, n, sizeof *list, by_value);
    return list[(size_t)(q * (double)(n - 1))];
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr,
                "usage: bench_http PORT short|stream|idle N [SECONDS [TOKENS [MODEL]]]\n");
        return 2;
    }
    load l = {.port = (int)strtol(argv[1], NULL, 10),
              .n = (int)strtol(argv[3], NULL, 10),
              .seconds = argc > 4 ? strtod(argv[4], NULL) : 2,
              .tokens = argc > 5 ? (int)strtol(argv[5], NULL, 10) : 1,
              .stream = strcmp(argv[2], "stream") == 0};
    const bool idle = strcmp(argv[2], "idle") == 0;
    raise_limit(l.n);
    make_request(&l, argc > 6 ? argv[6] : "tiny-v4");
    l.peers = calloc((size_t)l.n, sizeof *l.peers);
    l.gaps = malloc(KEPT_TIMES * sizeof *l.gaps);
    l.firsts = malloc(KEPT_TIMES * sizeof *l.firsts);
    if (!l.peers || !l.gaps || !l.firsts) return 1;
    const server_figures before = ask_server(l.port);
    for (int i = 0; i < l.n; i++) l.peers[i].fd = connect_to(l.port);
    if (!idle) run(&l);
    const int64_t asked = now_ns();
    const server_figures after = ask_server(l.port);
    const double answer_ms = (double)(now_ns() - asked) * 1e-6;
    const double steps = after.steps - before.steps;
    const double step_ms =
        steps > 0 ? (after.device_seconds - before.device_seconds) / steps * 1e3 : 0;
    printf("{\"connections\":%d,\"seconds\":%.3f,\"requests_per_s\":%.0f,\"tokens_per_s\":%.0f,"
           "\"events_per_s\":%.0f,\"failures\":%lld,\"itl_ms_p50\":%.4f,\"itl_ms_p99\":%.4f,"
           "\"ttft_ms_p50\":%.3f,\"server_tokens_per_s\":%.0f,\"step_ms\":%.4f,"
           "\"server_mb_before\":%.1f,\"server_mb_after\":%.1f,\"metrics_ms\":%.2f}\n",
           l.n, l.seconds, (double)l.requests / l.seconds,
           (double)l.requests * l.tokens / l.seconds, (double)l.events / l.seconds,
           (long long)l.failures, quantile(l.gaps, l.n_gaps, 0.5),
           quantile(l.gaps, l.n_gaps, 0.99), quantile(l.firsts, l.n_firsts, 0.5),
           (after.tokens - before.tokens) / l.seconds, step_ms, before.resident / 1e6,
           after.resident / 1e6, answer_ms);
    return 0;
}
