/* body.c - a conversation as the body of a request, and how an answer is added to it. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "client/client_internal.h"

static bool add_message(dialog *c, const char *role, json_t *content, json_t *reasoning) {
    json_t *message = json_pack("{s:s, s:o}", "role", role, "content", content);
    if (message && reasoning) json_object_set_new(message, "reasoning_content", reasoning);
    return json_array_append_new(c->prompt, message) == 0;
}

/* Completions have no roles: one text grows. */
static bool add_text(dialog *c, const char *text, size_t n) {
    const size_t before = json_string_length(c->prompt);
    char *whole = malloc(before + n + 1);
    if (!whole) return false;
    if (before) memcpy(whole, json_string_value(c->prompt), before);
    memcpy(whole + before, text, n);
    json_t *grown = json_stringn(whole, before + n);
    free(whole);
    if (!grown) return false;
    json_decref(c->prompt);
    c->prompt = grown;
    return true;
}

bool dialog_ask(dialog *c, const client_server *s, const client_load *load, int64_t index,
                int32_t turn) {
    const int64_t tokens = plan_input(load, index, turn);
    if (load->token_ids) {
        c->prompt = plan_ids(load, index, tokens);
        return c->prompt != NULL;
    }
    char *text = plan_text(load, index, turn, tokens);
    if (!text) return false;
    if (s->chat && !c->prompt) c->prompt = json_array();
    const bool added = s->chat ? add_message(c, "user", json_string(text), NULL)
                               : add_text(c, text, strlen(text));
    free(text);
    return added;
}

bool dialog_answer(dialog *c, const client_server *s, const client_events *e) {
    if (!s->chat) return e->content.n == 0 || add_text(c, e->content.at, e->content.n);
    json_t *content = json_stringn(e->content.n ? e->content.at : "", e->content.n);
    json_t *reasoning = e->reasoning.n ? json_stringn(e->reasoning.at, e->reasoning.n) : NULL;
    return add_message(c, "assistant", content, reasoning);
}

void dialog_deinit(dialog *c) {
    json_decref(c->prompt);
    c->prompt = NULL;
}

char *body_write(const client_server *s, const client_load *load, json_t *prompt,
                 int64_t max_tokens, bool stream) {
    json_t *body =
        json_pack("{s:s, s:O, s:I, s:f, s:b}", "model", s->model,
                  s->chat ? "messages" : "prompt", prompt, "max_tokens", (json_int_t)max_tokens,
                  "temperature", load->temperature, "stream", stream);
    bool whole = body != NULL;
    if (whole && stream) {
        whole = json_object_set_new(body, "stream_options",
                                    json_pack("{s:b}", "include_usage", 1)) == 0;
    }
    if (whole && load->ignore_eos) {
        whole = json_object_set_new(body, "ignore_eos", json_true()) == 0;
    }
    if (whole && load->extra) {
        json_t *extra = json_copy((json_t *)(uintptr_t)load->extra);
        whole = json_object_update(body, extra) == 0;
        json_decref(extra);
    }
    char *text = whole ? hd_json_write(body, JSON_COMPACT) : NULL;
    json_decref(body);
    return text;
}
