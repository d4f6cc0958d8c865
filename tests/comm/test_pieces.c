/* test_pieces.c - pieces of experts between ranks on two hosts (comm/pieces.h): the bytes, and what a
 * stranger, a wrong request, a server that is silent or gone changes: nothing in what is read. */
#include "check.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "comm/address.h"
#include "comm/pieces.h"

enum { LAYERS = 3, EXPERTS = 5, DENSE = 1, MOST = 3 * HD_PIECE_MOST_BYTES };

static const char *const HERE = "127.0.0.1:1", *const SECRET = "a secret";

/* Bytes of the arrays of every expert: elements of many pieces, scales of a few bytes. */
static uint8_t model[EXPERTS][MOST + LAYERS];

static const void *find(void *ctx, int32_t layer, int32_t expert, int32_t array,
                        size_t *bytes) {
    (void)ctx;
    if (layer == DENSE || array == 5) return NULL;
    *bytes = array % 2 ? 100 : MOST - 7;
    return model[expert] + layer;
}

static const hd_piece_source source = {.find = find, .n_layers = LAYERS, .n_experts = EXPERTS};

static void must(hd_status st, const hd_err *err) {
    if (st != HD_OK) fail_msg("%s", err->msg);
}

static hd_piece_server *open_server(bool answers) {
    hd_piece_server *s;
    hd_err err = {0};
    uint32_t x = 1;
    for (size_t i = 0; i < sizeof model; i++) {
        ((uint8_t *)model)[i] = (uint8_t)(x >> 16);
        x = x * 1664525 + 1013904223;
    }
    must(hd_piece_server_open(&s, HERE, SECRET, &err), &err);
    if (answers) must(hd_piece_server_start(s, &source, &err), &err);
    return s;
}

static hd_piece_reader *open_reader(const hd_piece_server *s, const char *secret,
                                    int32_t rank) {
    hd_piece_reader *r;
    hd_err err = {0};
    must(hd_piece_reader_open(&r, hd_piece_server_address(s), secret, rank, &err), &err);
    return r;
}

static hd_piece_server_figures figures_of(const hd_piece_server *s) {
    hd_piece_server_figures f;
    hd_piece_server_read_figures(s, &f);
    return f;
}

static hd_piece_reader_figures read_figures(hd_piece_reader *r) {
    hd_piece_reader_figures f;
    hd_piece_reader_read_figures(r, &f);
    return f;
}

/* All zeros: other bytes than the server's, so that one sees whence they came. */
static const uint8_t zeros[MOST];

/* Reads an array of every expert but its first bytes, two reads for each; file: what the reader's own file has.
 * Returns the bytes. */
static size_t read_all(hd_piece_reader *r, uint64_t first, const uint8_t *file) {
    static uint8_t to[EXPERTS][2][MOST];
    size_t all = 0;
    uint64_t last = 0;
    memset(to, 0, sizeof to);
    for (int32_t e = 0; e < EXPERTS; e++) {
        for (int32_t k = 0; k < 2; k++) {
            const size_t bytes = (k ? 100 : MOST - 7) - first;
            last = hd_piece_reader_queue(r, &(hd_piece_read){.layer = 2,
                                                             .expert = e,
                                                             .array = k,
                                                             .at = first,
                                                             .to = to[e][k],
                                                             .file = file ? file : zeros,
                                                             .bytes = bytes});
            all += bytes;
        }
    }
    hd_piece_reader_await(r, last);
    for (int32_t e = 0; e < EXPERTS; e++) {
        for (int32_t k = 0; k < 2; k++) {
            const uint8_t *want = file ? file : model[e] + 2 + first;
            const size_t bytes = (k ? 100 : MOST - 7) - first;
            assert_memory_equal(to[e][k], want, bytes);
            assert_int_equal(to[e][k][bytes], 0);
        }
    }
    return all;
}

