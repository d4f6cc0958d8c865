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

static inline bool is_brief(void) {
    const char *brief = getenv("HADAL_TEST_BRIEF");
    return brief && strcmp(brief, "1") == 0;
}

#endif
