/* grammar_build.c - the builder that front ends draw grammars with: nodes, edges, rules,
 * denied words. */
#include "grammar/grammar_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

hd_status gram_fail(gram_builder *b, hd_status status, const char *code, const char *fmt, ...) {
    if (b->status != HD_OK) return b->status;
    char text[sizeof b->err->msg];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    b->status = HD_REFUSE(b->err, status, code, NULL, "%s%s%s", code ? code : "",
                          code ? ": " : "", text);
    return status;
}

bool gram_work(gram_builder *b, int64_t steps) {
    b->steps += steps;
    if (b->steps > HD_GRAMMAR_MAX_STEPS) {
        gram_fail(b, HD_EINVAL, "schema_too_complex", "more than %d steps of compilation",
                  HD_GRAMMAR_MAX_STEPS);
    }
    return b->status == HD_OK;
}

bool gram_grow(gram_builder *b, void *data, size_t *cap, size_t need, size_t width) {
    if (b->status != HD_OK) return false;
    if (need <= *cap) return true;
    size_t wider = *cap < 32 ? 32 : *cap, bytes;
    while (wider < need) wider += wider / 2;
    if (!hd_mul_size(wider, width, &bytes) ||
        b->bytes - *cap * width + bytes > GRAM_WORK_BYTES) {
        gram_fail(b, HD_EINVAL, "schema_too_complex", "more than %d bytes of compilation",
                  GRAM_WORK_BYTES);
        return false;
    }
    void *old;
    memcpy(&old, data, sizeof old);
    void *new = realloc(old, bytes);
    if (!new) {
        gram_fail(b, HD_ENOMEM, NULL, "no memory for %zu bytes of a grammar", bytes);
        return false;
    }
    memcpy(data, &new, sizeof new);
    b->bytes += bytes - *cap * width;
    *cap = wider;
    return true;
}

void gram_builder_deinit(gram_builder *b) {
    free(b->heads);
    free(b->edges);
    free(b->rules);
    free(b->deny);
    free(b->numbers);
    json_decref(b->tools);
}

/* After a failure returns node 0 for everything; it is not used. */
uint32_t gram_node(gram_builder *b) {
    if (!gram_grow(b, &b->heads, &b->cap_nodes, (size_t)b->n_nodes + 1, sizeof *b->heads)) {
        return 0;
    }
    b->heads[b->n_nodes] = UINT32_MAX;
    return b->n_nodes++;
}

static void add_edge(gram_builder *b, uint32_t from, gram_edge edge) {
    if (!gram_work(b, 1)) return;
    if (!gram_grow(b, &b->edges, &b->cap_edges, (size_t)b->n_edges + 1, sizeof edge)) return;
    edge.next = b->heads[from];
    b->edges[b->n_edges] = edge;
    b->heads[from] = b->n_edges++;
}

void gram_range(gram_builder *b, uint32_t from, uint32_t to, uint8_t lo, uint8_t hi) {
    add_edge(b, from, (gram_edge){.to = to, .rule = GRAM_BYTES, .lo = lo, .hi = hi});
}

void gram_empty(gram_builder *b, uint32_t from, uint32_t to) {
    add_edge(b, from, (gram_edge){.to = to, .rule = GRAM_EMPTY});
}

void gram_call(gram_builder *b, uint32_t from, uint32_t to, int32_t rule, uint32_t min,
               uint32_t max) {
    if (min == 0) gram_empty(b, from, to);
    if (max == 0) return;
    add_edge(b, from, (gram_edge){.to = to, .rule = rule, .min = min ? min : 1, .max = max});
}

void gram_bytes_of(gram_builder *b, uint32_t from, uint32_t to, const char *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t next = i + 1 < n ? gram_node(b) : to;
        gram_range(b, from, next, (uint8_t)text[i], (uint8_t)text[i]);
        from = next;
    }
    if (n == 0) gram_empty(b, from, to);
}

int32_t gram_rule_new(gram_builder *b) {
    if (!gram_grow(b, &b->rules, &b->cap_rules, (size_t)b->n_rules + 1, sizeof *b->rules)) {
        return 0;
    }
    uint32_t rule = b->n_rules++;
    b->rules[rule] = (gram_rule){.deny = UINT32_MAX};
    b->rules[rule].start = gram_node(b);
    b->rules[rule].end = gram_node(b);
    return (int32_t)rule;
}

static uint32_t deny_node(gram_builder *b, uint8_t byte) {
    if (!gram_grow(b, &b->deny, &b->cap_deny, (size_t)b->n_deny + 1, sizeof *b->deny)) return 0;
    b->deny[b->n_deny] = (gram_deny){.child = UINT32_MAX, .sibling = UINT32_MAX, .byte = byte};
    return b->n_deny++;
}

void gram_deny_word(gram_builder *b, int32_t rule, const char *text, size_t n) {
    if (b->status != HD_OK) return;
    if (b->rules[rule].deny == UINT32_MAX) b->rules[rule].deny = deny_node(b, 0);
    uint32_t at = b->rules[rule].deny;
    for (size_t i = 0; i < n && b->status == HD_OK; i++) {
        uint32_t child = b->deny[at].child;
        int64_t looked = 1;
        while (child != UINT32_MAX && b->deny[child].byte != (uint8_t)text[i]) {
            child = b->deny[child].sibling;
            looked++;
        }
        if (child == UINT32_MAX) {
            child = deny_node(b, (uint8_t)text[i]);
            if (b->status != HD_OK) return;
            b->deny[child].sibling = b->deny[at].child;
            b->deny[at].child = child;
        }
        if (!gram_work(b, looked)) return;
        at = child;
    }
    if (b->status == HD_OK) b->deny[at].word = true;
}
