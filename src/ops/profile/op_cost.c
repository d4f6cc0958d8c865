/* op_cost.c - op cost: the minimum bytes and operations of each operator call (roofline
 * model).
 *
 * An integer that lies on the device (positions, rows of experts) is fetched. An element of
 * an activation or a cached key has the size that the reader says. Caches do not count: data
 * that many rows share counts once. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "ops/fused_internal.h"
#include "ops/profile/op_profiler_internal.h"

/* Returns n integers from `at`; valid until the next call. */
static const int32_t *fetch(ops_reader *r, const int32_t *at, int32_t n) {
    if (!r->stream) return at;
    if (n > r->cap) {
        int32_t *more = realloc(r->copy, (size_t)n * sizeof *more);
        if (!more) return NULL;
        r->copy = more;
        r->cap = n;
    }
    hd_stream_download(r->stream, r->copy, at, (size_t)n * sizeof *at);
    hd_stream_wait(r->stream);
    return r->copy;
}

/* Bytes of `rows` rows of a stored matrix with their scales. */
static double stored_bytes(const hd_weight *w, double rows) {
    const double row = (double)w->cols * hd_dtype_bits(w->type) / 8;
    const double blocks = w->scale ? (double)hd_ceil_div(w->cols, w->block_cols) *
                                         hd_dtype_bits(w->scale_type) / 8 / w->block_rows
                                   : 0;
    return rows * (row + blocks);
}

/* ---- GEMMs ---- */

typedef struct product {
    const hd_weight *w;
    double stored_rows; /* rows of w that are read */
    int32_t rows, outs, ins;
    double times; /* number of matrices per row */
    int32_t out_bytes;
} product;

static op_cost cost_of(const ops_reader *r, const product *p) {
    const double per_row =
        p->times * ((double)p->outs * p->out_bytes + (double)p->ins * r->act_bytes);
    return (op_cost){.w = p->w,
                     .rows = p->rows,
                     .outs = p->outs,
                     .ins = p->ins,
                     .bytes = stored_bytes(p->w, p->stored_rows) + p->rows * per_row,
                     .flops = 2.0 * p->rows * p->times * p->outs * p->ins};
}

op_cost ops_cost_linear(ops_reader *r, const hd_linear_args *a) {
    const product p = {a->w, a->w->rows, a->rows, a->w->rows, a->w->cols, 1, r->act_bytes};
    return cost_of(r, &p);
}

op_cost ops_cost_linear_heads(ops_reader *r, const hd_linear_heads_args *a) {
    const product p = {.w = a->w,
                       .stored_rows = (double)a->heads * a->n_rows,
                       .rows = a->rows,
                       .outs = a->transpose ? a->w->cols : a->n_rows,
                       .ins = a->transpose ? a->n_rows : a->w->cols,
                       .times = a->heads,
                       .out_bytes = r->act_bytes};
    return cost_of(r, &p);
}

/* The sum of b to a, which keeps its shape but for the outputs. */
static void add_cost(op_cost *a, op_cost b) {
    a->bytes += b.bytes;
    a->flops += b.flops;
    a->outs += b.outs;
}

/* x is read once. */
op_cost ops_cost_linear_set(ops_reader *r, const hd_linear_set_args *a) {
    op_cost all = {0};
    for (int32_t i = 0; i < a->n; i++) {
        const hd_linear_args one = ops_set_linear(a, i);
        const op_cost c = ops_cost_linear(r, &one);
        if (i == 0) {
            all = c;
            continue;
        }
        add_cost(&all, c);
        all.bytes -= (double)a->rows * a->w[i]->cols * r->act_bytes;
    }
    return all;
}

/* x is read once, and one row is written. */
op_cost ops_cost_linear_swiglu(ops_reader *r, const hd_linear_swiglu_args *a) {
    const hd_linear_args gate = ops_gate_linear(a, false), up = ops_gate_linear(a, true);
    op_cost c = ops_cost_linear(r, &gate);
    add_cost(&c, ops_cost_linear(r, &up));
    c.bytes -= (double)a->rows * (a->up_w->cols + a->up_w->rows) * r->act_bytes;
    return c;
}

