/* merge_queue_internal.h - a priority queue of the pending merges of one long piece, lowest
 * (rank, position) first. Merges of one rank are mostly found from left to right, so each
 * rank has a first-in first-out queue of positions, and a small heap orders the ranks.
 * Merges found out of order go to a second heap of (rank, position). Short pieces use the
 * second heap only. */
#ifndef HD_TOKENIZER_MERGE_QUEUE_INTERNAL_H
#define HD_TOKENIZER_MERGE_QUEUE_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct text_heap {
    uint64_t *keys;
    size_t n, cap;
} text_heap;

typedef struct text_line {
    uint32_t head, tail; /* node numbers; undefined unless the rank waits */
    uint32_t last;       /* position at the tail */
    bool waiting;
} text_line;

typedef struct text_line_node {
    uint32_t position, next;
} text_line_node;

typedef struct text_merge_queue {
    text_heap loose;       /* rank << 32 | position */
    text_heap ranks;       /* ranks with a queue that is not empty */
    text_line *lines;      /* [n_ranks], NULL until a piece is long enough */
    text_line_node *nodes; /* [nodes_cap], each used once per piece */
    size_t n_nodes, nodes_cap;
    bool use_lines;
} text_merge_queue;

/* Begins a piece of n bytes. The queue is then empty; it must be drained before the next
 * piece. */
bool text_merge_queue_start(text_merge_queue *q, size_t n, size_t n_ranks);
void text_merge_queue_deinit(text_merge_queue *q);

/* Returns false without memory. */
bool text_merge_queue_push(text_merge_queue *q, uint32_t rank, uint32_t position);

/* Removes the lowest entry; false if there is none. */
bool text_merge_queue_pop(text_merge_queue *q, uint32_t *rank, uint32_t *position);

#endif
