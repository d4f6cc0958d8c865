/* bench_comm_peer.c - what collectives are compared with: a copy of memory, and a plain socket. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/progress.h"
#include "base/quantiles.h"
#include "cli/bench/bench_comm_internal.h"

const size_t comm_sizes[COMM_SIZES] = {64, 4096, 8192, 16384, 32768, 1 << 20, 16 << 20};

int comm_rounds(int rounds, size_t bytes) {
    enum { SMALL = 16384, LEAST = 5 };
    const int n = bytes > SMALL ? (int)((size_t)rounds * SMALL / bytes) : rounds;
    return n < LEAST ? LEAST : n > COMM_MAX_ROUNDS ? COMM_MAX_ROUNDS : n;
}

double comm_median_us(comm_round_fn *fn, void *ctx, size_t bytes, int rounds) {
    static _Thread_local double us[COMM_MAX_ROUNDS];
    const int n = comm_rounds(rounds, bytes);
    for (int i = 0; i < n / 10 + 1; i++) fn(ctx, bytes);
    for (int i = 0; i < n; i++) {
        const int64_t start = hd_now_ns();
        fn(ctx, bytes);
        us[i] = (double)(hd_now_ns() - start) * 1e-3;
    }
    return hd_quantiles_of(us, n).median;
}

static void copy_once(void *ctx, size_t bytes) {
    char *at = ctx;
    memcpy(at, at + bytes, bytes);
    *(volatile char *)at = at[bytes - 1]; /* it must be done */
}

hd_status comm_time_memcpy(double *us, int rounds, hd_err *err) {
    char *block = calloc(2, comm_sizes[COMM_SIZES - 1]);
    if (!block) return HD_FAIL(err, HD_ENOMEM, "no memory for a copy");
    for (int i = 0; i < COMM_SIZES; i++) {
        us[i] = comm_median_us(copy_once, block, comm_sizes[i], rounds);
    }
    free(block);
    return HD_OK;
}

/* ---- a plain socket ---- */

typedef struct wire {
    int fd;
    char *block;
    bool failed;
} wire;

static void move_all(wire *w, size_t n, bool out) {
    for (size_t at = 0; at < n && !w->failed;) {
        const ssize_t some = out ? send(w->fd, w->block + at, n - at, MSG_NOSIGNAL)
                                 : recv(w->fd, w->block + at, n - at, 0);
        if (some > 0) at += (size_t)some;
        if (some == 0 || (some < 0 && errno != EINTR)) w->failed = true;
    }
}

static void ping(void *ctx, size_t bytes) {
    move_all(ctx, bytes, true);
    move_all(ctx, bytes, false);
}

static void pong(void *ctx, size_t bytes) {
    move_all(ctx, bytes, false);
    move_all(ctx, bytes, true);
}

/* Two ends of a TCP connection over the loopback interface. */
static bool connect_pair(int fd[2]) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof at;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    fd[0] = socket(AF_INET, SOCK_STREAM, 0);
    fd[1] = -1;
    if (listener >= 0 && fd[0] >= 0 && bind(listener, (struct sockaddr *)&at, n) == 0 &&
        listen(listener, 1) == 0 && getsockname(listener, (struct sockaddr *)&at, &n) == 0 &&
        connect(fd[0], (struct sockaddr *)&at, n) == 0) {
        fd[1] = accept(listener, NULL, NULL);
    }
    if (listener >= 0) close(listener);
    for (int i = 0; i < 2; i++) {
        if (fd[i] >= 0) setsockopt(fd[i], IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    }
    return fd[1] >= 0;
}

static void run_end(wire *w, comm_round_fn *fn, double *us, int rounds) {
    for (int i = 0; i < COMM_SIZES && !w->failed; i++) {
        us[i] = comm_median_us(fn, w, comm_sizes[i], rounds) / 2;
    }
}

hd_status comm_time_socket(double *us, int rounds, hd_err *err) {
    double ignored[COMM_SIZES];
    int fd[2];
    wire w = {.block = calloc(1, comm_sizes[COMM_SIZES - 1])};
    w.failed = !w.block || !connect_pair(fd);
    const pid_t pid = w.failed ? -1 : fork();
    if (pid == 0) {
        w.fd = fd[1];
        close(fd[0]);
        run_end(&w, pong, ignored, rounds);
        _exit(0);
    }
    if (pid > 0) {
        w.fd = fd[0];
        close(fd[1]);
        run_end(&w, ping, us, rounds);
        close(fd[0]);
        waitpid(pid, NULL, 0);
    }
    free(w.block);
    if (pid > 0 && !w.failed) return HD_OK;
    return HD_FAIL(err, HD_EIO, "no socket between two processes: %s", strerror(errno));
}
