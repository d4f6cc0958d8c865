/* manifest.h - digests of a model's files, as `sha256sum` writes them.
 *
 * Each line holds 64 hexadecimal digits, a space, a space or a star, and a file's name below
 * the model's directory. */
#ifndef HD_WEIGHTS_MANIFEST_H
#define HD_WEIGHTS_MANIFEST_H

#include "base/status.h"

/* Reads every listed file and compares. Refused are a file that differs or is missing, and one
 * that a model is made of (.safetensors, .json, .jinja, scripts in encoding/) and that is not listed.
 * The files must not change between this and their opening. */
hd_status hd_manifest_check(const char *manifest, const char *model_dir, hd_err *err);

#endif
