/* moe_ref.c - reference MoE operators in plain C: router top-k, permutation, combination. */
#include <string.h>

#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

/* sqrt(softplus(x)); above 20 softplus is x to float precision, and exp would overflow later */
static float sqrt_softplus(float x) {
    return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
}

static void score_experts(const hd_moe_topk_args *a, const float *logits, float *score) {
    const int32_t n = a->rule.n_experts;
    float top = -INFINITY;
    double total = 0.0;
    switch (a->rule.score) {
    case HD_SCORE_SOFTMAX:
        for (int32_t e = 0; e < n; e++) top = fmaxf(top, logits[e]);
        for (int32_t e = 0; e < n; e++) total += exp((double)(logits[e] - top));
        for (int32_t e = 0; e < n; e++) {
            score[e] = (float)(exp((double)(logits[e] - top)) / total);
        }
        break;
    case HD_SCORE_SIGMOID:
        for (int32_t e = 0; e < n; e++) score[e] = sigmoid(logits[e]);
        break;
    case HD_SCORE_SQRT_SOFTPLUS:
        for (int32_t e = 0; e < n; e++) score[e] = sqrt_softplus(logits[e]);
        break;
    }
}

static float group_score(const hd_router_rule *rule, const float *choice, int32_t group) {
    const int32_t size = rule->n_experts / rule->n_groups;
    float best = -INFINITY, second = -INFINITY;
    for (int32_t e = group * size; e < (group + 1) * size; e++) {
        if (choice[e] > best) {
            second = best;
            best = choice[e];
        } else if (choice[e] > second) {
            second = choice[e];
        }
    }
    return rule->group_rule == HD_GROUPS_MAX || size == 1 ? best : best + second;
}

/* Sets the selection score of every expert outside the top_groups best groups to -inf. */
static void keep_best_groups(const hd_router_rule *rule, float *choice) {
    const int32_t size = rule->n_experts / rule->n_groups;
    float *kept = choice + rule->n_experts; /* the caller's scratch has one flag per group */
    /* A group is dropped if top_groups others have larger scores; a lower number wins a tie.
     * All groups are compared before any is masked. */
    for (int32_t g = 0; g < rule->n_groups; g++) {
        float own = group_score(rule, choice, g);
        int32_t ahead = 0;
        for (int32_t o = 0; o < rule->n_groups; o++) {
            float other = group_score(rule, choice, o);
            ahead += other > own || (other == own && o < g);
        }
        kept[g] = ahead < rule->top_groups ? 1.0f : 0.0f;
    }
    for (int32_t e = 0; e < rule->n_experts; e++) {
        if (kept[e / size] == 0.0f) choice[e] = -INFINITY;
    }
}

static void choose(const hd_router_rule *rule, float *choice, int32_t *expert) {
    for (int32_t k = 0; k < rule->top_k; k++) {
        int32_t best = -1;
        for (int32_t e = 0; e < rule->n_experts; e++) {
            bool taken = false;
            for (int32_t j = 0; j < k; j++) taken |= expert[j] == e;
            if (!taken && (best < 0 || choice[e] > choice[best])) best = e;
        }
        expert[k] = best;
    }
}

int32_t ops_moe_topk_scratch(const hd_router_rule *rule) {
    return 2 * rule->n_experts + rule->n_groups;
}

void ops_moe_topk_row(const hd_moe_topk_args *a, int32_t row, float *scratch) {
    const hd_router_rule *rule = &a->rule;
    const int32_t n = rule->n_experts, k = rule->top_k;
    float *score = scratch, *choice = scratch + n;
    int32_t *expert = a->expert + (int64_t)row * k;
    float *weight = a->weight + (int64_t)row * k;
    score_experts(a, a->logits + (int64_t)row * n, score);
    if (a->table) {
        memcpy(expert, a->table + (int64_t)a->tokens[row] * k, (size_t)k * sizeof *expert);
    } else {
        for (int32_t e = 0; e < n; e++) choice[e] = score[e] + (a->bias ? a->bias[e] : 0.0f);
        if (rule->group_rule != HD_GROUPS_NONE) keep_best_groups(rule, choice);
        choose(rule, choice, expert);
    }
    float total = 0.0f;
    for (int32_t j = 0; j < k; j++) total += score[expert[j]];
    for (int32_t j = 0; j < k; j++) {
        float w = score[expert[j]];
        if (rule->normalize) w /= total + 1e-20f;
        weight[j] = w * rule->scale;
    }
    if (a->log.data) ops_replay_row(&a->log, row, expert, k);
}

