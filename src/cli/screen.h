/* screen.h - text output for terminals and files. On a terminal, lines are wrapped between
 * words, control characters of untrusted text are escaped, and text can be dimmed unless
 * NO_COLOR is set. In a file or pipe every byte is written unchanged. One thread owns it. */
#ifndef HD_CLI_SCREEN_H
#define HD_CLI_SCREEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

enum { SCREEN_WORD_BYTES = 256 };

typedef struct screen {
    FILE *to;
    int width;  /* columns; 0: every byte is written as it is */
    int indent; /* of lines that wrapping begins */
    bool can_dim, dim;
    bool reasoning; /* the last piece was of that kind */
    int column;     /* where the next character goes, the word left out */
    int spaces;     /* before the word */
    char word[SCREEN_WORD_BYTES];
    size_t n;       /* of it */
    int word_width; /* columns */
    char part[4];   /* of a character in UTF-8 */
    size_t n_part, part_bytes;
} screen;

/* As wide as the terminal that `to` is; nothing is wrapped if it is none. */
void screen_open(screen *s, FILE *to);

/* A last word is held back until the next one, a flush or the end. */
void screen_write(screen *s, const char *text, size_t n);
void screen_print(screen *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same, as one word, spaces included. */
void screen_word(screen *s, const char *text);

/* Before a piece of reasoning or of an answer: reasoning is dimmed and ends with an empty line, or is
 * labelled where that cannot be seen. */
void screen_turn_to(screen *s, bool reasoning);

/* Writes the held word and undoes the dimming. */
void screen_end(screen *s);

#endif
