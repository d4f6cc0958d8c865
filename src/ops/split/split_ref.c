/* split_ref.c - the rows of experts counted, and divided over their slots, as the only CPU form: the
 * split is a walk along a graph. */
#include <string.h>

#include "ops/ref/ref_internal.h"

void hd_moe_count_ref(hd_stream *s, const hd_moe_count_args *a) {
    (void)s;
    memset(a->counts, 0, (size_t)a->n_experts * sizeof *a->counts);
    for (int32_t i = 0; i < a->rows * a->top_k; i++) a->counts[a->expert[i]]++;
}

/* Of every expert: all rows, those of the sources before, this source's. */
typedef struct sources {
    int32_t *all, *before, *own;
} sources;

static void add_sources(const hd_moe_split_args *a, const sources *to) {
    const size_t bytes = (size_t)a->shape.experts * sizeof *to->all;
    memset(to->before, 0, bytes);
    memset(to->all, 0, bytes);
    for (int32_t k = 0; k < a->n_sources; k++) {
        const int32_t *counts = a->counts + (int64_t)k * a->shape.experts;
        if (k == a->source) {
            memcpy(to->before, to->all, bytes);
            memcpy(to->own, counts, bytes);
        }
        for (int32_t e = 0; e < a->shape.experts; e++) to->all[e] += counts[e];
    }
}

static void count_own(hd_stream *s, const hd_moe_split_args *a, const sources *to) {
    const size_t bytes = (size_t)a->shape.experts * sizeof *to->all;
    hd_moe_count_ref(s, &(hd_moe_count_args){.counts = to->own,
                                             .expert = a->expert,
                                             .rows = a->rows,
                                             .top_k = a->top_k,
                                             .n_experts = a->shape.experts});
    memset(to->before, 0, bytes);
    memcpy(to->all, to->own, bytes);
}

/* Where first has the rows of all sources, this one's part takes their place. */
static void take_part(const hd_moe_split_args *a, const hd_split_graph *g,
                      const sources *from) {
    for (int32_t e = 0; e < a->shape.experts; e++) {
        hd_split_left left = {from->all[e], from->before[e], from->own[e]};
        int32_t number = 0;
        for (int32_t k = g->holder0[e]; k < g->holder0[e + 1]; k++) {
            const int32_t slot = g->holder[k].slot;
            const int32_t n = hd_split_part(&left, a->first[slot]);
            a->first[slot] = number;
            a->offset[slot + 1] = n;
            number += n;
        }
    }
}

void hd_moe_split_ref(hd_stream *s, const hd_moe_split_args *a) {
    const hd_split_graph g = hd_split_graph_in(a->graph, a->shape);
    const size_t experts = (size_t)a->shape.experts, bytes = hd_split_scratch_bytes(a->shape);
    uint8_t *scratch = hd_stream_scratch(s, 0, bytes + 3 * experts * sizeof(int32_t));
    sources rows = {.all = (int32_t *)(void *)(scratch + bytes)};
    rows.before = rows.all + experts;
    rows.own = rows.before + experts;
    if (a->counts) {
        add_sources(a, &rows);
    } else {
        count_own(s, a, &rows);
    }
    hd_split_rows(&g, rows.all, a->first, scratch, NULL);
    memset(a->offset, 0, ((size_t)a->shape.slots + 1) * sizeof *a->offset);
    take_part(a, &g, &rows);
    for (int32_t i = 0; i < a->shape.slots; i++) a->offset[i + 1] += a->offset[i];
}
