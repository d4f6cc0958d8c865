/* merge_queue.c - see merge_queue_internal.h. */
#include "tokenizer/merge_queue_internal.h"

#include <stdlib.h>

#include "base/checked.h"

enum {
    LINES_FROM_BYTES = 4096
}; /* with fewer entries, one heap fits the cache and is as fast */

static bool heap_push(text_heap *h, uint64_t key) {
    if (h->n == h->cap) {
        size_t cap = h->cap * 2 + 64, bytes;
        if (!hd_mul_size(cap, sizeof *h->keys, &bytes)) return false;
        uint64_t *wider = realloc(h->keys, bytes);
        if (!wider) return false;
        h->keys = wider;
        h->cap = cap;
    }
    size_t at = h->n++;
    while (at > 0 && h->keys[(at - 1) / 2] > key) {
        h->keys[at] = h->keys[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    h->keys[at] = key;
    return true;
}

static void heap_pop(text_heap *h) {
    uint64_t key = h->keys[--h->n];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= h->n) break;
        if (child + 1 < h->n && h->keys[child + 1] < h->keys[child]) child++;
        if (h->keys[child] >= key) break;
        h->keys[at] = h->keys[child];
        at = child;
    }
    h->keys[at] = key;
}

bool text_merge_queue_start(text_merge_queue *q, size_t n, size_t n_ranks) {
    q->loose.n = q->ranks.n = q->n_nodes = 0;
    q->use_lines = n >= LINES_FROM_BYTES;
    if (!q->use_lines || q->lines) return true;
    q->lines = calloc(n_ranks + 1, sizeof *q->lines);
    return q->lines != NULL;
}

void text_merge_queue_deinit(text_merge_queue *q) {
    free(q->loose.keys);
    free(q->ranks.keys);
    free(q->lines);
    free(q->nodes);
    *q = (text_merge_queue){0};
}

static bool reserve_node(text_merge_queue *q) {
    if (q->n_nodes < q->nodes_cap) return true;
    size_t cap = q->nodes_cap + q->nodes_cap / 2 + LINES_FROM_BYTES, bytes;
    if (cap > UINT32_MAX || !hd_mul_size(cap, sizeof *q->nodes, &bytes)) return false;
    text_line_node *wider = realloc(q->nodes, bytes);
    if (!wider) return false;
    q->nodes = wider;
    q->nodes_cap = cap;
    return true;
}

bool text_merge_queue_push(text_merge_queue *q, uint32_t rank, uint32_t position) {
    text_line *line = q->use_lines ? &q->lines[rank] : NULL;
    if (!line || (line->waiting && position <= line->last)) {
        return heap_push(&q->loose, (uint64_t)rank << 32 | position);
    }
    if (!reserve_node(q)) return false;
    uint32_t node = (uint32_t)q->n_nodes++;
    q->nodes[node] = (text_line_node){.position = position};
    if (line->waiting) {
        q->nodes[line->tail].next = node;
    } else {
        if (!heap_push(&q->ranks, rank)) return false;
        line->head = node;
        line->waiting = true;
    }
    line->tail = node;
    line->last = position;
    return true;
}

bool text_merge_queue_pop(text_merge_queue *q, uint32_t *rank, uint32_t *position) {
    uint64_t loose = q->loose.n > 0 ? q->loose.keys[0] : UINT64_MAX, key = UINT64_MAX;
    text_line *line = NULL;
    if (q->ranks.n > 0) {
        line = &q->lines[q->ranks.keys[0]];
        key = q->ranks.keys[0] << 32 | q->nodes[line->head].position;
    }
    if (loose == UINT64_MAX && !line) return false;
    if (loose < key) {
        key = loose;
        heap_pop(&q->loose);
    } else if (line->head == line->tail) {
        line->waiting = false;
        heap_pop(&q->ranks);
    } else {
        line->head = q->nodes[line->head].next;
    }
    *rank = (uint32_t)(key >> 32);
    *position = (uint32_t)key;
    return true;
}