static void test_pieces_are_the_bytes_of_the_other_rank(void **state) {
    (void)state;
    hd_piece_server *s = open_server(true);
    hd_piece_reader *one = open_reader(s, SECRET, 1), *two = open_reader(s, SECRET, 2);
    size_t all = read_all(one, 0, NULL);
    all += read_all(one, 33, NULL);
    assert_int_equal(read_figures(one).bytes, all);
    read_all(two, 99, NULL);
    assert_int_equal(read_figures(one).file_bytes + read_figures(two).file_bytes, 0);
    assert_int_equal(read_figures(one).failures + read_figures(two).failures, 0);
    assert_int_equal(figures_of(s).readers, 2);
    assert_true(figures_of(s).bytes > (int64_t)all);
    assert_int_equal(figures_of(s).refused, 0);
    hd_piece_reader_close(two);
    hd_piece_reader_close(one);
    hd_piece_server_close(s);
}

static void test_a_reader_with_another_key_reads_its_file(void **state) {
    (void)state;
    hd_piece_server *s = open_server(true);
    hd_piece_reader *r = open_reader(s, "another", 1), *known = open_reader(s, SECRET, 1);
    const size_t all = read_all(r, 0, zeros);
    assert_int_equal(read_figures(r).bytes, 0);
    assert_int_equal(read_figures(r).file_bytes, all);
    assert_int_equal(read_figures(r).failures, 1);
    read_all(known, 0, NULL);
    assert_int_equal(figures_of(s).bytes, all);
    hd_piece_reader_close(known);
    hd_piece_reader_close(r);
    hd_piece_server_close(s);
}

static void test_a_server_that_is_silent_or_gone(void **state) {
    (void)state;
    hd_piece_server *s = open_server(false);
    hd_piece_reader *r = open_reader(s, SECRET, 1), *late;
    size_t all = read_all(r, 0, zeros);
    assert_string_equal(read_figures(r).why, "nothing came for 1000 ms");
    late = open_reader(s, SECRET, 2);
    hd_piece_server_close(s);
    all += read_all(r, 0, zeros); /* without another attempt so soon */
    assert_int_equal(read_figures(r).failures, 1);
    assert_int_equal(read_figures(r).file_bytes, all);
    read_all(late, 0, zeros);
    assert_true(strstr(read_figures(late).why, "Connection refused") != NULL);
    hd_piece_reader_close(late);
    hd_piece_reader_close(r);
}

/* What has come of a connection that ends stays, the rest is the file's. */
static void test_a_server_that_ends_between_reads(void **state) {
    (void)state;
    hd_piece_server *s = open_server(true);
    hd_piece_reader *r = open_reader(s, SECRET, 1);
    const size_t all = read_all(r, 0, NULL);
    hd_piece_server_close(s);
    assert_int_equal(read_all(r, 0, zeros), all);
    assert_int_equal(read_figures(r).bytes, all);
    assert_int_equal(read_figures(r).file_bytes, all);
    assert_int_equal(read_figures(r).failures, 1);
    hd_piece_reader_close(r);
}

/* ---- a rank that sends what is no request ---- */

static hd_status await_frame(hd_channel *c) {
    hd_status st;
    hd_err err = {0};
    while ((st = hd_channel_read(c, &err)) == HD_EAGAIN) {
        struct pollfd p = {.fd = c->fd, .events = POLLIN};
        assert_int_equal(poll(&p, 1, 5000), 1);
    }
    return st;
}

static hd_channel connect_as(const hd_piece_server *s, int32_t rank) {
    hd_channel c;
    struct addrinfo *found;
    uint64_t key[2];
    hd_err err = {0};
    must(hd_address_resolve(hd_piece_server_address(s), false, &found, &err), &err);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, found->ai_addr, found->ai_addrlen), 0);
    freeaddrinfo(found);
    hd_piece_key(key, SECRET);
    hd_channel_init(&c, fd, false, key);
    c.limits = hd_piece_limits(false);
    assert_int_equal(await_frame(&c), HD_OK);
    memset(c.nonce[1], 7, sizeof c.nonce[1]);
    must(hd_channel_send(&c, (hd_frame_kind)HD_PIECE_JOIN, rank, c.nonce[1], sizeof c.nonce[1],
                         1000, &err),
         &err);
    return c;
}