/* Counts only the experts that have a row, and a token's row once for all its experts. */
op_cost ops_cost_grouped_gemm(ops_reader *r, const hd_grouped_gemm_args *a) {
    const hd_weight *shape = &a->w->shape;
    const int32_t n_slots = a->w->n;
    const int32_t *offset = fetch(r, a->offset, n_slots + 1);
    int32_t used = 0;
    for (int32_t e = 0; offset && e < n_slots; e++) used += offset[e + 1] > offset[e];
    const int32_t places = offset ? offset[n_slots] : a->n_places;
    const product p = {.w = shape,
                       .stored_rows = (double)used * shape->rows,
                       .rows = places,
                       .outs = shape->rows,
                       .ins = shape->cols,
                       .times = 1,
                       .out_bytes = r->act_bytes};
    op_cost c = cost_of(r, &p);
    c.used = used;
    c.rows = a->n_places; /* the shape is named by the bound that the host knows */
    const double again = a->assignment ? 1 - 1.0 / a->top_k : 0;
    c.bytes -= again * places * shape->cols * r->act_bytes;
    return c;
}

op_cost ops_cost_grouped_swiglu(ops_reader *r, const hd_grouped_swiglu_args *a) {
    const hd_grouped_gemm_args gate = ops_gate_grouped(a, false);
    const hd_grouped_gemm_args up = ops_gate_grouped(a, true);
    const hd_weight *shape = &a->up_w->shape;
    op_cost c = ops_cost_grouped_gemm(r, &gate);
    const double places = c.flops / (2.0 * shape->rows * shape->cols);
    add_cost(&c, ops_cost_grouped_gemm(r, &up));
    c.bytes -= places * (shape->cols / (a->assignment ? (double)a->top_k : 1.0) + shape->rows) *
               r->act_bytes;
    return c;
}

/* ---- keys ---- */

typedef struct keys {
    double seen, shared; /* keys that all rows see; distinct keys in memory */
} keys;

static op_cost keys_cost(const hd_paged *pool, const keys *k, int32_t rows, int32_t heads,
                         int32_t width, double per_key) {
    return (op_cost){.rows = rows,
                     .outs = heads,
                     .ins = width,
                     .bytes = k->shared * (double)hd_paged_entry_bytes(pool),
                     .flops = 2.0 * heads * k->seen * per_key};
}

/* Packs positions in the low half and sequences in the high half, as visible keys depend on
 * both. */
static int32_t *fetch_rows(ops_reader *r, const int32_t *pos, const int32_t *seq, int32_t n) {
    int32_t *rows = malloc(2 * (size_t)n * sizeof *rows + 1);
    if (!rows) return NULL;
    const int32_t *from = fetch(r, pos, n);
    for (int32_t i = 0; i < n; i++) rows[i] = from ? from[i] : 0;
    from = fetch(r, seq, n);
    for (int32_t i = 0; i < n; i++) rows[n + i] = from ? from[i] : 0;
    return rows;
}

static double row_keys(const hd_attention_args *a, int32_t pos) {
    const double window = a->window ? hd_min_i32(a->window, pos + 1) : 0;
    if (a->ratio == 0) return window;
    const int32_t all = (pos + 1) / a->ratio;
    return window + (a->selected ? hd_min_i32(a->n_selected, all) : all);
}

/* Keys that rows of one sequence share are read once: its last row sees them all. */
op_cost ops_cost_attention(ops_reader *r, const hd_attention_args *a) {
    int32_t *rows = fetch_rows(r, a->pos, a->seq, a->rows);
    keys k = {0};
    for (int32_t i = 0; rows && i < a->rows; i++) {
        const bool last = i + 1 == a->rows || rows[a->rows + i + 1] != rows[a->rows + i];
        const double n = row_keys(a, rows[i]);
        k.seen += n;
        if (a->selected || last) k.shared += n;
    }
    free(rows);
    op_cost c = keys_cost(a->window ? &a->recent : &a->entries, &k, a->rows, a->heads, a->k_dim,
                          (double)a->k_dim + a->v_dim);
    c.bytes += (double)a->rows * a->heads * ((double)a->k_dim + a->v_dim) * r->act_bytes;
    return c;
}

