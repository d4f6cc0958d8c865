/* grammar_class.c - sets of characters, and their bytes in UTF-8 or inside a JSON string. */
#include "grammar/grammar_internal.h"

#include <stdlib.h>
#include <string.h>

#include "tokenizer/unicode.h"

void gram_class_add(gram_builder *b, gram_class *c, uint32_t lo, uint32_t hi) {
    if (lo > hi || !gram_work(b, 1)) return;
    if (!gram_grow(b, &c->ranges, &c->cap, (size_t)c->n + 1, sizeof *c->ranges)) return;
    c->ranges[c->n++] = (gram_class_range){lo, hi};
}

void gram_class_add_class(gram_builder *b, gram_class *c, const gram_class *other) {
    for (uint32_t i = 0; i < other->n; i++) {
        gram_class_add(b, c, other->ranges[i].lo, other->ranges[i].hi);
    }
}

static int compare_ranges(const void *a, const void *b) {
    const gram_class_range *x = a, *y = b;
    if (x->lo != y->lo) return x->lo < y->lo ? -1 : 1;
    return (x->hi > y->hi) - (x->hi < y->hi);
}

void gram_class_sort(gram_class *c) {
    if (c->n == 0) return;
    qsort(c->ranges, c->n, sizeof *c->ranges, compare_ranges);
    uint32_t n = 1;
    for (uint32_t i = 1; i < c->n; i++) {
        gram_class_range *last = &c->ranges[n - 1];
        if (c->ranges[i].lo > last->hi + 1) {
            c->ranges[n++] = c->ranges[i];
        } else if (c->ranges[i].hi > last->hi) {
            last->hi = c->ranges[i].hi;
        }
    }
    c->n = n;
}

void gram_class_invert(gram_builder *b, gram_class *c) {
    gram_class_sort(c);
    uint32_t n = c->n, next = 0;
    for (uint32_t i = 0; i < n && b->status == HD_OK; i++) {
        gram_class_range r = c->ranges[i];
        if (r.lo > next) gram_class_add(b, c, next, r.lo - 1);
        next = r.hi + 1;
    }
    if (next < TEXT_UNICODE_END) gram_class_add(b, c, next, TEXT_UNICODE_END - 1);
    if (b->status != HD_OK) return;
    memmove(c->ranges, c->ranges + n, (c->n - n) * sizeof *c->ranges);
    c->n -= n;
}

/* Nodes from which 1, 2 or 3 arbitrary continuation bytes lead to the end; created when
 * first needed. */
typedef struct tails {
    uint32_t node[4];
} tails;

static uint32_t tail(gram_builder *b, tails *t, uint32_t bytes) {
    for (uint32_t i = 1; i <= bytes; i++) {
        if (t->node[i] != UINT32_MAX) continue;
        t->node[i] = gram_node(b);
        gram_range(b, t->node[i], t->node[i - 1], 0x80, 0xbf);
    }
    return t->node[bytes];
}

/* A range of code points whose encodings have the same length and differ only in a way that
 * one byte range per position covers. */
static void draw_sequence(gram_builder *b, uint32_t from, tails *t, uint32_t lo, uint32_t hi) {
    uint8_t x[4], y[4];
    size_t n = text_utf8_put(x, lo);
    text_utf8_put(y, hi);
    for (size_t i = 0; i < n; i++) {
        uint32_t left = (uint32_t)(n - 1 - i);
        bool free_rest = true;
        for (size_t k = i + 1; k < n; k++) free_rest &= x[k] == 0x80 && y[k] == 0xbf;
        if (free_rest) {
            gram_range(b, from, tail(b, t, left), x[i], y[i]);
            return;
        }
        uint32_t next = gram_node(b);
        gram_range(b, from, next, x[i], y[i]);
        from = next;
    }
}

/* Splits a range where the encoding changes its length or its leading bytes. */
static void draw_unicode(gram_builder *b, uint32_t from, tails *t, uint32_t lo, uint32_t hi) {
    static const uint32_t last[] = {0x7f, 0x7ff, 0xd7ff, 0xffff, 0x10ffff};
    while (lo <= hi && b->status == HD_OK) {
        uint32_t end = hi;
        if (lo >= 0xd800 && lo < 0xe000) { /* surrogates are no characters */
            lo = 0xe000;
            continue;
        }
        for (size_t i = 0; i < HD_LEN(last); i++) {
            if (lo <= last[i] && end > last[i]) end = last[i];
        }
        for (uint32_t bits = lo < 0x80 ? 24 : 6; bits < 24; bits += 6) {
            uint32_t mask = (1u << bits) - 1;
            if (lo >> bits == end >> bits) break;
            if (lo & mask) {
                end = lo | mask;
                break;
            }
            if ((end & mask) != mask) end = (end & ~mask) - 1;
        }
        draw_sequence(b, from, t, lo, end);
        lo = end + 1;
    }
}

static void draw_range(gram_builder *b, uint32_t from, tails *t, uint32_t lo, uint32_t hi) {
    if (b->avoid && lo <= b->avoid && b->avoid <= hi) {
        draw_unicode(b, from, t, lo, b->avoid - 1);
        lo = b->avoid + 1;
    }
    draw_unicode(b, from, t, lo, hi);
}

static char short_escape(uint32_t c) {
    static const char from[] = "\b\f\n\r\t\"\\", to[] = "bfnrt\"\\";
    const char *at = c && c < 0x80 ? strchr(from, (int)c) : NULL;
    return at ? to[at - from] : 0;
}

/* \n or \u001f; hexadecimal digits in either case. */
static void draw_escape(gram_builder *b, uint32_t from, uint32_t to, uint32_t c) {
    uint32_t slash = gram_node(b);
    gram_range(b, from, slash, '\\', '\\');
    char letter = short_escape(c);
    if (letter) {
        gram_range(b, slash, to, (uint8_t)letter, (uint8_t)letter);
        return;
    }
    uint32_t last = gram_node(b);
    gram_bytes_of(b, slash, last, c < 0x10 ? "u000" : "u001", 4);
    uint8_t digit = (uint8_t) "0123456789abcdef"[c & 15];
    gram_range(b, last, to, digit, digit);
    if (digit >= 'a') gram_range(b, last, to, digit - 32, digit - 32);
}

void gram_class_draw(gram_builder *b, uint32_t from, uint32_t to, const gram_class *c,
                     bool json) {
    tails t = {
        {to, UINT32_MAX, UINT32_MAX, UINT32_MAX}
    };
    for (uint32_t i = 0; i < c->n && b->status == HD_OK; i++) {
        uint32_t lo = c->ranges[i].lo, hi = c->ranges[i].hi;
        for (; json && lo <= hi && lo <= '\\'; lo++) {
            if (lo < 0x20 || lo == '"' || lo == '\\') {
                draw_escape(b, from, to, lo);
            } else {
                gram_range(b, from, to, (uint8_t)lo, (uint8_t)lo);
            }
        }
        if (lo <= hi) draw_range(b, from, &t, lo, hi);
    }
}
