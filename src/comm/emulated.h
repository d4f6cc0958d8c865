/* emulated.h - communication of one rank of a larger world, emulated for benchmarks.
 *
 * One rank's shard of a model runs alone. Sums stay partial, and the vocabulary parts of
 * other ranks keep old values. Rows that other ranks would dispatch to this rank's experts
 * are copies of its own rows. Their number is that of the busiest rank under a balanced or
 * skewed router. The time of a step is then measured; its output is meaningless. */
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
    hd_routing routing; /* distribution of rows over ranks */
    /* rows of each rank in later micro-batches, the larger number first */
    int32_t rows[HD_EMULATED_SIZES];
    /* Copy sent and received rows inside this device's memory; otherwise rows stay from step
     * to step and communication takes no time. */
    bool copies;
    int32_t exchange_us;             /* that each exchange takes beside that, */
    int32_t dispatch_ns, combine_ns; /* and each row of this rank to its experts, and back */
    const hd_ops *ops;
    hd_device *device; /* owns the allocations */
    hd_stream *stream;
} hd_comm_emulated_options;

hd_status hd_comm_emulated_open(hd_comm_emulated **out, const hd_comm_emulated_options *o,
                                hd_err *err);
void hd_comm_emulated_close(hd_comm_emulated *e); /* NULL is fine */

const hd_comm *hd_comm_emulated_interface(const hd_comm_emulated *e);

/* Returns how many exchanges have been queued: sums, gathers, and arrivals of rows. */
int64_t hd_comm_emulated_exchanges(const hd_comm_emulated *e);

/* Returns the most rows that this rank's experts receive in a step: expert_rows of
 * hd_model_limits. */
int32_t hd_comm_emulated_rows(const hd_comm_emulated *e);

#endif
