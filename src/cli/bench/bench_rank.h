/* bench_rank.h - `hadal bench latency --emulate-rank`: one rank of a large parallel config
 * on one device. */
#ifndef HD_CLI_BENCH_BENCH_RANK_H
#define HD_CLI_BENCH_BENCH_RANK_H

#include <stdbool.h>

bool bench_rank_wanted(int argc, char **argv); /* --emulate-rank is among them */
int bench_rank(int argc, char **argv);

#endif
