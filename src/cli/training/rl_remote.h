/* rl_remote.h - another hadal server as the sampler: /generate, and new weights by a folder that both can
 * read (docs/rollout.md). */
#ifndef HD_CLI_TRAINING_RL_REMOTE_H
#define HD_CLI_TRAINING_RL_REMOTE_H

#include "train/samples.h"
#include "weights/weights.h"

typedef struct rl_remote_options {
    const char *url;  /* of the server, without a path */
    const char *dir;  /* its --weights-dir, or a folder below */
    double timeout_s; /* of a reply */
    int64_t retries;  /* of a request; then the run stops */
} rl_remote_options;

typedef struct rl_remote rl_remote;

hd_status rl_remote_open(rl_remote **out, const rl_remote_options *o, hd_err *err);
void rl_remote_close(rl_remote *r); /* NULL is fine */

/* Samples n prompts: out[i] is an array of the request's n. */
hd_status rl_remote_sample(rl_remote *r, const hd_sample_request *requests,
                           hd_sample_reply *const *out, int32_t n, hd_err *err);

/* Gives the server the weights w, as they are stored, under a version's name. model_dir: the folder of
 * the model's other files. */
hd_status rl_remote_update(rl_remote *r, const hd_weights *w, const char *model_dir,
                           const char *version, hd_err *err);

#endif
