/* test_log.c - lines of the log and of progress, as a file receives them. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/thread_pool.h"
#include "base/progress.h"

enum { TEXT_BYTES = 1 << 17 };

/* Everything written to f so far, NUL-terminated; the caller frees. */
static char *read_back(FILE *f) {
    char *text = calloc(1, TEXT_BYTES);
    assert_non_null(text);
    rewind(f);
    size_t n = fread(text, 1, TEXT_BYTES - 1, f);
    assert_true(n < TEXT_BYTES - 1);
    return text;
}

/* What comes after the time stamp, whose form is checked. */
static const char *after_stamp(const char *line) {
    static const char form[] = "dddd-dd-ddTdd:dd:dd.dddZ ";
    for (size_t i = 0; form[i]; i++) {
        if (form[i] == 'd') {
            assert_in_range(line[i], '0', '9');
        } else {
            assert_int_equal(line[i], form[i]);
        }
    }
    return line + sizeof form - 1;
}

static int saved_stderr;

/* Redirects standard error to a file, until log_to_stderr(). */
static FILE *log_to_file(void) {
    FILE *f = tmpfile();
    assert_non_null(f);
    fflush(stderr);
    saved_stderr = dup(STDERR_FILENO);
    assert_true(saved_stderr >= 0 && dup2(fileno(f), STDERR_FILENO) >= 0);
    return f;
}

static void log_to_stderr(void) {
    fflush(stderr);
    assert_true(dup2(saved_stderr, STDERR_FILENO) >= 0);
    close(saved_stderr);
}

static void a_line_is_one_line(void **state) {
    (void)state;
    FILE *f = log_to_file();
    HD_LOG(HD_LOG_WARN, "model_loaded", hd_log_text("path", "/m/v4"), hd_log_int("n", -3),
           hd_log_real("seconds", 1.5));
    hd_log_write(HD_LOG_ERROR, "bare", NULL, 0);
    HD_LOG(HD_LOG_INFO, "odd", hd_log_text("a", "x y=\"\\\n\x1b\x7f"), hd_log_text("b", ""),
           hd_log_text("c", NULL), hd_log_text("d", "\xc3\xa9"));
    log_to_stderr();
    char *text = read_back(f), *rest = NULL;
    const char *line = strtok_r(text, "\n", &rest);
    assert_string_equal(after_stamp(line), "warn model_loaded path=/m/v4 n=-3 seconds=1.5");
    line = strtok_r(NULL, "\n", &rest);
    assert_string_equal(after_stamp(line), "error bare");
    line = strtok_r(NULL, "\n", &rest);
    assert_string_equal(after_stamp(line),
                        "info odd a=\"x y=\\\"\\\\\\x0a\\x1b\\x7f\" b=\"\" c=\"\" d=\xc3\xa9");
    assert_null(strtok_r(NULL, "\n", &rest));
    free(text);
    fclose(f);
}

