/* routing.h - which experts get rows, where no trained router says so.
 *
 * Made-up routers choose badly: near-equal rows get equal experts. Speed is measured with
 * choices drawn from a seed instead: uniform (the most experts for a few rows, the best
 * balance), skewed (some experts are wanted more than others), or sticky (neighbouring tokens
 * share experts, as in text). */
#ifndef HD_WEIGHTS_ROUTING_H
#define HD_WEIGHTS_ROUTING_H

#include <stdint.h>

typedef enum hd_routing {
    HD_ROUTING_MODEL, /* what the router's logits say */
    HD_ROUTING_UNIFORM,
    HD_ROUTING_SKEWED, /* Zipf: of equal groups of experts, the busiest has 1 / 0.6 of the mean */
    HD_ROUTING_STICKY /* uniform, but each choice is the token before's with probability 0.3 */
} hd_routing;

/* share[n]: the part of all choices that goes to each expert (or slot); the sum is 1. Skewed
 * by a draw of the layer's own, so that `groups` ranks of consecutive ones have a mean of 0.6
 * of the busiest; otherwise equal. */
void hd_routing_fractions(double *shard, int32_t n, int32_t groups, hd_routing routing,
                          int32_t layer);

/* rows[n] of `total` choices, each drawn by share. */
void hd_routing_draw(int32_t *rows, const double *shard, int32_t n, int64_t total,
                     int32_t layer);

#endif
