/* generate.c - POST /generate, SGLang's native endpoint: token ids in, token ids out. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "api/endpoints.h"
#include "api/job.h"
#include "api/replay.h"

#define AT(field) offsetof(api_request, field)

#define DEFAULT_TOKENS 128

/* clang-format off */
static const api_param native_sampling[] = {
    {"max_new_tokens", API_INT, AT(max_tokens), 0, INT32_MAX,
     .about = HD_STR(DEFAULT_TOKENS) " by default; 0 computes the prompt only"},
    {"min_new_tokens", API_INT, AT(min_tokens), API_SETS(min_tokens), .about = "no end before"},
    {"sampling_seed", API_LONG, AT(g.seed), .about = "the same request repeats; drawn anew where absent"},
    {"json_schema", API_ANY, AT(schema), .costly = true,
     .about = "a JSON schema, as text or as an object"},
    {"stream_interval", API_INT, AT(w.stream_interval), 1, API_MAX_STREAM_INTERVAL,
     .about = "tokens per event after the first"},
};
/* clang-format on */
static const api_section native_sampling_section = API_SECTION(native_sampling);
static const api_family native_sampling_family = {
    .name = "SamplingParams",
    .endpoint = "/generate",
    .sections = {&native_sampling_section, &api_sampling_section, &api_absent_section}
};

/* in the order of hd_logprob_mode */
static const char *const logprob_modes[] = {"raw", "tempered", "sampled", NULL};

/* clang-format off */
static const api_param native[] = {
    {"text", API_TEXTS, AT(text), .about = "a prompt or prompts"},
    {"input_ids", API_ARRAY, AT(input_ids), .about = "the same as token ids"},
    {"sampling_params", API_ONE_OR_MANY, AT(sampling), .nested = &native_sampling_family,
     .about = "an object, or one for each prompt"},
    {"rid", API_TEXTS, AT(rids), .about = "the request's id, or one for each prompt"},
    {"stream", API_BOOL, AT(w.stream), .about = "events, each with all that came so far"},
    {"return_logprob", API_BOOL, AT(w.logprobs), .about = "of output tokens"},
    {"logprob_start_len", API_INT, AT(logprob_start), API_SETS(prompt_logprobs_from),
     .about = "of prompt tokens from here on; -1: none"},
    {"top_logprobs_num", API_INT, AT(top_logprobs), API_SETS(top_logprobs),
     .limit = offsetof(api_limits, max_top_logprobs) + 1, .about = "alternatives of each"},
    {"logprob_mode", API_STRING, AT(logprob_mode), .words = logprob_modes,
     .about = "tempered by default: after temperature; sampled: of what could be drawn"},
    {"return_sampling_mask", API_BOOL, AT(w.sampling_mask),
     .about = "the ids that could be drawn, as many as top_k says"},
    {"return_routed_experts", API_BOOL, AT(g.replay[HD_REPLAY_EXPERTS]),
     .about = "the experts of every position but the last, with --routed-experts"},
    {"return_indexer_topk", API_BOOL, AT(g.replay[HD_REPLAY_KEYS]),
     .about = "the keys that indexers selected, likewise, with --indexer-topk"},
    {"indexer_topk_dtype", API_STRING, AT(indexer_dtype), .words = api_indexer_dtypes,
     .about = "of their numbers; int32 by default"},
    {"indexer_topk_compact", API_BOOL, AT(w.replay[HD_REPLAY_KEYS].compact),
     .about = "without the first rows, which are all keys"},
    {"routed_experts_start_len", API_INT, AT(g.replay_from),
     .about = "from this position on; at most the prompt's length"},
    {"routed_experts_dtype", API_STRING, AT(routes_dtype), .words = api_routes_dtypes,
     .about = "of their numbers; int32 by default"},
    {"return_text_in_logprobs", API_BOOL, AT(w.text_in_logprobs),
     .about = "each token's text beside its id"},
    {"return_prompt_token_ids", API_BOOL, AT(w.prompt_ids), .about = "in meta_info"},
    {"max_thinking_tokens", API_REFUSED, .about = "the answer is raw text"},
    {"require_reasoning", API_REFUSED, .about = "the answer is raw text"},
    {"parse_special", API_BOOL, AT(parse_special),
     .about = "special tokens spelled in the text become their ids"},
    {"session_params", API_REFUSED, .about = "there are no sessions"},
    {"image_data", API_REFUSED, .about = "models read and write text"},
    {"audio_data", API_REFUSED, .about = "models read and write text"},
    {"video_data", API_REFUSED, .about = "models read and write text"},
    {"return_entropy", API_REFUSED, .about = "entropies are not given out"},
    {"return_flat_raw_top_logprobs", API_REFUSED, .about = "lists are nested"},
    {"return_flat_raw_top_logprobs_b64", API_REFUSED, .about = "lists are nested"},
};
/* clang-format on */
static const api_section native_section = API_SECTION(native);
const api_family api_generate_family = {
    .name = "GenerateRequest",
    .endpoint = "/generate",
    .sections = {&native_section, &api_identity_section, &api_absent_section}
};

