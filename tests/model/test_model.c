/* test_model.c - values that the model derives before its first step: RoPE frequencies
 * (YaRN), page sizes. */
#include "check.h"

#include <math.h>
#include <stdlib.h>

#include "model/model_internal.h"

static void assert_freqs(const hd_rope_spec *rope, const double *want, const int32_t *index,
                         int32_t n) {
    float freq[32];
    model_rope_freqs(rope, 32, freq);
    for (int32_t i = 0; i < n; i++) {
        assert_true(fabs((double)freq[index[i]] - want[i]) <= 1e-7 * fabs(want[i]) + 1e-12);
    }
}

/* YaRN by an independent float64 program; models.md 9.3. */
static void yarn_bends_the_slow_frequencies(void **state) {
    (void)state;
    const int32_t at[] = {0, 1, 10, 11, 15, 20, 22, 23, 31};
    const hd_rope_spec v3 = {
        .theta = 10000, .factor = 40, .original_len = 4096, .beta_fast = 32, .beta_slow = 1};
    const double want_v3[] = {1,
                              0.749894209,
                              0.0562341325,
                              0.0390069270,
                              0.00833450897,
                              0.000790569415,
                              0.000177827941,
                              3.33380357e-05,
                              3.33380357e-06};
    assert_freqs(&v3, want_v3, at, (int32_t)HD_LEN(at));
    const hd_rope_spec v4 = {
        .theta = 160000, .factor = 16, .original_len = 65536, .beta_fast = 32, .beta_slow = 1};
    const int32_t at_v4[] = {0, 1, 15, 16, 24, 25, 31};
    const double want_v4[] = {1,
                              0.687656021,
                              0.00363553853,
                              0.002265625,
                              1.95312500e-05,
                              5.37231270e-06,
                              5.68052900e-07};
    assert_freqs(&v4, want_v4, at_v4, (int32_t)HD_LEN(at_v4));
}

static void no_scaling_leaves_powers_of_theta(void **state) {
    (void)state;
    const hd_rope_spec plain = {.theta = 50000, .factor = 1};
    float freq[8];
    model_rope_freqs(&plain, 8, freq);
    for (int i = 0; i < 8; i++) {
        assert_true(fabs((double)freq[i] - pow(50000.0, -i / 8.0)) < 1e-7);
    }
}

/* Rings must divide pages, pages must hold whole blocks: also for ratios no release uses. */
static void pages_fit_every_ratio(void **state) {
    (void)state;
    const int32_t ratios[][2] = {
        {4, 128},
        {0, 0  },
        {3, 7  },
        {4, 0  },
        {0, 48 },
        {8, 64 }
    };
    hd_device *device;
    const hd_cpu_options one = {.n_threads = 1};
    assert_int_equal(hd_device_open_cpu(&device, &one, NULL), HD_OK);
    for (size_t i = 0; i < HD_LEN(ratios); i++) {
        hd_layer_spec layers[] = {
            {.attention = HD_ATTN_CSA, .compress_ratio = ratios[i][0]},
            {.attention = HD_ATTN_HCA, .compress_ratio = ratios[i][1]}
        };
        for (int k = 0; k < 2; k++) {
            if (!ratios[i][k]) layers[k].attention = HD_ATTN_WINDOW;
        }
        const hd_model_spec spec = {.family = HD_FAMILY_V4,
                                    .n_layers = 2,
                                    .head_dim = 8,
                                    .index_dim = 4,
                                    .csa_ratio = ratios[i][0],
                                    .hca_ratio = ratios[i][1],
                                    .layers = layers};
        const hd_kv_options options = {
            .n_pages = {2, 2},
              .max_drafts = 3
        };
        hd_kv *kv;
        assert_int_equal(hd_kv_open(&kv, &spec, 2, device, &options, NULL), HD_OK);
        const int32_t page = hd_kv_shape_of(&spec).page_tokens;
        if (ratios[i][0]) assert_int_equal(page % (2 * ratios[i][0]), 0);
        if (ratios[i][1]) assert_int_equal(page % ratios[i][1], 0);
        for (int32_t l = 0; l < 2; l++) {
            const int32_t *const tables[HD_N_KV_GROUPS] = {0};
            const hd_ring ring = hd_kv_state(kv, l, false, tables, 1);
            if (!ratios[i][l]) continue;
            const int32_t keep = (l == 0 ? 2 : 1) * ratios[i][l];
            assert_true(ring.ring == page || ring.ring >= keep + options.max_drafts);
            assert_int_equal(page % ring.ring, 0);
        }
        hd_kv_close(kv);
    }
    hd_device_close(device);
}

static void batch_lays_rows_side_by_side(void **state) {
    (void)state;
    hd_device *device;
    hd_batch b;
    const hd_cpu_options one = {.n_threads = 1};
    assert_int_equal(hd_device_open_cpu(&device, &one, NULL), HD_OK);
    const hd_batch_limits limits = {.rows = 8, .seqs = 2, .table_stride = 3};
    assert_int_equal(hd_batch_open(&b, &limits, device, NULL), HD_OK);
    const int32_t first[] = {5, 6, 7}, second[] = {9}, pages[] = {4, 2, 0},
                  window[] = {-1, 1, 2};
    hd_batch_reset(&b);
    hd_batch_add(&b, &(hd_batch_seq){
                         .tokens = first,
                         .n = 3,
                         .start = 40,
                         .after = 8,
                         .n_logits = 2,
                         .pages = {pages, window},
                         .n_pages = 3
    });
    hd_batch_add(&b, &(hd_batch_seq){
                         .tokens = second,
                         .n = 1,
                         .after = -1,
                         .n_logits = 1,
                         .pages = {pages + 1, window},
                         .n_pages = 1
    });
    assert_int_equal(b.n_rows, 4);
    assert_int_equal(b.n_logits, 3);
    assert_int_equal(b.host.logit_rows[0], 1);
    assert_int_equal(b.host.logit_rows[2], 3);
    assert_int_equal(b.host.pos[1], 41);
    assert_int_equal(b.host.next_tokens[0], 6);
    assert_int_equal(b.host.next_tokens[2], 8);
    assert_int_equal(b.host.next_tokens[3], -1);
    assert_int_equal(b.host.first_row[2], 4);
    assert_int_equal(b.host.tables[HD_KV_WINDOW][1], 1);
    assert_int_equal(b.host.tables[HD_KV_FULL][3], 2);
    hd_batch_close(&b);
    hd_device_close(device);
}

int test_model(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(yarn_bends_the_slow_frequencies),
        cmocka_unit_test(no_scaling_leaves_powers_of_theta),
        cmocka_unit_test(pages_fit_every_ratio),
        cmocka_unit_test(batch_lays_rows_side_by_side),
    };
    return cmocka_run_group_tests_name("model", tests, NULL, NULL);
}
