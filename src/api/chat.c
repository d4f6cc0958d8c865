/* chat.c - POST /v1/chat/completions: its parameters, streamed chunks and reply. */
#include <string.h>

#include "api/endpoints.h"
#include "api/job.h"

#define AT(field) offsetof(api_request, field)

/* A word, or in V4.1 a number. */
#define EFFORT                                                                              \
    .kind = API_LEVEL, .at = AT(effort), .words = efforts, .low = 1, .high = HD_MAX_EFFORT, \
    .number_at = AT(g.effort_number)

/* ---- parameters ---- */

static const char *const efforts[] = {"none", "minimal", "low", "medium",
                                      "high", "xhigh",   "max", NULL};
static const char *const switches[] = {"enabled", "disabled", "adaptive", NULL};
static const char *const displays[] = {"summarized", NULL}, *const modes[] = {"standard", NULL};
static const char *const tasks[] = {"action", "query",    "authority", "domain",
                                    "title",  "read_url", NULL};

/* clang-format off */
static const api_param thinking[] = {
    {"type", API_STRING, AT(thinking_type), .words = switches, .about = "on or off"},
    {"budget_tokens", API_INT, AT(g.max_reasoning),
     .about = "tokens of reasoning at most"},
    {"display", API_STRING, AT(checked), .words = displays, .about = "reasoning is given whole"},
};
/* clang-format on */
static const api_section thinking_section = API_SECTION(thinking);
const api_family api_thinking_family = {
    .name = "Thinking", .sections = {&thinking_section}, .closed = true};

/* clang-format off */
static const api_param reasoning[] = {
    {"effort", EFFORT, .about = "as reasoning_effort"},
    {"enabled", API_SWITCH, AT(g.thinking), .about = "on or off"},
    {"max_tokens", API_INT, AT(g.max_reasoning),
     .about = "tokens of reasoning at most"},
    {"summary", API_NOTED, .about = "reasoning is given whole"},
    {"generate_summary", API_NOTED, .about = "reasoning is given whole"},
    {"context", API_NOTED, .about = "the encoding says whose reasoning stays in the prompt"},
    {"mode", API_STRING, AT(checked), .words = modes, .about = "there is one"},
};
/* clang-format on */
static const api_section reasoning_section = API_SECTION(reasoning);
const api_family api_reasoning_options_family = {
    .name = "Reasoning", .sections = {&reasoning_section}, .closed = true};

/* clang-format off */
static const api_param template_options[] = {
    {"thinking", API_SWITCH, AT(g.thinking), .about = "on or off"},
    {"enable_thinking", API_SWITCH, AT(g.thinking), .about = "on or off"},
    {"reasoning_effort", EFFORT, .about = "as reasoning_effort"},
};
/* clang-format on */
static const api_section template_options_section = API_SECTION(template_options);
const api_family api_template_options_family = {
    .name = "ChatTemplateKwargs", .sections = {&template_options_section}, .closed = true};

/* clang-format off */
static const api_param conversation[] = {
    {"messages", API_ARRAY, AT(messages), .about = "the conversation"},
    {"tools", API_ARRAY, AT(tools), .costly = true,
     .about = "functions, at most " HD_STR(HD_CHAT_MAX_TOOLS)},
    {"tool_choice", API_ANY, AT(tool_choice), .about = "none, auto, required or a function"},
    {"reasoning_effort", EFFORT,
     .about = "none switches thinking off; V4 knows low, high and max, V4.1 also 1 to 100"},
    {"reasoning", API_NESTED, .nested = &api_reasoning_options_family,
     .about = "effort and switch in one"},
    {"thinking", API_NESTED, .nested = &api_thinking_family, .about = "switch and budget"},
    {"chat_template_kwargs", API_NESTED, .nested = &api_template_options_family,
     .about = "what templates of other servers take"},
    {"continue_final_message", API_BOOL, AT(continue_final),
     .about = "the last assistant message is continued"},
    {"add_generation_prompt", API_SWITCH, AT(generation_prompt),
     .about = "false only beside continue_final_message"},
    {"task", API_STRING, AT(task), .words = tasks, .about = "one-token outputs of V4"},
};
/* clang-format on */
const api_section api_conversation_section = API_SECTION(conversation);

