/* memory.h - the memory that training will take, by opening a trainer whose memory is never written. */
#ifndef HD_TRAIN_MEMORY_H
#define HD_TRAIN_MEMORY_H

#include "train/trainer.h"

/* Bytes of one rank, but for `trained`. */
typedef struct hd_trainer_memory {
    int64_t trained;   /* weights of the model that are trained */
    int64_t weights;   /* as stored; threads share them */
    int64_t gradients; /* float32, of all that is trained */
    int64_t masters;   /* masters and moments, of rank 0's slice */
    int64_t
        activations; /* of a micro-batch, forward and back, with its pages, and scratch of threads */
    /* of rank 0, while weights are rounded: the new weights, and all masters of several ranks; on a GPU they
     * change in place */
    int64_t update;
} hd_trainer_memory;

/* o->weights may have shapes only (hd_dummy_options). */
hd_status hd_trainer_memory_of(hd_trainer_memory *out, const hd_trainer_options *o,
                               hd_err *err);

void hd_trainer_memory_now(hd_trainer_memory *out, const hd_trainer *t);

int64_t hd_trainer_memory_peak(const hd_trainer_memory *m);

#endif
