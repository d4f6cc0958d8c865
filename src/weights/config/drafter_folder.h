/* drafter_folder.h - a DSpark drafter beside the model's own.
 *
 * A model's folder may have a folder `dspark`: the config.json of the model with a DSpark drafter,
 * and weight files that have the drafter's tensors alone. Nothing reads it unless it is asked for. */
#ifndef HD_WEIGHTS_CONFIG_DRAFTER_FOLDER_H
#define HD_WEIGHTS_CONFIG_DRAFTER_FOLDER_H

#include "weights/safetensors.h"
#include "weights/spec.h"

#define HD_DRAFTER_FOLDER "dspark"

/* Opens a spec with the drafter of that name. "dspark": where the model's own is another, that of
 * its folder, if there is one. HD_EFORMAT: it is another model's, or none. Others and NULL: the
 * model's own. */
hd_status hd_model_spec_open_drafter(hd_model_spec **out, const char *path, const char *drafter,
                                     hd_err *err);

typedef hd_status hd_checkpoint_opener(hd_checkpoint **out, const char *model_dir, hd_err *err);

/* Opens a model's files, with the drafter's in place of the model's own drafter if the spec says so. */
hd_status hd_checkpoint_open_all(hd_checkpoint **out, const char *model_dir,
                                 const hd_model_spec *spec, hd_checkpoint_opener *open,
                                 hd_err *err);

#endif
