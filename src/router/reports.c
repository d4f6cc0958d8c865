/* reports.c - asks every server for its load, several times in a second. A report that does not
 * come, or says nonsense, makes the server unfit until the next one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base64.h"
#include "base/json.h"
#include "base/log.h"
#include "base/progress.h"
#include "router/router_internal.h"

enum { INTERVAL_MS = 250, TIMEOUT_MS = 1000, MOST_MISSED = 3, MAX_BYTES = 128 << 10 };
static const int64_t MS_NS = 1000000;

/* ---- the message ---- */

static bool read_number(const json_t *object, const char *name, int64_t most, int64_t *out) {
    const json_t *value = json_object_get(object, name);
    *out = json_integer_value(value);
    return json_is_integer(value) && *out >= 0 && *out <= most;
}

/* A server that tells no prefixes, or nonsense, has none. */
static void read_news(router_news *out, const json_t *report) {
    const json_t *text = json_object_get(report, "hashes");
    const size_t length = json_string_length(text);
    int64_t epoch, next;
    size_t n = 0;
    out->epoch = out->next = 0;
    out->n = 0;
    if (!read_number(report, "epoch", INT64_MAX, &epoch) ||
        !read_number(report, "next", INT64_MAX, &next) || !json_is_string(text) ||
        hd_base64_room(length) > sizeof out->hashes ||
        (length &&
         !hd_base64_decode((uint8_t *)out->hashes, &n, json_string_value(text), length)) ||
        n % sizeof(uint64_t) || n > ROUTER_NEWS * sizeof(uint64_t)) {
        return;
    }
    out->n = (int32_t)(n / sizeof(uint64_t));
    out->epoch = (uint64_t)epoch;
    out->next = (uint64_t)next;
}

bool router_load_parse(router_load *out, router_news *news, json_t **detail, const char *text,
                       size_t n) {
    enum { MOST_REQUESTS = 1 << 20 };
    const int64_t most_tokens = (int64_t)1 << 40;
    json_t *object = NULL;
    int64_t running, waiting, max_running, used, total;
    if (detail) *detail = NULL;
    if (n == 0 || hd_json_parse(&object, text, n, "the load", &(hd_err){0}) != HD_OK)
        return false;
    const json_t *load = json_array_get(json_object_get(object, "loads"), 0);
    const bool good = read_number(load, "num_running_reqs", MOST_REQUESTS, &running) &&
                      read_number(load, "num_waiting_reqs", MOST_REQUESTS, &waiting) &&
                      read_number(load, "max_running_requests", MOST_REQUESTS, &max_running) &&
                      read_number(load, "num_used_tokens", most_tokens, &used) &&
                      read_number(load, "num_total_tokens", most_tokens, &total) &&
                      total >= used;
    if (good) read_news(news, json_object_get(object, "prefixes"));
    if (good && detail) *detail = router_detail_of(load);
    json_decref(object);
    if (good) {
        *out = (router_load){(int32_t)running, (int32_t)waiting, (int32_t)max_running,
                             total - used};
    }
    return good;
}

/* ---- asking ---- */

static size_t on_bytes(char *bytes, size_t size, size_t n, void *user) {
    router_reports *a = user;
    return hd_bytes_append(&a->body, bytes, size * n, NULL) == HD_OK ? size * n : 0;
}

static void set_up(router_reports *a, bool up, const char *why) {
    router *r = a->router;
    router_peer *peer = &r->picture.peers[a->peer];
    if (peer->up == up) return;
    pthread_mutex_lock(&r->lock);
    peer->up = up;
    pthread_mutex_unlock(&r->lock);
    HD_LOG(up ? HD_LOG_INFO : HD_LOG_WARN, up ? "server_up" : "server_down",
           hd_log_text("server", peer->name), hd_log_text("why", why));
    if (!up) router_lose_peer(r, a->peer);
}

/* An epoch ends with the server's cache. What this router sent before it knew the first one stays. */
static void learn(router *r, router_reports *a) {
    const router_news *news = &r->news;
    if (a->epoch && news->epoch != a->epoch) {
        router_forget(&r->picture, a->peer);
        atomic_fetch_add(&r->forgotten, 1);
    }
    atomic_fetch_add(&r->learned, news->n);
    router_learn(&r->picture, a->peer, news->hashes, news->n);
    a->epoch = news->epoch;
    a->next = news->next;
}

