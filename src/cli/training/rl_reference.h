/* rl_reference.h - the model that a policy may not move far from: it only scores. */
#ifndef HD_CLI_TRAINING_RL_REFERENCE_H
#define HD_CLI_TRAINING_RL_REFERENCE_H

#include "train/trainer.h"

typedef struct rl_reference {
    hd_model_spec *spec;
    hd_weights *weights;
    hd_trainer *trainer; /* NULL: there is none */
} rl_reference;

/* Opens the model in dir with the micro-batches of `like`, whose model it must share the vocabulary
 * with. Close also after a failure. */
hd_status rl_reference_open(rl_reference *out, const char *dir, const hd_trainer_options *like,
                            hd_err *err);
void rl_reference_close(rl_reference *r); /* an all-zero one is fine */

#endif
