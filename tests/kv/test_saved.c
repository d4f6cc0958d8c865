/* test_saved.c - files of saved conversations: what was written is read, each byte that is changed and each
 * cut is refused, and the folder's quota is kept to the byte. */
#include "check.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kv/saved.h"

enum {
    PAGE = 4,
    N_FULL = 3,
    N_WINDOW = 1,
    N_TOKENS = PAGE * N_FULL,
    FULL_BYTES = 40,
    WINDOW_BYTES = 24
};

static char folder[] = "/tmp/hadal_saved_XXXXXX";
static int32_t words[N_TOKENS + 1];
static const hd_saved_head own = {
    .page_tokens = PAGE, .page_bytes = {FULL_BYTES, WINDOW_BYTES},
         .identity = "here"
};

static int make_folder(void **state) {
    (void)state;
    memcpy(folder + sizeof folder - 7, "XXXXXX", 6);
    for (int32_t i = 0; i < N_TOKENS; i++) words[i] = 7 + i * i;
    return mkdtemp(folder) ? 0 : 1;
}

static int drop_folder(void **state) {
    (void)state;
    char command[80];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

static hd_saved *open_folder(uint64_t bytes) {
    hd_saved *s;
    assert_int_equal(hd_saved_open(&s, folder, bytes, NULL), HD_OK);
    return s;
}

static hd_handover side_of(const hd_saved_head *head, const int32_t *tokens) {
    return (hd_handover){
        .page_tokens = PAGE,
        .page_bytes = {FULL_BYTES, WINDOW_BYTES},
        .salt = head->salt,
        .tokens = tokens,
        .n_tokens = (int32_t)head->n_tokens + 1
    };
}

static hd_saved_head head_of(void) {
    hd_saved_head head = own;
    head.salt = 5;
    head.weights = 9;
    head.n_tokens = N_TOKENS;
    head.n[HD_KV_FULL] = N_FULL;
    head.n[HD_KV_WINDOW] = N_WINDOW;
    return head;
}

static hd_kv_group group_of(int32_t i) {
    return i < N_FULL ? HD_KV_FULL : HD_KV_WINDOW;
}

/* Begins a conversation and adds n of its messages. */
static hd_status begin(hd_saved_file *f, hd_saved *s, const char *name, int32_t n) {
    hd_saved_head head = head_of();
    const hd_handover side = side_of(&head, words);
    const hd_status st = hd_saved_create(f, s, name, &head, words, NULL);
    for (int32_t i = 0; st == HD_OK && i < n; i++) {
        uint8_t message[sizeof(hd_page_head) + FULL_BYTES];
        memset(message, i + 1, sizeof message);
        hd_handover_seal(&side, group_of(i), i < N_FULL ? i : N_FULL - 1, message);
        assert_int_equal(hd_saved_add(f, message, hd_handover_bytes(&side, group_of(i)), NULL),
                         HD_OK);
    }
    return st;
}

static void save(hd_saved *s, const char *name) {
    hd_saved_file f;
    assert_int_equal(begin(&f, s, name, N_FULL + N_WINDOW), HD_OK);
    assert_int_equal(hd_saved_finish(&f, NULL), HD_OK);
}

/* Returns whether the whole file is right. */
static bool is_right(hd_saved *s, const char *name) {
    hd_saved_file f;
    hd_saved_head head;
    int32_t *tokens;
    if (hd_saved_read(&f, s, name, &own, &head, &tokens, NULL) != HD_OK) return false;
    const hd_handover side = side_of(&head, tokens);
    bool right =
        head.salt == 5 && head.weights == 9 && memcmp(tokens, words, sizeof words) == 0;
    for (int32_t i = 0; right && i < N_FULL + N_WINDOW; i++) {
        uint8_t message[sizeof(hd_page_head) + FULL_BYTES];
        const size_t n = hd_handover_bytes(&side, group_of(i));
        right = hd_saved_next(&f, message, n, NULL) == HD_OK &&
                hd_handover_check(&side, message, n, NULL) == HD_OK;
        if (right) assert_int_equal(message[sizeof(hd_page_head)], i + 1);
    }
    hd_saved_end(&f);
    free(tokens);
    return right;
}

static size_t read_all(uint8_t *out, size_t most) {
    char path[80];
    snprintf(path, sizeof path, "%s/a.kv", folder);
    const int fd = open(path, O_RDONLY);
    const ssize_t n = read(fd, out, most);
    close(fd);
    assert_true(n > 0);
    return (size_t)n;
}

static void write_all(const uint8_t *bytes, size_t n) {
    char path[80];
    snprintf(path, sizeof path, "%s/a.kv", folder);
    const int fd = open(path, O_WRONLY | O_TRUNC);
    assert_int_equal(write(fd, bytes, n), n);
    close(fd);
}

static void every_byte_counts(void **state) {
    (void)state;
    uint8_t bytes[2048];
    hd_saved *s = open_folder(1 << 20);
    save(s, "a");
    assert_true(is_right(s, "a"));
    const size_t n = read_all(bytes, sizeof bytes);
    for (size_t i = 0; i < n; i++) {
        bytes[i] ^= 16;
        write_all(bytes, n);
        if (is_right(s, "a")) fail_msg("byte %zu of %zu", i, n);
        bytes[i] ^= 16;
    }
    for (size_t i = 0; i < n; i++) {
        write_all(bytes, i);
        assert_false(is_right(s, "a"));
    }
    write_all(bytes, n + 1);
    assert_false(is_right(s, "a"));
    write_all(bytes, n);
    assert_true(is_right(s, "a"));
    hd_saved_close(s);
}

static uint64_t used(hd_saved *s) {
    uint64_t bytes, limit;
    hd_saved_usage(s, &bytes, &limit);
    return bytes;
}

static void the_quota_is_kept_to_the_byte(void **state) {
    (void)state;
    hd_saved_file f;
    hd_saved *s = open_folder(1 << 20);
    save(s, "a");
    const uint64_t one = used(s);
    hd_saved_close(s);
    s = open_folder(2 * one - 1);
    assert_int_equal(used(s), one);
    assert_int_equal(begin(&f, s, "b", 0), HD_ENOMEM);
    assert_int_equal(hd_saved_delete(s, "a", NULL), HD_OK);
    assert_int_equal(used(s), 0);
    save(s, "b");
    hd_saved_close(s);
    s = open_folder(2 * one);
    save(s, "b"); /* in its own place */
    assert_int_equal(used(s), one);
    assert_int_equal(begin(&f, s, "c", 1), HD_OK);
    assert_int_equal(used(s), 2 * one);
    assert_int_equal(hd_saved_finish(&f, NULL), HD_EINVAL); /* pages are missing */
    assert_int_equal(used(s), one);
    assert_int_equal(begin(&f, s, "c", 2), HD_OK);
    hd_saved_drop(&f);
    assert_int_equal(used(s), one);
    hd_saved_entry *all;
    size_t n;
    assert_int_equal(hd_saved_list(s, &all, &n, NULL), HD_OK);
    assert_true(n == 1 && strcmp(all[0].name, "b") == 0 && all[0].bytes == one);
    free(all);
    hd_saved_close(s);
}

/* What a kill leaves half written is deleted at the next start, and the old file stays. */
static void a_half_written_file_is_none(void **state) {
    (void)state;
    hd_saved_file f;
    hd_saved *s = open_folder(1 << 20), *other;
    save(s, "a");
    const uint64_t one = used(s);
    assert_int_equal(begin(&f, s, "a", 3), HD_OK);
    assert_true(is_right(s, "a"));
    assert_int_equal(hd_saved_open(&other, folder, 1 << 20, NULL), HD_EIO); /* it is in use */
    close(f.fd);
    hd_saved_close(s);
    s = open_folder(1 << 20);
    assert_int_equal(used(s), one);
    assert_int_equal(faccessat(AT_FDCWD, folder, F_OK, 0), 0);
    char half[200];
    snprintf(half, sizeof half, "%s/%s", folder, f.path);
    assert_int_equal(access(half, F_OK), -1);
    assert_true(is_right(s, "a"));
    hd_saved_close(s);
}

static void names_have_no_paths(void **state) {
    (void)state;
    static const char *const wrong[] = {"",   ".",   "..",  ".a",      "a/b",
                                        "/a", "a b", "a\n", "\303\244"};
    char longest[HD_SAVED_NAME + 2];
    for (size_t i = 0; i < HD_LEN(wrong); i++) {
        assert_int_equal(hd_saved_check_name(wrong[i], NULL), HD_EINVAL);
    }
    memset(longest, 'x', sizeof longest);
    longest[HD_SAVED_NAME + 1] = '\0';
    assert_int_equal(hd_saved_check_name(longest, NULL), HD_EINVAL);
    longest[HD_SAVED_NAME] = '\0';
    hd_saved *s = open_folder(1 << 20);
    save(s, longest);
    save(s, "A-1_b.c");
    assert_true(is_right(s, longest) && is_right(s, "A-1_b.c"));
    assert_int_equal(hd_saved_delete(s, "a", NULL), HD_EINVAL);
    hd_saved_close(s);
}

int test_saved(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(every_byte_counts, make_folder, drop_folder),
        cmocka_unit_test_setup_teardown(the_quota_is_kept_to_the_byte, make_folder,
                                        drop_folder),
        cmocka_unit_test_setup_teardown(a_half_written_file_is_none, make_folder, drop_folder),
        cmocka_unit_test_setup_teardown(names_have_no_paths, make_folder, drop_folder),
    };
    return cmocka_run_group_tests_name("saved", tests, NULL, NULL);
}
