/* router.c - the life of a router, and its loop. */
#include "router/router.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/progress.h"
#include "comm/channel.h"
#include "router/router_internal.h"

/* ---- the loop ---- */

static void take_ends(router *r) {
    int left;
    for (CURLMsg *m; (m = curl_multi_info_read(r->multi.multi, &left));) {
        void *transfer = NULL;
        if (m->msg != CURLMSG_DONE) continue;
        const CURLcode code = m->data.result; /* m ends with the transfer */
        curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&transfer);
        ((router_transfer *)transfer)->on_done(transfer, code);
    }
}

static void *run(void *user) {
    router *r = user;
    hd_err err = {0};
    while (!atomic_load(&r->stopping)) {
        const int64_t now = hd_now_ns();
        router_take_inbox(r);
        router_take_names(r);
        const int64_t retry = router_send_due(r, now), report = router_ask_due(r, now);
        const int64_t due = retry >= 0 && retry < report ? retry : report;
        if (client_multi_step(&r->multi, due, &err) != HD_OK) {
            HD_LOG(HD_LOG_ERROR, "router_failed", hd_log_text("why", err.msg));
        }
        router_pass_ready(r);
        take_ends(r);
    }
    router_take_inbox(r); /* exchanges that were over and still posted */
    return NULL;
}

/* ---- routes ---- */

static bool is_among(const http_route *route, const http_route *routes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(routes[i].path, route->path) == 0) return true;
    }
    return false;
}

static bool is_own(const router *r, const http_route *route) {
    return is_among(route, router_own_routes, router_own_n_routes) ||
           is_among(route, r->options.page, r->options.n_page);
}

/* The API of the servers: what changes them goes to all. */
static hd_status open_routes(router *r, hd_err *err) {
    size_t n = 0;
    while (r->options.route(n)) n++;
    r->routes = calloc(n + 1, sizeof *r->routes);
    if (!r->routes) return HD_FAIL(err, HD_ENOMEM, "no memory for routes");
    for (size_t i = 0; i < n; i++) {
        http_route route = *r->options.route(i);
        route.handler = route.access == HTTP_ADMIN ? router_forward_to_all : router_forward;
        if (!is_own(r, &route)) r->routes[r->n_routes++] = route;
    }
    HD_TRY(http_mount(r->http, router_own_routes, router_own_n_routes, r, err));
    if (r->options.n_page) {
        HD_TRY(http_mount(r->http, r->options.page, r->options.n_page, NULL, err));
    }
    return http_mount(r->http, r->routes, r->n_routes, r, err);
}

/* ---- life ---- */

static hd_status prepare(router *r, hd_err *err) {
    const router_options *o = &r->options;
    hd_channel_key(r->prefix_key, o->key);
    HD_TRY(router_picture_open(&r->picture, err));
    HD_TRY(router_picture_add(&r->picture, ROUTER_DECODE, "decode", o->decode, err));
    HD_TRY(router_picture_add(&r->picture, ROUTER_PREFILL, "prefill", o->prefill, err));
    if (r->picture.n + r->picture.n_sources == 0)
        return HD_FAIL(err, HD_EINVAL, "--decode names no server");
    HD_TRY(hd_keys_open(&r->keys, &o->key_sources, err));
    r->options.http.keys = r->keys;
    r->options.http.writer_sends = true;
    HD_TRY(http_open(&r->http, &r->options.http, err));
    if (!http_is_loopback(r->http) && !hd_keys_user_set(r->keys) && !o->open) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s can be reached by others: give --api-key-file, or say "
                       "--insecure-no-auth",
                       o->http.host);
    }
    HD_TRY(open_routes(r, err));
    HD_TRY(client_multi_open(&r->multi, err));
    HD_TRY(router_reports_open(r, err));
    if (pthread_create(&r->loop, NULL, run, r) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot start the router's thread");
    }
    r->looping = true;
    HD_TRY(router_resolve_start(r, err));
    HD_TRY(http_start(r->http, err));
    http_set_gate(r->http, HTTP_OPEN);
    return HD_OK;
}

hd_status router_open(router **out, const router_options *options, hd_err *err) {
    router *r = calloc(1, sizeof *r);
    *out = NULL;
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory for the router");
    r->options = *options;
    r->multi = (client_multi){.epoll = -1, .timer = -1, .wake = -1};
    pthread_mutex_init(&r->lock, NULL);
    pthread_mutex_init(&r->inbox_lock, NULL);
    pthread_cond_init(&r->taken, NULL);
    const hd_status st = prepare(r, err);
    if (st != HD_OK) {
        router_close(r);
        return st;
    }
    *out = r;
    return HD_OK;
}

void router_drain(router *r) {
    atomic_store(&r->draining, true);
    http_set_gate(r->http, HTTP_DRAINING);
}

static void pause_ms(long ms) {
    const struct timespec pause = {0, ms * 1000000};
    nanosleep(&pause, NULL);
}

bool router_wait_idle(router *r, int64_t timeout_ns) {
    const int64_t until = hd_now_ns() + timeout_ns;
    http_stats stats;
    do {
        http_read_stats(r->http, &stats);
        if (stats.pending == 0) return true;
        pause_ms(5);
    } while (hd_now_ns() < until);
    return false;
}

hd_status router_reload(router *r, hd_err *err) {
    HD_TRY(hd_keys_reload(r->keys, err));
    return http_reload(r->http, err);
}

void router_close(router *r) {
    if (!r) return;
    if (r->http) http_stop(r->http); /* drops all clients, which ends their exchanges */
    while (r->looping && atomic_load(&r->n_living) > 0) pause_ms(1);
    if (r->looping) {
        atomic_store(&r->stopping, true);
        router_resolve_stop(r);
        client_multi_wake(&r->multi);
        pthread_join(r->loop, NULL);
    }
    router_reports_close(r);
    client_multi_close(&r->multi);
    http_close(r->http);
    hd_keys_close(r->keys);
    router_picture_close(&r->picture);
    free(r->routes);
    pthread_mutex_destroy(&r->lock);
    pthread_mutex_destroy(&r->inbox_lock);
    pthread_cond_destroy(&r->taken);
    free(r);
}

int32_t router_port(const router *r) {
    return http_port(r->http);
}
