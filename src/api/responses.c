/* responses.c - POST /v1/responses: OpenAI's Responses API with its items and streamed
 * events. Responses can be stored (kept.c) or run in the background. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "api/background.h"
#include "api/endpoints.h"
#include "api/job.h"
#include "api/store.h"
#include "api/translate.h"

#define AT(field) offsetof(api_request, field)

/* ---- parameters ---- */

static const char *const whole_only[] = {"disabled", NULL};

/* clang-format off */
static const api_param text_options[] = {
    {"format", API_OBJECT, AT(response_format), .costly = true,
     .about = "text, json_object or json_schema"},
    {"verbosity", API_NOTED, .about = "models have no such switch"},
};
/* clang-format on */
static const api_section text_section = API_SECTION(text_options);
static const api_family text_family = {
    .name = "TextOptions", .sections = {&text_section}, .closed = true};

/* clang-format off */
static const api_param stream_options[] = {
    {"include_obfuscation", API_ONLY, .about = "events are not padded"},
};
/* clang-format on */
static const api_section stream_section = API_SECTION(stream_options);
static const api_family stream_family = {
    .name = "ResponseStreamOptions", .sections = {&stream_section}, .closed = true};

/* clang-format off */
static const api_param responses[] = {
    {"model", API_STRING, AT(checked), .high = API_MAX_MODEL_NAME,
     .about = "any name: one model is served"},
    {"input", API_ANY, AT(prompt), .about = "a text, or items"},
    {"instructions", API_STRING, AT(instructions), .high = 1 << 22, .about = "a system text"},
    {"previous_response_id", API_STRING, AT(previous), .high = API_MAX_ID + 24,
     .costly = true, .about = "a response that is continued"},
    {"store", API_BOOL, AT(store), .about = "keep the response; true by default"},
    {"max_output_tokens", API_INT, AT(max_completion_tokens), API_SETS(max_tokens),
     .about = "default: what the context leaves"},
    {"stream", API_BOOL, AT(w.stream), .about = "server-sent events"},
    {"stream_options", API_NESTED, .nested = &stream_family, .about = "of a stream"},
    {"tools", API_ARRAY, AT(tools), .costly = true,
     .about = "functions, at most " HD_STR(HD_CHAT_MAX_TOOLS)},
    {"tool_choice", API_ANY, AT(tool_choice), .about = "none, auto, required or a function"},
    {"parallel_tool_calls", API_BOOL, AT(w.parallel_calls),
     .about = "false: only the first call is passed on"},
    {"reasoning", API_NESTED, .nested = &api_reasoning_options_family, .about = "effort"},
    {"chat_template_kwargs", API_NESTED, .nested = &api_template_options_family,
     .about = "what templates of other servers take"},
    {"text", API_NESTED, .nested = &text_family, .about = "the answer's format"},
    {"include", API_ARRAY, AT(content_list), .about = "message.output_text.logprobs"},
    {"top_logprobs", API_INT, AT(top_logprobs), API_SETS(top_logprobs),
     .limit = offsetof(api_limits, max_top_logprobs) + 1, .about = "alternatives of each"},
    {"seed", API_LONG, AT(g.seed), .about = "the same request with the same seed repeats; drawn anew where absent"},
    {"metadata", API_OBJECT, AT(echoed), .about = "given back"},
    {"truncation", API_STRING, AT(checked), .words = whole_only, .about = "input is not cut"},
    {"background", API_BOOL, AT(w.background),
     .about = "the response is computed without its client, which reads it later"},
    {"background_options", API_NOTED, .about = "responses begin as soon as they can"},
    {"max_tool_calls", API_NOTED, .about = "for tools of the server, which there are none of"},
    {"service_tier", API_NOTED, .about = "there is one"},
    {"user", API_NOTED, .about = "who asks does not matter"},
    {"safety_identifier", API_NOTED, .about = "who asks does not matter"},
    {"prompt_cache_key", API_NOTED, .about = "prefixes are found by themselves"},
    {"prompt_cache_options", API_NOTED, .about = "prefixes are found by themselves"},
    {"prompt_cache_retention", API_NOTED, .about = "prefixes are kept as long as there is room"},
    {"access_programs", API_NOTED, .about = "who asks does not matter"},
    {"context_management", API_REFUSED, .about = "input is not shortened"},
    {"image", API_REFUSED, .about = "models read text"},
    {"moderation", API_REFUSED, .about = "nothing is judged"},
    {"prompt", API_REFUSED, .about = "there are no stored prompts"},
    {"conversation", API_REFUSED, .about = "use previous_response_id"},
    {"n", API_REFUSED, .about = "there is one output"},
};
/* clang-format on */
static const api_section responses_section = API_SECTION(responses);
static const char *const required[] = {"input", NULL};
const api_family api_responses_family = {
    .name = "ResponseRequest",
    .endpoint = "/v1/responses",
    .required = required,
    .sections = {&responses_section, &api_sampling_section, &api_identity_section,
                 &api_absent_section}
};

