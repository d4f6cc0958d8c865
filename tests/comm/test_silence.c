/* test_silence.c - when silence means that a rank is lost (comm/silence.h): stopped and ended processes,
 * processes that only do not speak, and a watch that was starved itself. */
#include "check.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/silence.h"

enum { LIMIT = 1000, BEAT = 200 };

/* A process that waits, and where it is. */
static hd_place start_process(void) {
    hd_place p = hd_place_here();
    p.pid = fork();
    assert_true(p.pid >= 0);
    if (p.pid == 0) {
        for (;;) pause();
    }
    return p;
}

static void end_process(const hd_place *p) {
    kill(p->pid, SIGKILL);
    waitpid(p->pid, NULL, 0);
}

static void need_processes(void) {
    if (!hd_place_here().host) skip(); /* no /proc */
}

static void test_a_stopped_process_does_not_run(void **state) {
    (void)state;
    need_processes();
    const hd_place here = hd_place_here(), p = start_process();
    assert_int_equal(here.pid, getpid());
    assert_true(hd_place_runs(&here, &here) && hd_place_runs(&p, &here));
    kill(p.pid, SIGSTOP);
    waitpid(p.pid, NULL, WUNTRACED);
    assert_false(hd_place_runs(&p, &here) || hd_place_has_ended(&p));
    kill(p.pid, SIGCONT);
    waitpid(p.pid, NULL, WCONTINUED);
    assert_true(hd_place_runs(&p, &here));
    kill(p.pid, SIGKILL);
    siginfo_t info;
    waitid(P_PID, (id_t)p.pid, &info, WEXITED | WNOWAIT); /* it stays as a zombie */
    assert_true(!hd_place_runs(&p, &here) && hd_place_has_ended(&p));
    end_process(&p);
    assert_true(!hd_place_runs(&p, &here) && hd_place_has_ended(&p));
}

static void test_a_process_has_a_user(void **state) {
    (void)state;
    need_processes();
    const hd_place here = hd_place_here(), p = start_process();
    assert_true(hd_place_is_of_user(&here) && hd_place_is_of_user(&p));
    if (seteuid(65534) == 0) { /* nobody */
        assert_false(hd_place_is_of_user(&p));
        assert_int_equal(seteuid(0), 0);
    }
    end_process(&p);
    assert_false(hd_place_is_of_user(&p));
}

static void test_nothing_is_known_of_other_hosts(void **state) {
    (void)state;
    const hd_place unknown = {.pid = getpid()}, here = hd_place_here();
    hd_place other = here;
    other.host ^= 1;
    assert_false(hd_place_runs(&other, &here));
    assert_false(hd_place_runs(&unknown, &here));
    assert_false(hd_place_runs(&unknown, &unknown));
}

/* Milliseconds of silence after which a rank is lost, and which limit that exceeds. */
static int64_t lost_after(const hd_place *of, const hd_place *here, int32_t *limit) {
    int64_t ms = 0;
    while (!(*limit = hd_silence_exceeds(ms, LIMIT, of, here))) ms++;
    return ms;
}

static void test_a_process_that_runs_may_be_silent_for_longer(void **state) {
    (void)state;
    need_processes();
    const hd_place here = hd_place_here(), p = start_process();
    hd_place other = p;
    other.host ^= 1;
    int32_t limit;
    assert_int_equal(lost_after(&p, &here, &limit), HD_SILENCE_PATIENCE * LIMIT + 1);
    assert_int_equal(limit, HD_SILENCE_PATIENCE * LIMIT);
    assert_int_equal(lost_after(&other, &here, &limit), LIMIT + 1);
    assert_int_equal(limit, LIMIT);
    kill(p.pid, SIGSTOP);
    waitpid(p.pid, NULL, WUNTRACED);
    assert_int_equal(lost_after(&p, &here, &limit), LIMIT + 1);
    assert_int_equal(limit, LIMIT);
    end_process(&p);
}

/* However long it slept, it has missed one look. */
static void test_a_watch_that_was_starved_counts_one_beat(void **state) {
    (void)state;
    assert_int_equal(hd_silence_passed(0, BEAT), 0);
    assert_int_equal(hd_silence_passed(2 * BEAT - 1, BEAT), 2 * BEAT - 1);
    assert_int_equal(hd_silence_passed(2 * BEAT, BEAT), BEAT);
    assert_int_equal(hd_silence_passed(1000000, BEAT), BEAT);
}

int test_comm_silence(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_stopped_process_does_not_run),
        cmocka_unit_test(test_a_process_has_a_user),
        cmocka_unit_test(test_nothing_is_known_of_other_hosts),
        cmocka_unit_test(test_a_process_that_runs_may_be_silent_for_longer),
        cmocka_unit_test(test_a_watch_that_was_starved_counts_one_beat),
    };
    return cmocka_run_group_tests_name("comm_silence", tests, NULL, NULL);
}
