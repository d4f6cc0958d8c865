/* picture.c - the servers of a router, and the choice among them. */
#define _GNU_SOURCE
#include "router/picture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum {
    SEEN_PLACES = 1 << 20, /* a power of two */
    BYTES_PER_TOKEN = 4,
    REQUEST_TOKENS = 64,  /* a request that runs delays others by as many tokens */
    NO_SLOT_TOKENS = 256, /* one that has to wait for a slot, behind each before it */
    SPARE_REQUESTS = 2,   /* this many above 5/4 of the mean are too many */
    LOCAL_TOKENS = 256,   /* shorter prompts are not worth a transfer, */
    TRANSFER_SHARE = 16   /* which takes as long as this part of computing them */
};

/* Which servers had a prefix. Another prefix may take its place. */
struct router_seen {
    uint64_t hash, peers; /* a bit per server */
};

hd_status router_picture_open(router_picture *p, hd_err *err) {
    *p = (router_picture){.seen = calloc(SEEN_PLACES, sizeof *p->seen)};
    return p->seen ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for the prefixes of a router");
}

void router_picture_close(router_picture *p) {
    free(p->seen);
    p->seen = NULL;
}

/* ---- the list of servers ---- */

static bool is_address(const char *text, size_t n) {
    const char *colon = memrchr(text, ':', n);
    if (!colon || colon == text || n >= ROUTER_PEER_NAME) return false;
    int32_t port = 0;
    for (const char *c = colon + 1; c < text + n; c++) {
        if (*c < '0' || *c > '9' || port > 65535) return false;
        port = 10 * port + *c - '0';
    }
    for (const char *c = text; c < colon; c++) {
        if (*c <= ' ' || *c > '~' || strchr("/?#@%\\", *c)) return false;
    }
    return port > 0 && port <= 65535;
}

static hd_status add_source(router_picture *p, router_role role, const char *address, size_t n,
                            hd_err *err) {
    if (p->n_sources == ROUTER_MAX_SOURCES) {
        return HD_FAIL(err, HD_EINVAL, "more than %d names of many servers",
                       ROUTER_MAX_SOURCES);
    }
    router_source *s = &p->sources[p->n_sources++];
    s->role = role;
    snprintf(s->address, sizeof s->address, "%.*s", (int)n, address);
    return HD_OK;
}

static bool has_peer(const router_picture *p, const char *name) {
    for (int32_t i = 0; i < p->n; i++) {
        if (strcmp(p->peers[i].name, name) == 0) return true;
    }
    return false;
}

static void join(router_picture *p, int32_t source, const char *name) {
    int32_t at = 0;
    while (at < p->n && p->peers[at].name[0]) at++;
    if (at == ROUTER_MAX_PEERS) return;
    if (at == p->n) p->n++;
    p->peers[at] = (router_peer){.role = p->sources[source].role, .source = source};
    snprintf(p->peers[at].name, sizeof p->peers[at].name, "%s", name);
}

void router_picture_resolved(router_picture *p, int32_t source, const hd_resolved *servers) {
    for (int32_t i = 0; i < p->n; i++) {
        router_peer *s = &p->peers[i];
        if (s->source == source && s->name[0]) s->gone = !hd_resolved_has(servers, s->name);
    }
    for (int32_t i = 0; i < servers->n; i++) {
        if (!has_peer(p, servers->names[i])) join(p, source, servers->names[i]);
    }
}

void router_picture_remove(router_picture *p, int32_t peer) {
    router_forget(p, peer);
    p->peers[peer] = (router_peer){.source = -1};
}

hd_status router_picture_add(router_picture *p, router_role role, const char *flag,
                             const char *list, hd_err *err) {
    while (list && *list) {
        size_t n = strcspn(list, ",");
        const bool many = strncmp(list, HD_NAMES_PREFIX, 4) == 0;
        if (many) list += 4;
        if (many) n -= 4;
        if (!is_address(list, n)) {
            return HD_FAIL(err, HD_EINVAL, "--%s: '%.*s' is no HOST:PORT", flag, (int)n, list);
        }
        if (many) {
            HD_TRY(add_source(p, role, list, n, err));
            list += n + (list[n] == ',');
            continue;
        }
        if (p->n == ROUTER_MAX_PEERS) {
            return HD_FAIL(err, HD_EINVAL, "more than %d servers", ROUTER_MAX_PEERS);
        }
        router_peer *peer = &p->peers[p->n];
        *peer = (router_peer){.role = role, .source = -1};
        snprintf(peer->name, sizeof peer->name, "%.*s", (int)n, list);
        for (int32_t i = 0; i < p->n; i++) {
            if (strcmp(p->peers[i].name, peer->name) != 0) continue;
            return HD_FAIL(err, HD_EINVAL, "--%s: %s is there twice", flag, peer->name);
        }
        p->n++;
        list += n + (list[n] == ',');
    }
    return HD_OK;
}

/* ---- prefixes ---- */

static router_seen *place_of(const router_picture *p, uint64_t hash) {
    return &p->seen[hash & (SEEN_PLACES - 1)];
}

