/* check.h - what every unit test includes first: cmocka with the headers it wants. */
#ifndef HD_TESTS_CHECK_H
#define HD_TESTS_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "groups.h"

/* Under sanitizers: each piece of code once. */
static inline bool is_brief(void) {
    const char *brief = getenv("HADAL_TEST_BRIEF");
    return brief && strcmp(brief, "1") == 0;
}

/* tests/gpu.sh: of operators, a CPU's tables are left to ./test. */
static inline bool is_gpu_alone(void) {
    const char *alone = getenv("HADAL_TEST_GPU_ALONE");
    return alone && strcmp(alone, "1") == 0;
}

/* ./test --long: whole matrices, of which other runs have a part that covers each of their sides. */
static inline bool is_long(void) {
    const char *whole = getenv("HADAL_TEST_LONG");
    return whole && strcmp(whole, "1") == 0;
}

#endif
