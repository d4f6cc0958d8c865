/* wire.c - the requests of a load as transfers of libcurl: what they have in common. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/client_internal.h"

static bool add_header(wire *w, const char *line) {
    struct curl_slist *more = curl_slist_append(w->headers, line);
    if (more) w->headers = more;
    return more != NULL;
}

static bool add_key(wire *w, const char *key) {
    static const char name[] = "Authorization: Bearer ";
    const size_t n = sizeof name + strlen(key);
    char *line = malloc(n);
    if (!line) return false;
    snprintf(line, n, "%s%s", name, key);
    const bool added = add_header(w, line);
    free(line);
    return added;
}

static bool open_parts(wire *w, const client_server *s, const char *path) {
    const size_t n = strlen(s->base) + strlen(path) + 1;
    w->url = malloc(n);
    if (!w->url) return false;
    snprintf(w->url, n, "%s%s", s->base, path);
    return add_header(w, "Content-Type: application/json") &&
           add_header(w, "User-Agent: hadal/" HD_VERSION) && add_header(w, "Expect:") &&
           (!s->key || add_key(w, s->key));
}

hd_status wire_open(wire *w, const client_server *s, const char *path, hd_err *err) {
    *w = (wire){.url = NULL};
    HD_TRY(client_multi_open(&w->multi, err));
    return open_parts(w, s, path) ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for requests");
}

void wire_close(wire *w) {
    client_multi_close(&w->multi);
    curl_slist_free_all(w->headers);
    free(w->url);
    w->headers = NULL;
    w->url = NULL;
}

CURL *wire_handle(const wire *w, const client_server *s) {
    CURL *easy = curl_easy_init();
    if (!easy) return NULL;
    curl_easy_setopt(easy, CURLOPT_URL, w->url);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, w->headers);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)(s->timeout_s * 1000));
    curl_easy_setopt(easy, CURLOPT_PROXY, ""); /* the server itself is measured */
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    return easy;
}
