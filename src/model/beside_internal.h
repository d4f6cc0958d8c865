/* beside_internal.h - a part of a block beside the stages that come next. */
#ifndef HD_MODEL_BESIDE_INTERNAL_H
#define HD_MODEL_BESIDE_INTERNAL_H

#include "model/model_internal.h"

/* runs_beside: whether there is a stream for it, and rows are few. fork: the part may begin where s is.
 * beside: the step that queues it, in order after what it queued before. join: s waits for all of it. Where
 * nothing runs beside, fork and join do nothing, and beside is s. */
bool model_runs_beside(const model_step *s);
void model_fork(const model_step *s);
model_step model_beside(const model_step *s);
void model_join(const model_step *s);

#endif
