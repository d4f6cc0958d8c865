/* bench_link.c - pages between two processes of this host, as src/pd sends them over TCP, beside the
 * same bytes over a plain socket.
 *
 *     build/bench_link [ROUNDS]
 *
 * The sender copies each page into a frame, as an export does, and seals it; the receiver checks the
 * MAC. Prints GB/s, medians of the rounds, in which both take turns. */
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/progress.h"
#include "pd/link.h"

enum { MOST_PAGE = 4 << 20, BYTES = 256 << 20, MOST_ROUNDS = 100 };

static const uint64_t key[2] = {1, 2};
static const uint32_t most[PD_N_FRAMES] = {[PD_FRAME_PAGE] = MOST_PAGE};
static uint8_t page[MOST_PAGE], room[MOST_PAGE];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

/* Two connected sockets. */
static void connect_ends(int ends[2]) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof at;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&at, n) || listen(listener, 1) ||
        getsockname(listener, (struct sockaddr *)&at, &n) ||
        connect(ends[0], (struct sockaddr *)&at, n)) {
        fail("a connection");
    }
    ends[1] = accept(listener, NULL, NULL);
    close(listener);
}

static pd_link link_on(int fd, bool is_server) {
    pd_link l = {0};
    hd_channel_init(&l.channel, fd, is_server, key);
    l.channel.limits = (hd_frame_limits){most, PD_N_FRAMES};
    return l;
}

static void wait_for(int fd, short what) {
    struct pollfd p = {.fd = fd, .events = what};
    poll(&p, 1, -1);
}

static void send_pages(int fd, size_t n) {
    pd_link l = link_on(fd, false);
    for (size_t i = 0; i < BYTES / n; i++) {
        pd_out *o = pd_out_new(n);
        if (!o) fail("memory");
        memcpy(pd_out_payload(o), page, n);
        pd_link_put(&l, PD_FRAME_PAGE, o, 0);
        while (l.first) {
            wait_for(fd, POLLOUT);
            if (pd_link_flush(&l, NULL) != HD_OK) fail("sending");
        }
    }
}

static void receive_pages(int fd, size_t n) {
    pd_link l = link_on(fd, true);
    for (size_t i = 0; i < BYTES / n;) {
        const hd_status st = pd_link_read(&l, 0, NULL);
        if (st == HD_EAGAIN) wait_for(fd, POLLIN);
        if (st != HD_OK && st != HD_EAGAIN) fail("receiving");
        i += st == HD_OK;
    }
    pd_link_close(&l);
}

static void send_plainly(int fd, size_t n) {
    for (size_t sent = 0; sent < BYTES;) {
        const size_t at = sent % n;
        const ssize_t k = send(fd, page + at, n - at, MSG_NOSIGNAL);
        if (k < 0) fail("sending");
        sent += (size_t)k;
    }
}

static void receive_plainly(int fd, size_t n) {
    for (size_t got = 0; got < BYTES;) {
        const ssize_t k = recv(fd, room, n, 0);
        if (k <= 0) fail("receiving");
        got += (size_t)k;
    }
}

typedef void transfer(int fd, size_t n);

/* Returns GB/s of BYTES in pages of n. */
static double rate(transfer *sender, transfer *receiver, size_t n) {
    int ends[2];
    connect_ends(ends);
    const pid_t child = fork();
    if (child < 0) fail("a process");
    if (child == 0) {
        sender(ends[0], n);
        _exit(0);
    }
    const int64_t begin = hd_now_ns();
    receiver(ends[1], n);
    const int64_t ns = hd_now_ns() - begin;
    waitpid(child, NULL, 0);
    close(ends[0]);
    return (double)BYTES / (double)ns;
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    static const size_t sizes[] = {64 << 10, 256 << 10, 1 << 20, MOST_PAGE};
    const long asked = argc > 1 ? strtol(argv[1], NULL, 10) : 5;
    const size_t rounds = asked < 1 ? 1 : asked > MOST_ROUNDS ? MOST_ROUNDS : (size_t)asked;
    memset(page, 1, sizeof page);
    printf("%10s %10s %14s %10s\n", "KiB a page", "link GB/s", "a socket GB/s", "ratio");
    for (size_t k = 0; k < HD_LEN(sizes); k++) {
        double links[MOST_ROUNDS], plain[MOST_ROUNDS];
        for (size_t i = 0; i < rounds; i++) {
            links[i] = rate(send_pages, receive_pages, sizes[k]);
            plain[i] = rate(send_plainly, receive_plainly, sizes[k]);
        }
        qsort(links, rounds, sizeof *links, by_size);
        qsort(plain, rounds, sizeof *plain, by_size);
        const double ours = links[rounds / 2], peer = plain[rounds / 2];
        printf("%10zu %10.2f %14.2f %10.2f\n", sizes[k] >> 10, ours, peer, ours / peer);
    }
    return 0;
}
