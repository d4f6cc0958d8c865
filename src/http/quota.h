/* quota.h - rate limits: tokens and calls per key, and failed authentications per address.
 * Budgets refill steadily (a leaky bucket): spending moves a mark into the future, and a
 * caller whose mark is a minute ahead must wait. Any thread may call; only opening
 * allocates. */
#ifndef HD_HTTP_QUOTA_H
#define HD_HTTP_QUOTA_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/status.h"

typedef struct http_quota_limits { /* 0: unlimited */
    int32_t key_calls;             /* concurrent calls of one key */
    int64_t key_tokens;            /* tokens per minute of one key, prompt and output */
    int32_t failures;              /* failed authentications per minute of one address */
} http_quota_limits;

typedef struct http_quotas http_quotas;

hd_status http_quotas_open(http_quotas **out, const http_quota_limits *limits, hd_err *err);
void http_quotas_close(http_quotas *q); /* NULL is fine */

/* Begins a call of the key with this salt. Returns 0, or the seconds after which to retry.
 * Every call that began must end with http_quota_leave. */
int32_t http_quota_enter(http_quotas *q, uint64_t salt, int64_t now_ns);
void http_quota_leave(http_quotas *q, uint64_t salt);

/* Reserves the most tokens that a call may use, so that concurrent calls cannot exceed the
 * quota; tokens is at most key_tokens. Returns 0, or seconds as above. Settling returns the
 * reserved tokens and charges the used ones. */
int32_t http_quota_reserve(http_quotas *q, uint64_t salt, int64_t tokens, int64_t now_ns);
void http_quota_settle(http_quotas *q, uint64_t salt, int64_t reserved, int64_t used,
                       int64_t now_ns);

/* Returns 0 if the address may try a key, else the seconds it has to wait. */
int32_t http_quota_blocked(http_quotas *q, const struct sockaddr *address, int64_t now_ns);
void http_quota_failed(http_quotas *q, const struct sockaddr *address, int64_t now_ns);

#endif