/* clang-format off */
static const api_param counting[] = {
    {"personality", API_REFUSED, .about = "say it in the instructions"},
};
/* clang-format on */
static const api_section counting_section = API_SECTION(counting);
const api_family api_input_tokens_family = {
    .name = "InputTokensRequest",
    .endpoint = "/v1/responses/input_tokens",
    .required = required,
    .sections = {&counting_section, &responses_section, &api_sampling_section,
                 &api_identity_section, &api_absent_section}
};

/* ---- what a response repeats of its request ---- */

typedef struct response_state {
    api_text echo; /* members that follow a comma */
    /* all input as a JSON array without its end; empty: the response is not stored */
    api_text items;
    uint64_t salt;
} response_state;

static void response_deinit(void *state) {
    response_state *s = state;
    if (!s) return;
    api_text_deinit(&s->echo);
    api_text_deinit(&s->items);
    free(s);
}

static void put_member(api_text *out, const api_request *r, const char *key,
                       const char *otherwise) {
    const json_t *v = json_object_get(r->body, key);
    api_write(out, ",%s:", key);
    if (v && !json_is_null(v)) {
        api_put_json(out, v);
    } else {
        api_puts(out, otherwise);
    }
}

/* Returns a float as the client wrote it: 0.95 instead of 0.949999988. */
static double shown(float v) {
    return round((double)v * 1e6) / 1e6;
}

static void put_echo(api_text *out, const api_request *r) {
    static const char *const members[][2] = {
        {"instructions",         "null"                              },
        {"previous_response_id", "null"                              },
        {"max_output_tokens",    "null"                              },
        {"metadata",             "{}"                                },
        {"tools",                "[]"                                },
        {"tool_choice",          "\"auto\""                          },
        {"parallel_tool_calls",  "true"                              },
        {"reasoning",            "{\"effort\":null,\"summary\":null}"},
        {"text",                 "{\"format\":{\"type\":\"text\"}}"  },
        {"truncation",           "\"disabled\""                      },
        {"user",                 "null"                              },
        {"top_logprobs",         "0"                                 }
    };
    for (size_t i = 0; i < HD_LEN(members); i++) {
        put_member(out, r, members[i][0], members[i][1]);
    }
    api_write(out, ",'temperature':%g,'top_p':%g,'store':%i,'background':%i",
              shown(r->g.temperature), shown(r->g.top_p), r->store && r->ctx->store,
              r->w.background);
}

/* ---- items ---- */

static const char *const item_prefixes[] = {
    [HD_DELTA_REASONING] = "rs_", [HD_DELTA_CONTENT] = "msg_", [HD_DELTA_CALL] = "fc_"};

static void item_id(const api_job *job, const api_choice *c, hd_delta_kind kind, char id[40]) {
    api_call_id(job, c, 0x10000 + c->n_blocks, item_prefixes[kind], id);
}

