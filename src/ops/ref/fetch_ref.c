/* fetch_ref.c - moe_fetch in plain C: which experts a round has, the slots of those that are missing,
 * and their copies. */
#include <string.h>

#include "ops/ref/ref_internal.h"

static bool has_rows(const hd_moe_fetch_args *a, int32_t expert) {
    return a->offset[expert + 1] > a->offset[expert];
}

/* Returns where the round ends that begins with expert `first`. */
static int32_t end_of_round(const hd_moe_fetch_args *a, int32_t first) {
    int32_t e = first;
    for (int32_t selected = 0, missing = 0; e < a->n_experts; e++) {
        if (!has_rows(a, e)) continue;
        missing += a->slots.slot[e] < 0;
        if (++selected > a->slots.n_slots || missing > a->most) break;
    }
    return e;
}

/* Whether slot x is given away before slot y. */
static bool goes_first(const hd_moe_fetch_args *a, int32_t end, int32_t x, int32_t y) {
    const hd_expert_slots *s = &a->slots;
    const bool x_later = s->holder[x] >= end && has_rows(a, s->holder[x]);
    const bool y_later = s->holder[y] >= end && has_rows(a, s->holder[y]);
    return x_later != y_later ? y_later : s->used[x] < s->used[y];
}

/* Returns the slot that a missing expert takes. */
static int32_t choose_slot(const hd_moe_fetch_args *a, int32_t first, int32_t end) {
    const hd_expert_slots *s = &a->slots;
    int32_t best = -1;
    for (int32_t i = 0; i < s->n_slots; i++) {
        const int32_t e = s->holder[i];
        if (e >= first && e < end && has_rows(a, e)) continue;
        if (best < 0 || goes_first(a, end, i, best)) best = i;
    }
    return best;
}

static int64_t expert_bytes(const hd_expert_layout *l) {
    int64_t bytes = 0;
    for (int32_t m = 0; m < HD_EXPERT_MATRICES; m++)
        bytes += l->data_bytes[m] + l->scale_bytes[m];
    return bytes;
}

static void set_table(const hd_moe_fetch_args *a, int32_t expert, int32_t at) {
    const hd_expert_layout *l = &a->layout;
    uint8_t *slot = a->slots.memory + at * a->slots.slot_bytes;
    for (int32_t m = 0; m < HD_EXPERT_MATRICES; m++) {
        hd_weight *w = &a->table[m * a->n_experts + expert];
        *w = a->from[m * a->n_experts + expert];
        w->data = slot + l->data_at[m];
        if (l->scale_bytes[m]) w->scale = slot + l->scale_at[m];
    }
}

static void take_slot(const hd_moe_fetch_args *a, int32_t expert, int32_t at) {
    const hd_expert_slots *s = &a->slots;
    if (s->holder[at] >= 0) s->slot[s->holder[at]] = -1;
    s->holder[at] = expert;
    s->slot[expert] = at;
    a->counts->fetched++;
    a->counts->fetched_bytes += expert_bytes(&a->layout);
    const int32_t n = ++a->todo[0];
    a->todo[n] = expert;
    a->todo[a->n_experts + n] = at;
}

static int32_t clamp(int32_t x, int32_t low, int32_t high) {
    return x < low ? low : x > high ? high : x;
}

int32_t ops_fetch_plan(const hd_moe_fetch_args *a) {
    const hd_expert_slots *s = &a->slots;
    const int32_t first = a->first ? 0 : *a->end, end = end_of_round(a, first);
    const int64_t now = a->first ? ++*s->clock : *s->clock;
    a->todo[0] = 0;
    for (int32_t e = first; e < end; e++) {
        if (!has_rows(a, e)) continue;
        a->counts->used++;
        a->counts->staged += s->slot[e] >= 0;
        if (s->slot[e] < 0) take_slot(a, e, choose_slot(a, first, end));
        s->used[s->slot[e]] = now;
        set_table(a, e, s->slot[e]);
    }
    for (int32_t e = 0; e <= a->n_experts; e++) {
        a->round_offset[e] = clamp(a->offset[e], a->offset[first], a->offset[end]);
    }
    *a->end = end;
    if (a->seen) *a->seen = *a->counts;
    return a->todo[0];
}

static void copy(uint8_t *slot, int64_t at, const void *from, int64_t bytes) {
    if (bytes > 0) memcpy(slot + at, from, (size_t)bytes);
}

void ops_fetch_matrix(const hd_moe_fetch_args *a, int32_t i) {
    const hd_expert_layout *l = &a->layout;
    const int32_t n = 1 + i / HD_EXPERT_MATRICES, m = i % HD_EXPERT_MATRICES;
    const hd_weight *w = &a->from[m * a->n_experts + a->todo[n]];
    uint8_t *slot = a->slots.memory + a->todo[a->n_experts + n] * a->slots.slot_bytes;
    copy(slot, l->data_at[m], w->data, l->data_bytes[m]);
    copy(slot, l->scale_at[m], w->scale, l->scale_bytes[m]);
}

void hd_moe_fetch_ref(hd_stream *s, const hd_moe_fetch_args *a) {
    const int32_t n = ops_fetch_plan(a) * HD_EXPERT_MATRICES;
    (void)s;
    for (int32_t i = 0; i < n; i++) ops_fetch_matrix(a, i);
}
