/* complete.c - POST /v1/completions: raw text prompts, echo, fill-in-the-middle, and the
 * older format of log-probabilities. */
#include <stdlib.h>
#include <string.h>

#include "api/endpoints.h"
#include "api/job.h"

#define AT(field) offsetof(api_request, field)

#define DEFAULT_TOKENS 16

/* clang-format off */
static const api_param completion[] = {
    {"prompt", API_ANY, AT(prompt), .about = "a text, texts, token ids or lists of these"},
    {"max_tokens", API_INT, AT(max_tokens), 0, INT32_MAX,
     .about = "of each answer, " HD_STR(DEFAULT_TOKENS) " by default; 0 with echo scores the prompt"},
    {"echo", API_BOOL, AT(w.echo), .about = "the prompt's text comes first"},
    {"logprobs", API_INT, AT(logprobs), API_SETS(top_logprobs),
     .limit = offsetof(api_limits, max_top_logprobs) + 1,
     .about = "alternatives of each token"},
    {"add_special_tokens", API_SWITCH, AT(begins),
     .about = "the prompt begins as the tokenizer says"},
    {"parse_special", API_BOOL, AT(parse_special),
     .about = "special tokens spelled in the prompt become their ids"},
    {"suffix", API_STRING, AT(suffix), .high = 1 << 22,
     .about = "what follows: the text between it and the prompt is filled in"},
};
/* clang-format on */
static const api_section completion_section = API_SECTION(completion);
static const char *const required[] = {"prompt", NULL};
const api_family api_complete_family = {
    .name = "CompletionRequest",
    .endpoint = "/v1/completions",
    .required = required,
    .sections = {&completion_section, &api_openai_section, &api_sampling_section,
                 &api_identity_section, &api_absent_section}
};

/* The prompt text that echo repeats. */
typedef struct echoed_prompt {
    api_text text; /* JSON-escaped */
    int32_t first_token;
} echoed_prompt;

typedef struct echoes {
    int32_t n;
    echoed_prompt prompts[];
} echoes;

static void complete_deinit(void *state) {
    echoes *e = state;
    for (int32_t i = 0; e && i < e->n; i++) api_text_deinit(&e->prompts[i].text);
    free(e);
}

/* ---- log-probabilities ---- */

/* The log-probability of one token. In api_choice.logprobs each lies before its n_top
 * alternatives. */
typedef struct token_logprob {
    int32_t token, n_top;
    float logprob;
    bool scored;
} token_logprob;

static void add_logprob(api_text *to, int32_t token, float logprob, const hd_alternative *top,
                        int32_t n_top) {
    token_logprob s = {.token = token, .logprob = logprob, .scored = true};
    while (s.n_top < n_top && top[s.n_top].token >= 0) s.n_top++;
    api_put(to, (const char *)&s, sizeof s);
    api_put(to, (const char *)top, (size_t)s.n_top * sizeof *top);
}

static void complete_logprob(api_job *job, api_choice *c, const hd_step_tokens *step,
                             int32_t i) {
    (void)job;
    const hd_alternative *top = step->n_top > 0 ? &step->top[i * step->n_top] : NULL;
    add_logprob(&c->logprobs, step->tokens[i], step->logprobs[i], top, step->n_top);
}

static void complete_prompt_logprobs(api_job *job, api_choice *c, const hd_prompt_logprobs *p) {
    (void)job;
    for (int32_t i = 0; i < p->n; i++) {
        const hd_alternative *top = p->n_top > 0 ? &p->top[i * p->n_top] : NULL;
        add_logprob(&c->prompt_logprobs, p->tokens[i], p->logprobs[i], top, p->n_top);
    }
}

/* Decodes one token alone; the caller frees the result. */
static hd_bytes token_text(const api_job *job, int32_t token) {
    hd_bytes text = {0};
    hd_err err = {0};
    hd_tokenizer_decode(hd_engine_tokenizer(job->ctx->engine), &token, 1, false, &text, &err);
    return text;
}

static int32_t n_characters(const hd_bytes *text) {
    int32_t n = 0;
    for (size_t i = 0; i < text->n; i++) n += ((unsigned char)text->data[i] & 0xc0) != 0x80;
    return n;
}

