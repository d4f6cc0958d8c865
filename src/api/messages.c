/* messages.c - POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API. */
#include <string.h>

#include "api/endpoints.h"
#include "api/job.h"
#include "api/translate.h"

#define AT(field) offsetof(api_request, field)

enum { ENCODING_TOKENS = 1024 };

/* ---- parameters ---- */

static const char *const efforts[] = {"low", "medium", "high", "xhigh", "max", NULL};

/* clang-format off */
static const api_param output[] = {
    {"effort", API_STRING, AT(effort), .words = efforts, .about = "of thinking"},
    {"format", API_OBJECT, AT(response_format), .costly = true, .about = "a JSON schema"},
};
/* clang-format on */
static const api_section output_section = API_SECTION(output);
static const api_family output_family = {
    .name = "OutputConfig", .sections = {&output_section}, .closed = true};

/* clang-format off */
static const api_param management[] = {
    {"edits", API_ARRAY, AT(edits), .about = "clear_thinking that keeps all; others are refused"},
};
/* clang-format on */
static const api_section management_section = API_SECTION(management);
static const api_family management_family = {
    .name = "ContextManagement", .sections = {&management_section}, .closed = true};

/* clang-format off */
static const api_param messages[] = {
    {"model", API_STRING, AT(checked), .high = API_MAX_MODEL_NAME,
     .about = "any name: one model is served"},
    {"messages", API_ARRAY, AT(messages), .about = "the conversation"},
    {"system", API_ANY, AT(system), .about = "a text, or blocks of text"},
    {"max_tokens", API_INT, AT(max_tokens), API_SETS(max_tokens),
     .about = "of the output; default: what the context leaves"},
    {"temperature", API_NUMBER, AT(g.temperature), .about = "0 is greedy"},
    {"top_p", API_NUMBER, AT(g.top_p), .about = "nucleus"},
    {"top_k", API_INT, AT(g.top_k), .about = "-1 and 0 mean all"},
    {"seed", API_LONG, AT(g.seed), .about = "the same request with the same seed repeats; drawn anew where absent"},
    {"stop_sequences", API_TEXTS, AT(stop), .about = api_stop_about},
    {"stream", API_BOOL, AT(w.stream), .about = "server-sent events"},
    {"tools", API_ARRAY, AT(tools), .costly = true,
     .about = "functions, at most " HD_STR(HD_CHAT_MAX_TOOLS)},
    {"tool_choice", API_OBJECT, AT(tool_choice), .about = "auto, any, none or a tool"},
    {"thinking", API_NESTED, .nested = &api_thinking_family, .about = "off by default"},
    {"output_config", API_NESTED, .nested = &output_family, .about = "effort and format"},
    {"output_format", API_OBJECT, AT(response_format), .costly = true,
     .about = "as output_config.format"},
    {"metadata", API_NOTED, .about = "who asks does not matter"},
    {"service_tier", API_NOTED, .about = "there is one"},
    {"cache_control", API_NOTED, .about = "prefixes are cached by themselves"},
    {"inference_geo", API_NOTED, .about = "it is computed here"},
    {"speed", API_NOTED, .about = "there is one"},
    {"billing_policy", API_NOTED, .about = "nothing is billed"},
    {"fallback_credit_token", API_NOTED, .about = "nothing is billed"},
    {"fallbacks", API_NOTED, .about = "one model is served, which declines nothing"},
    {"diagnostics", API_REFUSED, .about = "the usage says how much was cached"},
    {"compaction", API_REFUSED, .about = "messages are not shortened"},
    {"thread", API_REFUSED, .about = "conversations are not kept",
     .code = "thread_unsupported_request"}, /* tells clients to send whole conversations */
    {"context_management", API_NESTED, .nested = &management_family,
     .about = "edits that leave all as it is"},
    {"container", API_REFUSED, .about = "nothing is run"},
    {"mcp_servers", API_REFUSED, .about = "nothing is connected to"},
};
/* clang-format on */
static const api_section messages_section = API_SECTION(messages);
static const char *const required[] = {"messages", NULL};
const api_family api_messages_family = {
    .name = "MessagesRequest",
    .endpoint = "/v1/messages",
    .required = required,
    .sections = {&messages_section, &api_identity_section, &api_absent_section}
};
const api_family api_count_family = {
    .name = "CountTokensRequest",
    .endpoint = "/v1/messages/count_tokens",
    .required = required,
    .sections = {&messages_section, &api_identity_section, &api_absent_section}
};

/* ---- blocks ---- */

static void begin_event(api_job *job, const char *type) {
    api_data_begin(job, type);
    api_write(&job->out, "{'type':%s", type);
}

static void end_event(api_job *job) {
    api_puts(&job->out, "}");
    api_data_end(job);
}

