/* quota.h - how much one key may use, and how often one address may fail to show a key.
 *
 * Both are budgets that refill steadily: what is spent moves a mark into the future, and who
 * is a whole minute ahead waits. Any thread; nothing here allocates after opening. */
#ifndef HD_HTTP_QUOTA_H
#define HD_HTTP_QUOTA_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/status.h"

typedef struct http_quota_limits { /* 0: no bound */
    int32_t key_calls;             /* of one key at once */
    int64_t key_tokens;            /* of one key per minute, read and written */
    int32_t failures;              /* to show a key, of one address per minute */
} http_quota_limits;

typedef struct http_quotas http_quotas;

hd_status http_quotas_open(http_quotas **out, const http_quota_limits *limits, hd_err *err);
void http_quotas_close(http_quotas *q); /* NULL is fine */

/* A call of the key with this salt begins. 0: it may; else it may not, and in so many seconds
 * trying again makes sense. Every call that began ends by http_quota_leave. */
int32_t http_quota_enter(http_quotas *q, uint64_t salt, int64_t now_ns);
void http_quota_leave(http_quotas *q, uint64_t salt);

/* What a call may use at most is set aside before it uses any, so that many at once cannot use
 * more than the key has: tokens, at most the key_tokens of a minute. 0: they are; else seconds as
 * above. Settling gives them back and takes what was used. */
int32_t http_quota_reserve(http_quotas *q, uint64_t salt, int64_t tokens, int64_t now_ns);
void http_quota_settle(http_quotas *q, uint64_t salt, int64_t reserved, int64_t used,
                       int64_t now_ns);

/* 0: the address may try a key; else the seconds it has to wait. */
int32_t http_quota_blocked(http_quotas *q, const struct sockaddr *address, int64_t now_ns);
void http_quota_failed(http_quotas *q, const struct sockaddr *address, int64_t now_ns);

#endif
