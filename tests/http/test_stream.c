/* test_stream.c - buffers of unread reply bytes: when a reader is too slow, what counts as held, and
 * what waits for the socket. Time is a number here: nothing waits. */
#include "check.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/progress.h"
#include "http/http_internal.h"

enum { BUFFER = 4096, STALL_S = 10, PIECE = 1024, PIECES = 192 };
#define SECOND_NS   INT64_C(1000000000)
#define PATIENCE_NS (STALL_S * SECOND_NS + PIECE * PIECES * (SECOND_NS / HTTP_BYTES_PER_S))

typedef struct streaming {
    http_server server;
    http_call call;
    int64_t begun_ns, written_ns; /* before and after the writes */
} streaming;

/* A stream whose reader is 192 KiB behind. Beside the stall limit it has the time that a slow
 * line takes for them: three seconds. */
static streaming *begin(void) {
    static const char piece[PIECE];
    streaming *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->server.options.limits =
        (http_limits){.stream_bytes = BUFFER, .bodies_bytes = 1 << 20, .stall_s = STALL_S};
    s->call.http = &s->server;
    s->call.streaming = true;
    pthread_mutex_init(&s->call.lock, NULL);
    s->begun_ns = hd_now_ns();
    for (int i = 0; i < PIECES; i++) {
        assert_true(http_stream_write(&s->call, piece, PIECE));
    }
    s->written_ns = hd_now_ns();
    return s;
}

static void end(streaming *s) {
    http_stream_free(&s->call);
    assert_int_equal(s->server.held_bytes, 0);
    pthread_mutex_destroy(&s->call.lock);
    free(s);
}

static void read_at(streaming *s, size_t n, int64_t now) {
    http_stream_taken(&s->call, n);
    s->call.taken_ns = now;
}

static void a_reader_that_takes_nothing_is_late(void **state) {
    (void)state;
    streaming *s = begin();
    assert_false(http_stream_is_late(&s->call, s->begun_ns + STALL_S * SECOND_NS));
    assert_true(http_stream_is_late(&s->call, s->written_ns + STALL_S * SECOND_NS + 1));
    end(s);
}

/* It never stalls, but is always more than its buffer behind. */
static void a_reader_that_stays_behind_is_late(void **state) {
    (void)state;
    streaming *s = begin();
    for (int64_t ns = 0; ns <= PATIENCE_NS; ns += SECOND_NS) {
        read_at(s, 1, s->begun_ns + ns);
        assert_false(http_stream_is_late(&s->call, s->begun_ns + ns));
    }
    read_at(s, 1, s->written_ns + PATIENCE_NS + 1);
    assert_true(http_stream_is_late(&s->call, s->written_ns + PATIENCE_NS + 1));
    end(s);
}

/* What it was behind is forgotten; behind once more, it has all the time once more. */
static void a_reader_that_catches_up_is_not_late(void **state) {
    (void)state;
    static const char piece[PIECE * PIECES];
    const int64_t far_ns = 100 * PATIENCE_NS;
    streaming *s = begin();
    read_at(s, PIECE * PIECES - BUFFER, s->written_ns + far_ns);
    assert_false(http_stream_is_late(&s->call, s->written_ns + far_ns));
    const int64_t begun_ns = hd_now_ns();
    assert_true(http_stream_write(&s->call, piece, sizeof piece));
    read_at(s, 1, begun_ns + PATIENCE_NS);
    assert_false(http_stream_is_late(&s->call, begun_ns + PATIENCE_NS));
    read_at(s, 1, begun_ns + far_ns);
    assert_true(http_stream_is_late(&s->call, begun_ns + far_ns));
    end(s);
}

/* Bytes that are kept for later readers share the limit with what is in streams. */
static void what_is_kept_counts(void **state) {
    (void)state;
    streaming *s = begin();
    const size_t limit = s->server.options.limits.bodies_bytes, used = s->server.held_bytes;
    assert_true(used >= PIECE * PIECES);
    assert_false(http_hold(&s->call, limit - used + 1));
    assert_true(http_hold(&s->call, limit - used));
    assert_false(http_hold(&s->call, 1));
    http_let_go(&s->call, limit - used);
    assert_int_equal(s->server.held_bytes, used);
    end(s);
}

/* ---- with a socket ---- */

typedef struct sending {
    http_server server;
    http_conn conn;
    http_call call;
    int client;
} sending;