static void begin_delta(api_job *job, const api_choice *c, const char *type) {
    begin_event(job, "content_block_delta");
    api_write(&job->out, ",'index':%d,'delta':{'type':%s", c->n_blocks - 1, type);
}

static void put_block_head(api_text *out, const api_job *job, const api_choice *c,
                           const api_piece *p) {
    char id[40];
    if (p->kind == HD_DELTA_CALL) {
        api_call_id(job, c, p->call, "toolu_", id);
        api_write(out, "{'type':'tool_use','id':%s,'name':%.*s,'input':", id, (int)p->n,
                  api_piece_text(c, p));
    } else if (p->kind == HD_DELTA_REASONING) {
        api_write(out, "{'type':'thinking','thinking':'");
    } else {
        api_write(out, "{'type':'text','text':'");
    }
}

/* In a stream the block begins empty; otherwise it is written to item. */
static void open_block(api_job *job, api_choice *c, const api_piece *p) {
    if (!job->w.stream) {
        api_text_clear(&c->item);
        put_block_head(&c->item, job, c, p);
        return;
    }
    begin_event(job, "content_block_start");
    api_write(&job->out, ",'index':%d,'content_block':", c->n_blocks - 1);
    put_block_head(&job->out, job, c, p);
    api_puts(&job->out, p->kind == HD_DELTA_CALL ? "{}" : "\"");
    if (p->kind == HD_DELTA_REASONING) api_write(&job->out, ",'signature':''");
    api_puts(&job->out, "}");
    end_event(job);
}

static void block_delta(api_job *job, api_choice *c, const api_piece *p) {
    static const char *const types[][2] = {
        [HD_DELTA_REASONING] = {"thinking_delta",   "thinking"    },
        [HD_DELTA_CONTENT] = {"text_delta",       "text"        },
        [HD_DELTA_ARGUMENTS] = {"input_json_delta", "partial_json"},
    };
    const char *text = api_piece_text(c, p);
    if (job->w.stream) {
        begin_delta(job, c, types[p->kind][0]);
        api_write(&job->out, ",%s:%.*s}", types[p->kind][1], (int)p->n, text);
        end_event(job);
    } else if (p->kind == HD_DELTA_ARGUMENTS) {
        api_put(&c->item, text, p->n); /* arguments are JSON already */
    } else {
        api_put_escaped(&c->item, text, p->n);
    }
}

static void close_block(api_job *job, api_choice *c, hd_delta_kind kind, bool whole) {
    const bool thinking = kind == HD_DELTA_REASONING;
    if (job->w.stream) {
        if (thinking) {
            begin_delta(job, c, "signature_delta");
            api_write(&job->out, ",'signature':'none'}");
            end_event(job);
        }
        begin_event(job, "content_block_stop");
        api_write(&job->out, ",'index':%d", c->n_blocks - 1);
        end_event(job);
        return;
    }
    if (!whole) return; /* a truncated call must not be executed */
    if (kind != HD_DELTA_CALL) api_puts(&c->item, "\"");
    if (thinking) api_write(&c->item, ",'signature':'none'");
    api_puts(&c->item, "}");
    if (c->kept.n > 0) api_puts(&c->kept, ",");
    api_put(&c->kept, c->item.data, c->item.n);
}

static const api_block_writer blocks = {open_block, block_delta, close_block};

/* ---- replies ---- */

static const char *stop_reason(const api_job *job, const api_choice *c) {
    switch (c->finish_reason) {
    case HD_FINISH_STOP:
        return c->n_calls > 0 ? "tool_use" : c->stop_text.n > 0 ? "stop_sequence" : "end_turn";
    case HD_FINISH_LENGTH:
        return job->w.to_the_end ? "model_context_window_exceeded" : "max_tokens";
    case HD_FINISH_NONE:
        return NULL;
    case HD_FINISH_ABORT:
    case HD_FINISH_TIMEOUT:
    case HD_FINISH_ERROR:
        return "pause_turn";
    }
    return NULL;
}

static void put_stop(api_text *out, const api_job *job, const api_choice *c) {
    api_write(out, "'stop_reason':%s,'stop_sequence':", stop_reason(job, c));
    if (c->stop_text.n > 0) {
        api_put_string(out, c->stop_text.data, c->stop_text.n);
    } else {
        api_puts(out, "null");
    }
}

static void put_usage(api_text *out, const api_job *job) {
    const api_totals t = api_job_totals(job);
    api_write(out,
              "{'input_tokens':%lld,'cache_creation_input_tokens':0,"
              "'cache_read_input_tokens':%lld,'output_tokens':%lld}",
              (long long)(t.prompt - t.cached), (long long)t.cached, (long long)t.output);
}

static void put_message(api_job *job, const api_choice *c) {
    api_write(&job->out, "{'id':%s,'type':'message','role':'assistant','model':%s,'content':[",
              job->id, job->model);
    api_put(&job->out, c->kept.data, c->kept.n);
    api_puts(&job->out, "],");
    put_stop(&job->out, job, c);
    api_puts(&job->out, ",\"usage\":");
    put_usage(&job->out, job);
    api_puts(&job->out, "}");
}

