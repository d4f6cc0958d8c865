/* emulated.h - the exchange of a rank whose other ranks do not exist.
 *
 * A share of a model runs alone as it would among the others: sums stay partial, words of
 * other ranks keep what they were, and the rows that other ranks would send to the experts
 * here are copies of this rank's own, in the numbers that a balanced or a skewed router gives
 * (the busiest rank's). What a step costs is then measured; what it says is worthless. */
#ifndef HD_COMM_EMULATED_H
#define HD_COMM_EMULATED_H

#include <stdbool.h>
#include <stdint.h>

#include "comm/comm.h"
#include "ops/ops.h"
#include "weights/weights.h"

typedef struct hd_comm_emulated hd_comm_emulated;

enum { HD_EMULATED_SIZES = 2 };

typedef struct hd_comm_emulated_options {
    const hd_model_spec *spec;
    const hd_shard *shard;
    hd_routing routing;              /* whether rows are balanced over ranks */
    int32_t rows[HD_EMULATED_SIZES]; /* of each rank in the steps to come, the larger first */
    bool
        copies; /* move the bytes of rows that come and go inside this device's memory; otherwise
                    rows stay from step to step and communication costs nothing */
    const hd_ops *ops;
    hd_device *device; /* owns what is taken */
    hd_stream *stream;
} hd_comm_emulated_options;

hd_status hd_comm_emulated_open(hd_comm_emulated **out, const hd_comm_emulated_options *o,
                                hd_err *err);
void hd_comm_emulated_close(hd_comm_emulated *e); /* NULL is fine */

const hd_comm *hd_comm_emulated_interface(const hd_comm_emulated *e);

/* The most rows that the experts here get in a step: expert_rows of hd_model_limits. */
int32_t hd_comm_emulated_rows(const hd_comm_emulated *e);

#endif
