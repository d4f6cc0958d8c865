/* test_kv.c - bytes of a page at the released sizes, by the number format of the cache. */
#include "check.h"

#include <math.h>

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
        {"v2_lite",  27, HD_BF16, 31104                                    },
        {"v2_lite",  27, HD_E4M3, 27 * 644                                 },
        {"v3",       61, HD_F32,  140544                                   },
        {"v3",       61, HD_BF16, 70272                                    },
        {"v3",       61, HD_E4M3, 61 * 644                                 },
        {"v3_2_exp", 61, HD_BF16, 101504                                   },
        {"v3_2_exp", 61, HD_E4M3, 61 * (644 + 132)                         },
        {"v4_flash", 43, HD_BF16, 8224                                     },
        {"v4_flash", 43, HD_E4M3, 21 * (584 + 132) / 4.0 + 20 * 584 / 128.0},
        {"v4_pro",   61, HD_BF16, 11768                                    },
        {"v4_pro",   61, HD_E4M3, 30 * (584 + 132) / 4.0 + 31 * 584 / 128.0},
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

int test_kv(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(positions_have_the_bytes_of_their_format),
        cmocka_unit_test(windows_shrink_by_their_vectors),
    };
    return cmocka_run_group_tests_name("kv", tests, NULL, NULL);
}