/* The rows' keys; keys that a sequence's rows share are those of its last row. */
static keys naive_keys(ops_reader *r, const hd_seqs *seqs, int32_t *rows) {
    const size_t bytes = ((size_t)seqs->n + 1) * sizeof(int32_t);
    int32_t *first_row = malloc(bytes);
    const int32_t *from = fetch(r, seqs->first_row, seqs->n + 1);
    keys k = {0};
    *rows = 0;
    if (first_row && from) {
        memcpy(first_row, from, bytes);
        *rows = first_row[seqs->n] - first_row[0];
        from = fetch(r, seqs->pos, first_row[seqs->n]);
        for (int32_t s = 0; from && s < seqs->n; s++) {
            const int32_t first = first_row[s], end = first_row[s + 1];
            for (int32_t i = first; i < end; i++) k.seen += from[i] + 1;
            k.shared += end > first ? from[end - 1] + 1 : 0;
        }
    }
    free(first_row);
    return k;
}

op_cost ops_cost_attention_naive(ops_reader *r, const hd_attention_naive_args *a) {
    int32_t rows;
    const keys k = naive_keys(r, &a->seqs, &rows);
    const int32_t k_dim = a->nope_dim + a->rope_dim;
    const double made = (double)a->nope_dim + a->v_dim;
    op_cost c = keys_cost(&a->latents, &k, rows, a->heads, k_dim, (double)k_dim + a->v_dim);
    c.w = a->w;
    c.bytes = k.shared * (double)hd_paged_entry_bytes(&a->latents) +
              stored_bytes(a->w, a->w->rows) +
              (double)rows * a->heads * ((double)k_dim + a->v_dim) * r->act_bytes;
    c.flops += 2.0 * a->heads * k.shared * a->w->cols * made;
    return c;
}

op_cost ops_cost_indexer_topk(ops_reader *r, const hd_indexer_topk_args *a) {
    int32_t *rows = fetch_rows(r, a->pos, a->seq, a->rows);
    keys k = {0};
    for (int32_t i = 0; rows && i < a->rows; i++) {
        const bool last = i + 1 == a->rows || rows[a->rows + i + 1] != rows[a->rows + i];
        const int32_t n = (rows[i] + 1) / a->ratio;
        k.seen += n;
        if (last) k.shared += n;
    }
    free(rows);
    return keys_cost(&a->keys, &k, a->rows, a->heads, a->keys.width, a->keys.width);
}

/* ---- other operators: rows of a width, so many times in and out ---- */

static op_cost rows_cost(int32_t rows, int32_t width, double bytes_per_row, double flops) {
    return (op_cost){
        .rows = rows, .ins = width, .bytes = rows * bytes_per_row, .flops = rows * flops};
}

#define ROWS(op, rows, width, moved, flops)                         \
    op_cost ops_cost_##op(ops_reader *r, const hd_##op##_args *a) { \
        const double act = r->act_bytes, f32 = sizeof(float);       \
        (void)act, (void)f32;                                       \
        return rows_cost((rows), (width), (moved), (flops));        \
    }
ROWS(embed, a->rows, a->table->cols,
     a->table->cols *(act * a->copies + hd_dtype_bits(a->table->type) / 8.0), 0)
ROWS(gather, a->rows, a->cols, 2 * act * a->cols, 0)
ROWS(add, a->rows, a->cols, (2 + 1.0 / a->repeat) * act * a->cols, a->cols)
ROWS(rms_norm, a->rows, a->cols, 2 * act * a->cols, 4.0 * a->cols)
ROWS(add_norm, a->rows, a->cols, (a->y.data ? 4 : 2) * act * a->cols, 5.0 * a->cols)
ROWS(norm_rope, a->rows, a->heads * a->head_width, 2 * act * a->heads * a->head_width,
     (4.0 * a->norm_cols + 6.0 * a->pairs) * a->heads)
