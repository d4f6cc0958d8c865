/* reserve.h - a request's share of what its key may use in a minute. */
#ifndef HD_API_RESERVE_H
#define HD_API_RESERVE_H

#include "api/job.h"

/* Where the key has a quota of tokens; false: refused. May set r->most_tokens. */
bool api_reserve(api_request *r, const api_prompt *prompts, int32_t n);

#endif
