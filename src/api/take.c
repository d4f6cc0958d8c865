/* take.c - converts parsed parameters to the engine request: stop strings, response format,
 * thinking, messages, tools, token ids. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/request.h"
#include "api/text.h"

/* an over-long text is tokenized up to this many bytes, for the message */
enum { COUNTED_BYTES = 1 << 20 };

/* ---- sampling ---- */

static bool take_stop(api_request *r) {
    const bool one = json_is_string(r->stop);
    const size_t n = one ? 1 : json_array_size(r->stop);
    if (n > HD_MAX_STOP_STRINGS) {
        return api_refuse(r, "invalid_value", "stop", "stop has %zu strings; at most %d", n,
                          HD_MAX_STOP_STRINGS);
    }
    const char **list = api_keep(r, n, sizeof *list);
    if (!list) return false;
    for (size_t i = 0; i < n; i++) {
        const json_t *v = one ? r->stop : json_array_get(r->stop, i);
        list[i] = json_string_value(v);
        const size_t bytes = json_string_length(v);
        if (bytes < 1 || bytes > HD_MAX_STOP_BYTES || strlen(list[i]) != bytes) {
            return api_refuse(r, "invalid_value", "stop",
                              "stop[%zu] must have 1 to %d bytes and no U+0000", i,
                              HD_MAX_STOP_BYTES);
        }
    }
    r->g.stop = list;
    r->g.n_stop = n;
    return true;
}

bool api_take_ids(api_request *r, json_t *list, const char *param, int32_t **ids, size_t *n) {
    const int32_t vocab = hd_engine_spec(r->ctx->engine)->vocab;
    *n = json_array_size(list);
    *ids = api_keep(r, *n, sizeof **ids);
    if (!*ids) return false;
    for (size_t i = 0; i < *n; i++) {
        const json_t *v = json_array_get(list, i);
        const double d = json_is_number(v) ? json_number_value(v) : -0.5;
        if (d >= 0 && d < vocab && d == floor(d)) {
            (*ids)[i] = (int32_t)d;
            continue;
        }
        return api_refuse(r, "invalid_value", param,
                          "%s[%zu] must be a token id, an integer from 0 to %d", param, i,
                          vocab - 1);
    }
    return true;
}

static bool take_stop_ids(api_request *r) {
    int32_t *ids;
    if (json_array_size(r->stop_ids) > HD_MAX_STOP_TOKENS) {
        return api_refuse(r, "invalid_value", "stop_token_ids",
                          "stop_token_ids has %zu ids; at most %d",
                          json_array_size(r->stop_ids), HD_MAX_STOP_TOKENS);
    }
    if (!api_take_ids(r, r->stop_ids, "stop_token_ids", &ids, &r->g.n_stop_tokens))
        return false;
    r->g.stop_tokens = ids;
    return true;
}

/* Decimal digits without leading zeros. */
static bool read_token(const char *key, int32_t vocab, int32_t *out) {
    const size_t n = strlen(key);
    if (n < 1 || n > 9 || strspn(key, "0123456789") != n || (n > 1 && key[0] == '0')) {
        return false;
    }
    *out = (int32_t)strtol(key, NULL, 10);
    return *out < vocab;
}

static bool take_bias(api_request *r) {
    const int32_t vocab = hd_engine_spec(r->ctx->engine)->vocab;
    const size_t n = json_object_size(r->bias);
    const char *key;
    json_t *value;
    if (n > HD_MAX_BIAS) {
        return api_refuse(r, "invalid_value", "logit_bias",
                          "logit_bias has %zu tokens; at most %d", n, HD_MAX_BIAS);
    }
    hd_logit_bias *list = api_keep(r, n, sizeof *list);
    if (!list) return false;
    size_t i = 0;
    json_object_foreach(r->bias, key, value) {
        const double d = json_is_number(value) ? json_number_value(value) : 1000;
        if (!read_token(key, vocab, &list[i].token)) {
            return api_refuse(r, "invalid_value", "logit_bias",
                              "a key of logit_bias must be a token id from 0 to %d", vocab - 1);
        }
        if (d < -100 || d > 100) {
            return api_refuse(r, "invalid_value", "logit_bias",
                              "logit_bias of token %s must be a number from -100 to 100", key);
        }
        list[i++].value = (float)d;
    }
    r->g.bias = list;
    r->g.n_bias = n;
    return true;
}

