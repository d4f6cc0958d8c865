/* params.c - parses JSON objects by parameter tables, and contains the tables that endpoints
 * share. */
#include "api/params.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "api/request.h"
#include "engine/request_ranges.h"

enum { MAX_KEYS = 256, MAX_KEY_BYTES = 256 };

#define AT(field) offsetof(api_request, field)

/* ---- reading ---- */

typedef struct reading {
    api_request *r;
    const api_param *p;
    char name[512]; /* name with its path */
} reading;

static void *place(const reading *k) {
    return (char *)k->r + k->p->at;
}

static bool refuse(const reading *k, const char *what) {
    return api_refuse(k->r, "invalid_value", k->name, "%s %s", k->name, what);
}

bool api_param_range(const api_param *p, const api_limits *limits, double *low, double *high) {
    const size_t field = p->sets ? p->sets - 1 : p->at - AT(g); /* wraps if at is before g */
    const hd_request_range *r = hd_request_range_of(field);
    *low = p->low;
    *high = p->high;
    if (*low == 0 && *high == 0) {
        const bool same = r && r->http_low == 0 && r->http_high == 0;
        *low = !r ? INT32_MIN : same ? r->low : r->http_low;
        *high = !r ? INT32_MAX : same ? r->high : r->http_high;
    }
    if (p->limit) *high = *(const int32_t *)(const void *)((const char *)limits + p->limit - 1);
    return r || p->low != 0 || p->high != 0;
}

static bool check_range(const reading *k, double v) {
    double low, high;
    api_param_range(k->p, &k->r->ctx->limits, &low, &high);
    if (v >= low && v <= high) return true;
    return api_refuse(k->r, "invalid_value", k->name, "%s is %.10g; must be %.10g to %.10g",
                      k->name, v, low, high);
}

/* 16.0 and 1e2 are integers too. */
static bool whole_number(const json_t *v, long long *out) {
    if (json_is_integer(v)) {
        *out = json_integer_value(v);
        return true;
    }
    const double d = json_is_real(v) ? json_real_value(v) : 0.5;
    if (d != trunc(d) || fabs(d) > 9007199254740992.0) return false;
    *out = (long long)d;
    return true;
}

static bool read_integer(const reading *k, const json_t *v) {
    long long n;
    if (!whole_number(v, &n)) return refuse(k, "must be an integer");
    if (k->p->kind == API_LONG) {
        *(int64_t *)place(k) = n;
        return true;
    }
    if (!check_range(k, (double)n)) return false;
    *(int32_t *)place(k) = (int32_t)n;
    return true;
}

static bool read_number(const reading *k, const json_t *v) {
    if (!json_is_number(v)) return refuse(k, "must be a number");
    const double d = json_number_value(v);
    if (!check_range(k, d)) return false;
    *(float *)place(k) = (float)d;
    return true;
}

static bool is_among(const char *const *words, const char *s) {
    while (*words && strcmp(*words, s) != 0) words++;
    return *words != NULL;
}

static bool refuse_word(const reading *k) {
    char list[256] = "must be ";
    size_t n = strlen(list);
    for (const char *const *w = k->p->words; *w && n < sizeof list; w++) {
        const char *comma = w == k->p->words ? "" : w[1] ? ", " : " or ";
        n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", comma, *w);
    }
    return refuse(k, list);
}

static bool read_string(const reading *k, const json_t *v) {
    if (!json_is_string(v) || hd_chat_is_number(v)) return refuse(k, "must be a string");
    const char *s = json_string_value(v);
    const size_t n = json_string_length(v);
    const size_t most = k->p->high > 0 ? (size_t)k->p->high : API_MAX_STRING;
    if (strlen(s) != n) return refuse(k, "must not hold U+0000");
    if (n > most) {
        return api_refuse(k->r, "string_above_max_length", k->name,
                          "%s has %zu bytes; at most %zu are allowed", k->name, n, most);
    }
    if (k->p->words && !is_among(k->p->words, s)) return refuse_word(k);
    *(const char **)place(k) = s;
    return true;
}

static bool read_level(const reading *k, const json_t *v) {
    long long n;
    if (json_is_string(v) && !hd_chat_is_number(v)) return read_string(k, v);
    if (!whole_number(v, &n)) return refuse(k, "must be a string or a whole number");
    if (!check_range(k, (double)n)) return false;
    *(int32_t *)(void *)((char *)k->r + k->p->number_at) = (int32_t)n;
    return true;
}

