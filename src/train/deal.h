/* deal.h - how sequences are dealt to ranks, and the messages that carry them and their results.
 *
 * Rank 0 deals by length: the longest sequence first, each to the rank that has the fewest tokens so
 * far. A rank keeps the order of the call. The message holds the sequences of the other ranks, each
 * reads its own; what they found is gathered on rank 0. */
#ifndef HD_TRAIN_DEAL_H
#define HD_TRAIN_DEAL_H

#include "train/trainer_internal.h"

/* A sequence, as the message has it. has: a bit for each array that follows. */
typedef struct train_part {
    int32_t n, first, rank, has;
    float temperature;
} train_part;

typedef struct train_deal {
    train_part *parts; /* [n] sequences of all ranks */
    int32_t n;
    hd_train_sequence *own; /* [n_own] this rank's */
    int32_t n_own;
    float *results;    /* of a rank other than 0, where the results of its sequences are */
    uint32_t *message; /* [words] of rank 0 */
    int64_t words;
} train_deal;

/* Rank 0: deals s[n] and writes the message. */
hd_status train_deal_make(train_deal *d, const hd_trainer *t, const hd_train_sequence *s,
                          int32_t n, hd_err *err);

/* Other ranks: reads the message of n sequences, which must outlive d. HD_EFORMAT: it is none. */
hd_status train_deal_read(train_deal *d, const hd_trainer *t, int32_t n,
                          const uint32_t *message, int64_t words, hd_err *err);

/* After trainer_run() of the own sequences: gives rank 0 the results of all, in s[n] of the call and
 * t->replayed. Others pass NULL. */
hd_status train_deal_gather(const train_deal *d, hd_trainer *t, const hd_train_sequence *s,
                            hd_err *err);

void train_deal_deinit(train_deal *d);

#endif
