/* grammar_internal.h - the grammar builder. A front end (schema, pattern, choice) draws rules:
 * small graphs whose edges are byte ranges, empty, or calls of a rule, perhaps repeated. Each
 * rule is determinized (grammar_dfa.c) and becomes a part of the automaton. The builder keeps
 * the first failure; later calls have no effect. */
#ifndef HD_GRAMMAR_GRAMMAR_INTERNAL_H
#define HD_GRAMMAR_GRAMMAR_INTERNAL_H

#include <jansson.h>

#include "grammar/grammar_automaton_internal.h"

enum {
    GRAM_BYTES = -1,                            /* in gram_edge.rule: consumes a byte */
    GRAM_EMPTY = -2,                            /* consumes nothing */
    GRAM_NONE = -1,                             /* no rule, no node */
    GRAM_WORK_BYTES = 4 * HD_GRAMMAR_MAX_BYTES, /* memory while building */
    GRAM_UNROLL = 2048, /* a repetition that costs more nodes is counted instead */
};

typedef struct gram_edge {
    uint32_t next, to; /* next: of the same node, UINT32_MAX at the end */
    int32_t rule;
    uint32_t min, max;
    uint8_t lo, hi;
} gram_edge;

typedef struct gram_rule {
    uint32_t start, end;
    uint32_t deny; /* root of a trie of words that the rule must not match, UINT32_MAX: none */
    uint32_t state;
    bool nullable;
    const char *tool; /* the tool whose arguments this rule is, for errors; or NULL */
} gram_rule;

typedef struct gram_deny {
    uint32_t child, sibling; /* UINT32_MAX: none */
    uint8_t byte;
    bool word;
} gram_deny;

/* Decimal numbers, written without an exponent, between two bounds. */
typedef struct gram_bound {
    bool given, exclusive, negative;
    char whole[24], part[32]; /* digits without leading, without trailing zeros */
} gram_bound;

/* The rule of numbers between the same bounds, drawn once. */
typedef struct gram_numbers {
    gram_bound lo, hi;
    bool integer;
    int32_t rule;
} gram_numbers;

/* Rules that all JSON texts share. */
typedef enum gram_json {
    GRAM_JSON_VALUE,
    GRAM_JSON_OTHER, /* any value but a string */
    GRAM_JSON_OBJECT,
    GRAM_JSON_ARRAY,
    GRAM_JSON_STRING,
    GRAM_JSON_NUMBER,
    GRAM_JSON_INTEGER,
    GRAM_JSON_CHARACTER,       /* of a string */
    GRAM_JSON_PLAIN,           /* not JSON: a raw text */
    GRAM_JSON_PLAIN_CHARACTER, /* one character of it */
    GRAM_JSON_SPACE,           /* one byte of white space */
    GRAM_JSON_KINDS
} gram_json;

typedef struct gram_builder {
    uint32_t *heads; /* [n_nodes] first edge */
    gram_edge *edges;
    gram_rule *rules;
    gram_deny *deny;
    uint32_t n_nodes, n_edges, n_rules, n_deny;
    size_t cap_nodes, cap_edges, cap_rules, cap_deny;
    size_t bytes;                    /* bytes held by growing arrays */
    int64_t steps;                   /* steps done */
    int32_t free_space;              /* 0: compact */
    uint32_t marks;                  /* as in hd_grammar_calls */
    bool spaced;                     /* DSML tags have a blank before their words */
    uint32_t avoid;                  /* a character that free text must not contain; 0: none */
    int32_t shared[GRAM_JSON_KINDS]; /* rules of gram_json_rule */
    gram_numbers *numbers;
    uint32_t n_numbers;
    size_t cap_numbers;
    bool loose;    /* schemas: keywords that cannot be expressed are ignored */
    json_t *tools; /* owns what gram_rule.tool points into */
    hd_status status;
    hd_err *err;
} gram_builder;

/* Records a failure; returns its status. code is NULL or begins the sentence. */
hd_status gram_fail(gram_builder *b, hd_status status, const char *code, const char *fmt, ...)
    HD_PRINTF(4, 5);

/* Counts steps; returns false if the budget is used up or something has failed. */
bool gram_work(gram_builder *b, int64_t steps);

/* Grows *data to need elements of width bytes. */
bool gram_grow(gram_builder *b, void *data, size_t *cap, size_t need, size_t width);

void gram_builder_deinit(gram_builder *b);

