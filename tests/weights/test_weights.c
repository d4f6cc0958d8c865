/* test_weights.c - checkpoints bound to a model: formats, fallbacks, refusals.
 *
 * A small model is written to a temporary directory from its own schema, one tensor is changed,
 * and the checkpoint is opened. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/file.h"
#include "weights/safetensors.h"
#include "weights/weights.h"

static const char v3_config[] =
    "{\"architectures\":[\"DeepseekV3ForCausalLM\"],\"model_type\":\"deepseek_v3\","
    "\"vocab_size\":24,\"hidden_size\":32,\"num_hidden_layers\":2,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":2,\"q_lora_rank\":12,\"kv_lora_rank\":8,\"qk_nope_head_dim\":6,"
    "\"qk_rope_head_dim\":4,\"v_head_dim\":5,\"intermediate_size\":20,"
    "\"moe_intermediate_size\":6,\"n_routed_experts\":4,\"n_shared_experts\":1,"
    "\"num_experts_per_tok\":2,\"first_k_dense_replace\":1,\"n_group\":2,\"topk_group\":1,"
    "\"topk_method\":\"noaux_tc\",\"scoring_func\":\"sigmoid\",\"norm_topk_prob\":true,"
    "\"routed_scaling_factor\":2.5,\"rms_norm_eps\":1e-6,\"max_position_embeddings\":64,"
    "\"rope_theta\":10000,\"num_nextn_predict_layers\":1,\"bos_token_id\":0,"
    "\"eos_token_id\":1,\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\","
    "\"activation_scheme\":\"dynamic\",\"weight_block_size\":[16,8]}}";

static const char v4_config[] =
    "{\"architectures\":[\"DeepseekV4ForCausalLM\"],\"model_type\":\"deepseek_v4\","
    "\"vocab_size\":24,\"hidden_size\":64,\"num_hidden_layers\":3,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":1,\"head_dim\":8,\"qk_rope_head_dim\":4,\"q_lora_rank\":12,"
    "\"o_groups\":2,\"o_lora_rank\":4,\"n_routed_experts\":4,\"n_shared_experts\":1,"
    "\"num_experts_per_tok\":2,\"moe_intermediate_size\":6,\"num_hash_layers\":1,"
    "\"scoring_func\":\"sqrtsoftplus\",\"topk_method\":\"noaux_tc\",\"norm_topk_prob\":true,"
    "\"routed_scaling_factor\":1.5,\"swiglu_limit\":10,\"sliding_window\":8,"
    "\"index_n_heads\":2,\"index_head_dim\":8,\"index_topk\":4,\"hc_mult\":4,"
    "\"hc_sinkhorn_iters\":20,\"hc_eps\":1e-6,\"rms_norm_eps\":1e-6,\"rope_theta\":10000,"
    "\"compress_rope_theta\":160000,\"compress_ratios\":[0,4,128,0],"
    "\"max_position_embeddings\":64,\"num_nextn_predict_layers\":1,\"bos_token_id\":0,"
    "\"eos_token_id\":1}";

enum { MAX_DRAFTS = 400 };

typedef struct draft {
    char name[128];
    const char *dtype; /* NULL: left out */
    int64_t shape[2];
    int32_t rank;
    uint8_t *data;
    size_t bytes;
} draft;

typedef struct model {
    char dir[64];
    hd_model_spec *spec;
    hd_schema schema;
    draft *drafts; /* [MAX_DRAFTS] */
    int32_t n;
    hd_weights *weights;
    hd_err err;
} model;

