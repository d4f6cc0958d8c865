/* init.h - models with random weights to be trained from the beginning, in the formats that
 * their config declares. */
#ifndef HD_TRAIN_INIT_H
#define HD_TRAIN_INIT_H

#include <stdint.h>

#include "weights/spec.h"

/* Writes the weights of a model as a safetensors file at path. Matrices are normal with deviation
 * 0.02, norms are 1, biases, sinks and position biases 0. Hyper-connections begin as the mean of
 * the streams, with nearly independent streams; hash layers have random experts. What a tensor gets
 * depends on the seed and its place in the schema. HD_EUNSUPPORTED: a format that cannot be made of
 * plain numbers, or a family that is not trained. */
hd_status hd_init_write(const char *path, const hd_model_spec *spec, uint64_t seed,
                        hd_err *err);

/* Makes the model folder dir, of a config file and the tokenizer and chat files of tokenizer_dir. A
 * folder that exists is written anew. */
hd_status hd_init_folder(const char *dir, const char *config, const char *tokenizer_dir,
                         uint64_t seed, hd_err *err);

#endif