static bool take_token_limits(api_request *r) {
    const int32_t a = r->max_tokens, b = r->max_completion_tokens;
    if (a >= 0 && b >= 0 && a != b) {
        return api_refuse(r, "invalid_value", "max_completion_tokens",
                          "max_tokens is %d and max_completion_tokens is %d; give one", a, b);
    }
    r->g.max_tokens = b >= 0 ? b : a >= 0 ? a : 0;
    r->g.min_tokens = r->min_tokens;
    if (r->g.max_tokens > 0 && r->min_tokens > r->g.max_tokens) {
        return api_refuse(r, "invalid_value", "min_tokens",
                          "min_tokens is %d and max_tokens only %d", r->min_tokens,
                          r->g.max_tokens);
    }
    return true;
}

bool api_take_sampling(api_request *r) {
    if (r->g.top_k < 0) r->g.top_k = 0;
    if ((r->w.continuous_usage || r->w.include_usage) && !r->w.stream) {
        return api_refuse(r, "invalid_value", "stream_options",
                          "stream_options are for streams; set stream");
    }
    if (r->w.progress && !r->w.stream) {
        return api_refuse(r, "invalid_value", "return_progress",
                          "return_progress is for streams; set stream");
    }
    if (r->stop && !take_stop(r)) return false;
    if (r->stop_ids && !take_stop_ids(r)) return false;
    if (r->bias && !take_bias(r)) return false;
    return take_token_limits(r);
}

void api_default_max_tokens(api_request *r, hd_request *g, size_t n_prompt, int32_t tokens) {
    const size_t room =
        n_prompt < (size_t)r->max_context ? (size_t)r->max_context - n_prompt : 1;
    g->max_tokens = (size_t)tokens < room ? tokens : (int32_t)room;
    if (g->max_tokens < g->min_tokens) g->max_tokens = g->min_tokens;
}

/* ---- response format ---- */

static bool set_schema(api_request *r, const json_t *schema, const char *param) {
    api_text text = {0};
    if (json_is_string(schema) && !hd_chat_is_number(schema)) {
        r->g.format_text = json_string_value(schema);
        if (strlen(r->g.format_text) != json_string_length(schema)) {
            return api_refuse(r, "invalid_schema", param, "%s must not hold U+0000", param);
        }
    } else if (json_is_object(schema) || json_is_boolean(schema)) {
        api_put_json(&text, schema);
        json_t *kept = api_keep_json(r, text.failed ? NULL : json_stringn(text.data, text.n));
        api_text_deinit(&text);
        if (!kept) return false;
        r->g.format_text = json_string_value(kept);
    } else {
        return api_refuse(r, "invalid_schema", param, "%s must be a JSON schema", param);
    }
    r->g.response_format = HD_FORMAT_JSON_SCHEMA;
    return true;
}

static bool set_response_format(api_request *r) {
    const json_t *type = json_object_get(r->response_format, "type");
    const char *word = json_is_string(type) ? json_string_value(type) : "";
    if (strcmp(word, "text") == 0) return true;
    if (strcmp(word, "json_object") == 0) {
        r->g.response_format = HD_FORMAT_JSON;
        return true;
    }
    if (strcmp(word, "json_schema") != 0) {
        return api_refuse(r, "invalid_value", "response_format.type",
                          "response_format.type must be text, json_object or json_schema");
    }
    const json_t *outer = json_object_get(r->response_format, "json_schema");
    const json_t *schema =
        json_object_get(json_is_object(outer) ? outer : r->response_format, "schema");
    if (!schema) {
        return api_refuse(r, "missing_required_parameter", "response_format.json_schema",
                          "response_format.json_schema must have a schema");
    }
    return set_schema(r, schema, "response_format.json_schema");
}

