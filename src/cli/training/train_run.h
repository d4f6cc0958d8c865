/* train_run.h - what `hadal train` and `hadal rl` share: options of the optimizer, checkpoints
 * and the log of a run. */
#ifndef HD_CLI_TRAINING_TRAIN_RUN_H
#define HD_CLI_TRAINING_TRAIN_RUN_H

#include <dirent.h>
#include <jansson.h>
#include <stdio.h>

#include "cli/options.h"
#include "cli/rank_options.h"
#include "train/state.h"
#include "train/trainer.h"

typedef struct train_settings {
    const char *model_dir, *out, *freeze, *log;
    const char *init; /* a config to begin with random weights of; NULL: none */
    int64_t steps, rows, keep_gib, context, threads, ranks, seed, save_every, keep, warmup;
    int optimizer, schedule, backend, kv_type, weights;
    double rate, muon_rate, beta1, beta2, eps, decay, momentum, clip, last_rate, mtp_weight,
        indexer;
    bool resume, quiet;
    rank_options processes; /* that are ranks */
} train_settings;

/* A run: settings, and where it is. */
typedef struct train_run {
    const train_settings *set;
    char *resumed;   /* the checkpoint it goes on from; NULL: none */
    json_t *state;   /* of that checkpoint: what train_run_save() was given */
    char *model;     /* the folder to open the model from */
    char *begun;     /* the model that the run began with */
    json_t *options; /* what decides the run's bits */
    int64_t steps;   /* done before */
    DIR *folder;     /* set->out, locked; NULL: it is not there yet */
    FILE *log;
} train_run;

train_settings train_settings_default(void);
void train_options_add(option_list *list, train_settings *s);

const char *train_settings_backend(const train_settings *s); /* cpu or cuda */
const char *train_settings_kv_type(const train_settings *s); /* --kv-cache-dtype */

/* The trainer's options of the command line. The caller sets the model and the context. */
hd_status train_settings_trainer(const train_settings *s, hd_trainer_options *out, hd_err *err);

/* Finds the checkpoint to go on from. options: the command's own options that decide the bits,
 * which it takes; others of the run are added. Refuses to resume a run of other options or of another
 * model, and to write into the folder of a run that is not resumed, or of one that still runs. */
hd_status train_run_open(train_run *r, const train_settings *s, json_t *options, hd_err *err);
void train_run_close(train_run *r); /* an all-zero one is fine */

/* After the trainer was opened: masters, moments and steps of the checkpoint, if any. */
hd_status train_run_load(const train_run *r, hd_trainer *t, hd_err *err);

/* Writes a checkpoint after `steps` of the command; state, which it takes, is what the command needs
 * to go on. */
hd_status train_run_save(train_run *r, hd_trainer *t, const hd_weights *w, int64_t steps,
                         json_t *state, hd_err *err);
bool train_run_saves_at(const train_run *r, int64_t steps); /* after so many steps */

/* For the log: null of what is no finite number, which JSON does not have; NULL: no memory. */
json_t *train_run_number(double x);

/* Writes a line of the log as JSON, which it takes. */
hd_status train_run_log(const train_run *r, json_t *line, hd_err *err);

/* SIGINT and SIGTERM end a run after its step from here on; train_run_stopped() tells. */
void train_run_catch_signals(void);
bool train_run_stopped(void);

#endif
