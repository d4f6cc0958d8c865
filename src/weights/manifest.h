/* manifest.h - verifies a model's files against SHA-256 digests, as `sha256sum` writes them.
 *
 * Each line contains 64 hexadecimal digits, a space, a space or a star, and a file's name
 * below the model's directory. */
#ifndef HD_WEIGHTS_MANIFEST_H
#define HD_WEIGHTS_MANIFEST_H

#include "base/status.h"

/* Reads every listed file and compares its digest. It refuses a file that differs or is
 * missing, and a model file that is not listed (.safetensors, .json, .jinja, those in dspark/ too,
 * scripts in encoding/). The files must not change between this and their opening. */
hd_status hd_manifest_check(const char *manifest, const char *model_dir, hd_err *err);

#endif