/* Writes a content part of the item with its text, or empty. */
static void put_part(api_text *out, const api_choice *c, hd_delta_kind kind, bool filled) {
    api_write(out, "{'type':%s,'text':'",
              kind == HD_DELTA_REASONING ? "reasoning_text" : "output_text");
    if (filled) api_put(out, c->item.data, c->item.n);
    api_puts(out, "\"");
    if (kind == HD_DELTA_CONTENT) {
        api_write(out, ",'annotations':[],'logprobs':[");
        if (filled) api_put(out, c->tops.data, c->tops.n);
        api_puts(out, "]");
    }
    api_puts(out, "}");
}

/* With status in_progress the item is empty. */
static void put_item(api_text *out, const api_job *job, const api_choice *c, hd_delta_kind kind,
                     const char *status) {
    const bool filled = strcmp(status, "in_progress") != 0;
    char id[40], call_id[40];
    item_id(job, c, kind, id);
    if (kind == HD_DELTA_CALL) {
        api_call_id(job, c, c->place, "call_", call_id);
        api_write(out, "{'type':'function_call','id':%s,'call_id':%s,'name':%.*s,'arguments':'",
                  id, call_id, (int)c->call_name.n, c->call_name.data);
        if (filled) api_put(out, c->item.data, c->item.n);
        api_write(out, "','status':%s}", status);
        return;
    }
    if (kind == HD_DELTA_REASONING) {
        api_write(out, "{'type':'reasoning','id':%s,'summary':[],'content':[", id);
    } else {
        api_write(out, "{'type':'message','id':%s,'role':'assistant','status':%s,'content':[",
                  id, status);
    }
    if (filled) put_part(out, c, kind, true);
    api_puts(out, "]}");
}

/* ---- events ---- */

static void begin_event(api_job *job, const char *type) {
    api_data_begin(job, type);
    api_write(&job->out, "{'type':%s,'sequence_number':%d", type, job->sequence++);
}

static void end_event(api_job *job) {
    api_puts(&job->out, "}");
    api_data_end(job);
}

static void item_event(api_job *job, const api_choice *c, hd_delta_kind kind,
                       const char *type) {
    char id[40];
    item_id(job, c, kind, id);
    begin_event(job, type);
    api_write(&job->out, ",'item_id':%s,'output_index':%d", id, c->n_blocks - 1);
    if (kind != HD_DELTA_CALL) api_write(&job->out, ",'content_index':0");
}

static void whole_item_event(api_job *job, const api_choice *c, hd_delta_kind kind,
                             const char *type, const char *status) {
    begin_event(job, type);
    api_write(&job->out, ",'output_index':%d,'item':", c->n_blocks - 1);
    put_item(&job->out, job, c, kind, status);
    end_event(job);
}

/* call_name is the name of the open call, and place its number. */
static void open_item(api_job *job, api_choice *c, const api_piece *p) {
    api_text_clear(&c->item);
    api_text_clear(&c->tops);
    if (p->kind == HD_DELTA_CALL) {
        api_text_clear(&c->call_name);
        api_put(&c->call_name, api_piece_text(c, p), p->n);
        c->place = p->call;
    }
    if (!job->w.stream) return;
    whole_item_event(job, c, p->kind, "response.output_item.added", "in_progress");
    if (p->kind == HD_DELTA_CALL) return;
    item_event(job, c, p->kind, "response.content_part.added");
    api_puts(&job->out, ",\"part\":");
    put_part(&job->out, c, p->kind, false);
    end_event(job);
}

