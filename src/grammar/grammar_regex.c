/* grammar_regex.c - regular expressions with the syntax of Python's re and ASCII classes. A
 * pattern is parsed into a tree with an explicit stack, and the tree is drawn into a rule
 * from a list of tasks. Nesting thus uses counted memory, not the C stack. Constructs that
 * are not regular (backreferences, lookaround) or depend on position (\b, ^ in the middle)
 * are refused. */
#include "grammar/grammar_internal.h"

#include <stdlib.h>
#include <string.h>

#include "tokenizer/unicode.h"

typedef enum kind { EMPTY, CHARACTERS, SEQUENCE, CHOICE, REPEAT } kind;

typedef struct part {
    kind kind;
    uint32_t a, b; /* SEQUENCE, CHOICE: both sides; REPEAT: a; CHARACTERS: index of a class */
    uint32_t min, max; /* REPEAT */
    uint64_t cost;     /* approximate number of nodes that drawing it needs */
    gram_length length;
} part;

typedef struct group { /* an open parenthesis */
    uint32_t choice;   /* what precedes the last |; GRAM_NO_MAX: nothing */
    uint32_t sequence; /* what precedes the current place */
    bool fresh;        /* nothing has been read since the last | or ( */
} group;

typedef struct task {
    uint32_t part, from, to;
} task;

typedef struct reader {
    gram_builder *b;
    const uint8_t *text;
    size_t n, at;
    gram_pattern_options o;
    part *parts;
    gram_class *classes;
    task *tasks;
    uint32_t n_parts, n_classes, n_tasks, n_groups;
    size_t cap_parts, cap_classes, cap_tasks;
    bool any_start, any_end; /* of the current alternative: the text may extend beyond it */
    group groups[HD_GRAMMAR_MAX_SCHEMA_DEPTH + 1];
} reader;

#define NO_PART UINT32_MAX

static void refuse(reader *r, bool invalid, const char *what) {
    gram_fail(r->b, invalid ? HD_EINVAL : HD_EUNSUPPORTED,
              invalid ? "invalid_pattern" : "unsupported_pattern",
              "%s at byte %zu of the pattern", what, r->at);
}

static bool ok(const reader *r) {
    return r->b->status == HD_OK;
}

static int peek(const reader *r) {
    return r->at < r->n ? r->text[r->at] : -1;
}

static bool take(reader *r, const char *word) {
    size_t n = strlen(word);
    if (r->n - r->at < n || memcmp(r->text + r->at, word, n) != 0) return false;
    r->at += n;
    return true;
}

static uint32_t add_part(reader *r, part p) {
    if (!gram_grow(r->b, &r->parts, &r->cap_parts, (size_t)r->n_parts + 1, sizeof p)) return 0;
    if (p.cost > (uint64_t)1 << 40) p.cost = (uint64_t)1 << 40;
    r->parts[r->n_parts] = p;
    return r->n_parts++;
}

static uint32_t plus(uint32_t a, uint32_t b) {
    return a > GRAM_NO_MAX - b ? GRAM_NO_MAX : a + b;
}

static uint32_t times(uint32_t a, uint32_t b) {
    uint64_t product = (uint64_t)a * b;
    return product > GRAM_NO_MAX ? GRAM_NO_MAX : (uint32_t)product;
}

static uint32_t join(reader *r, kind how, uint32_t a, uint32_t b) {
    if (a == NO_PART || !ok(r)) return b;
    const part *x = &r->parts[a], *y = &r->parts[b];
    part p = {.kind = how, .a = a, .b = b, .cost = x->cost + y->cost};
    if (how == SEQUENCE) {
        p.length.min = plus(x->length.min, y->length.min);
        p.length.max = plus(x->length.max, y->length.max);
    } else {
        p.length.min = x->length.min < y->length.min ? x->length.min : y->length.min;
        p.length.max = x->length.max > y->length.max ? x->length.max : y->length.max;
    }
    return add_part(r, p);
}

/* A new class and its part. */
static gram_class *add_class(reader *r, uint32_t *index) {
    *index = 0;
    if (!gram_grow(r->b, &r->classes, &r->cap_classes, (size_t)r->n_classes + 1,
                   sizeof *r->classes)) {
        return NULL;
    }
    r->classes[r->n_classes] = (gram_class){0};
    *index = add_part(r, (part){
                             .kind = CHARACTERS, .a = r->n_classes, .length = {1, 1}
    });
    return &r->classes[r->n_classes++];
}

