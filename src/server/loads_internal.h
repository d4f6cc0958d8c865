/* loads_internal.h - load figures of the engine, for /v1/loads and other endpoints that
 * report them. */
#ifndef HD_SERVER_LOADS_INTERNAL_H
#define HD_SERVER_LOADS_INTERNAL_H

#include "server/server_internal.h"

http_handler server_on_loads, server_on_old_load;

/* tokens per step with drafts (mean accepted length) */
double server_accept_length(const hd_engine_stats *e);
/* capacity of the KV pools in tokens */
int64_t server_total_tokens(const hd_engine_stats *e);

#endif
