/* test_kv.c - bytes of a page at the released sizes, by the number format of the cache. */
#include "check.h"

#include <math.h>
#include <string.h>

#include "kv/kv.h"
#include "weights/configs.h"

typedef struct sizes {
    const char *config;
    int32_t layers; /* without MTP layers */
    hd_dtype type;
    double full; /* bytes of a position */
} sizes;

/* models.md 4.3; there V3 has 656 bytes, since its scales are float32. */
static void positions_have_the_bytes_of_their_format(void **state) {
    (void)state;
    static const sizes all[] = {
        {"v2_lite",    27, HD_BF16, 31104                                    },
        {"v2_lite",    27, HD_E4M3, 27 * 644                                 },
        {"v3",         61, HD_F32,  140544                                   },
        {"v3",         61, HD_BF16, 70272                                    },
        {"v3",         61, HD_E4M3, 61 * 644                                 },
        {"v3_2_exp",   61, HD_BF16, 101504                                   },
        {"v3_2_exp",   61, HD_E4M3, 61 * (644 + 132)                         },
        {"v4_flash",   43, HD_BF16, 8224                                     },
        {"v4_flash",   43, HD_E4M3, 21 * (584 + 132) / 4.0 + 20 * 584 / 128.0},
        {"v4_pro",     61, HD_BF16, 11768                                    },
        {"v4_pro",     61, HD_E4M3, 30 * (584 + 132) / 4.0 + 31 * 584 / 128.0},
        {"v4_1_flash", 40, HD_BF16, 2.5 * (1024 + 512)                       }, /* keys: float32 */
        {"v4_1_flash", 40, HD_E4M3, 2.5 * (584 + 132)                        },
        {"v4_1_flash", 40, HD_E2M1, 890                                      }, /* as published */
    };
    for (size_t i = 0; i < HD_LEN(all); i++) {
        hd_model_spec *spec = config_open(all[i].config);
        assert_int_equal(spec->n_layers, all[i].layers);
        const double page =
            (double)hd_kv_page_bytes(spec, spec->n_layers, HD_KV_FULL, all[i].type, 0);
        const double each = page / hd_kv_shape_of(spec).page_tokens;
        if (fabs(each - all[i].full) > 0.5) {
            fail_msg("%s, type %d: %g bytes, not %g", all[i].config, (int)all[i].type, each,
                     all[i].full);
        }
        hd_model_spec_close(spec);
    }
}

/* One raw vector of a position in each layer shrinks; compressor state stays float32. */
static void windows_shrink_by_their_vectors(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("v4_flash");
    size_t bytes[HD_N_DTYPES];
    static const hd_dtype types[] = {HD_F32, HD_BF16, HD_E4M3};
    for (size_t i = 0; i < HD_LEN(types); i++) {
        bytes[types[i]] = hd_kv_page_bytes(spec, 43, HD_KV_WINDOW, types[i], 0);
    }
    assert_int_equal(bytes[HD_F32] - bytes[HD_BF16], 43 * 128 * 1024);
    assert_int_equal(bytes[HD_BF16] - bytes[HD_E4M3], 43 * 128 * (1024 - 584));
    hd_model_spec_close(spec);
}

/* Of V4.1: 128 window vectors of 528 bytes in each of 43 layers, as published, two float32 rows of a
 * group of two, and tokens. */
static void windows_of_v41_are_as_published(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("v4_1_flash");
    const int32_t page = hd_kv_shape_of(spec).page_tokens;
    const double vectors = 128 / page * (43 * page * 528.0), ring = 3 * 2 * 2 * 512 * 4.0;
    const size_t bytes = hd_kv_page_bytes(spec, 43, HD_KV_WINDOW, HD_E2M1, 0);
    assert_true(vectors == 2906112);
    assert_int_equal(bytes, vectors * page / 128 + ring + 4 * page);
    hd_model_spec_close(spec);
}

/* Other families have no such formats. */
static void formats_of_v41_are_its_own(void **state) {
    (void)state;
    static const char *const configs[] = {"v3", "v3_2_exp", "v4_flash", "v4_1_flash"};
    for (size_t i = 0; i < HD_LEN(configs); i++) {
        hd_model_spec *spec = config_open(configs[i]);
        hd_err err = {0};
        const bool own = strcmp(configs[i], "v4_1_flash") == 0;
        assert_int_equal(hd_kv_check_type(spec, HD_E4M3, &err), HD_OK);
        assert_int_equal(hd_kv_check_type(spec, HD_E2M1, &err), own ? HD_OK : HD_EUNSUPPORTED);
        if (!own) assert_non_null(strstr(err.msg, "fp4"));
        hd_model_spec_close(spec);
    }
}

static void few_heads_read_no_packed_latents(void **state) {
    static const struct {
        const char *config;
        bool dense;
    } cases[] = {
        {"v3",         true },
        {"v2_lite",    true },
        {"v3_2_exp",   false},
        {"v4_flash",   false},
        {"v4_1_flash", false},
    };
    (void)state;
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_model_spec *spec = config_open(cases[i].config);
        hd_err err = {0};
        assert_int_equal(hd_kv_check_heads(spec, 17, HD_E4M3, &err), HD_OK);
        assert_int_equal(hd_kv_check_heads(spec, 16, HD_BF16, &err), HD_OK);
        assert_int_equal(hd_kv_check_heads(spec, 16, HD_E4M3, &err),
                         cases[i].dense ? HD_EUNSUPPORTED : HD_OK);
        if (cases[i].dense) assert_non_null(strstr(err.msg, "fp8"));
        hd_model_spec_close(spec);
    }
}

int test_kv(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(positions_have_the_bytes_of_their_format),
        cmocka_unit_test(windows_shrink_by_their_vectors),
        cmocka_unit_test(windows_of_v41_are_as_published),
        cmocka_unit_test(formats_of_v41_are_its_own),
        cmocka_unit_test(few_heads_read_no_packed_latents),
    };
    return cmocka_run_group_tests_name("kv", tests, NULL, NULL);
}