static bool read_texts(const reading *k, json_t *v) {
    json_t *item;
    size_t i;
    if (!json_is_string(v) && !json_is_array(v)) {
        return refuse(k, "must be a string or an array of strings");
    }
    json_array_foreach(v, i, item) {
        if (!json_is_string(item) || hd_chat_is_number(item)) {
            return refuse(k, "must be a string or an array of strings");
        }
    }
    *(json_t **)place(k) = v;
    return true;
}

static bool read_ints(const reading *k, json_t *v) {
    json_t *item;
    size_t i;
    long long n;
    if (!json_is_array(v)) return refuse(k, "must be an array of integers");
    json_array_foreach(v, i, item) {
        if (!whole_number(item, &n)) return refuse(k, "must be an array of integers");
    }
    *(json_t **)place(k) = v;
    return true;
}

static bool read_json(const reading *k, json_t *v, bool right_type, const char *what) {
    if (!right_type) return refuse(k, what);
    *(json_t **)place(k) = v;
    return true;
}

static bool read_bool(const reading *k, const json_t *v) {
    if (!json_is_boolean(v)) return refuse(k, "must be true or false");
    if (k->p->kind == API_SWITCH) {
        *(int32_t *)place(k) = json_is_true(v) ? 1 : -1;
    } else {
        *(bool *)place(k) = json_is_true(v) == (k->p->kind == API_BOOL);
    }
    return true;
}

static bool read_nested(const reading *k, json_t *v) {
    char path[516];
    if (!json_is_object(v)) return refuse(k, "must be an object");
    snprintf(path, sizeof path, "%s.", k->name);
    return api_params_read(k->r, k->p->nested, v, path);
}

static bool read_refused(const reading *k, const json_t *v) {
    const bool yes = k->p->kind == API_ONLY && k->p->low != 0;
    if (json_is_boolean(v) && json_is_true(v) == yes) return true;
    if (k->p->kind == API_ONE && json_is_integer(v) && json_integer_value(v) == 1) return true;
    const bool empty = json_is_array(v) && json_array_size(v) == 0;
    if (k->p->kind == API_REFUSED && empty) return true; /* it asks for nothing */
    return api_refuse(k->r, k->p->code ? k->p->code : "unsupported_parameter", k->name,
                      "%s is not supported: %s", k->name, k->p->about);
}

static bool read_param(const reading *k, json_t *v) {
    switch (k->p->kind) {
    case API_BOOL:
    case API_BOOL_NOT:
    case API_SWITCH:
        return read_bool(k, v);
    case API_INT:
    case API_LONG:
        return read_integer(k, v);
    case API_NUMBER:
        return read_number(k, v);
    case API_STRING:
        return read_string(k, v);
    case API_LEVEL:
        return read_level(k, v);
    case API_OBJECT:
        return read_json(k, v, json_is_object(v), "must be an object");
    case API_ARRAY:
        return read_json(k, v, json_is_array(v), "must be an array");
    case API_TEXTS:
        return read_texts(k, v);
    case API_INTS:
        return read_ints(k, v);
    case API_ONE_OR_MANY:
        return read_json(k, v, json_is_object(v) || json_is_array(v),
                         "must be an object or an array of objects");
    case API_ANY:
        return read_json(k, v, true, "");
    case API_NESTED:
        return read_nested(k, v);
    case API_NOTED:
        return true;
    case API_ONLY:
    case API_ONE:
    case API_REFUSED:
        return read_refused(k, v);
    }
    return true;
}

const api_param *api_params_find(const api_family *family, const char *name) {
    for (int32_t s = 0; s < API_MAX_SECTIONS && family->sections[s]; s++) {
        const api_section *section = family->sections[s];
        for (size_t i = 0; i < section->n; i++) {
            if (strcmp(section->params[i].name, name) == 0) return &section->params[i];
        }
    }
    return NULL;
}

static bool plain_name(const char *name) {
    const size_t n = strlen(name);
    return n <= 64 && strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                   "0123456789_-.") == n;
}

