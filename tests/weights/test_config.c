/* test_config.c - config.json of every family: what is read, and what is refused with which
 * sentence. C01 etc. number the rows of a list of faults. */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "weights/configs.h"

/* ---- what is read ---- */

static const struct released {
    const char *name;
    hd_family family;
    int32_t layers, dense, mtp, heads, q_rank, experts, top_k, groups;
    hd_group_rule rule;
    hd_score score;
    double scale, theta, softmax_scale;
} released[] = {
    {"v2_lite",           HD_FAMILY_V2,  27, 1, 0, 16,  0,    64,  6, 1, HD_GROUPS_NONE,    HD_SCORE_SOFTMAX, 1,
     10000,                                                                                                                 0.1147213868},
    {"v2",                HD_FAMILY_V2,  60, 1, 0, 128, 1536, 160, 6, 8, HD_GROUPS_MAX,     HD_SCORE_SOFTMAX, 16,
     10000,                                                                                                                 0.1147213868},
    {"moonlight_16b_a3b", HD_FAMILY_V3,  27, 1, 0, 16,  0,    64,  6, 1, HD_GROUPS_NONE,
     HD_SCORE_SIGMOID,                                                                                        2.446, 50000, 0.0721687836},
    {"v3",                HD_FAMILY_V3,  61, 3, 1, 128, 1536, 256, 8, 8, HD_GROUPS_TOP2SUM, HD_SCORE_SIGMOID,
     2.5,                                                                                                            10000, 0.1352337789},
    {"r1",                HD_FAMILY_V3,  61, 3, 1, 128, 1536, 256, 8, 8, HD_GROUPS_TOP2SUM, HD_SCORE_SIGMOID,
     2.5,                                                                                                            10000, 0.1352337789},
    {"v3_1",              HD_FAMILY_V3,  61, 3, 1, 128, 1536, 256, 8, 8, HD_GROUPS_TOP2SUM, HD_SCORE_SIGMOID,
     2.5,                                                                                                            10000, 0.1352337789},
    {"v3_2_exp",          HD_FAMILY_V32, 61, 3, 1, 128, 1536, 256, 8, 8, HD_GROUPS_TOP2SUM,
     HD_SCORE_SIGMOID,                                                                                        2.5,   10000, 0.1352337789},
    {"v4_flash",          HD_FAMILY_V4,  43, 0, 1, 64,  1024, 256, 6, 1, HD_GROUPS_NONE,
     HD_SCORE_SQRT_SOFTPLUS,                                                                                  1.5,   10000, 0.0441941738},
    {"v4_pro",            HD_FAMILY_V4,  61, 0, 1, 128, 1536, 384, 6, 1, HD_GROUPS_NONE,
     HD_SCORE_SQRT_SOFTPLUS,                                                                                  2.5,   10000, 0.0441941738},
};

static void released_models_are_read(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(released); i++) {
        const struct released *r = &released[i];
        hd_model_spec *s = config_open(r->name);
        int32_t dense = 0;
        for (int32_t l = 0; l < s->n_layers + s->n_mtp; l++) {
            dense += s->layers[l].mlp == HD_MLP_DENSE;
        }
        assert_int_equal(s->family, r->family);
        assert_int_equal(s->n_layers, r->layers);
        assert_int_equal(dense, r->dense);
        assert_int_equal(s->n_mtp, r->mtp);
        assert_int_equal(s->n_heads, r->heads);
        assert_int_equal(s->q_rank, r->q_rank);
        assert_int_equal(s->route.n_experts, r->experts);
        assert_int_equal(s->route.top_k, r->top_k);
        assert_int_equal(s->route.n_groups, r->groups);
        assert_int_equal(s->route.group_rule, r->rule);
        assert_int_equal(s->route.score, r->score);
        assert_int_equal(s->route.normalize, r->family != HD_FAMILY_V2);
        assert_true(s->route.scale == (float)r->scale && s->rope.theta == r->theta);
        assert_true(fabs(s->softmax_scale - r->softmax_scale) < 1e-10);
        assert_true(s->rope.magnitude == 1);
        assert_int_equal(s->n_eos, 1);
        assert_int_equal(s->layers[s->n_layers - 1].mlp, HD_MLP_MOE);
        hd_model_spec_close(s);
    }
}