static void item_delta(api_job *job, api_choice *c, const api_piece *p) {
    static const char *const types[] = {[HD_DELTA_REASONING] = "response.reasoning_text.delta",
                                        [HD_DELTA_CONTENT] = "response.output_text.delta",
                                        [HD_DELTA_ARGUMENTS] =
                                            "response.function_call_arguments.delta"};
    const bool call = p->kind == HD_DELTA_ARGUMENTS, content = p->kind == HD_DELTA_CONTENT;
    const char *text = api_piece_text(c, p);
    api_put_escaped(&c->item, text, p->n);
    if (job->w.stream) {
        item_event(job, c, call ? HD_DELTA_CALL : p->kind, types[p->kind]);
        api_write(&job->out, ",'delta':%.*s", (int)p->n, text);
        if (content) api_put_list(&job->out, "logprobs", &c->logprobs);
        end_event(job);
    }
    if (content && c->logprobs.n > 0) {
        if (c->tops.n > 0) api_puts(&c->tops, ",");
        api_put(&c->tops, c->logprobs.data, c->logprobs.n);
    }
    api_text_clear(&c->logprobs);
}

static void end_text_item(api_job *job, const api_choice *c, hd_delta_kind kind) {
    const bool content = kind == HD_DELTA_CONTENT;
    item_event(job, c, kind,
               content ? "response.output_text.done" : "response.reasoning_text.done");
    api_puts(&job->out, ",\"text\":\"");
    api_put(&job->out, c->item.data, c->item.n);
    api_puts(&job->out, "\"");
    if (content) api_put_list(&job->out, "logprobs", &c->tops);
    end_event(job);
    item_event(job, c, kind, "response.content_part.done");
    api_puts(&job->out, ",\"part\":");
    put_part(&job->out, c, kind, true);
    end_event(job);
}

static void end_call_item(api_job *job, const api_choice *c) {
    item_event(job, c, HD_DELTA_CALL, "response.function_call_arguments.done");
    api_write(&job->out, ",'name':%.*s,'arguments':'", (int)c->call_name.n, c->call_name.data);
    api_put(&job->out, c->item.data, c->item.n);
    api_puts(&job->out, "\"");
    end_event(job);
}

static void close_item(api_job *job, api_choice *c, hd_delta_kind kind, bool whole) {
    const bool cut =
        !whole || (kind == HD_DELTA_CONTENT && c->finish_reason == HD_FINISH_LENGTH);
    const char *status = cut ? "incomplete" : "completed";
    if (job->w.stream) {
        if (kind == HD_DELTA_CALL) {
            end_call_item(job, c);
        } else {
            end_text_item(job, c, kind);
        }
        whole_item_event(job, c, kind, "response.output_item.done", status);
    }
    if (c->kept.n > 0) api_puts(&c->kept, ",");
    put_item(&c->kept, job, c, kind, status);
}

static const api_block_writer items = {open_item, item_delta, close_item};

/* ---- the response ---- */

static const char *status_of(const api_job *job, const api_choice *c) {
    if (job->failure.status) return "failed";
    switch (c->finish_reason) {
    case HD_FINISH_NONE:
        return "in_progress";
    case HD_FINISH_STOP:
        return "completed";
    case HD_FINISH_LENGTH:
        return "incomplete";
    case HD_FINISH_ABORT:
        return "cancelled";
    case HD_FINISH_TIMEOUT:
    case HD_FINISH_ERROR:
        return "failed";
    }
    return "failed";
}

static void put_usage(api_text *out, const api_job *job) {
    const api_totals t = api_job_totals(job);
    api_write(out,
              "{'input_tokens':%lld,'input_tokens_details':{'cached_tokens':%lld,"
              "'cache_write_tokens':0},"
              "'output_tokens':%lld,'output_tokens_details':{'reasoning_tokens':%lld},"
              "'total_tokens':%lld}",
              (long long)t.prompt, (long long)t.cached, (long long)t.output,
              (long long)t.reasoning, (long long)(t.prompt + t.output));
}