/* ---- state ---- */

/* What the choices repeat of each prompt. */
typedef struct native_prompt {
    char id[API_MAX_ID + 16];
    api_text ids;        /* JSON items, if requested */
    int32_t first_token; /* -1: no log-probabilities from the first token on */
    bool greedy;
} native_prompt;

typedef struct native_state {
    bool list; /* the reply is an array */
    int32_t n;
    native_prompt prompts[];
} native_state;

static bool is_greedy(const api_job *job, const api_choice *c) {
    const native_state *s = job->state;
    return s->prompts[c->prompt].greedy;
}

/* ---- log-probabilities ---- */

static void put_triple(api_text *out, const api_job *job, int32_t token, const float *logprob) {
    api_puts(out, "[");
    if (logprob) {
        api_put_real(out, (double)*logprob);
    } else {
        api_puts(out, "null");
    }
    api_puts(out, ",");
    api_put_int(out, token);
    api_puts(out, ",");
    if (job->w.text_in_logprobs) {
        api_put_token(out, job->ctx, token);
    } else {
        api_puts(out, "null");
    }
    api_puts(out, "]");
}

static void put_tops(api_text *out, const api_job *job, const hd_alternative *top, int32_t n) {
    if (out->n > 0) api_puts(out, ",");
    api_puts(out, "[");
    for (int32_t k = 0; k < n && top[k].token >= 0; k++) {
        if (k > 0) api_puts(out, ",");
        put_triple(out, job, top[k].token, &top[k].logprob);
    }
    api_puts(out, "]");
}

/* The alternatives of the distribution that was drawn from are all that could be drawn. */
static void put_mask(api_choice *c, const hd_alternative *top, int32_t n) {
    api_text *out = &c->masks;
    if (out->n > 0) api_puts(out, ",");
    api_puts(out, "[");
    for (int32_t k = 0; k < n && top[k].token >= 0; k++) {
        if (k > 0) api_puts(out, ",");
        api_put_int(out, top[k].token);
    }
    api_puts(out, "]");
}

static void native_mask(const api_job *job, api_choice *c, const hd_step_tokens *step,
                        int32_t i) {
    const hd_alternative alone = {step->tokens[i], 0.0f};
    const bool greedy = is_greedy(job, c);
    put_mask(c, greedy ? &alone : step->top + i * step->n_top, greedy ? 1 : step->n_top);
    if (c->mask_logprobs.n > 0) api_puts(&c->mask_logprobs, ",");
    api_put_real(&c->mask_logprobs, greedy ? 0.0 : (double)step->logprobs[i]);
}

static void native_logprob(api_job *job, api_choice *c, const hd_step_tokens *step, int32_t i) {
    const int32_t n = hd_min_i32(step->n_top, job->w.n_tops);
    if (job->w.sampling_mask) native_mask(job, c, step, i);
    if (!job->w.logprobs) return;
    if (c->logprobs.n > 0) api_puts(&c->logprobs, ",");
    put_triple(&c->logprobs, job, step->tokens[i], &step->logprobs[i]);
    if (n > 0) put_tops(&c->tops, job, step->top + i * step->n_top, n);
}

/* The first token of a prompt has no log-probability; kept contains the alternatives. */
static void native_prompt_logprobs(api_job *job, api_choice *c, const hd_prompt_logprobs *p) {
    const int32_t n = hd_min_i32(p->n_top, job->w.n_tops);
    for (int32_t i = 0; i < p->n; i++) {
        if (c->prompt_logprobs.n > 0) api_puts(&c->prompt_logprobs, ",");
        put_triple(&c->prompt_logprobs, job, p->tokens[i], &p->logprobs[i]);
        if (n > 0) put_tops(&c->kept, job, p->top + i * p->n_top, n);
    }
}

