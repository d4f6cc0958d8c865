/* world.h - ranks of several processes: they come together (process.c) and begin anew (world.c), after
 * the loss of others and when one has come. */
#ifndef HD_ENGINE_WORLD_H
#define HD_ENGINE_WORLD_H

#include "hadal.h"
#include "base/status.h"
#include "engine/sizes.h"
#include "weights/parallel_config.h"

typedef struct engine_rank engine_rank; /* rank.h */

/* What a rank's later places are opened with. */
typedef struct engine_reopening engine_reopening;

/* What the options ask for, at least 1 each. */
typedef struct engine_degrees {
    int32_t tp, cp, dp, ep;
    bool sum_in_ranks, fp8_rows;
} engine_degrees;

/* ---- world.c ---- */

/* Keeps what later places of the rank are opened with; close accepts all zeros. */
hd_status engine_world_keep(hd_engine *e, const hd_engine_sizes *z, const hd_engine_options *o,
                            hd_err *err);
void engine_world_close(hd_engine *e);
void engine_world_show_first(hd_engine *e);

/* Starts the thread of a rank other than 0, which works until rank 0 leaves or is lost. */
hd_status engine_world_start(engine_rank *rank, hd_err *err);

/* As engine_ranks_recover(): rank 0 begins anew with the ranks that are left. */
bool engine_world_recover(engine_rank *rank, const hd_err *err);

/* On rank 0's thread, between two rounds: recovers if communication has ended. */
void engine_world_look(engine_rank *first);

/* Of hd_comm_ucx_options; ctx is the engine. */
void engine_world_on_end(void *ctx);
bool engine_layout_of(void *ctx, int32_t n, hd_parallel_config *out); /* layout.c */

/* ---- process.c ---- */

/* True if the threads of the options, or the cores, are for the ranks of all processes. */
bool engine_process_shares_cores(const hd_engine_options *o);

/* Whether all ranks are on this host. */
bool engine_process_is_on_one_host(const hd_engine_options *o);

/* Refuses a world that is not that of the layout. */
hd_status engine_process_check(const hd_engine *e, const hd_engine_options *o, hd_err *err);

/* Meets the other processes: before weights are read, so that what differs is refused early. */
hd_status engine_process_join(hd_engine *e, const hd_engine_options *o, hd_err *err);

#endif
