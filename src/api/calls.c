/* calls.c - see calls.h. What is kept of a call is compared with what comes back as text,
 * and where that differs as JSON: some interfaces carry arguments as an object. */
#include "api/calls.h"

#include <string.h>

#include "api/store.h"

void api_calls_collect(api_choice *c, const hd_part *p) {
    if (p->kind == HD_PART_CALL) {
        api_comma(&c->calls);
        api_puts(&c->calls, "[");
        api_put_string(&c->calls, p->text, p->n);
        api_puts(&c->calls, ",\"");
    } else if (p->kind == HD_PART_ARGUMENTS) {
        api_put_escaped(&c->calls, p->text, p->n);
    } else {
        api_puts(&c->calls, "\"]");
    }
}

void api_calls_keep(api_job *job, api_choice *c, const hd_event *e) {
    api_text tokens = {0}, calls = {0};
    char id[40];
    if (!job->ctx->calls || !e->call_tokens || c->calls_left_out) return;
    api_put(&tokens, (const char *)e->call_tokens, e->n_call_tokens * sizeof *e->call_tokens);
    api_puts(&calls, "[");
    api_put(&calls, c->calls.data, c->calls.n);
    api_puts(&calls, "]");
    api_call_id(job, c, 0, "", id);
    calls.failed = calls.failed || c->calls.failed;
    api_store_put(job->ctx->calls, id, http_salt(job->call), &tokens, &calls);
    api_text_deinit(&tokens);
    api_text_deinit(&calls);
}

/* ---- coming back ---- */

static json_t *parse(const char *text, size_t n) {
    return json_loadb(text, n, JSON_REJECT_DUPLICATES, NULL);
}

static bool same_arguments(const hd_chat_call *call, const json_t *kept) {
    const char *text = json_string_value(kept);
    const size_t n = json_string_length(kept);
    if (!call->object && call->arguments.n == n && memcmp(call->arguments.data, text, n) == 0) {
        return true;
    }
    json_t *was = parse(text, n);
    json_t *is = call->object ? json_incref(call->object)
                              : parse(call->arguments.data, call->arguments.n);
    const bool same = was && is && json_equal(was, is);
    json_decref(was);
    json_decref(is);
    return same;
}

static bool unchanged(const hd_chat_message *m, const json_t *kept) {
    if (json_array_size(kept) != (size_t)m->n_calls) return false;
    for (int32_t i = 0; i < m->n_calls; i++) {
        const hd_chat_call *call = &m->calls[i];
        const json_t *pair = json_array_get(kept, (size_t)i), *name = json_array_get(pair, 0);
        const bool same = json_string_length(name) == call->name.n &&
                          memcmp(json_string_value(name), call->name.data, call->name.n) == 0;
        if (!same || !same_arguments(call, json_array_get(pair, 1))) return false;
    }
    return true;
}

/* The part of a call's id behind its prefix, which api_call_id() made of hexadecimal digits. */
static bool bare_id(hd_chat_text id, char out[40]) {
    const char *mark = memchr(id.data, '_', id.n);
    const size_t n = mark ? id.n - (size_t)(mark + 1 - id.data) : 0;
    if (n == 0 || n >= 40) return false;
    memcpy(out, mark + 1, n);
    out[n] = '\0';
    return true;
}

static bool take(api_request *r, hd_chat_message *m) {
    api_text tokens = {0}, calls = {0};
    char id[40];
    if (!bare_id(m->calls[0].id, id) ||
        !api_store_get(r->ctx->calls, id, http_salt(r->call), &tokens, &calls)) {
        return true;
    }
    const bool whole = !tokens.failed && !calls.failed;
    json_t *kept = whole ? parse(calls.data, calls.n) : NULL;
    bool ok = true;
    if (kept && unchanged(m, kept)) {
        const size_t n = tokens.n / sizeof *m->call_tokens;
        int32_t *copy = api_keep(r, n, sizeof *copy);
        ok = copy != NULL;
        if (ok) memcpy(copy, tokens.data, tokens.n);
        m->call_tokens = copy;
        m->n_call_tokens = ok ? n : 0;
    }
    json_decref(kept);
    api_text_deinit(&tokens);
    api_text_deinit(&calls);
    return ok;
}

bool api_calls_take(api_request *r) {
    for (int32_t i = 0; i < r->conversation.n; i++) {
        hd_chat_message *m = &r->conversation.messages[i];
        if (m->role == HD_CHAT_ASSISTANT && m->n_calls > 0 && !take(r, m)) return false;
    }
    return true;
}
