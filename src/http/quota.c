/* quota.c - see quota.h. Keys and addresses are stored in tables of fixed size. */
#include "http/quota.h"

#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "http/keys.h"

enum {
    KEY_PLACES = 2 * HD_KEYS_MAX, /* known keys fill at most half of it */
    ADDRESS_PLACES = 4096,
    ADDRESS_WAYS = 8, /* places where one address can be stored */
    V6_NETWORK_BYTES = 8
};
static const int64_t SECOND_NS = 1000000000;
static const int64_t WINDOW_NS = 60000000000;

typedef struct key_use {
    uint64_t salt; /* 0: free */
    int32_t calls;
    int64_t reserved; /* tokens */
    int64_t paid_ns;  /* time at which everything spent is refilled */
} key_use;

typedef struct address_use {
    uint64_t network; /* 0: free */
    int64_t paid_ns;
} address_use;

struct http_quotas {
    http_quota_limits limits;
    pthread_mutex_t lock; /* guards both tables */
    key_use keys[KEY_PLACES];
    address_use addresses[ADDRESS_PLACES];
};

hd_status http_quotas_open(http_quotas **out, const http_quota_limits *limits, hd_err *err) {
    *out = calloc(1, sizeof **out);
    if (!*out) return HD_FAIL(err, HD_ENOMEM, "no memory for quotas");
    (*out)->limits = *limits;
    pthread_mutex_init(&(*out)->lock, NULL);
    return HD_OK;
}

void http_quotas_close(http_quotas *q) {
    if (!q) return;
    pthread_mutex_destroy(&q->lock);
    free(q);
}

/* ---- budgets ---- */

static int64_t pay(int64_t paid_ns, int64_t cost_ns, int64_t now_ns) {
    return (paid_ns > now_ns ? paid_ns : now_ns) + cost_ns;
}

/* Returns the seconds until cost more fits into the minute; 0: it fits now. */
static int32_t wait_for(int64_t paid_ns, int64_t cost_ns, int64_t now_ns) {
    const int64_t ahead = pay(paid_ns, cost_ns, now_ns) - now_ns - WINDOW_NS;
    return ahead <= 0 ? 0 : (int32_t)((ahead + SECOND_NS - 1) / SECOND_NS);
}

/* ---- keys ---- */

/* Returns the place of a key, allocating one if necessary; NULL: all are in use. A key
 * without calls and debt can be forgotten, so replaced keys leave nothing behind. */
static key_use *place_of(http_quotas *q, uint64_t salt, int64_t now_ns) {
    key_use *resting = NULL;
    for (uint64_t i = 0; i < KEY_PLACES; i++) {
        key_use *k = &q->keys[((salt >> 1) + i) % KEY_PLACES];
        if (k->salt == salt) return k;
        const bool rests = k->calls == 0 && k->reserved == 0 && k->paid_ns <= now_ns;
        if (rests && !resting) resting = k;
        if (!k->salt) break;
    }
    if (resting) *resting = (key_use){.salt = salt};
    return resting;
}

/* The tokens of a whole minute cost at most one minute. */
static int64_t cost_of(const http_quotas *q, int64_t tokens) {
    return (int64_t)((double)tokens * (double)WINDOW_NS / (double)q->limits.key_tokens);
}

static bool bounds_keys(const http_quotas *q) {
    return q->limits.key_calls || q->limits.key_tokens;
}

int32_t http_quota_enter(http_quotas *q, uint64_t salt, int64_t now_ns) {
    int32_t wait = 0;
    if (!bounds_keys(q) || !salt) return 0;
    pthread_mutex_lock(&q->lock);
    key_use *k = place_of(q, salt, now_ns);
    if (!k || (q->limits.key_calls && k->calls >= q->limits.key_calls)) {
        wait = 1;
    } else if (q->limits.key_tokens) {
        wait = wait_for(k->paid_ns, cost_of(q, k->reserved + 1), now_ns);
    }
    if (!wait) k->calls++;
    pthread_mutex_unlock(&q->lock);
    return wait;
}

void http_quota_leave(http_quotas *q, uint64_t salt) {
    if (!bounds_keys(q) || !salt) return;
    pthread_mutex_lock(&q->lock);
    key_use *k = place_of(q, salt, 0); /* exists, because the key has a call */
    if (k && k->calls) k->calls--;
    pthread_mutex_unlock(&q->lock);
}

int32_t http_quota_reserve(http_quotas *q, uint64_t salt, int64_t tokens, int64_t now_ns) {
    int32_t wait = 1;
    if (!q->limits.key_tokens || !salt) return 0;
    pthread_mutex_lock(&q->lock);
    key_use *k = place_of(q, salt, now_ns);
    if (k) wait = wait_for(k->paid_ns, cost_of(q, k->reserved + tokens), now_ns);
    if (!wait) k->reserved += tokens;
    pthread_mutex_unlock(&q->lock);
    return wait;
}

void http_quota_settle(http_quotas *q, uint64_t salt, int64_t reserved, int64_t used,
                       int64_t now_ns) {
    if (!q->limits.key_tokens || !salt) return;
    pthread_mutex_lock(&q->lock);
    key_use *k = place_of(q, salt, now_ns);
    if (k) {
        k->reserved -= reserved;
        if (used) k->paid_ns = pay(k->paid_ns, cost_of(q, used), now_ns);
    }
    pthread_mutex_unlock(&q->lock);
}

/* ---- addresses ---- */

/* An IPv6 network counts as one address, because its owner can use all of it. */
static uint64_t network_of(const struct sockaddr *address) {
    uint64_t network = 0;
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *v4 = (const void *)address;
        network = v4->sin_addr.s_addr | 1ull << 32;
    } else if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const void *)address;
        memcpy(&network, &v6->sin6_addr, V6_NETWORK_BYTES);
        if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
            memcpy(&network, &v6->sin6_addr.s6_addr[8], V6_NETWORK_BYTES);
        }
    }
    return network;
}

/* Returns the place of a network. If it has none, replaces the one of its set whose failures
 * expire first. */
static address_use *address_place(http_quotas *q, uint64_t network) {
    const uint64_t first = network * 0x9e3779b97f4a7c15u >> 40;
    address_use *oldest = NULL;
    for (uint64_t i = 0; i < ADDRESS_WAYS; i++) {
        address_use *a = &q->addresses[(first + i) % ADDRESS_PLACES];
        if (a->network == network) return a;
        if (!oldest || a->paid_ns < oldest->paid_ns) oldest = a;
    }
    return oldest;
}

static int64_t failure_cost(const http_quotas *q) {
    return WINDOW_NS / q->limits.failures;
}

int32_t http_quota_blocked(http_quotas *q, const struct sockaddr *address, int64_t now_ns) {
    if (!q->limits.failures || !address) return 0;
    const uint64_t network = network_of(address);
    pthread_mutex_lock(&q->lock);
    const address_use *a = address_place(q, network);
    const int32_t wait =
        a->network == network ? wait_for(a->paid_ns, failure_cost(q), now_ns) : 0;
    pthread_mutex_unlock(&q->lock);
    return wait;
}

void http_quota_failed(http_quotas *q, const struct sockaddr *address, int64_t now_ns) {
    if (!q->limits.failures || !address) return;
    const uint64_t network = network_of(address);
    pthread_mutex_lock(&q->lock);
    address_use *a = address_place(q, network);
    if (a->network != network) *a = (address_use){.network = network};
    a->paid_ns = pay(a->paid_ns, failure_cost(q), now_ns);
    pthread_mutex_unlock(&q->lock);
}
