/* names.c - see names.h. */
#include "comm/names.h"

#include <netdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/log.h"
#include "comm/address.h"

enum { PAUSE_MS = 1000, MOST_HOST = 64 };

typedef struct name {
    char address[HD_NAMES_BYTES];
    bool fails; /* it did not resolve last */
} name;

struct hd_names {
    name names[HD_NAMES_MAX];
    int32_t n;
    void (*found)(void *ctx, int32_t i, const hd_resolved *servers);
    void *ctx;
    hd_resolved servers;
    pthread_t thread;
    atomic_bool stopping;
};

bool hd_resolved_has(const hd_resolved *r, const char *server) {
    for (int32_t i = 0; i < r->n; i++) {
        if (strcmp(r->names[i], server) == 0) return true;
    }
    return false;
}

static bool write_name(char out[HD_NAMES_BYTES], const struct addrinfo *a) {
    char host[MOST_HOST], port[8];
    if (getnameinfo(a->ai_addr, a->ai_addrlen, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return false;
    }
    snprintf(out, HD_NAMES_BYTES, a->ai_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
    return true;
}

static bool resolve(hd_resolved *out, name *of) {
    struct addrinfo *found = NULL;
    hd_err err = {0};
    const bool fails = hd_address_resolve(of->address, false, &found, &err) != HD_OK;
    if (fails != of->fails) {
        HD_LOG(fails ? HD_LOG_WARN : HD_LOG_INFO, fails ? "name_lost" : "name_resolves",
               hd_log_text("name", of->address), hd_log_text("why", err.msg));
    }
    of->fails = fails;
    out->n = 0;
    if (fails) return false;
    for (const struct addrinfo *a = found; a && out->n < HD_NAMES_SERVERS; a = a->ai_next) {
        out->n += write_name(out->names[out->n], a);
    }
    freeaddrinfo(found);
    return out->n > 0;
}

static void *run(void *user) {
    hd_names *n = user;
    while (!atomic_load(&n->stopping)) {
        for (int32_t i = 0; i < n->n && !atomic_load(&n->stopping); i++) {
            if (resolve(&n->servers, &n->names[i])) n->found(n->ctx, i, &n->servers);
        }
        for (int32_t ms = 0; ms < PAUSE_MS && !atomic_load(&n->stopping); ms += 10) {
            nanosleep(&(struct timespec){0, 10000000}, NULL);
        }
    }
    return NULL;
}

hd_status hd_names_start(hd_names **out, const char *const *addresses, int32_t n,
                         void (*found)(void *ctx, int32_t i, const hd_resolved *servers),
                         void *ctx, hd_err *err) {
    hd_names *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory for names");
    s->n = n;
    s->found = found;
    s->ctx = ctx;
    for (int32_t i = 0; i < n; i++) {
        snprintf(s->names[i].address, HD_NAMES_BYTES, "%s", addresses[i]);
    }
    if (pthread_create(&s->thread, NULL, run, s) != 0) {
        free(s);
        return HD_FAIL(err, HD_EIO, "cannot start the thread that resolves names");
    }
    *out = s;
    return HD_OK;
}

void hd_names_stop(hd_names *n) {
    if (!n) return;
    atomic_store(&n->stopping, true);
    pthread_join(n->thread, NULL);
    free(n);
}
