/* test_expert_files.c - pieces of experts read from files, at any place, past the page cache and
 * through it; files that are cut short, changed or gone. */
#include "check.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "moe/expert_files.h"

enum { FILES = 2, FILE_BYTES = 300001, PIECES = HD_EXPERT_PIECES };

typedef struct folder {
    char dir[40], path[FILES][60];
    uint8_t *bytes[FILES];
    hd_expert_files *files;
} folder;

static void write_file(const char *path, const uint8_t *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void open_files(folder *f, bool direct) {
    const char *paths[FILES];
    size_t bytes[FILES];
    hd_err err = {0};
    for (int32_t i = 0; i < FILES; i++) {
        paths[i] = f->path[i];
        bytes[i] = FILE_BYTES;
    }
    assert_int_equal(hd_expert_files_open(&f->files, paths, bytes, FILES, direct, &err), HD_OK);
}

static void open_folder(folder *f, bool direct) {
    char dir[] = "/tmp/hadal-experts-XXXXXX";
    assert_non_null(mkdtemp(dir));
    snprintf(f->dir, sizeof f->dir, "%s", dir);
    for (int32_t i = 0; i < FILES; i++) {
        snprintf(f->path[i], sizeof f->path[i], "%s/shard-%d", dir, i);
        f->bytes[i] = malloc(FILE_BYTES);
        assert_non_null(f->bytes[i]);
        for (int32_t k = 0; k < FILE_BYTES; k++)
            f->bytes[i][k] = (uint8_t)(k * 7 + k / 251 + i);
        write_file(f->path[i], f->bytes[i], FILE_BYTES);
    }
    open_files(f, direct);
}

static void close_folder(folder *f) {
    hd_expert_files_close(f->files);
    for (int32_t i = 0; i < FILES; i++) {
        unlink(f->path[i]);
        free(f->bytes[i]);
    }
    assert_int_equal(rmdir(f->dir), 0);
}

static void expect_pieces(const folder *f, hd_expert_piece *pieces, size_t most) {
    void *to;
    hd_err err = {0};
    const size_t bytes = hd_expert_files_plan(pieces, PIECES);
    assert_int_equal(bytes % HD_EXPERT_PAGE, 0);
    assert_true(bytes <= most);
    assert_int_equal(posix_memalign(&to, HD_EXPERT_PAGE, bytes + HD_EXPERT_PAGE), 0);
    memset(to, 0xee, bytes + HD_EXPERT_PAGE);
    assert_int_equal(hd_expert_files_read(f->files, pieces, PIECES, to, &err), HD_OK);
    for (int32_t i = 0; i < PIECES; i++) {
        const hd_expert_piece *p = &pieces[i];
        if (p->bytes == 0) continue;
        assert_true(p->to + p->bytes <= bytes);
        assert_memory_equal((uint8_t *)to + p->to, f->bytes[p->file] + p->at, p->bytes);
    }
    for (size_t i = bytes; i < bytes + HD_EXPERT_PAGE; i++) {
        assert_int_equal(((uint8_t *)to)[i], 0xee);
    }
    free(to);
}

static void pieces_arrive_from_any_place(bool direct) {
    folder f;
    open_folder(&f, direct);
    /* side by side and out of order; without scales; at the end of a file */
    hd_expert_piece near[PIECES] = {
        {.file = 0,    .at = 5000, .bytes = 3000},
        {.file = 0,    .at = 4990, .bytes = 10  },
        {.file = 0,    .at = 8000, .bytes = 700 },
        {.bytes = 0  },
        {.file = 0,  .at = 8700,           .bytes = 1               },
        {.file = 0, .at = 9000,  .bytes = 90},
    };
    hd_expert_piece far[PIECES] = {
        {.file = 1,      .at = FILE_BYTES - 17, .bytes = 17},
        {.file = 0,   .at = 0, .bytes = 1},
        {.file = 0,      .at = 200000, .bytes = 4096},
        {.file = 1,    .at = 1, .bytes = 8191},
        {.file = 0,      .at = 100000, .bytes = 3},
        {.bytes = 0},
    };
    expect_pieces(&f, near, (size_t)2 * HD_EXPERT_PAGE); /* one span, whole pages */
    expect_pieces(&f, far, (size_t)8 * HD_EXPERT_PAGE);
    close_folder(&f);
}

static void pieces_arrive_through_the_page_cache(void **state) {
    (void)state;
    pieces_arrive_from_any_place(false);
}

static void pieces_arrive_past_the_page_cache(void **state) {
    (void)state;
    pieces_arrive_from_any_place(true);
}

static void any_pieces_arrive(void **state) {
    (void)state;
    folder f;
    open_folder(&f, true);
    for (uint32_t round = 0; round < 200; round++) {
        hd_expert_piece pieces[PIECES];
        size_t at = 0;
        for (uint32_t i = 0; i < PIECES; i++) {
            const uint32_t x = (round * 2654435761u + i * 40503u) >> 7;
            const uint32_t size = x % 5 == 0 ? 0 : x % 20000;
            at += x / 7 % 30000;
            if (at + size > FILE_BYTES) at = 0;
            pieces[i] = (hd_expert_piece){.file = (int32_t)(i & 1), .at = at, .bytes = size};
            at += size;
        }
        expect_pieces(&f, pieces, SIZE_MAX);
    }
    close_folder(&f);
}

static void expect_refusal(folder *f, const char *why) {
    hd_expert_piece pieces[PIECES] = {
        {.file = 1, .at = 280000, .bytes = 20000}
    };
    void *to;
    hd_err err = {0};
    const size_t bytes = hd_expert_files_plan(pieces, PIECES);
    assert_int_equal(posix_memalign(&to, HD_EXPERT_PAGE, bytes), 0);
    assert_int_equal(hd_expert_files_read(f->files, pieces, PIECES, to, &err), HD_EIO);
    assert_non_null(strstr(err.msg, f->path[1]));
    assert_non_null(strstr(err.msg, why));
    free(to);
}

static void a_file_that_was_cut_short_is_named(void **state) {
    (void)state;
    folder f;
    open_folder(&f, true);
    assert_int_equal(truncate(f.path[1], 290000), 0);
    expect_refusal(&f, "cut short");
    assert_int_equal(truncate(f.path[1], 1000), 0);
    expect_refusal(&f, "cut short");
    close_folder(&f);
}

static void a_file_that_was_changed_is_named(void **state) {
    (void)state;
    const struct timespec later[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
    folder f;
    open_folder(&f, true);
    assert_int_equal(utimensat(AT_FDCWD, f.path[1], later, 0), 0);
    expect_refusal(&f, "was changed since it was opened");
    close_folder(&f);
}

/* Whoever replaces a file leaves the old one to those that have it open. */
static void a_file_that_was_replaced_stays_readable(void **state) {
    (void)state;
    hd_expert_piece pieces[PIECES] = {
        {.file = 1, .at = 3, .bytes = 50000}
    };
    char other[60];
    folder f;
    open_folder(&f, true);
    snprintf(other, sizeof other, "%s/new", f.dir);
    write_file(other, f.bytes[0], 100);
    assert_int_equal(rename(other, f.path[1]), 0);
    expect_pieces(&f, pieces, SIZE_MAX);
    close_folder(&f);
}

static void files_of_another_length_are_refused(void **state) {
    (void)state;
    folder f;
    open_folder(&f, true);
    const char *paths[] = {f.path[0], f.path[1]};
    const size_t bytes[] = {FILE_BYTES, FILE_BYTES + 1};
    hd_expert_files *none;
    hd_err err = {0};
    assert_int_equal(hd_expert_files_open(&none, paths, bytes, FILES, true, &err), HD_EIO);
    assert_null(none);
    assert_non_null(strstr(err.msg, f.path[1]));
    close_folder(&f);
}

int test_expert_files(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_arrive_through_the_page_cache),
        cmocka_unit_test(pieces_arrive_past_the_page_cache),
        cmocka_unit_test(any_pieces_arrive),
        cmocka_unit_test(a_file_that_was_cut_short_is_named),
        cmocka_unit_test(a_file_that_was_changed_is_named),
        cmocka_unit_test(a_file_that_was_replaced_stays_readable),
        cmocka_unit_test(files_of_another_length_are_refused),
    };
    return cmocka_run_group_tests_name("expert_files", tests, NULL, NULL);
}
