/* memory.c - heap below 2 MiB, anonymous mappings with huge-page advice above. */
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked.h"

#define HUGE_PAGE ((size_t)2 << 20)

static void *map_huge(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, bytes, MADV_HUGEPAGE); /* advice: a refusal costs speed, not correctness */
    return p;
}

hd_status hd_block_init(hd_block *out, size_t bytes, const char *what, hd_err *err) {
    *out = (hd_block){0};
    if (bytes == 0) return HD_OK;
    size_t rounded;
    if (!hd_align_size(bytes, bytes < HUGE_PAGE ? HD_CACHE_LINE : HUGE_PAGE, &rounded)) {
        return HD_FAIL(err, HD_ENOMEM, "%s: %zu bytes do not fit in memory", what, bytes);
    }
    void *p;
    if (rounded < HUGE_PAGE) {
        p = aligned_alloc(HD_CACHE_LINE, rounded);
        if (p) memset(p, 0, rounded);
    } else {
        p = map_huge(rounded);
    }
    if (!p) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for %zu bytes", what, bytes);
    *out = (hd_block){.data = p, .bytes = bytes, .mapped = rounded < HUGE_PAGE ? 0 : rounded};
    return HD_OK;
}

void hd_block_deinit(hd_block *b) {
    if (b->mapped) {
        munmap(b->data, b->mapped);
    } else {
        free(b->data);
    }
    *b = (hd_block){0};
}
