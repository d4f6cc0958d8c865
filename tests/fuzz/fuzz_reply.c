/* fuzz_reply.c - any bytes as a reply: no fault, and the same events for two slicings.
 *
 * The first bytes of the input choose the options; after them it is a reply. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chat/reply_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { HEADER = 4, MAX_EVENTS_BYTES = 1 << 22 };

typedef struct heard {
    char *text;
    size_t n;
    int last; /* the kind of the last delta; -1 after another event */
    int32_t open, n_begun;
    char *args;
    size_t args_n;
} heard;

static void demand(int true_so, const char *what) {
    if (true_so) return;
    fprintf(stderr, "fuzz_reply: %s\n", what);
    abort();
}

static void add(heard *h, const void *bytes, size_t n) {
    demand(n < MAX_EVENTS_BYTES - h->n, "events beyond all measure");
    if (n) memcpy(h->text + h->n, bytes, n);
    h->n += n;
}

static void hear_end(heard *h, const hd_reply_event *e) {
    demand(h->open == e->call, "an end without a beginning");
    h->open = -1;
    if (e->end != HD_REPLY_COMPLETE) return;
    json_error_t why;
    json_t *args = json_loadb(h->args, h->args_n, JSON_ALLOW_NUL, &why);
    /* jansson refuses what JSON allows: lone surrogates and numbers beyond a double. */
    int refused = json_error_code(&why) == json_error_numeric_overflow ||
                  strstr(why.text, "surrogate") || strstr(why.text, "Unicode");
    demand(args ? json_is_object(args) : refused, "a complete call without an object");
    json_decref(args);
}

static void hear(void *user, const hd_reply_event *e) {
    heard *h = user;
    int delta = e->kind == HD_REPLY_REASONING || e->kind == HD_REPLY_CONTENT ||
                e->kind == HD_REPLY_ARGUMENTS;
    uint8_t tag[] = {0xff, (uint8_t)e->kind, (uint8_t)e->end, (uint8_t)e->note};
    if (e->kind == HD_REPLY_CALL_END) hear_end(h, e);
    if (e->kind == HD_REPLY_CONTENT) demand(h->open < 0, "content inside a call");
    if (e->kind == HD_REPLY_ARGUMENTS) demand(h->open == e->call, "arguments of no call");
    if (delta) demand(e->n > 0, "an empty delta");
    if (!delta || h->last != (int)e->kind) add(h, tag, sizeof tag);
    add(h, e->text, e->text ? e->n : 0);
    h->last = delta ? (int)e->kind : -1;
    if (e->kind == HD_REPLY_ARGUMENTS) {
        demand(e->n <= MAX_EVENTS_BYTES - h->args_n, "arguments beyond all measure");
        memcpy(h->args + h->args_n, e->text, e->n);
        h->args_n += e->n;
    }
    if (e->kind == HD_REPLY_CALL_BEGIN) {
        demand(h->open < 0 && e->call == h->n_begun, "calls out of order");
        h->open = h->n_begun++;
        h->args_n = 0;
    }
}

static hd_status parse(heard *h, const hd_reply_options *o, const uint8_t *text, size_t n,
                       size_t step, hd_finish_reason reason) {
    hd_reply *r;
    h->n = 0;
    h->last = h->open = -1;
    h->n_begun = 0;
    hd_status st = hd_reply_open(&r, o, hear, h, NULL);
    for (size_t at = 0; at < n && st == HD_OK; at += step) {
        st = hd_reply_feed(r, text + at, step < n - at ? step : n - at, false, NULL);
    }
    if (st == HD_OK) st = hd_reply_finish(r, reason, NULL);
    if (st == HD_OK) {
        demand(r->n <= n && (!r->n || !memcmp(r->raw, text, r->n)), "other raw bytes");
        demand(h->open < 0, "a call that never ends");
    }
    hd_reply_close(r);
    return st;
}

static void prepare(heard *h) {
    if (!h->text) h->text = malloc(MAX_EVENTS_BYTES);
    if (!h->args) h->args = malloc(MAX_EVENTS_BYTES);
    demand(h->text && h->args, "no memory");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const hd_reply_param params[] = {
        {"a", 1, false},
        {"b", 1, true }
    };
    static const hd_reply_tool tools[] = {
        {"run", 3, params, 2},
        {"now", 3, NULL,   0}
    };
    static heard one, two;
    if (n < HEADER || n > (1 << 16)) return 0;
    prepare(&one);
    prepare(&two);
    hd_reply_options o = {.format = (hd_reply_format)(data[0] % 6),
                          .starts_in_reasoning = data[1] & 1,
                          .thinking_off = data[1] & 2,
                          .parse_tools = !(data[1] & 4),
                          .unknown_as_text = data[1] & 8,
                          .whole_calls = data[1] & 16,
                          .strict = data[1] & 32,
                          .tools = tools,
                          .n_tools = data[1] & 64 ? 0 : 2,
                          .max_arguments = data[1] & 128 ? 40 : 0};
    hd_finish_reason reason = (hd_finish_reason)(HD_FINISH_STOP + data[2] % 3);
    size_t step = 1 + data[3] % 16;
    hd_status a = parse(&one, &o, data + HEADER, n - HEADER, n, reason);
    hd_status b = parse(&two, &o, data + HEADER, n - HEADER, step, reason);
    demand(a == b, "two slicings, two verdicts");
    demand(one.n == two.n && !memcmp(one.text, two.text, one.n), "two slicings, two replies");
    return 0;
}