void hd_moe_topk_ref(hd_stream *s, const hd_moe_topk_args *a) {
    const size_t n = (size_t)ops_moe_topk_scratch(&a->rule);
    float *scratch = hd_stream_scratch(s, 0, n * sizeof *scratch);
    for (int32_t r = 0; r < a->rows; r++) ops_moe_topk_row(a, r, scratch);
}

static void sort_by_slot(const hd_moe_permute_args *a, int32_t n) {
    memset(a->offset, 0, (size_t)(a->n_slots + 1) * sizeof *a->offset);
    for (int32_t i = 0; i < n; i++) a->offset[ops_slot_of(a, i) + 1]++;
    for (int32_t e = 0; e < a->n_slots; e++) a->offset[e + 1] += a->offset[e];
    for (int32_t i = 0; i < n; i++) {
        /* shifts every offset to its successor */
        int32_t at = a->offset[ops_slot_of(a, i)]++;
        a->assignment[at] = i;
        a->place[i] = at;
    }
    memmove(a->offset + 1, a->offset, (size_t)a->n_slots * sizeof *a->offset);
    a->offset[0] = 0;
}

static void place_as_split(hd_stream *s, const hd_moe_permute_args *a, int32_t n) {
    const hd_split_graph g = hd_split_graph_in(a->graph, hd_permute_shape(a));
    const size_t bytes = (size_t)a->n_experts * sizeof(int32_t);
    int32_t *next = hd_stream_scratch(s, 0, bytes);
    memset(next, 0, bytes);
    for (int32_t i = 0; i < n; i++) ops_place(a, &g, i, next[a->expert[i]]++);
}

void hd_moe_permute_ref(hd_stream *s, const hd_moe_permute_args *a) {
    const int32_t n = a->rows * a->top_k;
    if (a->first) {
        place_as_split(s, a, n);
    } else {
        sort_by_slot(a, n);
    }
    for (int32_t i = 0; a->load && i < n; i++) {
        const int32_t phase = a->phase ? a->phase[i / a->top_k] : 0;
        if (phase >= 0) a->load[phase * a->load_stride + a->expert[i]]++;
    }
}

int32_t ops_next_choice(const int32_t *expert, int32_t top_k, int32_t last) {
    int32_t best = -1;
    for (int32_t j = 0; j < top_k; j++) {
        const int32_t e = expert[j];
        if (last >= 0 && (e < expert[last] || (e == expert[last] && j <= last))) continue;
        if (best < 0 || e < expert[best]) best = j;
    }
    return best;
}

void hd_moe_combine_ref(hd_stream *s, const hd_moe_combine_args *a) {
    const int64_t out_row = stride_of(a->out, a->cols);
    const int64_t shared_row = stride_of(a->shared, a->cols);
    (void)s;
    for (int32_t t = 0; t < a->rows; t++) {
        const int32_t *place = a->place + (int64_t)t * a->top_k;
        const int32_t *expert = a->expert + (int64_t)t * a->top_k;
        for (int32_t c = 0; c < a->cols; c++) {
            double sum = a->shared.data ? (double)act_in(a->shared)[t * shared_row + c] : 0.0;
            int32_t j = -1;
            for (int32_t k = 0; k < a->top_k; k++) {
                j = ops_next_choice(expert, a->top_k, j);
                double weight = a->weight ? (double)a->weight[(int64_t)t * a->top_k + j] : 1.0;
                sum += weight * (double)act_in(a->y)[(int64_t)place[j] * a->cols + c];
            }
            act(a->out)[t * out_row + c] = (float)sum;
        }
    }
}
