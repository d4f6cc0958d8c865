/* prepare.c - prepares a submitted request: encodes the prompt, checks parameters, collects
 * stop tokens and stop strings. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "engine/engine_internal.h"

/* an over-long prompt is counted up to this many contexts, for the message */
enum { COUNTED = 16 };

/* ---- the prompt ---- */

static bool wants_no_calls(const hd_request *g) {
    return g->tool_choice && strcmp(g->tool_choice, "none") == 0;
}

/* Tools are not rendered if tool_choice forbids calls. */
hd_status hd_engine_render(const hd_engine *e, hd_chat_prompt *out, const hd_request *g,
                           const hd_conversation *conversation, hd_err *err) {
    hd_conversation c = *conversation;
    if (wants_no_calls(g)) c.tools = NULL;
    const hd_chat_options options = {.encoding = e->encoding,
                                     .thinking = g->thinking ? g->thinking > 0 : e->thinks,
                                     .effort = (hd_chat_effort)g->effort,
                                     .effort_number = g->effort_number};
    return hd_chat_render(out, &c, &options, err);
}

static bool ends_with_think(const hd_chat_prompt *p) {
    static const char think[] = "<think>";
    const size_t k = sizeof think - 1;
    size_t n = p->n;
    while (n && (p->text[n - 1] == '\n' || p->text[n - 1] == ' ')) n--;
    return n >= k && memcmp(p->text + n - k, think, k) == 0;
}

/* Collects all tools: those of the request and those of its system messages. */
static hd_status collect_tools(engine_request *r, const hd_conversation *c, hd_err *err) {
    r->tools = json_array();
    bool ok = r->tools && (!c->tools || json_array_extend(r->tools, c->tools) == 0);
    for (int32_t i = 0; ok && i < c->n; i++) {
        json_t *tools = c->messages[i].tools;
        if (tools) ok = json_array_extend(r->tools, tools) == 0;
    }
    if (!ok) return HD_FAIL(err, HD_ENOMEM, "no memory for the tools of a request");
    return hd_reply_tools_init(&r->reply_tools, r->tools, err);
}

/* Chooses the reply parser's options for a rendered prompt. */
static hd_status set_parsing(const hd_engine *e, engine_request *r, const hd_request *g,
                             const hd_conversation *c, const hd_chat_prompt *prompt,
                             hd_err *err) {
    r->is_chat = true;
    r->starts_in_reasoning = ends_with_think(prompt);
    if (!wants_no_calls(g)) HD_TRY(collect_tools(r, c, err));
    if (g->unparsed) return HD_OK;
    r->parse = (hd_reply_options){.format = hd_reply_format_of(e->encoding),
                                  .starts_in_reasoning = r->starts_in_reasoning,
                                  .parse_tools = r->reply_tools.n_tools > 0,
                                  .flagged = e->flagged,
                                  .dsml_flagged = e->dsml_flagged,
                                  .tools = r->reply_tools.tools,
                                  .n_tools = r->reply_tools.n_tools};
    r->rules.parse = &r->parse;
    return HD_OK;
}

/* Earlier answers get the tokens that the model generated, from the token history. */
static hd_status token_history_and_encode(const hd_engine *e, hd_chat_prompt *prompt,
                                          const hd_request *g, const hd_conversation *c,
                                          hd_ids *out, uint64_t *key, hd_err *err) {
    if (e->token_history)
        HD_TRY(engine_token_history_fill(e->token_history, g->salt, c, prompt, key, err));
    return hd_chat_encode(prompt, e->tokenizer, out, err);
}

hd_status hd_engine_encode(const hd_engine *e, hd_ids *out, const hd_request *g,
                           const hd_conversation *conversation, hd_err *err) {
    hd_chat_prompt prompt;
    uint64_t key = 0;
    HD_TRY(hd_engine_render(e, &prompt, g, conversation, err));
    const hd_status st = token_history_and_encode(e, &prompt, g, conversation, out, &key, err);
    hd_chat_prompt_deinit(&prompt);
    return st;
}

