/* model_files.h - the files of a model folder beside its weights: config, tokenizer and the code of
 * its chat encoding. */
#ifndef HD_TRAIN_MODEL_FILES_H
#define HD_TRAIN_MODEL_FILES_H

#include "base/status.h"

/* Copies those that are read from a model folder to another one, which exists, and waits until the
 * disk has them. */
hd_status hd_model_files_copy(const char *to, const char *from, hd_err *err);

/* Writes text[n] as a file, and waits until the disk has it. */
hd_status hd_flushed_write(const char *path, const char *text, size_t n, hd_err *err);

#endif
