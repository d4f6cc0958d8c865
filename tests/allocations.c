/* allocations.c - the linker sends every call of malloc and its relatives through here first
 * (-Wl,--wrap in the Makefile), also in front of a sanitizer's own. */
#include "allocations.h"

#include <stdatomic.h>
#include <stddef.h>

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t alignment, size_t n);
int __real_posix_memalign(void **p, size_t alignment, size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_aligned_alloc(size_t alignment, size_t n);
int __wrap_posix_memalign(void **p, size_t alignment, size_t n);

static atomic_llong count;

int64_t allocations(void) {
    return atomic_load_explicit(&count, memory_order_relaxed);
}

static void add_one(void) {
    atomic_fetch_add_explicit(&count, 1, memory_order_relaxed);
}

void *__wrap_malloc(size_t n) {
    add_one();
    return __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size) {
    add_one();
    return __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n) {
    add_one();
    return __real_realloc(p, n);
}

void *__wrap_aligned_alloc(size_t alignment, size_t n) {
    add_one();
    return __real_aligned_alloc(alignment, n);
}

int __wrap_posix_memalign(void **p, size_t alignment, size_t n) {
    add_one();
    return __real_posix_memalign(p, alignment, n);
}