static void v4_layers_follow_their_ratios(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int32_t window, csa, hca, first;
    } expect[] = {
        {"v4_flash", 2, 21, 20, 0  },
        {"v4_pro",   0, 30, 31, 128}
    };
    for (size_t i = 0; i < HD_LEN(expect); i++) {
        hd_model_spec *s = config_open(expect[i].name);
        int32_t n[HD_N_ATTENTION_KINDS] = {0};
        for (int32_t l = 0; l < s->n_layers; l++) n[s->layers[l].attention]++;
        assert_int_equal(n[HD_ATTN_WINDOW], expect[i].window);
        assert_int_equal(n[HD_ATTN_CSA], expect[i].csa);
        assert_int_equal(n[HD_ATTN_HCA], expect[i].hca);
        assert_int_equal(s->layers[0].compress_ratio, expect[i].first);
        assert_int_equal(s->layers[2].compress_ratio, 4);
        assert_int_equal(s->layers[2].mlp, HD_MLP_MOE_HASH);
        assert_int_equal(s->layers[3].mlp, HD_MLP_MOE);
        assert_int_equal(s->n_hash_layers, 3);
        assert_int_equal(s->layers[s->n_layers].attention, HD_ATTN_WINDOW);
        assert_int_equal(s->layers[s->n_layers].mlp, HD_MLP_MOE);
        assert_true(s->rope.factor == 1 && s->rope_compress.factor == 16);
        assert_true(s->rope_compress.theta == 160000 && s->rope_compress.original_len == 65536);
        assert_int_equal(s->quant.experts, HD_FORMAT_FP4);
        assert_true(s->quant.scale_ue8m0 && s->swiglu_limit == 10);
        hd_model_spec_close(s);
    }
}

/* Compares all but the notices. Both structs were zeroed before they were filled. */
static void assert_same_spec(hd_model_spec *a, hd_model_spec *b) {
    hd_model_spec x = *a, y = *b;
    assert_memory_equal(a->layers, b->layers,
                        (size_t)(a->n_layers + a->n_mtp) * sizeof *a->layers);
    x.layers = y.layers = NULL;
    x.n_notices = y.n_notices = 0;
    memset(x.notices, 0, sizeof x.notices);
    memset(y.notices, 0, sizeof y.notices);
    assert_memory_equal(&x, &y, sizeof x);
}

static void both_spellings_say_the_same(void **state) {
    (void)state;
    static const char *const pairs[][2] = {
        {"v2_lite",  "v2_lite.hf" },
        {"v3",       "v3.hf"      },
        {"v3_2_exp", "v3_2_exp.hf"},
        {"v4_flash", "v4_flash.hf"},
        {"v4_pro",   "v4_pro.hf"  }
    };
    for (size_t i = 0; i < HD_LEN(pairs); i++) {
        hd_model_spec *flat = config_open(pairs[i][0]), *nested = config_open(pairs[i][1]);
        assert_same_spec(flat, nested);
        hd_model_spec_close(flat);
        hd_model_spec_close(nested);
    }
}

static void odd_sizes_are_as_good(void **state) {
    (void)state;
    hd_model_spec *s = config_open("tiny_v4");
    assert_int_equal(s->head_dim, 64);
    assert_int_equal(s->rope_dim, 16);
    assert_int_equal(s->window, 32);
    assert_int_equal(s->route.n_experts, 12);
    assert_int_equal(s->layers[1].attention, HD_ATTN_HCA);
    assert_int_equal(s->layers[5].attention, HD_ATTN_WINDOW);
    assert_int_equal(s->quant.method, HD_QUANT_NONE);
    assert_int_equal(s->quant.experts, HD_FORMAT_NONE);
    hd_model_spec_close(s);

    s = config_changed("tiny_v4", "{\"compress_rates\": {\"compressed_sparse_attention\": 3, "
                                  "\"heavily_compressed_attention\": 10}}");
    assert_int_equal(s->csa_ratio, 3);
    assert_int_equal(s->layers[1].compress_ratio, 10);
    assert_int_equal(s->layers[2].compress_ratio, 3);
    hd_model_spec_close(s);

    s = config_open("tiny_v2"); /* cos and sin scaled: m(8, 0.8) / m(8, 0.7) */
    double m = 0.1 * 0.7 * log(8) + 1;
    assert_true(fabs(s->rope.magnitude - (0.1 * 0.8 * log(8) + 1) / m) < 1e-15);
    assert_true(fabs(s->softmax_scale - m * m / sqrt(48)) < 1e-15);
    hd_model_spec_close(s);
}