/* A stream in chunks whose headers were sent: its connection is left to who writes. */
static sending *begin_sending(void) {
    int ends[2];
    sending *s = calloc(1, sizeof *s);
    assert_non_null(s);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    s->server.options.limits =
        (http_limits){.stream_bytes = BUFFER, .bodies_bytes = 1 << 20, .stall_s = STALL_S};
    s->server.options.writer_sends = true;
    s->server.epoll = epoll_create1(0);
    s->conn = (http_conn){.http = &s->server, .fd = ends[0], .generation = 1};
    s->client = ends[1];
    s->call.http = &s->server;
    s->call.conn = &s->conn;
    s->call.streaming = s->call.chunked = s->call.suspended = true;
    pthread_mutex_init(&s->call.lock, NULL);
    struct epoll_event event = {.events = EPOLLRDHUP | EPOLLET};
    assert_int_equal(epoll_ctl(s->server.epoll, EPOLL_CTL_ADD, s->conn.fd, &event), 0);
    return s;
}

static void end_sending(sending *s) {
    http_stream_free(&s->call);
    pthread_mutex_destroy(&s->call.lock);
    if (s->client >= 0) close(s->client);
    close(s->conn.fd);
    close(s->server.epoll);
    free(s);
}

/* What comes at the client without waiting. */
static void receive(const sending *s, hd_bytes *out) {
    char piece[PIECE];
    for (ssize_t n; (n = recv(s->client, piece, sizeof piece, 0)) > 0;) {
        assert_int_equal(hd_bytes_append(out, piece, (size_t)n, NULL), HD_OK);
    }
}

static void what_fits_is_sent_at_once(void **state) {
    (void)state;
    sending *s = begin_sending();
    hd_bytes got = {.max = 1 << 20};
    assert_true(http_stream_write(&s->call, "data: a\n\n", 9));
    assert_true(http_stream_write(&s->call, "", 0)); /* no chunk, which would be the last */
    assert_true(http_stream_write(&s->call, "0123456789abcdef", 16));
    receive(s, &got);
    assert_int_equal(got.n, 9 + 5 + 16 + 6);
    assert_memory_equal(got.data, "9\r\ndata: a\n\n\r\n10\r\n0123456789abcdef\r\n", got.n);
    assert_int_equal(s->call.stream_n, 0);
    hd_bytes_deinit(&got);
    end_sending(s);
}

/* And the watcher's epoll says when there is room again. */
static void what_does_not_fit_waits_in_order(void **state) {
    (void)state;
    sending *s = begin_sending();
    hd_bytes got = {.max = 1 << 24}, wanted = {.max = 1 << 24};
    char piece[PIECE];
    for (int i = 0; s->call.stream_n < (size_t)3 * PIECE; i++) {
        memset(piece, 'a' + i % 26, sizeof piece);
        assert_true(http_stream_write(&s->call, piece, sizeof piece));
        assert_int_equal(hd_bytes_append(&wanted, "400\r\n", 5, NULL), HD_OK);
        assert_int_equal(hd_bytes_append(&wanted, piece, sizeof piece, NULL), HD_OK);
        assert_int_equal(hd_bytes_append(&wanted, "\r\n", 2, NULL), HD_OK);
    }
    struct epoll_event event;
    assert_int_equal(epoll_wait(s->server.epoll, &event, 1, 0), 0);
    do {
        receive(s, &got);
        while (epoll_wait(s->server.epoll, &event, 1, 0) == 1) http_stream_go_on(&s->call);
    } while (s->call.stream_n);
    receive(s, &got);
    assert_int_equal(got.n, wanted.n);
    assert_memory_equal(got.data, wanted.data, got.n);
    hd_bytes_deinit(&got);
    hd_bytes_deinit(&wanted);
    end_sending(s);
}

static void on_gone(void *user) {
    ++*(int *)user;
}

static void a_client_that_left_is_seen_by_the_writer(void **state) {
    (void)state;
    sending *s = begin_sending();
    int gone = 0;
    http_on_gone(&s->call, on_gone, &gone);
    close(s->client);
    s->client = -1;
    http_stream_write(&s->call, "data: a\n\n", 9);
    assert_int_equal(gone, 1);
    assert_false(http_stream_write(&s->call, "data: b\n\n", 9));
    end_sending(s);
}

int test_stream(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_reader_that_takes_nothing_is_late),
        cmocka_unit_test(a_reader_that_stays_behind_is_late),
        cmocka_unit_test(a_reader_that_catches_up_is_not_late),
        cmocka_unit_test(what_is_kept_counts),
        cmocka_unit_test(what_fits_is_sent_at_once),
        cmocka_unit_test(what_does_not_fit_waits_in_order),
        cmocka_unit_test(a_client_that_left_is_seen_by_the_writer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
