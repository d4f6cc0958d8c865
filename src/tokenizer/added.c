/* added.c - see added_internal.h: a byte trie, walked from every position where a token may
 * start. The cost is at most text length times the longest added token, and usually the text
 * length, because few bytes start a token. */
#include "tokenizer/added_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer/unicode.h"

#define NO_NODE UINT32_MAX

static uint32_t find_edge(const text_added *a, uint32_t node, uint8_t byte) {
    uint64_t key = (uint64_t)node << 8 | byte;
    uint32_t i = (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32) & a->mask;
    while (a->edges[i].node != NO_NODE &&
           !(a->edges[i].node == node && a->edges[i].byte == byte)) {
        i = (i + 1) & a->mask;
    }
    return i;
}

hd_status text_added_open(text_added *a, int32_t n_tokens, size_t n_bytes, hd_err *err) {
    *a = (text_added){0};
    size_t n_edges = 16;
    while (n_edges < 2 * n_bytes) n_edges *= 2;
    a->mask = (uint32_t)(n_edges - 1);
    a->tokens = calloc((size_t)n_tokens + 1, sizeof *a->tokens);
    a->edges = malloc(n_edges * sizeof *a->edges);
    a->token_at = malloc((n_bytes + 1) * sizeof *a->token_at);
    if (!a->tokens || !a->edges || !a->token_at) {
        text_added_close(a);
        return HD_FAIL(err, HD_ENOMEM, "no memory for %d added tokens", (int)n_tokens);
    }
    for (size_t i = 0; i < n_edges; i++) a->edges[i].node = NO_NODE;
    a->token_at[0] = -1;
    a->n_nodes = 1;
    return HD_OK;
}

void text_added_close(text_added *a) {
    free(a->tokens);
    free(a->edges);
    free(a->token_at);
    *a = (text_added){0};
}

void text_added_add(text_added *a, const char *content, size_t n, text_added_token token) {
    assert(n > 0);
    uint32_t node = 0;
    for (size_t i = 0; i < n; i++) {
        text_edge *e = &a->edges[find_edge(a, node, (uint8_t)content[i])];
        if (e->node == NO_NODE) {
            *e = (text_edge){node, (uint8_t)content[i], a->n_nodes};
            a->token_at[a->n_nodes++] = -1;
        }
        node = e->to;
    }
    a->starts[(uint8_t)content[0]] = true;
    a->token_at[node] = a->n_tokens;
    a->tokens[a->n_tokens++] = token;
}

/* Returns the longest token at text[at], or -1. */
static int32_t longest_at(const text_added *a, const uint8_t *text, size_t n, size_t at,
                          size_t *end) {
    int32_t best = -1;
    uint32_t node = 0;
    for (; at < n; at++) {
        const text_edge *e = &a->edges[find_edge(a, node, text[at])];
        if (e->node == NO_NODE) break;
        node = e->to;
        if (a->token_at[node] >= 0) {
            best = a->token_at[node];
            *end = at + 1;
        }
    }
    return best;
}

static bool word_before(const uint8_t *text, size_t at) {
    if (at == 0) return false;
    size_t back = text_utf8_back(text, at);
    return text_is_word(text_utf8_next(text, &back));
}

static bool word_after(const uint8_t *text, size_t n, size_t at) {
    return at < n && text_is_word(text_utf8_next(text, &at));
}

static size_t space_before(const uint8_t *text, size_t at) {
    while (at > 0) {
        size_t back = text_utf8_back(text, at), next = back;
        if (!text_is_space(text_utf8_next(text, &next))) break;
        at = back;
    }
    return at;
}

static size_t space_after(const uint8_t *text, size_t n, size_t at) {
    while (at < n) {
        size_t next = at;
        if (!text_is_space(text_utf8_next(text, &next))) break;
        at = next;
    }
    return at;
}

void text_added_start(text_added_walk *w, const text_added *a, const text_controls *controls,
                      const uint8_t *text, size_t n) {
    *w = (text_added_walk){.added = a, .controls = controls, .text = text, .n = n};
}

/* Returns where the longest token that begins at text[at] can end; `at` if none begins
 * there. */
static size_t match_limit(const text_added_walk *w, size_t at) {
    const text_controls *c = w->controls;
    if (!c) return w->n;
    const size_t place = (size_t)(w->text + at - c->text);
    size_t low = 0, high = c->n; /* the last span that starts at or before `place` */
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (c->spans[middle].start <= place) {
            low = middle;
        } else {
            high = middle;
        }
    }
    if (c->n == 0 || !c->spans[low].is_control) return at;
    const size_t left = c->spans[low].start + c->spans[low].n - place;
    return left < w->n - at ? at + left : w->n;
}

/* Finds the next token that the rules accept; a refused match is skipped completely. */
static const text_added_token *find_token(text_added_walk *w, size_t *first, size_t *end) {
    const text_added *a = w->added;
    for (size_t at = w->searched; at < w->n; at++) {
        if (!a->starts[w->text[at]]) continue;
        int32_t index = longest_at(a, w->text, match_limit(w, at), at, end);
        if (index < 0) continue;
        const text_added_token *t = &a->tokens[index];
        if (t->single_word && (word_before(w->text, at) || word_after(w->text, w->n, *end))) {
            at = *end - 1;
            continue;
        }
        *first = at;
        w->searched = *end;
        return t;
    }
    w->searched = w->n;
    return NULL;
}

bool text_added_next(text_added_walk *w, int32_t *id, const uint8_t **part, size_t *n) {
    *id = -1;
    if (w->holds) {
        w->holds = false;
        w->done = w->held_end;
        *id = w->held_id;
        return true;
    }
    size_t first = w->n, end = first;
    const text_added_token *t = w->added->n_tokens ? find_token(w, &first, &end) : NULL;
    if (t && t->lstrip) {
        size_t start = space_before(w->text, first);
        first = start > w->done ? start : w->done;
    }
    if (t && t->rstrip) end = space_after(w->text, w->n, end);
    *part = w->text + w->done;
    *n = first > w->done ? first - w->done : 0;
    if (*n > 0) {
        w->holds = t != NULL;
        w->held_end = end;
        w->held_id = t ? t->id : -1;
        w->done = first;
        return true;
    }
    if (!t) return false;
    w->done = end;
    *id = t->id;
    return true;
}