/* Changes with the same meaning, or with another accepted one. */
static void freedoms_are_accepted(void **state) {
    (void)state;
    hd_model_spec *s = config_changed(
        "v3", "{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 40, "
              "\"original_max_position_embeddings\": 4096}, \"eos_token_id\": [1, 7, 1]}");
    assert_true(s->rope.beta_fast == 32 && s->rope.beta_slow == 1);
    assert_true(fabs(s->rope.magnitude - (0.1 * log(40) + 1)) < 1e-15);
    assert_true(fabs(s->softmax_scale - 1 / sqrt(192)) < 1e-15);
    assert_int_equal(s->n_eos, 2);
    assert_int_equal(s->eos[1], 7);
    hd_model_spec_close(s);

    s = config_changed("v3",
                       "{\"rope_scaling\": null, \"n_group\": null, \"topk_group\": null, "
                       "\"topk_method\": null, \"bos_token_id\": null}");
    assert_true(s->rope.factor == 1 && s->rope.magnitude == 1);
    assert_int_equal(s->route.group_rule, HD_GROUPS_NONE);
    assert_int_equal(s->bos, -1);
    hd_model_spec_close(s);

    s = config_changed("v3",
                       "{\"rope_scaling\": {\"type\": \"default\"}, \"moe_layer_freq\": 2, "
                       "\"dtype\": \"float32\", \"tie_word_embeddings\": true}");
    assert_true(s->rope.factor == 1 && s->tied_embeddings);
    assert_int_equal(s->layers[3].mlp, HD_MLP_DENSE);
    assert_int_equal(s->layers[4].mlp, HD_MLP_MOE);
    assert_int_equal(s->dtype, HD_F32);
    hd_model_spec_close(s);

    s = config_changed("v3", "{\"quantization_config\": {\"quant_method\": \"modelopt\", "
                             "\"quant_algo\": \"NVFP4\"}}");
    assert_int_equal(s->quant.method, HD_QUANT_MODELOPT);
    assert_int_equal(s->quant.experts, HD_FORMAT_NVFP4);
    hd_model_spec_close(s);

    s = config_changed("v3", "{\"n_shared_experts\": null, \"first_k_dense_replace\": 62, "
                             "\"rope_interleave\": false}");
    assert_int_equal(s->n_shared, 0);
    assert_int_equal(s->layers[60].mlp, HD_MLP_DENSE);
    assert_int_equal(s->layers[61].mlp, HD_MLP_MOE); /* MTP */
    assert_true(s->rope_half_split);
    hd_model_spec_close(s);
}

/* Kimi K2 is V3 with other sizes and a name of its own; some files name no class. */
static void families_have_other_names(void **state) {
    (void)state;
    hd_model_spec *s = config_changed("v3", "{\"model_type\": \"kimi_k2\"}");
    assert_int_equal(s->family, HD_FAMILY_V3);
    hd_model_spec_close(s);

    s = config_changed("v3_2_exp", "{\"architectures\": null}");
    assert_int_equal(s->family, HD_FAMILY_V32);
    assert_string_equal(s->architecture, "DeepseekV32ForCausalLM");
    hd_model_spec_close(s);

    s = config_changed("v4_flash", "{\"model_type\": null}");
    assert_int_equal(s->family, HD_FAMILY_V4);
    hd_model_spec_close(s);
}

static void v4_ratio_lists_may_differ_in_length(void **state) {
    (void)state;
    hd_model_spec *s =
        config_changed(/* the list ends with the main layers */
                       "tiny_v4",
                       "{\"layer_types\": null, \"compress_ratios\": [0, 128, 4, 128, 4, 0]}");
    hd_model_spec *nested = config_open("tiny_v4");
    assert_same_spec(s, nested);
    hd_model_spec_close(nested);
    hd_model_spec_close(s);

    s = config_changed("tiny_v4", "{\"layer_types\": null, \"compress_rates\": null, "
                                  "\"mlp_layer_types\": null, \"num_hash_layers\": 1, "
                                  "\"compress_ratios\": [0, 16, 4, 16, 4, 0, 0]}");
    assert_int_equal(s->hca_ratio, 16);
    assert_int_equal(s->n_hash_layers, 1);
    hd_model_spec_close(s);

    /* ratios of a drafter's stages that nothing describes */
    s = config_changed("v4_flash_0731",
                       "{\"dspark_block_size\": null, \"dspark_markov_rank\": null, "
                       "\"dspark_noise_token_id\": null, \"dspark_target_layer_ids\": null}");
    assert_int_equal(s->n_mtp, 0);
    assert_int_equal(s->drafter, HD_DRAFTER_NONE);
    assert_int_equal(s->n_notices, 1);
    assert_non_null(strstr(s->notices[0], "nothing drafts"));
    hd_model_spec_close(s);
}

static void dspark_stages_follow_the_layers(void **state) {
    (void)state;
    hd_model_spec *s = config_open("v4_flash_0731");
    assert_int_equal(s->n_notices, 0);
    assert_int_equal(s->drafter, HD_DRAFTER_DSPARK);
    assert_int_equal(s->n_mtp, 3); /* num_nextn_predict_layers is 1 */
    for (int32_t l = 43; l < 46; l++) {
        assert_int_equal(s->layers[l].attention, HD_ATTN_WINDOW);
        assert_int_equal(s->layers[l].mlp, HD_MLP_MOE);
    }
    const hd_dspark_spec expect = {
        .block = 5,
        .filler = 128799,
        .rank = 256,
        .n_taps = 3,
        .taps = {40, 41, 42},
        .side = HD_TAP_OUTPUT
    };
    assert_memory_equal(&s->dspark, &expect, sizeof expect);
    hd_model_spec_close(s);
    s = config_open("v4_flash");
    assert_int_equal(s->drafter, HD_DRAFTER_MTP);
    hd_model_spec_close(s);
    s = config_open("v2");
    assert_int_equal(s->drafter, HD_DRAFTER_NONE);
    hd_model_spec_close(s);
}