/* Unknown members are ignored; the observer and a response header name them. */
static void note_unknown(api_request *r, const char *name, char *ignored, size_t size) {
    if (r->ctx->on_unknown_field) {
        r->ctx->on_unknown_field(r->ctx->server, r->family->endpoint, name);
    }
    const size_t used = strlen(ignored);
    if (!plain_name(name) || used + strlen(name) + 3 > size) return;
    snprintf(ignored + used, size - used, "%s%s", used ? ", " : "", name);
}

bool api_params_read(api_request *r, const api_family *family, json_t *object,
                     const char *path) {
    char ignored[256] = "";
    const char *name;
    json_t *value;
    if (json_object_size(object) > MAX_KEYS) {
        return api_refuse(r, "too_many_keys", NULL, "the object has %zu members; at most %d",
                          json_object_size(object), MAX_KEYS);
    }
    json_object_foreach(object, name, value) {
        reading k = {.r = r, .p = api_params_find(family, name)};
        if (strlen(name) > MAX_KEY_BYTES) {
            return api_refuse(r, "key_too_long", NULL,
                              "a member's name has %zu bytes; at most %d", strlen(name),
                              MAX_KEY_BYTES);
        }
        snprintf(k.name, sizeof k.name, "%.240s%.256s", path, name);
        if (!k.p && family->closed) return refuse(&k, "is not known");
        if (!k.p) note_unknown(r, name, ignored, sizeof ignored);
        if (!k.p || json_is_null(value)) continue;
        if (!read_param(&k, value)) return false;
    }
    if (*ignored) http_reply_header(r->call, "X-Ignored-Params", ignored);
    return true;
}

static bool param_costs(const api_param *p, const json_t *value) {
    const json_t *item;
    size_t i;
    if (!p || json_is_null(value)) return false;
    if (p->costly || !p->nested) return p->costly;
    json_array_foreach(value, i, item) {
        if (api_params_cost(p->nested, item)) return true;
    }
    return api_params_cost(p->nested, value);
}

bool api_params_cost(const api_family *family, const json_t *object) {
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)object, name, value) {
        if (param_costs(api_params_find(family, name), value)) return true;
    }
    return false;
}

/* ---- shared tables ---- */

/* clang-format off */
static const api_param stream_options[] = {
    {"include_usage", API_BOOL, AT(w.include_usage), .about = "a last chunk with the usage"},
    {"continuous_usage_stats", API_BOOL, AT(w.continuous_usage),
     .about = "the usage so far in every chunk"},
    {"include_obfuscation", API_ONLY, .about = "chunks are not padded"},
};
/* clang-format on */

static const api_section stream_options_section = API_SECTION(stream_options);
static const api_family stream_options_family = {
    .name = "StreamOptions", .sections = {&stream_options_section}, .closed = true};

/* clang-format off */
static const api_param structured[] = {
    {"json", API_ANY, AT(guided_json), .costly = true,
     .about = "a JSON schema, as an object or as text"},
    {"regex", API_STRING, AT(guided_regex), .costly = true,
     .about = "the complete output matches it"},
    {"choice", API_ARRAY, AT(guided_choice), .costly = true,
     .about = "the output is one of these strings"},
    {"json_object", API_BOOL, AT(guided_object), .about = "any JSON object"},
    {"grammar", API_REFUSED, .about = "grammars are not read; use regex or json"},
    {"structural_tag", API_REFUSED, .about = "use response_format"},
    {"disable_any_whitespace", API_NOTED, .about = "JSON is compact always"},
    {"disable_fallback", API_NOTED, .about = "there is one engine for grammars"},
};
/* clang-format on */

static const api_section structured_section = API_SECTION(structured);
static const api_family structured_family = {
    .name = "StructuredOutputs", .sections = {&structured_section}, .closed = true};

/* clang-format off */
const char api_stop_about[] = "at most " HD_STR(HD_MAX_STOP_STRINGS) " strings of at most "
                              HD_STR(HD_MAX_STOP_BYTES) " bytes";