static void native_replay(api_job *job, api_choice *c, hd_replay kind,
                          const hd_replay_rows *rows) {
    hd_replay_rows shown = *rows;
    /* the token that was drawn to compute the prompt only is not shown */
    if (job->w.prefill_only && shown.n > 0) shown.n--;
    api_put_replay(&c->item, hd_engine_spec(job->ctx->engine), kind, &shown,
                   &job->w.replay[kind]);
    if (c->item.failed) job->out.failed = true;
}

/* ---- choices ---- */

static void native_deinit(void *state) {
    native_state *s = state;
    for (int32_t i = 0; s && i < s->n; i++) api_text_deinit(&s->prompts[i].ids);
    free(s);
}

static void put_finish(api_text *out, const api_choice *c) {
    switch (c->finish_reason) {
    case HD_FINISH_NONE:
        api_puts(out, "null");
        break;
    case HD_FINISH_STOP:
        api_write(out, "{'type':'stop','matched':");
        api_put_matched_stop(out, c);
        api_puts(out, "}");
        break;
    case HD_FINISH_LENGTH:
        api_write(out, "{'type':'length','length':%d}", c->output_tokens);
        break;
    case HD_FINISH_ABORT:
    case HD_FINISH_TIMEOUT:
    case HD_FINISH_ERROR:
        api_write(out, "{'type':'abort','message':%s,'status_code':null,'err_type':null}",
                  c->admitted ? "Aborted" : "Abort before prefill");
        break;
    }
}

static void put_logprobs(api_text *out, const api_job *job, const api_choice *c,
                         const native_prompt *p) {
    const api_choice *first = &job->choices[job->subs[c->prompt].first_choice];
    api_puts(out, ",\"input_token_logprobs\":[");
    if (p->first_token >= 0) {
        put_triple(out, job, p->first_token, NULL);
        if (first->prompt_logprobs.n > 0) api_puts(out, ",");
    }
    api_put(out, first->prompt_logprobs.data, first->prompt_logprobs.n);
    api_puts(out, "]");
    api_put_list(out, "output_token_logprobs", &c->logprobs);
    if (c->tops.n > 0 || first->kept.n > 0) {
        api_puts(out, ",\"input_top_logprobs\":[");
        if (p->first_token >= 0) api_puts(out, first->kept.n > 0 ? "null," : "null");
        api_put(out, first->kept.data, first->kept.n);
        api_puts(out, "]");
        api_put_list(out, "output_top_logprobs", &c->tops);
    }
}

static void put_answer(api_job *job, const api_choice *c, bool with_index) {
    const native_state *s = job->state;
    const native_prompt *p = &s->prompts[c->prompt];
    api_text *out = &job->out;
    api_puts(out, "{\"text\":\"");
    for (size_t i = 0; i < c->n_pieces; i++) {
        api_put_escaped(out, api_piece_text(c, &c->pieces[i]), c->pieces[i].n);
    }
    api_puts(out, "\"");
    api_put_list(out, "output_ids", &c->ids);
    api_write(out, ",'meta_info':{'id':%s,'finish_reason':", p->id);
    put_finish(out, c);
    api_write(out,
              ",'prompt_tokens':%d,'completion_tokens':%d,'cached_tokens':%d,"
              "'reasoning_tokens':%d,'cached_tokens_details':null,'dp_rank':null,"
              "'num_retractions':%d,'weight_version':%s",
              c->prompt_tokens, c->output_tokens, c->cached_tokens, c->reasoning_tokens,
              c->retracted, api_last_version(c));
    api_put_version_spans(out, c);
    api_write(out, ",'e2e_latency':%g",
              (double)(hd_now_ns() - http_start_ns(job->call)) * 1e-9);
    api_write(out, ",'spec_draft_tokens':%d,'spec_accepted_tokens':%d", c->drafted,
              c->accepted);
    if (job->w.prompt_ids) api_put_list(out, "prompt_token_ids", &p->ids);
    if (job->w.logprobs) put_logprobs(out, job, c, p);
    if (job->w.sampling_mask) {
        api_put_list(out, "output_token_sampling_mask", &c->masks);
        api_put_list(out, "output_token_sampling_logprobs", &c->mask_logprobs);
    }
    api_put(out, c->item.data, c->item.n);
    api_puts(out, "}");
    if (with_index) api_write(out, ",'index':%d", c->index);
    api_puts(out, "}");
}