static void on_report(router_transfer *t, CURLcode code) {
    router_reports *a = (router_reports *)t;
    router *r = a->router;
    router_load load;
    json_t *detail = NULL;
    long status = 0;
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    const bool good = code == CURLE_OK && status == 200 &&
                      router_load_parse(&load, &r->news, &detail, a->body.data, a->body.n);
    router_transfer_close(r, t);
    a->due_ns = hd_now_ns() + INTERVAL_MS * MS_NS;
    if (good) {
        pthread_mutex_lock(&r->lock);
        r->picture.peers[a->peer].load = load;
        router_detail_take(a, detail, hd_now_ns());
        learn(r, a);
        pthread_mutex_unlock(&r->lock);
        a->missed = 0;
        set_up(a, true, "it reports");
    } else if (code == CURLE_COULDNT_CONNECT || ++a->missed >= MOST_MISSED) {
        pthread_mutex_lock(&r->lock);
        router_detail_take(a, NULL, hd_now_ns()); /* it may be true no more */
        pthread_mutex_unlock(&r->lock);
        set_up(a, false,
               code == CURLE_OK ? "its report is refused or malformed"
                                : curl_easy_strerror(code));
    }
}

static void ask(router *r, router_reports *a) {
    router_transfer *t = &a->transfer;
    char key[600], path[100];
    a->body.n = 0;
    snprintf(path, sizeof path, "/v1/loads?include=core,disagg&prefixes=%llu.%llu",
             (unsigned long long)a->epoch, (unsigned long long)a->next);
    bool whole = router_transfer_open(t, r->picture.peers[a->peer].name, path);
    if (whole && r->options.key) {
        snprintf(key, sizeof key, "Bearer %s", r->options.key);
        whole = router_transfer_add_header(t, "Authorization", key);
    }
    if (whole) {
        curl_easy_setopt(t->easy, CURLOPT_TIMEOUT_MS, (long)TIMEOUT_MS);
        curl_easy_setopt(t->easy, CURLOPT_WRITEFUNCTION, on_bytes);
        curl_easy_setopt(t->easy, CURLOPT_WRITEDATA, a);
        whole = router_transfer_send(r, t);
    }
    if (whole) return;
    router_transfer_close(r, t);
    a->due_ns = hd_now_ns() + INTERVAL_MS * MS_NS;
}

/* Its requests have ended. */
static void remove_peer(router *r, router_reports *a) {
    HD_LOG(HD_LOG_INFO, "server_left", hd_log_text("server", r->picture.peers[a->peer].name));
    router_transfer_close(r, &a->transfer);
    pthread_mutex_lock(&r->lock);
    router_picture_remove(&r->picture, a->peer);
    json_decref(a->detail);
    a->detail = NULL;
    pthread_mutex_unlock(&r->lock);
    a->epoch = a->next = 0;
    a->missed = 0;
    a->due_ns = 0;
}

int64_t router_ask_due(router *r, int64_t now_ns) {
    int64_t due = now_ns + INTERVAL_MS * MS_NS;
    for (int32_t i = 0; i < r->picture.n; i++) {
        router_reports *a = &r->reports[i];
        if (!r->picture.peers[i].name[0]) continue;
        if (r->picture.peers[i].gone && r->picture.peers[i].inflight == 0) {
            remove_peer(r, a);
            continue;
        }
        if (!a->transfer.easy && a->due_ns <= now_ns) ask(r, a);
        if (!a->transfer.easy && a->due_ns < due) due = a->due_ns;
    }
    return due;
}

hd_status router_reports_open(router *r, hd_err *err) {
    if (r->options.key && strlen(r->options.key) > HD_KEY_MAX_BYTES) {
        return HD_FAIL(err, HD_EINVAL, "HADAL_API_KEY is longer than %d bytes",
                       HD_KEY_MAX_BYTES);
    }
    for (int32_t i = 0; i < ROUTER_MAX_PEERS; i++) {
        r->reports[i] = (router_reports){
            .transfer.on_done = on_report, .router = r, .peer = i, .body.max = MAX_BYTES};
    }
    return HD_OK;
}

void router_reports_close(router *r) {
    for (int32_t i = 0; i < ROUTER_MAX_PEERS; i++) {
        router_transfer_close(r, &r->reports[i].transfer);
        hd_bytes_deinit(&r->reports[i].body);
        json_decref(r->reports[i].detail);
    }
}