ROWS(layer_norm, a->rows, a->cols, 2 * act * a->cols, 8.0 * a->cols)
ROWS(rope_table, a->rows, 2 * a->pairs, f32 * 2 * a->pairs, 2.0 * a->pairs)
ROWS(rope, a->rows, 2 * a->pairs * a->heads, 2 * act * 2 * a->pairs * a->heads,
     6.0 * a->pairs * a->heads)
ROWS(kv_store, a->rows, a->pool.width, 2 * act * a->pool.width, 0)
ROWS(round_rows, a->rows, a->cols, 2 * act * a->cols, 2.0 * a->cols)
ROWS(pack_rows, a->rows, a->cols,
     act * a->cols + (double)hd_packed_row_bytes(a->format, a->cols), 2.0 * a->cols)
ROWS(replay_store, a->rows, a->top_k, a->top_k *(f32 + a->log.number_bytes), 0)
ROWS(resident, a->rows, a->top_k, 4 * f32 * a->top_k, 0) /* where nothing is fetched */
ROWS(forget_entries, a->rows, 1, 3 * f32, 0)
ROWS(moe_topk, a->rows, a->rule.n_experts, f32 *(a->rule.n_experts + 2.0 * a->rule.top_k),
     4.0 * a->rule.n_experts)
ROWS(moe_count, a->rows, a->n_experts, f32 * a->top_k, 0)
ROWS(moe_split, a->rows, a->shape.slots, a->counts ? 0 : f32 * a->top_k, 0)
ROWS(moe_permute, a->rows, a->n_experts, f32 * 3.0 * a->top_k, 0)
ROWS(swiglu, a->rows, a->cols, 3 * act * a->cols, 6.0 * a->cols)
ROWS(moe_combine, a->rows, a->cols, act * a->cols * (a->top_k + (a->shared.data ? 2.0 : 1.0)),
     2.0 * a->top_k * a->cols)
ROWS(moe_fetch, a->n_experts, HD_EXPERT_MATRICES, 2.0 * f32 * HD_EXPERT_MATRICES, 0)
ROWS(moe_round, a->n_experts, 1, 2 * f32, 0)
ROWS(moe_join, 1, a->host.cols, 2.0 * act * a->host.cols, 0)
ROWS(hc_post, a->rows, a->hc * a->cols, act * a->cols * (2.0 * a->hc + 1),
     2.0 * a->hc * (a->hc + 1) * a->cols)
ROWS(hc_mean, a->rows, a->hc * a->cols, act * a->cols * (a->hc + 1.0), (double)a->hc * a->cols)
ROWS(keep_rows, a->rows, a->words, 8.0 * a->words, 0.0)
ROWS(hc_mix, a->rows, a->hc * a->cols, act * a->cols * (a->hc + 1.0), 2.0 * a->hc * a->cols)
ROWS(store_groups, a->rows, a->entries.width, 2 * f32 * a->entries.width / a->ratio, 0)
ROWS(engram_embed, a->rows, a->heads *(a->max_ngram - 1) * a->table->cols,
     a->heads *(a->max_ngram - 1.0) * a->table->cols *
         (f32 + hd_dtype_bits(a->table->type) / 8.0),
     0)
ROWS(engram_gate, a->rows, a->hc * a->cols, f32 * a->cols * (3.0 * a->hc + 1),
     10.0 * a->hc * a->cols)
