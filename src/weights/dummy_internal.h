/* dummy_internal.h - made-up tensors of a schema. */
#ifndef HD_WEIGHTS_DUMMY_INTERNAL_H
#define HD_WEIGHTS_DUMMY_INTERNAL_H

#include "base/memory.h"
#include "weights/bind_internal.h"

typedef struct weights_dummies {
    hd_block block;     /* all their bytes */
    hd_tensor *tensors; /* [schema.n] */
} weights_dummies;

/* Fills bound[schema->n] for all but the duplicates. out is released with
 * weights_dummies_deinit, also after a failure. */
hd_status weights_dummies_init(weights_dummies *out, weights_bound *bound,
                               const hd_model_spec *spec, const hd_schema *schema, hd_err *err);
void weights_dummies_deinit(weights_dummies *d); /* an all-zero one is fine */

#endif