static void put_response(api_text *out, const api_job *job, const char *status) {
    const response_state *s = job->state;
    const api_choice *c = &job->choices[0];
    const bool over = strcmp(status, "in_progress") != 0 && strcmp(status, "queued") != 0;
    api_write(
        out, "{'id':%s,'object':'response','created_at':%lld,'status':%s,'model':%s,'output':[",
        job->id, (long long)job->created, status, job->model);
    if (over) api_put(out, c->kept.data, c->kept.n);
    api_puts(out, "],\"usage\":");
    if (over) {
        put_usage(out, job);
    } else {
        api_puts(out, "null");
    }
    api_puts(out, ",\"error\":");
    if (job->failure.status) {
        api_write(out, "{'code':'server_error','message':%s}", job->failure.message);
    } else {
        api_puts(out, "null");
    }
    api_puts(out, ",\"incomplete_details\":");
    if (strcmp(status, "incomplete") == 0) {
        api_write(out, "{'reason':'max_output_tokens'}");
    } else {
        api_puts(out, "null");
    }
    api_put(out, s->echo.data, s->echo.n);
    api_puts(out, "}");
}

/* Stores the response before the client has it, because the client may request it at once. */
static void store(api_job *job, const char *status) {
    response_state *s = job->state;
    api_text object = {0};
    const api_choice *c = &job->choices[0];
    if (s->items.n == 0) return;
    if (job->w.background && api_background_forgotten(job->ctx->background, job)) return;
    put_response(&object, job, status);
    if (s->items.n > 1 && c->kept.n > 0) api_puts(&s->items, ",");
    api_put(&s->items, c->kept.data, c->kept.n);
    api_puts(&s->items, "]");
    api_store_put(job->ctx->store, job->id, s->salt, &object, &s->items);
    api_text_deinit(&object);
}

static void response_event(api_job *job, const char *type, const char *status) {
    begin_event(job, type);
    api_puts(&job->out, ",\"response\":");
    put_response(&job->out, job, status);
    end_event(job);
}

/* Stores without items: the response cannot be continued before its end. */
static void store_unfinished(const api_job *job, const char *status) {
    const response_state *s = job->state;
    api_text object = {0}, none = {0};
    put_response(&object, job, status);
    api_store_put(job->ctx->store, job->id, s->salt, &object, &none);
    api_text_deinit(&object);
}

static void responses_accept(api_job *job) {
    store_unfinished(job, "queued");
}

static void responses_begin(api_job *job) {
    if (job->w.background) store_unfinished(job, "in_progress");
    response_event(job, "response.created", "in_progress");
    response_event(job, "response.in_progress", "in_progress");
}

static void responses_chunk(api_job *job, api_choice *c) {
    api_walk_blocks(job, c, &items);
}

static void responses_finish(api_job *job, api_choice *c) {
    api_close_block(job, c, &items);
}

static void responses_end(api_job *job) {
    const char *status = status_of(job, &job->choices[0]);
    store(job, status);
    response_event(
        job, strcmp(status, "completed") == 0 ? "response.completed" : "response.incomplete",
        status);
}

static void responses_fail(api_job *job) {
    if (job->w.background) store(job, "failed");
    response_event(job, "response.failed", "failed");
}

static void responses_reply(api_job *job) {
    api_choice *c = &job->choices[0];
    const char *status = status_of(job, c);
    api_walk_blocks(job, c, &items);
    api_close_block(job, c, &items);
    store(job, status);
    put_response(&job->out, job, status);
}

static const api_format responses_format = {.endpoint = "/v1/responses",
                                            .id_prefix = "resp_",
                                            .shape = HTTP_OPENAI,
                                            .logprob = api_chat_logprob,
                                            .begin = responses_begin,
                                            .chunk = responses_chunk,
                                            .finish = responses_finish,
                                            .end = responses_end,
                                            .fail = responses_fail,
                                            .reply = responses_reply,
                                            .accept = responses_accept,
                                            .deinit = response_deinit};

/* ---- the handlers ---- */

static bool take_include(api_request *r) {
    const json_t *item;
    size_t i;
    json_array_foreach(r->content_list, i, item) {
        const char *word = json_is_string(item) ? json_string_value(item) : "";
        if (strcmp(word, "message.output_text.logprobs") == 0) {
            r->w.logprobs = true;
        } else if (strcmp(word, "reasoning.encrypted_content") !=
                   0) { /* reasoning is not encrypted */
            return api_refuse(r, "unsupported_parameter", "include",
                              "include[%zu] is not supported", i);
        }
    }
    r->g.top_logprobs = r->top_logprobs > 0 ? r->top_logprobs : 0;
    return true;
}

