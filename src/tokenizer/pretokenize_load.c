/* pretokenize_load.c - loads the pre_tokenizer object of a tokenizer.json as stages. What
 * cannot be done exactly as in the reference library is refused by name. */
#include "tokenizer/pretokenize_internal.h"

#include <stdlib.h>
#include <string.h>

/* The pattern of a ByteLevel stage with use_regex. */
static const char gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static hd_status read_flag(bool *out, const json_t *object, const char *key, bool otherwise,
                           hd_err *err) {
    const json_t *v = json_object_get(object, key);
    *out = v ? json_is_true(v) : otherwise;
    if (!v || json_is_boolean(v)) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "pre-tokenizer: '%s' must be true or false", key);
}

static hd_status add_pattern(text_pretokenizer *p, const char *source, size_t n, hd_err *err) {
    text_pattern *pattern = &p->stages[p->n_stages].pattern;
    if (n > TEXT_PATTERN_MAX_BYTES) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "unsupported pre-tokenizer: a pattern of %zu bytes; the limit is %d", n,
                       (int)TEXT_PATTERN_MAX_BYTES);
    }
    HD_TRY(text_scan_open(&pattern->scan, source, n, err));
    if (!pattern->scan) {
        HD_TRY(text_regex_open(&pattern->regex, source, n, err));
        p->needs_regex = true;
    }
    p->n_stages++;
    return HD_OK;
}

/* A String pattern is matched literally: every character is escaped. */
static hd_status add_literal(text_pretokenizer *p, const char *text, size_t n, hd_err *err) {
    char *escaped = malloc(n * 2 + 1);
    if (!escaped) return HD_FAIL(err, HD_ENOMEM, "no memory for a pattern");
    size_t length = 0;
    for (size_t i = 0; i < n; i++) {
        if (text[i] && strchr("\\()[]{}?*+.^$|", text[i])) escaped[length++] = '\\';
        escaped[length++] = text[i];
    }
    hd_status st = add_pattern(p, escaped, length, err);
    free(escaped);
    return st;
}

static hd_status read_behavior(text_behavior *out, const json_t *object, hd_err *err) {
    static const char *const names[] = {"Isolated", "Removed", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const char *name = json_string_value(json_object_get(object, "behavior"));
    if (!name) return HD_FAIL(err, HD_EFORMAT, "pre-tokenizer: Split needs a 'behavior'");
    for (size_t i = 0; i < HD_LEN(names); i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (text_behavior)i;
            return HD_OK;
        }
    }
    return HD_FAIL(err, HD_EUNSUPPORTED, "unsupported pre-tokenizer: Split behavior '%s'",
                   name);
}

static hd_status add_split(text_pretokenizer *p, const json_t *object, hd_err *err) {
    text_stage *stage = &p->stages[p->n_stages];
    const json_t *pattern = json_object_get(object, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex");
    const json_t *literal = json_object_get(pattern, "String");
    const json_t *source = regex ? regex : literal;
    if (!json_is_string(source) || json_string_length(source) == 0) {
        return HD_FAIL(err, HD_EFORMAT,
                       "pre-tokenizer: Split needs a 'pattern' with a Regex or a String");
    }
    HD_TRY(read_behavior(&stage->behavior, object, err));
    HD_TRY(read_flag(&stage->invert, object, "invert", false, err));
    const char *text = json_string_value(source);
    size_t n = json_string_length(source);
    return regex ? add_pattern(p, text, n, err) : add_literal(p, text, n, err);
}

static hd_status add_digits(text_pretokenizer *p, const json_t *object, hd_err *err) {
    text_stage *stage = &p->stages[p->n_stages];
    bool individual;
    HD_TRY(read_flag(&individual, object, "individual_digits", false, err));
    text_charset *set = calloc(1, sizeof *set);
    if (!set) return HD_FAIL(err, HD_ENOMEM, "no memory for a character class");
    text_charset_add_categories(set, 1u << TEXT_ND | 1u << TEXT_NL | 1u << TEXT_NO);
    text_charset_add(set, 0x11de0, 0x11de9); /* the reference's Digits stage uses a later */
    text_charset_add(set, 0x16ff4, 0x16ff6); /* Unicode than its patterns: version 17 */
    hd_status st = text_scan_open_class(&stage->pattern.scan, set, individual, err);
    free(set);
    if (st == HD_OK) p->n_stages++;
    return st;
}

static hd_status add_byte_level(text_pretokenizer *p, const json_t *object, hd_err *err) {
    bool use_regex;
    HD_TRY(read_flag(&p->add_prefix_space, object, "add_prefix_space", true, err));
    HD_TRY(read_flag(&use_regex, object, "use_regex", true, err));
    p->prefix_stage = p->n_stages;
    return use_regex ? add_pattern(p, gpt2_pattern, strlen(gpt2_pattern), err) : HD_OK;
}

static hd_status add_stage(text_pretokenizer *p, const json_t *object, bool last, hd_err *err) {
    const char *type = json_string_value(json_object_get(object, "type"));
    if (!type) return HD_FAIL(err, HD_EFORMAT, "pre-tokenizer: a stage has no 'type'");
    if ((strcmp(type, "ByteLevel") == 0) != last) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "unsupported pre-tokenizer: %s as the %s stage; ByteLevel must be last, "
                       "and only last",
                       type, last ? "last" : "earlier");
    }
    if (p->n_stages + 1 > TEXT_MAX_STAGES) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "unsupported pre-tokenizer: more than %d stages",
                       (int)TEXT_MAX_STAGES);
    }
    if (last) return add_byte_level(p, object, err);
    if (strcmp(type, "Split") == 0) return add_split(p, object, err);
    if (strcmp(type, "Digits") == 0) return add_digits(p, object, err);
    return HD_FAIL(err, HD_EUNSUPPORTED, "unsupported pre-tokenizer: %s", type);
}

hd_status text_pretokenizer_open(text_pretokenizer *out, const json_t *object, hd_err *err) {
    *out = (text_pretokenizer){0};
    const char *type = json_string_value(json_object_get(object, "type"));
    if (!type) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "unsupported pre-tokenizer: there must be one, ending in ByteLevel");
    }
    if (strcmp(type, "Sequence") != 0) return add_stage(out, object, true, err);
    const json_t *list = json_object_get(object, "pretokenizers");
    size_t n = json_array_size(list);
    if (n == 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "unsupported pre-tokenizer: an empty Sequence");
    }
    for (size_t i = 0; i < n; i++) {
        HD_TRY(add_stage(out, json_array_get(list, i), i + 1 == n, err));
    }
    return HD_OK;
}

void text_pretokenizer_close(text_pretokenizer *p) {
    for (int32_t i = 0; i < TEXT_MAX_STAGES; i++) {
        text_scan_close(p->stages[i].pattern.scan);
        text_regex_close(p->stages[i].pattern.regex);
    }
    *p = (text_pretokenizer){0};
}