/* clang-format off */
static const api_param chat[] = {
    {"max_completion_tokens", API_INT, AT(max_completion_tokens), API_SETS(max_tokens),
     .about = "of each choice; default: what the context leaves"},
    {"logprobs", API_BOOL, AT(w.logprobs), .about = "of each token"},
    {"top_logprobs", API_INT, AT(top_logprobs), API_SETS(top_logprobs),
     .limit = offsetof(api_limits, max_top_logprobs) + 1, .about = "alternatives of each"},
    {"parallel_tool_calls", API_BOOL, AT(w.parallel_calls),
     .about = "false: only the first call is passed on"},
    {"thinking_token_budget", API_INT, AT(g.max_reasoning),
     .about = "tokens of reasoning at most"},
    {"separate_reasoning", API_BOOL, AT(w.separate_reasoning),
     .about = "false: reasoning is part of the content"},
    {"include_reasoning", API_BOOL, AT(w.separate_reasoning), .about = "as separate_reasoning"},
    {"stream_reasoning", API_BOOL, AT(w.stream_reasoning),
     .about = "false: reasoning comes in one piece"},
    {"metadata", API_NOTED, .about = "it is not kept"},
    {"store", API_NOTED, .about = "chats are not kept"},
    {"prompt_cache_key", API_NOTED, .about = "prefixes are found by themselves"},
    {"prompt_cache_options", API_NOTED, .about = "prefixes are found by themselves"},
    {"prompt_cache_retention", API_NOTED, .about = "prefixes are kept as long as there is room"},
    {"safety_identifier", API_NOTED, .about = "who asks does not matter"},
    {"verbosity", API_NOTED, .about = "models have no such switch"},
    {"return_meta_info", API_REFUSED, .about = "use /generate"},
    {"input_ids", API_REFUSED, .about = "use /generate"},
    {"return_prompt_token_ids", API_BOOL, AT(w.prompt_ids), .about = "the ids of the prompt"},
    {"echo", API_REFUSED, .about = "use /v1/completions"},
    {"documents", API_REFUSED, .about = "put them into messages"},
    {"chat_template", API_REFUSED, .about = "the encoding is the model's own"},
    {"add_special_tokens", API_REFUSED, .about = "the encoding is the model's own"},
    {"modalities", API_ARRAY, AT(modalities), .about = "text only"},
    {"audio", API_REFUSED, .about = "models read and write text"},
    {"prediction", API_REFUSED, .about = "drafts are the model's own"},
    {"web_search_options", API_REFUSED, .about = "nothing is searched"},
    {"moderation", API_REFUSED, .about = "nothing is judged"},
    {"functions", API_REFUSED, .about = "use tools"},
    {"function_call", API_REFUSED, .about = "use tool_choice"},
};
/* clang-format on */

static const api_section chat_section = API_SECTION(chat);
static const char *const required[] = {"messages", NULL};
const api_family api_chat_family = {
    .name = "ChatCompletionRequest",
    .endpoint = "/v1/chat/completions",
    .required = required,
    .sections = {&chat_section, &api_conversation_section, &api_openai_section,
                 &api_sampling_section, &api_identity_section, &api_absent_section}
};

static bool take_modalities(api_request *r) {
    const json_t *item;
    size_t i;
    json_array_foreach(r->modalities, i, item) {
        const char *word = json_string_value(item);
        if (word && strcmp(word, "text") == 0) continue;
        return api_refuse(r, "unsupported_parameter", "modalities",
                          "modalities may be text only: models read and write text");
    }
    return true;
}

/* ---- log-probabilities ---- */

static void put_token(api_text *out, const api_job *job, int32_t token, float logprob) {
    size_t n;
    const hd_tokenizer *t = hd_engine_tokenizer(job->ctx->engine);
    const uint8_t *bytes = hd_tokenizer_piece(t, token, &n);
    api_puts(out, "{\"token\":");
    api_put_token(out, job->ctx, token);
    api_write(out, ",'logprob':%g,'bytes':[", (double)logprob);
    for (size_t i = 0; i < n; i++) {
        if (i > 0) api_puts(out, ",");
        api_put_int(out, bytes[i]);
    }
    api_puts(out, "]");
}

void api_chat_logprob(api_job *job, api_choice *c, const hd_step_tokens *step, int32_t i) {
    api_text *out = &c->logprobs;
    if (out->n > 0) api_puts(out, ",");
    put_token(out, job, step->tokens[i], step->logprobs[i]);
    api_puts(out, ",\"top_logprobs\":[");
    for (int32_t k = 0; k < step->n_top; k++) {
        const hd_alternative *a = &step->top[i * step->n_top + k];
        if (a->token < 0) break;
        if (k > 0) api_puts(out, ",");
        put_token(out, job, a->token, a->logprob);
        api_puts(out, "}");
    }
    api_puts(out, "]}");
}

static void put_logprobs(api_text *out, const api_job *job, const api_text *items) {
    if (!job->w.logprobs) {
        api_puts(out, ",\"logprobs\":null");
        return;
    }
    api_puts(out, ",\"logprobs\":{\"content\":[");
    api_put(out, items->data, items->n);
    api_puts(out, "]}");
}

/* ---- chunks ---- */