static void v41_layers_follow_their_sources(void **state) {
    (void)state;
    hd_model_spec *s = config_open("v4_1_flash");
    int32_t n[HD_N_ATTENTION_KINDS] = {0};
    assert_int_equal(s->n_notices, 0);
    for (int32_t l = 0; l < s->n_layers; l++) n[s->layers[l].attention]++;
    assert_int_equal(n[HD_ATTN_WINDOW], 2);
    assert_int_equal(n[HD_ATTN_CSA2_FULL], 4);
    assert_int_equal(n[HD_ATTN_CSA2_REINDEX], 4);
    assert_int_equal(n[HD_ATTN_CSA2_REUSE], 30);
    assert_int_equal(s->layers[13].kv_layer, 8);
    assert_int_equal(s->layers[39].kv_layer, 20);
    assert_int_equal(s->layers[14].engram, 1);
    assert_int_equal(s->layers[2].engram, -1);
    assert_int_equal(s->n_mtp, 3);
    assert_int_equal(s->dspark.side, HD_TAP_INPUT);
    assert_int_equal(hd_layer_route(s, 39).n_experts, 384);
    assert_int_equal(hd_layer_route(s, 40).n_experts, 128);
    assert_int_equal(hd_layer_route(s, 42).top_k, 3);
    assert_int_equal(s->quant.block_rows, 32);
    assert_int_equal(s->quant.experts, HD_FORMAT_FP4);
    hd_model_spec_close(s);

    s = config_changed("v4_1_flash", "{\"candidate_source_layer_id\": -1}");
    assert_int_equal(s->pool_layer, -1);
    hd_model_spec_close(s);
}

/* ---- what is ignored with a notice ---- */

static void unknown_keys_are_counted(void **state) { /* C28, C22 */
    (void)state;
    char *text = config_text("tiny_v3");
    size_t n = strlen(text) + 10000 * 24;
    char *big = malloc(n);
    assert_non_null(big);
    size_t at = (size_t)snprintf(big, n, "{\"auto_map\": {\"AutoModel\": \"evil.Code\"},");
    for (int i = 0; i < 10000; i++) {
        at += (size_t)snprintf(big + at, n - at, "\"strange_%d\": %d,", i, i);
    }
    snprintf(big + at, n - at, "%s", strchr(text, '{') + 1);
    hd_model_spec *s;
    assert_int_equal(config_open_text(&s, big, NULL, NULL), HD_OK);
    assert_int_equal(s->n_notices, 2);
    assert_non_null(strstr(s->notices[0], "auto_map"));
    assert_non_null(strstr(s->notices[1], "10000 unknown keys"));
    hd_model_spec_close(s);
    free(big);
    free(text);
}

static void generation_config_never_refuses_a_model(void **state) { /* C27 */
    (void)state;
    static const struct {
        const char *text;
        double temperature, top_p;
        int32_t n_eos, notices;
    } cases[] = {
        {"{\"temperature\": 0.6, \"top_p\": 0.95, \"eos_token_id\": [1, 5]}", 0.6, 0.95, 2, 0},
        {"{\"do_sample\": false, \"temperature\": 0.6}",                      0,   1,    1, 0},
        {"{\"temperature\": -1, \"top_p\": 0.5}",                             1,   0.5,  1, 1},
        {"{\"temperature\": \"hot\", \"top_p\": 0, \"eos_token_id\": 320}",   1,   1,    1, 3},
        {"{\"temperature\": 1e400}",                                          1,   1,    1, 1},
        {"[]",                                                                1,   1,    1, 1},
        {"",                                                                  1,   1,    1, 1},
    };
    char *text = config_text("tiny_v3");
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_model_spec *s;
        assert_int_equal(config_open_text(&s, text, cases[i].text, NULL), HD_OK);
        assert_true(s->temperature == cases[i].temperature && s->top_p == cases[i].top_p);
        assert_int_equal(s->n_eos, cases[i].n_eos);
        assert_int_equal(s->n_notices, cases[i].notices);
        hd_model_spec_close(s);
    }
    free(text);
}

/* ---- what is refused ---- */

