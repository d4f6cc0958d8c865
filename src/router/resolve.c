/* resolve.c - servers of names: the thread that resolves them gives the loop what it found. */
#include "router/router_internal.h"

/* Waits until the loop has taken it. */
static void post(void *ctx, int32_t source, const hd_resolved *servers) {
    router *r = ctx;
    pthread_mutex_lock(&r->inbox_lock);
    r->resolved = servers;
    r->resolved_source = source;
    client_multi_wake(&r->multi);
    while (r->resolved && !atomic_load(&r->stopping)) {
        pthread_cond_wait(&r->taken, &r->inbox_lock);
    }
    r->resolved = NULL;
    pthread_mutex_unlock(&r->inbox_lock);
}

void router_take_names(router *r) {
    pthread_mutex_lock(&r->inbox_lock);
    if (r->resolved) {
        pthread_mutex_lock(&r->lock);
        router_picture_resolved(&r->picture, r->resolved_source, r->resolved);
        pthread_mutex_unlock(&r->lock);
        r->resolved = NULL;
        pthread_cond_signal(&r->taken);
    }
    pthread_mutex_unlock(&r->inbox_lock);
}

hd_status router_resolve_start(router *r, hd_err *err) {
    const char *addresses[ROUTER_MAX_SOURCES];
    const int32_t n = r->picture.n_sources;
    for (int32_t i = 0; i < n; i++) addresses[i] = r->picture.sources[i].address;
    return n ? hd_names_start(&r->names, addresses, n, post, r, err) : HD_OK;
}

void router_resolve_stop(router *r) {
    pthread_mutex_lock(&r->inbox_lock);
    pthread_cond_signal(&r->taken);
    pthread_mutex_unlock(&r->inbox_lock);
    hd_names_stop(r->names);
}
