/* routing.h - synthetic expert routing, for benchmarks with random weights.
 *
 * Routers with random weights choose badly: similar rows get the same experts. Benchmarks
 * use choices drawn from a seed instead. Uniform: the most experts for a few rows, the best
 * balance. Skewed: some experts are chosen more often than others. Sticky: neighbouring
 * tokens share experts, as in text. */
#ifndef HD_WEIGHTS_ROUTING_H
#define HD_WEIGHTS_ROUTING_H

#include <stdint.h>

typedef enum hd_routing {
    HD_ROUTING_MODEL, /* as the router's logits say */
    HD_ROUTING_UNIFORM,
    /* Zipf: the mean load of equal groups of experts is 0.6 of the busiest group's */
    HD_ROUTING_SKEWED,
    /* uniform, but each choice repeats the previous token's with probability 0.3 */
    HD_ROUTING_STICKY
} hd_routing;

/* Writes fraction[n]: the fraction of all choices that each expert (or slot) gets; the sum is
 * 1. Skewed: fractions are drawn per layer, so that over `groups` ranks of consecutive
 * experts the mean is 0.6 of the busiest. Otherwise they are equal. */
void hd_routing_fractions(double *fraction, int32_t n, int32_t groups, hd_routing routing,
                          int32_t layer);

/* Draws how many of `total` choices each expert gets, by its fraction. */
void hd_routing_draw(int32_t *rows, const double *fraction, int32_t n, int64_t total,
                     int32_t layer);

#endif