static hd_status encode_conversation(hd_engine *e, engine_request *r, const hd_request *g,
                                     const hd_conversation *c, hd_err *err) {
    hd_chat_prompt prompt;
    HD_TRY(hd_engine_render(e, &prompt, g, c, err));
    hd_status st = set_parsing(e, r, g, c, &prompt, err);
    if (st == HD_OK)
        st = token_history_and_encode(e, &prompt, g, c, &r->prompt, &r->token_history_key, err);
    hd_chat_prompt_deinit(&prompt);
    return st;
}

static hd_status parse_field(json_t **out, const char *text, const char *field, hd_err *err) {
    const hd_status st = hd_chat_parse_json(out, text, strlen(text), field, err);
    if (st != HD_OK) hd_err_set_field(err, field);
    return st;
}

static hd_status encode_messages(hd_engine *e, engine_request *r, const hd_request *g,
                                 hd_err *err) {
    json_t *messages = NULL, *tools = NULL;
    hd_conversation conversation = {0};
    hd_status st = parse_field(&messages, g->messages, "messages", err);
    if (st == HD_OK && g->tools) st = parse_field(&tools, g->tools, "tools", err);
    if (st == HD_OK) st = hd_chat_parse(&conversation, messages, tools, NULL, false, err);
    if (st == HD_OK) st = encode_conversation(e, r, g, &conversation, err);
    hd_conversation_deinit(&conversation);
    json_decref(messages);
    json_decref(tools);
    return st;
}

static hd_status refuse_text(const hd_request *g, const hd_conversation *conversation,
                             hd_err *err) {
    const char *const what = g->text                                ? "text"
                             : g->messages || conversation          ? "messages"
                             : g->n_stop                            ? "stop strings"
                             : g->response_format != HD_FORMAT_FREE ? "response formats"
                                                                    : NULL;
    if (!what) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "%s cannot be given to dummy weights, which have no tokenizer", what);
}

static hd_status encode_prompt(hd_engine *e, engine_request *r, const hd_request *g,
                               const hd_conversation *conversation, hd_err *err) {
    const bool messages = g->messages || conversation;
    if (!e->tokenizer) HD_TRY(refuse_text(g, conversation, err));
    const int given = (g->tokens != NULL) + (g->text != NULL) + messages;
    if (given != 1) {
        return HD_FAIL(err, HD_EINVAL, "give one of tokens, text and messages; %d are given",
                       given);
    }
    r->prompt.max = COUNTED * (size_t)e->max_context;
    if (conversation) return encode_conversation(e, r, g, conversation, err);
    if (messages) return encode_messages(e, r, g, err);
    if (g->text) {
        const uint32_t bos = hd_tokenizer_adds_bos(e->tokenizer) ? HD_ENCODE_BOS : 0;
        return hd_tokenizer_encode(e->tokenizer, g->text, strlen(g->text),
                                   HD_ENCODE_SPECIAL | bos, &r->prompt, err);
    }
    for (size_t i = 0; i < g->n_tokens; i++) {
        if (g->tokens[i] >= 0 && g->tokens[i] < e->spec->vocab) continue;
        return HD_REFUSE(err, HD_EINVAL, NULL, hd_field_of("tokens[%zu]", i).path,
                         "tokens[%zu] is %d; must be 0 to %d", i, g->tokens[i],
                         e->spec->vocab - 1);
    }
    return hd_ids_append(&r->prompt, g->tokens, g->n_tokens, err);
}

/* ---- numbers ---- */

static hd_status check_count(const char *field, const char *name, size_t n, size_t most,
                             hd_err *err) {
    if (n <= most) return HD_OK;
    return HD_REFUSE(err, HD_EINVAL, NULL, field, "the number of %s is %zu; must be 0 to %zu",
                     name, n, most);
}

