/* state.h - checkpoints of a training run: DIR/step-N with
 *
 *     model/             the model, as `hadal serve` reads it
 *     state.safetensors  masters and moments, float32: master.NAME, first.NAME, second.NAME
 *     state.json         steps, what the run keeps, and a checksum of every tensor
 *
 * A checkpoint is written beside, flushed to the disk and renamed: a name step-N is always a
 * whole one. */
#ifndef HD_TRAIN_STATE_H
#define HD_TRAIN_STATE_H

#include <jansson.h>

#include "train/parameters.h"

/* Writes DIR/step-N and removes all but the last `keep` checkpoints. model_dir: the folder that
 * the model's other files are copied from. all[n]: complete. run: what the caller needs to go on. */
hd_status hd_state_save(const char *dir, int64_t steps, const hd_parameter *all, int32_t n,
                        const hd_weights *w, const char *model_dir, const json_t *run,
                        int32_t keep, hd_err *err);

/* Finds the checkpoint of the most steps. *path is malloc'ed; NULL if there is none. */
hd_status hd_state_find(char **path, const char *dir, hd_err *err);

/* Reads text[n] as a state.json; label names it in errors. *all is the document, which the caller
 * owns: {"steps", "run", "state": {TENSOR: CHECKSUM}, ...}. HD_EFORMAT: it is no such document. */
hd_status hd_state_parse(json_t **all, const char *text, size_t n, const char *label,
                         hd_err *err);

/* Reads state.json of a checkpoint. The caller owns *run. */
hd_status hd_state_read(const char *path, int64_t *steps, json_t **run, hd_err *err);

/* Reads this rank's masters and moments of a checkpoint, whose model p was opened with. HD_EFORMAT, with
 * the tensor's name: one is missing, unknown, of another shape, or not what state.json says. */
hd_status hd_state_load(const char *path, const hd_parameters *p, hd_err *err);

#endif
