/* test_stream.c - buffers of unread reply bytes, without sockets: when a reader is too slow, and
 * what counts as held. Time is a number here: nothing waits. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

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
    static char out[PIECE * PIECES];
    http_stream_take(&s->call, out, n);
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

int test_stream(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_reader_that_takes_nothing_is_late),
        cmocka_unit_test(a_reader_that_stays_behind_is_late),
        cmocka_unit_test(a_reader_that_catches_up_is_not_late),
        cmocka_unit_test(what_is_kept_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