static void close_class(reader *r, gram_class *c, uint32_t index) {
    gram_class_sort(c);
    if (!ok(r)) return;
    r->parts[index].cost = c->n + (c->n > 0 && c->ranges[c->n - 1].hi >= 0x80 ? 4u : 1u);
    if (c->n == 0) refuse(r, true, "a class without characters");
}

static const gram_class_range digit[] = {
    {'0', '9'}
};
static const gram_class_range word[] = {
    {'0', '9'},
    {'A', 'Z'},
    {'_', '_'},
    {'a', 'z'}
};
static const gram_class_range space[] = {
    {'\t', '\r'},
    {' ',  ' ' }
};

static void add_known(reader *r, gram_class *c, const gram_class_range *known, uint32_t n,
                      bool negated) {
    gram_class own = {0};
    for (uint32_t i = 0; i < n; i++) gram_class_add(r->b, &own, known[i].lo, known[i].hi);
    if (negated) gram_class_invert(r->b, &own);
    gram_class_add_class(r->b, c, &own);
    r->b->bytes -= own.cap * sizeof *own.ranges;
    free(own.ranges);
}

/* \p{Lu}; stands behind the p. */
static void read_property(reader *r, gram_class *c, bool negated) {
    size_t from = r->at + 1, to = from;
    if (peek(r) == '{') {
        while (to < r->n && r->text[to] != '}') to++;
    }
    const char *name = (const char *)r->text + from;
    uint32_t set = peek(r) == '{' && to < r->n ? text_category_set(name, to - from) : 0;
    if (set == 0) {
        refuse(r, false, "a property other than a general category");
        return;
    }
    r->at = to + 1;
    if (negated) set = ~set;
    for (int32_t i = 0; i < text_unicode_n_ranges && ok(r); i++) {
        if (!(set >> (text_unicode_ranges[i] & 31) & 1)) continue;
        uint32_t end = i + 1 < text_unicode_n_ranges ? text_unicode_ranges[i + 1] >> 5
                                                     : (uint32_t)TEXT_UNICODE_END;
        gram_class_add(r->b, c, text_unicode_ranges[i] >> 5, end - 1);
    }
}

static uint32_t read_hex(reader *r, uint32_t digits) {
    uint32_t v = 0, i = 0;
    for (; i < digits && r->at < r->n; i++, r->at++) {
        int c = peek(r);
        if (c >= '0' && c <= '9') {
            v = v << 4 | (uint32_t)(c - '0');
        } else if ((c | 32) >= 'a' && (c | 32) <= 'f') {
            v = v << 4 | (uint32_t)((c | 32) - 'a' + 10);
        } else {
            break;
        }
    }
    if (i < digits || v >= TEXT_UNICODE_END || (v >= 0xd800 && v < 0xe000)) {
        refuse(r, true, "a bad character code");
        return 0;
    }
    return v;
}

/* What follows a backslash. Returns the character, or UINT32_MAX when it was a class. */
static uint32_t read_escape(reader *r, gram_class *c, bool in_class) {
    static const char names[] = "nrtfva", codes[] = "\n\r\t\f\v\a";
    if (r->at >= r->n) {
        refuse(r, true, "a backslash at the end");
        return 0;
    }
    uint8_t letter = r->text[r->at++];
    uint8_t lower = letter | 32;
    if (lower == 'd' || lower == 'w' || lower == 's') {
        const gram_class_range *known = lower == 'd' ? digit : lower == 'w' ? word : space;
        uint32_t n = lower == 'd' ? HD_LEN(digit) : lower == 'w' ? HD_LEN(word) : HD_LEN(space);
        add_known(r, c, known, n, letter != lower);
        return UINT32_MAX;
    }
    if (lower == 'p') {
        read_property(r, c, letter == 'P');
        return UINT32_MAX;
    }
    if (letter == 'x') return read_hex(r, 2);
    if (letter == 'u') return read_hex(r, 4);
    if (letter == 'U') return read_hex(r, 8);
    if (letter == 'b' && in_class) return '\b';
    const char *known = letter ? strchr(names, letter) : NULL;
    if (known) return (uint8_t)codes[known - names];
    if (letter == '0' && !(peek(r) >= '0' && peek(r) <= '9')) return 0;
    r->at -= 2;
    if (letter >= '0' && letter <= '9') {
        refuse(r, false, "a reference back or an octal code");
    } else if (letter < ' ' || letter >= 0x7f || (lower >= 'a' && lower <= 'z')) {
        refuse(r, false, strchr("bBAZzGK", letter) ? "a test of the position" : "an escape");
    }
    r->at += 2;
    return letter;
}

