/* screen.c - see screen.h. Words end at spaces; a wide character (Chinese, Japanese, Korean) is
 * a word. */
#define _GNU_SOURCE
#include "cli/terminal/screen.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/terminal.h"
#include "cli/terminal/terminal_guard.h"

enum { TAB = 8 };

void screen_open(screen *s, FILE *to) {
    const int fd = fileno(to);
    *s = (screen){
        .to = to, .width = hd_terminal_width(fd), .can_dim = hd_terminal_has_color(fd)};
}

/* ---- characters ---- */

typedef struct range {
    uint32_t first, last;
} range;

static bool is_in(uint32_t c, const range *ranges, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (c >= ranges[i].first && c <= ranges[i].last) return true;
    }
    return false;
}

/* Returns the columns of a character: 2 for East Asian wide ones and pictures, 0 for combining
 * ones. */
static int width_of(uint32_t c) {
    static const range none[] = {
        {0x300,  0x36f },
        {0x483,  0x489 },
        {0x591,  0x5bd },
        {0x610,  0x61a },
        {0x64b,  0x65f },
        {0x200b, 0x200f},
        {0x2028, 0x202e},
        {0x2060, 0x2064},
        {0x20d0, 0x20ff},
        {0xfe00, 0xfe0f},
        {0xfe20, 0xfe2f},
        {0xfeff, 0xfeff},
    };
    static const range wide[] = {
        {0x1100,  0x115f },
        {0x2e80,  0x303e },
        {0x3041,  0x33ff },
        {0x3400,  0x4dbf },
        {0x4e00,  0xa4cf },
        {0xac00,  0xd7a3 },
        {0xf900,  0xfaff },
        {0xfe30,  0xfe6f },
        {0xff00,  0xff60 },
        {0xffe0,  0xffe6 },
        {0x1f300, 0x1f64f},
        {0x1f680, 0x1f6ff},
        {0x1f900, 0x1f9ff},
        {0x20000, 0x3fffd},
    };
    if (c < 0x300) return 1;
    if (is_in(c, none, HD_LEN(none))) return 0;
    return is_in(c, wide, HD_LEN(wide)) ? 2 : 1;
}

static uint32_t decode(const char *bytes, size_t n) {
    static const unsigned char masks[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    uint32_t c = (unsigned char)bytes[0] & masks[n];
    for (size_t i = 1; i < n; i++) c = c << 6 | ((unsigned char)bytes[i] & 0x3f);
    return c;
}

/* ---- lines ---- */

static void put_spaces(screen *s, int n) {
    fprintf(s->to, "%*s", n, "");
    s->column += n;
}

static void put_word(screen *s) {
    if (s->n == 0) return;
    const bool begun = s->column > s->indent;
    const int room = s->width - s->column - s->word_width; /* for spaces before the word */
    if (s->width && !begun && s->spaces > room) s->spaces = room > 0 ? room : 0;
    if (s->width && begun && s->spaces > room) {
        fputc('\n', s->to);
        s->column = 0;
        put_spaces(s, s->indent);
    } else {
        put_spaces(s, s->spaces);
    }
    fwrite(s->word, 1, s->n, s->to);
    s->column += s->word_width;
    s->spaces = s->word_width = 0;
    s->n = 0;
}

static void put_line_feed(screen *s) {
    put_word(s);
    fputc('\n', s->to);
    s->column = s->spaces = 0;
}

static void add_to_word(screen *s, const char *bytes, size_t n, int width) {
    const bool full = s->n + n > sizeof s->word;
    if (full || (s->width && s->word_width + width > s->width - s->indent)) put_word(s);
    memcpy(s->word + s->n, bytes, n);
    s->n += n;
    s->word_width += width;
}

static void add_character(screen *s, const char *bytes, size_t n) {
    const uint32_t c = decode(bytes, n);
    if (c < 0x20 || (c >= 0x7f && c < 0xa0)) { /* could change the terminal */
        char spelled[8];
        const int k = snprintf(spelled, sizeof spelled, "\\x%02x", (unsigned)c);
        add_to_word(s, spelled, (size_t)k, k);
        return;
    }
    const int width = width_of(c);
    if (width == 2) put_word(s);
    add_to_word(s, bytes, n, width);
    if (width == 2) put_word(s);
}

static size_t bytes_of_character(unsigned char first) {
    return first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

static void add_byte(screen *s, char byte) {
    const bool follows = ((unsigned char)byte & 0xc0) == 0x80;
    if (s->n_part && !follows) s->n_part = 0; /* not a character: omitted, */
    if (!s->n_part && follows) return;        /* with the rest of an incomplete one */
    if (byte == '\n') {
        put_line_feed(s);
    } else if (byte == ' ' || byte == '\t') {
        put_word(s);
        s->spaces += byte == ' ' ? 1 : TAB - (s->column + s->spaces) % TAB;
    } else {
        if (!s->n_part) s->part_bytes = bytes_of_character((unsigned char)byte);
        s->part[s->n_part++] = byte;
        if (s->n_part < s->part_bytes) return;
        add_character(s, s->part, s->n_part);
        s->n_part = 0;
    }
}

void screen_write(screen *s, const char *text, size_t n) {
    if (!s->width) {
        fwrite(text, 1, n, s->to);
        return;
    }
    for (size_t i = 0; i < n; i++) add_byte(s, text[i]);
}

void screen_word(screen *s, const char *text) {
    if (!s->width) {
        fputs(text, s->to);
        return;
    }
    for (; *text; text++) {
        if (*text == ' ') {
            add_to_word(s, text, 1, 1);
        } else {
            add_byte(s, *text);
        }
    }
}

void screen_print(screen *s, const char *format, ...) {
    char *text = NULL;
    va_list args;
    va_start(args, format);
    const int n = vasprintf(&text, format, args);
    va_end(args);
    if (n < 0) return;
    screen_write(s, text, (size_t)n);
    free(text);
}

/* Dims what follows, or no longer, where that can be done. */
static void set_dim(screen *s, bool dim) {
    if (!s->can_dim || s->dim == dim) return;
    put_word(s);
    if (dim) terminal_guard_dim(fileno(s->to));
    fputs(dim ? TERMINAL_DIM : TERMINAL_PLAIN, s->to);
    if (!dim) {
        fflush(s->to);
        terminal_guard_dim(-1);
    }
    s->dim = dim;
}

void screen_turn_to(screen *s, bool reasoning) {
    if (s->reasoning == reasoning) return;
    s->reasoning = reasoning;
    set_dim(s, reasoning);
    if (reasoning && !s->can_dim) screen_print(s, "[reasoning]\n");
    if (!reasoning) screen_print(s, s->can_dim ? "\n\n" : "\n\n[answer]\n");
}

void screen_end(screen *s) {
    put_word(s);
    set_dim(s, false);
}