static void write_file(const char *dir, const char *name, const void *data, size_t n) {
    char *path = hd_path_join(dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
    free(path);
}

static draft *add(model *m, const char *name, const char *dtype, int32_t rank, int64_t rows,
                  int64_t cols, size_t bytes) {
    assert_true(m->n < MAX_DRAFTS);
    draft *d = &m->drafts[m->n++];
    *d = (draft){
        .dtype = dtype,
        .rank = rank,
        .shape = {rank == 2 ? rows : cols, cols},
        .data = calloc(1, bytes + 1),
        .bytes = bytes
    };
    snprintf(d->name, sizeof d->name, "%s", name);
    return d;
}

static draft *named(model *m, const char *name) {
    for (int32_t i = 0; i < m->n; i++) {
        if (strcmp(m->drafts[i].name, name) == 0) return &m->drafts[i];
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

/* Element i of every plain tensor is i, exact in BF16 up to 256. */
static void begin(model *m, const char *config) {
    *m = (model){.dir = "/tmp/hadal-test-XXXXXX"};
    m->drafts = calloc(MAX_DRAFTS, sizeof *m->drafts);
    assert_non_null(m->drafts);
    assert_non_null(mkdtemp(m->dir));
    write_file(m->dir, "config.json", config, strlen(config));
    if (hd_model_spec_open(&m->spec, m->dir, &m->err) != HD_OK) fail_msg("%s", m->err.msg);
    assert_int_equal(hd_schema_open(&m->schema, m->spec, &m->err), HD_OK);
    for (int32_t i = 0; i < m->schema.n; i++) {
        const hd_tensor_decl *d = &m->schema.decls[i];
        size_t n = (size_t)d->rows * (size_t)d->cols;
        bool table = d->role == HD_ROUTER_HASH;
        draft *t = add(m, d->name, table ? "I64" : "BF16", d->rank, d->rows, d->cols,
                       n * (table ? 8 : 2));
        for (size_t k = 0; k < n; k++) {
            uint16_t half = hd_f32_to_bf16((float)(k % 256));
            if (table) {
                t->data[8 * k] = (uint8_t)(k % 4);
            } else {
                memcpy(t->data + 2 * k, &half, 2);
            }
        }
    }
}

/* Changes a plain tensor to another type with `bytes` of data, all zero. */
static draft *retype(model *m, const char *name, const char *dtype, int64_t cols,
                     size_t bytes) {
    draft *t = named(m, name);
    free(t->data);
    t->dtype = dtype;
    t->shape[t->rank - 1] = cols;
    t->data = calloc(1, bytes + 1);
    t->bytes = bytes;
    return t;
}

static void save(const model *m) {
    size_t cap = 1 << 20, used = 0, at = 0;
    char *header = malloc(cap);
    assert_non_null(header);
    used += (size_t)snprintf(header, cap, "{\"__metadata__\":{}");
    for (int32_t i = 0; i < m->n; i++) {
        const draft *t = &m->drafts[i];
        if (!t->dtype) continue;
        char shape[64] = "";
        if (t->rank == 1) snprintf(shape, sizeof shape, "%lld", (long long)t->shape[0]);
        if (t->rank == 2) {
            snprintf(shape, sizeof shape, "%lld,%lld", (long long)t->shape[0],
                     (long long)t->shape[1]);
        }
        used += (size_t)snprintf(
            header + used, cap - used,
            ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", t->name,
            t->dtype, shape, at, at + t->bytes);
        at += t->bytes;
    }
    used += (size_t)snprintf(header + used, cap - used, "}");
    assert_true(used < cap);
    uint8_t *file = malloc(8 + used + at), *to = file + 8 + used;
    assert_non_null(file);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)used >> (8 * i));
    memcpy(file + 8, header, used);
    for (int32_t i = 0; i < m->n; i++) {
        if (!m->drafts[i].dtype) continue;
        memcpy(to, m->drafts[i].data, m->drafts[i].bytes);
        to += m->drafts[i].bytes;
    }
    write_file(m->dir, "model.safetensors", file, 8 + used + at);
    free(file);
    free(header);
}

static void open_well(model *m) {
    save(m);
    if (hd_weights_open(&m->weights, m->dir, m->spec, &m->err) != HD_OK) {
        fail_msg("%s", m->err.msg);
    }
}

static void open_badly(model *m, const char *refusal) {
    save(m);
    hd_weights *w;
    assert_int_equal(hd_weights_open(&w, m->dir, m->spec, &m->err), HD_EFORMAT);
    assert_null(w);
    if (!strstr(m->err.msg, refusal)) fail_msg("'%s'\n  not '%s'", m->err.msg, refusal);
}

static void end(model *m) {
    const char *const names[] = {"config.json", "model.safetensors"};
    hd_weights_close(m->weights);
    for (int32_t i = 0; i < m->n; i++) free(m->drafts[i].data);
    free(m->drafts);
    hd_schema_close(&m->schema);
    hd_model_spec_close(m->spec);
    for (size_t i = 0; i < HD_LEN(names); i++) {
        char *path = hd_path_join(m->dir, names[i]);
        unlink(path);
        free(path);
    }
    rmdir(m->dir);
}

static void plain_tensors_are_bound(void **state) {
    (void)state;
    model m;
    begin(&m, v3_config);
    open_well(&m);
    const hd_weight *embed = hd_weights_matrix(m.weights, HD_GLOBAL, HD_EMBED);
    assert_non_null(embed);
    assert_int_equal(embed->type, HD_BF16);
    assert_int_equal(embed->rows, 24);
    assert_true(hd_weight_at(embed, 2, 3) == 67.0f);
    const hd_expert_table *down = hd_weights_experts(m.weights, 1, HD_EXPERT_DOWN);
    assert_non_null(down);
    assert_int_equal(down->n, 4);
    for (int e = 0; e < 4; e++) {
        assert_int_equal(down->slots[e].rows, 32);
        assert_true(hd_weight_at(&down->slots[e], 1, 1) == 7.0f);
    }
    const float *norm = hd_weights_vector(m.weights, 1, HD_KV_A_NORM);
    assert_non_null(norm);
    for (int i = 0; i < 8; i++) assert_true(norm[i] == (float)i);
    assert_null(hd_weights_experts(m.weights, 0, HD_EXPERT_DOWN));
    assert_null(hd_weights_matrix(m.weights, 0, HD_ROUTER));
    assert_null(hd_weights_vector(m.weights, 0, HD_ROUTER_BIAS));
    assert_null(hd_weights_table(m.weights, 1));
    assert_int_equal(hd_weights_n_mtp(m.weights), 1);
    assert_non_null(hd_weights_matrix(m.weights, 2, HD_MTP_PROJ));
    end(&m);
}

static void v4_tables_and_vectors_are_bound(void **state) {
    (void)state;
    model m;
    begin(&m, v4_config);
    draft *sink = retype(&m, "layers.1.attn.attn_sink", "F32", 2, 8);
    float two[2] = {-1.5f, 0.25f};
    memcpy(sink->data, two, sizeof two);
    open_well(&m);
    const int32_t *table = hd_weights_table(m.weights, 0);
    assert_non_null(table);
    assert_int_equal(table[2 * 5 + 1], 11 % 4);
    assert_null(hd_weights_table(m.weights, 1));
    assert_null(hd_weights_matrix(m.weights, 0, HD_ROUTER_HASH));
    const float *read = hd_weights_vector(m.weights, 1, HD_SINK);
    assert_true(read[0] == -1.5f && read[1] == 0.25f);
    const float *ape = hd_weights_vector(m.weights, 2, HD_COMP_APE); /* [128, 8] */
    assert_true(ape[127 * 8 + 7] == 255.0f);
    assert_null(hd_weights_vector(m.weights, 2, HD_INDEX_COMP_APE));
    /* an MTP layer without tables of its own uses the model's */
    assert_ptr_equal(hd_weights_matrix(m.weights, 3, HD_HEAD),
                     hd_weights_matrix(m.weights, HD_GLOBAL, HD_HEAD));
    end(&m);
}

static void fp8_blocks_are_bound(void **state) {
    (void)state;
    const char *const types[] = {"F32", "BF16", "F8_E8M0"};
    const size_t sizes[] = {4, 2, 1};
    for (size_t k = 0; k < HD_LEN(types); k++) {
        model m;
        begin(&m, v3_config);
        /* O is [32, 10]: blocks of 16 x 8 make [2, 2] scales */
        draft *o = retype(&m, "model.layers.0.self_attn.o_proj.weight", "F8_E4M3", 10, 320);
        memset(o->data, 0x40, 320); /* 2.0 */
        draft *s = add(&m, "model.layers.0.self_attn.o_proj.weight_scale_inv", types[k], 2, 2,
                       2, 4 * sizes[k]);
        for (size_t i = 0; i < 4; i++) {
            float f = (float)(1 << i);
            uint16_t half = hd_f32_to_bf16(f);
            uint8_t e8m0 = (uint8_t)(127 + i);
            memcpy(s->data + sizes[k] * i,
                   k == 0   ? (void *)&f
                   : k == 1 ? (void *)&half
                            : (void *)&e8m0,
                   sizes[k]);
        }
        open_well(&m);
        const hd_weight *w = hd_weights_matrix(m.weights, 0, HD_O);
        assert_int_equal(w->type, HD_E4M3);
        assert_int_equal(w->block_rows, 16);
        assert_int_equal(w->block_cols, 8);
        assert_true(hd_weight_at(w, 0, 0) == 2.0f && hd_weight_at(w, 15, 9) == 4.0f);
        assert_true(hd_weight_at(w, 16, 7) == 8.0f && hd_weight_at(w, 31, 8) == 16.0f);
        end(&m);
    }
}

static void packed_fp4_is_bound(void **state) {
    (void)state;
    const struct {
        const char *dtype;
        int64_t cols;
    } forms[] = {
        {"I8", 32},
        {"U8", 32},
        {"F4", 64}
    };
    for (size_t k = 0; k < HD_LEN(forms); k++) {
        model m;
        begin(&m, v4_config);
        draft *t = retype(&m, "layers.2.ffn.experts.3.w1.weight", forms[k].dtype, forms[k].cols,
                          6 * 32);
        memset(t->data, 0x2b, 6 * 32); /* columns -1.5, 1 */
        draft *s = add(&m, "layers.2.ffn.experts.3.w1.scale", "F8_E8M0", 2, 6, 2, 12);
        memset(s->data, 127, 12);
        s->data[2 * 5 + 1] = 130;
        open_well(&m);
        const hd_weight *w = &hd_weights_experts(m.weights, 2, HD_EXPERT_GATE)->slots[3];
        assert_int_equal(w->type, HD_E2M1);
        assert_int_equal(w->cols, 64);
        assert_true(hd_weight_at(w, 0, 0) == -1.5f && hd_weight_at(w, 5, 31) == 1.0f);
        assert_true(hd_weight_at(w, 5, 32) == -12.0f && hd_weight_at(w, 5, 63) == 8.0f);
        end(&m);
    }
}

/* Scales 1 and 2, one group with a scale that underflowed to zero, global 0.5. */
static void add_nvfp4(model *m, float global) {
    draft *t = retype(m, "model.layers.1.mlp.experts.0.up_proj.weight", "U8", 16, 6 * 16);
    memset(t->data, 0x42, 6 * 16); /* columns 1, 2 */
    draft *s =
        add(m, "model.layers.1.mlp.experts.0.up_proj.weight_scale", "F8_E4M3", 2, 6, 2, 12);
    memset(s->data, 0x38, 12);
    s->data[1] = 0x40;
    s->data[2] = 0;
    draft *g = add(m, "model.layers.1.mlp.experts.0.up_proj.weight_scale_2", "F32", 0, 1, 1, 4);
    memcpy(g->data, &global, 4);
    add(m, "model.layers.1.mlp.experts.0.up_proj.input_scale", "F32", 0, 1, 1, 4);
}

static void nvfp4_is_bound(void **state) {
    (void)state;
    model m;
    begin(&m, v3_config);
    add_nvfp4(&m, 0.5f);
    open_well(&m);
    const hd_weight *w = &hd_weights_experts(m.weights, 1, HD_EXPERT_UP)->slots[0];
    assert_true(w->global == 0.5f && w->block_cols == 16);
    assert_true(hd_weight_at(w, 0, 0) == 0.5f && hd_weight_at(w, 0, 17) == 2.0f);
    assert_true(hd_weight_at(w, 1, 0) == 0.0f);
    int32_t decl, ignored = 0, unknown = 0;
    for (int32_t i = 0; i < hd_checkpoint_count(hd_weights_checkpoint(m.weights)); i++) {
        hd_use use = hd_weights_use(m.weights, i, &decl);
        ignored += use == HD_USE_IGNORED;
        unknown += use == HD_USE_UNKNOWN;
    }
    assert_int_equal(ignored, 1);
    assert_int_equal(unknown, 0);
    end(&m);
    const float bad[] = {0, -1, (float)(1e300 * 1e300)};
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        begin(&m, v3_config);
        add_nvfp4(&m, bad[i]);
        open_badly(&m, "weight_scale_2: bad scale");
        end(&m);
    }
}

