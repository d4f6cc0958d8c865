/* hisparse.h - HiSparse (docs/kv.md): entries in host memory, of which the device has those that were
 * selected lately. The option, its buffers' size, and their counts. */
#ifndef HD_ENGINE_HISPARSE_H
#define HD_ENGINE_HISPARSE_H

#include "engine/rank.h"

/* Refuses, by name, a model without such entries or a buffer that is too small. */
hd_status engine_hisparse_check(const hd_engine *e, const hd_engine_options *o, hd_err *err);

/* Says how many rows buffers have by "auto", once the weights are loaded. */
void engine_hisparse_choose(hd_engine *e, const hd_engine_options *o, hd_engine_sizes *z);

void engine_hisparse_read(engine_rank *rank); /* into its totals */

#endif
