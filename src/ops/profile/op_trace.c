/* op_trace.c - the operator tracer: the shapes of each call, from its argument struct. */
#include "ops/profile/op_trace.h"

/* An operator has no context, so the receiver is a global. */
static hd_op_trace_fn *receiver;
static void *receiver_ctx;

static void report(const hd_op_call_shape *call) {
    receiver(receiver_ctx, call);
}

/* ---- tensors ---- */

static hd_op_tensor by_row(const char *name, int32_t rows) {
    return (hd_op_tensor){name, 1, {rows}, true};
}

static hd_op_tensor by_row2(const char *name, int32_t rows, int32_t cols) {
    return (hd_op_tensor){
        name, 2, {rows, cols},
          true
    };
}

static hd_op_tensor by_row3(const char *name, int32_t rows, int32_t heads, int32_t cols) {
    return (hd_op_tensor){
        name, 3, {rows, heads, cols},
          true
    };
}

static hd_op_tensor fixed(const char *name, int32_t n) {
    return (hd_op_tensor){name, 1, {n}, false};
}

static hd_op_tensor fixed2(const char *name, int32_t n, int32_t cols) {
    return (hd_op_tensor){
        name, 2, {n, cols},
          false
    };
}

/* Entries of a KV pool. */
static hd_op_tensor pool(const char *name, const hd_paged *p) {
    return fixed2(name, HD_ANY_LENGTH, p->width);
}

/* ---- rows ---- */

static void trace_embed(hd_stream *s, const hd_embed_args *a) {
    (void)s;
    const int32_t cols = a->table->cols;
    report(&(hd_op_call_shape){.op = "embed",
                               .w = a->table,
                               .in = {by_row("tokens", a->rows)},
                               .out = {a->copies == 1
                                           ? by_row2("out", a->rows, cols)
                                           : by_row3("out", a->rows, a->copies, cols)}});
}

static void trace_gather(hd_stream *s, const hd_gather_args *a) {
    (void)s;
    report(&(hd_op_call_shape){
        .op = "gather",
        .in = {fixed2("x", HD_ANY_LENGTH, a->cols), by_row("index", a->rows)},
        .out = {by_row2("out",  a->rows,               a->cols)          }
    });
}

static void trace_add(hd_stream *s, const hd_add_args *a) {
    (void)s;
    report(&(hd_op_call_shape){
        .op = "add",
        .in = {by_row2("x",          a->rows,  a->cols), by_row2("y", a->rows / a->repeat, a->cols)},
        .out = {by_row2("x", a->rows, a->cols)        }
    });
}

static void trace_rms_norm(hd_stream *s, const hd_rms_norm_args *a) {
    (void)s;
    report(&(hd_op_call_shape){.op = "rms_norm",
                               .in = {by_row2("x", a->rows, a->cols)},
                               .out = {by_row2("out", a->rows, a->cols)}});
}

static void trace_add_norm(hd_stream *s, const hd_add_norm_args *a) {
    (void)s;
    hd_op_call_shape call = {.op = "add_norm",
                             .in = {by_row2("x", a->rows, a->cols)},
                             .out = {by_row2("out", a->rows, a->cols)}};
    if (a->y.data) {
        call.in[1] = by_row2("y", a->rows, a->cols);
        call.out[1] = by_row2("x", a->rows, a->cols);
    }
    report(&call);
}

static void trace_norm_rope(hd_stream *s, const hd_norm_rope_args *a) {
    (void)s;
    report(&(hd_op_call_shape){
        .op = "norm_rope",
        .in = {by_row3("x",     a->rows, a->heads, a->head_width)},
        .out = {by_row3("x", a->rows,        a->heads, a->head_width)},
        .attribute = {{"norm", a->norm_cols},        {"rope", 2 * a->pairs}}
    });
}

static void trace_layer_norm(hd_stream *s, const hd_layer_norm_args *a) {
    (void)s;
    report(&(hd_op_call_shape){.op = "layer_norm",
                               .in = {by_row2("x", a->rows, a->cols)},
                               .out = {by_row2("out", a->rows, a->cols)}});
}

static void trace_rope_table(hd_stream *s, const hd_rope_table_args *a) {
    (void)s;
    report(&(hd_op_call_shape){
        .op = "rope_table",
        .in = {by_row("position", a->rows), fixed("freq", a->pairs)},
        .out = {by_row3("cos_sin", a->rows,  2,            a->pairs)}
    });
}

