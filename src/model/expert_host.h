/* expert_host.h - experts that lie in host memory which operators read in place: moe_fetch copies those
 * that rows chose to device memory, behind the router, and device memory keeps those that were
 * used last.
 *
 * Every layer has slots of its own, as many as the others. The host neither waits nor knows which
 * experts the slots hold, so steps can be queued ahead and captured. A layer whose rows may choose
 * more experts than it has slots takes several rounds (ops/fetch.h). Layers of which rows choose nearly all
 * experts, as in a long prompt, are streamed: what slots lack is copied to other memory beside the compute, ahead
 * of it and into the next layers (expert_sets.c).
 *
 * With a thread that computes rows on the host (host_experts.h), a round fetches some of the experts that it
 * lacks and sends the rows of the others, so that both end together by what they took lately.
 *
 * Where the host has too little memory, device memory has all experts of the last layers, and host
 * memory none of these. */
#ifndef HD_MODEL_EXPERT_HOST_H
#define HD_MODEL_EXPERT_HOST_H

#include "model/expert_stage.h"
#include "model/host_experts.h"
#include "weights/weights.h"

typedef struct hd_expert_host_options {
    const hd_weights *whole; /* keeps the experts that it holds at their addresses */
    int32_t held;            /* the layers below hold theirs (hd_weights_hold_experts) */
    size_t bytes;            /* of device memory for slots */
    hd_host_experts *host;   /* computes rows of some experts; NULL: all are fetched */
    hd_device *device;
    hd_stream *stream,
        *copy_stream; /* the latter's operators begin first, where streams have an order */
} hd_expert_host_options;

/* How many layers, drafts included, can hold their experts in so many bytes of host memory: the first ones. */
int32_t hd_expert_host_layers(const hd_model_spec *spec, const hd_weights *whole, size_t bytes);

/* w: the weights of this rank without experts, uploaded. Everything must outlive the stage.
 * HD_EUNSUPPORTED: bytes hold no expert of every layer, or not all of the layers from `held` on; experts of
 * a layer differ in their format; or the device cannot read them where they are. */
hd_status hd_expert_host_open(hd_expert_stage **out, const hd_model_spec *spec,
                              const hd_weights *w, const hd_expert_host_options *o,
                              hd_err *err);

#endif
