/* reply_json.c - a JSON validator that reads one byte at a time. RFC 8259 without building
 * values: a state, a bit per open bracket, no recursion. Nesting beyond REPLY_JSON_DEPTH is
 * refused. UTF-8 is not checked here; the output filter makes it valid. */
#include "chat/reply_internal.h"

#include <string.h>

enum {
    WANT_VALUE,
    WANT_VALUE_OR_END, /* after '[' */
    WANT_KEY,
    WANT_KEY_OR_END, /* after '{' */
    WANT_COLON,
    AFTER_VALUE,
    IN_STRING,
    IN_ESCAPE,
    IN_HEX,
    IN_WORD,
    AFTER_MINUS,
    AFTER_ZERO,
    IN_DIGITS,
    AFTER_POINT,
    IN_FRACTION,
    AFTER_E,
    AFTER_SIGN,
    IN_POWER
};

void reply_json_init(reply_json *j) {
    *j = (reply_json){.state = WANT_VALUE};
}

static bool push(reply_json *j, bool object) {
    if (j->depth == REPLY_JSON_DEPTH) return false;
    uint8_t bit = (uint8_t)(1u << (j->depth % 8)), *byte = &j->is_object[j->depth / 8];
    *byte = (uint8_t)(object ? *byte | bit : *byte & ~bit);
    j->depth++;
    j->state = object ? WANT_KEY_OR_END : WANT_VALUE_OR_END;
    return true;
}

static bool in_object(const reply_json *j) {
    int32_t top = j->depth - 1;
    return top >= 0 && (j->is_object[top / 8] >> (top % 8) & 1);
}

static bool pop(reply_json *j, bool object) {
    if (j->depth == 0 || in_object(j) != object) return false;
    j->depth--;
    j->state = AFTER_VALUE;
    return true;
}

static bool word(reply_json *j, const char *rest) {
    j->rest = rest;
    j->state = IN_WORD;
    return true;
}

static bool begin_value(reply_json *j, uint8_t c) {
    switch (c) {
    case '{':
    case '[':
        return push(j, c == '{');
    case '"':
        j->in_key = false;
        j->state = IN_STRING;
        return true;
    case 't':
        return word(j, "rue");
    case 'f':
        return word(j, "alse");
    case 'n':
        return word(j, "ull");
    case '-':
        j->state = AFTER_MINUS;
        return true;
    case '0':
        j->state = AFTER_ZERO;
        return true;
    default:
        j->state = IN_DIGITS;
        return c >= '1' && c <= '9';
    }
}

static bool after_value(reply_json *j, uint8_t c) {
    if (c == '}' || c == ']') return pop(j, c == '}');
    if (c != ',' || j->depth == 0) return false;
    j->state = in_object(j) ? WANT_KEY : WANT_VALUE;
    return true;
}

static bool structure_byte(reply_json *j, uint8_t c) {
    if (c == ' ' || c == '\n' || c == '\t' || c == '\r') return true;
    switch (j->state) {
    case WANT_VALUE_OR_END:
        if (c == ']') return pop(j, false);
        return begin_value(j, c);
    case WANT_VALUE:
        return begin_value(j, c);
    case WANT_KEY_OR_END:
    case WANT_KEY:
        if (c == '}' && j->state == WANT_KEY_OR_END) return pop(j, true);
        j->in_key = true;
        j->state = IN_STRING;
        return c == '"';
    case WANT_COLON:
        j->state = WANT_VALUE;
        return c == ':';
    default:
        return after_value(j, c);
    }
}

static bool text_byte(reply_json *j, uint8_t c) {
    switch (j->state) {
    case IN_STRING:
        if (c == '"') j->state = j->in_key ? WANT_COLON : AFTER_VALUE;
        if (c == '\\') j->state = IN_ESCAPE;
        return c >= 0x20;
    case IN_ESCAPE:
        j->state = c == 'u' ? IN_HEX : IN_STRING;
        j->n_hex = 0;
        return c != 0 && strchr("\"\\/bfnrtu", c);
    case IN_HEX:
        if (++j->n_hex == 4) j->state = IN_STRING;
        return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'f');
    default:
        if (c == 0 || *j->rest != (char)c) return false;
        if (*++j->rest == 0) j->state = AFTER_VALUE;
        return true;
    }
}

/* What follows a digit, a point, an e or a sign; 255: the number is over, or broken. */
static uint8_t number_next(uint8_t state, uint8_t c) {
    bool digit = c >= '0' && c <= '9', e = c == 'e' || c == 'E';
    switch (state) {
    case AFTER_MINUS:
        return c == '0' ? AFTER_ZERO : digit ? IN_DIGITS : 255;
    case AFTER_ZERO:
    case IN_DIGITS:
        if (digit && state == IN_DIGITS) return IN_DIGITS;
        return c == '.' ? AFTER_POINT : e ? AFTER_E : 255;
    case AFTER_POINT:
        return digit ? IN_FRACTION : 255;
    case IN_FRACTION:
        return digit ? IN_FRACTION : e ? AFTER_E : 255;
    case AFTER_E:
        if (c == '+' || c == '-') return AFTER_SIGN;
        return digit ? IN_POWER : 255;
    default:
        return digit ? IN_POWER : 255;
    }
}

static bool number_whole(uint8_t state) {
    return state == AFTER_ZERO || state == IN_DIGITS || state == IN_FRACTION ||
           state == IN_POWER;
}

bool reply_json_byte(reply_json *j, uint8_t c) {
    if (j->state >= AFTER_MINUS) {
        uint8_t next = number_next(j->state, c);
        if (next != 255) {
            j->state = next;
            return true;
        }
        if (!number_whole(j->state)) return false;
        j->state = AFTER_VALUE;
    }
    return j->state < IN_STRING ? structure_byte(j, c) : text_byte(j, c);
}

bool reply_json_closed(const reply_json *j) {
    return j->depth == 0 && j->state == AFTER_VALUE;
}

bool reply_json_valid(const char *text, size_t n) {
    reply_json j;
    reply_json_init(&j);
    for (size_t i = 0; i < n; i++) {
        if (!reply_json_byte(&j, (uint8_t)text[i])) return false;
    }
    return reply_json_closed(&j) || (j.depth == 0 && number_whole(j.state));
}