static void trace_rope(hd_stream *s, const hd_rope_args *a) {
    (void)s;
    report(&(hd_op_call_shape){.op = "rope",
                               .in = {by_row3("x", a->rows, a->heads, 2 * a->pairs)},
                               .out = {by_row3("out", a->rows, a->heads, 2 * a->pairs)},
                               .attribute = {{a->inverse ? "inverse" : NULL, 0}}});
}

/* ---- GEMMs ---- */

static void trace_linear(hd_stream *s, const hd_linear_args *a) {
    (void)s;
    report(&(hd_op_call_shape){.op = "linear",
                               .w = a->w,
                               .in = {by_row2("x", a->rows, a->w->cols)},
                               .out = {by_row2("out", a->rows, a->w->rows)}});
}

static void trace_linear_heads(hd_stream *s, const hd_linear_heads_args *a) {
    (void)s;
    const int32_t in = a->transpose ? a->n_rows : a->w->cols;
    const int32_t out = a->transpose ? a->w->cols : a->n_rows;
    report(&(hd_op_call_shape){.op = "linear_heads",
                               .w = a->w,
                               .in = {by_row3("x", a->rows, a->heads, in)},
                               .out = {by_row3("out", a->rows, a->heads, out)},
                               .attribute = {{a->transpose ? "transpose" : NULL, 0}}});
}

/* A call for each matrix. */
static void trace_linear_set(hd_stream *s, const hd_linear_set_args *a) {
    (void)s;
    for (int32_t i = 0; i < a->n; i++) {
        report(&(hd_op_call_shape){.op = "linear_set",
                                   .w = a->w[i],
                                   .in = {by_row2("x", a->rows, a->w[i]->cols)},
                                   .out = {by_row2("out", a->rows, a->w[i]->rows)}});
    }
}

static void trace_linear_swiglu(hd_stream *s, const hd_linear_swiglu_args *a) {
    (void)s;
    const hd_weight *w[] = {a->gate_w, a->up_w};
    for (int32_t i = 0; i < 2; i++) {
        report(&(hd_op_call_shape){.op = "linear_swiglu",
                                   .w = w[i],
                                   .in = {by_row2("x", a->rows, w[i]->cols)},
                                   .out = {by_row2("out", a->rows, w[i]->rows)}});
    }
}

static void trace_grouped_swiglu(hd_stream *s, const hd_grouped_swiglu_args *a) {
    (void)s;
    const int32_t from = a->assignment ? a->n_places / a->top_k : a->n_places;
    const hd_expert_table *w[] = {a->gate_w, a->up_w};
    for (int32_t i = 0; i < 2; i++) {
        report(&(hd_op_call_shape){.op = "grouped_swiglu",
                                   .w = &w[i]->shape,
                                   .in = {by_row2("x", from, w[i]->shape.cols)},
                                   .out = {by_row2("out", a->n_places, w[i]->shape.rows)},
                                   .attribute = {{"experts", w[i]->n}}});
    }
}

static void trace_grouped_gemm(hd_stream *s, const hd_grouped_gemm_args *a) {
    (void)s;
    const int32_t from = a->assignment ? a->n_places / a->top_k : a->n_places;
    report(&(hd_op_call_shape){.op = "grouped_gemm",
                               .w = &a->w->shape,
                               .in = {by_row2("x", from, a->w->shape.cols)},
                               .out = {by_row2("out", a->n_places, a->w->shape.rows)},
                               .attribute = {{"experts", a->w->n}}});
}

/* ---- attention ---- */

static void trace_kv_store(hd_stream *s, const hd_kv_store_args *a) {
    (void)s;
    report(&(hd_op_call_shape){.op = "kv_store",
                               .in = {by_row2("x", a->rows, a->pool.width)},
                               .out = {pool("pool", &a->pool)}});
}

static void trace_compress(hd_stream *s, const hd_compress_args *a) {
    (void)s;
    const int32_t rows = a->seqs.first_row[a->seqs.n];
    const int32_t width = a->entries.width * (a->overlap ? 2 : 1);
    report(&(hd_op_call_shape){
        .op = "compress",
        .in = {by_row2("kv", rows, width), by_row2("gate", rows, width)},
        .out = {pool("entries",      &a->entries)},
        .attribute = {{"ratio", a->ratio}       }
    });
}

