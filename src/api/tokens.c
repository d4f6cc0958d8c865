/* tokens.c - endpoints that need only the model's files: tokenize, detokenize, apply the
 * chat template, parse tool calls, separate reasoning. */
#include <string.h>

#include "api/endpoints.h"
#include "api/job.h"
#include "chat/reply.h"

#define AT(field) offsetof(api_request, field)

/* ---- parameters ---- */

/* clang-format off */
static const api_param tokenize[] = {
    {"prompt", API_TEXTS, AT(text), .about = "a text or texts"},
    {"content", API_TEXTS, AT(text), .about = "as prompt"},
    {"add_special_tokens", API_SWITCH, AT(begins),
     .about = "the text begins as the tokenizer says; true by default"},
    {"add_special", API_SWITCH, AT(begins), .about = "as add_special_tokens"},
    {"parse_special", API_BOOL, AT(parse_special),
     .about = "special tokens spelled in the text become their ids; true by default"},
    {"return_token_strs", API_BOOL, AT(token_strs), .about = "the text of each token too"},
    {"with_pieces", API_BOOL, AT(with_pieces), .about = "tokens are objects with id and piece"},
    {"model", API_STRING, AT(checked), .high = 256, .about = "any name: one model is served"},
};
/* clang-format on */
static const api_section tokenize_section = API_SECTION(tokenize);
const api_family api_tokenize_family = {
    .name = "TokenizeRequest",
    .endpoint = "/tokenize",
    .sections = {&tokenize_section, &api_conversation_section, &api_absent_section}
};

/* clang-format off */
static const api_param detokenize[] = {
    {"tokens", API_ARRAY, AT(tokens), .about = "ids, or lists of ids"},
    {"skip_special_tokens", API_BOOL_NOT, AT(g.keep_special),
     .about = "special tokens are no text"},
    {"model", API_STRING, AT(checked), .high = 256, .about = "any name: one model is served"},
};
/* clang-format on */
static const api_section detokenize_section = API_SECTION(detokenize);
static const char *const wants_tokens[] = {"tokens", NULL};
const api_family api_detokenize_family = {.name = "DetokenizeRequest",
                                          .endpoint = "/detokenize",
                                          .required = wants_tokens,
                                          .sections = {&detokenize_section}};

static const char *const wants_messages[] = {"messages", NULL};
const api_family api_template_family = {
    .name = "ApplyTemplateRequest",
    .endpoint = "/apply-template",
    .required = wants_messages,
    .sections = {&api_conversation_section, &api_absent_section}
};

/* clang-format off */
static const api_param parse_call[] = {
    {"text", API_STRING, AT(content), .high = 1 << 24, .about = "what a model wrote"},
    {"tools", API_ARRAY, AT(tools), .costly = true, .about = "the functions it was offered"},
    {"tool_call_parser", API_STRING, AT(parser),
     .about = "deepseekv3, deepseekv31, deepseekv32 or deepseekv4; default: the model's"},
    {"tool_strict_level", API_NOTED, .about = "what is malformed is text always"},
};
/* clang-format on */
static const api_section parse_call_section = API_SECTION(parse_call);
static const char *const wants_text[] = {"text", NULL};
const api_family api_parse_call_family = {.name = "ParseFunctionCallRequest",
                                          .endpoint = "/parse_function_call",
                                          .required = wants_text,
                                          .sections = {&parse_call_section}};

/* clang-format off */
static const api_param separate[] = {
    {"text", API_STRING, AT(content), .high = 1 << 24, .about = "what a model wrote"},
    {"reasoning_parser", API_STRING, AT(parser),
     .about = "deepseek-r1, deepseek-v3 or deepseek-v4; default: the model's"},
};
/* clang-format on */
static const api_section separate_section = API_SECTION(separate);
const api_family api_reasoning_family = {.name = "SeparateReasoningRequest",
                                         .endpoint = "/separate_reasoning",
                                         .required = wants_text,
                                         .sections = {&separate_section}};

/* ---- the reply ---- */

static void answer(api_request *r, bool ok, api_text *out) {
    if (ok) {
        api_reply(r->call, "application/json", out);
    } else {
        api_request_send_refusal(r);
    }
    api_text_deinit(out);
    api_request_close(r);
}

/* ---- tokenize ---- */

