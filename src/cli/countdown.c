/* countdown.c - reads an expression by recursive descent, in fractions.
 *
 *     sum     = product { ("+" | "-") product }
 *     product = factor { ("*" | "/") factor }
 *     factor  = number | "(" sum ")" */
#include "cli/countdown.h"

enum { MAX_DEPTH = 16, MOST = 1000000000 };

/* In lowest terms; bottom > 0, both at most MOST. So no product or sum of two overflows. */
typedef struct fraction {
    int64_t top, bottom;
} fraction;

typedef struct reader {
    const char *at, *end;
    const int32_t *numbers;
    int32_t n_numbers, depth;
    bool used[COUNTDOWN_MAX_NUMBERS];
} reader;

static int64_t divisor_of(int64_t a, int64_t b) {
    while (b) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static bool make(fraction *out, int64_t top, int64_t bottom) {
    if (bottom == 0) return false;
    const int64_t sign = bottom < 0 ? -1 : 1, size = top < 0 ? -top : top;
    const int64_t common = divisor_of(size, sign * bottom) * sign;
    *out = (fraction){top / common, bottom / common};
    return out->top <= MOST && out->top >= -MOST && out->bottom <= MOST;
}

static bool compute(fraction *a, char sign, fraction b) {
    switch (sign) {
    case '+':
        return make(a, a->top * b.bottom + b.top * a->bottom, a->bottom * b.bottom);
    case '-':
        return make(a, a->top * b.bottom - b.top * a->bottom, a->bottom * b.bottom);
    case '*':
        return make(a, a->top * b.top, a->bottom * b.bottom);
    default:
        return make(a, a->top * b.bottom, a->bottom * b.top);
    }
}

static void skip_blanks(reader *r) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t')) r->at++;
}

/* Takes the next character if it is one of two. */
static char take(reader *r, char a, char b) {
    skip_blanks(r);
    if (r->at == r->end || (*r->at != a && *r->at != b)) return 0;
    return *r->at++;
}

static bool read_digits(reader *r, int64_t *out) {
    const char *start = r->at;
    *out = 0;
    for (; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++) {
        *out = *out * 10 + (*r->at - '0');
        if (*out > MOST) return false;
    }
    return r->at > start && (*start != '0' || r->at == start + 1);
}

static bool use_number(reader *r, int64_t x) {
    for (int32_t i = 0; i < r->n_numbers; i++) {
        if (r->used[i] || r->numbers[i] != x) continue;
        r->used[i] = true;
        return true;
    }
    return false;
}

static bool read_sum(reader *r, fraction *out);

static bool read_factor(reader *r, fraction *out) {
    int64_t x;
    if (take(r, '(', '(')) {
        if (++r->depth > MAX_DEPTH || !read_sum(r, out) || !take(r, ')', ')')) return false;
        r->depth--;
        return true;
    }
    if (!read_digits(r, &x) || !use_number(r, x)) return false;
    *out = (fraction){x, 1};
    return true;
}

static bool read_product(reader *r, fraction *out) {
    if (!read_factor(r, out)) return false;
    for (char sign; (sign = take(r, '*', '/')) != 0;) {
        fraction next;
        if (!read_factor(r, &next) || !compute(out, sign, next)) return false;
    }
    return true;
}

static bool read_sum(reader *r, fraction *out) {
    if (!read_product(r, out)) return false;
    for (char sign; (sign = take(r, '+', '-')) != 0;) {
        fraction next;
        if (!read_product(r, &next) || !compute(out, sign, next)) return false;
    }
    return true;
}

bool countdown_is_right(const char *text, size_t n, const int32_t *numbers, int32_t n_numbers,
                        int32_t target) {
    reader r = {.at = text, .end = text + n, .numbers = numbers, .n_numbers = n_numbers};
    fraction value;
    int64_t stated = target;
    if (!read_sum(&r, &value)) return false;
    if (take(&r, '=', '=')) {
        skip_blanks(&r);
        if (!read_digits(&r, &stated)) return false;
    }
    skip_blanks(&r);
    return r.at == r.end && value.bottom == 1 && value.top == target && stated == target;
}
