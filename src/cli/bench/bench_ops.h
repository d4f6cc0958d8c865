/* bench_ops.h - `hadal bench ops`: times the operators of real steps with random weights. */
#ifndef HD_CLI_BENCH_BENCH_OPS_H
#define HD_CLI_BENCH_BENCH_OPS_H

int bench_ops(int argc, char **argv);

#endif
