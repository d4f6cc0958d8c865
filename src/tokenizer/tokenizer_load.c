/* tokenizer_load.c - loads a tokenizer.json and checks every rule of the format. Only
 * byte-level BPE is supported. An unknown part that could change ids is refused by name.
 * Truncation and padding are ignored, because callers decide about them. */
#include "tokenizer/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum { MAX_MERGES = 10 * 1000 * 1000 };

static const char *type_of(const json_t *object) {
    return json_string_value(json_object_get(object, "type"));
}

static hd_status refuse_type(const char *what, const json_t *object, hd_err *err) {
    const char *type = type_of(object);
    if (type) return HD_FAIL(err, HD_EUNSUPPORTED, "unsupported %s: %.80s", what, type);
    return HD_FAIL(err, HD_EFORMAT, "%s: must be an object with a 'type'", what);
}

/* Accepts an absent or null part, or a Sequence of nothing. */
static hd_status check_normalizer(const json_t *v, hd_err *err) {
    if (!v || json_is_null(v)) return HD_OK;
    const char *type = type_of(v);
    if (!type || strcmp(type, "Sequence") != 0) return refuse_type("normalizer", v, err);
    const json_t *list = json_object_get(v, "normalizers");
    if (json_array_size(list) == 0) return HD_OK;
    return refuse_type("normalizer", json_array_get(list, 0), err);
}

static hd_status check_decoder(const json_t *v, hd_err *err) {
    const json_t *list = json_object_get(v, "decoders");
    const char *type = type_of(v);
    if (type && strcmp(type, "Sequence") == 0 && json_array_size(list) == 1) {
        v = json_array_get(list, 0);
        type = type_of(v);
    }
    if (type && strcmp(type, "ByteLevel") == 0) return HD_OK;
    return refuse_type("decoder", v, err);
}

/* Accepts a fixed part of the model if it is absent, null, or as expected. */
static hd_status check_model(const json_t *model, hd_err *err) {
    const char *type = type_of(model);
    if (!json_is_object(model)) return HD_FAIL(err, HD_EFORMAT, "model: must be an object");
    if (type && strcmp(type, "BPE") != 0) return refuse_type("tokenizer model", model, err);
    const json_t *dropout = json_object_get(model, "dropout");
    if (dropout && !json_is_null(dropout) && json_number_value(dropout) != 0.0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "unsupported model: dropout is set");
    }
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < HD_LEN(affixes); i++) {
        const json_t *v = json_object_get(model, affixes[i]);
        if (v && !json_is_null(v) && json_string_length(v) > 0) {
            return HD_FAIL(err, HD_EUNSUPPORTED, "unsupported model: %s is set", affixes[i]);
        }
    }
    if (json_is_true(json_object_get(model, "byte_fallback"))) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "unsupported model: byte_fallback is set");
    }
    return HD_OK;
}

static hd_status check_id(const json_t *v, const char *token, int64_t *id, hd_err *err) {
    *id = json_is_integer(v) ? (int64_t)json_integer_value(v) : -1;
    if (*id >= 0 && *id < TEXT_MAX_IDS) return HD_OK;
    if (!json_is_integer(v)) {
        return HD_FAIL(err, HD_EFORMAT, "token '%.80s': its id is not a whole number", token);
    }
    return HD_FAIL(err, HD_EFORMAT, "token '%.80s': id %lld is out of range 0..%d", token,
                   (long long)*id, TEXT_MAX_IDS - 1);
}

/* Sizes of the tables, computed before anything is stored. */
typedef struct totals {
    int64_t max_id;
    size_t n_tokens, n_bytes, added_bytes;
} totals;

static hd_status count_token(totals *sum, const char *token, size_t n, const json_t *id_value,
                             hd_err *err) {
    int64_t id;
    HD_TRY(check_id(id_value, token, &id, err));
    if (n > TEXT_MAX_TOKEN_BYTES) {
        return HD_FAIL(err, HD_EFORMAT, "token %lld has %zu bytes; the limit is %d",
                       (long long)id, n, TEXT_MAX_TOKEN_BYTES);
    }
    if (id > sum->max_id) sum->max_id = id;
    sum->n_tokens++;
    if (!hd_add_size(sum->n_bytes, n, &sum->n_bytes) || sum->n_bytes > TEXT_MAX_VOCAB_BYTES) {
        return HD_FAIL(err, HD_EFORMAT, "the tokens have more than %d bytes",
                       TEXT_MAX_VOCAB_BYTES);
    }
    return HD_OK;
}