static void trace_indexer_topk(hd_stream *s, const hd_indexer_topk_args *a) {
    (void)s;
    report(&(hd_op_call_shape){
        .op = "indexer_topk",
        .in = {by_row3("q",      a->rows, a->heads, a->keys.width),
               by_row2("weight", a->rows, a->heads), pool("keys", &a->keys)},
        .out = {by_row2("out",        a->rows, a->top_k)},
        .attribute = {{"ratio", a->ratio}}
    });
}

static void trace_attention(hd_stream *s, const hd_attention_args *a) {
    (void)s;
    hd_op_call_shape call = {.op = "attention",
                             .in = {by_row3("q", a->rows, a->heads, a->k_dim)},
                             .out = {by_row3("out", a->rows, a->heads, a->v_dim)}};
    hd_op_tensor *in = call.in + 1;
    hd_op_attribute *attribute = call.attribute;
    if (a->window) {
        *in++ = pool("recent", &a->recent);
        *attribute++ = (hd_op_attribute){"window", a->window};
    }
    if (a->ratio) {
        *in++ = pool("entries", &a->entries);
        *attribute++ = (hd_op_attribute){"ratio", a->ratio};
    }
    if (a->selected) *in++ = by_row2("selected", a->rows, a->n_selected);
    report(&call);
}

static void trace_attention_naive(hd_stream *s, const hd_attention_naive_args *a) {
    (void)s;
    const int32_t rows = a->seqs.first_row[a->seqs.n] - a->seqs.first_row[0];
    report(&(hd_op_call_shape){
        .op = "attention_naive",
        .w = a->w,
        .in = {by_row3("q",   rows, a->heads, a->nope_dim + a->rope_dim),
               pool("latents", &a->latents)},
        .out = {by_row3("out", rows,     a->heads, a->v_dim)                      }
    });
}

/* ---- mixture of experts ---- */

static void trace_moe_topk(hd_stream *s, const hd_moe_topk_args *a) {
    (void)s;
    const int32_t top_k = a->rule.top_k;
    hd_op_call_shape call = {
        .op = "moe_topk",
        .in = {by_row2("logits",  a->rows, a->rule.n_experts)},
        .out = { by_row2("expert", a->rows, top_k),             by_row2("weight", a->rows, top_k)}
    };
    if (a->table) call.in[1] = by_row("tokens", a->rows);
    if (a->table) call.in[2] = fixed2("table", HD_ANY_LENGTH, top_k);
    if (!a->table && a->rule.n_groups > 1) {
        call.attribute[0] = (hd_op_attribute){"groups", a->rule.n_groups};
        call.attribute[1] = (hd_op_attribute){"top_groups", a->rule.top_groups};
    }
    report(&call);
}

static void trace_moe_permute(hd_stream *s, const hd_moe_permute_args *a) {
    (void)s;
    report(&(hd_op_call_shape){
        .op = "moe_permute",
        .in = {by_row2("expert",     a->rows, a->top_k)},
        .out = { fixed("offset", a->n_experts + 1), by_row("assignment",      a->rows * a->top_k),
               by_row("place", a->rows * a->top_k)}
    });
}

static void trace_swiglu(hd_stream *s, const hd_swiglu_args *a) {
    (void)s;
    hd_op_call_shape call = {
        .op = "swiglu",
        .in = {by_row2("gate", a->rows, a->cols), by_row2("up", a->rows, a->cols)},
        .out = {by_row2("out",       a->rows,      a->cols)             }
    };
    if (a->weight) call.in[2] = by_row("weight", a->rows);
    report(&call);
}

static void trace_moe_combine(hd_stream *s, const hd_moe_combine_args *a) {
    (void)s;
    hd_op_call_shape call = {.op = "moe_combine",
                             .in = {by_row2("y", a->rows * a->top_k, a->cols)},
                             .out = {by_row2("out", a->rows, a->cols)}};
    hd_op_tensor *in = call.in + 1;
    if (a->weight) *in++ = by_row2("weight", a->rows, a->top_k);
    if (a->shared.data) *in++ = by_row2("shared", a->rows, a->cols);
    report(&call);
}

/* ---- hyper-connections ---- */

