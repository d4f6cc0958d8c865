/* rl_reference.c - opens a second model to score with. */
#include "cli/training/rl_reference.h"

hd_status rl_reference_open(rl_reference *out, const char *dir, const hd_trainer_options *like,
                            hd_err *err) {
    HD_TRY(hd_model_spec_open(&out->spec, dir, err));
    if (out->spec->vocab != like->spec->vocab) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s: a vocabulary of %d tokens; the trained model has %d", dir,
                       out->spec->vocab, like->spec->vocab);
    }
    HD_TRY(hd_weights_open(&out->weights, dir, out->spec, err));
    const hd_trainer_options o = {.spec = out->spec,
                                  .weights = out->weights,
                                  .upload = out->weights,
                                  .backend = like->backend,
                                  .kv_type = like->kv_type,
                                  .rows = like->rows,
                                  .context = like->context,
                                  .threads = like->threads,
                                  .n_ranks = like->comm ? 1 : like->n_ranks,
                                  .scores_only = true};
    return hd_trainer_open(&out->trainer, &o, err);
}

void rl_reference_close(rl_reference *r) {
    hd_trainer_close(r->trainer);
    hd_weights_close(r->weights);
    hd_model_spec_close(r->spec);
    *r = (rl_reference){.spec = NULL};
}
