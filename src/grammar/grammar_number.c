/* grammar_number.c - grammar of decimal numbers between two bounds, digit by digit. Handles
 * magnitudes: a range across zero is two ranges. While the digits so far equal those of a
 * bound, the bound limits the next digit; after a digit strictly between, all are free. */
#include "grammar/grammar_internal.h"

#include <string.h>

enum { AT_LO = 1, AT_HI = 2 };

bool gram_bound_read(gram_bound *out, const char *text) {
    *out = (gram_bound){.given = true};
    if (*text == '-') {
        out->negative = true;
        text++;
    }
    while (*text == '0') text++;
    size_t n = strspn(text, "0123456789"), m = 0;
    const char *part = text + n;
    if (*part == '.') {
        part++;
        m = strspn(part, "0123456789");
    }
    if (part[m] || n >= sizeof out->whole) return false;
    while (m > 0 && part[m - 1] == '0') m--;
    if (m >= sizeof out->part) return false;
    memcpy(out->whole, text, n);
    memcpy(out->part, part, m);
    if (n == 0 && m == 0) out->negative = false;
    return true;
}

typedef struct range {
    gram_builder *b;
    const gram_bound *lo, *hi;
    bool integer;
    uint32_t to;
} range;

static int digit_at(const char *digits, size_t i) {
    return i < strlen(digits) ? digits[i] - '0' : 0;
}

/* Draws one digit from a node in the given mode to the nodes of the modes it leads to. */
static void draw_digit(const range *r, uint32_t from, uint32_t mode, int lo, int hi, int least,
                       const uint32_t *next) {
    int low = mode & AT_LO ? lo : 0, high = mode & AT_HI ? hi : 9;
    for (int d = low > least ? low : least; d <= high; d++) {
        uint32_t after = 0;
        if (mode & AT_LO && d == lo) after |= AT_LO;
        if (mode & AT_HI && d == hi) after |= AT_HI;
        gram_range(r->b, from, next[after], (uint8_t)('0' + d), (uint8_t)('0' + d));
    }
}

static void four_nodes(gram_builder *b, uint32_t *nodes) {
    for (int i = 0; i < 4; i++) nodes[i] = gram_node(b);
}

/* Whether a number may end after its part[at] digits, as if zeros followed. */
static bool may_end(const range *r, uint32_t mode, size_t at) {
    if (mode & AT_LO && (strlen(r->lo->part) > at || r->lo->exclusive)) return false;
    return !(mode & AT_HI && r->hi->exclusive && strlen(r->hi->part) <= at);
}

/* Draws the fraction of a number whose whole part led to nodes[mode], with as many digits as
 * the bounds have, or as all numbers may have. */
static void draw_part(const range *r, const uint32_t *nodes) {
    gram_builder *b = r->b;
    size_t n = HD_GRAMMAR_MAX_DIGITS;
    uint32_t here[4], next[4];
    if (strlen(r->lo->part) > n) n = strlen(r->lo->part);
    if (strlen(r->hi->part) > n) n = strlen(r->hi->part);
    four_nodes(b, here);
    for (uint32_t mode = 0; mode < 4; mode++) {
        if (may_end(r, mode, 0)) gram_empty(b, nodes[mode], r->to);
        if (!r->integer) gram_range(b, nodes[mode], here[mode], '.', '.');
    }
    for (size_t i = 0; i < n && !r->integer; i++) {
        four_nodes(b, next);
        for (uint32_t mode = 0; mode < 4; mode++) {
            draw_digit(r, here[mode], mode, digit_at(r->lo->part, i), digit_at(r->hi->part, i),
                       0, next);
            if (may_end(r, mode, i + 1)) gram_empty(b, next[mode], r->to);
        }
        memcpy(here, next, sizeof here);
    }
}

