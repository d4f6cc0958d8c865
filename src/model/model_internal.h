/* model_internal.h - stages and operator helpers shared by the files of model/. */
#ifndef HD_MODEL_MODEL_INTERNAL_H
#define HD_MODEL_MODEL_INTERNAL_H

#include "base/arena.h"
#include "model/activations_internal.h"
#include "model/model.h"

/* The rows that a step still computes, after layers with tails dropped some (tail.c). */
typedef struct model_rest {
    hd_batch batch;
    bool on;       /* rows were dropped: the step runs `batch` */
    bool rebuilds; /* rows of the step, in any micro-batch, rebuild windows */
    int32_t *rows; /* [rows] host: of each row that is left its number in the step's batch */
    /* [tail.n + 1] numbers of the rows that are left, of layers with tails and then of drafts */
    int32_t *host, *device;
} model_rest;

struct hd_model {
    hd_model_env env;
    hd_model_limits limits;
    int32_t n_micro;       /* of a step, at most */
    const hd_shard *shard; /* shard of the weights */
    int32_t in_rows;       /* in a round; 0 without expert parallelism */
    bool fetches;          /* the pass has experts from the stage, and no round: hd_batch */
    void *rounds;          /* [HD_MAX_MICRO] of rounds_bytes (rounds.c) */
    size_t rounds_bytes;
    bool dspark; /* the weights have a DSpark drafter */
    /* columns of DSpark's confidence head, for a row of the head and for the token before */
    hd_weight confidence_of_row, confidence_of_token;
    float softmax_scale, index_scale, rope_scale;
    float *freq, *freq_compress; /* [pairs] device memory */
    hd_engram_hash *engram_hash; /* [Engram layers] device memory */
    int32_t *token_classes;      /* [vocab]; neither without Engram */
    int64_t *expert_rows;        /* of hd_model_expert_rows() */
    int32_t n_moe;               /* MoE layers of a step, without MTP layers */
    int64_t n_choices;           /* capacity */
    hd_stream *lanes[HD_N_LANES];
    hd_device_event *lane_change[HD_MAX_MICRO]; /* NULL if all lanes are one stream */
    hd_device_event *fork[HD_MAX_MICRO], *join[HD_MAX_MICRO]; /* NULL if nothing runs beside */
    void *block;
    size_t bytes;
    model_activations acts;                /* of a complete step */
    model_activations micro[HD_MAX_MICRO]; /* of parts of it, if n_micro > 1 */
    hd_batch micro_batch[HD_MAX_MICRO];
    int32_t *micro_group_rows; /* [HD_MAX_MICRO, dp] */
    /* Rows that a step in one, and a micro-batch of several, may have. */
    int32_t whole_rows, micro_rows;
    hd_kv_shape pages;
    model_rest rest;
    hd_prefetch *prefetch;         /* of rows of Engram tables; NULL: there is none */
    void *rest_device, *rest_host; /* their memory */
};

/* Experts and keys that replace the own selection of routers and indexers, in training
 * (docs/training.md); host memory. Hash layers and MTP layers select as ever. */
typedef struct model_replay {
    const int32_t *experts; /* [layers, rows, top_k]; NULL: routers select */
    const int32_t *row;     /* [rows] 0, 1, ... */
    const int32_t *keys; /* [layers with an indexer, rows, index_topk]; NULL: indexers select */
    int64_t *routed, *indexed;           /* += rows of all layers, */
    int64_t *other_experts, *other_keys; /* and those that would select others */
} model_replay;

/* A step, or one of its micro-batches, during its pass through the layers. */
typedef struct model_step {
    const hd_model *m;
    const hd_kv *kv;
    const hd_batch *b; /* the rows that are left of `whole` */
    const hd_batch *whole;
    model_activations *t;
    model_rest *rest;
    hd_stream *stream; /* of the lane that this micro-batch is in */
    bool apart;        /* blocks run one by one: each adds its own result, by block_out */
    const model_replay *replay; /* NULL: routers select */
    hd_device_event *lane_change, *fork, *join;
    bool cut;  /* a micro-batch of several: its lanes are streams of their own */
    bool left; /* lane_change is recorded: the next lane waits for no later stage of others */
} model_step;

