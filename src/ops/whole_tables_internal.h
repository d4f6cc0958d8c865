/* whole_tables_internal.h - how FP4 and FP8 become whole numbers: look-ups by four bits. Before it come
 * words, a register, and spread_table, which fills one with a table. */
#ifndef HD_OPS_WHOLE_TABLES_INTERNAL_H
#define HD_OPS_WHOLE_TABLES_INTERNAL_H

#include <stdint.h>

#include "ops/inline_internal.h"

/* Of a segment of FP8: whether no element is 32 or more, or one is not a number. */
typedef enum magnitude { SMALL, LARGE, BROKEN } magnitude;
enum { BELOW_32 = 0x5f, NO_NUMBER = 0x7f }; /* codes without their sign */

/* Twice an element of FP4. */
static const int8_t whole_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* FP8 is a product. Its low four bits, the fraction and the exponent's lowest, are one factor, 8 to 30;
 * here 4 times that. */
static const int8_t whole_fraction[16] = {32, 36, 40, 44, 48, 52,  56,  60,
                                          64, 72, 80, 88, 96, 104, 112, 120};

/* What a subnormal's is too large by: it has no first bit, and the exponent of its neighbour. */
static const int8_t whole_excess[16] = {32, 28, 24, 20, 16, 12, 8, 4};

/* Its high four, the sign and the rest of the exponent, are a power of four, of two bytes; */
static const int8_t whole_low[16] = {1, 4, 16, 64, 0, 0, 0, 0, -1, -4, -16, -64, 0, 0, 0, 0},
                    whole_high[16] = {0,  0,  0,  0,  1,  4,  16,  64,
                                      -1, -1, -1, -1, -1, -4, -16, -64};

/* 16 times that, of small elements. */
static const int8_t whole_small_low[16] = {16,  64,  0, 0, 0, 0, 0, 0,
                                           -16, -64, 0, 0, 0, 0, 0, 0},
                    whole_small_high[16] = {0,  0,  1,  4,  16,  64,  0, 0,
                                            -1, -1, -1, -4, -16, -64, 0, 0};

typedef struct tables {
    words e2m1, fraction, excess, low, high, small_low, small_high;
} tables;

INLINE tables make_tables(void) {
    return (tables){spread_table(whole_e2m1),      spread_table(whole_fraction),
                    spread_table(whole_excess),    spread_table(whole_low),
                    spread_table(whole_high),      spread_table(whole_small_low),
                    spread_table(whole_small_high)};
}

#endif
