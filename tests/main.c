/* main.c - runs the unit test groups: all of them, or those named on the command line, of which
 * GROUP:PATTERN runs the tests that match. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "groups.h"

static const struct {
    const char *name;
    int (*run)(void);
} groups[] = {
#define X(group) {#group, test_##group},
    HD_TEST_GROUPS(X)
#undef X
};

/* Runs the group once for each argument that names it. */
static int run_wanted(const char *name, int (*run)(void), int argc, char **argv) {
    int failed = argc < 2 ? run() : 0;
    for (int i = 1; i < argc; i++) {
        const size_t n = strcspn(argv[i], ":");
        if (strlen(name) != n || strncmp(argv[i], name, n) != 0) continue;
        cmocka_set_test_filter(argv[i][n] ? argv[i] + n + 1 : NULL);
        failed += run();
    }
    return failed;
}

int main(int argc, char **argv) {
    int failed = 0;
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        failed += run_wanted(groups[i].name, groups[i].run, argc, argv);
    }
    return failed ? 1 : 0;
}