static void trace_hc_pre(hd_stream *s, const hd_hc_pre_args *a) {
    (void)s;
    report(&(hd_op_call_shape){
        .op = "hc_pre",
        .in = {by_row3("x",    a->rows, a->hc, a->cols)},
        .out = { by_row2("out", a->rows, a->cols), by_row2("post", a->rows, a->hc),
               by_row3("comb", a->rows, a->hc, a->hc)}
    });
}

static void trace_hc_post(hd_stream *s, const hd_hc_post_args *a) {
    (void)s;
    report(&(hd_op_call_shape){
        .op = "hc_post",
        .in = {by_row3("x", a->rows, a->hc, a->cols), by_row2("y", a->rows, a->cols),
               by_row2("post", a->rows, a->hc), by_row3("comb", a->rows, a->hc, a->hc)},
        .out = {by_row3("x",    a->rows,   a->hc,              a->cols)              }
    });
}

static void trace_hc_next(hd_stream *s, const hd_hc_next_args *a) {
    (void)s;
    hd_op_call_shape call = {
        .op = "hc_next",
        .in = {by_row3("x",    a->rows, a->hc, a->cols)},
        .out = { by_row2("out", a->rows, a->cols), by_row2("post", a->rows, a->hc),
               by_row3("comb", a->rows, a->hc, a->hc)}
    };
    if (a->y.data) {
        call.in[1] = by_row2("y", a->rows, a->cols);
        call.in[2] = by_row2("post", a->rows, a->hc);
        call.in[3] = by_row3("comb", a->rows, a->hc, a->hc);
        call.out[3] = by_row3("x", a->rows, a->hc, a->cols);
    }
    report(&call);
}

static void trace_hc_head(hd_stream *s, const hd_hc_head_args *a) {
    (void)s;
    report(&(hd_op_call_shape){.op = "hc_head",
                               .in = {by_row3("x", a->rows, a->hc, a->cols)},
                               .out = {by_row2("out", a->rows, a->cols)}});
}

static void trace_hc_mean(hd_stream *s, const hd_hc_mean_args *a) {
    (void)s;
    report(&(hd_op_call_shape){.op = "hc_mean",
                               .in = {by_row3("x", a->rows, a->hc, a->cols)},
                               .out = {by_row2("out", a->rows, a->cols)}});
}

/* ---- the table ---- */

/* Operators without a function above, those of sampling and of the step, report their name. */
#define X(op_name)                                                           \
    static void name_##op_name(hd_stream *s, const hd_##op_name##_args *a) { \
        (void)s;                                                             \
        (void)a;                                                             \
        report(&(hd_op_call_shape){.op = #op_name});                         \
    }
HD_OP_LIST(X)
#undef X

void hd_op_trace_init(hd_ops *out, hd_dtype act_type, hd_op_trace_fn *fn, void *ctx) {
    receiver = fn;
    receiver_ctx = ctx;
    *out = (hd_ops){.name = "trace",
                    .act_type = act_type,
#define X(op_name) .op_name = name_##op_name,
                    HD_OP_LIST(X)
#undef X
    };
    out->embed = trace_embed;
    out->gather = trace_gather;
    out->add = trace_add;
    out->rms_norm = trace_rms_norm;
    out->layer_norm = trace_layer_norm;
    out->add_norm = trace_add_norm;
    out->norm_rope = trace_norm_rope;
    out->linear_set = trace_linear_set;
    out->linear_swiglu = trace_linear_swiglu;
    out->grouped_swiglu = trace_grouped_swiglu;
    out->hc_next = trace_hc_next;
    out->linear = trace_linear;
    out->linear_heads = trace_linear_heads;
    out->rope_table = trace_rope_table;
    out->rope = trace_rope;
    out->kv_store = trace_kv_store;
    out->indexer_topk = trace_indexer_topk;
    out->attention = trace_attention;
    out->compress = trace_compress;
    out->moe_topk = trace_moe_topk;
    out->moe_permute = trace_moe_permute;
    out->grouped_gemm = trace_grouped_gemm;
    out->swiglu = trace_swiglu;
    out->moe_combine = trace_moe_combine;
    out->hc_pre = trace_hc_pre;
    out->hc_post = trace_hc_post;
    out->hc_head = trace_hc_head;
    out->hc_mean = trace_hc_mean;
    out->attention_naive = trace_attention_naive;
}
