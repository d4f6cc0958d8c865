/* events.c - see events.h. */
#include "client/events.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"

enum { MAX_LINE = 16 << 20 };

bool client_text_add(client_text *t, const char *bytes, size_t n) {
    if (n > t->cap - t->n) {
        size_t cap = t->cap ? t->cap : 256;
        while (cap - t->n < n) cap *= 2;
        char *grown = realloc(t->at, cap);
        if (!grown) return false;
        t->at = grown;
        t->cap = cap;
    }
    if (n) memcpy(t->at + t->n, bytes, n);
    t->n += n;
    return true;
}

void client_copy_text(char *out, size_t size, const char *text) {
    size_t n = 0;
    for (; text[n] && n < size - 1; n++) {
        const unsigned char c = (unsigned char)text[n];
        out[n] = c < ' ' || c == 0x7f ? ' ' : (char)c;
    }
    while (n && text[n] && ((unsigned char)text[n] & 0xc0) == 0x80) n--;
    out[n] = '\0';
}

static void fail(client_events *e, const char *text) {
    if (e->failed) return;
    e->failed = true;
    client_copy_text(e->error, sizeof e->error, text);
}

/* ---- one chunk ---- */

/* Whether value is text; it is kept in to (NULL: it is not). */
static bool take_text(client_events *e, const json_t *value, client_text *to) {
    const size_t n = json_string_length(value);
    if (n && e->keep && to && !client_text_add(to, json_string_value(value), n)) {
        e->no_memory = true;
    }
    return n > 0;
}

static bool take_calls(client_events *e, const json_t *calls) {
    bool any = false;
    size_t i;
    json_t *call;
    json_array_foreach(calls, i, call) {
        const json_t *function = json_object_get(call, "function");
        any |= take_text(e, json_object_get(function, "name"), NULL);
        any |= take_text(e, json_object_get(function, "arguments"), NULL);
    }
    return any;
}

/* Of the first choice: a load asks for one. */
static bool take_choice(client_events *e, const json_t *choice) {
    const json_t *delta = json_object_get(choice, "delta");
    bool any = take_text(e, json_object_get(choice, "text"), &e->content);
    any |= take_text(e, json_object_get(delta, "content"), &e->content);
    any |= take_text(e, json_object_get(delta, "reasoning_content"), &e->reasoning);
    any |= take_text(e, json_object_get(delta, "reasoning"), &e->reasoning);
    any |= take_calls(e, json_object_get(delta, "tool_calls"));
    e->finished |= json_is_string(json_object_get(choice, "finish_reason"));
    return any;
}

static bool take_count(int64_t *to, const json_t *value) {
    const json_int_t n = json_integer_value(value);
    if (!json_is_integer(value) || n < 0 || n > INT32_MAX) return false;
    *to = n;
    return true;
}

static void take_usage(client_events *e, const json_t *usage) {
    e->has_usage |=
        take_count(&e->prompt_tokens, json_object_get(usage, "prompt_tokens")) &&
        take_count(&e->completion_tokens, json_object_get(usage, "completion_tokens"));
    const json_t *details = json_object_get(usage, "prompt_tokens_details");
    e->has_cached |= take_count(&e->cached_tokens, json_object_get(details, "cached_tokens"));
}

static bool take_chunk(client_events *e, const char *text, size_t n) {
    json_t *chunk = hd_json_read(text, n, 0, NULL);
    const json_t *error = json_object_get(chunk, "error");
    bool any = false;
    if (!json_is_object(chunk)) {
        fail(e, "an event is no JSON object");
    } else if (json_is_object(error) || json_is_string(error)) {
        const char *message = json_string_value(json_object_get(error, "message"));
        if (!message) message = json_string_value(error);
        fail(e, message ? message : "an error without a message");
    } else {
        any = take_choice(e, json_array_get(json_object_get(chunk, "choices"), 0));
        take_usage(e, json_object_get(chunk, "usage"));
    }
    json_decref(chunk);
    return any;
}

/* ---- lines ---- */

static bool take_line(client_events *e, const char *line, size_t n) {
    if (n && line[n - 1] == '\r') n--;
    if (n < 5 || memcmp(line, "data:", 5) != 0 || e->done) return false;
    line += 5;
    n -= 5;
    if (n && *line == ' ') {
        line++;
        n--;
    }
    if (n == 6 && memcmp(line, "[DONE]", 6) == 0) {
        e->done = true;
        return false;
    }
    if (!take_chunk(e, line, n)) return false;
    e->with_text++;
    return true;
}

int64_t client_events_feed(client_events *e, const char *bytes, size_t n) {
    int64_t with_text = 0;
    while (n && !e->failed && !e->no_memory) {
        const char *end = memchr(bytes, '\n', n);
        const size_t piece = end ? (size_t)(end - bytes) : n;
        if (e->line.n + piece > MAX_LINE) {
            fail(e, "an event is longer than 16 MiB");
            break;
        }
        if (end && e->line.n == 0) { /* a whole line: no copy */
            with_text += take_line(e, bytes, piece);
        } else if (!client_text_add(&e->line, bytes, piece)) {
            e->no_memory = true;
        } else if (end) {
            with_text += take_line(e, e->line.at, e->line.n);
            e->line.n = 0;
        }
        bytes += piece + (end != NULL);
        n -= piece + (end != NULL);
    }
    return with_text;
}

void client_events_deinit(client_events *e) {
    free(e->line.at);
    free(e->content.at);
    free(e->reasoning.at);
    *e = (client_events){0};
}
