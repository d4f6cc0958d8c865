/* router_rule.h - the MoE router's rule: how a token selects its experts, for all families.
 *
 * DeepSeek-V2 (softmax, greedy or group-limited), DeepSeek-V3 eq. 12-16 (sigmoid, bias for
 * the selection only, groups ranked by their two best), DeepSeek-V4 (sqrt(softplus), no
 * groups). The config reader writes it, moe_topk reads it. */
#ifndef HD_BASE_ROUTER_RULE_H
#define HD_BASE_ROUTER_RULE_H

#include <stdbool.h>
#include <stdint.h>

typedef enum hd_score { HD_SCORE_SOFTMAX, HD_SCORE_SIGMOID, HD_SCORE_SQRT_SOFTPLUS } hd_score;

typedef enum hd_group_rule {
    HD_GROUPS_NONE,
    HD_GROUPS_MAX,    /* V2 group_limited_greedy: a group's score is its best expert's */
    HD_GROUPS_TOP2SUM /* V3 noaux_tc: the sum of its two best experts' scores */
} hd_group_rule;

typedef struct hd_router_rule {
    hd_score score;
    hd_group_rule group_rule;
    int32_t n_experts, top_k;
    int32_t n_groups, top_groups; /* 1 and 1 without groups */
    bool normalize;               /* divide the selected weights by their sum */
    float scale;                  /* routed_scaling_factor */
} hd_router_rule;

#endif
