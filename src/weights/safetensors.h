/* safetensors.h - reads safetensors checkpoints: files are mapped, headers are checked.
 *
 * A checkpoint is one model.safetensors, or the shards that model.safetensors.index.json
 * names. Opening maps every file and checks every header against the rules of the format
 * before anything is used. After that each tensor's bytes lie inside its map, belong to no
 * other tensor and have the length of its shape. weights.h knows what the tensors mean.
 *
 * Other processes may change a mapped file: a file that is truncated while it is mapped ends
 * the program with SIGBUS. docs/checkpoints.md describes the consequences. */
#ifndef HD_WEIGHTS_SAFETENSORS_H
#define HD_WEIGHTS_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/file.h"
#include "base/status.h"
#include "weights/weights.h"

enum { HD_MAX_RANK = 8 };

struct hd_tensor {
    const char *name;       /* 1 to 1024 bytes of UTF-8 without control characters */
    const char *dtype_name; /* as written in the file: "BF16", "F64", "F4" */
    hd_dtype dtype;         /* HD_NONE: a legal type that no supported model uses */
    int32_t shard;          /* index of its file; 0 for a single file */
    int32_t rank;           /* 0: a scalar */
    int64_t shape[HD_MAX_RANK];
    const uint8_t *data; /* little-endian, row-major, in the map, unaligned */
    size_t bytes;
    const uint8_t *on_device; /* the same bytes in the memory of a GPU; NULL: there are none */
};

/* ---- one file ---- */

typedef struct hd_safetensors {
    hd_tensor *tensors; /* in header order */
    int32_t n;
    char *names; /* all names, one after the other */
} hd_safetensors;

/* Checks file[bytes] and lists its tensors, which point into it; path names the file in
 * errors. Release out with hd_safetensors_deinit, also after a failure. */
hd_status hd_safetensors_init(hd_safetensors *out, const uint8_t *file, size_t bytes,
                              const char *path, hd_err *err);
void hd_safetensors_deinit(hd_safetensors *s);

/* ---- a directory: hd_checkpoint, declared in weights.h ---- */

/* Returns whether the directory contains weights: anything named *.safetensors or
 * *.safetensors.index.json, well-formed or not. */
bool hd_checkpoint_exists(const char *model_dir);

hd_status hd_checkpoint_open(hd_checkpoint **out, const char *model_dir, hd_err *err);
/* The same, but reads every file into memory of this process: what others do to the files
 * later does not reach it. A file that becomes shorter meanwhile is an error. */
hd_status hd_checkpoint_read(hd_checkpoint **out, const char *model_dir, hd_err *err);
/* The same of one file's bytes, or of a list of tensors, which point into memory. Takes the
 * memory, also on failure. label names it in errors. */
hd_status hd_checkpoint_of_bytes(hd_checkpoint **out, hd_map *file, const char *label,
                                 hd_err *err);
hd_status hd_checkpoint_of_tensors(hd_checkpoint **out, const hd_tensor *tensors, int32_t n,
                                   hd_map *memory, const char *label, hd_err *err);
/* Puts the tensors of `by`, which it takes, also on failure, in the place of those of c whose names
 * begin with a prefix. HD_EFORMAT: a tensor of `by` has another name. */
hd_status hd_checkpoint_replace(hd_checkpoint *c, const char *prefix, hd_checkpoint *by,
                                hd_err *err);
/* Memory of a device in which tensors have a copy; c releases it when it is closed. */
void hd_checkpoint_keep_device(hd_checkpoint *c, hd_device *d, void *memory);
/* The memory of a shard's tensors, from the first one on, of a checkpoint that was read; it may be
 * written. */
hd_map hd_checkpoint_memory(const hd_checkpoint *c, int32_t shard);
/* Gives the memory of all tensors of a checkpoint that was read back to the system, as far as
 * pages are whole; they read as zeros. Returns the bytes. */
size_t hd_checkpoint_discard(hd_checkpoint *c);

void hd_checkpoint_close(hd_checkpoint *c); /* NULL is fine */

int32_t hd_checkpoint_count(const hd_checkpoint *c);
const hd_tensor *hd_checkpoint_at(const hd_checkpoint *c, int32_t i);
const hd_tensor *hd_checkpoint_find(const hd_checkpoint *c, const char *name); /* or NULL */

int32_t hd_checkpoint_shards(const hd_checkpoint *c);
const char *hd_checkpoint_shard_path(const hd_checkpoint *c, int32_t shard); /* with the dir */
const char *hd_checkpoint_shard_name(const hd_checkpoint *c, int32_t shard); /* without */
size_t hd_checkpoint_shard_bytes(const hd_checkpoint *c, int32_t shard);
/* Returns where a byte of one of a shard's tensors lies in its file. */
size_t hd_checkpoint_offset(const hd_checkpoint *c, int32_t shard, const void *byte);

/* Warnings about harmless irregularities, one sentence each: i in [0, n). */
int32_t hd_checkpoint_notices(const hd_checkpoint *c);
const char *hd_checkpoint_notice(const hd_checkpoint *c, int32_t i);

#endif