static void put_pieces(api_text *out, const api_request *r, const int32_t *ids, size_t n,
                       bool with_ids) {
    for (size_t i = 0; i < n; i++) {
        if (i > 0) api_puts(out, ",");
        if (with_ids) api_write(out, "{'id':%d,'piece':", ids[i]);
        api_put_token(out, r->ctx, ids[i]);
        if (with_ids) api_puts(out, "}");
    }
}

/* A list of ids, or with several texts a list of lists: tokens, counts, strings. */
typedef struct token_lists {
    api_text tokens, counts, strings;
} token_lists;

static void add_list(token_lists *lists, const api_request *r, const int32_t *ids, size_t n) {
    api_comma(&lists->counts);
    api_put_int(&lists->counts, (long long)n);
    api_puts(&lists->tokens, lists->tokens.n > 0 ? ",[" : "[");
    if (r->with_pieces) {
        put_pieces(&lists->tokens, r, ids, n, true);
    } else {
        api_put_ids(&lists->tokens, ids, n);
    }
    api_puts(&lists->tokens, "]");
    if (!r->token_strs) return;
    api_puts(&lists->strings, lists->strings.n > 0 ? ",[" : "[");
    put_pieces(&lists->strings, r, ids, n, false);
    api_puts(&lists->strings, "]");
}

static bool list_texts(api_request *r, token_lists *lists) {
    const bool many = json_is_array(r->text);
    const size_t n = many ? json_array_size(r->text) : 1;
    if (n > (size_t)r->ctx->limits.max_batch_prompts) {
        return api_refuse(r, "invalid_value", "prompt", "prompt has %zu texts; at most %d", n,
                          r->ctx->limits.max_batch_prompts);
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *v = many ? json_array_get(r->text, i) : r->text;
        int32_t *ids;
        size_t n_ids;
        if (!api_take_text(r, json_string_value(v), json_string_length(v), "prompt", &ids,
                           &n_ids)) {
            return false;
        }
        add_list(lists, r, ids, n_ids);
    }
    return true;
}

static bool list_conversation(api_request *r, token_lists *lists) {
    hd_ids ids = {0};
    const bool ok = api_take_thinking(r) && api_take_messages(r) && api_render_ids(r, &ids);
    if (ok) add_list(lists, r, ids.ids, ids.n);
    hd_ids_deinit(&ids);
    return ok;
}

static void put_list(api_text *out, const char *key, const api_text *items, bool many) {
    api_write(out, ",%s:", key);
    if (many) api_puts(out, "[");
    api_put(out, items->data, items->n);
    if (many) api_puts(out, "]");
}

void api_tokenize(http_call *c, void *server) {
    api_request r;
    api_text out = {0};
    token_lists lists = {0};
    bool ok = api_request_open(&r, c, server, &api_tokenize_family, HTTP_OPENAI);
    if (ok && (r.text != NULL) == (r.messages != NULL)) {
        ok = api_refuse(&r, "missing_required_parameter", "prompt",
                        "give one of prompt and messages");
    }
    ok = ok && (r.text ? list_texts(&r, &lists) : list_conversation(&r, &lists));
    if (ok) {
        const bool many = json_is_array(r.text);
        api_write(&out, "{'max_model_len':%d", r.max_context);
        put_list(&out, "tokens", &lists.tokens, many);
        put_list(&out, "count", &lists.counts, many);
        if (r.token_strs) put_list(&out, "token_strs", &lists.strings, many);
        api_puts(&out, "}");
        out.failed = out.failed || lists.tokens.failed || lists.strings.failed;
    }
    api_text_deinit(&lists.tokens);
    api_text_deinit(&lists.counts);
    api_text_deinit(&lists.strings);
    answer(&r, ok, &out);
}

/* ---- detokenize ---- */

static bool put_decoded(api_request *r, json_t *list, api_text *out) {
    int32_t *ids;
    size_t n;
    hd_bytes text = {0};
    hd_err err = {0};
    if (!api_take_ids(r, list, "tokens", &ids, &n)) return false;
    const hd_status st = hd_tokenizer_decode(hd_engine_tokenizer(r->ctx->engine), ids, n,
                                             !r->g.keep_special, &text, &err);
    api_put_string(out, text.data, text.n);
    hd_bytes_deinit(&text);
    return st == HD_OK || api_refuse_err(r, "tokens", &err);
}