static bool set_choices(api_request *r) {
    const size_t n = json_array_size(r->guided_choice);
    const char **list = api_keep(r, n, sizeof *list);
    if (!list) return false;
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(r->guided_choice, i);
        list[i] = json_is_string(v) ? json_string_value(v) : "";
        if (*list[i] && strlen(list[i]) == json_string_length(v)) continue;
        return api_refuse(r, "invalid_value", "choice",
                          "choice[%zu] must be a string that is not empty", i);
    }
    if (n == 0) return api_refuse(r, "invalid_value", "choice", "choice must not be empty");
    r->g.response_format = HD_FORMAT_CHOICE;
    r->g.choices = list;
    r->g.n_choices = n;
    return true;
}

bool api_take_response_format(api_request *r) {
    const char *pattern = r->regex ? r->regex : r->guided_regex;
    const json_t *schema = r->schema ? r->schema : r->guided_json;
    const int given = (r->regex != NULL) + (r->guided_regex != NULL) + (r->schema != NULL) +
                      (r->guided_json != NULL) + (r->guided_choice != NULL) + r->guided_object;
    if (r->response_format && !set_response_format(r)) return false;
    if (given + (r->g.response_format != HD_FORMAT_FREE) > 1) {
        return api_refuse(r, "invalid_value", "response_format",
                          "more than one form is asked for; give one of response_format, "
                          "json_schema, regex and structured_outputs");
    }
    if (r->guided_object) r->g.response_format = HD_FORMAT_JSON;
    if (pattern) {
        r->g.response_format = HD_FORMAT_REGEX;
        r->g.format_text = pattern;
    }
    if (schema && !set_schema(r, schema, "json_schema")) return false;
    return !r->guided_choice || set_choices(r);
}

/* ---- thinking ---- */

bool api_take_thinking(api_request *r) {
    static const struct {
        const char *word;
        int thinking, effort;
    } tiers[] = {
        {"none",    -1, 0},
        {"minimal", 1,  1},
        {"low",     1,  1},
        {"medium",  1,  0},
        {"high",    1,  2},
        {"xhigh",   1,  3},
        {"max",     1,  3}
    };
    if (r->thinking_type) {
        r->g.thinking = (strcmp(r->thinking_type, "enabled") == 0) -
                        (strcmp(r->thinking_type, "disabled") == 0);
    }
    for (size_t i = 0; r->effort && i < HD_LEN(tiers); i++) {
        if (strcmp(r->effort, tiers[i].word) != 0) continue;
        if (r->g.thinking == 0) r->g.thinking = tiers[i].thinking;
        r->g.effort = tiers[i].effort;
    }
    if (r->g.effort_number && r->g.thinking == 0) r->g.thinking = 1;
    return true;
}

/* ---- messages ---- */

static json_t *tool_named(const json_t *tools, const json_t *wanted) {
    const json_t *inner = json_object_get(wanted, "function");
    const char *name =
        json_string_value(json_object_get(json_is_object(inner) ? inner : wanted, "name"));
    json_t *tool;
    size_t i;
    json_array_foreach(tools, i, tool) {
        const char *known =
            json_string_value(json_object_get(json_object_get(tool, "function"), "name"));
        if (name && known && strcmp(name, known) == 0) return tool;
    }
    return NULL;
}

/* With allowed_tools, only the listed tools are offered. */
static bool take_allowed_tools(api_request *r, const char *const *modes) {
    const json_t *inner = json_object_get(r->tool_choice, "allowed_tools"), *wanted;
    const json_t *from = json_is_object(inner) ? inner : r->tool_choice;
    const char *mode = json_string_value(json_object_get(from, "mode"));
    json_t *kept = api_keep_json(r, json_array());
    size_t i;
    if (!kept) return false;
    json_array_foreach(json_object_get(from, "tools"), i, wanted) {
        json_t *tool = tool_named(r->tools, wanted);
        if (tool && json_array_append(kept, tool) == 0) continue;
        return api_refuse(r, "invalid_value", "tool_choice",
                          "tool_choice allows a function that is not among the tools");
    }
    for (; mode && *modes; modes++) {
        if (strcmp(mode, *modes) == 0) r->g.tool_choice = *modes;
    }
    r->tools = kept;
    return true;
}

