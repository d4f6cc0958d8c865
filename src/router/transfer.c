/* transfer.c - one request of the router to a server. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"

enum { CONNECT_MS = 1000, KEEP_ALIVE_S = 5 };

bool router_transfer_open(router_transfer *t, const char *peer, const char *path) {
    const size_t n = sizeof "http://" + strlen(peer) + strlen(path);
    char *url = malloc(n);
    t->headers = NULL;
    t->easy = url ? curl_easy_init() : NULL;
    if (!t->easy) {
        free(url);
        return false;
    }
    snprintf(url, n, "http://%s%s", peer, path);
    const bool set = curl_easy_setopt(t->easy, CURLOPT_URL, url) == CURLE_OK;
    free(url);
    curl_easy_setopt(t->easy, CURLOPT_PRIVATE, t);
    curl_easy_setopt(t->easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(t->easy, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(t->easy, CURLOPT_PROXY, "");
    curl_easy_setopt(t->easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(t->easy, CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_MS);
    curl_easy_setopt(t->easy, CURLOPT_TCP_KEEPALIVE, 1L);
    curl_easy_setopt(t->easy, CURLOPT_TCP_KEEPIDLE, (long)KEEP_ALIVE_S);
    curl_easy_setopt(t->easy, CURLOPT_TCP_KEEPINTVL, (long)KEEP_ALIVE_S);
    return set;
}

bool router_transfer_add_header(router_transfer *t, const char *name, const char *value) {
    const size_t n = strlen(name) + strlen(value) + 3;
    char *line = malloc(n);
    if (!line) return false;
    snprintf(line, n, *value ? "%s: %s" : "%s;", name, value); /* "name;": an empty value */
    struct curl_slist *more = curl_slist_append(t->headers, line);
    free(line);
    if (more) t->headers = more;
    return more != NULL;
}

bool router_transfer_send(router *r, router_transfer *t) {
    struct curl_slist *more = curl_slist_append(t->headers, "Expect:");
    if (!more) return false;
    t->headers = more;
    curl_easy_setopt(t->easy, CURLOPT_HTTPHEADER, t->headers);
    return curl_multi_add_handle(r->multi.multi, t->easy) == CURLM_OK;
}

void router_transfer_close(router *r, router_transfer *t) {
    if (t->easy) {
        curl_multi_remove_handle(r->multi.multi, t->easy);
        curl_easy_cleanup(t->easy);
    }
    curl_slist_free_all(t->headers);
    t->easy = NULL;
    t->headers = NULL;
}