typedef struct model_stage {
    const char *name;
    void (*run)(const model_step *s, int32_t layer);
    hd_lane lane;
    bool (*needed)(const hd_model *m); /* NULL: always needed */
    bool yields;                       /* another micro-batch may run before the next stage */
} model_stage;

/* model.c: a step that is not cut yet */
model_step model_step_of(hd_model *m, const hd_kv *kv, const hd_batch *batch);

/* model.c: runs the stages of n micro-batches, each on the stream of its lane. A stage waits
 * for the stage before it of the same micro-batch, never for those of others. They alternate after
 * every stage that is needed and yields. of_group: the
 * stages exchange nothing with other attention groups, so micro-batches without rows skip them. */
void model_run_stages(model_step *steps, int32_t n, const model_stage *stages, const char *part,
                      int32_t layer, bool of_group);

/* The stages of a layer's two blocks, each ended by a NULL run. */
const model_stage *model_attention_stages(const hd_layer_spec *layer);
/* csa2.c: those before them that run for rows which the next layer does not need; NULL: none */
const model_stage *model_key_stages(const hd_layer_spec *layer);
/* hybrid.c: the same of V4, and those after them, where windows are rebuilt */
extern const model_stage model_rebuild_keys[], model_rebuild_queries[];
const model_stage *model_ffn_stages(const hd_layer_spec *layer);
#define X(kind, name, description) extern const model_stage model_##name##_stages[];
HD_ATTENTION_KINDS(X)
#undef X
extern const model_stage model_head_stages[];
/* dspark.c: whether the drafter takes the residual at this side of a layer; keeps it. */
bool model_has_tap(const hd_model_spec *spec, int32_t layer, hd_tap_side side);
void model_tap(const model_step *s, int32_t layer);
void model_open_confidence(hd_model *m);

/* micro.c: how many micro-batches there are, and their rows; memory for them. */
void model_plan_micro(hd_model *m);
hd_status model_open_micro(hd_model *m, hd_err *err);
/* Cuts a step as its batch says. Returns how many micro-batches there are; steps of one are not set. */
int32_t model_cut(hd_model *m, const model_step *whole, model_step steps[HD_MAX_MICRO]);
/* In a MoE layer the choices of micro-batches follow each other; those of the next one follow them. */
void model_place_choices(const model_step *whole, model_step *steps, int32_t n, int32_t layer);
void model_keep_choices(const model_step *whole, const model_step *last, int32_t layer);

/* model.c: runs both blocks of layers first .. last, in micro-batches; the step ends on the compute
 * lane. Computes the logits of layer HD_GLOBAL or a drafter's last one. A stage that exchanges and
 * computes by turns changes its lane by itself. */
void model_run_layers(hd_model *m, model_step *whole, int32_t first, int32_t last);
void model_run_head(model_step *s, const char *part, int32_t layer);
void model_enter_lane(model_step *s, hd_lane lane);
void model_probe(const hd_model *m, const char *part, const char *stage);

/* tail.c: memory for rows that are left; drops the rows that the layer after this one does not need,
 * once the layer has stored what every position leaves. Then the step's drafts go on with the rows
 * that are left. */
void model_place_rest(hd_model *m, hd_arena *device, hd_arena *host);
void model_drop_rows(model_step *s, int32_t layer);
void model_draft_rest(model_step *s);

/* engram.c: the hashes' constants and the tokens' classes onto the device; the classes of the step's
 * last tokens, once; what a layer's table adds to x */
void model_upload_engram(hd_model *m);
void model_classify_tokens(const model_step *s);
void model_engram(const model_step *s, int32_t layer);
/* Asks for the rows of all tables that the classified tokens choose. */
hd_status model_open_prefetch(hd_model *m, hd_err *err);
void model_prefetch_engram(const model_step *s);

/* rounds.c: a layer whose rows may not all fit at once under expert parallelism */
hd_status model_open_rounds(hd_model *m, hd_err *err);
void model_plan_rounds(const model_step *s, int32_t top_k); /* before rows are sent */
/* Rows that each rank may send to each other one in a round; NULL: one round is enough. */
const int32_t *model_round_rows(const model_step *s);
/* Most rows that arrive at once, from what all ranks have in this step. */
int32_t model_arriving_rows(const model_step *s);
/* How many rounds there are, once the rows of the first have arrived. */
int32_t model_n_rounds(const model_step *s);