static bool is_allowed_tools(const json_t *choice) {
    const char *type = json_string_value(json_object_get(choice, "type"));
    return type && strcmp(type, "allowed_tools") == 0;
}

static bool take_tool_choice(api_request *r) {
    static const char *const words[] = {"none", "auto", "required", NULL};
    const json_t *v = r->tool_choice;
    if (!v) return true;
    if (json_is_string(v)) {
        for (size_t i = 0; words[i]; i++) {
            if (strcmp(json_string_value(v), words[i]) == 0) r->g.tool_choice = words[i];
        }
    } else if (is_allowed_tools(v)) {
        if (!take_allowed_tools(r, words + 1)) return false;
    } else {
        const json_t *f = json_object_get(v, "function");
        const char *name = json_string_value(json_object_get(f, "name"));
        if (name && !tool_named(r->tools, v)) {
            return api_refuse(r, "invalid_value", "tool_choice",
                              "tool_choice names a function that is not among the tools");
        }
        r->g.tool_choice = name;
    }
    if (!r->g.tool_choice) {
        return api_refuse(r, "invalid_value", "tool_choice",
                          "tool_choice must be none, auto, required or name a function");
    }
    const bool forced =
        strcmp(r->g.tool_choice, "none") != 0 && strcmp(r->g.tool_choice, "auto") != 0;
    if (forced && json_array_size(r->tools) == 0) {
        return api_refuse(r, "invalid_value", "tool_choice", "tool_choice wants tools");
    }
    return true;
}

static bool set_task(api_request *r) {
    static const struct {
        const char *word;
        hd_chat_task task;
    } tasks[] = {
        {"action",    HD_TASK_ACTION   },
        {"query",     HD_TASK_QUERY    },
        {"authority", HD_TASK_AUTHORITY},
        {"domain",    HD_TASK_DOMAIN   },
        {"title",     HD_TASK_TITLE    },
        {"read_url",  HD_TASK_READ_URL }
    };
    for (size_t i = 0; r->task && i < HD_LEN(tasks); i++) {
        if (strcmp(r->task, tasks[i].word) == 0) {
            r->conversation.messages[r->conversation.n - 1].task = tasks[i].task;
        }
    }
    return true;
}

static bool set_continuation(api_request *r) {
    hd_chat_message *last = &r->conversation.messages[r->conversation.n - 1];
    if (r->generation_prompt < 0 && !r->continue_final) {
        return api_refuse(r, "unsupported_parameter", "add_generation_prompt",
                          "add_generation_prompt: false is only for continue_final_message");
    }
    if (!r->continue_final) return true;
    if (last->role != HD_CHAT_ASSISTANT || last->n_calls > 0) {
        return api_refuse(r, "invalid_value", "continue_final_message",
                          "only an assistant's text can be continued");
    }
    const hd_chat_encoding e = hd_engine_encoding(r->ctx->engine);
    if (e < HD_CHAT_V4) {
        return api_refuse(r, "unsupported_parameter", "continue_final_message",
                          "continue_final_message is not supported by the encoding %s",
                          hd_chat_encoding_name(e));
    }
    last->wo_eos = true;
    return true;
}

/* Refuses messages of the older functions API, and content that is not text. */
static bool check_old_shapes(api_request *r) {
    static const char *const refused[] = {"function_call", "audio"};
    const json_t *message;
    size_t i;
    json_array_foreach(r->messages, i, message) {
        for (size_t k = 0; k < HD_LEN(refused); k++) {
            const json_t *v = json_object_get(message, refused[k]);
            if (!v || json_is_null(v)) continue;
            return api_refuse(r, "unsupported_parameter", "messages",
                              "messages[%zu].%s is not supported: use tool_calls and text", i,
                              refused[k]);
        }
    }
    return true;
}

