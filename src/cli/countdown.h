/* countdown.h - decides whether an expression makes a number of given numbers. */
#ifndef HD_CLI_COUNTDOWN_H
#define HD_CLI_COUNTDOWN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { COUNTDOWN_MAX_NUMBERS = 16, COUNTDOWN_MAX_NUMBER = 1000000 };

/* text[n] is right if it is an expression of + - * / and parentheses, computed exactly, whose
 * value is `target` and which has each of numbers[n_numbers] at most once. "= target" may follow.
 * A value beyond a billion, as numerator or denominator, is wrong, and so are signs of
 * single numbers, more than 16 parentheses inside each other, and anything else in the text. */
bool countdown_is_right(const char *text, size_t n, const int32_t *numbers, int32_t n_numbers,
                        int32_t target);

#endif
