/* eplb_split.c - a graph of moe/split.h with memory for its splits. */
#include <stdlib.h>

#include "moe/eplb.h"
#include "moe/split.h"

struct hd_eplb_splitter {
    hd_split_graph graph;
    int32_t *block;
    void *scratch;
};

void hd_eplb_splitter_close(hd_eplb_splitter *s) {
    if (!s) return;
    free(s->block);
    free(s->scratch);
    free(s);
}

hd_status hd_eplb_splitter_open(hd_eplb_splitter **out, const int32_t *slot_expert,
                                const int32_t *rank_slot0, int32_t experts, int32_t ranks,
                                hd_err *err) {
    const hd_split_shape shape = {experts, rank_slot0[ranks], ranks};
    hd_eplb_splitter *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory for a splitter");
    s->block = calloc((size_t)hd_split_words(shape), sizeof *s->block);
    s->scratch = malloc(hd_split_scratch_bytes(shape));
    if (!s->block || !s->scratch) {
        hd_eplb_splitter_close(s);
        return HD_FAIL(err, HD_ENOMEM, "no memory to split over %d ranks", ranks);
    }
    s->graph = hd_split_graph_in(s->block, shape);
    hd_split_graph_make(&s->graph, slot_expert, rank_slot0);
    *out = s;
    return HD_OK;
}

int64_t hd_eplb_split(hd_eplb_splitter *s, const int32_t *rows, int32_t *out,
                      bool *certificate) {
    return hd_split_rows(&s->graph, rows, out, s->scratch, certificate);
}