uint32_t gram_node(gram_builder *b);
void gram_range(gram_builder *b, uint32_t from, uint32_t to, uint8_t lo, uint8_t hi);
void gram_empty(gram_builder *b, uint32_t from, uint32_t to);
void gram_call(gram_builder *b, uint32_t from, uint32_t to, int32_t rule, uint32_t min,
               uint32_t max);
void gram_bytes_of(gram_builder *b, uint32_t from, uint32_t to, const char *text, size_t n);
int32_t gram_rule_new(gram_builder *b);
void gram_deny_word(gram_builder *b, int32_t rule, const char *text, size_t n);

/* Compiles the rules to *out; a text matches rule root. */
hd_status gram_compile(gram_builder *b, hd_grammar *out, int32_t root);

/* Sets longest and costly of an otherwise complete automaton. */
void gram_find_longest(gram_builder *b, hd_grammar *g);

/* Sets of code points: sorted ranges. */

typedef struct gram_class_range {
    uint32_t lo, hi;
} gram_class_range;

typedef struct gram_class {
    gram_class_range *ranges;
    uint32_t n;
    size_t cap;
} gram_class;

void gram_class_add(gram_builder *b, gram_class *c, uint32_t lo, uint32_t hi);
void gram_class_add_class(gram_builder *b, gram_class *c, const gram_class *other);
void gram_class_sort(gram_class *c); /* must be called before the following functions */
void gram_class_invert(gram_builder *b, gram_class *c);

/* Draws one character of the class, without the one that the builder avoids. json: as
 * written inside a JSON string, with the shortest escape where one is needed. */
void gram_class_draw(gram_builder *b, uint32_t from, uint32_t to, const gram_class *c,
                     bool json);

/* Patterns. */

typedef struct gram_pattern_options {
    bool json;   /* the text is inside of a JSON string */
    bool search; /* matches anywhere, as in a schema; otherwise the whole text */
} gram_pattern_options;

/* The number of characters that a pattern matches; max GRAM_NO_MAX: any. */
typedef struct gram_length {
    uint32_t min, max;
} gram_length;

void gram_pattern(gram_builder *b, uint32_t from, uint32_t to, const char *text, size_t n,
                  gram_pattern_options o, gram_length *length);

/* JSON. */

int32_t gram_json_rule(gram_builder *b, gram_json kind);
void gram_json_call(gram_builder *b, uint32_t from, uint32_t to, gram_json kind);

/* White space that is allowed only if it is free; white space after a colon or comma. */
void gram_space(gram_builder *b, uint32_t from, uint32_t to);
void gram_space_after(gram_builder *b, uint32_t from, uint32_t to);

/* Draws the bytes of a JSON text, with white space where allowed. */
void gram_json_text(gram_builder *b, uint32_t from, uint32_t to, const char *text, size_t n);

bool gram_bound_read(gram_bound *out, const char *text); /* false: not a plain decimal */
void gram_number_between(gram_builder *b, uint32_t from, uint32_t to, const gram_bound *lo,
                         const gram_bound *hi, bool integer);

/* How the values of a schema are written, which determines the allowed types. */
typedef enum gram_spelling {
    GRAM_AS_JSON,
    GRAM_AS_OBJECT,     /* objects only, as JSON */
    GRAM_AS_PARAMETERS, /* objects only, as the parameters of a call in DSML */
    GRAM_AS_PLAIN,      /* strings only, raw */
    GRAM_AS_OTHER       /* all but strings, as JSON */
} gram_spelling;

hd_status gram_schema(gram_builder *b, int32_t rule, const char *text, size_t n);
void gram_schema_of(gram_builder *b, int32_t rule, json_t *schema, gram_spelling spelling);

/* Calls of tools. */

enum {
    GRAM_MARK_CALLS_BEGIN,
    GRAM_MARK_CALLS_END,
    GRAM_MARK_CALL_BEGIN,
    GRAM_MARK_CALL_END,
    GRAM_MARK_SEPARATOR,
    GRAM_MARK_DSML,
    GRAM_N_MARKS
};
extern const char *const gram_mark_text[GRAM_N_MARKS];

/* Draws the calls into rule root and sets the openings of g. */
void gram_calls(gram_builder *b, hd_grammar *g, int32_t root, const hd_grammar_calls *calls);

/* Draws a text between two nodes, in which byte HD_GRAMMAR_MARK + i stands for the i-th
 * marker. Returns the node behind it. */
uint32_t gram_marked(gram_builder *b, uint32_t from, const char *text, size_t n);

/* Draws the parameters of a DSML call without a schema: any, in any order. */
void gram_any_parameters(gram_builder *b, uint32_t from, uint32_t to);

#endif
