/* test_cores.c - CPU topology and quotas, read from synthetic machines and file trees. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cores.h"
#include "base/status.h"

enum { MAX_FILES = 40, MAX_PATH = 256 };

/* Files under a folder of their own, which go with it. */
typedef struct tree {
    char root[64], path[MAX_FILES][MAX_PATH];
    int n;
} tree;

static void open_tree(tree *t) {
    *t = (tree){.root = P_tmpdir "/hadal_cores_XXXXXX"};
    assert_non_null(mkdtemp(t->root));
}

static void put(tree *t, const char *path, const char *text) {
    assert_true(t->n < MAX_FILES);
    char *whole = t->path[t->n++], root[sizeof t->root];
    memcpy(root, t->root, sizeof root);
    snprintf(whole, MAX_PATH, "%s%s", root, path);
    for (char *at = strchr(whole + strlen(t->root) + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = '\0';
        mkdir(whole, 0700);
        *at = '/';
    }
    FILE *f = fopen(whole, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void close_tree(tree *t) {
    for (int i = 0; i < t->n; i++) {
        unlink(t->path[i]);
        for (char *at = strrchr(t->path[i], '/'); at > t->path[i] + strlen(t->root);) {
            *at = '\0';
            rmdir(t->path[i]); /* the last file's leaves it empty */
            at = strrchr(t->path[i], '/');
        }
    }
    assert_int_equal(rmdir(t->root), 0);
}

/* Four cores of two threads each: processors 2 i and 2 i + 1, or i and i + 4. */
#define NEAR_PAIRS "core:4 pu:2"
#define FAR_PAIRS  "core:4 pu:2(indexes=0,4,1,5,2,6,3,7)"

static void check_places(const hd_machine *m, int32_t n, const int32_t *cpu, int32_t n_places) {
    hd_cores c;
    hd_cores_read(&c, m);
    assert_int_equal(c.n_places, n_places);
    for (int32_t i = 0; i < n_places; i++) assert_int_equal(c.cpu[i], cpu[i]);
    assert_int_equal(c.n, n);
}

static void one_processor_of_each_core(void **state) {
    (void)state;
    static const struct {
        const char *machine, *allowed;
        int32_t cpu[4], n;
    } cases[] = {
        {FAR_PAIRS,  "0-7",   {0, 1, 2, 3}, 4},
        {FAR_PAIRS,  "0-3",   {0, 1, 2, 3}, 4},
 /* the second hardware threads, if only they are allowed */
        {FAR_PAIRS,  "4-7",   {4, 5, 6, 7}, 4},
        {FAR_PAIRS,  "1,5",   {1},          1},
        {FAR_PAIRS,  "2-4,6", {2, 3, 4},    3},
        {FAR_PAIRS,  "7",     {7},          1},
        {NEAR_PAIRS, "0-7",   {0, 2, 4, 6}, 4},
        {NEAR_PAIRS, "1-4",   {1, 2, 4},    3},
        {NEAR_PAIRS, "6-99",  {6},          1}, /* more than there are */
        {NEAR_PAIRS, "77",    {0},          1}, /* none that exists */
        {"pu:3",     "0-2",   {0, 1, 2},    3}, /* a machine that reports no cores */
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        const hd_machine m = {cases[i].machine, cases[i].allowed, "/nowhere"};
        check_places(&m, cases[i].n, cases[i].cpu, cases[i].n);
    }
}

static void a_quota_bounds_the_threads(void **state) {
    (void)state;
    static const int32_t cpu[] = {0, 1, 2, 3};
    static const struct {
        const char *group, *file, *text, *file2, *text2;
        int32_t n;
    } cases[] = {
        {"0::/a/b\n",                       "/sys/fs/cgroup/a/b/cpu.max",            "max 100000\n",    NULL, NULL,           4},
        {"0::/a/b\n",                       "/sys/fs/cgroup/a/b/cpu.max",            "250000 100000\n", NULL, NULL,           2},
        {"0::/a/b\n",                       "/sys/fs/cgroup/a/cpu.max",              "300000 100000\n",
         "/sys/fs/cgroup/a/b/cpu.max",                                                                        "max 100000\n", 3},
        {"0::/not/here\n",                  "/sys/fs/cgroup/cpu.max",                "150000 100000\n", NULL, NULL,           1},
        {"0::/\n",                          "/sys/fs/cgroup/cpu.max",                "20000 100000\n",  NULL, NULL,           1},
        {"0::/\n",                          "/sys/fs/cgroup/cpu.max",                "900000 100000\n", NULL, NULL,           4},
        {"3:memory:/m\n2:cpu,cpuacct:/g\n", "/sys/fs/cgroup/cpu/g/cpu.cfs_quota_us", "200000\n",
         "/sys/fs/cgroup/cpu/g/cpu.cfs_period_us",                                                            "100000\n",     2},
        {"1:cpu:/\n0::/\n",                 "/sys/fs/cgroup/cpu/cpu.cfs_quota_us",   "-1\n",
         "/sys/fs/cgroup/cpu/cpu.cfs_period_us",                                                              "100000\n",     4},
        {"nonsense\n:\n::\n",               "/sys/fs/cgroup/cpu.max",                "x\n",             NULL, NULL,           4},
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        tree t;
        open_tree(&t);
        put(&t, "/proc/self/cgroup", cases[i].group);
        put(&t, cases[i].file, cases[i].text);
        if (cases[i].file2) put(&t, cases[i].file2, cases[i].text2);
        check_places(&(hd_machine){FAR_PAIRS, "0-7", t.root}, cases[i].n, cpu, 4);
        close_tree(&t);
    }
}

static void nodes_of_the_allowed(void **state) {
    (void)state;
    static const struct {
        const char *allowed;
        unsigned long nodes;
    } cases[] = {
        {"0-1,9", 5},
        {"0-11",  7},
        {"5",     2},
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_cores c;
        hd_cores_read(&c, &(hd_machine){"numa:3 core:2 pu:2", cases[i].allowed, "/nowhere"});
        assert_int_equal(c.nodes, cases[i].nodes);
    }
}

static void an_unknown_machine_has_one_core(void **state) {
    (void)state;
    static const int32_t cpu[] = {0};
    check_places(&(hd_machine){"no machine", "0-7", "/nowhere"}, 1, cpu, 1);
}

/* This machine: a thread can be bound to each place, and the memory policy is restored. */
static void this_machine_has_places(void **state) {
    (void)state;
    hd_cores c;
    hd_cores_read(&c, NULL);
    assert_true(c.n >= 1 && c.n <= c.n_places && c.n == hd_cores_count());
    if (hd_cores_interleave(&c)) {
        assert_false(hd_cores_interleave(&c)); /* it was chosen already */
        hd_cores_end_interleave();
    }
}

int test_cores(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_processor_of_each_core),
        cmocka_unit_test(a_quota_bounds_the_threads),
        cmocka_unit_test(nodes_of_the_allowed),
        cmocka_unit_test(an_unknown_machine_has_one_core),
        cmocka_unit_test(this_machine_has_places),
    };
    return cmocka_run_group_tests_name("cores", tests, NULL, NULL);
}
