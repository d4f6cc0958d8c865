/* expert_disk.h - experts that stay in the model's files, staged in host memory when rows choose
 * them: waves of the experts that have arrived. Those that are predicted for the next layer are read
 * ahead, if that pays (moe/read_ahead.h). For one rank whose device memory is host memory. */
#ifndef HD_MODEL_EXPERT_DISK_H
#define HD_MODEL_EXPERT_DISK_H

#include "model/expert_stage.h"
#include "moe/expert_cache.h"
#include "weights/weights.h"

typedef struct hd_expert_disk_options {
    size_t bytes;       /* host memory for staged experts; no more is taken than all need */
    int32_t n_fetchers; /* threads that read files; 0: 8 */
    bool through_cache; /* read files through the page cache, without O_DIRECT */
    /* Experts of the next layer to read before rows choose them: 0: as many as pay; < 0: none; else
     * so many at most, whether it pays or not. */
    int32_t ahead;
    /* Wraps the source of files, for tests. NULL: none. */
    hd_expert_source (*wrap)(void *ctx, hd_expert_source files);
    void *wrap_ctx;
} hd_expert_disk_options;

/* w: of hd_weights_open_unstaged(); both must outlive the stage. HD_EINVAL: bytes hold no expert,
 * or the model has none. */
hd_status hd_expert_disk_open(hd_expert_stage **out, const hd_model_spec *spec,
                              const hd_weights *w, const hd_expert_disk_options *o,
                              hd_err *err);

#endif
