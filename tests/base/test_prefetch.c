/* test_prefetch.c - pieces of a mapped file that are asked for before they are read. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/prefetch.h"

enum { BYTES = 1 << 20, PIECES = 300, PIECE = 264 };

static char path[64];
static hd_map map;

static int open_file(void **state) {
    static uint8_t data[BYTES];
    (void)state;
    snprintf(path, sizeof path, "%s/hadal_prefetch_XXXXXX", P_tmpdir);
    const int fd = mkstemp(path);
    if (fd < 0) return -1;
    for (int32_t i = 0; i < BYTES; i++) data[i] = (uint8_t)(i * 7);
    const bool good = write(fd, data, BYTES) == BYTES && close(fd) == 0;
    return good && hd_map_open(&map, path, NULL) == HD_OK ? 0 : -1;
}

static int close_file(void **state) {
    (void)state;
    hd_map_close(&map);
    return unlink(path);
}

static void read_all(void) {
    for (int32_t i = 0; i < BYTES; i++) {
        if (map.data[i] != (uint8_t)(i * 7)) fail();
    }
}

static void fill(hd_prefetch_piece *list) {
    for (int32_t i = 0; i < PIECES; i++) {
        list[i] = (hd_prefetch_piece){map.data + (int64_t)i * 3333 % (BYTES - PIECE), PIECE};
    }
}

/* What was read is in memory, and counts so. Asking changes no byte. */
static void pieces_in_memory_are_counted(void **state) {
    (void)state;
    hd_prefetch *p;
    assert_int_equal(hd_prefetch_open(&p, PIECES, NULL), HD_OK);
    hd_prefetch_at_random(map.data, map.bytes);
    read_all();
    for (int32_t round = 1; round <= 3; round++) {
        hd_prefetch_piece *list = hd_prefetch_list(p, PIECES);
        assert_non_null(list);
        fill(list);
        hd_prefetch_start(p, PIECES);
        hd_prefetch_wait(p);
        const hd_prefetch_stats s = hd_prefetch_read_stats(p);
        assert_int_equal(s.pieces, round * PIECES);
        assert_int_equal(s.resident, s.pieces);
        assert_int_equal(s.read_bytes, 0);
        assert_int_equal(s.skipped, 0);
    }
    read_all();
    hd_prefetch_close(p);
}

/* Every piece of a list that was tried is asked for or skipped, however early it comes. */
static void early_lists_are_skipped(void **state) {
    (void)state;
    enum { LISTS = 50 };
    hd_prefetch *p;
    int32_t started = 0;
    assert_int_equal(hd_prefetch_open(&p, PIECES, NULL), HD_OK);
    for (int32_t i = 0; i < LISTS; i++) {
        hd_prefetch_piece *list = hd_prefetch_list(p, PIECES);
        if (!list) continue;
        fill(list);
        hd_prefetch_start(p, PIECES);
        started++;
        assert_true(i > 0 || !hd_prefetch_list(p, 0) || hd_prefetch_read_stats(p).pieces);
    }
    hd_prefetch_wait(p);
    const hd_prefetch_stats s = hd_prefetch_read_stats(p);
    assert_true(started > 0);
    assert_int_equal(s.pieces, started * PIECES);
    assert_int_equal(s.skipped, (LISTS - started) * PIECES);
    hd_prefetch_close(p);
}

/* Closing waits for what was started. */
static void closing_ends_the_list(void **state) {
    (void)state;
    hd_prefetch *p;
    assert_int_equal(hd_prefetch_open(&p, PIECES, NULL), HD_OK);
    fill(hd_prefetch_list(p, PIECES));
    hd_prefetch_start(p, PIECES);
    hd_prefetch_close(p);
    hd_prefetch_close(NULL);
}

int test_prefetch(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_in_memory_are_counted),
        cmocka_unit_test(early_lists_are_skipped),
        cmocka_unit_test(closing_ends_the_list),
    };
    return cmocka_run_group_tests_name("prefetch", tests, open_file, close_file);
}
