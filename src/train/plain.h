/* plain.h - models whose matrices are BF16 or F32, made of ones that are quantized. */
#ifndef HD_TRAIN_PLAIN_H
#define HD_TRAIN_PLAIN_H

#include "weights/spec.h"

/* Number formats that a model can be trained in, as words; 0: as it is stored. Ended by NULL. */
extern const char *const hd_plain_names[]; /* "stored", "bf16", "f32" */
hd_dtype hd_plain_type(int i);             /* of hd_plain_names[i]; HD_NONE: as stored */

/* Changes what the spec declares: all matrices in `type`, BF16 or F32, without scales. Vectors that are F32
 * in every model stay F32. */
void hd_plain_declare(hd_model_spec *spec, hd_dtype type);

/* Whether model_dir is a model that can be converted. HD_EUNSUPPORTED: of a family that is not trained. */
hd_status hd_plain_check(const char *model_dir, hd_err *err);

/* Makes the model folder dir: that of model_dir with its stored values in `type`, a config that declares it,
 * and one file of weights. A folder that exists is written anew. */
hd_status hd_plain_folder(const char *dir, const char *model_dir, hd_dtype type, hd_err *err);

#endif