typedef struct logprob_lists {
    api_text tokens, logprobs, tops, offsets;
} logprob_lists;

/* top: s->n_top alternatives, of any alignment. */
static void list_logprob(logprob_lists *lists, const api_job *job, const token_logprob *s,
                         const char *top, int32_t *place) {
    hd_bytes text = token_text(job, s->token);
    api_comma(&lists->tokens);
    api_put_string(&lists->tokens, text.data, text.n);
    api_comma(&lists->offsets);
    api_put_int(&lists->offsets, *place);
    *place += n_characters(&text);
    hd_bytes_deinit(&text);
    if (lists->logprobs.n > 0) api_puts(&lists->logprobs, ",");
    if (lists->tops.n > 0) api_puts(&lists->tops, ",");
    if (!s->scored) {
        api_puts(&lists->logprobs, "null");
        api_puts(&lists->tops, "null");
        return;
    }
    api_put_real(&lists->logprobs, (double)s->logprob);
    api_puts(&lists->tops, "{");
    for (int32_t k = 0; k < s->n_top; k++) {
        if (k > 0) api_puts(&lists->tops, ",");
        hd_alternative a;
        memcpy(&a, top + (size_t)k * sizeof a, sizeof a);
        api_put_token(&lists->tops, job->ctx, a.token);
        api_puts(&lists->tops, ":");
        api_put_real(&lists->tops, (double)a.logprob);
    }
    api_puts(&lists->tops, "}");
}

static void list_logprobs(logprob_lists *lists, const api_job *job, const api_text *from,
                          int32_t *place) {
    token_logprob s;
    for (size_t at = 0; at + sizeof s <= from->n;) {
        memcpy(&s, from->data + at, sizeof s);
        const size_t tops = (size_t)s.n_top * sizeof(hd_alternative);
        at += sizeof s;
        if (tops > from->n - at) return; /* no memory for them: the text has failed */
        list_logprob(lists, job, &s, from->data + at, place);
        at += tops;
    }
}

/* with_prompt: the prompt's tokens come first. */
static void put_logprobs(api_job *job, api_choice *c, bool with_prompt) {
    logprob_lists lists = {0};
    api_text *out = &job->out;
    if (!job->w.logprobs) {
        api_puts(out, "null");
        return;
    }
    if (with_prompt) { /* the first token has no log-probability */
        const echoes *e = job->state;
        const api_choice *first = &job->choices[job->subs[c->prompt].first_choice];
        const token_logprob unscored = {.token = e->prompts[c->prompt].first_token};
        list_logprob(&lists, job, &unscored, NULL, &c->place);
        list_logprobs(&lists, job, &first->prompt_logprobs, &c->place);
    }
    list_logprobs(&lists, job, &c->logprobs, &c->place);
    api_puts(out, "{\"tokens\":[");
    api_put(out, lists.tokens.data, lists.tokens.n);
    api_puts(out, "],\"token_logprobs\":[");
    api_put(out, lists.logprobs.data, lists.logprobs.n);
    api_puts(out, "],\"top_logprobs\":[");
    api_put(out, lists.tops.data, lists.tops.n);
    api_puts(out, "],\"text_offset\":[");
    api_put(out, lists.offsets.data, lists.offsets.n);
    api_puts(out, "]}");
    api_text *texts[] = {&lists.tokens, &lists.logprobs, &lists.tops, &lists.offsets};
    for (size_t i = 0; i < HD_LEN(texts); i++) {
        out->failed = out->failed || texts[i]->failed;
        api_text_deinit(texts[i]);
    }
}

/* ---- choices ---- */

static void put_choice(api_job *job, api_choice *c, bool first, const char *finish) {
    const echoes *e = job->state;
    const bool echo = first && job->w.echo;
    api_text *out = &job->out;
    api_write(out, "{'index':%d,'text':'", c->index);
    if (echo) api_put(out, e->prompts[c->prompt].text.data, e->prompts[c->prompt].text.n);
    for (size_t i = 0; i < c->n_pieces; i++) {
        api_put_escaped(out, api_piece_text(c, &c->pieces[i]), c->pieces[i].n);
    }
    api_puts(out, "\",\"logprobs\":");
    put_logprobs(job, c, echo);
    api_write(out, ",'finish_reason':%s,'matched_stop':", finish);
    api_put_matched_stop(out, c);
    if (job->w.token_ids) {
        api_put_list(out, "token_ids", &c->ids);
        if (first && job->n_subs == 1) api_put_list(out, "prompt_token_ids", &job->prompt_ids);
    }
    if (finish) api_put_version_spans(out, c);
    api_puts(out, "}");
}

