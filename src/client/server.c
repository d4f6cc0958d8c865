/* server.c - what has to be known of a server before a load: its address, its model, how it counts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "client/client_internal.h"

enum { MAX_REPLY = 4 << 20 };

/* ---- the address ---- */

static char *base_of(const char *url) {
    size_t n = strlen(url);
    while (n && url[n - 1] == '/') n--;
    const bool has = n > 3 && memcmp(url + n - 3, "/v1", 3) == 0;
    char *base = malloc(n + sizeof "/v1");
    if (base) snprintf(base, n + sizeof "/v1", "%.*s%s", (int)n, url, has ? "" : "/v1");
    return base;
}

static hd_status check_url(const char *url, hd_err *err) {
    CURLU *parts = curl_url();
    char *scheme = NULL, *query = NULL, *user = NULL;
    const CURLUcode code = curl_url_set(parts, CURLUPART_URL, url, 0);
    hd_status st = HD_OK;
    if (code == CURLUE_OK) {
        curl_url_get(parts, CURLUPART_SCHEME, &scheme, 0);
        curl_url_get(parts, CURLUPART_QUERY, &query, 0);
        curl_url_get(parts, CURLUPART_USER, &user, 0);
    }
    if (!scheme || (strcmp(scheme, "http") != 0 && strcmp(scheme, "https") != 0)) {
        st = HD_FAIL(err, HD_EINVAL, "'%s' is no address like http://127.0.0.1:30000", url);
    } else if (query || user) {
        st = HD_FAIL(err, HD_EINVAL, "the address must have no %s",
                     user ? "user name; a key is taken from HADAL_API_KEY or OPENAI_API_KEY"
                          : "query");
    }
    curl_free(scheme);
    curl_free(query);
    curl_free(user);
    curl_url_cleanup(parts);
    return st;
}

/* ---- one request and its whole reply ---- */

static size_t on_reply(char *bytes, size_t size, size_t n, void *user) {
    client_text *reply = user;
    n *= size;
    return reply->n + n <= MAX_REPLY && client_text_add(reply, bytes, n) ? n : 0;
}

void client_name_refusal(client_error *out, long status, const char *body, size_t n) {
    json_t *reply = hd_json_read(body, n, 0, NULL);
    const json_t *error = json_object_get(reply, "error");
    if (!json_is_object(error)) error = reply;
    const char *code = json_string_value(json_object_get(error, "code"));
    const char *type = json_string_value(json_object_get(error, "type"));
    const char *message = json_string_value(json_object_get(error, "message"));
    if (!code) code = type ? type : "";
    char plain[64];
    client_copy_text(plain, sizeof plain, code);
    snprintf(out->name, sizeof out->name, "HTTP %ld%s%s", status, *plain ? " " : "", plain);
    client_copy_text(out->sample, sizeof out->sample, message ? message : "");
    json_decref(reply);
}

/* body NULL: GET. *out is the JSON of a reply of 200. *status: of the reply, 0 without one. */
static hd_status call(json_t **out, long *status, const client_server *s, const char *path,
                      const char *body, hd_err *err) {
    wire w;
    client_text reply = {0};
    hd_status st = wire_open(&w, s, path, err);
    CURL *easy = st == HD_OK ? wire_handle(&w, s) : NULL;
    *status = 0;
    if (st == HD_OK && !easy) st = HD_FAIL(err, HD_ENOMEM, "no memory for a request");
    if (st == HD_OK) {
        if (body) curl_easy_setopt(easy, CURLOPT_POSTFIELDS, body);
        curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_reply);
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, &reply);
        const CURLcode code = curl_easy_perform(easy);
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, status);
        if (code != CURLE_OK) {
            st = HD_FAIL(err, HD_EIO, "%s: %s", w.url, curl_easy_strerror(code));
        } else if (*status != 200) {
            client_error e = {0};
            client_name_refusal(&e, *status, reply.at, reply.n);
            st = HD_FAIL(err, HD_EIO, "%s: %s%s%s", w.url, e.name, *e.sample ? ": " : "",
                         e.sample);
        } else if (!(*out = hd_json_read(reply.at ? reply.at : "", reply.n, 0, NULL))) {
            st = HD_FAIL(err, HD_EFORMAT, "%s: the reply is no JSON", w.url);
        }
    }
    curl_easy_cleanup(easy);
    free(reply.at);
    wire_close(&w);
    return st;
}

