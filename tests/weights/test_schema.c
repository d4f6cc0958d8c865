/* test_schema.c - the tensors of every family, compared with the released files: parameter
 * counts, bytes by part, numbers of tensors by type. */
#include "check.h"

#include <string.h>

#include "weights/configs.h"
#include "weights/summary.h"

static const struct totals {
    const char *name;
    int64_t main, mtp_unique, active, active_without_embedding;
    int64_t main_bytes, mtp_bytes, n_files_tensors;
} totals[] = {
    {"v2_lite",           15706484224,   0,           2661150208,  2451435008,  31412968448,  0,           5291  },
    {"v2",                235741434880,  0,           21375800320, 20851512320, 471482869760, 0,           29102 },
    {"moonlight_16b_a3b", 15960108544,   0,           2914774528,  2579230208,  31920223744,  0,           5317  },
    {"v3",                671026404352,  11610067968, 37552282624, 36625603584, 673150611808, 15424227552,
     91991                                                                                                       },
    {"v3_2_exp",          671877929216,  11624027392, 38403807488, 37477128448, 674030368448, 15438649792,
     92425                                                                                                       },
    {"v4_flash",          284332230231,  6610048635,  13799622231, 13270091351, 156015698140, 3593787756,
     69187                                                                                                       },
    {"v4_pro",            1572997179491, 25840145595, 49779058787, 48852379747, 850748205004, 13956587692,
     145116                                                                                                      },
    {"v4_flash_0731",     284332230231,  19845850215, 13799622231, 13270091351, 156015698140,
     10862838300,                                                                                          72317 },
    {"v4_pro_0813",       1572997179491, 77498406951, 49779058787, 48852379747, 850748205004,
     41979375900,                                                                                          149782},
    {"v4_1_flash",        748979922544,  14225361762, 16792483952, 16130570352, 502353148368,
     7932874632,                                                                                           96085 },
};

static int64_t all_arrays(const hd_param_group_sum *a, const hd_param_group_sum *b) {
    int64_t n = 0;
    for (int t = 0; t < HD_N_DTYPES; t++) n += a->n_arrays[t] + b->n_arrays[t];
    return n;
}

static void known_totals_are_met(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(totals); i++) {
        const struct totals *t = &totals[i];
        hd_model_spec *s = config_open(t->name);
        hd_schema schema;
        hd_summary sum;
        assert_int_equal(hd_schema_open(&schema, s, NULL), HD_OK);
        hd_summarize(&sum, s, &schema);
        hd_param_group_sum a = hd_summary_main(&sum), m = hd_summary_mtp(&sum);
        /* the MTP layers' embedding and head are the model's own */
        const int64_t unique = m.params - sum.mtp[HD_PARAM_GROUP_EMBEDDING].params -
                               sum.mtp[HD_PARAM_GROUP_HEAD].params;
        assert_true(a.params == t->main && a.active == t->active);
        assert_true(a.active - sum.main[HD_PARAM_GROUP_EMBEDDING].active ==
                    t->active_without_embedding);
        assert_true(unique == t->mtp_unique);
        assert_true(a.bytes == t->main_bytes && m.bytes == t->mtp_bytes);
        assert_int_equal(all_arrays(&a, &m), t->n_files_tensors);
        hd_schema_close(&schema);
        hd_model_spec_close(s);
    }
}

/* in the order of hd_param_group, without the MTP projections */
static const struct parts {
    const char *name;
    int64_t bytes[HD_N_PARAM_GROUPS - 1];
} parts[] = {
    {"v2_lite",
     {419430400, 419430400, 743178240, 0, 0, 0, 134479872, 6815744, 0, 28789702656, 899678208,
      252928}                                     },
    {"v3",
     {1853358080, 1853358080, 11416215392, 0, 0, 0, 1189375488, 212920320, 0, 654068416512,
      2554954752, 2013184}                        },
    {"v3_2_exp",
     {1853358080, 1853358080, 11416215392, 879756640, 0, 0, 1189375488, 212920320, 0,
      654068416512, 2554954752, 2013184}          },
    {"v4_flash",
     {1059061760, 1059061760, 4599346048, 275353344, 525722624, 135537756, 0, 90218496,
      18616320, 147169738752, 1082196480, 844800} },
    {"v4_pro",
     {1853358080, 1853358080, 18294604672, 625367040, 1344566272, 336278412, 0, 335895552,
      18616320, 822054223872, 4029923520, 2013184}},
};

