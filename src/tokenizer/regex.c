/* regex.c - patterns that need a full regular expression engine: PCRE2. The Oniguruma syntax
 * is translated construct by construct. Every character class becomes explicit ranges, so
 * that it means what charset.c says. Matching is bounded: too much backtracking on a text is
 * an error of that text, not a hanging thread. */
#include "tokenizer/pattern_internal.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MATCH_LIMIT = 50 * 1000 * 1000,
    DEPTH_LIMIT = 100 * 1000,
    HEAP_LIMIT_KIB = 64 * 1024,
    JIT_STACK_BYTES = 8 << 20,
    MAX_GROUPS = 64, /* nested */
};

struct text_regex {
    pcre2_code *code;
    bool jit;
};

struct text_regex_scratch {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

typedef struct translation {
    char *text;
    size_t n, cap;
} translation;

static hd_status put(translation *t, const char *text, size_t n, hd_err *err) {
    if (n == 0) return HD_OK;
    if (n > t->cap - t->n) {
        size_t cap = (t->cap + n) * 2;
        char *wider = realloc(t->text, cap);
        if (!wider) return HD_FAIL(err, HD_ENOMEM, "no memory for a pattern");
        t->text = wider;
        t->cap = cap;
    }
    memcpy(t->text + t->n, text, n);
    t->n += n;
    return HD_OK;
}

static hd_status put_word(translation *t, const char *word, hd_err *err) {
    return put(t, word, strlen(word), err);
}

static hd_status put_code(translation *t, uint32_t cp, hd_err *err) {
    char code[16];
    snprintf(code, sizeof code, "\\x{%x}", cp);
    return put_word(t, code, err);
}

/* Writes the set as a bracket class of ranges. */
static hd_status put_set(translation *t, const text_charset *set, hd_err *err) {
    bool any = false;
    HD_TRY(put_word(t, "[", err));
    for (uint32_t c = 0; c < TEXT_UNICODE_END; c++) {
        if (c % 64 == 0 && set->bits[c / 64] == 0) {
            c += 63;
            continue;
        }
        if (!text_charset_has(set, c)) continue;
        uint32_t last = c;
        while (last + 1 < TEXT_UNICODE_END && text_charset_has(set, last + 1)) last++;
        HD_TRY(put_code(t, c, err));
        if (last > c) {
            HD_TRY(put_word(t, "-", err));
            HD_TRY(put_code(t, last, err));
        }
        c = last;
        any = true;
    }
    if (!any) HD_TRY(put_word(t, "^\\x{0}-\\x{10ffff}", err));
    return put_word(t, "]", err);
}

static bool take(text_reader *r, const char *word) {
    size_t n = strlen(word);
    if (r->n - r->at < n || memcmp(r->source + r->at, word, n) != 0) return false;
    r->at += n;
    return true;
}

/* Parses the opening of a group; a capture becomes a plain group. Lookarounds may not be
 * repeated. */
static hd_status put_group(translation *t, text_reader *r, hd_err *err) {
    static const char *const openings[] = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    for (size_t i = 0; i < HD_LEN(openings); i++) {
        if (take(r, openings[i])) return put_word(t, openings[i], err);
    }
    if (r->n - r->at > 1 && (r->source[r->at + 1] == '?' || r->source[r->at + 1] == '*')) {
        return text_pattern_refuse(r, "group", err);
    }
    r->at++;
    return put_word(t, "(?:", err);
}

/* Parses the repetition after an atom or a group, with its lazy or possessive suffix. */
static hd_status put_repeat(translation *t, text_reader *r, hd_err *err) {
    size_t start = r->at, min, max;
    HD_TRY(text_repeat_read(r, &min, &max, err));
    if (r->at == start) return HD_OK;
    bool interval = r->source[start] == '{';
    HD_TRY(put(t, r->source + start, r->at - start, err));
    if (!interval && (take(r, "?") || take(r, "+"))) {
        HD_TRY(put(t, r->source + r->at - 1, 1, err));
    }
    if (r->at < r->n && strchr("?*+{", r->source[r->at])) {
        return text_pattern_refuse(r, "repetition", err); /* the two engines differ here */
    }
    return HD_OK;
}

static hd_status put_atom(translation *t, text_reader *r, text_charset *set, hd_err *err) {
    uint32_t single;
    HD_TRY(text_atom_read(r, set, &single, err));
    HD_TRY(single != UINT32_MAX ? put_code(t, single, err) : put_set(t, set, err));
    return put_repeat(t, r, err);
}

static hd_status translate(translation *t, text_reader *r, text_charset *set, hd_err *err) {
    int32_t depth = 0;
    while (r->at < r->n) {
        char c = r->source[r->at];
        if (c == '(') {
            if (++depth > MAX_GROUPS) return text_pattern_refuse(r, "depth of groups", err);
            HD_TRY(put_group(t, r, err));
        } else if (c == ')') {
            if (--depth < 0) return text_pattern_refuse(r, "closing parenthesis", err);
            r->at++;
            HD_TRY(put_word(t, ")", err));
            HD_TRY(put_repeat(t, r, err));
        } else if (c == '|' || c == '^' || c == '$') {
            r->at++;
            HD_TRY(put(t, &c, 1, err));
        } else if (take(r, "\\A")) {
            HD_TRY(put_word(t, "\\A", err));
        } else if (take(r, "\\z")) {
            HD_TRY(put_word(t, "\\z", err));
        } else {
            HD_TRY(put_atom(t, r, set, err));
        }
    }
    return depth == 0 ? HD_OK : text_pattern_refuse(r, "open group", err);
}

static hd_status compile(text_regex *x, const translation *t, hd_err *err) {
    int code = 0;
    PCRE2_SIZE at = 0;
    x->code =
        pcre2_compile((PCRE2_SPTR)t->text, t->n, PCRE2_UTF | PCRE2_MULTILINE, &code, &at, NULL);
    if (!x->code) {
        char why[128] = "";
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        return HD_FAIL(err, HD_EUNSUPPORTED, "unsupported pre-tokenizer pattern: %s", why);
    }
    x->jit = pcre2_jit_compile(x->code, PCRE2_JIT_COMPLETE) == 0;
    return HD_OK;
}

hd_status text_regex_open(text_regex **out, const char *source, size_t n, hd_err *err) {
    translation t = {0};
    text_reader r = {.source = source, .n = n};
    *out = NULL;
    text_charset *set = calloc(1, sizeof *set);
    text_regex *x = calloc(1, sizeof *x);
    hd_status st = set && x ? translate(&t, &r, set, err)
                            : HD_FAIL(err, HD_ENOMEM, "no memory for a pattern");
    if (st == HD_OK) st = compile(x, &t, err);
    free(set);
    free(t.text);
    if (st == HD_OK) {
        *out = x;
    } else {
        text_regex_close(x);
    }
    return st;
}

void text_regex_close(text_regex *x) {
    if (!x) return;
    pcre2_code_free(x->code);
    free(x);
}

hd_status text_regex_scratch_open(text_regex_scratch **out, hd_err *err) {
    text_regex_scratch *x = calloc(1, sizeof *x);
    *out = NULL;
    if (!x) return HD_FAIL(err, HD_ENOMEM, "no memory to match patterns");
    x->data = pcre2_match_data_create(1, NULL);
    x->context = pcre2_match_context_create(NULL);
    x->stack = pcre2_jit_stack_create(32 * 1024, JIT_STACK_BYTES, NULL); /* NULL: no JIT */
    if (!x->data || !x->context) {
        text_regex_scratch_close(x);
        return HD_FAIL(err, HD_ENOMEM, "no memory to match patterns");
    }
    pcre2_set_match_limit(x->context, MATCH_LIMIT);
    pcre2_set_depth_limit(x->context, DEPTH_LIMIT);
    pcre2_set_heap_limit(x->context, HEAP_LIMIT_KIB);
    if (x->stack) pcre2_jit_stack_assign(x->context, NULL, x->stack);
    *out = x;
    return HD_OK;
}

void text_regex_scratch_close(text_regex_scratch *x) {
    if (!x) return;
    pcre2_match_data_free(x->data);
    pcre2_match_context_free(x->context);
    pcre2_jit_stack_free(x->stack);
    free(x);
}

/* An empty match directly after the last match does not count; the search advances by one
 * character. */
hd_status text_regex_next(const text_regex *x, text_search *s, size_t *first, size_t *end,
                          bool *found, hd_err *err) {
    *found = false;
    while (s->at <= s->n) {
        int rc = x->jit ? pcre2_jit_match(x->code, s->text, s->n, s->at, PCRE2_NO_UTF_CHECK,
                                          s->scratch->data, s->scratch->context)
                        : pcre2_match(x->code, s->text, s->n, s->at, PCRE2_NO_UTF_CHECK,
                                      s->scratch->data, s->scratch->context);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc < 0) {
            char why[128] = "";
            pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
            return HD_FAIL(err, HD_EUNSUPPORTED,
                           "a pattern of the pre-tokenizer cannot cut this text: %s", why);
        }
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(s->scratch->data);
        if (at[0] == at[1] && at[1] == s->last_end) {
            if (s->at >= s->n) break;
            text_utf8_next(s->text, &s->at);
            continue;
        }
        *first = at[0];
        *end = at[1];
        s->at = s->last_end = at[1];
        *found = true;
        return HD_OK;
    }
    s->at = s->n + 1;
    return HD_OK;
}