static const api_param sampling[] = {
    {"temperature", API_NUMBER, AT(g.temperature), .about = "0 is greedy"},
    {"top_p", API_NUMBER, AT(g.top_p), .about = "nucleus"},
    {"top_k", API_INT, AT(g.top_k), .about = "-1 and 0 mean all"},
    {"min_p", API_NUMBER, AT(g.min_p), .about = "relative to the most probable token"},
    {"frequency_penalty", API_NUMBER, AT(g.frequency_penalty),
     .about = "per earlier occurrence"},
    {"presence_penalty", API_NUMBER, AT(g.presence_penalty),
     .about = "for having occurred"},
    {"repetition_penalty", API_NUMBER, AT(g.repetition_penalty),
     .about = "a factor, on prompt and output"},
    {"stop", API_TEXTS, AT(stop), .about = api_stop_about},
    {"stop_token_ids", API_INTS, AT(stop_ids),
     .about = "at most " HD_STR(HD_MAX_STOP_TOKENS) ", beside the model's own"},
    {"logit_bias", API_OBJECT, AT(bias),
     .about = "token id to -100..100, at most " HD_STR(HD_MAX_BIAS)},
    {"ignore_eos", API_BOOL, AT(g.ignore_eos), .about = "the model's own end does not stop"},
    {"skip_special_tokens", API_BOOL_NOT, AT(g.keep_special),
     .about = "special tokens are no text"},
    {"no_stop_trim", API_BOOL, AT(g.keep_stop), .about = "the stop string is part of the text"},
    {"n", API_INT, AT(g.n), .limit = offsetof(api_limits, max_choices) + 1,
     .about = "choices; choice i uses seed + i"},
    {"regex", API_STRING, AT(regex), .costly = true, .about = "the complete output matches it"},
    {"spaces_between_special_tokens", API_ONLY, .low = 1, .about = "nothing is put between"},
    {"custom_params", API_NOTED, .about = "for logit processors, which there are none of"},
    {"stop_regex", API_REFUSED, .about = "use stop"},
    {"ebnf", API_REFUSED, .about = "use regex or a JSON schema"},
    {"structural_tag", API_REFUSED, .about = "use response_format"},
};
/* clang-format on */
const api_section api_sampling_section = API_SECTION(sampling);

/* clang-format off */
static const api_param openai[] = {
    {"model", API_STRING, AT(checked), .high = API_MAX_MODEL_NAME,
     .about = "any name: one model is served"},
    {"user", API_NOTED, .about = "who asks does not matter"},
    {"seed", API_LONG, AT(g.seed), .about = "the same request with the same seed repeats; drawn anew where absent"},
    {"max_tokens", API_INT, AT(max_tokens), API_SETS(max_tokens), .about = "of each answer"},
    {"min_tokens", API_INT, AT(min_tokens), API_SETS(min_tokens), .about = "no end before"},
    {"include_stop_str_in_output", API_BOOL, AT(g.keep_stop), .about = "as no_stop_trim"},
    {"stream", API_BOOL, AT(w.stream), .about = "server-sent events"},
    {"stream_options", API_NESTED, .nested = &stream_options_family, .about = "of a stream"},
    {"stream_interval", API_INT, AT(w.stream_interval), 1, API_MAX_STREAM_INTERVAL,
     .about = "tokens per event after the first"},
    {"return_progress", API_BOOL, AT(w.progress),
     .about = "of a stream: chunks with prompt_progress while the prompt is computed"},
    {"response_format", API_OBJECT, AT(response_format),
     .costly = true, .about = "text, json_object or json_schema"},
    {"json_schema", API_ANY, AT(schema), .costly = true,
     .about = "a JSON schema, as text or as an object"},
    {"structured_outputs", API_NESTED, .nested = &structured_family, .about = "see there"},
    {"guided_json", API_ANY, AT(guided_json), .costly = true,
     .about = "as structured_outputs.json"},
    {"guided_regex", API_STRING, AT(guided_regex), .costly = true,
     .about = "as structured_outputs.regex"},
    {"guided_choice", API_ARRAY, AT(guided_choice), .costly = true,
     .about = "as structured_outputs.choice"},
    {"guided_grammar", API_REFUSED, .about = "grammars are not read; use guided_regex"},
    {"guided_decoding_backend", API_NOTED, .about = "there is one"},
    {"return_token_ids", API_BOOL, AT(w.token_ids), .about = "the ids of prompt and output"},
    {"service_tier", API_NOTED, .about = "there is one"},
    {"vllm_xargs", API_NOTED, .about = "for extensions, which there are none of"},
    {"watermarking", API_NOTED, .about = "there is none"},
};
/* clang-format on */
const api_section api_openai_section = API_SECTION(openai);

