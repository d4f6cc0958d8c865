/* kept.c - /v1/responses/{id} and below: stored and background responses are retrieved,
 * followed as a stream, listed by their items, cancelled and deleted. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/background.h"
#include "api/endpoints.h"

enum { MOST_ITEMS = 100, ITEMS = 20 }; /* items per page of a list: maximum and default */

static void not_found(http_call *c) {
    http_error(c, 404, "not_found_error", "response_not_found", NULL,
               "there is no response of this id");
}

static void bad(http_call *c, const char *param, const char *must) {
    http_error(c, 400, "invalid_request_error", "invalid_value", param, "%s must be %s", param,
               must);
}

static void reply_text(http_call *c, api_text *out) {
    api_reply(c, "application/json", out);
}

/* ---- reading ---- */

static bool wants_stream(http_call *c) {
    const char *stream = http_query(c, "stream");
    return stream && strcmp(stream, "true") == 0;
}

/* starting_after is the number of the last event that the client has seen; the first event
 * has number 0. */
static void follow(http_call *c, const api_context *ctx, const char *id) {
    long after;
    if (!http_query_number(c, "starting_after", 0, LONG_MAX - 1, -1, &after)) {
        bad(c, "starting_after", "the number of an event");
        return;
    }
    const size_t seen = (size_t)after + 1; /* -1 becomes 0 */
    api_text events = {0};
    if (api_background_follow(ctx->background, id, http_salt(c), seen, c)) return;
    if (api_store_get_events(ctx->store, id, http_salt(c), &events) && !events.failed) {
        const size_t at = api_events_behind(&events, seen);
        events.n -= at;
        memmove(events.data, events.data + at, events.n);
        api_reply(c, "text/event-stream", &events);
    } else if (api_store_get(ctx->store, id, http_salt(c), NULL, NULL)) {
        http_error(c, 400, "invalid_request_error", "unsupported_parameter", "stream",
                   "only a response made with background and stream, whose events were kept, "
                   "can be streamed again");
    } else {
        not_found(c);
    }
    api_text_deinit(&events);
}

static void get_response(http_call *c, const api_context *ctx, const char *id) {
    api_text out = {0};
    if (ctx->background && wants_stream(c)) {
        follow(c, ctx, id);
    } else if (api_store_get(ctx->store, id, http_salt(c), &out, NULL)) {
        reply_text(c, &out);
    } else {
        not_found(c);
    }
}

/* ---- the input items of a response ---- */

static bool set(json_t *object, const char *key, json_t *value) {
    return json_object_set_new(object, key, value) == 0;
}

/* Content given as a string becomes one text part. */
static bool set_parts(json_t *item, json_t *text) {
    const char *role = json_string_value(json_object_get(item, "role"));
    const bool sent = role && strcmp(role, "assistant") == 0;
    json_t *part =
        json_pack("{s:s, s:O}", "type", sent ? "output_text" : "input_text", "text", text);
    const bool ok = !sent || set(part, "annotations", json_array());
    return set(item, "content", json_pack("[o]", part)) && ok;
}

/* Returns the item with its type and id, which it may lack in the request. NULL: no memory. */
static json_t *whole_item(json_t *item, const char *response, size_t i) {
    char id[API_MAX_ID + 64];
    json_t *copy = json_copy(item), *content = json_object_get(copy, "content");
    bool ok = copy != NULL;
    snprintf(id, sizeof id, "msg_%s_%zu", response, i);
    if (ok && !json_object_get(copy, "type")) ok = set(copy, "type", json_string("message"));
    if (ok && !json_object_get(copy, "id")) ok = set(copy, "id", json_string(id));
    if (ok && json_is_string(content)) ok = set_parts(copy, content);
    if (ok) return copy;
    json_decref(copy);
    return NULL;
}

typedef struct page {
    bool ascending;
    long limit;
    const char *after;
} page;

static bool read_page(http_call *c, page *p) {
    const char *order = http_query(c, "order");
    p->ascending = order && strcmp(order, "asc") == 0;
    p->after = http_query(c, "after");
    if (order && !p->ascending && strcmp(order, "desc") != 0) {
        bad(c, "order", "asc or desc");
    } else if (!http_query_number(c, "limit", 1, MOST_ITEMS, ITEMS, &p->limit)) {
        bad(c, "limit", "1 to 100");
    } else {
        return true;
    }
    return false;
}

/* The input items are the stored items without the response's own output at their end. NULL:
 * no memory. */
