/* heap.h - an indexed binary heap: the item with the smallest key, and removal of any item.
 *
 * Items are numbers 0 .. cap - 1, each in the heap at most once. Equal keys leave in order
 * of item number, so results are reproducible. Memory is allocated once, at init. */
#ifndef HD_BASE_HEAP_H
#define HD_BASE_HEAP_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct hd_heap {
    int32_t n, cap;
    int32_t *items; /* [cap] heap order */
    int32_t *place; /* [cap] index of an item in items, -1: absent */
    int64_t *key;   /* [cap] */
} hd_heap;

hd_status hd_heap_init(hd_heap *h, int32_t cap, hd_err *err);
void hd_heap_deinit(hd_heap *h); /* an all-zero heap is fine */

void hd_heap_clear(hd_heap *h);

/* Adds the item, or changes its key. */
void hd_heap_put(hd_heap *h, int32_t item, int64_t key);
void hd_heap_remove(hd_heap *h, int32_t item); /* an absent item is fine */
bool hd_heap_has(const hd_heap *h, int32_t item);
int32_t hd_heap_min(const hd_heap *h); /* -1 when empty */

#endif