static void misfits_are_named(void **state) {
    (void)state;
    const struct {
        const char *name, *dtype;
        int64_t rows, cols;
        const char *refusal;
    } cases[] = {
        {"model.norm.weight",                         "BF16",    0,  31,
         "tensor model.norm.weight: shape mismatch: shape [31]"                                          },
        {"model.embed_tokens.weight",                 "BF16",    32, 24, "shape mismatch: shape [32, 24]"},
        {"model.norm.weight",                         "F8_E4M3", 0,  32, "dtype mismatch: F8_E4M3"       },
        {"model.norm.weight",                         "F64",     0,  32, "dtype mismatch: F64"           },
        {"lm_head.weight",                            "I32",     24, 32, "dtype mismatch: I32"           },
        {"lm_head.weight",                            "F8_E4M3", 24, 32, "bad scale: F8_E4M3 needs"      },
        {"lm_head.weight",                            "U8",      24, 16, "bad scale: U8 needs"           },
        {"lm_head.weight",                            "U8",      24, 32, "shape mismatch"                },
        {"model.layers.1.self_attn.kv_b_proj.weight", "F8_E5M2", 22, 8,
         "dtype mismatch: F8_E5M2"                                                                       },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        model m;
        begin(&m, v3_config);
        draft *t = named(&m, cases[i].name);
        size_t rows = t->rank == 2 ? (size_t)cases[i].rows : 1, wide = 1;
        if (strcmp(cases[i].dtype, "BF16") == 0) wide = 2;
        if (strcmp(cases[i].dtype, "I32") == 0) wide = 4;
        if (strcmp(cases[i].dtype, "F64") == 0) wide = 8;
        retype(&m, cases[i].name, cases[i].dtype, cases[i].cols,
               rows * (size_t)cases[i].cols * wide);
        if (t->rank == 2) t->shape[0] = cases[i].rows;
        open_badly(&m, cases[i].refusal);
        end(&m);
    }
}

