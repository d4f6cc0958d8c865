/* expert_table.c - what the matrices of all expert slots have in common. */
#include "base/expert_table.h"

typedef struct addresses {
    const uint8_t *lowest, *highest;
    uintptr_t low_bits; /* of any of them */
} addresses;

static void add(addresses *a, const void *p) {
    const uint8_t *at = p;
    if (!at) return;
    if (!a->lowest || (uintptr_t)at < (uintptr_t)a->lowest) a->lowest = at;
    if ((uintptr_t)at > (uintptr_t)a->highest) a->highest = at;
    a->low_bits |= (uintptr_t)at % HD_EXPERT_ALIGN;
}

static const void *lowest_of(const addresses *a) {
    if (!a->lowest) return NULL;
    return a->lowest - (uintptr_t)a->lowest % HD_EXPERT_ALIGN + a->low_bits;
}

static size_t range_of(const addresses *a) {
    return (size_t)((uintptr_t)a->highest - (uintptr_t)a->lowest);
}

static bool same_format(const hd_weight *a, const hd_weight *b) {
    return a->type == b->type && a->scale_type == b->scale_type &&
           a->block_rows == b->block_rows && a->block_cols == b->block_cols &&
           !a->scale == !b->scale;
}

void hd_expert_table_init(hd_expert_table *out, const hd_weight *w, int32_t n) {
    addresses data = {0}, scale = {0};
    const hd_weight *any = NULL;
    *out = (hd_expert_table){.slots = w, .n = n, .one_format = true, .one_global = true};
    for (int32_t i = 0; i < n; i++) {
        if (!w[i].data) continue;
        if (!any) any = &w[i];
        add(&data, w[i].data);
        add(&scale, w[i].scale);
        out->one_format &= same_format(&w[i], any);
        out->one_global &= w[i].global == any->global;
    }
    if (any) out->shape = *any;
    out->shape.data = lowest_of(&data);
    out->shape.scale = lowest_of(&scale);
    out->data_range = range_of(&data);
}

void hd_expert_table_extend(hd_expert_table *t, const hd_weight *w) {
    const uintptr_t at = (uintptr_t)w->data;
    uintptr_t low = (uintptr_t)t->shape.data, high = low + t->data_range;
    if (!at || !low) return;
    if (at < low) t->shape.data = w->data;
    if (at < low) low = at;
    if (at > high) high = at;
    t->data_range = high - low;
}
