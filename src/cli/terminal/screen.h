/* screen.h - text output for terminals and files. On a terminal, lines are wrapped between
 * words, control characters of untrusted text are escaped, and text can be dimmed unless
 * NO_COLOR is set. In a file or pipe every byte is written unchanged. One thread owns it. */
#ifndef HD_CLI_TERMINAL_SCREEN_H
#define HD_CLI_TERMINAL_SCREEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

enum { SCREEN_WORD_BYTES = 256 };

typedef struct screen {
    FILE *to;
    int width;  /* columns; 0: every byte is written as it is */
    int indent; /* of lines after a wrap */
    bool can_dim, dim;
    bool reasoning; /* the last text was reasoning */
    int column;     /* column of the next character, without the held word */
    int spaces;     /* before the word */
    char word[SCREEN_WORD_BYTES];
    size_t n;       /* of it */
    int word_width; /* columns */
    char part[4];   /* of an incomplete UTF-8 character */
    size_t n_part, part_bytes;
} screen;

/* Uses the width of the terminal `to`; without a terminal nothing is wrapped. */
void screen_open(screen *s, FILE *to);

/* Holds the last word until the next one, a flush or the end. */
void screen_write(screen *s, const char *text, size_t n);
void screen_print(screen *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Writes text as one word, spaces included. */
void screen_word(screen *s, const char *text);

/* Call before reasoning or content begins. Reasoning is dimmed and ends with an empty line, or
 * is labelled if the terminal cannot dim. */
void screen_turn_to(screen *s, bool reasoning);

/* Writes the held word and ends dimming. */
void screen_end(screen *s);

#endif