/* split.c: whether rows are split exactly over copies of experts, and with those of other ranks. Then
 * the rows of experts are counted and gathered; model_split_rows() comes before moe_permute. */
bool model_splits(const hd_model *m);
bool model_splits_together(const hd_model *m);
void model_count_rows(const model_step *s, int32_t layer);
void model_gather_counts(const model_step *s, int32_t layer);
void model_split_rows(const model_step *s, int32_t layer);

/* activations.c: those of a step; and of a micro-batch after the first, but for what it shares with
 * others or has as a part of the step's, which begins at a row. */
void model_place_activations(model_activations *t, hd_arena *a, const hd_model *m);
void model_place_micro(model_activations *t, hd_arena *a, const hd_model *m, int64_t rows);
void model_move_activations(model_activations *t, const model_activations *whole,
                            const hd_model *m, int32_t row);
/* What one block (0 attention, 1 feed-forward) of a layer leaves for its gradients, apart from all others,
 * of the only rank: also gate and up, which elsewhere are overwritten. The rest of *t stays. */
void model_place_block(model_activations *t, hd_arena *a, const hd_model *m,
                       const hd_layer_spec *layer, int32_t block);
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

/* One of several products with the rows of x. */
typedef struct model_product {
    hd_role role;
    hd_rows out;
    bool without; /* this layer has none */
} model_product;
void model_linear_set(const model_step *s, int32_t layer, hd_rows x, const model_product *p,
                      int32_t n);
void model_rope(const model_step *s, const float *cos_sin, hd_rows x, int32_t at, int32_t heads,
                int32_t head_width);

/* The epsilon of the norms inside MLA, whatever rms_norm_eps says: that of the official code. Only
 * Moonlight's config says something else (models.md 8, D1). */
static const float model_inner_eps = 1e-6f;

/* V3.2's indexer: rotates the first rope_dim elements of each head of x in half-split pairs, in place */
void model_rope_index(const model_step *s, hd_rows x, int32_t heads, bool inverse);

/* selected = the indexer's top-k keys, one key per `ratio` positions; keeps them */
void model_indexer_topk(const model_step *s, int32_t layer, hd_paged keys, int32_t ratio);

/* resident.c: attention, of which `entries` are those of the layer's pool, also where it lies in host
 * memory. Whoever writes entries of such a pool in a step lets its buffer forget them: until then
 * it may have what was there before. */
void model_attention(const model_step *s, int32_t layer, const hd_attention_args *a);
void model_forget_entries(const model_step *s, int32_t layer, hd_pool_kind pool);

/* Returns where rows from `first` on keep what the layer chooses; data is NULL if nothing is kept. */
hd_replay_log model_replay_log(const model_step *s, hd_replay kind, int32_t layer,
                               int32_t first);

/* Keeps what the layer's indexer selected. */
void model_replay_keys(const model_step *s, int32_t layer);

/* hybrid.c: the rotation of a layer, of longer-range frequencies if it has a compressor; stores
 * the vectors of the rows' inputs h in its window */
const float *model_hybrid_rope(const model_step *s, int32_t layer);
void model_store_window(const model_step *s, int32_t layer);

/* out = the streams' mixture before a block, with post and comb; fn: HC_ATTN_FN or HC_FFN_FN */
void model_mix_streams(const model_step *s, int32_t layer, hd_role fn, hd_rows out, hd_rows x);

/* The residual around a block: plain addition, or hyper-connections. A block's first stage adds
 * the result of the block before; block_out adds it where a layer must leave a whole residual. */
void model_attn_in(const model_step *s, int32_t layer);
void model_ffn_in(const model_step *s, int32_t layer);
void model_block_out(const model_step *s, int32_t layer);

static inline int32_t model_streams(const hd_model_spec *spec) {
    return spec->hc_mult ? spec->hc_mult : 1;
}

static inline hd_paged model_pool(const model_step *s, int32_t layer, hd_pool_kind pool) {
    const int32_t *const tables[HD_N_KV_GROUPS] = {s->b->device.tables[0],
                                                   s->b->device.tables[1]};
    return hd_kv_pool(s->kv, layer, pool, tables, s->b->limits.table_stride);
}

#endif