static void messages_begin(api_job *job) {
    begin_event(job, "message_start");
    api_puts(&job->out, ",\"message\":");
    api_choice fresh = {.stop_token = -1};
    put_message(job, &fresh);
    end_event(job);
}

static void messages_chunk(api_job *job, api_choice *c) {
    api_walk_blocks(job, c, &blocks);
}

static void messages_finish(api_job *job, api_choice *c) {
    api_close_block(job, c, &blocks);
    begin_event(job, "message_delta");
    api_puts(&job->out, ",\"delta\":{");
    put_stop(&job->out, job, c);
    api_puts(&job->out, "},\"usage\":");
    put_usage(&job->out, job);
    end_event(job);
}

static void messages_end(api_job *job) {
    begin_event(job, "message_stop");
    end_event(job);
}

static void messages_fail(api_job *job) {
    const api_refusal *why = &job->failure;
    begin_event(job, "error");
    api_write(&job->out, ",'error':{'type':%s,'message':%s}",
              api_error_type(HTTP_ANTHROPIC, why->status), why->message);
    end_event(job);
}

static void messages_reply(api_job *job) {
    api_choice *c = &job->choices[0];
    api_walk_blocks(job, c, &blocks);
    api_close_block(job, c, &blocks);
    put_message(job, c);
}

static const api_format messages_format = {.endpoint = "/v1/messages",
                                           .id_prefix = "msg_",
                                           .shape = HTTP_ANTHROPIC,
                                           .begin = messages_begin,
                                           .chunk = messages_chunk,
                                           .finish = messages_finish,
                                           .end = messages_end,
                                           .fail = messages_fail,
                                           .reply = messages_reply};

/* ---- the handlers ---- */

/* Clients of this API must send max_tokens, and send the maximum of the model that they
 * know. As with Anthropic's own API, output then ends at the context limit. */
static bool fit_context(api_request *r) {
    size_t n;
    hd_ids ids = {0};
    if (r->g.max_tokens == 0) return true;
    /* a body has at least as many bytes as tokens, except for those of the chat template */
    http_body(r->call, &n);
    if (n + ENCODING_TOKENS + (size_t)r->g.max_tokens <= (size_t)r->max_context) return true;
    const bool ok = api_render_ids(r, &ids);
    r->w.to_the_end = ids.n + (size_t)r->g.max_tokens > (size_t)r->max_context;
    if (r->w.to_the_end) r->g.max_tokens = 0;
    hd_ids_deinit(&ids);
    return ok;
}

/* Agents send a context edit that clears no thinking; edits that would change messages are
 * refused. */
static bool check_edits(api_request *r) {
    const json_t *edit;
    size_t i;
    json_array_foreach(r->edits, i, edit) {
        const char *type = json_string_value(json_object_get(edit, "type"));
        const char *keep = json_string_value(json_object_get(edit, "keep"));
        if (type && strncmp(type, "clear_thinking_", 15) == 0 && keep &&
            strcmp(keep, "all") == 0) {
            continue;
        }
        return api_refuse(r, "unsupported_parameter", "context_management.edits",
                          "context_management.edits[%zu] is not supported: messages are not "
                          "edited, but for clear_thinking with keep all",
                          i);
    }
    return true;
}

/* Thinking is off unless the request enables it. */
static bool take_messages(api_request *r) {
    if (!api_take_sampling(r) || !api_take_response_format(r) || !api_take_thinking(r))
        return false;
    if (r->g.thinking == 0) r->g.thinking = r->thinking_type ? 1 : -1;
    return check_edits(r) && api_translate_messages(r) && api_take_messages(r);
}

void api_messages(http_call *c, void *server) {
    api_request r;
    if (api_request_open(&r, c, server, &api_messages_family, HTTP_ANTHROPIC) &&
        take_messages(&r) && fit_context(&r)) {
        const api_prompt prompt = {.g = r.g};
        api_job_start(&r, &messages_format, &prompt, 1, NULL, NULL);
    } else {
        api_request_send_refusal(&r);
    }
    api_request_close(&r);
}

void api_count_tokens(http_call *c, void *server) {
    api_request r;
    hd_ids ids = {0};
    api_text out = {0};
    if (api_request_open(&r, c, server, &api_count_family, HTTP_ANTHROPIC) &&
        take_messages(&r) && api_render_ids(&r, &ids)) {
        api_write(&out, "{'input_tokens':%lld}", (long long)ids.n);
        http_reply(c, 200, "application/json", out.data, out.n);
    } else {
        api_request_send_refusal(&r);
    }
    api_text_deinit(&out);
    hd_ids_deinit(&ids);
    api_request_close(&r);
}
