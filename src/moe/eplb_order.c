/* eplb_order.c - the order of loads: all of them sorted, or the first one again and again. */
#include <string.h>

#include "moe/eplb_internal.h"

/* Sorts from[n] by a byte of their keys into to[n], stably. */
static void sort_by_byte(const uint64_t *keys, int32_t shift, const int32_t *from, int32_t *to,
                         int32_t n, const uint32_t *count) {
    uint32_t next[256], at = 0;
    for (int32_t digit = 0; digit < 256; digit++) {
        next[digit] = at;
        at += count[digit];
    }
    for (int32_t i = 0; i < n; i++) to[next[keys[from[i]] >> shift & 255]++] = from[i];
}

static bool is_sorted(const uint64_t *keys, const int32_t *order, int32_t n) {
    bool sorted = true;
    for (int32_t i = 1; i < n; i++) sorted &= keys[order[i - 1]] <= keys[order[i]];
    return sorted;
}

/* By the bytes from `low` on, the lowest first. Bytes that all share take no pass. */
static void sort_from(const eplb_layer *l, int32_t low, int32_t n, int32_t *order,
                      int32_t *spare) {
    uint32_t counts[8][256];
    const uint64_t *keys = l->keys;
    memset(counts + low, 0, (size_t)(8 - low) * sizeof *counts);
    for (int32_t i = 0; i < n; i++) {
        order[i] = i;
        for (int32_t k = low; k < 8; k++) counts[k][keys[i] >> 8 * k & 255]++;
    }
    int32_t *from = order, *to = spare;
    for (int32_t k = low; k < 8 && n > 0; k++) {
        if (counts[k][keys[0] >> 8 * k & 255] == (uint32_t)n) continue;
        sort_by_byte(keys, 8 * k, from, to, n, counts[k]);
        int32_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != order) memcpy(order, from, (size_t)n * sizeof *order);
}

/* The upper halves of loads seldom tie where the lower ones differ. */
void eplb_sort(const eplb_layer *l, const double *value, int32_t n, int32_t *order,
               int32_t *spare) {
    for (int32_t i = 0; i < n; i++) l->keys[i] = eplb_falling_key(value[i]);
    sort_from(l, 4, n, order, spare);
    if (!is_sorted(l->keys, order, n)) sort_from(l, 0, n, order, spare);
}

eplb_tree eplb_tree_of(const eplb_layer *l, int32_t n) {
    eplb_tree t = {l->tree, 1};
    while (t.leaves < n) t.leaves *= 2;
    for (int32_t i = 0; i < t.leaves; i++) t.entry[t.leaves + i] = (eplb_entry){EPLB_OUT, i};
    return t;
}

void eplb_tree_build(const eplb_tree *t) {
    eplb_entry *entry = t->entry;
    for (int32_t k = t->leaves - 1; k > 0; k--) {
        const bool right = entry[2 * k + 1].key < entry[2 * k].key;
        entry[k] = entry[2 * k + right];
    }
}
