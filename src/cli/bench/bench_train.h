/* bench_train.h - `hadal bench train`: tokens per second of training, part by part. */
#ifndef HD_CLI_BENCH_TRAIN_H
#define HD_CLI_BENCH_TRAIN_H

int bench_train(int argc, char **argv);

#endif
