/* stream_internal.h - copies that leave what they write out of the caches, for readers on other cores. */
#ifndef HD_COMM_STREAM_INTERNAL_H
#define HD_COMM_STREAM_INTERNAL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <emmintrin.h>
#endif

/* memcpy; on other processors than x86-64 nothing else. What it wrote is ordered before what follows. */
static inline void comm_stream(void *to, const void *from, size_t n) {
#ifdef __x86_64__
    uint8_t *out = to;
    const uint8_t *in = from;
    const size_t head = (16 - (uintptr_t)to % 16) % 16, first = head < n ? head : n;
    memcpy(out, in, first);
    size_t i = first;
    for (; i + 16 <= n; i += 16) {
        _mm_stream_si128((__m128i *)(void *)(out + i),
                         _mm_loadu_si128((const __m128i *)(const void *)(in + i)));
    }
    if (i < n) memcpy(out + i, in + i, n - i);
    _mm_sfence();
#else
    memcpy(to, from, n);
#endif
}

#endif