static json_t *list_items(const page *p, json_t *all, size_t n, const char *response) {
    json_t *data = json_array();
    bool begun = !p->after, more = false, ok = data != NULL;
    for (size_t k = 0; ok && !more && k < n; k++) {
        const size_t i = p->ascending ? k : n - 1 - k;
        json_t *item = whole_item(json_array_get(all, i), response, i);
        const char *id = json_string_value(json_object_get(item, "id"));
        ok = item != NULL;
        more = begun && json_array_size(data) == (size_t)p->limit;
        if (begun && !more) ok = json_array_append(data, item) == 0;
        if (!begun && id && strcmp(id, p->after) == 0) begun = true;
        json_decref(item);
    }
    if (!ok) {
        json_decref(data);
        return NULL;
    }
    json_t *first = json_object_get(json_array_get(data, 0), "id");
    json_t *last = json_object_get(json_array_get(data, json_array_size(data) - 1), "id");
    return json_pack("{s:s, s:o, s:b, s:O?, s:O?}", "object", "list", "data", data, "has_more",
                     more, "first_id", first, "last_id", last);
}

/* Replies with the items of the stored response. */
static void reply_items(http_call *c, const page *p, const char *id, api_text *object,
                        api_text *items) {
    api_text out = {0};
    json_t *response = api_parse(object), *all = items->n ? api_parse(items) : json_array();
    if (response && all) {
        const size_t n_out =
            items->n ? json_array_size(json_object_get(response, "output")) : 0;
        json_t *list = list_items(p, all, json_array_size(all) - n_out, id);
        if (list) api_put_json(&out, list);
        out.failed = out.failed || !list;
        json_decref(list);
    } else {
        out.failed = true;
    }
    json_decref(all);
    json_decref(response);
    reply_text(c, &out);
}

static void get_items(http_call *c, const api_context *ctx, const char *id) {
    api_text object = {0}, items = {0};
    page p;
    if (!read_page(c, &p)) return;
    if (api_store_get(ctx->store, id, http_salt(c), &object, &items)) {
        reply_items(c, &p, id, &object, &items);
    } else {
        not_found(c);
    }
    api_text_deinit(&object);
    api_text_deinit(&items);
}

/* ---- cancelling and deleting ---- */

static void cancel(http_call *c, const api_context *ctx, const char *id) {
    api_text object = {0}, out = {0};
    const uint64_t salt = http_salt(c);
    const bool runs =
        ctx->background && api_background_cancel(ctx->background, id, salt, false);
    if (!api_store_get(ctx->store, id, salt, &object, NULL)) {
        not_found(c);
        return;
    }
    json_t *o = api_parse(&object);
    api_text_deinit(&object);
    if (o && !json_is_true(json_object_get(o, "background"))) {
        http_error(c, 400, "invalid_request_error", "invalid_value", NULL,
                   "only a response in the background can be cancelled");
        json_decref(o);
        return;
    }
    if (runs && o && !set(o, "status", json_string("cancelled"))) out.failed = true;
    if (o) api_put_json(&out, o);
    out.failed = out.failed || !o;
    json_decref(o);
    reply_text(c, &out);
}

static void forget(http_call *c, const api_context *ctx, const char *id) {
    api_text out = {0};
    const uint64_t salt = http_salt(c);
    const bool ran = ctx->background && api_background_cancel(ctx->background, id, salt, true);
    if (!(ctx->store && api_store_remove(ctx->store, id, salt)) && !ran) {
        not_found(c);
        return;
    }
    api_write(&out, "{'id':%s,'object':'response.deleted','deleted':%i}", id, true);
    reply_text(c, &out);
}

/* ---- the handler ---- */

void api_one_response(http_call *c, void *server) {
    const api_context *ctx = server;
    const char *tail = http_path_tail(c), *method = http_method(c);
    const size_t n = strcspn(tail, "/");
    char id[API_MAX_ID + 24];
    if (n >= sizeof id) {
        not_found(c);
        return;
    }
    snprintf(id, sizeof id, "%.*s", (int)n, tail);
    const char *rest = tail + n;
    if (strcmp(method, "DELETE") == 0 && !*rest) {
        forget(c, ctx, id);
    } else if (strcmp(method, "POST") == 0 && strcmp(rest, "/cancel") == 0) {
        cancel(c, ctx, id);
    } else if (strcmp(method, "POST") != 0 && strcmp(rest, "/input_items") == 0) {
        get_items(c, ctx, id);
    } else if (strcmp(method, "POST") != 0 && strcmp(method, "DELETE") != 0 && !*rest) {
        get_response(c, ctx, id);
    } else {
        http_error(c, 404, "not_found_error", "not_found", NULL,
                   "there is nothing at this path");
    }
}