static bool decode_all(api_request *r, api_text *text) {
    const bool many = json_is_array(json_array_get(r->tokens, 0));
    json_t *item;
    size_t i;
    if (!r->tokens) {
        return api_refuse(r, "missing_required_parameter", "tokens", "tokens are missing");
    }
    if (!many) return put_decoded(r, r->tokens, text);
    api_puts(text, "[");
    json_array_foreach(r->tokens, i, item) {
        if (!json_is_array(item)) {
            return api_refuse(r, "invalid_value", "tokens", "tokens[%zu] must be a list", i);
        }
        if (i > 0) api_puts(text, ",");
        if (!put_decoded(r, item, text)) return false;
    }
    api_puts(text, "]");
    return true;
}

void api_detokenize(http_call *c, void *server) {
    static const char *const other_names[] = {",\"prompt\":", ",\"content\":"};
    api_request r;
    api_text out = {0};
    api_puts(&out, "{\"text\":");
    const size_t start = out.n;
    const bool ok = api_request_open(&r, c, server, &api_detokenize_family, HTTP_OPENAI) &&
                    decode_all(&r, &out);
    const size_t n = out.n - start;
    for (size_t i = 0; i < HD_LEN(other_names); i++) {
        api_puts(&out, other_names[i]);
        api_repeat(&out, start, n);
    }
    api_puts(&out, "}");
    answer(&r, ok, &out);
}

/* ---- the tokenizer ---- */

static void put_special(api_text *out, const api_context *ctx, const char *key, int32_t id) {
    api_write(out, ",%s:", key);
    if (id >= 0) {
        api_put_token(out, ctx, id);
    } else {
        api_puts(out, "null");
    }
}

/* For clients that use the server as their tokenizer: special tokens here, text by /tokenize
 * and /detokenize. /apply-template renders prompts, so no template is returned. */
void api_tokenizer_info(http_call *c, void *server) {
    const api_context *ctx = server;
    const hd_tokenizer *t = hd_engine_tokenizer(ctx->engine);
    hd_engine_stats stats;
    api_text out = {0};
    hd_engine_read_stats(ctx->engine, &stats);
    api_write(&out, "{'tokenizer_class':'PreTrainedTokenizerFast'");
    put_special(&out, ctx, "bos_token", hd_tokenizer_bos(t));
    put_special(&out, ctx, "eos_token", hd_tokenizer_eos(t));
    put_special(&out, ctx, "pad_token", hd_tokenizer_pad(t));
    api_write(&out,
              ",'add_bos_token':%i,'vocab_size':%d,'model_max_length':%d,'chat_template':",
              hd_tokenizer_adds_bos(t), hd_tokenizer_vocab_size(t), stats.max_context);
    api_puts(&out, "null}");
    http_reply(c, 200, "application/json", out.data, out.n);
    api_text_deinit(&out);
}

/* ---- chat template ---- */

void api_apply_template(http_call *c, void *server) {
    api_request r;
    api_text out = {0};
    hd_chat_prompt prompt = {0};
    hd_err err = {0};
    bool ok = api_request_open(&r, c, server, &api_template_family, HTTP_OPENAI) &&
              api_take_thinking(&r) && api_take_messages(&r);
    if (ok && hd_engine_render(r.ctx->engine, &prompt, &r.g, &r.conversation, &err) != HD_OK) {
        ok = api_refuse_err(&r, "messages", &err);
    }
    api_write(&out, "{'prompt':%.*s}", (int)prompt.n, prompt.text ? prompt.text : "");
    hd_chat_prompt_deinit(&prompt);
    answer(&r, ok, &out);
}

/* ---- tool call and reasoning parsers ---- */

typedef struct taken_apart {
    api_text reasoning, content, calls;
    int32_t call; /* index of the open call; -1: none */
} taken_apart;

static void take_event(void *user, const hd_reply_event *e) {
    taken_apart *t = user;
    switch (e->kind) {
    case HD_REPLY_REASONING:
        api_put(&t->reasoning, e->text, e->n);
        break;
    case HD_REPLY_CONTENT:
        api_put(&t->content, e->text, e->n);
        break;
    case HD_REPLY_CALL_BEGIN:
        api_comma(&t->calls);
        api_write(&t->calls, "{'tool_index':%d,'name':%.*s,'parameters':'", e->call, (int)e->n,
                  e->text);
        break;
    case HD_REPLY_ARGUMENTS:
        api_put_escaped(&t->calls, e->text, e->n);
        break;
    case HD_REPLY_CALL_END:
        api_puts(&t->calls, "\"}");
        break;
    case HD_REPLY_NOTE:
        break;
    }
}