static uint32_t read_character(reader *r) {
    return text_utf8_next(r->text, &r->at);
}

static void read_member(reader *r, gram_class *c) {
    uint32_t lo = take(r, "\\") ? read_escape(r, c, true) : read_character(r), hi = lo;
    bool range = peek(r) == '-' && r->n - r->at > 1 && r->text[r->at + 1] != ']';
    if (range && ok(r)) {
        r->at++;
        hi = take(r, "\\") ? read_escape(r, c, true) : read_character(r);
        if (lo == UINT32_MAX || hi == UINT32_MAX || hi < lo) refuse(r, true, "a bad range");
    }
    if (lo != UINT32_MAX) gram_class_add(r->b, c, lo, hi);
}

static uint32_t read_bracket(reader *r) {
    uint32_t index;
    gram_class *c = add_class(r, &index);
    if (!c) return 0;
    bool negated = take(r, "^"), first = true;
    while (ok(r) && (first || peek(r) != ']')) {
        first = false;
        if (r->at >= r->n) {
            refuse(r, true, "a class without an end");
        } else {
            read_member(r, c);
        }
    }
    r->at += ok(r);
    if (ok(r) && negated) gram_class_invert(r->b, c);
    if (ok(r)) close_class(r, c, index);
    return index;
}

static uint32_t any_character(reader *r, bool line_feed) {
    uint32_t index;
    gram_class *c = add_class(r, &index);
    if (!c) return 0;
    gram_class_add(r->b, c, 0, line_feed ? TEXT_UNICODE_END - 1 : '\n' - 1);
    if (!line_feed) gram_class_add(r->b, c, '\n' + 1, TEXT_UNICODE_END - 1);
    close_class(r, c, index);
    return index;
}

static uint32_t read_atom(reader *r) {
    uint32_t index;
    if (take(r, "[")) return read_bracket(r);
    if (take(r, ".")) return any_character(r, false);
    gram_class *c = add_class(r, &index);
    if (!c) return 0;
    uint32_t single = take(r, "\\") ? read_escape(r, c, false) : read_character(r);
    if (single != UINT32_MAX) gram_class_add(r->b, c, single, single);
    close_class(r, c, index);
    return index;
}

static bool read_number(reader *r, uint32_t *out) {
    uint32_t v = 0;
    size_t from = r->at;
    for (; peek(r) >= '0' && peek(r) <= '9'; r->at++) {
        if (v <= HD_GRAMMAR_MAX_REPEAT) v = v * 10 + (uint32_t)(peek(r) - '0');
    }
    *out = v;
    return r->at > from;
}

/* {m}, {m,}, {,n}, {m,n}; anything else in braces is literal text and no repetition. */
static bool read_braces(reader *r, uint32_t *min, uint32_t *max) {
    size_t from = r->at++;
    bool lower = read_number(r, min), comma = take(r, ",");
    bool upper = comma && read_number(r, max);
    if (!take(r, "}") || (!lower && !comma)) {
        r->at = from;
        return false;
    }
    if (!lower) *min = 0;
    if (!comma) *max = *min;
    if (comma && !upper) *max = GRAM_NO_MAX;
    if (*min > HD_GRAMMAR_MAX_REPEAT || (*max != GRAM_NO_MAX && *max > HD_GRAMMAR_MAX_REPEAT)) {
        gram_fail(r->b, HD_EINVAL, "schema_too_complex",
                  "a repetition above %d at byte %zu of the pattern", HD_GRAMMAR_MAX_REPEAT,
                  from);
    } else if (*max < *min) {
        refuse(r, true, "a repetition whose maximum is below its minimum");
    }
    return true;
}

static bool read_repeat(reader *r, uint32_t *min, uint32_t *max) {
    *min = 0;
    *max = GRAM_NO_MAX;
    if (peek(r) == '{') return read_braces(r, min, max);
    if (take(r, "*")) return true;
    if (take(r, "?")) {
        *max = 1;
        return true;
    }
    *min = 1;
    return take(r, "+");
}

/* Beyond this the body becomes a counted rule. */
static bool unrolls(uint64_t cost, uint32_t min, uint32_t max) {
    uint64_t copies = max == GRAM_NO_MAX ? (uint64_t)min + 1 : max;
    return copies <= 1 || cost * copies <= GRAM_UNROLL;
}