static void put_chunk(api_job *job, api_choice *c, bool first, const char *finish) {
    api_data_begin(job, NULL);
    api_put(&job->out, job->head.data, job->head.n);
    put_choice(job, c, first, finish);
    api_puts(&job->out, "]");
    if (finish) api_put_metadata(&job->out, c);
    if (job->w.continuous_usage) {
        api_puts(&job->out, ",\"usage\":");
        api_put_usage(&job->out, job);
    }
    api_puts(&job->out, "}");
    api_data_end(job);
}

static void complete_progress(api_job *job, const api_choice *c, const hd_event *e) {
    api_data_begin(job, NULL);
    api_put(&job->out, job->head.data, job->head.n);
    api_write(&job->out, "{'index':%d,'text':'','logprobs':null,'finish_reason':null}]",
              c->index);
    api_put_progress(&job->out, e);
    api_puts(&job->out, "}");
    api_data_end(job);
}

static void complete_chunk(api_job *job, api_choice *c) {
    put_chunk(job, c, !c->opened, NULL);
}

static void complete_finish(api_job *job, api_choice *c) {
    put_chunk(job, c, false, api_finish_reason(c));
}

static void complete_reply(api_job *job) {
    api_put(&job->out, job->head.data, job->head.n);
    for (int32_t i = 0; i < job->n_choices; i++) {
        if (i > 0) api_puts(&job->out, ",");
        put_choice(job, &job->choices[i], true, api_finish_reason(&job->choices[i]));
    }
    api_puts(&job->out, "],\"usage\":");
    api_put_usage(&job->out, job);
    api_put_metadata(&job->out, &job->choices[job->n_choices - 1]);
    api_write(&job->out, ",'system_fingerprint':%s}", "hadal-" HD_VERSION);
}

static const api_format complete_format = {.endpoint = "/v1/completions",
                                           .id_prefix = "cmpl-",
                                           .object = "text_completion",
                                           .chunk_object = "text_completion",
                                           .shape = HTTP_OPENAI,
                                           .logprob = complete_logprob,
                                           .prompt_logprobs = complete_prompt_logprobs,
                                           .progress = complete_progress,
                                           .chunk = complete_chunk,
                                           .finish = complete_finish,
                                           .end = api_openai_end,
                                           .fail = api_openai_fail,
                                           .reply = complete_reply,
                                           .deinit = complete_deinit};

/* ---- the handler ---- */

static bool take_output(api_request *r) {
    r->g.unparsed = true;
    if (r->max_tokens == 0 && !r->w.echo) {
        return api_refuse(r, "invalid_value", "max_tokens", "max_tokens is 0; that wants echo");
    }
    if (r->max_tokens == 0 && r->w.stream) {
        return api_refuse(r, "invalid_value", "max_tokens",
                          "max_tokens is 0; that leaves nothing to stream");
    }
    r->w.prefill_only = r->max_tokens == 0;
    r->w.logprobs = r->logprobs >= 0;
    r->g.top_logprobs = r->logprobs > 0 ? r->logprobs : 0;
    r->g.prompt_logprobs = r->w.logprobs && r->w.echo;
    r->g.prompt_logprobs_from = 1;
    return true;
}

static bool echo_prompts(api_request *r, const api_prompt *prompts, int32_t n, echoes **out) {
    const hd_tokenizer *t = hd_engine_tokenizer(r->ctx->engine);
    *out = calloc(1, sizeof **out + (size_t)n * sizeof(echoed_prompt));
    if (!*out) return api_refuse_status(r, 503, "out_of_memory", NULL, "no memory for prompts");
    (*out)->n = n;
    for (int32_t i = 0; r->w.echo && i < n; i++) {
        hd_bytes text = {0};
        hd_err err = {0};
        (*out)->prompts[i].first_token = prompts[i].tokens[0];
        if (hd_tokenizer_decode(t, prompts[i].tokens, prompts[i].n, !r->g.keep_special, &text,
                                &err) != HD_OK) {
            hd_bytes_deinit(&text);
            return api_refuse_err(r, "prompt", &err);
        }
        api_put_escaped(&(*out)->prompts[i].text, text.data, text.n);
        hd_bytes_deinit(&text);
    }
    return true;
}

