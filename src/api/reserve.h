/* reserve.h - reserves tokens of a request from its key's quota per minute. */
#ifndef HD_API_RESERVE_H
#define HD_API_RESERVE_H

#include "api/job.h"

/* Reserves if the key has a token quota; false: refused. May set r->most_tokens. */
bool api_reserve(api_request *r, const api_prompt *prompts, int32_t n);

#endif