static uint32_t repeat(reader *r, uint32_t atom) {
    uint32_t min, max;
    if (!ok(r) || !read_repeat(r, &min, &max)) return atom;
    if (!take(r, "?") && peek(r) == '+') refuse(r, false, "a possessive repetition");
    uint32_t again_min, again_max;
    size_t at = r->at;
    if (ok(r) && read_repeat(r, &again_min, &again_max)) {
        r->at = at;
        refuse(r, true, "a repetition of a repetition");
    }
    if (!ok(r)) return atom;
    const part *p = &r->parts[atom];
    uint64_t copies = max == GRAM_NO_MAX ? (uint64_t)min + 1 : max;
    part made = {.kind = REPEAT, .a = atom, .min = min, .max = max};
    made.cost = unrolls(p->cost, min, max) ? p->cost * copies + 2 : 2;
    made.length.min = times(p->length.min, min);
    made.length.max = p->length.max == 0 ? 0
                      : max == GRAM_NO_MAX || p->length.max == GRAM_NO_MAX
                          ? (max == 0 ? 0 : GRAM_NO_MAX)
                          : times(p->length.max, max);
    return add_part(r, made);
}

static uint32_t empty_part(reader *r) {
    return add_part(r, (part){.kind = EMPTY});
}

/* Ends an alternative. If the pattern is searched and not anchored, its match may begin or
 * end anywhere in the text. */
static void end_alternative(reader *r) {
    group *g = &r->groups[r->n_groups - 1];
    if (g->sequence == NO_PART) g->sequence = empty_part(r);
    for (int side = 0; side < 2 && r->n_groups == 1 && r->o.search && ok(r); side++) {
        if (side == 0 ? !r->any_start : !r->any_end) continue;
        uint32_t any = any_character(r, true);
        if (!ok(r)) return;
        uint32_t all = add_part(r, (part){
                                       .kind = REPEAT,
                                       .a = any,
                                       .max = GRAM_NO_MAX,
                                       .cost = r->parts[any].cost + 2,
                                       .length = {0, GRAM_NO_MAX}
        });
        uint32_t a = side == 0 ? all : g->sequence, c = side == 0 ? g->sequence : all;
        g->sequence = join(r, SEQUENCE, a, c);
    }
    g->choice = join(r, CHOICE, g->choice, g->sequence);
    g->sequence = NO_PART;
    g->fresh = true;
    if (r->n_groups == 1) r->any_start = r->any_end = true;
}

static void open_group(reader *r) {
    if (take(r, "?")) {
        if (take(r, "P<") || (peek(r) == '<' && r->n - r->at > 1 && r->text[r->at + 1] != '=' &&
                              r->text[r->at + 1] != '!' && take(r, "<"))) {
            while (r->at < r->n && peek(r) != '>') r->at++;
            if (!take(r, ">")) refuse(r, true, "a group name without an end");
        } else if (!take(r, ":")) {
            refuse(r, false, "looking around, a condition or a flag");
        }
    }
    if (!ok(r)) return;
    if (r->n_groups == HD_LEN(r->groups)) {
        gram_fail(r->b, HD_EINVAL, "schema_too_deep",
                  "a pattern with more than %d groups nested", HD_GRAMMAR_MAX_SCHEMA_DEPTH);
        return;
    }
    r->groups[r->n_groups++] = (group){.choice = NO_PART, .sequence = NO_PART, .fresh = true};
}

static void add_atom(reader *r, uint32_t atom) {
    atom = repeat(r, atom);
    if (!ok(r)) return;
    group *g = &r->groups[r->n_groups - 1];
    g->sequence = join(r, SEQUENCE, g->sequence, atom);
    g->fresh = false;
}

/* Reads ^ and $ where they mean the beginning or end of the text. */
static void read_anchor(reader *r) {
    const group *g = &r->groups[r->n_groups - 1];
    uint8_t c = r->text[r->at];
    bool at_edge = c == '^' ? g->fresh : r->at + 1 == r->n || r->text[r->at + 1] == '|';
    if (!at_edge || r->n_groups > 1) {
        refuse(r, false, c == '^' ? "^ other than at the start" : "$ other than at the end");
        return;
    }
    r->at++;
    if (c == '^') r->any_start = false;
    if (c == '$') r->any_end = false;
}

