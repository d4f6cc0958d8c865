/* bench_block.h - the block of figures that serving benchmarks print, line by line, and the
 * keys of their times in JSON. */
#ifndef HD_CLI_BENCH_BENCH_BLOCK_H
#define HD_CLI_BENCH_BENCH_BLOCK_H

#include <jansson.h>
#include <stdint.h>
#include <stdio.h>

#include "base/quantiles.h"

/* Prints text in the middle of a line of fill. */
void block_heading(FILE *to, const char *text, char fill);
void block_text(FILE *to, const char *label, const char *text);
void block_count(FILE *to, const char *label, int64_t n);
void block_real(FILE *to, const char *label, double value);
/* Prints a heading and a line per figure; name is "TTFT". */
void block_times(FILE *to, const char *title, const char *name, const hd_quantiles *t);

/* Adds mean_NAME_ms, median_NAME_ms, p90_..., p95_..., p99_..., max_... */
void block_put_times(json_t *o, const char *name, const hd_quantiles *t);

#endif
