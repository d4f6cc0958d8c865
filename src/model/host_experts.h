/* host_experts.h - a thread that computes rows of experts on the host's processors, for a device that
 * would have to fetch the experts first.
 *
 * The device writes the rows of a layer's experts into host memory and asks (moe_fetch, ops/fetch.h); the
 * thread, which looks for that, computes them with CPU operators from the experts where they lie, and the
 * device takes the results (moe_join). No call of CUDA is between, so steps can be queued ahead and captured.
 *
 * Rows are rounded as the device's precision rounds them (docs/numerics.md). Products are then exact ones of
 * the CPU, or, for a device that is a CPU, its own: then with the same bits. */
#ifndef HD_MODEL_HOST_EXPERTS_H
#define HD_MODEL_HOST_EXPERTS_H

#include "device/device.h"
#include "ops/ops.h"
#include "weights/weights.h"

typedef struct hd_host_experts hd_host_experts;

typedef struct hd_host_experts_options {
    const hd_weights *whole; /* keeps the experts of layers below `held` at their addresses */
    int32_t held;
    hd_device *device;      /* that asks */
    hd_stream *stream;      /* of that device: fails if the thread does */
    hd_precision precision; /* of the device's operators */
    hd_cpu_options cpu;
    int32_t rows; /* most at once */
    bool always;  /* as in hd_host_rows */
} hd_host_experts_options;

/* Opens it, and measures what experts and rows take. HD_EUNSUPPORTED: no layer has such experts. */
hd_status hd_host_experts_open(hd_host_experts **out, const hd_model_spec *spec,
                               const hd_host_experts_options *o, hd_err *err);
void hd_host_experts_close(hd_host_experts *h); /* NULL is fine; nothing that asks is queued */

/* For operators: where they ask, but for the desk. */
hd_host_rows hd_host_experts_rows(const hd_host_experts *h);

/* Time that the thread has computed. Any thread. */
int64_t hd_host_experts_ns(const hd_host_experts *h);

#endif
