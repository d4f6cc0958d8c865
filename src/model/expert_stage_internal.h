/* expert_stage_internal.h - the function table of a kind of stage. A kind embeds hd_expert_stage
 * as the first member of its own struct and sets its table. */
#ifndef HD_MODEL_EXPERT_STAGE_INTERNAL_H
#define HD_MODEL_EXPERT_STAGE_INTERNAL_H

#include "model/expert_stage.h"

enum { MODEL_EXPERT_ROLES = 3 }; /* gate, up, down */

typedef struct model_stage_table {
    void (*close)(hd_expert_stage *s);
    void (*begin)(hd_expert_stage *s, const hd_expert_layer *layer);
    hd_status (*next)(hd_expert_stage *s, hd_expert_wave *out, hd_err *err);
    void (*follow)(hd_expert_stage *s,
                   const int64_t *rows); /* NULL, like move: nothing moves */
    void (*move)(hd_expert_stage *s);
    bool (*predicts)(const hd_expert_stage *s); /* NULL: never */
    hd_expert_stage_stats (*read_stats)(const hd_expert_stage *s);
} model_stage_table;

struct hd_expert_stage {
    const model_stage_table *table;
    bool queued; /* it does not read offsets on the host */
};

#endif