/* ---- fill in the middle ---- */

/* The model's fill-in-the-middle markers: before the prefix, between, and behind the suffix. */
typedef struct fim_markers {
    int32_t begin, hole, end;
} fim_markers;

static bool find_markers(api_request *r, fim_markers *m) {
    const hd_tokenizer *t = hd_engine_tokenizer(r->ctx->engine);
    static const char begin[] = "<｜fim▁begin｜>", hole[] = "<｜fim▁hole｜>",
                      end[] = "<｜fim▁end｜>";
    *m = (fim_markers){hd_tokenizer_find(t, begin, sizeof begin - 1),
                       hd_tokenizer_find(t, hole, sizeof hole - 1),
                       hd_tokenizer_find(t, end, sizeof end - 1)};
    if (m->begin >= 0 && m->hole >= 0 && m->end >= 0) return true;
    return api_refuse(r, "unsupported_parameter", "suffix",
                      "suffix is not supported: this model has no tokens for filling in");
}

/* A BOS stays in front. */
static bool surround(api_request *r, api_prompt *p, const fim_markers *m, const int32_t *suffix,
                     size_t n) {
    const int32_t bos = hd_tokenizer_bos(hd_engine_tokenizer(r->ctx->engine));
    const size_t first = p->n > 0 && bos >= 0 && p->tokens[0] == bos;
    int32_t *ids = api_keep(r, p->n + n + 3, sizeof *ids), *at = ids;
    if (!ids) return false;
    if (first) *at++ = bos;
    *at++ = m->begin;
    if (p->n > first) memcpy(at, p->tokens + first, (p->n - first) * sizeof *at);
    at += p->n - first;
    *at++ = m->hole;
    if (n) memcpy(at, suffix, n * sizeof *at);
    at[n] = m->end;
    p->tokens = ids;
    p->n += n + 3;
    return true;
}

static bool take_suffix(api_request *r, api_prompt *prompts, int32_t n) {
    fim_markers m;
    int32_t *suffix;
    size_t n_suffix;
    if (!r->suffix || !*r->suffix) return true;
    if (r->w.echo) {
        return api_refuse(r, "invalid_value", "echo", "echo and suffix exclude each other");
    }
    r->begins = -1; /* the suffix does not begin a prompt: no BOS */
    if (!find_markers(r, &m) ||
        !api_take_text(r, r->suffix, strlen(r->suffix), "suffix", &suffix, &n_suffix)) {
        return false;
    }
    for (int32_t i = 0; i < n; i++) {
        if (!surround(r, &prompts[i], &m, suffix, n_suffix)) return false;
    }
    return true;
}

static void set_token_limits(api_request *r, api_prompt *prompts, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (r->w.prefill_only) prompts[i].g.max_tokens = 1;
        if (r->max_tokens >= 0) continue;
        api_default_max_tokens(r, &prompts[i].g, prompts[i].n, DEFAULT_TOKENS);
    }
}

void api_complete(http_call *c, void *server) {
    api_request r;
    api_text ids = {0};
    api_prompt *prompts = NULL;
    echoes *echo = NULL;
    int32_t n = 0;
    if (api_request_open(&r, c, server, &api_complete_family, HTTP_OPENAI) && take_output(&r) &&
        api_take_sampling(&r) && api_take_response_format(&r) &&
        api_take_prompts(&r, r.prompt, "prompt", &prompts, &n) && take_suffix(&r, prompts, n) &&
        echo_prompts(&r, prompts, n, &echo)) {
        set_token_limits(&r, prompts, n);
        if (r.w.token_ids && n == 1) api_put_ids(&ids, prompts[0].tokens, prompts[0].n);
        api_job_start(&r, &complete_format, prompts, n, &ids, echo);
    } else {
        complete_deinit(echo);
        api_request_send_refusal(&r);
    }
    api_text_deinit(&ids);
    api_request_close(&r);
}
