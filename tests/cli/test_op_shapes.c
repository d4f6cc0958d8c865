/* test_op_shapes.c - the table of operator shapes says what the models' configs say. */
#include "check.h"

#include <string.h>

#include "cli/bench/op_shapes.h"
#include "ops/ops.h"
#include "weights/configs.h"
#include "weights/summary.h"

static const char *const op_names[] = {
#define X(op) #op,
    HD_OP_LIST(X)
#undef X
};

static bool is(const op_shape *s, const char *op) {
    return strcmp(s->op, op) == 0;
}

static int32_t parts_of(const op_shape *s) {
    return s->parts ? s->parts : 1;
}

#define CHECK(s, what) \
    if (!(what)) fail_msg("%s (%s): not " #what, (s)->name, (s)->op)

static void operators_exist(void **state) {
    (void)state;
    for (int32_t i = 0; i < n_op_shapes; i++) {
        const op_shape *s = &op_shapes[i];
        bool known = false;
        for (size_t k = 0; k < HD_LEN(op_names); k++) known = known || is(s, op_names[k]);
        CHECK(s, known);
        CHECK(s, s->rows[0] > 0);
        CHECK(s, (s->format != HD_FORMAT_NONE) == (s->outs > 0 && s->n_roles > 0) ||
                     !s->config || is(s, "attention") || is(s, "indexer_topk") ||
                     is(s, "resident"));
    }
}

/* ---- stored matrices ---- */

/* The first tensor of a role. */
static const hd_tensor_decl *find_role(const hd_schema *schema, hd_role role) {
    for (int32_t i = 0; i < schema->n; i++) {
        if (schema->decls[i].role == role) return &schema->decls[i];
    }
    return NULL;
}

/* The roles' rows together, and one of the parts into which rows or columns are divided. */
static void check_matrix(const op_shape *s, const hd_model_spec *spec,
                         const hd_schema *schema) {
    int32_t rows = 0, cols = 0;
    const int32_t parts = parts_of(s);
    for (int32_t r = 0; r < s->n_roles; r++) {
        const hd_tensor_decl *d = find_role(schema, s->roles[r]);
        if (!d) fail_msg("%s: %s has no %s", s->name, s->config, hd_role_name(s->roles[r]));
        rows += d->rows;
        cols = d->cols;
        CHECK(s, hd_declared_format(spec, d).type == hd_formats[s->format].type);
        CHECK(s, hd_declared_format(spec, d).block_cols == hd_formats[s->format].block_cols);
    }
    CHECK(s, (s->outs * parts == rows && s->cols == cols) ||
                 (s->outs == rows && s->cols * parts == cols));
}

/* ---- the rest ---- */

static void check_keys(const op_shape *s, const hd_model_spec *spec) {
    const bool v4 = spec->family == HD_FAMILY_V4;
    CHECK(s, s->outs * parts_of(s) == spec->n_heads);
    CHECK(s, s->cols == (v4 ? spec->head_dim : spec->kv_rank + spec->rope_dim));
    CHECK(s, s->top_k == 0 || s->top_k == spec->index_topk);
    CHECK(s, s->n <= spec->max_positions);
}

static void check_indexer(const op_shape *s, const hd_model_spec *spec) {
    CHECK(s, s->outs == spec->index_heads);
    CHECK(s, s->cols == spec->index_dim);
    CHECK(s, s->top_k == spec->index_topk);
}

static void check_moe(const op_shape *s, const hd_model_spec *spec) {
    const hd_router_rule *r = &spec->route;
    CHECK(s, s->top_k == r->top_k);
    if (is(s, "grouped_gemm") || is(s, "grouped_swiglu")) CHECK(s, r->n_experts % s->n == 0);
    if (is(s, "moe_permute") || is(s, "moe_split")) CHECK(s, s->n == r->n_experts);
    if (is(s, "moe_combine")) CHECK(s, s->cols == spec->hidden);
    if (!is(s, "moe_topk")) return;
    CHECK(s, s->cols == r->n_experts);
    CHECK(s, s->n == (r->n_groups > 1 ? r->n_groups : 0));
}

static void check_shape(const op_shape *s, const hd_model_spec *spec, const hd_schema *schema) {
    if (s->format != HD_FORMAT_NONE) check_matrix(s, spec, schema);
    if (is(s, "linear_heads")) {
        CHECK(s, s->n == (spec->family == HD_FAMILY_V4 ? spec->o_groups : spec->n_heads));
    } else if (is(s, "attention")) {
        check_keys(s, spec);
    } else if (is(s, "attention_naive")) {
        CHECK(s, s->n * parts_of(s) == spec->n_heads);
    } else if (is(s, "resident")) {
        CHECK(s, s->cols == spec->head_dim && s->top_k == spec->index_topk);
    } else if (is(s, "compress")) {
        CHECK(s, s->cols == spec->head_dim);
        CHECK(s, s->n == spec->csa_ratio || s->n == spec->hca_ratio);
    } else if (is(s, "indexer_topk")) {
        check_indexer(s, spec);
    } else if (is(s, "hc_pre") || is(s, "hc_post") || is(s, "hc_next")) {
        CHECK(s, s->n == spec->hc_mult && s->cols == spec->hidden);
    } else if (is(s, "rms_norm") || is(s, "add_norm")) {
        CHECK(s, s->cols == spec->hidden);
    } else if (is(s, "swiglu")) {
        CHECK(s, s->cols == spec->moe_inter);
    } else if (is(s, "argmax") || is(s, "sample")) {
        CHECK(s, s->cols == spec->vocab);
    } else if (!is(s, "linear") && !is(s, "linear_swiglu")) {
        check_moe(s, spec);
    }
}

static void shapes_are_the_configs(void **state) {
    (void)state;
    hd_model_spec *spec = NULL;
    hd_schema schema = {0};
    const char *open = "";
    for (int32_t i = 0; i < n_op_shapes; i++) {
        const op_shape *s = &op_shapes[i];
        if (!s->config) continue;
        if (strcmp(open, s->config) != 0) {
            hd_schema_close(&schema);
            hd_model_spec_close(spec);
            spec = config_open(s->config);
            assert_int_equal(hd_schema_open(&schema, spec, NULL), HD_OK);
            open = s->config;
        }
        check_shape(s, spec, &schema);
    }
    hd_schema_close(&schema);
    hd_model_spec_close(spec);
}

int test_op_shapes(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operators_exist),
        cmocka_unit_test(shapes_are_the_configs),
    };
    return cmocka_run_group_tests_name("op shapes", tests, NULL, NULL);
}
