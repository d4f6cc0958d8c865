/* test_init.c - models with random weights: whole for every family and format, as large as they
 * should be, and the same for the same seed. */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "base/file.h"
#include "train/init.h"
#include "weights/configs.h"
#include "weights/weights.h"

enum { MOST_BYTES = 64 << 20 };

typedef struct folder {
    char dir[40], config[80], weights[80];
} folder;

static void open_folder(folder *f, const char *config) {
    snprintf(f->dir, sizeof f->dir, "/tmp/hadal-init-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->config, sizeof f->config, "%s/config.json", f->dir);
    snprintf(f->weights, sizeof f->weights, "%s/model.safetensors", f->dir);
    FILE *file = fopen(f->config, "w");
    assert_non_null(file);
    assert_true(fputs(config, file) >= 0 && fclose(file) == 0);
}

static void close_folder(const folder *f) {
    unlink(f->config);
    unlink(f->weights);
    rmdir(f->dir);
}

/* The deviation of a matrix with many elements. */
static void check_matrix(const hd_weights *w, int32_t i) {
    const hd_tensor_decl *d = &hd_weights_schema(w)->decls[i];
    const hd_weight *m = hd_weights_stored(w, i);
    double square = 0.0;
    const int64_t n = (int64_t)d->rows * d->cols;
    if (d->rank != 2 || d->role == HD_ROUTER_HASH || n < 4000 || strstr(d->name, "ape")) return;
    for (int32_t r = 0; r < d->rows; r++) {
        for (int32_t c = 0; c < d->cols; c++) {
            square += pow((double)hd_weight_at(m, r, c), 2);
        }
    }
    const double deviation = sqrt(square / (double)n);
    if (!(fabs(deviation - 0.02) < 0.002)) fail_msg("%s: deviation %g", d->name, deviation);
}

static void check_config(const char *name) {
    folder f;
    hd_model_spec *spec;
    hd_weights *w;
    hd_err err = {0};
    char *text = config_text(name), *files[3];
    size_t bytes[3];
    open_folder(&f, text);
    assert_int_equal(hd_model_spec_open(&spec, f.dir, NULL), HD_OK);
    for (uint64_t i = 0; i < 3; i++) { /* seeds 5, 5, 6 */
        if (hd_init_write(f.weights, spec, 5 + i / 2, &err) != HD_OK) fail_msg("%s", err.msg);
        assert_int_equal(hd_file_read(&files[i], &bytes[i], f.weights, MOST_BYTES, NULL),
                         HD_OK);
    }
    assert_true(bytes[0] == bytes[1] && bytes[0] == bytes[2]);
    assert_memory_equal(files[0], files[1], bytes[0]);
    assert_true(memcmp(files[0], files[2], bytes[0]) != 0);
    if (hd_weights_open(&w, f.dir, spec, &err) != HD_OK) fail_msg("%s: %s", name, err.msg);
    assert_int_equal(hd_weights_n_mtp(w), spec->n_mtp);
    for (int32_t i = 0; i < hd_weights_schema(w)->n; i++) {
        const hd_tensor_decl *d = &hd_weights_schema(w)->decls[i];
        if (d->duplicate || d->unused) continue;
        if (hd_weights_check_values(w, i, &err) != HD_OK) fail_msg("%s: %s", name, err.msg);
        check_matrix(w, i);
    }
    hd_weights_close(w);
    hd_model_spec_close(spec);
    for (int i = 0; i < 3; i++) free(files[i]);
    free(text);
    close_folder(&f);
}

static void every_family(void **state) {
    (void)state;
    check_config("tiny_v2");
    check_config("tiny_v3");
    check_config("tiny_v32");
    check_config("tiny_v4");
}

static void formats_that_are_not_made(void **state) {
    hd_model_spec *spec = config_open("r1_nvfp4");
    hd_err err = {0};
    (void)state;
    assert_int_equal(hd_init_write("/nowhere/x", spec, 1, &err), HD_EUNSUPPORTED);
    hd_model_spec_close(spec);
    spec = config_open("v4_1_flash");
    err = (hd_err){0};
    assert_int_equal(hd_init_write("/nowhere/x", spec, 1, &err), HD_EUNSUPPORTED);
    assert_non_null(strstr(err.msg, "cannot be trained"));
    hd_model_spec_close(spec);
}

int test_init(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_family),
        cmocka_unit_test(formats_that_are_not_made),
    };
    return cmocka_run_group_tests_name("init", tests, NULL, NULL);
}