static const struct refusal {
    const char *name, *changes, *removed;
    const char *says[3]; /* each must be in the sentence, besides the file's name */
} refusals[] = {
  /* C02, C03 */
    {"v3",
     "{\"architectures\": [\"LlamaForCausalLM\"]}",                         NULL,
     {"architectures", "LlamaForCausalLM", "DeepseekV4ForCausalLM"}                                                                                },
    {"v3",            "{\"architectures\": []}",                            NULL,                 {"architectures", "[]", "supported"}             },
    {"v3",            "{\"architectures\": \"DeepseekV3ForCausalLM\"}",     NULL,                 {"architectures", "array"}                       },
    {"v3",
     "{\"model_type\": null}",                                              "architectures",
     {"architectures", "missing", "DeepseekV2ForCausalLM"}                                                                                         },
    {"v3",
     "{\"model_type\": \"deepseek\"}",                                      "architectures",
     {"architectures", "missing", "DeepseekV2ForCausalLM"}                                                                                         },
    {"v2",            "{\"model_type\": \"kimi_k2\"}",                      NULL,                 {"model_type", "kimi_k2", "_v2"}                 },
    {"v3",            "{\"model_type\": \"deepseek_v2\"}",                  NULL,                 {"model_type", "deepseek_v2", "_v3"}             },
 /* V4.1 */
    {"v4_1_flash",
     "{\"kv_source_layer_ids\": [2, 8, 14]}",                               NULL,
     {"compress_ratios", "layer 20", "another ratio"}                                                                                              },
    {"v4_1_flash",
     "{\"kv_source_layer_ids\": [8, 2]}",                                   NULL,
     {"kv_source_layer_ids", "ascending"}                                                                                                          },
    {"v4_1_flash",
     "{\"kv_source_layer_ids\": [8, 14, 20]}",                              NULL,
     {"kv_source_layer_ids", "layer 2", "no layer"}                                                                                                },
    {"v4_1_flash",
     "{\"index_source_layer_ids\": [2, 8, 14, 24]}",                        NULL,
     {"index_source_layer_ids", "layer 20", "chooses none"}                                                                                        },
    {"v4_1_flash",
     "{\"index_source_layer_ids\": [0, 2, 8, 14, 20]}",                     NULL,
     {"index_source_layer_ids", "layer 0", "ratio 0"}                                                                                              },
    {"v4_1_flash",    "{\"compress_ratios\": [0, 0, 4]}",                   NULL,                 {"compress_ratios", "0, 1 or 2"}                 },
    {"v4_1_flash",
     "{\"candidate_source_layer_id\": 24}",                                 NULL,
     {"candidate_source_layer_id", "layer 24", "kv_source_layer_ids"}                                                                              },
    {"v4_1_flash",
     "{\"candidate_source_layer_id\": 14}",                                 NULL,
     {"candidate_source_layer_id", "layer 20", "another cache"}                                                                                    },
    {"v4_1_flash",
     "{\"engram_num_embeddings\": [384006168, 384016683]}",                 NULL,
     {"layer 14", "384016683", "24 primes"}                                                                                                        },
    {"v4_1_flash",    "{\"engram_n_heads\": 64}",                           NULL,                 {"engram_n_heads", "192", "64"}                  },
    {"v4_1_flash",
     "{\"dspark_n_routed_experts\": 2}",                                    NULL,
     {"dspark_num_experts_per_tok", "is 3", "0..2"}                                                                                                },
 /* C04 .. C08 */
    {"v3",            "{\"hidden_size\": 0}",                               NULL,                 {"\"hidden_size\"", "is 0", "1..65536"}          },
    {"v3",            "{\"hidden_size\": -1}",                              NULL,                 {"\"hidden_size\"", "is -1", "1..65536"}         },
    {"v3",            "{\"hidden_size\": 2147483648}",                      NULL,                 {"hidden_size", "2147483648", "1..65536"}        },
    {"v3",            "{\"hidden_size\": 7168.5}",                          NULL,                 {"hidden_size", "7168.5", "an integer in"}       },
    {"v3",            "{\"hidden_size\": \"7168\"}",                        NULL,                 {"hidden_size", "\"7168\"", "an integer in"}     },
    {"v3",            "{}",                                                 "hidden_size",        {"\"hidden_size\" is missing", "1..65536"}       },
    {"v3",            "{\"num_hidden_layers\": 0}",                         NULL,                 {"num_hidden_layers", "1..512"}                  },
    {"v3",            "{\"num_hidden_layers\": 1000000000}",                NULL,                 {"num_hidden_layers", "1..512"}                  },
    {"v3",            "{\"num_attention_heads\": 0}",                       NULL,                 {"num_attention_heads", "is 0", "1..4096"}       },
    {"v3",            "{\"n_routed_experts\": 0}",                          NULL,                 {"n_routed_experts", "is 0", "1..16384"}         },
    {"v3",            "{\"n_routed_experts\": 2147483648}",                 NULL,                 {"n_routed_experts", "1..16384"}                 },
    {"v3",            "{\"num_experts_per_tok\": 257}",                     NULL,                 {"num_experts_per_tok", "257", "1..256"}         },
    {"v3",            "{\"num_experts_per_tok\": 0}",                       NULL,                 {"num_experts_per_tok", "is 0", "1..256"}        },
    {"v3",            "{\"n_shared_experts\": 65}",                         NULL,                 {"n_shared_experts", "is 65", "0..64"}           },
    {"v4_flash",      "{\"n_shared_experts\": 2}",                          NULL,                 {"n_shared_experts", "is 2", "must be 1"}        },
 /* C09 */
    {"v3",            "{\"n_group\": 0}",                                   NULL,                 {"\"n_group\"", "is 0", "1..256"}                },
    {"v3",            "{\"n_group\": 7}",                                   NULL,                 {"\"n_group\"", "is 7", "256"}                   },
    {"v3",            "{\"topk_group\": 9}",                                NULL,                 {"\"topk_group\"", "is 9", "1..8"}               },
    {"v3",            "{\"n_group\": 256, \"topk_group\": 8}",              NULL,                 {"\"n_group\"", "at least 2"}                    },
    {"v3",            "{\"n_group\": 128, \"topk_group\": 2}",              NULL,                 {"num_experts_per_tok", "2 chosen"}              },
 /* C11 .. C14 */
    {"v3",            "{\"first_k_dense_replace\": -1}",                    NULL,                 {"first_k_dense_replace", "-1", "0..512"}        },
    {"v3",            "{\"moe_layer_freq\": 0}",                            NULL,                 {"moe_layer_freq", "is 0", "1..512"}             },
    {"v3_2_exp.hf",
     "{\"mlp_layer_types\": [\"dense\"]}",                                  NULL,
     {"mlp_layer_types", "1 ", "61"}                                                                                                               },
    {"tiny_v32",
     "{\"mlp_layer_types\": [\"dense\", \"moe\", \"sparse\", \"sparse\"]}", NULL,
     {"mlp_layer_types", "\"sparse\""}                                                                                                             },
    {"tiny_v32",
     "{\"layer_types\": [\"full_attention\"]}",                             NULL,
     {"layer_types", "sparse_att"}                                                                                                                 },
    {"v3",            "{\"kv_lora_rank\": 0}",                              NULL,                 {"kv_lora_rank", "is 0", "1..65536"}             },
    {"v3",            "{\"qk_rope_head_dim\": 63}",                         NULL,                 {"qk_rope_head_dim", "63", "even"}               },
    {"v3",            "{\"qk_rope_head_dim\": 0}",                          NULL,                 {"qk_rope_head_dim", "is 0", "2.."}              },
    {"v3",            "{\"v_head_dim\": 0}",                                NULL,                 {"v_head_dim", "is 0", "1.."}                    },
    {"v3",            "{\"vocab_size\": 0}",                                NULL,                 {"vocab_size", "is 0", "1.."}                    },
    {"v3",
     "{\"max_position_embeddings\": 0}",                                    NULL,
     {"max_position_embeddings", "is 0", "1.."}                                                                                                    },
    {"v3",
     "{\"max_position_embeddings\": 1099511627776}",                        NULL,
     {"max_position_embeddings", "1099511627776", "1.."}                                                                                           },
 /* C15, C16 */
    {"v3",            "{\"rope_theta\": 0}",                                NULL,                 {"\"rope_theta\"", "is 0", "1.001.."}            },
    {"v3",            "{\"rope_theta\": -1}",                               NULL,                 {"\"rope_theta\"", "is -1", "1.001.."}           },
    {"v3",            "{}",                                                 "rope_theta",         {"\"rope_theta\"", "missing", "1.001.."}         },
    {"v3",
     "{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4}}",           NULL,
     {"\"rope_scaling.type\"", "linear", "yarn"}                                                                                                   },
    {"v3",
     "{\"rope_scaling\": {\"rope_type\": \"llama3\", \"type\": \"yarn\"}}", NULL,
     {"\"rope_scaling.rope_type\"", "llama3", "yarn"}                                                                                              },
    {"v3",
     "{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 0}}",             NULL,
     {"rope_scaling.factor", "is 0", "1.."}                                                                                                        },
    {"v3",
     "{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": \"NaN\"}}",       NULL,
     {"rope_scaling.factor", "\"NaN\"", "1.."}                                                                                                     },
    {"v3",
     "{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4}}",             NULL,
     {"rope_scaling.original_max_position_embeddings", "missing"}                                                                                  },
    {"v3",            "{\"rope_scaling\": \"yarn\"}",                       NULL,                 {"rope_scaling", "must be an object"}            },
    {"v4_flash.hf",
     "{\"rope_parameters\": {\"main\": {\"rope_theta\": 1e4}, \"compress\": "
     "{\"rope_theta\": 1e5, \"partial_rotary_factor\": 0.5}}}",             NULL,
     {"rope_parameters.compress.partial_rotary_factor", "0.5", "64"}                                                                               },
 /* C17 .. C19 */
    {"v3",            "{\"rms_norm_eps\": 0}",                              NULL,                 {"rms_norm_eps", "is 0", "1e-20..0.01"}          },
    {"v3",            "{\"rms_norm_eps\": -1e-6}",                          NULL,                 {"rms_norm_eps", "1e-20..0.01"}                  },
    {"v3",            "{\"rms_norm_eps\": 1}",                              NULL,                 {"rms_norm_eps", "is 1", "1e-20..0.01"}          },
    {"v3",            "{\"routed_scaling_factor\": 0}",                     NULL,                 {"routed_scaling_factor", "is 0", "1e-06"}       },
    {"v3",            "{\"routed_scaling_factor\": \"NaN\"}",               NULL,                 {"routed_scaling_factor", "\"NaN\""}             },
    {"v3",            "{\"scoring_func\": \"softmax\"}",                    NULL,                 {"scoring_func", "softmax", "sigmoid"}           },
    {"v3",            "{\"topk_method\": \"greedy\"}",                      NULL,                 {"topk_method", "greedy", "noaux_tc"}            },
    {"v2",            "{\"topk_method\": \"noaux_tc\"}",                    NULL,                 {"topk_method", "noaux_tc", "greedy"}            },
    {"v4_flash",      "{\"scoring_func\": \"softmax\"}",                    NULL,                 {"scoring_func", "sqrtsoftplus"}                 },
 /* C20, C21 */
    {"v3",
     "{\"quantization_config\": {\"quant_method\": \"awq\"}}",              NULL,
     {"quantization_config.quant_method", "awq", "fp8"}                                                                                            },
    {"v3",
     "{\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": "
     "[0, 128]}}",                                                          NULL,
     {"quantization_config.weight_block_size", "[0,128]", "1..65536"}                                                                              },
    {"v3",
     "{\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": "
     "[128]}}",                                                             NULL,
     {"weight_block_size", "[128]", "two integers"}                                                                                                },
    {"v3",            "{\"torch_dtype\": \"int3\"}",                        NULL,                 {"torch_dtype", "int3", "bfloat16"}              },
    {"v4_flash",      "{\"expert_dtype\": \"fp3\"}",                        NULL,                 {"expert_dtype", "fp3", "fp4"}                   },
 /* C23, C26 */
    {"v3",            "{\"eos_token_id\": [1, 129280]}",                    NULL,                 {"eos_token_id", "129280", "vocab_size"}         },
    {"v3",            "{\"eos_token_id\": -1}",                             NULL,                 {"eos_token_id", "-1", "vocab_size"}             },
    {"v3",            "{}",                                                 "eos_token_id",       {"eos_token_id", "missing", "never stop"}        },
    {"v3",            "{\"bos_token_id\": 129280}",                         NULL,                 {"bos_token_id", "129280", "0..129279"}          },
    {"v3_2_exp",      "{\"index_topk\": 0}",                                NULL,                 {"index_topk", "is 0", "1.."}                    },
    {"v3_2_exp",      "{}",                                                 "index_n_heads",      {"index_n_heads", "missing"}                     },
    {"v3_2_exp",
     "{\"index_head_dim\": 32}",                                            NULL,
     {"index_head_dim", "32", "qk_rope_head_dim"}                                                                                                  },
    {"v3_2_exp",      "{\"q_lora_rank\": null}",                            NULL,                 {"q_lora_rank", "missing", "indexer"}            },
    {"v4_flash",      "{}",                                                 "index_topk",         {"index_topk", "missing"}                        },
 /* what V4's mathematics cannot do, and what is not documented */
    {"v4_flash",      "{}",                                                 "compress_ratios",    {"compress_ratios", "missing", "layer_types"}    },
    {"v4_flash",      "{}",                                                 "num_hash_layers",    {"num_hash_layers", "missing", "mlp_layer_types"}},
    {"v4_flash_0731", "{\"dspark_block_size\": 8}",                         NULL,                 {"dspark_block_size", "8", "1..7"}               },
    {"v4_flash_0731",
     "{\"dspark_noise_token_id\": 129280}",                                 NULL,
     {"dspark_noise_token_id", "129280"}                                                                                                           },
    {"v4_flash_0731",
     "{\"dspark_target_layer_ids\": [41, 40]}",                             NULL,
     {"dspark_target_layer_ids", "ascending"}                                                                                                      },
    {"v4_flash_0731",
     "{\"dspark_target_layer_ids\": [43]}",                                 NULL,
     {"dspark_target_layer_ids", "num_hidden_layers"}                                                                                              },
    {"v4_flash_0731",
     "{\"dspark_target_layer_ids\": []}",                                   NULL,
     {"dspark_target_layer_ids", "1 to 16"}                                                                                                        },
    {"v4_flash_0731", "{}",                                                 "dspark_markov_rank", {"dspark_markov_rank", "missing"}                },
    {"v4_flash",      "{\"o_groups\": 7}",                                  NULL,                 {"o_groups", "is 7", "64"}                       },
    {"v4_flash",      "{\"qk_rope_head_dim\": 514}",                        NULL,                 {"qk_rope_head_dim", "514", "2..512"}            },
    {"v4_flash",      "{\"qk_rope_head_dim\": 63}",                         NULL,                 {"qk_rope_head_dim", "63", "even"}               },
    {"v4_flash",      "{\"partial_rotary_factor\": 0.25}",                  NULL,                 {"is 64", "0.25", "128"}                         },
    {"v4_flash",      "{}",                                                 "qk_rope_head_dim",   {"qk_rope_head_dim", "partial_rotary_factor"}    },
    {"v4_flash",      "{\"num_key_value_heads\": 2}",                       NULL,                 {"num_key_value_heads", "1..1"}                  },
    {"v4_flash",      "{\"compress_ratios\": [0, 0, 4]}",                   NULL,                 {"compress_ratios", "3 ", "43"}                  },
    {"tiny_v4",
     "{\"layer_types\": null, \"compress_ratios\": [0, 2, 2, 1, 1, 0]}",    NULL,
     {"compress_ratios", "has 2 for layer 1", "0, 4 or 128"}                                                                                       },
    {"tiny_v4",
     "{\"compress_ratios\": [0, 128, 4, 4, 4, 0]}",                         NULL,
     {"compress_ratios", "contradicts layer_types"}                                                                                                },
    {"tiny_v4",       "{\"layer_types\": [\"sliding_attention\"]}",         NULL,                 {"layer_types", "1 ", "6"}                       },
    {"tiny_v4",       "{\"swiglu_limit\": -1}",                             NULL,                 {"swiglu_limit", "-1", "0.."}                    },
    {"tiny_v4",       "{\"hc_mult\": 0}",                                   NULL,                 {"hc_mult", "is 0", "1..16"}                     },
 /* what these families do not have */
    {"v3",            "{\"hidden_act\": \"gelu\"}",                         NULL,                 {"hidden_act", "gelu", "silu"}                   },
    {"v3",            "{\"attention_bias\": true}",                         NULL,                 {"attention_bias", "true", "only false"}         },
    {"v3_2_exp",
     "{\"rope_interleave\": false}",                                        NULL,
     {"rope_interleave", "false", "only true"}                                                                                                     },
    {"v2",            "{\"num_nextn_predict_layers\": 1}",                  NULL,                 {"num_nextn_predict_layers", "is 1"}             },
};