/* clang-format off */
static const api_param identity[] = {
    {"rid", API_STRING, AT(rid), .high = API_MAX_ID, .about = "the request's id"},
    {"request_id", API_STRING, AT(request_id), .high = API_MAX_ID, .about = "as rid"},
    {"session_id", API_NOTED, .about = "there are no sessions"},
    {"custom_labels", API_NOTED, .about = "metrics have fixed labels"},
    {"routing_key", API_NOTED, .about = "for routers"},
    {"priority", API_INT, AT(g.priority), -100, 100, .about = "higher runs first"},
    {"cache_salt", API_STRING, AT(cache_salt), .high = API_MAX_SALT,
     .about = "prefixes are shared among equal salts only"},
    {"extra_key", API_STRING, AT(extra_key), .high = API_MAX_SALT,
     .about = "as cache_salt; both count"},
    {"draft_tokens", API_INT, AT(g.draft_tokens),
     .about = "drafts per step with an MTP layer; -1: as many as pay"},
    {"relaxed_top", API_INT, AT(g.relaxed_top),
     .about = "in reasoning a draft among so many most probable tokens stands"},
    {"relaxed_delta", API_NUMBER, AT(g.relaxed_delta),
     .about = "and at most this less probable than the first; 0: strict"},
};
/* clang-format on */
const api_section api_identity_section = API_SECTION(identity);

/* clang-format off */
static const api_param absent[] = {
    {"best_of", API_ONE, .about = "use n"},
    {"use_beam_search", API_REFUSED, .about = "outputs are sampled"},
    {"length_penalty", API_REFUSED, .about = "it belongs to beam search"},
    {"prompt_logprobs", API_REFUSED, .about = "use /v1/completions with echo and logprobs"},
    {"logprob_token_ids", API_REFUSED, .about = "only the most probable tokens are listed"},
    {"token_ids_logprob", API_REFUSED, .about = "only the most probable tokens are listed"},
    {"allowed_token_ids", API_REFUSED, .about = "use logit_bias or a regex"},
    {"bad_words", API_REFUSED, .about = "use logit_bias"},
    {"repetition_detection", API_REFUSED, .about = "use the penalties"},
    {"truncate_prompt_tokens", API_REFUSED, .about = "prompts are not shortened"},
    {"prompt_embeds", API_REFUSED, .about = "prompts are text or token ids"},
    {"input_embeds", API_REFUSED, .about = "prompts are text or token ids"},
    {"custom_logit_processor", API_REFUSED, .about = "no code is taken from clients"},
    {"lora_path", API_REFUSED, .about = "there are no adapters"},
    {"return_hidden_states", API_REFUSED, .about = "hidden states are not given out"},
    {"return_routed_experts", API_REFUSED, .about = "use /generate"},
    {"routed_experts_start_len", API_REFUSED, .about = "use /generate"},
    {"return_indexer_topk", API_REFUSED, .about = "use /generate"},
    {"return_cached_tokens_details", API_REFUSED, .about = "usage counts the cached tokens of all tiers together"},
    {"bootstrap_host", API_REFUSED, .about = "the router names a prefill server in X-Hadal-Prefill"},
    {"bootstrap_port", API_REFUSED, .about = "the router names a prefill server in X-Hadal-Prefill"},
    {"bootstrap_room", API_REFUSED, .about = "the router names a prefill server in X-Hadal-Prefill"},
    {"bootstrap_pair_key", API_REFUSED, .about = "the router names a prefill server in X-Hadal-Prefill"},
    {"decode_tp_size", API_REFUSED, .about = "the router names a prefill server in X-Hadal-Prefill"},
    {"kv_transfer_params", API_REFUSED, .about = "the router names a prefill server in X-Hadal-Prefill"},
    {"routed_dp_rank", API_REFUSED, .about = "requests go where their prefix is, or to the least load"},
    {"data_parallel_rank", API_REFUSED, .about = "requests go where their prefix is, or to the least load"},
    {"disagg_prefill_dp_rank", API_REFUSED, .about = "requests go where their prefix is, or to the least load"},
};
/* clang-format on */
const api_section api_absent_section = API_SECTION(absent);