bool api_take_messages(api_request *r) {
    hd_err err = {0};
    if (!r->messages) {
        return api_refuse(r, "missing_required_parameter", "messages", "messages are missing");
    }
    if (json_array_size(r->messages) > (size_t)r->ctx->limits.max_messages) {
        return api_refuse(r, "invalid_value", "messages", "%zu messages are more than %d",
                          json_array_size(r->messages), r->ctx->limits.max_messages);
    }
    if (!take_tool_choice(r) || !check_old_shapes(r)) return false;
    r->g.one_call = !r->w.parallel_calls;
    if (hd_chat_parse(&r->conversation, r->messages, r->tools, NULL, true, &err) != HD_OK) {
        return api_refuse_err(r, "messages", &err);
    }
    return set_task(r) && set_continuation(r);
}

/* ---- prompts ---- */

bool api_take_text(api_request *r, const char *text, size_t n, const char *param, int32_t **ids,
                   size_t *n_ids) {
    const hd_tokenizer *t = hd_engine_tokenizer(r->ctx->engine);
    const bool bos = r->begins >= 0 && hd_tokenizer_adds_bos(t);
    const uint32_t flags =
        (r->parse_special ? HD_ENCODE_SPECIAL : 0u) | (bos ? HD_ENCODE_BOS : 0u);
    hd_ids out = {0};
    hd_err err = {0};
    if (n > 16 * (size_t)r->max_context && n > COUNTED_BYTES) {
        return api_refuse(r, "context_length_exceeded", param,
                          "prompt is too long: %zu bytes, more than the maximum context length "
                          "of %d tokens could hold",
                          n, r->max_context);
    }
    hd_tokenizer_encode(t, text, n, flags, &out, &err);
    *n_ids = out.n;
    *ids = NULL;
    if (err.status != HD_OK) {
        api_refuse_err(r, param, &err);
    } else if (out.n > (size_t)r->max_context) {
        api_refuse(r, "context_length_exceeded", param,
                   "prompt is too long: %zu tokens > %d maximum, the maximum context length",
                   out.n, r->max_context);
    } else {
        *ids = api_keep(r, out.n, sizeof **ids);
    }
    if (*ids && out.n > 0) memcpy(*ids, out.ids, out.n * sizeof **ids);
    hd_ids_deinit(&out);
    return *ids != NULL;
}

static bool take_prompt(api_request *r, json_t *v, const char *param, api_prompt *p) {
    /* the prefix may be empty for fill-in-the-middle */
    const bool fills = r->suffix && *r->suffix;
    int32_t *ids = NULL;
    if (json_is_string(v) && !hd_chat_is_number(v)) {
        if (json_string_length(v) == 0 && !fills) {
            return api_refuse(r, "empty_prompt", param, "%s is empty", param);
        }
        if (!api_take_text(r, json_string_value(v), json_string_length(v), param, &ids,
                           &p->n)) {
            return false;
        }
    } else if (json_is_array(v)) {
        if (!api_take_ids(r, v, param, &ids, &p->n)) return false;
    } else {
        return api_refuse(r, "invalid_value", param,
                          "%s must be a string, an array of token ids, or an array of these",
                          param);
    }
    if (p->n == 0 && !fills) {
        return api_refuse(r, "empty_prompt", param, "%s is empty", param);
    }
    p->tokens = ids;
    p->g = r->g;
    return true;
}

bool api_take_prompts(api_request *r, json_t *given, const char *param, api_prompt **out,
                      int32_t *n) {
    const json_t *first = json_array_get(given, 0);
    const bool many = json_is_string(first) || json_is_array(first);
    const size_t count = many ? json_array_size(given) : 1;
    if (!given)
        return api_refuse(r, "missing_required_parameter", param, "%s is missing", param);
    if (count > (size_t)r->ctx->limits.max_batch_prompts) {
        return api_refuse(r, "invalid_value", param, "%s has %zu prompts; at most %d", param,
                          count, r->ctx->limits.max_batch_prompts);
    }
    *out = api_keep(r, count, sizeof **out);
    if (!*out) return false;
    for (size_t i = 0; i < count; i++) {
        json_t *v = many ? json_array_get(given, i) : given;
        if (!take_prompt(r, v, param, &(*out)[i])) return false;
    }
    *n = (int32_t)count;
    return true;
}