static hd_status count_added(totals *sum, const json_t *list, hd_err *err) {
    if (list && !json_is_array(list) && !json_is_null(list)) {
        return HD_FAIL(err, HD_EFORMAT, "added_tokens: must be an array");
    }
    if (json_array_size(list) > TEXT_MAX_ADDED) {
        return HD_FAIL(err, HD_EFORMAT, "added_tokens: %zu of them; the limit is %d",
                       json_array_size(list), TEXT_MAX_ADDED);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i), *content = json_object_get(v, "content");
        if (!json_is_string(content) || json_string_length(content) == 0) {
            return HD_FAIL(err, HD_EFORMAT, "added_tokens[%zu]: its content is empty", i);
        }
        size_t n = json_string_length(content);
        sum->added_bytes += n;
        HD_TRY(count_token(sum, json_string_value(content), n, json_object_get(v, "id"), err));
    }
    return HD_OK;
}

static hd_status load_vocab(hd_tokenizer *t, json_t *vocab, const json_t *added,
                            size_t *added_bytes, hd_err *err) {
    totals sum = {.max_id = -1};
    const char *token;
    json_t *id;
    json_object_foreach(vocab, token, id) {
        HD_TRY(count_token(&sum, token, strlen(token), id, err));
    }
    HD_TRY(count_added(&sum, added, err));
    *added_bytes = sum.added_bytes;
    HD_TRY(
        text_vocab_open(&t->vocab, (int32_t)(sum.max_id + 1), sum.n_tokens, sum.n_bytes, err));
    json_object_foreach(vocab, token, id) {
        size_t n = strlen(token);
        if (n == 0) return HD_FAIL(err, HD_EFORMAT, "vocab: a token is empty");
        if (n > t->longest_token) t->longest_token = n;
        HD_TRY(text_vocab_add(&t->vocab, json_integer_value(id), token, n, 0, err));
    }
    return HD_OK;
}

static hd_status read_added_flag(bool *out, const json_t *object, const char *key, size_t i,
                                 hd_err *err) {
    const json_t *v = json_object_get(object, key);
    *out = json_is_true(v);
    if (!v || json_is_boolean(v)) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "added_tokens[%zu]: '%s' must be true or false", i, key);
}

static hd_status add_one(hd_tokenizer *t, const json_t *v, size_t i, hd_err *err) {
    const char *content = json_string_value(json_object_get(v, "content"));
    size_t n = json_string_length(json_object_get(v, "content"));
    int32_t id = (int32_t)json_integer_value(json_object_get(v, "id"));
    text_added_token token = {.id = id};
    bool special;
    HD_TRY(read_added_flag(&token.single_word, v, "single_word", i, err));
    HD_TRY(read_added_flag(&token.lstrip, v, "lstrip", i, err));
    HD_TRY(read_added_flag(&token.rstrip, v, "rstrip", i, err));
    HD_TRY(read_added_flag(&token.normalized, v, "normalized", i, err));
    HD_TRY(read_added_flag(&special, v, "special", i, err));
    uint8_t flags = (uint8_t)(TEXT_ADDED | (special ? TEXT_SPECIAL : 0));
    int32_t known = text_vocab_find(&t->vocab, content, n);
    if (known == id && !(t->vocab.flags[id] & TEXT_ADDED)) {
        t->vocab.flags[id] |=
            flags; /* a token of the base vocabulary that is also an added token */
    } else {
        HD_TRY(text_vocab_add(&t->vocab, id, content, n, flags, err));
    }
    text_added_add(token.normalized ? &t->normalized : &t->verbatim, content, n, token);
    return HD_OK;
}

static hd_status load_added(hd_tokenizer *t, const json_t *list, size_t n_bytes, hd_err *err) {
    size_t n = json_array_size(list);
    HD_TRY(text_added_open(&t->verbatim, (int32_t)n, n_bytes, err));
    HD_TRY(text_added_open(&t->normalized, (int32_t)n, n_bytes, err));
    for (size_t i = 0; i < n; i++) HD_TRY(add_one(t, json_array_get(list, i), i, err));
    const text_vocab *v = &t->vocab;
    for (int32_t id = 0; id < v->n_ids; id++) {
        if ((v->flags[id] & (TEXT_FOREIGN | TEXT_ADDED)) != TEXT_FOREIGN) continue;
        return HD_FAIL(err, HD_EFORMAT,
                       "token %d '%.*s' is not spelled in the byte-level alphabet", (int)id,
                       v->tokens[id].n > 80 ? 80 : (int)v->tokens[id].n,
                       v->spellings + v->tokens[id].at);
    }
    return HD_OK;
}

