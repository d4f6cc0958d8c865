/* resident.c - attention to entries that lie in host memory (HiSparse): passes of as many rows as
 * have their chosen entries in a layer's buffer at once. */
#include "base/checked.h"
#include "model/model_internal.h"

void model_forget_entries(const model_step *s, int32_t layer, hd_pool_kind pool) {
    const hd_resident r = hd_kv_resident(s->kv, layer).resident;
    if (r.n == 0) return;
    s->m->env.ops->forget_entries(
        s->stream, &(hd_forget_entries_args){
                       .entries = model_pool(s, layer, pool),
                       .row_of = r.row_of,
                       .seq = s->b->device.seq,
                       .pos = s->b->device.pos,
                       .rows = s->b->n_rows,
                       .ratio = hd_max_i32(s->m->env.spec->layers[layer].compress_ratio, 1)});
}

/* The rows' chosen entries come into the buffer; then they attend to it. */
static void run_pass(const model_step *s, const hd_kv_buffer *b, const hd_attention_args *a) {
    hd_attention_args pass = *a;
    s->m->env.ops->resident(s->stream, &(hd_resident_args){.out = b->selected,
                                                           .selected = a->selected,
                                                           .entries = a->entries,
                                                           .buffer = b->resident,
                                                           .seq = a->seq,
                                                           .rows = a->rows,
                                                           .top_k = a->n_selected});
    pass.selected = b->selected;
    pass.entries = b->entries;
    s->m->env.ops->attention(s->stream, &pass);
}

void model_attention(const model_step *s, int32_t layer, const hd_attention_args *a) {
    const hd_kv_buffer b = hd_kv_resident(s->kv, layer);
    if (b.resident.n == 0 || !a->selected) {
        s->m->env.ops->attention(s->stream, a);
        return;
    }
    const int32_t most = b.resident.n / a->n_selected;
    for (int32_t first = 0; first < a->rows; first += most) {
        hd_attention_args part = *a;
        part.rows = hd_min_i32(most, a->rows - first);
        part.q = hd_rows_at(a->q, (int64_t)first * a->heads * a->k_dim);
        part.out = hd_rows_at(a->out, (int64_t)first * a->heads * a->v_dim);
        part.seq += first;
        part.pos += first;
        part.selected += (int64_t)first * a->n_selected;
        run_pass(s, &b, &part);
    }
}
