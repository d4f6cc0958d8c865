/* bench_comm.h - `hadal bench comm`: time of collectives between ranks. */
#ifndef HD_CLI_BENCH_BENCH_COMM_H
#define HD_CLI_BENCH_BENCH_COMM_H

int bench_comm(int argc, char **argv);

#endif
