/* request.c - opens a request body, owns the memory made for it, and writes refusals (error
 * responses). */
#include "api/resume.h"
#include "api/request.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "api/endpoints.h"
#include "base/progress.h"
#include "base/siphash.h"
#include "http/key_salt.h"

enum { MAX_DEPTH = 128, MAX_VALUES = 1000000 };

struct api_kept {
    api_kept *next;
    void *memory;
};

/* ---- refusals ---- */

const char *api_error_type(http_shape shape, int status) {
    static const struct {
        int status;
        const char *openai, *anthropic;
    } types[] = {
        {404, "not_found_error",       "not_found_error"  },
        {408, "timeout_error",         "api_error"        },
        {413, "invalid_request_error", "request_too_large"},
        {429, "rate_limit_error",      "rate_limit_error" },
        {500, "server_error",          "api_error"        },
        {503, "overloaded_error",      "overloaded_error" },
    };
    for (size_t i = 0; i < HD_LEN(types); i++) {
        if (types[i].status != status) continue;
        return shape == HTTP_ANTHROPIC ? types[i].anthropic : types[i].openai;
    }
    return "invalid_request_error";
}

HD_PRINTF(5, 0)
static bool refuse(api_request *r, int status, const char *code, const char *param,
                   const char *format, va_list args) {
    api_refusal *why = &r->refusal;
    if (why->status) return false;
    why->status = status;
    why->code = code;
    if (param) snprintf(why->param, sizeof why->param, "%s", param);
    vsnprintf(why->message, sizeof why->message, format, args);
    return false;
}

bool api_refuse(api_request *r, const char *code, const char *param, const char *format, ...) {
    va_list args;
    va_start(args, format);
    refuse(r, 400, code, param, format, args);
    va_end(args);
    return false;
}

bool api_refuse_status(api_request *r, int status, const char *code, const char *param,
                       const char *format, ...) {
    va_list args;
    va_start(args, format);
    refuse(r, status, code, param, format, args);
    va_end(args);
    return false;
}

bool api_refuse_err(api_request *r, const char *param, const hd_err *err) {
    const char *code = err->code                        ? err->code
                       : err->status == HD_EUNSUPPORTED ? "unsupported_parameter"
                                                        : "invalid_value";
    if (err->status == HD_ENOMEM) {
        return api_refuse_status(r, 503, "out_of_memory", NULL, "%s", err->msg);
    }
    if (*err->field) param = err->field;
    if (strcmp(code, "text_too_long") == 0) { /* the tokenizer stopped there */
        return api_refuse(r, "context_length_exceeded", param,
                          "prompt is too long: %s; the maximum context length is %d tokens",
                          err->msg, r->max_context);
    }
    return api_refuse(r, code, param, "%s", err->msg);
}

void api_request_send_refusal(api_request *r) {
    const api_refusal *why = &r->refusal;
    if (r->handed_over) return;
    if (why->status == 429 || why->status == 503) {
        char seconds[16];
        snprintf(seconds, sizeof seconds, "%d", why->retry_s ? why->retry_s : 1);
        http_reply_header(r->call, "Retry-After", seconds);
    }
    http_error(r->call, why->status, api_error_type(r->shape, why->status), why->code,
               *why->param ? why->param : NULL, "%s", why->message);
}

void api_reply(http_call *c, const char *type, api_text *out) {
    if (out->failed) {
        api_text_deinit(out);
        http_reply_header(c, "Retry-After", "1");
        http_error(c, 503, "overloaded_error", "out_of_memory", NULL,
                   "no memory for the response");
        return;
    }
    /* the response may stay in memory for long */
    char *exact = out->data ? realloc(out->data, out->n + 1) : NULL;
    http_reply_owned(c, 200, type, exact ? exact : out->data, out->n);
    *out = (api_text){0};
}

/* ---- memory ---- */

void *api_keep(api_request *r, size_t n, size_t size) {
    void *memory = calloc(n ? n : 1, size);
    api_kept *k = memory ? malloc(sizeof *k) : NULL;
    if (!k) {
        free(memory);
        api_refuse_status(r, 503, "out_of_memory", NULL, "no memory for the request");
        return NULL;
    }
    *k = (api_kept){r->kept, memory};
    r->kept = k;
    return memory;
}

json_t *api_keep_json(api_request *r, json_t *made) {
    if (!r->made) r->made = json_array();
    /* takes the reference even on failure */
    if (json_array_append_new(r->made, made) == 0) return made;
    api_refuse_status(r, 503, "out_of_memory", NULL, "no memory for the request");
    return NULL;
}

/* ---- the body ---- */

