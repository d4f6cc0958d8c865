/* train_world.h - ranks of data parallel training that are processes, of one or of several hosts. Rank 0
 * runs the command, and the others follow it. */
#ifndef HD_CLI_TRAINING_TRAIN_WORLD_H
#define HD_CLI_TRAINING_TRAIN_WORLD_H

#include "cli/training/train_run.h"
#include "comm/ucx.h"
#include "train/exchange.h"

typedef struct train_world {
    train_settings *set;
    int32_t rank, n; /* n 0: no other processes */
    hd_ops ops;      /* of the exchanges alone */
    hd_device *device;
    train_ranks ranks;
    hd_comm_ucx *ucx;
} train_world;

/* Meets the other processes, if the settings or mpirun or srun say that there are some. */
hd_status train_world_open(train_world *w, train_settings *s, hd_err *err);

/* Rank 0, before it opens its trainer: completes its options, and tells the others. model: the folder
 * that every rank opens. */
hd_status train_world_lead(const train_world *w, hd_trainer_options *o, const char *model,
                           hd_err *err);

/* The whole work of another rank. */
hd_status train_world_follow(const train_world *w, hd_err *err);

/* After the trainer has closed. why: this rank failed; NULL: it did not. */
void train_world_close(train_world *w, const char *why);

#endif