/* An FP8 matrix [32, 10] in blocks of 16 x 8, with the given scales. */
static void bend_scale(model *m, const char *dtype, int64_t rows, int64_t cols,
                       const void *last, size_t each) {
    begin(m, v3_config);
    retype(m, "model.layers.0.self_attn.o_proj.weight", "F8_E4M3", 10, 320);
    size_t n = (size_t)(rows * cols);
    draft *s = add(m, "model.layers.0.self_attn.o_proj.weight_scale_inv", dtype, 2, rows, cols,
                   n * each);
    float one = 1;
    if (each == 4) {
        for (size_t i = 0; i < n; i++) memcpy(s->data + 4 * i, &one, 4);
    }
    memcpy(s->data + (n - 1) * each, last, each);
}

static void bad_scales_are_refused(void **state) {
    (void)state;
    const struct {
        uint32_t bits;
        const char *refusal;
    } values[] = {
        {0x00000000, "weight_scale_inv: bad scale: [1, 1] is zero"    },
        {0x80000000, "weight_scale_inv: bad scale: [1, 1] is zero"    },
        {0xbf800000, "weight_scale_inv: bad scale: [1, 1] is negative"},
        {0x7fc00000, "weight_scale_inv: bad scale: [1, 1] is NaN"     },
        {0x7f800000, "weight_scale_inv: bad scale: [1, 1] is infinite"},
    };
    model m;
    for (size_t i = 0; i < HD_LEN(values); i++) {
        bend_scale(&m, "F32", 2, 2, &values[i].bits, 4);
        open_badly(&m, values[i].refusal);
        end(&m);
    }
    const float one = 1;
    const uint8_t nan_code = 255;
    bend_scale(&m, "F8_E8M0", 2, 2, &nan_code, 1);
    open_badly(&m, "bad scale: [1, 1] is NaN");
    end(&m);
    bend_scale(&m, "F32", 1, 1, &one, 4);
    open_badly(&m, "bad scale: shape [1, 1] in the file, must be [2, 2]");
    end(&m);
    bend_scale(&m, "I32", 2, 2, &one, 4);
    open_badly(&m, "bad scale: dtype I32");
    end(&m);
    begin(&m, v3_config); /* scales beside a tensor that has no use for them */
    add(&m, "model.layers.0.self_attn.o_proj.weight_scale_inv", "F32", 2, 2, 2, 16);
    open_badly(&m, "dtype mismatch: BF16 is not quantized");
    end(&m);
}