/* Checks depth and number of values before the parser allocates memory for them. */
static bool check_shape(api_request *r, const char *text, size_t n) {
    size_t depth = 0, values = 0;
    for (size_t i = 0; i < n; i++) {
        const char c = text[i];
        if (c == '"') {
            for (i++; i < n && text[i] != '"'; i++) i += text[i] == '\\';
        } else if (c == '[' || c == '{') {
            values++;
            if (++depth > MAX_DEPTH) {
                return api_refuse(r, "too_deep", NULL, "the body nests deeper than %d",
                                  MAX_DEPTH);
            }
        } else if (c == ']' || c == '}') {
            depth -= depth > 0;
        } else if (c == ',') {
            values++;
        }
        if (values > MAX_VALUES) {
            return api_refuse(r, "too_many_values", NULL, "the body has more than %d values",
                              MAX_VALUES);
        }
    }
    return true;
}

static bool read_body(api_request *r) {
    size_t n;
    const char *text = http_body(r->call, &n);
    hd_err err = {0};
    if (n >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) {
        text += 3;
        n -= 3;
    }
    if (n == 0) return api_refuse(r, "empty_body", NULL, "the body is empty");
    if (!check_shape(r, text, n)) return false;
    if (hd_chat_parse_json(&r->body, text, n, "the body", &err) != HD_OK) {
        return api_refuse_err(r, NULL, &err);
    }
    if (!json_is_object(r->body)) {
        return api_refuse(r, "invalid_json", NULL, "the body must be a JSON object");
    }
    return true;
}

/* Mixes the salt of the key with the client's cache_salt, so that no client can name
 * another's salt. */
static uint64_t mix_salt(uint64_t of_key, const char *cache_salt, const char *extra_key) {
    if (!cache_salt && !extra_key) return of_key;
    hd_siphash s;
    hd_siphash_init_secret(&s);
    hd_siphash_add(&s, &of_key, sizeof of_key);
    hd_siphash_add_part(&s, cache_salt);
    hd_siphash_add_part(&s, extra_key);
    return hd_siphash_value(&s);
}

/* Without a seed each request gets a random one. The request log contains it. */
static uint64_t draw_seed(void) {
    uint64_t seed;
    if (getrandom(&seed, sizeof seed, 0) != sizeof seed) seed = (uint64_t)hd_now_ns();
    return seed >> 1; /* fits a signed integer of JSON */
}

static void set_defaults(api_request *r) {
    hd_engine_stats stats;
    hd_engine_read_stats(r->ctx->engine, &stats);
    r->max_context = stats.max_context;
    r->g = (hd_request){.size = sizeof r->g,
                        .n = 1,
                        .seed = draw_seed(),
                        .draft_tokens = r->ctx->limits.draft_tokens,
                        .queue_timeout_ns = r->ctx->limits.queue_timeout_ns};
    hd_engine_defaults(r->ctx->engine, &r->g);
    r->w = (api_wishes){.separate_reasoning = true,
                        .stream_reasoning = true,
                        .parallel_calls = true,
                        .stream_interval = r->ctx->limits.stream_interval};
    r->parse_special = r->family == &api_tokenize_family; /* clients expect it there */
    r->top_logprobs = r->logprobs = r->max_tokens = r->max_completion_tokens = -1;
    r->logprob_start = -1;
    r->store = true;
}

bool api_request_name(api_request *r, const char *id, const char *param) {
    const size_t n = strlen(id);
    for (size_t i = 0; i < n || n == 0; i++) {
        if (n > 0 && n <= API_MAX_ID && id[i] > ' ' && id[i] <= '~') continue;
        return api_refuse(r, "invalid_value", param,
                          "%s must have 1 to %d bytes, printable ones of ASCII", param,
                          API_MAX_ID);
    }
    http_set_request_id(r->call, id);
    snprintf(r->id, sizeof r->id, "%s", id);
    return true;
}

bool api_request_open(api_request *r, http_call *c, api_context *ctx, const api_family *family,
                      http_shape shape) {
    *r = (api_request){.call = c, .ctx = ctx, .family = family, .shape = shape};
    set_defaults(r);
    if (!read_body(r)) return false;
    r->handed_over = api_params_cost(family, r->body) && http_hand_over(c);
    if (r->handed_over || !api_params_read(r, family, r->body, "")) return false;
    (void)api_resume_seed(http_header(c, API_RESUME_HEADER), &r->g.seed);
    snprintf(r->id, sizeof r->id, "%s", http_request_id(c));
    if (r->rid && !api_request_name(r, r->rid, "rid")) return false;
    if (!r->rid && r->request_id && !api_request_name(r, r->request_id, "request_id")) {
        return false;
    }
    uint64_t of_key = http_salt(c);
    if (r->key_digest && (of_key = http_key_salt_of(r->key_digest)) == 0) {
        return api_refuse(r, "invalid_value", "api_key_sha256",
                          "api_key_sha256 must be 64 hexadecimal digits");
    }
    r->g.salt = mix_salt(of_key, r->cache_salt, r->extra_key);
    return true;
}

void api_request_close(api_request *r) {
    while (r->kept) {
        api_kept *k = r->kept;
        r->kept = k->next;
        free(k->memory);
        free(k);
    }
    hd_conversation_deinit(&r->conversation);
    json_decref(r->body);
    json_decref(r->made);
    r->body = r->made = NULL;
}
