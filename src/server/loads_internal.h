/* loads_internal.h - how busy the engine is, for /v1/loads and what shows the same figures. */
#ifndef HD_SERVER_LOADS_INTERNAL_H
#define HD_SERVER_LOADS_INTERNAL_H

#include "server/server_internal.h"

http_handler server_on_loads, server_on_old_load;

double server_accept_length(const hd_engine_stats *e); /* tokens per step with drafts */
int64_t server_total_tokens(const hd_engine_stats *e); /* that the KV pools hold */

#endif
