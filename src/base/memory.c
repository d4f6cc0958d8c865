/* memory.c - heap below 2 MiB, anonymous mappings with huge-page advice above. */
#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/file.h"
#include "base/terminal.h"

#define HUGE_PAGE ((size_t)2 << 20)

static void *map(size_t bytes, int flags) {
    void *p =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void *map_huge(size_t bytes) {
    void *p = map(bytes, 0);
    /* advice: a refusal costs speed, not correctness */
    if (p) madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

size_t hd_memory_free(void) {
    enum { MAX_BYTES = 1 << 16 };
    char *text = NULL;
    size_t n;
    const long pages = sysconf(_SC_AVPHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    size_t bytes = pages > 0 && page > 0 ? (size_t)pages * (size_t)page : 0;
    if (hd_file_read(&text, &n, "/proc/meminfo", MAX_BYTES, NULL) == HD_OK) {
        const char *line = strstr(text, "MemAvailable:");
        if (line) bytes = (size_t)strtoull(line + sizeof "MemAvailable:" - 1, NULL, 10) << 10;
    }
    free(text);
    return bytes;
}

static hd_status no_memory(size_t bytes, const char *what, hd_err *err) {
    char wanted[32], free_text[32];
    return HD_FAIL(err, HD_ENOMEM, "%s: no memory for %s; %s are free", what,
                   hd_bytes_text(wanted, sizeof wanted, (double)bytes),
                   hd_bytes_text(free_text, sizeof free_text, (double)hd_memory_free()));
}

hd_status hd_block_init(hd_block *out, size_t bytes, const char *what, hd_err *err) {
    *out = (hd_block){0};
    if (bytes == 0) return HD_OK;
    size_t rounded;
    if (!hd_align_size(bytes, bytes < HUGE_PAGE ? HD_CACHE_LINE : HUGE_PAGE, &rounded)) {
        return no_memory(bytes, what, err);
    }
    void *p;
    if (rounded < HUGE_PAGE) {
        p = aligned_alloc(HD_CACHE_LINE, rounded);
        if (p) memset(p, 0, rounded);
    } else {
        p = map_huge(rounded);
    }
    if (!p) return no_memory(bytes, what, err);
    *out = (hd_block){.data = p, .bytes = bytes, .mapped = rounded < HUGE_PAGE ? 0 : rounded};
    return HD_OK;
}

hd_status hd_block_init_untouched(hd_block *out, size_t bytes, const char *what, hd_err *err) {
    *out = (hd_block){0};
    size_t rounded;
    if (bytes < HUGE_PAGE) return hd_block_init(out, bytes, what, err);
    if (!hd_align_size(bytes, HUGE_PAGE, &rounded)) return no_memory(bytes, what, err);
    void *p = map(rounded, MAP_NORESERVE);
    if (!p) return no_memory(bytes, what, err);
    *out = (hd_block){.data = p, .bytes = bytes, .mapped = rounded};
    return HD_OK;
}

size_t hd_block_discard(hd_block *b) {
    return b->mapped && madvise(b->data, b->mapped, MADV_DONTNEED) == 0 ? b->mapped : 0;
}

void hd_block_deinit(hd_block *b) {
    if (b->mapped) {
        munmap(b->data, b->mapped);
    } else {
        free(b->data);
    }
    *b = (hd_block){0};
}