static void missing_tensors_are_listed(void **state) {
    (void)state;
    model m;
    begin(&m, v3_config);
    named(&m, "model.norm.weight")->dtype = NULL;
    open_badly(&m, "missing tensor model.norm.weight");
    assert_null(strstr(m.err.msg, "more"));
    end(&m);
    begin(&m, v3_config);
    for (int32_t i = 0; i < m.n; i++) {
        if (strstr(m.drafts[i].name, "layers.1.")) m.drafts[i].dtype = NULL;
    }
    open_badly(&m, "missing tensor model.layers.1.input_layernorm.weight, ");
    assert_non_null(strstr(m.err.msg, " more"));
    end(&m);
}

static void drop(model *m, const char *part) {
    for (int32_t i = 0; i < m->n; i++) {
        if (strstr(m->drafts[i].name, part)) m->drafts[i].dtype = NULL;
    }
}

static void mtp_layers_come_whole_or_not_at_all(void **state) {
    (void)state;
    model m;
    begin(&m, v3_config);
    drop(&m, "layers.2.");
    open_well(&m);
    assert_int_equal(hd_weights_n_mtp(m.weights), 0);
    assert_null(hd_weights_matrix(m.weights, 2, HD_HEAD));
    end(&m);
    begin(&m, v3_config);
    drop(&m, "layers.2.embed_tokens");
    drop(&m, "layers.2.shared_head.head");
    open_well(&m);
    assert_int_equal(hd_weights_n_mtp(m.weights), 1);
    assert_ptr_equal(hd_weights_matrix(m.weights, 2, HD_EMBED),
                     hd_weights_matrix(m.weights, HD_GLOBAL, HD_EMBED));
    end(&m);
    begin(&m, v3_config);
    drop(&m, "layers.2.enorm");
    open_badly(&m, "missing tensor model.layers.2.enorm.weight");
    end(&m);
}