static void native_event(api_job *job, api_choice *c) {
    const native_state *s = job->state;
    api_data_begin(job, NULL);
    put_answer(job, c, s->list);
    api_data_end(job);
}

static void native_end(api_job *job) {
    api_puts(&job->out, "data: [DONE]\n\n");
}

static void native_reply(api_job *job) {
    const native_state *s = job->state;
    if (s->list) api_puts(&job->out, "[");
    for (int32_t i = 0; i < job->n_choices; i++) {
        if (i > 0) api_puts(&job->out, ",");
        put_answer(job, &job->choices[i], false);
    }
    if (s->list) api_puts(&job->out, "]");
}

static const api_format native_format = {.endpoint = "/generate",
                                         .id_prefix = "",
                                         .shape = HTTP_OPENAI,
                                         .logprob = native_logprob,
                                         .prompt_logprobs = native_prompt_logprobs,
                                         .replay = native_replay,
                                         .chunk = native_event,
                                         .finish = native_event,
                                         .end = native_end,
                                         .fail = api_openai_fail,
                                         .reply = native_reply,
                                         .deinit = native_deinit,
                                         .cumulative = true};

/* ---- the handler ---- */

/* What could be drawn are the best top_k at most, so that many alternatives list it. */
static bool take_mask(api_request *r) {
    if (!r->w.sampling_mask || r->g.temperature <= 0) return true;
    const int32_t most = r->ctx->limits.max_top_logprobs;
    if (r->g.top_k < 1 || r->g.top_k > most) {
        return api_refuse(r, "invalid_value", "sampling_params.top_k",
                          "top_k is %d; return_sampling_mask wants 1 to %d (--max-logprobs)",
                          r->g.top_k, most);
    }
    r->g.top_logprobs = hd_max_i32(r->g.top_logprobs, r->g.top_k);
    return true;
}

/* Reads the parameters of one prompt; values of an earlier prompt are reset. */
static bool take_params(api_request *r, json_t *params, const hd_request *defaults,
                        api_prompt *p) {
    r->g = *defaults;
    r->stop = r->stop_ids = r->bias = r->schema = NULL;
    r->regex = NULL;
    r->max_tokens = -1;
    r->min_tokens = 0;
    if (params && !json_is_object(params)) {
        return api_refuse(r, "invalid_value", "sampling_params",
                          "sampling_params must be an object, or one for each prompt");
    }
    if (params && !api_params_read(r, &native_sampling_family, params, "sampling_params.")) {
        return false;
    }
    if (!api_take_sampling(r) || !take_mask(r) || !api_take_response_format(r)) return false;
    if (r->max_tokens < 0) api_default_max_tokens(r, &r->g, p->n, DEFAULT_TOKENS);
    if (r->max_tokens == 0) r->g.max_tokens = 1;
    p->g = r->g;
    return true;
}

static bool take_all_params(api_request *r, api_prompt *prompts, int32_t n) {
    const hd_request defaults = r->g;
    const bool list = json_is_array(r->sampling);
    int32_t n_prefill = 0;
    if (list && json_array_size(r->sampling) != (size_t)n) {
        return api_refuse(r, "invalid_value", "sampling_params",
                          "sampling_params has %zu entries for %d prompts",
                          json_array_size(r->sampling), n);
    }
    for (int32_t i = 0; i < n; i++) {
        json_t *params = list ? json_array_get(r->sampling, (size_t)i) : r->sampling;
        if (!take_params(r, params, &defaults, &prompts[i])) return false;
        n_prefill += r->max_tokens == 0;
    }
    if (n_prefill != 0 && n_prefill != n) {
        return api_refuse(r, "invalid_value", "sampling_params.max_new_tokens",
                          "max_new_tokens must be 0 for all prompts or for none");
    }
    r->w.prefill_only = n_prefill > 0;
    return true;
}

static hd_logprob_mode logprob_mode_of(const char *name) {
    int mode = HD_LOGPROB_RAW;
    if (!name) return HD_LOGPROB_TEMPERED; /* SGLang's */
    while (logprob_modes[mode + 1] && strcmp(logprob_modes[mode], name) != 0) mode++;
    return (hd_logprob_mode)mode;
}

