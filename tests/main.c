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

static int wanted(const char *name, int argc, char **argv) {
    if (argc < 2) return 1;
    for (int i = 1; i < argc; i++) {
        const size_t n = strcspn(argv[i], ":");
        if (strlen(name) != n || strncmp(argv[i], name, n) != 0) continue;
        cmocka_set_test_filter(argv[i][n] ? argv[i] + n + 1 : NULL);
        return 1;
    }
    return 0;
}

int main(int argc, char **argv) {
    int failed = 0;
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        if (wanted(groups[i].name, argc, argv)) failed += groups[i].run();
    }
    return failed ? 1 : 0;
}