static hd_status check_token(const hd_engine *e, const char *name, const char *list, size_t i,
                             int32_t id, hd_err *err) {
    if (id >= 0 && id < e->spec->vocab) return HD_OK;
    return HD_REFUSE(err, HD_EINVAL, NULL, hd_field_of("%s[%zu]", list, i).path,
                     "a %s token is %d; must be 0 to %d", name, id, e->spec->vocab - 1);
}

static hd_status check_numbers(const hd_engine *e, const hd_request *g, hd_err *err) {
    HD_TRY(check_count("bias", "biased tokens", g->n_bias, HD_MAX_BIAS, err));
    HD_TRY(check_count("stop", "stop strings", g->n_stop, HD_MAX_STOP_STRINGS, err));
    HD_TRY(
        check_count("stop_tokens", "stop tokens", g->n_stop_tokens, HD_MAX_STOP_TOKENS, err));
    if (g->draft_tokens > 0 && !e->drafts) {
        return HD_REFUSE(
            err, HD_EINVAL, NULL, "draft_tokens",
            "draft_tokens is %d, but nothing drafts: the model has no MTP layer, or it "
            "is off",
            g->draft_tokens);
    }
    for (size_t i = 0; i < g->n_stop; i++) {
        const size_t n = strlen(g->stop[i]);
        if (n >= 1 && n <= HD_MAX_STOP_BYTES) continue;
        return HD_REFUSE(err, HD_EINVAL, NULL, hd_field_of("stop[%zu]", i).path,
                         "stop[%zu] has %zu bytes; must be 1 to %d", i, n, HD_MAX_STOP_BYTES);
    }
    for (size_t i = 0; i < g->n_stop_tokens; i++) {
        HD_TRY(check_token(e, "stop", "stop_tokens", i, g->stop_tokens[i], err));
    }
    for (size_t i = 0; i < g->n_bias; i++) {
        const hd_logit_bias *b = &g->bias[i];
        HD_TRY(check_token(e, "biased", "bias", i, b->token, err));
        if (!isnan(b->value) && b->value < INFINITY) continue;
        return HD_REFUSE(err, HD_EINVAL, NULL, hd_field_of("bias[%zu]", i).path,
                         "the bias of token %d is no number", b->token);
    }
    return HD_OK;
}

/* ---- stops and sampling ---- */

static hd_status collect_stops(hd_engine *e, engine_request *r, const hd_request *g,
                               hd_err *err) {
    const hd_model_spec *c = e->spec;
    const size_t n_eos = g->ignore_eos ? 0 : (size_t)c->n_eos;
    r->stop_ids = calloc(n_eos + g->n_stop_tokens + 1, sizeof *r->stop_ids);
    r->ban = calloc(n_eos + g->n_stop_tokens + (size_t)c->n_eos + 1, sizeof *r->ban);
    r->bias = calloc(g->n_bias + 1, sizeof *r->bias);
    if (!r->stop_ids || !r->ban || !r->bias) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a request");
    }
    int32_t n = 0;
    for (size_t i = 0; i < n_eos; i++) r->stop_ids[n++] = c->eos[i];
    for (size_t i = 0; i < g->n_stop_tokens; i++) r->stop_ids[n++] = g->stop_tokens[i];
    memcpy(r->ban, r->stop_ids, (size_t)n * sizeof *r->ban);
    for (size_t i = 0; i < g->n_bias; i++) r->bias[i] = g->bias[i];
    r->request.stop_ids = r->stop_ids;
    r->request.n_stop = n;
    return HD_OK;
}

