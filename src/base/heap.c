/* heap.c - sift up, sift down, and a table of places. */
#include "base/heap.h"

#include <assert.h>
#include <stdlib.h>

hd_status hd_heap_init(hd_heap *h, int32_t cap, hd_err *err) {
    const size_t n = cap > 0 ? (size_t)cap : 1;
    *h = (hd_heap){.cap = cap};
    h->items = calloc(n, sizeof *h->items);
    h->place = calloc(n, sizeof *h->place);
    h->key = calloc(n, sizeof *h->key);
    if (!h->items || !h->place || !h->key) {
        hd_heap_deinit(h);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a heap of %d items", cap);
    }
    hd_heap_clear(h);
    return HD_OK;
}

void hd_heap_deinit(hd_heap *h) {
    free(h->items);
    free(h->place);
    free(h->key);
    *h = (hd_heap){0};
}

void hd_heap_clear(hd_heap *h) {
    h->n = 0;
    for (int32_t i = 0; i < h->cap; i++) h->place[i] = -1;
}

static bool before(const hd_heap *h, int32_t a, int32_t b) {
    return h->key[a] != h->key[b] ? h->key[a] < h->key[b] : a < b;
}

static void set(hd_heap *h, int32_t at, int32_t item) {
    h->items[at] = item;
    h->place[item] = at;
}

static void sift_up(hd_heap *h, int32_t at) {
    const int32_t item = h->items[at];
    while (at > 0 && before(h, item, h->items[(at - 1) / 2])) {
        set(h, at, h->items[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    set(h, at, item);
}

static void sift_down(hd_heap *h, int32_t at) {
    const int32_t item = h->items[at];
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= h->n) break;
        if (child + 1 < h->n && before(h, h->items[child + 1], h->items[child])) child++;
        if (!before(h, h->items[child], item)) break;
        set(h, at, h->items[child]);
        at = child;
    }
    set(h, at, item);
}

void hd_heap_put(hd_heap *h, int32_t item, int64_t key) {
    assert(item >= 0 && item < h->cap);
    if (h->place[item] < 0) set(h, h->n++, item);
    h->key[item] = key;
    sift_up(h, h->place[item]);
    sift_down(h, h->place[item]);
}

void hd_heap_remove(hd_heap *h, int32_t item) {
    const int32_t at = h->place[item];
    if (at < 0) return;
    h->place[item] = -1;
    const int32_t last = h->items[--h->n];
    if (last == item) return;
    set(h, at, last);
    sift_up(h, at);
    sift_down(h, h->place[last]);
}

bool hd_heap_has(const hd_heap *h, int32_t item) {
    return h->place[item] >= 0;
}

int32_t hd_heap_min(const hd_heap *h) {
    return h->n ? h->items[0] : -1;
}