static void known_parts_are_met(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(parts); i++) {
        hd_model_spec *s = config_open(parts[i].name);
        hd_schema schema;
        hd_summary sum;
        assert_int_equal(hd_schema_open(&schema, s, NULL), HD_OK);
        hd_summarize(&sum, s, &schema);
        for (int p = 0; p < HD_N_PARAM_GROUPS - 1; p++) {
            assert_true(sum.main[p].bytes == parts[i].bytes[p]);
        }
        assert_true(sum.main[HD_PARAM_GROUP_PROJECTION].bytes == 0);
        hd_schema_close(&schema);
        hd_model_spec_close(s);
    }
}

static void v4_flash_has_the_published_types(void **state) {
    (void)state;
    hd_model_spec *s = config_open("v4_flash");
    hd_schema schema;
    hd_summary sum;
    assert_int_equal(hd_schema_open(&schema, s, NULL), HD_OK);
    hd_summarize(&sum, s, &schema);
    hd_param_group_sum a = hd_summary_main(&sum), m = hd_summary_mtp(&sum);
    static const struct {
        hd_dtype type;
        int64_t n;
    } expect[] = {
        {HD_BF16, 433  },
        {HD_F32,  417  },
        {HD_E4M3, 375  },
        {HD_E8M0, 34167},
        {HD_I64,  3    },
        {HD_E2M1, 33792}
    };
    for (size_t i = 0; i < HD_LEN(expect); i++) {
        assert_int_equal(a.n_arrays[expect[i].type] + m.n_arrays[expect[i].type], expect[i].n);
    }
    hd_schema_close(&schema);
    hd_model_spec_close(s);
}

static const hd_tensor_decl *find(const hd_schema *s, const char *name) {
    for (int32_t i = 0; i < s->n; i++) {
        if (strcmp(s->decls[i].name, name) == 0) return &s->decls[i];
    }
    return NULL;
}

static const struct expected {
    const char *config, *name;
    hd_role role;
    int32_t layer, expert, rank, rows, cols;
    bool optional, duplicate;
} expected[] = {
    {"v2_lite",  "model.layers.0.self_attn.q_proj.weight",              HD_Q,             0,         -1,  2, 3072,   2048,  0, 0},
    {"v2_lite",  "model.layers.26.mlp.shared_experts.down_proj.weight", HD_SHARED_DOWN,   26,        -1,
     2,                                                                                                      2048,   2816,  0, 0},
    {"v3",       "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",  HD_KV_A,          0,         -1,  2, 576,    7168,
     0,                                                                                                                        0},
    {"v3",       "model.layers.3.mlp.gate.e_score_correction_bias",     HD_ROUTER_BIAS,   3,         -1,  1, 1,      256,
     0,                                                                                                                        0},
    {"v3",       "model.layers.60.mlp.experts.255.down_proj.weight",    HD_EXPERT_DOWN,   60,        255, 2, 7168,
     2048,                                                                                                                  0, 0},
    {"v3",       "model.layers.61.eh_proj.weight",                      HD_MTP_PROJ,      61,        -1,  2, 7168,   14336, 1, 0},
    {"v3",       "model.layers.61.shared_head.head.weight",             HD_HEAD,          61,        -1,  2, 129280, 7168,  1, 1},
    {"v3",       "model.layers.61.embed_tokens.weight",                 HD_EMBED,         61,        -1,  2, 129280, 7168,  1, 1},
    {"v3",       "model.norm.weight",                                   HD_FINAL_NORM,    HD_GLOBAL, -1,  1, 1,      7168,  0, 0},
    {"v3_2_exp", "model.layers.61.self_attn.indexer.wq_b.weight",       HD_INDEX_Q_B,     61,        -1,  2, 8192,
     1536,                                                                                                                  1, 0},
    {"v3_2_exp", "model.layers.0.self_attn.indexer.k_norm.bias",        HD_INDEX_K_BIAS,  0,         -1,  1, 1,
     128,                                                                                                                   0, 0},
    {"v4_flash", "layers.2.attn.compressor.ape",                        HD_COMP_APE,      2,         -1,  2, 4,      1024,  0, 0},
    {"v4_flash", "layers.3.attn.compressor.ape",                        HD_COMP_APE,      3,         -1,  2, 128,    512,   0, 0},
    {"v4_flash", "layers.2.attn.indexer.compressor.wkv.weight",         HD_INDEX_COMP_KV, 2,         -1,  2, 256,
     4096,                                                                                                                  0, 0},
    {"v4_flash", "layers.0.ffn.gate.tid2eid",                           HD_ROUTER_HASH,   0,         -1,  2, 129280, 6,     0, 0},
    {"v4_flash", "layers.3.ffn.gate.bias",                              HD_ROUTER_BIAS,   3,         -1,  1, 1,      256,   0, 0},
    {"v4_flash", "layers.42.attn.wo_a.weight",                          HD_O_A,           42,        -1,  2, 8192,   4096,  0, 0},
    {"v4_flash", "mtp.0.ffn.experts.7.w2.weight",                       HD_EXPERT_DOWN,   43,        7,   2, 4096,   2048,  1, 0},
    {"v4_flash", "mtp.0.hc_head_scale",                                 HD_HC_HEAD_SCALE, 43,        -1,  1, 1,      1,     1, 0},
    {"v4_pro",   "hc_head_fn",                                          HD_HC_HEAD_FN,    HD_GLOBAL, -1,  2, 4,      28672, 0, 0},
    {"v4_pro",   "layers.60.hc_ffn_fn",                                 HD_HC_FFN_FN,     60,        -1,  2, 24,     28672, 0, 0},
};
static const char *const absent[][2] = {
    {"v2_lite",  "model.layers.0.self_attn.q_a_proj.weight"       },
    {"v2",       "model.layers.1.mlp.gate.e_score_correction_bias"},
    {"v3",       "model.layers.0.mlp.gate.weight"                 },
    {"v4_flash", "layers.0.ffn.gate.bias"                         },
    {"v4_flash", "layers.3.ffn.gate.tid2eid"                      },
    {"v4_flash", "layers.3.attn.indexer.wq_b.weight"              },
    {"v4_flash", "mtp.0.attn.compressor.ape"                      },
};