/* In a process of its own, whose lines name a rank from then on. */
static void lines_name_the_rank(void **state) {
    int status = -1;
    (void)state;
    FILE *f = log_to_file();
    const pid_t child = fork();
    if (child == 0) {
        hd_log_name_rank(12, "node-b");
        HD_LOG(HD_LOG_INFO, "model_loaded", hd_log_text("path", "/m/v4"));
        hd_log_write(HD_LOG_ERROR, "bare", NULL, 0);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    log_to_stderr();
    assert_int_equal(status, 0);
    char *text = read_back(f), *rest = NULL;
    assert_string_equal(after_stamp(strtok_r(text, "\n", &rest)),
                        "info rank 12@node-b model_loaded path=/m/v4");
    assert_string_equal(after_stamp(strtok_r(NULL, "\n", &rest)), "error rank 12@node-b bare");
    assert_null(strtok_r(NULL, "\n", &rest));
    free(text);
    fclose(f);
}

static void a_long_value_is_cut(void **state) {
    (void)state;
    char value[10000];
    memset(value, 'v', sizeof value - 1);
    value[sizeof value - 1] = '\0';
    FILE *f = log_to_file();
    HD_LOG(HD_LOG_INFO, "long", hd_log_text("value", value), hd_log_int("lost", 1));
    log_to_stderr();
    char *text = read_back(f);
    size_t n = strlen(text);
    assert_int_equal(n, 4096);
    assert_ptr_equal(strchr(text, '\n'), text + n - 1);
    free(text);
    fclose(f);
}

static void write_line(const void *arg, int32_t task, int32_t worker) {
    (void)arg;
    (void)worker;
    HD_LOG(HD_LOG_INFO, "task", hd_log_int("number", task), hd_log_text("text", "a b"));
}

static void threads_do_not_mix_lines(void **state) {
    (void)state;
    enum { LINES = 500 };
    FILE *f = log_to_file();
    hd_thread_pool *pool;
    assert_int_equal(hd_thread_pool_open(&pool, 4, false, NULL), HD_OK);
    hd_thread_pool_run(pool, LINES, write_line, NULL);
    hd_thread_pool_close(pool);
    log_to_stderr();
    char *text = read_back(f), *rest = NULL;
    bool seen[LINES] = {false};
    int n = 0;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char tail[16] = "";
        int number = -1;
        assert_int_equal(
            sscanf(after_stamp(line), "info task number=%d text=%15[^\n]", &number, tail), 2);
        assert_in_range(number, 0, LINES - 1);
        assert_false(seen[number]);
        assert_string_equal(tail, "\"a b\"");
        seen[number] = true;
        n++;
    }
    assert_int_equal(n, LINES);
    free(text);
    fclose(f);
}

/* Redirects standard error to a file while fn runs; returns what was written. */
static char *standard_error_of(void (*fn)(void)) {
    FILE *f = log_to_file();
    fn();
    log_to_stderr();
    char *text = read_back(f);
    fclose(f);
    return text;
}

static void load_in_many_steps(void) {
    hd_progress p;
    hd_progress_init(&p, "load", "MB", 1000, false);
    for (int i = 0; i < 250; i++) hd_progress_add(&p, 5); /* 250 beyond the total */
    assert_int_equal(p.done, 1000);
    hd_progress_end(&p);
}

static void load_nothing(void) {
    hd_progress p;
    hd_progress_init(&p, "empty", "MB", 0, false);
    hd_progress_end(&p);
    hd_progress_init(&p, "silent", "MB", 10, true);
    hd_progress_add(&p, 10);
    hd_progress_end(&p);
}

static void progress_writes_tenths_to_a_file(void **state) {
    (void)state;
    char *text = standard_error_of(load_in_many_steps), *rest = NULL;
    const char *line = strtok_r(text, "\n", &rest);
    for (int tenth = 1; tenth <= 10; tenth++) {
        char expect[64];
        snprintf(expect, sizeof expect, "load: %d%% (%d/1000 MB)", tenth * 10, tenth * 100);
        assert_string_equal(line, expect);
        line = strtok_r(NULL, "\n", &rest);
    }
    assert_non_null(line);
    assert_int_equal(strncmp(line, "load: done, 1000 MB in ", 23), 0);
    assert_null(strtok_r(NULL, "\n", &rest));
    free(text);
}

static void progress_of_nothing_divides_by_nothing(void **state) {
    (void)state;
    char *text = standard_error_of(load_nothing);
    assert_non_null(strstr(text, "empty: done, 0 MB"));
    assert_null(strstr(text, "silent"));
    free(text);
}

int test_log(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_line_is_one_line),
        cmocka_unit_test(lines_name_the_rank),
        cmocka_unit_test(a_long_value_is_cut),
        cmocka_unit_test(threads_do_not_mix_lines),
        cmocka_unit_test(progress_writes_tenths_to_a_file),
        cmocka_unit_test(progress_of_nothing_divides_by_nothing),
    };
    return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
