/* grammar_json.c - rules for JSON values, and literal JSON text. */
#include "grammar/grammar_internal.h"

#include <string.h>

#include "tokenizer/unicode.h"

void gram_space(gram_builder *b, uint32_t from, uint32_t to) {
    if (b->free_space == 0) {
        gram_empty(b, from, to);
        return;
    }
    gram_call(b, from, to, gram_json_rule(b, GRAM_JSON_SPACE), 0, (uint32_t)b->free_space);
}

void gram_space_after(gram_builder *b, uint32_t from, uint32_t to) {
    gram_space(b, from, to);
    if (b->free_space == 0) gram_range(b, from, to, ' ', ' ');
}

static void draw_hex(gram_builder *b, uint32_t from, uint32_t to, const char *digits) {
    for (; *digits; digits++) {
        uint8_t c = (uint8_t)*digits;
        gram_range(b, from, to, c, c);
        if (c >= 'a') gram_range(b, from, to, c - 32, c - 32);
    }
}

static void draw_any_hex(gram_builder *b, uint32_t from, uint32_t to, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t next = i + 1 < n ? gram_node(b) : to;
        draw_hex(b, from, next, "0123456789abcdef");
        from = next;
    }
}

/* \uXXXX; a surrogate only as half of a pair. */
static void draw_unicode_escape(gram_builder *b, uint32_t from, uint32_t to) {
    uint32_t d = gram_node(b), pair = gram_node(b), second = gram_node(b), low = gram_node(b),
             plain = gram_node(b), below = gram_node(b);
    draw_hex(b, from, plain, "0123456789abcef");
    draw_any_hex(b, plain, to, 3);
    draw_hex(b, from, d, "d");
    draw_hex(b, d, below, "01234567");
    draw_any_hex(b, below, to, 2);
    draw_hex(b, d, pair, "89ab");
    draw_any_hex(b, pair, second, 2);
    gram_bytes_of(b, second, low, "\\u", 2);
    uint32_t low_d = gram_node(b), last = gram_node(b);
    draw_hex(b, low, low_d, "d");
    draw_hex(b, low_d, last, "cdef");
    draw_any_hex(b, last, to, 2);
}

/* One character of a string, in any of its spellings. */
static void draw_character(gram_builder *b, uint32_t from, uint32_t to) {
    gram_class_range raw[] = {
        {0x20, 0x21                },
        {0x23, 0x5b                },
        {0x5d, TEXT_UNICODE_END - 1}
    };
    gram_class all = {.ranges = raw, .n = HD_LEN(raw)};
    gram_class_draw(b, from, to, &all, false);
    uint32_t slash = gram_node(b), u = gram_node(b);
    gram_range(b, from, slash, '\\', '\\');
    for (const char *c = "\"\\/bfnrt"; *c; c++)
        gram_range(b, slash, to, (uint8_t)*c, (uint8_t)*c);
    gram_range(b, slash, u, 'u', 'u');
    draw_unicode_escape(b, u, to);
}

static void draw_string(gram_builder *b, uint32_t from, uint32_t to) {
    uint32_t inside = gram_node(b);
    gram_range(b, from, inside, '"', '"');
    draw_character(b, inside, inside);
    gram_range(b, inside, to, '"', '"');
}

/* Up to n digits. */
static void draw_digits(gram_builder *b, uint32_t from, uint32_t to, int n) {
    for (; n > 0; n--) {
        uint32_t next = gram_node(b);
        gram_empty(b, from, to);
        gram_range(b, from, next, '0', '9');
        from = next;
    }
    gram_empty(b, from, to);
}

static void draw_integer(gram_builder *b, uint32_t from, uint32_t to) {
    uint32_t minus = gram_node(b), digits = gram_node(b);
    gram_empty(b, from, minus);
    gram_range(b, from, minus, '-', '-');
    gram_range(b, minus, to, '0', '0');
    gram_range(b, minus, digits, '1', '9');
    draw_digits(b, digits, to, HD_GRAMMAR_MAX_DIGITS - 1);
}

static void draw_number(gram_builder *b, uint32_t from, uint32_t to) {
    uint32_t whole = gram_node(b), point = gram_node(b), part = gram_node(b), e = gram_node(b),
             sign = gram_node(b), power = gram_node(b);
    draw_integer(b, from, whole);
    gram_empty(b, whole, to);
    gram_range(b, whole, point, '.', '.');
    gram_range(b, point, part, '0', '9');
    uint32_t parted = gram_node(b);
    draw_digits(b, part, parted, HD_GRAMMAR_MAX_DIGITS - 1);
    gram_empty(b, parted, to);
    gram_empty(b, whole, e);
    gram_empty(b, parted, e);
    uint32_t after_e = gram_node(b);
    gram_range(b, e, after_e, 'e', 'e');
    gram_range(b, e, after_e, 'E', 'E');
    gram_empty(b, after_e, sign);
    gram_range(b, after_e, sign, '+', '+');
    gram_range(b, after_e, sign, '-', '-');
    /* at most two digits, so that a double can represent it */
    gram_range(b, sign, power, '0', '9');
    draw_digits(b, power, to, 1);
}

