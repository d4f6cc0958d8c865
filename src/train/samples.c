/* samples.c - /generate of SGLang's interface, with log-probabilities, experts and keys. */
#include "train/samples.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base64.h"
#include "base/json.h"

/* ---- a request ---- */

static json_t *list_ids(const int32_t *ids, int32_t n) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_integer(ids[i]));
    return list;
}

/* The model's own defaults of sampling do not count: the policy is the whole distribution. */
char *hd_sample_body(const hd_sample_request *r) {
    json_t *all =
        json_pack("{s:o, s:{s:i, s:i, s:f, s:I, s:i, s:i, s:i, s:i}, s:b, s:b, s:b}",
                  "input_ids", list_ids(r->prompt, r->n_prompt), "sampling_params", "n", r->n,
                  "max_new_tokens", r->max_tokens, "temperature", (double)r->temperature,
                  "sampling_seed", (json_int_t)r->seed, "top_p", 1, "top_k", -1, "min_p", 0,
                  "repetition_penalty", 1, "return_logprob", 1, "return_routed_experts",
                  (int)r->routes, "return_indexer_topk", (int)r->keys);
    char *text = all ? hd_json_write(all, JSON_COMPACT) : NULL;
    json_decref(all);
    return text;
}

/* ---- a reply ---- */

static hd_status refuse(hd_err *err, const char *why) {
    return HD_FAIL(err, HD_EFORMAT, "a sample %s", why);
}

static hd_status read_tokens(hd_sample_reply *out, const hd_sample_request *r,
                             const json_t *meta, hd_err *err) {
    const json_t *list = json_object_get(meta, "output_token_logprobs");
    const size_t n = json_array_size(list);
    if (n < 1 || n > (size_t)r->max_tokens) return refuse(err, "of no or too many tokens");
    for (size_t i = 0; i < n; i++) {
        const json_t *triple = json_array_get(list, i), *id = json_array_get(triple, 1),
                     *p = json_array_get(triple, 0);
        const json_int_t token = json_integer_value(id);
        const double logprob = json_number_value(p);
        if (!json_is_integer(id) || token < 0 || token >= out->vocab) {
            return refuse(err, "with what is no token of this model");
        }
        if (!json_is_number(p) || !(logprob <= 0.0) || !isfinite(logprob)) {
            return refuse(err, "with a log-probability that is none");
        }
        out->tokens[i] = (int32_t)token;
        out->logprob[i] = (float)logprob;
    }
    out->n = (int32_t)n;
    return HD_OK;
}

static hd_status read_end(hd_sample_reply *out, const json_t *meta, hd_err *err) {
    const char *why =
        json_string_value(json_object_get(json_object_get(meta, "finish_reason"), "type"));
    if (!why || (strcmp(why, "stop") != 0 && strcmp(why, "length") != 0)) {
        return refuse(err,
                      why && strcmp(why, "abort") == 0 ? "that was aborted" : "without an end");
    }
    out->truncated = strcmp(why, "length") == 0;
    return HD_OK;
}

/* What layers chose: `name` of meta_info, [rows, width] numbers from -1 to below `limit`. */
typedef struct choices {
    const char *name;
    int32_t *out;
    int64_t width;
    int32_t limit;
} choices;

static hd_status take_choices(const choices *c, const uint8_t *bytes, size_t n, hd_err *err) {
    for (size_t i = 0; i < n; i++) {
        int32_t choice;
        memcpy(&choice, bytes + i * sizeof choice, sizeof choice);
        if (choice < -1 || choice >= c->limit) {
            return HD_FAIL(err, HD_EFORMAT, "a sample with a number in %s that cannot be",
                           c->name);
        }
        c->out[i] = choice;
    }
    return HD_OK;
}

static hd_status read_choices(const choices *c, int32_t rows, const json_t *meta, hd_err *err) {
    const json_t *text = json_object_get(meta, c->name);
    const size_t length = json_string_length(text), n = (size_t)rows * (size_t)c->width;
    size_t bytes = 0;
    if (!json_is_string(text)) return HD_FAIL(err, HD_EFORMAT, "a sample without %s", c->name);
    uint8_t *raw = malloc(hd_base64_room(length) + 1);
    if (!raw) return HD_FAIL(err, HD_ENOMEM, "no memory for %s", c->name);
    const bool whole = hd_base64_decode(raw, &bytes, json_string_value(text), length) &&
                       bytes == n * sizeof(int32_t);
    const hd_status st =
        whole ? take_choices(c, raw, n, err)
              : HD_FAIL(err, HD_EFORMAT, "a sample with %s of another shape", c->name);
    free(raw);
    return st;
}

static hd_status read_sample(hd_sample_reply *out, const hd_sample_request *r,
                             const json_t *sample, hd_err *err) {
    const json_t *meta = json_object_get(sample, "meta_info");
    HD_TRY(read_tokens(out, r, meta, err));
    HD_TRY(read_end(out, meta, err));
    const int32_t rows = r->n_prompt + out->n - 1;
    const choices experts = {"routed_experts", out->routes, (int64_t)out->layers * out->top_k,
                             out->n_experts};
    const choices keys = {"indexer_topk", out->keys, (int64_t)out->key_layers * out->key_top_k,
                          rows};
    if (r->routes) HD_TRY(read_choices(&experts, rows, meta, err));
    return r->keys ? read_choices(&keys, rows, meta, err) : HD_OK;
}

static hd_status read_all(hd_sample_reply *out, const hd_sample_request *r, const json_t *reply,
                          hd_err *err) {
    if (json_is_object(reply) && r->n == 1) return read_sample(out, r, reply, err);
    if (!json_is_array(reply) || json_array_size(reply) != (size_t)r->n) {
        return HD_FAIL(err, HD_EFORMAT, "not a list of %d samples", r->n);
    }
    for (int32_t i = 0; i < r->n; i++) {
        HD_TRY(read_sample(&out[i], r, json_array_get(reply, (size_t)i), err));
    }
    return HD_OK;
}

hd_status hd_sample_read(hd_sample_reply *out, const hd_sample_request *r, const char *text,
                         size_t bytes, hd_err *err) {
    enum { STRICT = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY };
    json_error_t why;
    json_t *reply =
        hd_json_read(text, bytes, STRICT | JSON_ALLOW_NUL, &why); /* texts may have it */
    if (!reply) {
        return HD_FAIL(err, HD_EFORMAT, "reply: not valid JSON: line %d column %d: %s",
                       why.line, why.column, why.text);
    }
    const hd_status st = read_all(out, r, reply, err);
    json_decref(reply);
    return st;
}