static void begin_chunk(api_job *job, const api_choice *c) {
    api_data_begin(job, NULL);
    api_put(&job->out, job->head.data, job->head.n);
    api_write(&job->out, "{'index':%d,'delta':{", c->index);
}

/* carries: this chunk contains what there is beside text (log-probabilities, token ids). */
static void end_chunk(api_job *job, const api_choice *c, bool carries) {
    api_text *out = &job->out;
    const bool first = !c->opened && carries && job->prompt_ids.n > 0;
    api_puts(out, "}");
    if (carries && c->logprobs.n > 0) {
        put_logprobs(out, job, &c->logprobs);
    } else {
        api_puts(out, ",\"logprobs\":null");
    }
    if (carries && job->w.token_ids) api_put_list(out, "token_ids", &c->ids);
    api_puts(out, ",\"finish_reason\":null}]");
    if (first) api_put_list(out, "prompt_token_ids", &job->prompt_ids);
    if (job->w.continuous_usage) {
        api_puts(out, ",\"usage\":");
        api_put_usage(out, job);
    }
    api_puts(out, "}");
    api_data_end(job);
}

static void chat_progress(api_job *job, const api_choice *c, const hd_event *e) {
    begin_chunk(job, c);
    api_puts(&job->out, "},\"logprobs\":null,\"finish_reason\":null}]");
    api_put_progress(&job->out, e);
    api_puts(&job->out, "}");
    api_data_end(job);
}

static void put_text_delta(api_job *job, const api_choice *c, const api_piece *p,
                           const char *key) {
    api_write(&job->out, "%s:%.*s", key, (int)p->n, api_piece_text(c, p));
}

static void put_call_delta(api_job *job, const api_choice *c, const api_piece *p) {
    char id[40];
    if (p->kind == HD_DELTA_CALL) {
        api_call_id(job, c, p->call, "call_", id);
        api_write(&job->out,
                  "'tool_calls':[{'index':%d,'id':%s,'type':'function',"
                  "'function':{'name':%.*s,'arguments':''}}]",
                  p->call, id, (int)p->n, api_piece_text(c, p));
    } else {
        api_write(&job->out, "'tool_calls':[{'index':%d,'function':{'arguments':%.*s}}]",
                  p->call, (int)p->n, api_piece_text(c, p));
    }
}

static void put_delta(api_job *job, const api_choice *c, const api_piece *p) {
    switch (p->kind) {
    case HD_DELTA_REASONING:
        put_text_delta(job, c, p, "reasoning_content");
        break;
    case HD_DELTA_CONTENT:
        put_text_delta(job, c, p, "content");
        break;
    case HD_DELTA_CALL:
    case HD_DELTA_ARGUMENTS:
        put_call_delta(job, c, p);
        break;
    case HD_DELTA_CALL_END:
    case HD_DELTA_NOTE:
        break;
    }
}

static void chat_chunk(api_job *job, api_choice *c) {
    bool carries = true;
    if (!c->opened) {
        begin_chunk(job, c);
        api_write(&job->out, "'role':'assistant','content':''");
        end_chunk(job, c, c->n_pieces == 0);
        carries = c->n_pieces > 0;
    }
    for (size_t i = 0; i < c->n_pieces; i++) {
        if (c->pieces[i].kind == HD_DELTA_CALL_END) continue;
        begin_chunk(job, c);
        put_delta(job, c, &c->pieces[i]);
        end_chunk(job, c, carries);
        carries = false;
    }
    if (carries && c->opened && (c->logprobs.n > 0 || c->ids.n > 0)) {
        begin_chunk(job, c);
        end_chunk(job, c, true);
    }
}

static void chat_finish(api_job *job, api_choice *c) {
    api_text *out = &job->out;
    api_data_begin(job, NULL);
    api_put(out, job->head.data, job->head.n);
    api_write(out, "{'index':%d,'delta':{},'logprobs':null,'finish_reason':%s,'matched_stop':",
              c->index, api_finish_reason(c));
    api_put_matched_stop(out, c);
    api_put_version_spans(out, c);
    api_puts(out, "}]");
    api_put_metadata(out, c);
    if (job->w.continuous_usage) {
        api_puts(out, ",\"usage\":");
        api_put_usage(out, job);
    }
    api_puts(out, "}");
    api_data_end(job);
}

/* ---- the complete reply ---- */

static void put_calls(api_text *out, const api_job *job, const api_choice *c) {
    char id[40];
    bool any = false;
    for (size_t i = 0; i < c->n_pieces; i++) {
        const api_piece *p = &c->pieces[i];
        if (p->kind != HD_DELTA_CALL) continue;
        api_puts(out, any ? "," : "[");
        any = true;
        api_call_id(job, c, p->call, "call_", id);
        api_write(out,
                  "{'id':%s,'index':%d,'type':'function','function':{'name':%.*s,'arguments':",
                  id, p->call, (int)p->n, api_piece_text(c, p));
        api_put_joined(out, c, HD_DELTA_ARGUMENTS, p->call);
        api_puts(out, "}}");
    }
    api_puts(out, any ? "]" : "null");
}