/* [value, ...] or {"key": value, ...} with any content. */
static void draw_container(gram_builder *b, uint32_t from, uint32_t to, bool object) {
    uint32_t open = gram_node(b), inside = gram_node(b), item = gram_node(b),
             value = gram_node(b), after = gram_node(b), close = gram_node(b),
             comma = gram_node(b);
    gram_range(b, from, open, object ? '{' : '[', object ? '{' : '[');
    gram_space(b, open, inside);
    gram_empty(b, inside, close);
    gram_empty(b, inside, item);
    if (object) {
        uint32_t key = gram_node(b), spaced = gram_node(b), colon = gram_node(b);
        gram_json_call(b, item, key, GRAM_JSON_STRING);
        gram_space(b, key, spaced);
        gram_range(b, spaced, colon, ':', ':');
        gram_space_after(b, colon, value);
    } else {
        gram_empty(b, item, value);
    }
    uint32_t done = gram_node(b);
    gram_json_call(b, value, done, GRAM_JSON_VALUE);
    gram_space(b, done, after);
    gram_range(b, after, comma, ',', ',');
    gram_space_after(b, comma, item);
    gram_empty(b, after, close);
    gram_range(b, close, to, object ? '}' : ']', object ? '}' : ']');
}

static void draw_plain(gram_builder *b, uint32_t from, uint32_t to, bool endless) {
    gram_class_range any[] = {
        {0, TEXT_UNICODE_END - 1}
    };
    gram_class all = {.ranges = any, .n = HD_LEN(any)};
    gram_class_draw(b, from, endless ? from : to, &all, false);
    if (endless) gram_empty(b, from, to);
}

static void draw_other(gram_builder *b, uint32_t from, uint32_t to) {
    gram_json_call(b, from, to, GRAM_JSON_NUMBER);
    draw_container(b, from, to, true);
    draw_container(b, from, to, false);
    gram_bytes_of(b, from, to, "true", 4);
    gram_bytes_of(b, from, to, "false", 5);
    gram_bytes_of(b, from, to, "null", 4);
}

static void draw(gram_builder *b, gram_json kind, uint32_t from, uint32_t to) {
    static const char space[] = " \t\n\r";
    switch (kind) {
    case GRAM_JSON_VALUE:
        gram_json_call(b, from, to, GRAM_JSON_STRING);
        draw_other(b, from, to);
        break;
    case GRAM_JSON_OTHER:
        draw_other(b, from, to);
        break;
    case GRAM_JSON_OBJECT:
    case GRAM_JSON_ARRAY:
        draw_container(b, from, to, kind == GRAM_JSON_OBJECT);
        break;
    case GRAM_JSON_STRING:
        draw_string(b, from, to);
        break;
    case GRAM_JSON_NUMBER:
        draw_number(b, from, to);
        break;
    case GRAM_JSON_INTEGER:
        draw_integer(b, from, to);
        break;
    case GRAM_JSON_CHARACTER:
        draw_character(b, from, to);
        break;
    case GRAM_JSON_PLAIN:
    case GRAM_JSON_PLAIN_CHARACTER:
        draw_plain(b, from, to, kind == GRAM_JSON_PLAIN);
        break;
    case GRAM_JSON_KINDS:
        break;
    case GRAM_JSON_SPACE:
        for (const char *c = space; *c; c++) gram_range(b, from, to, (uint8_t)*c, (uint8_t)*c);
        break;
    }
}

/* Rules call each other, so the index is stored before the rule is drawn. */
int32_t gram_json_rule(gram_builder *b, gram_json kind) {
    if (b->shared[kind] == 0) {
        int32_t rule = gram_rule_new(b);
        b->shared[kind] = rule + 1;
        if (b->status == HD_OK) draw(b, kind, b->rules[rule].start, b->rules[rule].end);
    }
    return b->shared[kind] - 1;
}

void gram_json_call(gram_builder *b, uint32_t from, uint32_t to, gram_json kind) {
    gram_call(b, from, to, gram_json_rule(b, kind), 1, 1);
}

void gram_json_text(gram_builder *b, uint32_t from, uint32_t to, const char *text, size_t n) {
    bool inside = false;
    for (size_t i = 0; i < n && b->status == HD_OK; i++) {
        uint8_t c = (uint8_t)text[i];
        uint32_t next = gram_node(b);
        bool open = !inside && (c == '{' || c == '['),
             close = !inside && (c == '}' || c == ']');
        bool between = !inside && (c == ':' || c == ',');
        if (between || (close && text[i - 1] != '{' && text[i - 1] != '[')) {
            uint32_t spaced = gram_node(b);
            gram_space(b, from, spaced);
            from = spaced;
        }
        gram_range(b, from, next, c, c);
        if (between || open) {
            uint32_t spaced = gram_node(b);
            if (between) gram_space_after(b, next, spaced);
            if (open) gram_space(b, next, spaced);
            next = spaced;
        }
        if (inside && c == '\\' && i + 1 < n) { /* the escaped character, and \u's digits */
            uint32_t after = gram_node(b);
            gram_range(b, next, after, (uint8_t)text[i + 1], (uint8_t)text[i + 1]);
            next = after;
            i++;
            for (uint32_t k = 0; text[i] == 'u' && k < 4 && i + 1 + k < n; k++) {
                char digit[2] = {text[i + 1 + k], 0};
                if (digit[0] >= 'A' && digit[0] <= 'F') digit[0] = (char)(digit[0] + 32);
                after = gram_node(b);
                draw_hex(b, next, after, digit);
                next = after;
            }
            if (text[i] == 'u') i += 4;
        } else if (c == '"') {
            inside = !inside;
        }
        from = next;
    }
    gram_empty(b, from, to);
}