static const struct {
    hd_piece piece;
    uint32_t n; /* bytes of the payload */
    int kind;
} wrong[] = {
    {{.n = 1},                               sizeof(hd_piece) - 1, HD_PIECE_ASK  },
    {{.n = 1},                               0,                    HD_PIECE_ASK  },
    {{.n = 1},                               sizeof(hd_piece),     HD_PIECE_BYTES},
    {{.n = 1},                               0,                    HD_PIECE_JOIN },
    {{.layer = LAYERS, .n = 1},              sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.layer = -1, .n = 1},                  sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.layer = DENSE, .n = 1},               sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.expert = EXPERTS, .n = 1},            sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.expert = INT32_MIN, .n = 1},          sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.array = HD_PIECE_ARRAYS, .n = 1},     sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.array = 5, .n = 1},                   sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.n = 0},                               sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.n = HD_PIECE_MOST_BYTES + 1},         sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.array = 1, .n = 101},                 sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.array = 1, .at = 100, .n = 1},        sizeof(hd_piece),     HD_PIECE_ASK  },
    {{.array = 1, .at = UINT64_MAX, .n = 2}, sizeof(hd_piece),     HD_PIECE_ASK  },
};

static void test_a_wrong_request_costs_the_connection(void **state) {
    (void)state;
    hd_piece_server *s = open_server(true);
    hd_piece_reader *r = open_reader(s, SECRET, 1);
    int64_t refused = 0;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        hd_err err = {0};
        hd_channel c = connect_as(s, 2);
        const hd_piece right = {.expert = 3, .n = 10, .at = 5};
        must(hd_channel_send(&c, (hd_frame_kind)HD_PIECE_ASK, 2, &right, sizeof right, 1000,
                             &err),
             &err);
        assert_int_equal(await_frame(&c), HD_OK);
        assert_memory_equal(c.payload, model[3] + 5, 10);
        must(hd_channel_send(&c, (hd_frame_kind)wrong[i].kind, 2, &wrong[i].piece, wrong[i].n,
                             1000, &err),
             &err);
        if (await_frame(&c) != HD_EIO) fail_msg("request %zu was answered", i);
        hd_channel_close(&c);
        assert_int_equal(figures_of(s).refused, ++refused);
        read_all(r, 1, NULL); /* nobody else notices */
    }
    assert_int_equal(read_figures(r).failures, 0);
    hd_piece_reader_close(r);
    hd_piece_server_close(s);
}

/* More connections that say nothing than there is room for, and one that sends random bytes. */
static void test_strangers_do_no_harm(void **state) {
    (void)state;
    hd_piece_server *s = open_server(true);
    hd_piece_reader *r = open_reader(s, SECRET, 1);
    int fds[40];
    char bytes[4096];
    struct addrinfo *found;
    hd_err err = {0};
    must(hd_address_resolve(hd_piece_server_address(s), false, &found, &err), &err);
    assert_int_equal(getrandom(bytes, sizeof bytes, 0), sizeof bytes);
    read_all(r, 0, NULL);
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM, 0);
        assert_int_equal(connect(fds[i], found->ai_addr, found->ai_addrlen), 0);
        if (i % 2) (void)!send(fds[i], bytes, sizeof bytes, MSG_NOSIGNAL);
    }
    freeaddrinfo(found);
    read_all(r, 0, NULL);
    hd_piece_reader *other = open_reader(s, SECRET, 2);
    read_all(other, 0, NULL);
    assert_int_equal(read_figures(r).failures + read_figures(other).failures, 0);
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) close(fds[i]);
    hd_piece_reader_close(other);
    hd_piece_reader_close(r);
    hd_piece_server_close(s);
}

int test_pieces(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces_are_the_bytes_of_the_other_rank),
        cmocka_unit_test(test_a_reader_with_another_key_reads_its_file),
        cmocka_unit_test(test_a_server_that_is_silent_or_gone),
        cmocka_unit_test(test_a_server_that_ends_between_reads),
        cmocka_unit_test(test_a_wrong_request_costs_the_connection),
        cmocka_unit_test(test_strangers_do_no_harm),
    };
    return cmocka_run_group_tests_name("pieces", tests, NULL, NULL);
}