/* Counts the first blocks of the prompt that each server had. */
static void match(const router_picture *p, const router_prefix *prefix, int32_t *blocks) {
    uint64_t peers = ~0ull;
    memset(blocks, 0, ROUTER_MAX_PEERS * sizeof *blocks);
    for (int32_t i = 0; peers && i < prefix->n; i++) {
        const router_seen *s = place_of(p, prefix->hashes[i]);
        peers &= s->hash == prefix->hashes[i] ? s->peers : 0;
        for (int32_t k = 0; k < p->n; k++) blocks[k] += (int32_t)(peers >> k & 1);
    }
}

void router_learn(router_picture *p, int32_t peer, const uint64_t *hashes, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        router_seen *s = place_of(p, hashes[i]);
        if (s->hash != hashes[i]) *s = (router_seen){.hash = hashes[i]};
        s->peers |= 1ull << peer;
    }
}

void router_forget(router_picture *p, int32_t peer) {
    for (int32_t i = 0; i < SEEN_PLACES; i++) p->seen[i].peers &= ~(1ull << peer);
}

static int64_t uncached(const router_prefix *prefix, int32_t blocks) {
    return (prefix->bytes - router_prefix_end(blocks)) / BYTES_PER_TOKEN;
}

/* ---- the choice ---- */

/* Its own requests are known at once, those of other routers with the next report. */
static int32_t living(const router_peer *s) {
    return hd_max_i32(s->inflight, s->load.running + s->load.waiting);
}

static int64_t work_before(const router_peer *s, int64_t tokens) {
    const int64_t pending = s->load.pending_tokens > s->inflight_tokens ? s->load.pending_tokens
                                                                        : s->inflight_tokens;
    const int32_t behind = s->load.max_running ? living(s) + 1 - s->load.max_running : 0;
    return pending + tokens + (int64_t)REQUEST_TOKENS * living(s) +
           (int64_t)NO_SLOT_TOKENS * (behind > 0 ? behind : 0);
}

static bool takes(const router_picture *p, int32_t i, router_role role, uint64_t tried,
                  int64_t now_ns) {
    const router_peer *s = &p->peers[i];
    return s->role == role && s->up && !s->gone && s->rest_until_ns <= now_ns &&
           !(tried >> i & 1);
}

/* Returns the most requests that a server may have to be chosen: the mean and a quarter. */
static int64_t fair_share(const router_picture *p, uint64_t candidates) {
    int64_t sum = 0, n = 0;
    for (int32_t i = 0; i < p->n; i++) {
        if (!(candidates >> i & 1)) continue;
        sum += living(&p->peers[i]);
        n++;
    }
    return n ? 5 * sum / (4 * n) + SPARE_REQUESTS : 0;
}

static int32_t least_work(const router_picture *p, uint64_t candidates,
                          const router_prefix *prefix, const int32_t *blocks, uint64_t turn,
                          int64_t *work) {
    const int64_t most = fair_share(p, candidates);
    int32_t best = -1;
    for (int32_t k = 0; k < p->n; k++) {
        const int32_t i = (int32_t)((turn + (uint64_t)k) % (uint64_t)p->n);
        if (!(candidates >> i & 1) || living(&p->peers[i]) > most) continue;
        const int64_t tokens = work_before(&p->peers[i], uncached(prefix, blocks[i]));
        if (best >= 0 && tokens >= *work) continue;
        best = i;
        *work = tokens;
    }
    return best;
}

static uint64_t candidates_of(const router_picture *p, router_role role, uint64_t tried,
                              int64_t now_ns) {
    uint64_t all = 0;
    for (int32_t i = 0; i < p->n; i++) {
        if (takes(p, i, role, tried, now_ns)) all |= 1ull << i;
    }
    return all;
}

router_choice router_choose(const router_picture *p, const router_prefix *prefix,
                            uint64_t tried, uint64_t turn, int64_t now_ns) {
    int32_t blocks[ROUTER_MAX_PEERS];
    int64_t work = 0, prefill_work = 0;
    const uint64_t decode = candidates_of(p, ROUTER_DECODE, tried, now_ns);
    const uint64_t prefill = candidates_of(p, ROUTER_PREFILL, tried, now_ns);
    router_choice choice = {.peer = -1, .prefill = -1};
    match(p, prefix, blocks);
    choice.peer = least_work(p, decode ? decode : prefill, prefix, blocks, turn, &work);
    if (choice.peer < 0) return choice;
    choice.tokens = uncached(prefix, blocks[choice.peer]);
    if (!decode || choice.tokens <= LOCAL_TOKENS) return choice;
    const int32_t helper = least_work(p, prefill, prefix, blocks, turn, &prefill_work);
    if (helper >= 0 && prefill_work + choice.tokens / TRANSFER_SHARE < work) {
        choice.prefill = helper;
    }
    return choice;
}

void router_sent(router_picture *p, const router_prefix *prefix, const router_choice *choice) {
    const int64_t all = uncached(prefix, 0);
    p->peers[choice->peer].requests++;
    p->prompt_tokens += all;
    p->cached_tokens += all - choice->tokens;
    router_learn(p, choice->peer, prefix->hashes, prefix->n);
    if (choice->prefill >= 0) router_learn(p, choice->prefill, prefix->hashes, prefix->n);
}
