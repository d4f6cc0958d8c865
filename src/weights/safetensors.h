/* safetensors.h - the tensors of a checkpoint directory, mapped and checked.
 *
 * A checkpoint is one model.safetensors, or the shards that model.safetensors.index.json
 * names. Opening maps every file and checks every header against the rules of the format
 * before anything is used: after that each tensor's bytes lie inside its map, belong to no
 * other tensor and have the length its shape says. What the tensors mean is weights.h.
 *
 * The maps are of files that others may change: a file cut short by somebody else while it
 * is mapped ends the program with SIGBUS. docs/checkpoints.md says what follows from that. */
#ifndef HD_WEIGHTS_SAFETENSORS_H
#define HD_WEIGHTS_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"
#include "weights/weights.h"

enum { HD_MAX_RANK = 8 };

typedef struct hd_tensor {
    const char *name;       /* 1 to 1024 bytes of UTF-8 without control characters */
    const char *dtype_name; /* as the file spells it: "BF16", "F64", "F4" */
    hd_dtype dtype;         /* HD_NONE: a legal type that no model here is made of */
    int32_t shard;          /* the file it lies in; 0 for a single file */
    int32_t rank;           /* 0: a scalar */
    int64_t shape[HD_MAX_RANK];
    const uint8_t *data; /* little-endian, row-major, in the map: aligned to nothing */
    size_t bytes;
} hd_tensor;

/* ---- one file ---- */

typedef struct hd_safetensors {
    hd_tensor *tensors; /* in the order of the header */
    int32_t n;
    char *names; /* all names, one behind the other */
} hd_safetensors;

/* Checks file[bytes] and lists its tensors, which point into it; path names it in errors.
 * out is released with hd_safetensors_deinit, also after a failure. */
hd_status hd_safetensors_init(hd_safetensors *out, const uint8_t *file, size_t bytes,
                              const char *path, hd_err *err);
void hd_safetensors_deinit(hd_safetensors *s);

/* ---- a directory: hd_checkpoint, declared in weights.h ---- */

/* Whether the directory holds weights at all: anything named *.safetensors or
 * *.safetensors.index.json, well-formed or not. */
bool hd_checkpoint_exists(const char *model_dir);

hd_status hd_checkpoint_open(hd_checkpoint **out, const char *model_dir, hd_err *err);
void hd_checkpoint_close(hd_checkpoint *c); /* NULL is fine */

int32_t hd_checkpoint_count(const hd_checkpoint *c);
const hd_tensor *hd_checkpoint_at(const hd_checkpoint *c, int32_t i);
const hd_tensor *hd_checkpoint_find(const hd_checkpoint *c, const char *name); /* or NULL */

int32_t hd_checkpoint_shards(const hd_checkpoint *c);
const char *hd_checkpoint_shard_path(const hd_checkpoint *c, int32_t shard); /* with the dir */
const char *hd_checkpoint_shard_name(const hd_checkpoint *c, int32_t shard); /* without */

/* What is odd but harmless, one sentence each: i in [0, n). */
int32_t hd_checkpoint_notices(const hd_checkpoint *c);
const char *hd_checkpoint_notice(const hd_checkpoint *c, int32_t i);

#endif
