/* arena.h - an arena (bump) allocator: one block of memory, freed as a whole.
 *
 * The arena computes addresses and never touches the memory, so base may be a device
 * pointer. base must be aligned for the largest alignment requested. With hd_arena_measure()
 * it only counts: run the layout function once to learn the size, allocate it, and run the
 * same function again to place. */
#ifndef HD_BASE_ARENA_H
#define HD_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct hd_arena {
    uint8_t *base; /* NULL while measuring */
    size_t cap;
    size_t used;
    size_t peak;
    bool full; /* an allocation did not fit; sticky */
} hd_arena;

hd_arena hd_arena_measure(void);
hd_arena hd_arena_over(void *base, size_t cap);

/* Allocates bytes at a multiple of align, a power of two. Returns NULL while measuring and
 * when the arena is full. */
void *hd_arena_take(hd_arena *a, size_t bytes, size_t align);

/* Frees everything allocated since; mark is an earlier value of a->used. */
void hd_arena_rewind(hd_arena *a, size_t mark);

#endif