ROWS(count_tokens, a->n, a->vocab, 2 * f32, 0)
ROWS(sample, a->rows, a->vocab, f32 * a->vocab, 2.0 * a->vocab)
ROWS(verify, a->n, 0, 4 * f32, 0)
ROWS(argmax, a->rows, a->vocab, f32 * a->vocab, a->vocab)
ROWS(prepare_step, a->n, 0, sizeof(hd_step_seq), 0)
ROWS(commit_step, a->n, 0, sizeof(hd_cursor), 0)
ROWS(prepare_draft, a->n, 0, sizeof(hd_cursor), 0)
ROWS(prepare_block, a->n, 0, sizeof(hd_cursor), 0)
ROWS(mirror, 1, 0, 2.0 * a->most, 0)
ROWS(timestamp, 1, 0, a->at ? sizeof *a->at : 0, 0)
#undef ROWS

op_cost ops_cost_compress(ops_reader *r, const hd_compress_args *a) {
    const int32_t *first_row = fetch(r, a->seqs.first_row, a->seqs.n + 1);
    const int32_t rows = first_row ? first_row[a->seqs.n] : 0;
    const double width = (a->overlap ? 2.0 : 1.0) * a->entries.width;
    return rows_cost(rows, a->entries.width, 5 * sizeof(float) * width, 8 * width);
}

static int32_t rows_of(ops_reader *r, const hd_seqs *seqs) {
    const int32_t *first_row = fetch(r, seqs->first_row, seqs->n + 1);
    return first_row ? first_row[seqs->n] : 0;
}

op_cost ops_cost_group_latents(ops_reader *r, const hd_group_latents_args *a) {
    const double width = a->state.width / 2.0;
    return rows_cost(rows_of(r, &a->seqs), a->state.width / 2, 5 * sizeof(float) * width,
                     8 * width);
}

op_cost ops_cost_ngram_classes(ops_reader *r, const hd_ngram_classes_args *a) {
    return rows_cost(rows_of(r, &a->seqs), a->n, 3.0 * sizeof(int32_t) * a->n, 0);
}

op_cost ops_cost_pool_topk(ops_reader *r, const hd_pool_topk_args *a) {
    op_cost c = ops_cost_indexer_topk(r, &(hd_indexer_topk_args){.keys = a->keys,
                                                                 .seq = a->seq,
                                                                 .pos = a->pos,
                                                                 .rows = a->rows,
                                                                 .heads = a->heads,
                                                                 .ratio = a->ratio});
    const double pool = (double)a->rows * a->n_blocks * a->block;
    const double most = 2.0 * a->heads * a->keys.width * pool;
    if (a->makes_pool || c.flops <= most) return c;
    c.bytes *= most / c.flops;
    c.flops = most;
    return c;
}

/* The mixing matrix is read once, whatever the rows. */
static op_cost mix_cost(const ops_reader *r, int32_t rows, int32_t hc, int32_t cols,
                        double values) {
    const double all = (double)hc * cols;
    op_cost c = rows_cost(rows, hc * cols, r->act_bytes * (all + cols), 2 * values * all);
    c.bytes += values * all * sizeof(float);
    return c;
}

op_cost ops_cost_hc_pre(ops_reader *r, const hd_hc_pre_args *a) {
    return mix_cost(r, a->rows, a->hc, a->cols, (double)a->hc * (2 + a->hc));
}

op_cost ops_cost_hc_single(ops_reader *r, const hd_hc_single_args *a) {
    const hd_hc_pre_args pre = ops_single_pre(a);
    return ops_cost_hc_pre(r, &pre);
}

op_cost ops_cost_hc_next(ops_reader *r, const hd_hc_next_args *a) {
    const hd_hc_pre_args pre = ops_next_pre(a);
    const hd_hc_post_args post = ops_next_post(a);
    op_cost c = ops_cost_hc_pre(r, &pre);
    if (!a->y.data) return c;
    const op_cost before = ops_cost_hc_post(r, &post);
    c.bytes += before.bytes - (double)a->rows * a->hc * a->cols * r->act_bytes;
    c.flops += before.flops;
    return c;
}

op_cost ops_cost_hc_head(ops_reader *r, const hd_hc_head_args *a) {
    return mix_cost(r, a->rows, a->hc, a->cols, a->hc);
}
