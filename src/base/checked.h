/* checked.h - overflow-checked arithmetic on sizes.
 *
 * Every size that depends on a file, an option or a request is computed with these
 * functions. They return false on overflow and leave *out unchanged. */
#ifndef HD_BASE_CHECKED_H
#define HD_BASE_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool hd_add_size(size_t a, size_t b, size_t *out) {
    if (b > SIZE_MAX - a) return false;
    *out = a + b;
    return true;
}

static inline bool hd_mul_size(size_t a, size_t b, size_t *out) {
    if (b != 0 && a > SIZE_MAX / b) return false;
    *out = a * b;
    return true;
}

/* Rounds a up to a multiple of align, a power of two. */
static inline bool hd_align_size(size_t a, size_t align, size_t *out) {
    size_t up;
    if (!hd_add_size(a, align - 1, &up)) return false;
    *out = up & ~(align - 1);
    return true;
}

static inline int64_t hd_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static inline int64_t hd_min_i64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t hd_max_i64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static inline int32_t hd_min_i32(int32_t a, int32_t b) {
    return a < b ? a : b;
}

static inline int32_t hd_max_i32(int32_t a, int32_t b) {
    return a > b ? a : b;
}

static inline bool hd_is_within(int64_t n, int64_t least, int64_t most) {
    return n >= least && n <= most;
}

#endif