static void faults_are_named(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(refusals); i++) {
        const struct refusal *r = &refusals[i];
        hd_err err = {0};
        hd_model_spec *s;
        hd_status st = config_open_changed(&s, r->name, r->changes, r->removed, &err);
        if (st == HD_OK) fail_msg("%s with %s was accepted", r->name, r->changes);
        assert_true(st == HD_EFORMAT || st == HD_EUNSUPPORTED);
        assert_null(s);
        assert_non_null(strstr(err.msg, "/config.json: "));
        for (size_t k = 0; k < HD_LEN(r->says) && r->says[k]; k++) {
            if (!strstr(err.msg, r->says[k])) {
                fail_msg("%s with %s: \"%s\" not in: %s", r->name, r->changes, r->says[k],
                         err.msg);
            }
        }
    }
}

static void what_is_no_json_is_refused(void **state) { /* C01 */
    (void)state;
    static const char *const texts[] = {"",
                                        "{",
                                        "[]",
                                        "null",
                                        "{\"hidden_size\": 1, \"hidden_size\": 2}",
                                        "{\"rope_theta\": 1e400}",
                                        "{\"x\": NaN}",
                                        "{\"x\": 99999999999999999999}",
                                        "{\"\xff\": 1}",
                                        "{\"x\": \"\\u0000\"}"};
    for (size_t i = 0; i < HD_LEN(texts); i++) {
        hd_err err = {0};
        hd_model_spec *s;
        assert_int_equal(config_open_text(&s, texts[i], NULL, &err), HD_EFORMAT);
        assert_non_null(strstr(err.msg, "config.json: "));
    }
    hd_err err = {0};
    hd_model_spec *s;
    assert_int_equal(hd_model_spec_open(&s, "tests/configs/nothing.json", &err), HD_EINVAL);

    enum { TEN_MIB = 10 << 20 };
    char *big = malloc(TEN_MIB + 1);
    assert_non_null(big);
    memset(big, ' ', TEN_MIB);
    big[0] = '{', big[TEN_MIB - 1] = '}', big[TEN_MIB] = '\0';
    err = (hd_err){0};
    assert_int_equal(config_open_text(&s, big, NULL, &err), HD_EFORMAT);
    free(big);
}

int test_config(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(released_models_are_read),
        cmocka_unit_test(v4_layers_follow_their_ratios),
        cmocka_unit_test(both_spellings_say_the_same),
        cmocka_unit_test(odd_sizes_are_as_good),
        cmocka_unit_test(freedoms_are_accepted),
        cmocka_unit_test(families_have_other_names),
        cmocka_unit_test(v4_ratio_lists_may_differ_in_length),
        cmocka_unit_test(dspark_stages_follow_the_layers),
        cmocka_unit_test(v41_layers_follow_their_sources),
        cmocka_unit_test(unknown_keys_are_counted),
        cmocka_unit_test(generation_config_never_refuses_a_model),
        cmocka_unit_test(faults_are_named),
        cmocka_unit_test(what_is_no_json_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