/* Whole parts of n digits; hold: the bounds that have as many. */
static void draw_length(const range *r, uint32_t from, size_t n, uint32_t hold) {
    uint32_t here[4], next[4];
    four_nodes(r->b, here);
    gram_empty(r->b, from, here[hold]);
    for (size_t i = 0; i < n; i++) {
        four_nodes(r->b, next);
        for (uint32_t mode = 0; mode < 4; mode++) {
            draw_digit(r, here[mode], mode, digit_at(r->lo->whole, i),
                       digit_at(r->hi->whole, i), i == 0 ? 1 : 0, next);
        }
        memcpy(here, next, sizeof here);
    }
    if (n == 0) { /* written as a zero */
        four_nodes(r->b, next);
        for (uint32_t mode = 0; mode < 4; mode++)
            gram_range(r->b, here[mode], next[mode], '0', '0');
        memcpy(here, next, sizeof here);
    }
    draw_part(r, here);
}

/* Draws magnitudes from lo to hi; hi may be unbounded. */
static void draw_magnitudes(gram_builder *b, uint32_t from, uint32_t to, const gram_bound *lo,
                            const gram_bound *hi, bool integer) {
    const range r = {b, lo, hi, integer, to};
    size_t shortest = strlen(lo->whole), longest = hi->given ? strlen(hi->whole) : shortest;
    for (size_t n = shortest; n <= longest && b->status == HD_OK; n++) {
        uint32_t hold = n == shortest ? AT_LO : 0;
        if (hi->given && n == longest) hold |= AT_HI;
        draw_length(&r, from, n, hold);
    }
    if (hi->given) return;
    uint32_t nodes[4]; /* more digits than lo has */
    size_t most = shortest < HD_GRAMMAR_MAX_DIGITS ? HD_GRAMMAR_MAX_DIGITS : shortest + 1;
    four_nodes(b, nodes);
    for (size_t n = 1; n <= most; n++) {
        uint32_t next = gram_node(b);
        gram_range(b, from, next, n == 1 ? '1' : '0', '9');
        if (n > shortest) gram_empty(b, next, nodes[0]);
        from = next;
    }
    draw_part(&r, nodes);
}

static void draw_between(gram_builder *b, uint32_t from, uint32_t to, const gram_bound *lo,
                         const gram_bound *hi, bool integer) {
    const gram_bound zero = {.given = true}, above_zero = {.given = true, .exclusive = true};
    const gram_bound endless = {0};
    bool below = !lo->given || lo->negative, above = !hi->given || !hi->negative;
    if (above) {
        bool cut = lo->given && !lo->negative;
        draw_magnitudes(b, from, to, cut ? lo : &zero, hi, integer);
    }
    if (below) {
        bool cut = hi->given && hi->negative;
        uint32_t minus = gram_node(b);
        gram_range(b, from, minus, '-', '-');
        draw_magnitudes(b, minus, to, cut ? hi : &above_zero, lo->given ? lo : &endless,
                        integer);
    }
}

void gram_number_between(gram_builder *b, uint32_t from, uint32_t to, const gram_bound *lo,
                         const gram_bound *hi, bool integer) {
    uint32_t i = 0;
    for (; i < b->n_numbers && gram_work(b, 1); i++) {
        const gram_numbers *n = &b->numbers[i];
        if (n->integer == integer && memcmp(&n->lo, lo, sizeof *lo) == 0 &&
            memcmp(&n->hi, hi, sizeof *hi) == 0) {
            break;
        }
    }
    if (i == b->n_numbers) {
        int32_t rule = gram_rule_new(b);
        if (!gram_grow(b, &b->numbers, &b->cap_numbers, (size_t)i + 1, sizeof *b->numbers)) {
            return;
        }
        b->numbers[b->n_numbers++] = (gram_numbers){*lo, *hi, integer, rule};
        const gram_rule r = b->rules[rule];
        draw_between(b, r.start, r.end, lo, hi, integer);
    }
    if (b->status == HD_OK) gram_call(b, from, to, b->numbers[i].rule, 1, 1);
}
