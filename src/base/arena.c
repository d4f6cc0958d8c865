/* arena.c - arena allocation on addresses; see arena.h. */
#include "base/arena.h"

#include <assert.h>

hd_arena hd_arena_measure(void) {
    return (hd_arena){.cap = SIZE_MAX};
}

hd_arena hd_arena_over(void *base, size_t cap) {
    return (hd_arena){.base = base, .cap = cap};
}

void *hd_arena_take(hd_arena *a, size_t bytes, size_t align) {
    assert(align != 0 && (align & (align - 1)) == 0);
    size_t pad = (0 - a->used) & (align - 1);
    if (pad > a->cap - a->used || bytes > a->cap - a->used - pad) {
        a->full = true;
        return NULL;
    }
    size_t at = a->used + pad;
    a->used = at + bytes;
    if (a->used > a->peak) a->peak = a->used;
    return a->base ? a->base + at : NULL;
}

void hd_arena_rewind(hd_arena *a, size_t mark) {
    assert(mark <= a->used);
    a->used = mark;
}
