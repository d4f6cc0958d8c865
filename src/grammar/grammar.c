/* grammar.c - compiles a grammar: from its description to the automaton. */
#include "grammar/grammar_internal.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer/unicode.h"

static void draw_choices(gram_builder *b, int32_t root, const hd_grammar_args *a) {
    if (a->n_choices < 1 || a->n_choices > HD_GRAMMAR_MAX_CHOICES) {
        gram_fail(b, HD_EINVAL, "invalid_schema: %d choices, not between 1 and %d",
                  a->n_choices, HD_GRAMMAR_MAX_CHOICES);
    }
    size_t bytes = 0;
    for (int32_t i = 0; i < a->n_choices && b->status == HD_OK; i++) {
        const char *text = a->choices[i];
        size_t n = a->choice_bytes[i];
        bytes += n;
        if (n > HD_GRAMMAR_MAX_SCHEMA_BYTES || bytes > HD_GRAMMAR_MAX_SCHEMA_BYTES) {
            gram_fail(b, HD_EINVAL, "schema_too_complex: choices of more than %d bytes",
                      HD_GRAMMAR_MAX_SCHEMA_BYTES);
        } else if (text_utf8_valid(text, n) != n) {
            gram_fail(b, HD_EINVAL, "invalid_schema: choice %d is not valid UTF-8", i);
        } else {
            gram_bytes_of(b, b->rules[root].start, b->rules[root].end, text, n);
        }
    }
}

static void draw(gram_builder *b, int32_t root, const hd_grammar_args *a) {
    const gram_rule rule = b->rules[root];
    switch (a->kind) {
    case HD_GRAMMAR_JSON_OBJECT:
        gram_json_call(b, rule.start, rule.end, GRAM_JSON_OBJECT);
        break;
    case HD_GRAMMAR_JSON_SCHEMA:
        gram_schema(b, root, a->text, a->n);
        break;
    case HD_GRAMMAR_REGEX:
        gram_pattern(b, rule.start, rule.end, a->text, a->n, (gram_pattern_options){0}, NULL);
        break;
    case HD_GRAMMAR_CHOICE:
        draw_choices(b, root, a);
        break;
    case HD_GRAMMAR_CALLS:
        break;
    }
}

/* Draws a text of the grammar's kind, tool calls, or either. */
static void draw_all(gram_builder *b, hd_grammar *g, int32_t root, const hd_grammar_args *a) {
    if (a->calls.tools) gram_calls(b, g, root, &a->calls);
    if (a->kind == HD_GRAMMAR_CALLS || !a->calls.tools) {
        draw(b, root, a);
        return;
    }
    const int32_t text = gram_rule_new(b);
    draw(b, text, a);
    if (b->status == HD_OK) gram_call(b, b->rules[root].start, b->rules[root].end, text, 1, 1);
}

hd_status hd_grammar_open(hd_grammar **out, const hd_grammar_args *args, hd_err *err) {
    static _Atomic uint64_t last_id;
    hd_err own = {0};
    *out = NULL;
    if (args->free_space < 0 || args->free_space > HD_GRAMMAR_MAX_SPACE) {
        return HD_FAIL(err, HD_EINVAL, "free space of %d bytes, not between 0 and %d",
                       args->free_space, HD_GRAMMAR_MAX_SPACE);
    }
    hd_grammar *g = calloc(1, sizeof *g);
    if (!g) return HD_FAIL(err, HD_ENOMEM, "no memory for a grammar");
    gram_builder b = {.err = err ? err : &own, .free_space = args->free_space};
    int32_t root = gram_rule_new(&b);
    if (b.status == HD_OK) draw_all(&b, g, root, args);
    if (b.status == HD_OK) gram_compile(&b, g, root);
    gram_builder_deinit(&b);
    g->id = atomic_fetch_add(&last_id, 1) + 1;
    if (b.status != HD_OK) {
        hd_grammar_close(g);
        return b.status;
    }
    *out = g;
    return HD_OK;
}

void hd_grammar_close(hd_grammar *g) {
    if (!g) return;
    free(g->states);
    free(g->arcs);
    free(g->sites);
    free(g->first);
    free(g->longest);
    free(g);
}

size_t hd_grammar_bytes(const hd_grammar *g) {
    return g->bytes;
}
