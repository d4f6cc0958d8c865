/* model_internal.h - activations, stages and operator helpers shared by the files of model/. */
#ifndef HD_MODEL_MODEL_INTERNAL_H
#define HD_MODEL_MODEL_INTERNAL_H

#include "base/arena.h"
#include "model/model.h"

/* Every activation of one micro-batch; activations.c decides which of them share memory. n =
 * rows; heads, inter and groups are those of this rank's shard. */
typedef struct model_activations {
    hd_rows x; /* [n, streams, hidden] the residual; one stream without hyper-connections */
    hd_rows h; /* [n, hidden] a block's normed input; after the last layer, the final state */
    hd_rows y; /* [n, hidden] a block's result */
    float *cos_sin, *cos_sin_compress; /* [n, 2, pairs] */
    float *post, *comb;                /* [n, hc], [n, hc, hc] */

    /* attention */
    hd_rows q_low;       /* [n, q_rank] */
    hd_rows q;           /* [n, heads, nope + rope]; V4: [n, heads, head_dim] */
    hd_rows q_wide;      /* MLA [n, heads, kv_rank + rope]: absorbed query | rotated query */
    hd_rows kv;          /* [n, kv_rank + rope]; V4 [n, head_dim] */
    hd_rows context;     /* [n, heads, kv_rank]; V4 [n, heads, head_dim] */
    hd_rows o_low;       /* MLA [n, heads, v]; V4 [n, o_groups, o_rank] */
    hd_rows index_q;     /* [n, index_heads, index_dim] */
    hd_rows index_k;     /* [n, index_dim] */
    float *index_weight; /* [n, index_heads] */
    int32_t *selected;   /* [n, index_topk] */
    float *compress_kv, *compress_gate; /* [n, 2 * head_dim] */

    /* feed-forward */
    float *router;                        /* [n, experts] */
    int32_t *expert;                      /* [n, top_k] */
    float *expert_weight;                 /* [n, top_k] */
    int32_t *offset, *assignment, *place; /* [slots + 1], [n * top_k], [n * top_k] */
    hd_rows gate, up;                     /* [n, inter] dense or shared */
    hd_rows expert_gate, expert_up;       /* [n * top_k, moe_inter] */
    hd_rows expert_y;                     /* [n * top_k, hidden] */
    /* Rows received under expert parallelism. Then expert_gate and expert_up have in_rows
     * rows, and expert_y holds the results that were sent back. */
    hd_rows in_x, in_y; /* [in_rows, hidden] */
    float *in_weight;   /* [in_rows] */
    int32_t *in_offset; /* [slots of this rank + 1] */

    /* head and MTP input */
    hd_rows logit_x; /* [logits, streams, hidden] */
    hd_rows merged;  /* [logits, hidden] */
    hd_rows paired;  /* V3 MTP [n, 2 * hidden]; V4 MTP [n, streams, hidden] */
    float *logits;   /* [logits, vocab] */
} model_activations;

struct hd_model {
    hd_model_env env;
    hd_model_limits limits;
    int32_t n_micro;
    const hd_shard *shard; /* shard of the weights */
    int32_t in_rows;       /* 0 without expert parallelism */
    /* Parts of a batch's rows in the feed-forward blocks, and which one is this rank's: the
     * tensor-parallel group divides the rows there if no rank has a part of an MLP. */
    int32_t row_parts, row_part;
    float softmax_scale, index_scale, rope_scale;
    float *freq, *freq_compress; /* [pairs] device memory */
    int64_t *expert_rows;        /* [layers, experts] device memory; or NULL without experts */
    hd_stream *lanes[HD_N_LANES];
    hd_device_event *lane_change[HD_MAX_MICRO]; /* NULL if all lanes are one stream */
    void *block;
    size_t bytes;
    model_activations acts[HD_MAX_MICRO];
};

/* One micro-batch during its pass through the layers. */
typedef struct model_step {
    const hd_model *m;
    const hd_kv *kv;
    const hd_batch *b;
    model_activations *t;
    hd_stream *stream; /* of the lane that this micro-batch is in */
    hd_device_event *lane_change;
} model_step;

typedef struct model_stage {
    const char *name;
    void (*run)(const model_step *s, int32_t layer);
    hd_lane lane;
    bool (*needed)(
        const hd_model *m); /* false: this model leaves it out; NULL: always needed */
    bool yields;            /* another micro-batch may run before the next stage */
} model_stage;

/* model.c: a step of one micro-batch */
model_step model_step_of(hd_model *m, const hd_kv *kv, const hd_batch *batch, int32_t micro);

/* model.c: runs the stages of n micro-batches, each on the stream of its lane. A stage waits
 * for the stage before it of the same micro-batch, never for those of others. */
void model_run_stages(model_step *steps, int32_t n, const model_stage *stages, const char *part,
                      int32_t layer);

/* The stages of a layer's two blocks, each ended by a NULL run. */
const model_stage *model_attention_stages(const hd_layer_spec *layer);
const model_stage *model_ffn_stages(const hd_layer_spec *layer);

#define X(kind, name, description) extern const model_stage model_##name##_stages[];
HD_ATTENTION_KINDS(X)
#undef X
extern const model_stage model_head_stages[];

/* activations.c */
void model_place_activations(model_activations *t, hd_arena *a, const hd_model *m);

/* rope.c: models.md 2.1.5, into freq[pairs] */
void model_rope_freqs(const hd_rope_spec *rope, int32_t pairs, float *freq);
float model_index_scale(const hd_model_spec *spec); /* on indexer scores */

/* head.c, mtp.c */
void model_rope_tables(const model_step *s); /* RoPE tables of the batch's positions */
void model_start(const model_step *s);
void model_mtp_start(const model_step *s, int32_t layer, bool again);

/* Operators with a layer's weights; rows is the number of rows of x. */
void model_norm(const model_step *s, int32_t layer, hd_role role, hd_rows out, hd_rows x,
                int32_t rows, int32_t cols);
void model_linear(const model_step *s, int32_t layer, hd_role role, hd_rows out, hd_rows x,
                  int32_t rows);
void model_rope(const model_step *s, const float *cos_sin, hd_rows x, int32_t at, int32_t heads,
                int32_t head_width);

/* selected = the indexer's top-k keys, one key per `ratio` positions */
void model_indexer_topk(const model_step *s, hd_paged keys, int32_t ratio);

/* hybrid.c: the rotation of a layer, of longer-range frequencies if it has a compressor */
const float *model_hybrid_rope(const model_step *s, int32_t layer);

/* out = the streams' mixture before a block, with post and comb; fn: HC_ATTN_FN or HC_FFN_FN */
void model_mix_streams(const model_step *s, int32_t layer, hd_role fn, hd_rows out, hd_rows x);

/* The residual around a block: plain addition, or V4's hyper-connections. */
void model_attn_in(const model_step *s, int32_t layer);
void model_ffn_in(const model_step *s, int32_t layer);
void model_block_out(const model_step *s, int32_t layer);

/* All-reduces y over the tensor-parallel group. */
void model_all_reduce(const model_step *s, int32_t layer);
bool model_reduces_heads(const hd_model *m); /* whether a rank computes a part of the heads */

static inline int32_t model_streams(const hd_model_spec *spec) {
    return spec->hc_mult ? spec->hc_mult : 1;
}

static inline hd_paged model_pool(const model_step *s, int32_t layer, hd_pool_kind pool) {
    const int32_t *const tables[HD_N_KV_GROUPS] = {s->b->device.tables[0],
                                                   s->b->device.tables[1]};
    return hd_kv_pool(s->kv, layer, pool, tables, s->b->limits.table_stride);
}

#endif