static void tied_heads_are_the_embedding(void **state) {
    (void)state;
    char config[sizeof v3_config + 40];
    model m;
    snprintf(config, sizeof config, "{\"tie_word_embeddings\":true,%s", v3_config + 1);
    begin(&m, config);
    drop(&m, "head");
    open_badly(&m, "missing tensor model.layers.2.shared_head.norm.weight");
    end(&m);
    begin(&m, config);
    drop(&m, "lm_head");
    open_well(&m);
    assert_ptr_equal(hd_weights_matrix(m.weights, HD_GLOBAL, HD_HEAD),
                     hd_weights_matrix(m.weights, HD_GLOBAL, HD_EMBED));
    end(&m);
    begin(&m, v3_config);
    drop(&m, "lm_head");
    open_badly(&m, "missing tensor lm_head.weight");
    end(&m);
}

static void hash_tables_name_experts(void **state) {
    (void)state;
    model m;
    begin(&m, v4_config);
    named(&m, "layers.0.ffn.gate.tid2eid")->data[8 * 7] = 4;
    open_badly(&m, "tid2eid: bad expert: [3, 1] is 4, must be below 4");
    end(&m);
    begin(&m, v4_config);
    memset(named(&m, "layers.0.ffn.gate.tid2eid")->data, 0xff, 8);
    open_badly(&m, "[0, 0] is -1");
    end(&m);
    begin(&m, v4_config);
    draft *t = retype(&m, "layers.0.ffn.gate.tid2eid", "I32", 2, 24 * 2 * 4);
    t->data[4 * 47] = 3;
    open_well(&m);
    assert_int_equal(hd_weights_table(m.weights, 0)[47], 3);
    end(&m);
}