static uint32_t read_pattern(reader *r) {
    r->groups[0] = (group){.choice = NO_PART, .sequence = NO_PART, .fresh = true};
    r->n_groups = 1;
    r->any_start = r->any_end = true;
    while (ok(r) && r->at < r->n) {
        int c = peek(r);
        if (c == '(') {
            r->at++;
            open_group(r);
        } else if (c == ')') {
            if (r->n_groups == 1) {
                refuse(r, true, "a ) without its (");
                break;
            }
            r->at++;
            end_alternative(r);
            if (ok(r)) add_atom(r, r->groups[--r->n_groups].choice);
        } else if (c == '|') {
            r->at++;
            end_alternative(r);
        } else if (c == '^' || c == '$') {
            read_anchor(r);
        } else {
            uint32_t min, max;
            size_t at = r->at;
            if (read_repeat(r, &min, &max)) {
                r->at = at;
                refuse(r, true, "a repetition of nothing");
                break;
            }
            add_atom(r, read_atom(r));
        }
    }
    if (r->n_groups > 1) refuse(r, true, "a ( without its )");
    end_alternative(r);
    return r->groups[0].choice;
}

static void push(reader *r, uint32_t what, uint32_t from, uint32_t to) {
    if (!gram_grow(r->b, &r->tasks, &r->cap_tasks, (size_t)r->n_tasks + 1, sizeof(task)))
        return;
    r->tasks[r->n_tasks++] = (task){what, from, to};
}

static void draw_repeat(reader *r, const part *p, uint32_t from, uint32_t to) {
    gram_builder *b = r->b;
    if (!unrolls(r->parts[p->a].cost, p->min, p->max)) {
        int32_t rule = gram_rule_new(b);
        gram_call(b, from, to, rule, p->min, p->max);
        if (ok(r)) push(r, p->a, b->rules[rule].start, b->rules[rule].end);
        return;
    }
    for (uint32_t i = 0; i < p->min && ok(r); i++) {
        uint32_t next = gram_node(b);
        push(r, p->a, from, next);
        from = next;
    }
    if (p->max == GRAM_NO_MAX) {
        uint32_t loop = gram_node(b);
        gram_empty(b, from, loop);
        push(r, p->a, loop, loop);
        gram_empty(b, loop, to);
        return;
    }
    for (uint32_t i = p->min; i < p->max && ok(r); i++) {
        uint32_t next = gram_node(b);
        push(r, p->a, from, next);
        gram_empty(b, from, to);
        from = next;
    }
    gram_empty(b, from, to);
}

static void draw(reader *r, uint32_t root, uint32_t from, uint32_t to) {
    push(r, root, from, to);
    while (r->n_tasks > 0 && gram_work(r->b, 1)) {
        const task t = r->tasks[--r->n_tasks];
        const part p = r->parts[t.part];
        switch (p.kind) {
        case EMPTY:
            gram_empty(r->b, t.from, t.to);
            break;
        case CHARACTERS:
            gram_class_draw(r->b, t.from, t.to, &r->classes[p.a], r->o.json);
            break;
        case SEQUENCE: {
            uint32_t middle = gram_node(r->b);
            push(r, p.a, t.from, middle);
            push(r, p.b, middle, t.to);
            break;
        }
        case CHOICE:
            push(r, p.a, t.from, t.to);
            push(r, p.b, t.from, t.to);
            break;
        case REPEAT:
            draw_repeat(r, &p, t.from, t.to);
            break;
        }
    }
}

/* Releases the reader's memory from the budget. */
static void close_reader(reader *r) {
    size_t bytes = r->cap_parts * sizeof *r->parts + r->cap_classes * sizeof *r->classes +
                   r->cap_tasks * sizeof *r->tasks;
    for (uint32_t i = 0; i < r->n_classes; i++) {
        bytes += r->classes[i].cap * sizeof *r->classes[i].ranges;
        free(r->classes[i].ranges);
    }
    free(r->parts);
    free(r->classes);
    free(r->tasks);
    r->b->bytes -= bytes;
}

void gram_pattern(gram_builder *b, uint32_t from, uint32_t to, const char *text, size_t n,
                  gram_pattern_options o, gram_length *length) {
    if (n > HD_GRAMMAR_MAX_PATTERN_BYTES) {
        gram_fail(b, HD_EINVAL, "invalid_pattern", "a pattern of %zu bytes, more than %d", n,
                  HD_GRAMMAR_MAX_PATTERN_BYTES);
        return;
    }
    if (text_utf8_valid(text, n) != n) {
        gram_fail(b, HD_EINVAL, "invalid_pattern", "a pattern that is not valid UTF-8");
        return;
    }
    reader r = {.b = b, .text = (const uint8_t *)text, .n = n, .o = o};
    uint32_t root = read_pattern(&r);
    if (ok(&r)) {
        if (length) *length = r.parts[root].length;
        draw(&r, root, from, to);
    }
    close_reader(&r);
}
