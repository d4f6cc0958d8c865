/* dummy_internal.h - random (dummy) tensors of a schema. */
#ifndef HD_WEIGHTS_DUMMY_INTERNAL_H
#define HD_WEIGHTS_DUMMY_INTERNAL_H

#include "device/device.h"
#include "base/memory.h"
#include "weights/bind_internal.h"
#include "weights/placement.h"
#include "weights/routing.h"

typedef struct weights_dummies {
    hd_block block;    /* their bytes in host memory, */
    hd_device *device; /* or on a device, which owns them */
    size_t bytes;
    hd_tensor *tensors; /* [schema.n] */
    bool experts_later; /* routed experts were not made */
} weights_dummies;

typedef struct weights_dummies_args {
    const hd_model_spec *spec;
    const hd_schema *schema;
    const hd_slice *slices; /* [schema->n] the slice held of each tensor */
    hd_device *device;      /* NULL: host memory */
    hd_stream *stream;
    bool shapes_only;   /* data points to bytes that nobody may read */
    bool experts_later; /* routed experts are not made */
} weights_dummies_args;

/* Fills bound[schema->n] for all held tensors but the tables. Release out with
 * weights_dummies_deinit, also after a failure. */
hd_status weights_dummies_init(weights_dummies *out, weights_bound *bound,
                               const weights_dummies_args *args, hd_err *err);
void weights_dummies_deinit(weights_dummies *d); /* an all-zero one is fine */

/* Makes decls[decl] of complete weights, in memory of the stream's device; s NULL: of the host. scale NULL:
 * its format has none. */
void weights_dummies_make(const hd_model_spec *spec, const hd_tensor_decl *d, int32_t decl,
                          hd_stream *s, uint8_t *data, uint8_t *scale);

/* routing.c: draws [vocab, top_k] experts by token, for one layer. The caller owns *out. */
hd_status weights_make_routing(int32_t **out, const hd_model_spec *spec, hd_routing routing,
                               int32_t layer, hd_err *err);

#endif