static hd_status find_bytes(hd_tokenizer *t, hd_err *err) {
    for (int32_t byte = 0; byte < 256; byte++) {
        uint8_t spelling[4];
        size_t n = text_utf8_put(spelling, text_byte_character((uint8_t)byte));
        t->bpe.byte_id[byte] = text_vocab_find(&t->vocab, (const char *)spelling, n);
        if (t->bpe.byte_id[byte] < 0) {
            return HD_FAIL(err, HD_EFORMAT,
                           "vocab: the symbol of byte 0x%02x, '%.*s', is missing",
                           (unsigned)byte, (int)n, (const char *)spelling);
        }
    }
    return HD_OK;
}

/* Reads the two sides of merge i, from "left right" or ["left", "right"]. *left is NULL for a
 * version line, which old files may contain. */
static hd_status read_sides(const json_t *v, size_t i, const char **left, size_t *left_n,
                            const char **right, size_t *right_n, hd_err *err) {
    if (json_is_array(v) && json_array_size(v) == 2) {
        *left = json_string_value(json_array_get(v, 0));
        *left_n = json_string_length(json_array_get(v, 0));
        *right = json_string_value(json_array_get(v, 1));
        *right_n = json_string_length(json_array_get(v, 1));
        if (*left && *right && *left_n && *right_n) return HD_OK;
    } else if (json_is_string(v)) {
        const char *text = json_string_value(v), *space = strchr(text, ' ');
        *left = NULL;
        if (strncmp(text, "#version", 8) == 0) return HD_OK;
        if (space && space > text && space[1] && !strchr(space + 1, ' ')) {
            *left = text;
            *left_n = (size_t)(space - text);
            *right = space + 1;
            *right_n = strlen(space + 1);
            return HD_OK;
        }
    }
    return HD_FAIL(err, HD_EFORMAT, "bad merge %zu: it must have two parts, neither empty", i);
}

static hd_status add_merge(hd_tokenizer *t, const json_t *v, size_t i, hd_err *err) {
    const char *left = NULL, *right = NULL;
    size_t left_n = 0, right_n = 0;
    HD_TRY(read_sides(v, i, &left, &left_n, &right, &right_n, err));
    if (!left) return HD_OK;
    int32_t a = text_vocab_find(&t->vocab, left, left_n);
    int32_t b = text_vocab_find(&t->vocab, right, right_n);
    int32_t whole = text_vocab_find_pair(&t->vocab, left, left_n, right, right_n);
    if (a < 0 || b < 0 || whole < 0) {
        return HD_FAIL(err, HD_EFORMAT, "merge %zu, '%.*s' and '%.*s': its %s is not a token",
                       i, left_n > 80 ? 80 : (int)left_n, left,
                       right_n > 80 ? 80 : (int)right_n, right,
                       a < 0   ? "left part"
                       : b < 0 ? "right part"
                               : "result");
    }
    if (!text_bpe_add(&t->bpe, a, b, whole)) {
        return HD_FAIL(err, HD_EFORMAT, "merge %zu, '%.*s' and '%.*s', is there twice", i,
                       left_n > 80 ? 80 : (int)left_n, left, right_n > 80 ? 80 : (int)right_n,
                       right);
    }
    t->merges_make_added |= (t->vocab.flags[whole] & TEXT_ADDED) != 0;
    return HD_OK;
}

static hd_status load_merges(hd_tokenizer *t, const json_t *list, hd_err *err) {
    size_t n = json_array_size(list);
    if (!json_is_array(list)) return HD_FAIL(err, HD_EFORMAT, "merges: must be an array");
    if (n > MAX_MERGES) {
        return HD_FAIL(err, HD_EFORMAT, "merges: %zu of them; the limit is %d", n, MAX_MERGES);
    }
    HD_TRY(text_bpe_open(&t->bpe, (int32_t)n, t->vocab.n_ids, err));
    HD_TRY(find_bytes(t, err));
    for (size_t i = 0; i < n; i++) HD_TRY(add_merge(t, json_array_get(list, i), i, err));
    text_bpe_finish(&t->bpe);
    return HD_OK;
}

