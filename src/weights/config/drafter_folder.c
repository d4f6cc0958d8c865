/* drafter_folder.c - see drafter_folder.h. */
#include "weights/config/drafter_folder.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

/* Gives s the drafter of another spec of the same model. */
static hd_status take_drafter(hd_model_spec *s, const hd_model_spec *from, hd_err *err) {
    const size_t main = (size_t)s->n_layers, more = (size_t)from->n_mtp;
    hd_layer_spec *layers = malloc((main + more) * sizeof *layers);
    if (!layers) return HD_FAIL(err, HD_ENOMEM, "no memory for %zu layers", main + more);
    memcpy(layers, s->layers, main * sizeof *layers);
    memcpy(layers + main, from->layers + main, more * sizeof *layers);
    free(s->layers);
    s->layers = layers;
    s->n_mtp = from->n_mtp;
    s->drafter = from->drafter;
    s->dspark = from->dspark;
    s->draft_experts = from->draft_experts;
    s->draft_top_k = from->draft_top_k;
    s->drafter_apart = true;
    return HD_OK;
}

static hd_status read_drafter(hd_model_spec *s, const char *file, hd_err *err) {
    hd_model_spec *other;
    HD_TRY(hd_model_spec_open(&other, file, err));
    const char *key = hd_model_spec_difference(s, other);
    hd_status st;
    if (key) {
        st = HD_FAIL(err, HD_EFORMAT, "%s: a drafter for another model: %s differs", file, key);
    } else if (other->drafter != HD_DRAFTER_DSPARK) {
        st = HD_FAIL(err, HD_EFORMAT, "%s: no dspark_* key describes a drafter", file);
    } else {
        st = take_drafter(s, other, err);
    }
    hd_model_spec_close(other);
    return st;
}

hd_status hd_model_spec_open_drafter(hd_model_spec **out, const char *path, const char *drafter,
                                     hd_err *err) {
    HD_TRY(hd_model_spec_open(out, path, err));
    const bool asked = drafter && strcmp(drafter, hd_drafter_name(HD_DRAFTER_DSPARK)) == 0;
    if (!asked || (*out)->drafter == HD_DRAFTER_DSPARK) return HD_OK;
    char *file = hd_path_join(path, HD_DRAFTER_FOLDER "/config.json");
    hd_status st = HD_OK;
    if (!file) {
        st = HD_FAIL(err, HD_ENOMEM, "%s: no memory for a path", path);
    } else if (hd_file_exists(file)) {
        st = read_drafter(*out, file, err);
    }
    free(file);
    if (st == HD_OK) return HD_OK;
    hd_model_spec_close(*out);
    *out = NULL;
    return st;
}

hd_status hd_checkpoint_open_all(hd_checkpoint **out, const char *model_dir,
                                 const hd_model_spec *spec, hd_checkpoint_opener *open,
                                 hd_err *err) {
    hd_checkpoint *drafter;
    HD_TRY(open(out, model_dir, err));
    if (!spec->drafter_apart) return HD_OK;
    char *dir = hd_path_join(model_dir, HD_DRAFTER_FOLDER);
    hd_status st = dir ? open(&drafter, dir, err)
                       : HD_FAIL(err, HD_ENOMEM, "%s: no memory for a path", model_dir);
    if (st == HD_OK) st = hd_checkpoint_replace(*out, "mtp.", drafter, err);
    free(dir);
    if (st == HD_OK) return HD_OK;
    hd_checkpoint_close(*out);
    *out = NULL;
    return st;
}