static hd_status find_model(client_server *s, hd_err *err) {
    json_t *list = NULL;
    long status;
    HD_TRY(call(&list, &status, s, "/models", NULL, err));
    const json_t *first = json_array_get(json_object_get(list, "data"), 0);
    const char *name = json_string_value(json_object_get(first, "id"));
    s->model = name ? strdup(name) : NULL;
    json_decref(list);
    if (name && !s->model) return HD_FAIL(err, HD_ENOMEM, "no memory for a name");
    return name ? HD_OK : HD_FAIL(err, HD_EFORMAT, "the server lists no model; see --model");
}

hd_status client_server_open(client_server *out, const char *url, const char *key,
                             const char *model, bool chat, double timeout_s, hd_err *err) {
    *out = (client_server){.chat = chat, .timeout_s = timeout_s};
    HD_TRY(check_url(url, err));
    out->base = base_of(url);
    out->key = key && *key ? strdup(key) : NULL;
    out->model = model ? strdup(model) : NULL;
    if (!out->base || (key && *key && !out->key) || (model && !out->model)) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for an address");
    }
    if (out->key && strpbrk(out->key, "\r\n")) {
        return HD_FAIL(err, HD_EINVAL, "the key has a line break");
    }
    return model ? HD_OK : find_model(out, err);
}

void client_server_deinit(client_server *s) {
    free(s->base);
    free(s->model);
    free(s->key);
    *s = (client_server){0};
}

/* ---- tokens of words ---- */

/* *tokens: of a prompt of n words; 0 where the server does not say. */
static hd_status prompt_tokens(double *tokens, long *status, const client_server *s,
                               const client_load *load, int64_t n, hd_err *err) {
    char *text = plan_sample(load, n), *body = NULL;
    json_t *prompt = NULL, *reply = NULL;
    if (text && s->chat) {
        prompt = json_pack("[{s:s, s:s}]", "role", "user", "content", text);
    } else if (text) {
        prompt = json_string(text);
    }
    if (prompt) body = body_write(s, load, prompt, 1, false);
    hd_status st = body ? call(&reply, status, s,
                               s->chat ? "/chat/completions" : "/completions", body, err)
                        : HD_FAIL(err, HD_ENOMEM, "no memory for a request");
    const json_t *usage = json_object_get(reply, "usage");
    *tokens = json_number_value(json_object_get(usage, "prompt_tokens"));
    json_decref(reply);
    json_decref(prompt);
    free(body);
    free(text);
    return st;
}

hd_status client_measure(const client_server *s, client_load *load, char why_not[200],
                         hd_err *err) {
    enum { FEW = 8, MANY = 136 };
    double few = 0, many = 0;
    long status = 0;
    hd_err first = {0};
    why_not[0] = '\0';
    hd_status st = prompt_tokens(&few, &status, s, load, FEW, &first);
    if (st != HD_OK && load->ignore_eos && status / 100 == 4) {
        load->ignore_eos = false;
        st = prompt_tokens(&few, &status, s, load, FEW, err);
        if (st == HD_OK) snprintf(why_not, 200, "%.199s", first.msg);
    } else if (st != HD_OK && err) {
        *err = first;
    }
    if (st == HD_OK) st = prompt_tokens(&many, &status, s, load, MANY, err);
    if (st != HD_OK) return st;
    load->tokens_per_word = many > few ? (many - few) / (MANY - FEW) : 1;
    load->template_tokens = many > few ? few - FEW * load->tokens_per_word : 0;
    return HD_OK;
}
