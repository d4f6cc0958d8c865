/* router_rule.h - how a token chooses its experts; models.md's routers in one struct.
 *
 * DeepSeek-V2 (softmax, greedy or group-limited), DeepSeek-V3 eq. 12-16 (sigmoid, bias for
 * the choice only, groups ranked by their two best), DeepSeek-V4 (sqrt(softplus), no groups).
 * Written by the reader of configs, obeyed by the routing op. */
#ifndef HD_BASE_ROUTER_RULE_H
#define HD_BASE_ROUTER_RULE_H

#include <stdbool.h>
#include <stdint.h>

typedef enum hd_score { HD_SCORE_SOFTMAX, HD_SCORE_SIGMOID, HD_SCORE_SQRT_SOFTPLUS } hd_score;

typedef enum hd_group_rule {
    HD_GROUPS_NONE,
    HD_GROUPS_MAX,    /* V2 group_limited_greedy: a group counts as its best expert */
    HD_GROUPS_TOP2SUM /* V3 noaux_tc: as the sum of its two best */
} hd_group_rule;

typedef struct hd_router_rule {
    hd_score score;
    hd_group_rule group_rule;
    int32_t n_experts, top_k;
    int32_t n_groups, top_groups; /* 1 and 1 without groups */
    bool normalize;               /* divide the chosen weights by their sum */
    float scale;                  /* routed_scaling_factor */
} hd_router_rule;

#endif
