/* memory.h - large aligned blocks of host memory, with huge pages.
 *
 * Blocks are zeroed and aligned to HD_CACHE_LINE. Blocks of 2 MiB and more are mapped and
 * advised to use huge pages, which the kernel may or may not grant. */
#ifndef HD_BASE_MEMORY_H
#define HD_BASE_MEMORY_H

#include <stddef.h>

#include "base/status.h"

#define HD_CACHE_LINE 64

HD_BEGIN_C

typedef struct hd_block {
    void *data;    /* NULL: no block */
    size_t bytes;  /* as requested */
    size_t mapped; /* 0: from the heap; otherwise the length of the mapping */
} hd_block;

/* Allocates a block. bytes may be 0: then out->data is NULL. `what` names the block in the
 * error. */
hd_status hd_block_init(hd_block *out, size_t bytes, const char *what, hd_err *err);

/* The same without asking whether the system has so much: a page takes memory when it is written.
 * For runs that compute addresses and sizes of far more than this machine has. */
hd_status hd_block_init_untouched(hd_block *out, size_t bytes, const char *what, hd_err *err);

/* Returns the bytes that the system could allocate now without swapping; 0: unknown. */
size_t hd_memory_free(void);

/* Gives the memory of a mapped block back to the system and keeps its address: it reads as zeros,
 * until it is written again. Returns the bytes; 0: the block is too small to be mapped. */
size_t hd_block_discard(hd_block *b);

void hd_block_deinit(hd_block *b); /* an all-zero block is fine */

HD_END_C

#endif
