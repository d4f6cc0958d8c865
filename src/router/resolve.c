/* resolve.c - names that stand for many servers: a thread resolves them again and again, and the loop
 * takes what they resolve to. A name that does not resolve keeps the servers that it had. */
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/log.h"
#include "base/progress.h"
#include "router/router_internal.h"

enum { PAUSE_MS = 1000, MOST_NAME = 64 };

/* Writes "HOST:PORT" of an address. */
static bool write_name(char out[ROUTER_PEER_NAME], const struct addrinfo *a) {
    char host[MOST_NAME], port[8];
    if (getnameinfo(a->ai_addr, a->ai_addrlen, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return false;
    }
    snprintf(out, ROUTER_PEER_NAME, a->ai_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
    return true;
}

/* address: HOST:PORT, which the picture has checked. */
static void resolve(router_names *out, const char *address) {
    char host[ROUTER_PEER_NAME];
    const struct addrinfo wanted = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    const char *colon = strrchr(address, ':');
    const bool bracketed = address[0] == '[';
    out->n = 0;
    snprintf(host, sizeof host, "%.*s", (int)(colon - address) - 2 * bracketed,
             address + bracketed);
    const int why = getaddrinfo(host, colon + 1, &wanted, &found);
    if ((why != 0) != out->fails) {
        HD_LOG(why ? HD_LOG_WARN : HD_LOG_INFO, why ? "name_lost" : "name_resolves",
               hd_log_text("name", address), hd_log_text("why", why ? gai_strerror(why) : ""));
    }
    out->fails = why != 0;
    if (why) return;
    for (const struct addrinfo *a = found; a && out->n < ROUTER_MAX_PEERS; a = a->ai_next) {
        out->n += write_name(out->names[out->n], a);
    }
    freeaddrinfo(found);
}

/* Gives the loop what was found, and waits until it has taken that. */
static void post(router *r, int32_t source) {
    pthread_mutex_lock(&r->inbox_lock);
    r->resolved = source;
    client_multi_wake(&r->multi);
    while (r->resolved >= 0 && !atomic_load(&r->stopping)) {
        pthread_cond_wait(&r->taken, &r->inbox_lock);
    }
    pthread_mutex_unlock(&r->inbox_lock);
}

static void *run(void *user) {
    router *r = user;
    while (!atomic_load(&r->stopping)) {
        for (int32_t i = 0; i < r->picture.n_sources && !atomic_load(&r->stopping); i++) {
            resolve(&r->names, r->picture.sources[i].address);
            if (r->names.n) post(r, i);
        }
        for (int32_t ms = 0; ms < PAUSE_MS && !atomic_load(&r->stopping); ms += 10) {
            nanosleep(&(struct timespec){0, 10000000}, NULL);
        }
    }
    return NULL;
}

void router_take_names(router *r) {
    pthread_mutex_lock(&r->inbox_lock);
    const int32_t source = r->resolved;
    if (source >= 0) {
        pthread_mutex_lock(&r->lock);
        router_picture_resolved(&r->picture, source, r->names.names, r->names.n);
        pthread_mutex_unlock(&r->lock);
        r->resolved = -1;
        pthread_cond_signal(&r->taken);
    }
    pthread_mutex_unlock(&r->inbox_lock);
}

hd_status router_resolve_start(router *r, hd_err *err) {
    r->resolved = -1;
    if (!r->picture.n_sources) return HD_OK;
    if (pthread_create(&r->resolver, NULL, run, r) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot start the thread that resolves names");
    }
    r->resolving = true;
    return HD_OK;
}

void router_resolve_stop(router *r) {
    if (!r->resolving) return;
    pthread_mutex_lock(&r->inbox_lock);
    pthread_cond_signal(&r->taken);
    pthread_mutex_unlock(&r->inbox_lock);
    pthread_join(r->resolver, NULL);
}
