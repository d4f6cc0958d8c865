/* grammar_number.c - decimal numbers between two bounds, digit by digit.
 *
 * Magnitudes only: a range across zero is two ranges. While the digits so far equal those of a
 * bound, the next one is held by it; after a digit strictly between, all are free. */
#include "text/grammar_internal.h"

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

/* A number may end after its part[at] digits: zeros are thought to follow. */
static bool may_end(const range *r, uint32_t mode, size_t at) {
    if (mode & AT_LO && (strlen(r->lo->part) > at || r->lo->exclusive)) return false;
    return !(mode & AT_HI && r->hi->exclusive && strlen(r->hi->part) <= at);
}

/* The fraction of a number whose whole part led to nodes[mode]. */
static void draw_part(const range *r, const uint32_t *nodes) {
    gram_builder *b = r->b;
    size_t n = strlen(r->lo->part), m = r->hi->given ? strlen(r->hi->part) : 0;
    if (m > n) n = m;
    uint32_t here[4], next[4];
    four_nodes(b, here);
    for (uint32_t mode = 0; mode < 4; mode++) {
        if (may_end(r, mode, 0)) gram_empty(b, nodes[mode], r->to);
        if (!r->integer) gram_range(b, nodes[mode], here[mode], '.', '.');
    }
    for (size_t i = 0; i <= n && !r->integer; i++) {
        if (i < n) {
            four_nodes(b, next);
        } else {
            memcpy(next, here, sizeof next); /* beyond both bounds all digits are alike */
        }
        for (uint32_t mode = 0; mode < 4; mode++) {
            if (i > 0 && i < n && may_end(r, mode, i)) gram_empty(b, here[mode], r->to);
            draw_digit(r, here[mode], mode, digit_at(r->lo->part, i), digit_at(r->hi->part, i),
                       0, next);
        }
        if (i < n) memcpy(here, next, sizeof here);
    }
    if (r->integer) return;
    /* the loop at the end: at least one digit has been written when n > 0 */
    uint32_t last[4];
    four_nodes(b, last);
    for (uint32_t mode = 0; mode < 4; mode++) {
        if (n > 0 && may_end(r, mode, n)) gram_empty(b, here[mode], r->to);
        if (n == 0) {
            draw_digit(r, here[mode], mode, 0, 0, 0, last);
            draw_digit(r, last[mode], mode, 0, 0, 0, last);
            if (may_end(r, mode, 0)) gram_empty(b, last[mode], r->to);
        }
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

/* Magnitudes from lo to hi, hi perhaps without an end. */
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
    uint32_t more = gram_node(b), nodes[4];
    four_nodes(b, nodes);
    for (size_t n = 0; n <= shortest; n++) { /* one digit more than lo, then any number */
        uint32_t next = n == shortest ? more : gram_node(b);
        gram_range(b, from, next, n == 0 ? '1' : '0', '9');
        from = next;
    }
    gram_range(b, more, more, '0', '9');
    gram_empty(b, more, nodes[0]);
    draw_part(&r, nodes);
}

void gram_number_between(gram_builder *b, uint32_t from, uint32_t to, const gram_bound *lo,
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