static void set_sampling(const engine_request *r, const hd_request *g, int32_t choice) {
    r->choices[choice].sampling = (hd_request_sampling){
        .params = {.seed = g->seed + (uint64_t)choice,
                   .temperature = g->temperature,
                   .top_p = g->top_p,
                   .min_p = g->min_p,
                   .repetition_penalty = g->repetition_penalty,
                   .presence_penalty = g->presence_penalty,
                   .frequency_penalty = g->frequency_penalty,
                   .top_k = g->top_k,
                   .n_bias = (int32_t)g->n_bias,
                   .n_ban = g->min_tokens && !r->constrained ? r->request.n_stop : 0,
                   .ban_until = r->n_prompt + g->min_tokens,
                   .n_top = g->top_logprobs,
                   .logprob = true,
                   .logprob_mode = g->logprob_mode},
        .bias = r->bias,
        .ban = r->ban,
        .constraint = r->constrained ? &r->constraint : NULL
    };
}

static hd_status copy_stop_strings(engine_request *r, const hd_request *g, hd_err *err) {
    r->stop = calloc(g->n_stop + 1, sizeof *r->stop);
    for (size_t i = 0; r->stop && i < g->n_stop; i++) {
        r->stop[i] = strdup(g->stop[i]);
        if (!r->stop[i]) break;
        r->rules.n_stop = i + 1;
    }
    r->rules.stop = r->stop;
    if (r->stop && r->rules.n_stop == g->n_stop) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for %zu stop strings", g->n_stop);
}

static hd_status open_choices(hd_engine *e, engine_request *r, const hd_request *g,
                              hd_err *err) {
    const int32_t n = g->n ? g->n : 1;
    r->rules.tokenizer = e->tokenizer;
    r->rules.markers = e->markers;
    r->rules.n_markers = e->n_markers;
    r->rules.eos = e->spec->eos;
    r->rules.n_eos = e->spec->n_eos;
    r->rules.keep_special = g->keep_special;
    r->rules.keep_stop = g->keep_stop;
    HD_TRY(copy_stop_strings(r, g, err));
    r->choices = calloc((size_t)n, sizeof *r->choices);
    if (!r->choices) return HD_FAIL(err, HD_ENOMEM, "no memory for %d choices", n);
    r->n_choices = n;
    for (int32_t i = 0; i < n; i++) {
        set_sampling(r, g, i);
        HD_TRY(hd_output_init(&r->choices[i].output, &r->rules, err));
    }
    return HD_OK;
}

/* ---- prompt log-probabilities ---- */

static hd_status open_prompt_logprobs(const hd_engine *e, engine_request *r,
                                      const hd_request *g, hd_err *err) {
    r->n_top = g->top_logprobs;
    if (r->n_top > e->max_logprobs) {
        return HD_REFUSE(err, HD_EINVAL, NULL, "top_logprobs",
                         "top_logprobs is %d; this engine gives at most %d (max_logprobs)",
                         r->n_top, e->max_logprobs);
    }
    if (!e->has_model && (g->top_logprobs || g->prompt_logprobs)) {
        return HD_FAIL(
            err, HD_EUNSUPPORTED,
            "the null backend has no model to give top_logprobs and prompt_logprobs");
    }
    const int32_t from = hd_max_i32(g->prompt_logprobs_from, 1);
    if (!g->prompt_logprobs || from >= r->n_prompt) return HD_OK;
    const size_t n = (size_t)(r->n_prompt - from);
    r->prompt_logprobs_from = from;
    r->prompt_logprobs = calloc(n, sizeof *r->prompt_logprobs);
    r->prompt_top = calloc(n * (size_t)r->n_top + 1, sizeof *r->prompt_top);
    if (r->prompt_logprobs && r->prompt_top) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for %zu prompt log-probabilities", n);
}

/* ---- choices of layers ---- */

static const struct {
    const char *parameter, *what, *option;
} replays[HD_N_REPLAYS] = {
    [HD_REPLAY_EXPERTS] = {"return_routed_experts", "routed experts",  "--routed-experts"},
    [HD_REPLAY_KEYS] = {"return_indexer_topk",   "indexer choices", "--indexer-topk"  },
};