/* The token that a TemplateProcessing prepends to a text becomes the BOS. */
static hd_status read_template(hd_tokenizer *t, const json_t *v, hd_err *err) {
    const json_t *first = json_array_get(json_object_get(v, "single"), 0);
    const char *name =
        json_string_value(json_object_get(json_object_get(first, "SpecialToken"), "id"));
    if (!name) return HD_OK;
    t->bos = text_vocab_find(&t->vocab, name, strlen(name));
    t->adds_bos = true;
    if (t->bos >= 0) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "post-processor: '%.80s' is not a token", name);
}

static hd_status read_processor(hd_tokenizer *t, const json_t *v, hd_err *err) {
    const char *type = type_of(v);
    if (type && strcmp(type, "ByteLevel") == 0) return HD_OK;
    if (type && strcmp(type, "TemplateProcessing") == 0) return read_template(t, v, err);
    return refuse_type("post-processor", v, err);
}

static hd_status load_processor(hd_tokenizer *t, const json_t *v, hd_err *err) {
    if (!v || json_is_null(v)) return HD_OK;
    const char *type = type_of(v);
    if (!type || strcmp(type, "Sequence") != 0) return read_processor(t, v, err);
    const json_t *list = json_object_get(v, "processors");
    for (size_t i = 0; i < json_array_size(list); i++) {
        HD_TRY(read_processor(t, json_array_get(list, i), err));
    }
    return HD_OK;
}

hd_status text_tokenizer_load(hd_tokenizer *t, const json_t *root, hd_err *err) {
    t->bos = t->eos = t->pad = -1;
    if (!json_is_object(root)) return HD_FAIL(err, HD_EFORMAT, "must hold a JSON object");
    const json_t *model = json_object_get(root, "model");
    json_t *vocab = json_object_get(model, "vocab");
    const json_t *added = json_object_get(root, "added_tokens");
    const json_t *ignore = json_object_get(model, "ignore_merges");
    size_t added_bytes = 0;
    HD_TRY(check_model(model, err));
    HD_TRY(check_normalizer(json_object_get(root, "normalizer"), err));
    HD_TRY(check_decoder(json_object_get(root, "decoder"), err));
    if (!json_is_object(vocab)) {
        return HD_FAIL(err, HD_EFORMAT, "model: 'vocab' must be an object");
    }
    t->ignore_merges = json_is_true(ignore);
    HD_TRY(
        text_pretokenizer_open(&t->pretokenizer, json_object_get(root, "pre_tokenizer"), err));
    HD_TRY(load_vocab(t, vocab, added, &added_bytes, err));
    HD_TRY(load_added(t, added, added_bytes, err));
    HD_TRY(load_merges(t, json_object_get(model, "merges"), err));
    return load_processor(t, json_object_get(root, "post_processor"), err);
}

/* Reads a named token: null, a string, or an object with its content. */
static hd_status read_named(const hd_tokenizer *t, const json_t *config, const char *key,
                            bool required, int32_t *out, hd_err *err) {
    const json_t *v = json_object_get(config, key);
    if (json_is_object(v)) v = json_object_get(v, "content");
    if (!v || json_is_null(v)) return HD_OK;
    if (!json_is_string(v)) return HD_FAIL(err, HD_EFORMAT, "'%s' must be a string", key);
    int32_t id = text_vocab_find(&t->vocab, json_string_value(v), json_string_length(v));
    if (id < 0 && required) {
        return HD_FAIL(err, HD_EFORMAT, "'%s': '%.80s' is not a token of the vocabulary", key,
                       json_string_value(v));
    }
    *out = id;
    return HD_OK;
}

hd_status text_tokenizer_load_config(hd_tokenizer *t, const json_t *config, hd_err *err) {
    if (!json_is_object(config)) return HD_FAIL(err, HD_EFORMAT, "must hold a JSON object");
    HD_TRY(read_named(t, config, "bos_token", true, &t->bos, err));
    HD_TRY(read_named(t, config, "eos_token", true, &t->eos, err));
    HD_TRY(read_named(t, config, "pad_token", false, &t->pad, err));
    const json_t *adds = json_object_get(config, "add_bos_token");
    if (adds && !json_is_boolean(adds) && !json_is_null(adds)) {
        return HD_FAIL(err, HD_EFORMAT, "'add_bos_token' must be true or false");
    }
    if (json_is_boolean(adds)) t->adds_bos = json_is_true(adds);
    if (t->bos < 0) t->adds_bos = false;
    return HD_OK;
}