static void names_shapes_and_roles(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(expected); i++) {
        hd_model_spec *s = config_open(expected[i].config);
        hd_schema schema;
        assert_int_equal(hd_schema_open(&schema, s, NULL), HD_OK);
        const hd_tensor_decl *d = find(&schema, expected[i].name);
        if (!d) fail_msg("%s has no %s", expected[i].config, expected[i].name);
        assert_int_equal(d->role, expected[i].role);
        assert_int_equal(d->layer, expected[i].layer);
        assert_int_equal(d->expert, expected[i].expert);
        assert_int_equal(d->rank, expected[i].rank);
        assert_int_equal(d->rows, expected[i].rows);
        assert_int_equal(d->cols, expected[i].cols);
        assert_int_equal(d->optional, expected[i].optional);
        assert_int_equal(d->duplicate, expected[i].duplicate);
        hd_schema_close(&schema);
        hd_model_spec_close(s);
    }
    for (size_t i = 0; i < HD_LEN(absent); i++) {
        hd_model_spec *s = config_open(absent[i][0]);
        hd_schema schema;
        assert_int_equal(hd_schema_open(&schema, s, NULL), HD_OK);
        assert_null(find(&schema, absent[i][1]));
        hd_schema_close(&schema);
        hd_model_spec_close(s);
    }
}

static void tied_heads_and_monsters(void **state) {
    (void)state;
    hd_model_spec *s = config_changed("tiny_v2", "{\"tie_word_embeddings\": true}");
    hd_schema schema;
    hd_summary sum;
    assert_int_equal(hd_schema_open(&schema, s, NULL), HD_OK);
    assert_true(find(&schema, "lm_head.weight")->duplicate);
    hd_summarize(&sum, s, &schema);
    assert_true(sum.main[HD_PARAM_GROUP_HEAD].params == 0);
    hd_schema_close(&schema);
    hd_model_spec_close(s);

    hd_err err = {0};
    s = config_changed("v3", "{\"num_hidden_layers\": 512, \"n_routed_experts\": 16384}");
    assert_int_equal(hd_schema_open(&schema, s, &err), HD_EFORMAT);
    assert_non_null(strstr(err.msg, "more than 4194304 tensors"));
    assert_null(schema.decls);
    hd_model_spec_close(s);
}

int test_schema(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_totals_are_met),
        cmocka_unit_test(known_parts_are_met),
        cmocka_unit_test(v4_flash_has_the_published_types),
        cmocka_unit_test(names_shapes_and_roles),
        cmocka_unit_test(tied_heads_and_monsters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