/* Returns the items of the previous response and of this request, as a new reference. */
static bool gather_items(api_request *r, json_t **out) {
    api_text text = {0};
    json_t *all = json_array();
    bool ok = all != NULL;
    *out = all;
    if (ok && r->previous) {
        ok = api_store_get(r->ctx->store, r->previous, http_salt(r->call), NULL, &text);
        if (!ok) {
            return api_refuse_status(r, 404, "previous_response_not_found",
                                     "previous_response_id", "there is no response of this id");
        }
        if (text.n == 0 && !text.failed) {
            return api_refuse(r, "invalid_value", "previous_response_id",
                              "the response of this id has not ended");
        }
        json_t *before = api_parse(&text);
        ok = before && json_array_extend(all, before) == 0;
        json_decref(before);
        api_text_deinit(&text);
    }
    if (json_is_string(r->prompt)) {
        json_t *message = json_pack("{s:s, s:O}", "role", "user", "content", r->prompt);
        /* takes the reference even on failure */
        ok = json_array_append_new(all, message) == 0 && ok;
    } else if (json_is_array(r->prompt)) {
        ok = ok && json_array_extend(all, r->prompt) == 0;
    } else {
        return api_refuse(r, r->prompt ? "invalid_value" : "missing_required_parameter",
                          "input", "input must be a string or items");
    }
    return ok || api_refuse_status(r, 503, "out_of_memory", NULL, "no memory for the input");
}

static bool make_state(api_request *r, json_t *all, response_state **out) {
    response_state *s = *out = calloc(1, sizeof *s);
    if (!s)
        return api_refuse_status(r, 503, "out_of_memory", NULL, "no memory for the request");
    s->salt = http_salt(r->call);
    put_echo(&s->echo, r);
    if (r->store && r->ctx->store) {
        api_put_json(&s->items, all);
        if (s->items.n > 0) s->items.n--; /* the array's end is written with the output */
    }
    return true;
}

static bool take_background(api_request *r) {
    if (!r->w.background || (r->store && r->ctx->store && r->ctx->background)) return true;
    return api_refuse(r, "invalid_value", "background",
                      "a response in the background must be stored");
}

/* The steps from a body to a conversation; the caller owns *all. */
static bool take_input(api_request *r, json_t **all) {
    return take_include(r) && api_take_sampling(r) && api_take_response_format(r) &&
           api_take_thinking(r) && gather_items(r, all) && api_translate_items(r, *all) &&
           api_take_messages(r);
}

void api_responses(http_call *c, void *server) {
    api_request r;
    json_t *all = NULL;
    response_state *state = NULL;
    if (api_request_open(&r, c, server, &api_responses_family, HTTP_OPENAI) &&
        take_background(&r) && take_input(&r, &all) && make_state(&r, all, &state)) {
        const api_prompt prompt = {.g = r.g};
        api_job_start(&r, &responses_format, &prompt, 1, NULL, state);
    } else {
        response_deinit(state);
        api_request_send_refusal(&r);
    }
    json_decref(all);
    api_request_close(&r);
}

void api_input_tokens(http_call *c, void *server) {
    api_request r;
    json_t *all = NULL;
    hd_ids ids = {0};
    if (api_request_open(&r, c, server, &api_input_tokens_family, HTTP_OPENAI) &&
        take_input(&r, &all) && api_render_ids(&r, &ids)) {
        api_text out = {0};
        api_write(&out, "{'object':'response.input_tokens','input_tokens':%lld}",
                  (long long)ids.n);
        http_reply(c, 200, "application/json", out.data, out.n);
        api_text_deinit(&out);
    } else {
        api_request_send_refusal(&r);
    }
    hd_ids_deinit(&ids);
    json_decref(all);
    api_request_close(&r);
}