static bool has_piece(const api_choice *c, hd_delta_kind kind) {
    for (size_t i = 0; i < c->n_pieces; i++) {
        if (c->pieces[i].kind == kind) return true;
    }
    return false;
}

static void put_message(api_text *out, const api_job *job, const api_choice *c) {
    api_write(out, "{'role':'assistant','content':");
    if (has_piece(c, HD_DELTA_CONTENT) || !has_piece(c, HD_DELTA_CALL)) {
        api_put_joined(out, c, HD_DELTA_CONTENT, 0);
    } else {
        api_puts(out, "null");
    }
    api_puts(out, ",\"reasoning_content\":");
    if (has_piece(c, HD_DELTA_REASONING)) {
        api_put_joined(out, c, HD_DELTA_REASONING, 0);
    } else {
        api_puts(out, "null");
    }
    api_puts(out, ",\"tool_calls\":");
    put_calls(out, job, c);
    api_puts(out, "}");
}

static void chat_reply(api_job *job) {
    api_text *out = &job->out;
    api_put(out, job->head.data, job->head.n);
    for (int32_t i = 0; i < job->n_choices; i++) {
        const api_choice *c = &job->choices[i];
        api_write(out, i > 0 ? ",{'index':%d,'message':" : "{'index':%d,'message':", c->index);
        put_message(out, job, c);
        put_logprobs(out, job, &c->logprobs);
        api_write(out, ",'finish_reason':%s,'matched_stop':", api_finish_reason(c));
        api_put_matched_stop(out, c);
        if (job->w.token_ids) api_put_list(out, "token_ids", &c->ids);
        api_put_version_spans(out, c);
        api_puts(out, "}");
    }
    api_puts(out, "],\"usage\":");
    api_put_usage(out, job);
    if (job->prompt_ids.n > 0) api_put_list(out, "prompt_token_ids", &job->prompt_ids);
    api_put_metadata(out, &job->choices[job->n_choices - 1]);
    api_write(out, ",'system_fingerprint':%s}", "hadal-" HD_VERSION);
}

static const api_format chat_format = {.endpoint = "/v1/chat/completions",
                                       .id_prefix = "chatcmpl-",
                                       .object = "chat.completion",
                                       .chunk_object = "chat.completion.chunk",
                                       .shape = HTTP_OPENAI,
                                       .logprob = api_chat_logprob,
                                       .progress = chat_progress,
                                       .chunk = chat_chunk,
                                       .finish = chat_finish,
                                       .end = api_openai_end,
                                       .fail = api_openai_fail,
                                       .reply = chat_reply};

/* ---- the handler ---- */

static bool take_logprobs(api_request *r) {
    if (r->top_logprobs >= 0 && !r->w.logprobs) {
        return api_refuse(r, "invalid_value", "top_logprobs",
                          "top_logprobs wants logprobs: true");
    }
    r->g.top_logprobs = r->top_logprobs > 0 ? r->top_logprobs : 0;
    return true;
}

bool api_render_ids(api_request *r, hd_ids *ids) {
    hd_err err = {0};
    const hd_status st = hd_engine_encode(r->ctx->engine, ids, &r->g, &r->conversation, &err);
    return st == HD_OK || api_refuse_err(r, "messages", &err);
}

void api_put_ids(api_text *out, const int32_t *ids, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (i > 0) api_puts(out, ",");
        api_put_int(out, ids[i]);
    }
}

static bool list_prompt(api_request *r, api_text *out) {
    hd_ids ids = {0};
    if (!r->w.token_ids && !r->w.prompt_ids) return true;
    const bool ok = api_render_ids(r, &ids);
    api_put_ids(out, ids.ids, ids.n);
    hd_ids_deinit(&ids);
    return ok;
}

void api_chat(http_call *c, void *server) {
    api_request r;
    api_text ids = {0};
    if (api_request_open(&r, c, server, &api_chat_family, HTTP_OPENAI) && take_logprobs(&r) &&
        take_modalities(&r) && api_take_sampling(&r) && api_take_response_format(&r) &&
        api_take_thinking(&r) && api_take_messages(&r) && list_prompt(&r, &ids)) {
        const api_prompt prompt = {.g = r.g};
        api_job_start(&r, &chat_format, &prompt, 1, &ids, NULL);
    } else {
        api_request_send_refusal(&r);
    }
    api_text_deinit(&ids);
    api_request_close(&r);
}