static bool choose_format(api_request *r, hd_reply_format *format) {
    static const struct {
        const char *name;
        hd_reply_format format;
    } parsers[] = {
        {"deepseekv3",   HD_REPLY_V3 },
        {"deepseek_v3",  HD_REPLY_V3 },
        {"deepseekv31",  HD_REPLY_V31},
        {"deepseek_v31", HD_REPLY_V31},
        {"deepseekv32",  HD_REPLY_V32},
        {"deepseek_v32", HD_REPLY_V32},
        {"deepseekv4",   HD_REPLY_V4 },
        {"deepseek_v4",  HD_REPLY_V4 },
        {"deepseekv41",  HD_REPLY_V41},
        {"deepseek_v41", HD_REPLY_V41},
        {"deepseek-r1",  HD_REPLY_V3 },
        {"deepseek_r1",  HD_REPLY_V3 },
        {"deepseek-v3",  HD_REPLY_V31},
        {"deepseek-v4",  HD_REPLY_V4 }
    };
    *format = hd_reply_format_of(hd_engine_encoding(r->ctx->engine));
    if (!r->parser) return true;
    for (size_t i = 0; i < HD_LEN(parsers); i++) {
        if (strcmp(r->parser, parsers[i].name) != 0) continue;
        *format = parsers[i].format;
        return true;
    }
    return api_refuse(r, "invalid_value", "parser", "there is no parser of that name");
}

static bool begins_in_reasoning(const char *text) {
    const char *open = strstr(text, "<think>"), *close = strstr(text, "</think>");
    return close && (!open || open > close);
}

static bool take_apart(api_request *r, bool with_calls, taken_apart *out) {
    hd_reply_tools tools = {0};
    hd_reply *reply = NULL;
    hd_err err = {0};
    hd_reply_options options = {.parse_tools = with_calls, .whole_calls = true};
    if (!r->content) {
        return api_refuse(r, "missing_required_parameter", "text", "text is missing");
    }
    if (!choose_format(r, &options.format)) return false;
    options.starts_in_reasoning = !with_calls && begins_in_reasoning(r->content);
    hd_status st = hd_reply_tools_init(&tools, r->tools, &err);
    options.tools = tools.tools;
    options.n_tools = tools.n_tools;
    if (st == HD_OK) st = hd_reply_open(&reply, &options, take_event, out, &err);
    if (st == HD_OK) st = hd_reply_feed(reply, r->content, strlen(r->content), false, &err);
    if (st == HD_OK) st = hd_reply_finish(reply, HD_FINISH_STOP, &err);
    hd_reply_close(reply);
    hd_reply_tools_deinit(&tools);
    return st == HD_OK || api_refuse_err(r, "text", &err);
}

static void put_parts(api_text *out, const taken_apart *t, bool with_calls) {
    if (with_calls) {
        api_write(out, "{'normal_text':%.*s", (int)t->content.n,
                  t->content.n ? t->content.data : "");
        api_put_list(out, "calls", &t->calls);
        api_puts(out, "}");
    } else {
        api_write(out, "{'reasoning_text':%.*s,'text':%.*s}", (int)t->reasoning.n,
                  t->reasoning.n ? t->reasoning.data : "", (int)t->content.n,
                  t->content.n ? t->content.data : "");
    }
}

static void answer_parts(http_call *c, void *server, const api_family *family,
                         bool with_calls) {
    api_request r;
    api_text out = {0};
    taken_apart parts = {0};
    const bool ok = api_request_open(&r, c, server, family, HTTP_OPENAI) &&
                    take_apart(&r, with_calls, &parts);
    put_parts(&out, &parts, with_calls);
    api_text_deinit(&parts.reasoning);
    api_text_deinit(&parts.content);
    api_text_deinit(&parts.calls);
    answer(&r, ok, &out);
}

void api_parse_call(http_call *c, void *server) {
    answer_parts(c, server, &api_parse_call_family, true);
}

void api_separate_reasoning(http_call *c, void *server) {
    answer_parts(c, server, &api_reasoning_family, false);
}
