/* bench_cases.h - `hadal bench ops` without a config: single operators at the sizes of
 * the released models. */
#ifndef HD_CLI_BENCH_BENCH_CASES_H
#define HD_CLI_BENCH_BENCH_CASES_H

#include <stdbool.h>
#include <stdint.h>

#include "ops/ops.h"

/* Runs the cases with `only` in name or operator (NULL: all) and prints a line per case, as
 * text or JSON: the median of `rounds`. */
hd_status bench_cases(const char *backend, const hd_ops_options *options, const char *only,
                      int32_t rounds, bool json, hd_err *err);

#endif