/* Memory for all rows that a choice can have; it is touched as they come. */
static hd_status open_rows(const hd_engine *e, engine_request *r, hd_replay kind, hd_err *err) {
    const size_t rows = (size_t)(r->n_prompt - r->replay_from) + (size_t)r->request.max_new;
    const size_t row = (size_t)hd_replay_shape_of(e->spec, kind).row_bytes;
    for (int32_t i = 0; i < r->n_choices; i++) {
        r->choices[i].replay[kind] = malloc(rows * row + 1);
        if (r->choices[i].replay[kind]) continue;
        return HD_FAIL(err, HD_ENOMEM, "no memory for the %s of %zu tokens", replays[kind].what,
                       rows);
    }
    return HD_OK;
}

static hd_status open_replay(const hd_engine *e, engine_request *r, const hd_request *g,
                             hd_err *err) {
    for (int k = 0; k < HD_N_REPLAYS; k++) {
        if (!g->replay[k] || e->replay[k]) continue;
        return HD_REFUSE(err, HD_EUNSUPPORTED, "unsupported_parameter", replays[k].parameter,
                         "%s are not kept: the server was started without %s", replays[k].what,
                         replays[k].option);
    }
    if (g->replay_from < 0 || g->replay_from > r->n_prompt) {
        return HD_REFUSE(err, HD_EINVAL, "invalid_value", "routed_experts_start_len",
                         "routed_experts_start_len is %d; must be 0 to %d, the prompt's length",
                         g->replay_from, r->n_prompt);
    }
    r->replay_from = g->replay_from;
    for (int k = 0; k < HD_N_REPLAYS; k++) {
        if (g->replay[k]) HD_TRY(open_rows(e, r, (hd_replay)k, err));
    }
    return HD_OK;
}

hd_status engine_prepare(hd_engine *e, engine_request *r, const hd_request *g,
                         const hd_conversation *conversation, hd_err *err) {
    HD_TRY(check_numbers(e, g, err));
    HD_TRY(encode_prompt(e, r, g, conversation, err));
    if (r->prompt.n < 1) return HD_FAIL(err, HD_EINVAL, "the prompt is empty");
    if (r->prompt.n >= (size_t)e->max_context) {
        return HD_REFUSE(
            err, HD_EINVAL, "context_length_exceeded", NULL,
            "prompt is too long: %zu tokens > %d maximum; the maximum context length "
            "is %d tokens, one of them for the answer",
            r->prompt.n, e->max_context - 1, e->max_context);
    }
    r->n_prompt = (int32_t)r->prompt.n;
    const int32_t room = e->max_context - r->n_prompt;
    if (g->max_tokens > room) {
        return HD_REFUSE(
            err, HD_EINVAL, "context_length_exceeded", NULL,
            "%d prompt tokens and %d output tokens exceed the context: the maximum "
            "context length is %d tokens, and %d output tokens fit",
            r->n_prompt, g->max_tokens, e->max_context, room);
    }
    r->priority = g->priority;
    r->on_event = g->on_event;
    r->user = g->user;
    r->submitted_ns = hd_now_ns();
    r->request = (hd_sched_request){.prompt = r->prompt.ids,
                                    .n_prompt = r->n_prompt,
                                    .max_new = g->max_tokens ? g->max_tokens : room,
                                    .priority = g->priority,
                                    .draft_tokens = e->drafts ? g->draft_tokens : 0,
                                    .progress = g->prompt_progress,
                                    .salt = g->salt};
    if (g->queue_timeout_ns > 0)
        r->request.queue_until_ns = r->submitted_ns + g->queue_timeout_ns;
    HD_TRY(collect_stops(e, r, g, err));
    HD_TRY(open_prompt_logprobs(e, r, g, err));
    HD_TRY(engine_build_constraint(e, r, g, err));
    HD_TRY(open_choices(e, r, g, err));
    return open_replay(e, r, g, err);
}
