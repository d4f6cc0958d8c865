/* experts.h - experts that are elsewhere: in the model's files, in host memory, or in the memory of other
 * ranks. */
#ifndef HD_ENGINE_EXPERTS_H
#define HD_ENGINE_EXPERTS_H

#include "engine/rank.h"

/* Whether ranks fetch experts from each other (dwdp). With ep 1 they exchange nothing in a step (independent). */
static inline bool engine_fetches(const hd_engine *e) {
    return e->parallel.dwdp > 1;
}

/* Refuses, by name, what they cannot be used with. */
hd_status engine_experts_check(const hd_engine *e, const hd_engine_options *o, hd_err *err);
bool engine_experts_are_on_disk(const hd_engine_options *o);
bool engine_experts_are_on_host(const hd_engine_options *o);

/* Takes the memory in which they are staged, after the upload of the other weights of all ranks. */
hd_status engine_experts_open(engine_rank *rank, const hd_engine_options *o, hd_err *err);
void engine_experts_read(engine_rank *rank);  /* into its totals */
void engine_experts_close(engine_rank *rank); /* before another place; its counts stay */

#endif
