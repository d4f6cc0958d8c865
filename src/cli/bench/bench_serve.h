/* bench_serve.h - hadal bench serve: a load on any server that speaks the OpenAI interface. */
#ifndef HD_CLI_BENCH_BENCH_SERVE_H
#define HD_CLI_BENCH_BENCH_SERVE_H

int bench_serve(int argc, char **argv);

#endif