/* An odd tensor in front moves every other one to an odd address. */
static void nothing_needs_to_be_aligned(void **state) {
    (void)state;
    model m;
    begin(&m, v4_config);
    for (int32_t i = m.n; i > 0; i--) m.drafts[i] = m.drafts[i - 1];
    m.n++;
    m.drafts[0] = (draft){.name = "odd",
                          .dtype = "U8",
                          .rank = 1,
                          .shape = {1},
                          .data = calloc(1, 1),
                          .bytes = 1};
    retype(&m, "layers.1.attn.attn_sink", "F32", 2, 8)->data[3] = 0x40; /* 2.0 */
    add(&m, "layers.1.odd", "U8", 1, 1, 1, 1);
    open_well(&m);
    assert_true(hd_weights_vector(m.weights, 1, HD_SINK)[0] == 2.0f);
    assert_int_equal(hd_weights_table(m.weights, 0)[1], 1);
    const hd_weight *embed = hd_weights_matrix(m.weights, HD_GLOBAL, HD_EMBED);
    assert_true(hd_weight_at(embed, 2, 3) == 131.0f);
    end(&m);
}

static void a_survey_goes_on(void **state) {
    (void)state;
    model m;
    begin(&m, v3_config);
    named(&m, "model.norm.weight")->dtype = NULL;
    named(&m, "lm_head.weight")->shape[0] = 32;
    named(&m, "lm_head.weight")->shape[1] = 24;
    save(&m);
    assert_int_equal(hd_weights_survey(&m.weights, m.dir, m.spec, &m.err), HD_OK);
    assert_non_null(strstr(hd_weights_problem(m.weights)->msg, "missing tensor model.norm"));
    const hd_schema *schema = hd_weights_schema(m.weights);
    int32_t missing = 0, stored = 0;
    for (int32_t i = 0; i < schema->n; i++) {
        missing += hd_weights_missing(m.weights, i);
        stored += hd_weights_stored(m.weights, i) != NULL;
    }
    assert_int_equal(missing, 1);
    assert_int_equal(stored, schema->n - 2);
    end(&m);
}

int test_weights(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_tensors_are_bound),
        cmocka_unit_test(v4_tables_and_vectors_are_bound),
        cmocka_unit_test(fp8_blocks_are_bound),
        cmocka_unit_test(packed_fp4_is_bound),
        cmocka_unit_test(nvfp4_is_bound),
        cmocka_unit_test(misfits_are_named),
        cmocka_unit_test(bad_scales_are_refused),
        cmocka_unit_test(missing_tensors_are_listed),
        cmocka_unit_test(mtp_layers_come_whole_or_not_at_all),
        cmocka_unit_test(tied_heads_are_the_embedding),
        cmocka_unit_test(hash_tables_name_experts),
        cmocka_unit_test(nothing_needs_to_be_aligned),
        cmocka_unit_test(a_survey_goes_on),
    };
    return cmocka_run_group_tests_name("weights", tests, NULL, NULL);
}
