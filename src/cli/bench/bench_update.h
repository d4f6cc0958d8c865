/* bench_update.h - `hadal bench update`: how long new weights take to reach an engine. */
#ifndef HD_CLI_BENCH_UPDATE_H
#define HD_CLI_BENCH_UPDATE_H

int bench_update(int argc, char **argv);

#endif