static bool take_logprobs(api_request *r) {
    r->g.logprob_mode = logprob_mode_of(r->logprob_mode);
    r->w.token_ids = r->g.unparsed = true;
    if (!r->w.logprobs && (r->logprob_start >= 0 || r->top_logprobs > 0)) {
        return api_refuse(r, "invalid_value", "return_logprob",
                          "logprob_start_len and top_logprobs_num want return_logprob: true");
    }
    r->g.top_logprobs = r->w.n_tops = r->top_logprobs > 0 ? r->top_logprobs : 0;
    if (r->w.sampling_mask) {
        if (r->w.logprobs && r->g.logprob_mode != HD_LOGPROB_SAMPLED) {
            return api_refuse(r, "invalid_value", "logprob_mode",
                              "return_sampling_mask with return_logprob wants logprob_mode "
                              "sampled: both are of what could be drawn");
        }
        r->g.logprob_mode = HD_LOGPROB_SAMPLED;
    }
    r->g.prompt_logprobs = r->logprob_start >= 0;
    r->g.prompt_logprobs_from = r->logprob_start > 1 ? r->logprob_start : 1;
    return true;
}

/* A list contains a rid for each prompt. A single rid names the call; with several prompts
 * it is a prefix. */
static bool name_prompts(api_request *r, native_state *s) {
    const bool many = json_is_array(r->rids);
    if (many && json_array_size(r->rids) != (size_t)s->n) {
        return api_refuse(r, "invalid_value", "rid", "rid has %zu ids for %d prompts",
                          json_array_size(r->rids), s->n);
    }
    for (int32_t i = 0; i < s->n; i++) {
        const json_t *given = many ? json_array_get(r->rids, (size_t)i) : r->rids;
        char *id = s->prompts[i].id;
        const size_t size = sizeof s->prompts[i].id;
        if (given && !api_request_name(r, json_string_value(given), "rid")) return false;
        if (many || s->n == 1) {
            snprintf(id, size, "%s", r->id);
        } else {
            snprintf(id, size, "%s_%d", r->id, i);
        }
    }
    return true;
}

static bool make_state(api_request *r, const api_prompt *prompts, int32_t n,
                       native_state **out) {
    const json_t *given = r->text ? r->text : r->input_ids;
    const bool batch =
        json_is_array(json_array_get(given, 0)) || json_is_string(json_array_get(given, 0));
    assert(prompts != NULL && n > 0); /* taken before, and never a conversation */
    native_state *s = calloc(1, sizeof *s + (size_t)n * sizeof(native_prompt));
    *out = s;
    if (!s) return api_refuse_status(r, 503, "out_of_memory", NULL, "no memory for prompts");
    s->n = n;
    s->list = batch || prompts[0].g.n > 1;
    for (int32_t i = 0; i < n; i++) {
        native_prompt *p = &s->prompts[i];
        p->greedy = prompts[i].g.temperature <= 0;
        p->first_token = r->logprob_start == 0 ? prompts[i].tokens[0] : -1;
        if (r->w.prompt_ids) api_put_ids(&p->ids, prompts[i].tokens, prompts[i].n);
    }
    return name_prompts(r, s);
}

static bool take_input(api_request *r, api_prompt **prompts, int32_t *n) {
    if ((r->text != NULL) == (r->input_ids != NULL)) {
        return api_refuse(r, "invalid_value", "text", "give one of text and input_ids");
    }
    return r->text ? api_take_prompts(r, r->text, "text", prompts, n)
                   : api_take_prompts(r, r->input_ids, "input_ids", prompts, n);
}

void api_generate(http_call *c, void *server) {
    api_request r;
    api_prompt *prompts = NULL;
    native_state *state = NULL;
    int32_t n = 0;
    if (api_request_open(&r, c, server, &api_generate_family, HTTP_OPENAI) &&
        take_logprobs(&r) && api_take_replay(&r) && take_input(&r, &prompts, &n) &&
        take_all_params(&r, prompts, n) && make_state(&r, prompts, n, &state)) {
        api_job_start(&r, &native_format, prompts, n, NULL, state);
    } else {
        native_deinit(state);
        api_request_send_refusal(&r);
    }
    api_request_close(&r);
}
