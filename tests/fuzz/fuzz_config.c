/* fuzz_config.c - any bytes as config.json: refused with a sentence, or a spec whose sizes are
 * positive and whose schema and plan open or are refused in their turn. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "weights/placement.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "accepted although %s is wrong\n", what);
    abort();
}

static void check_rope(const hd_rope_spec *r) {
    must(isfinite(r->theta) && r->theta > 1, "theta");
    must(isfinite(r->factor) && r->factor >= 1, "factor");
    must(isfinite(r->magnitude) && r->magnitude > 0, "magnitude");
}

static void check_spec(const hd_model_spec *s) {
    const hd_router_rule *r = &s->route;
    must(s->vocab > 0 && s->hidden > 0 && s->n_layers > 0 && s->n_heads > 0, "a size");
    must(s->n_mtp >= 0 && s->rope_dim > 0 && s->rope_dim % 2 == 0, "a width");
    must(r->top_k > 0 && r->top_k <= r->n_experts, "top_k");
    must(r->n_groups > 0 && r->n_experts % r->n_groups == 0, "n_groups");
    must(isfinite(s->softmax_scale) && s->softmax_scale > 0, "softmax_scale");
    must(s->norm_eps > 0 && r->scale > 0, "a factor");
    must(s->n_eos > 0 && s->n_eos <= HD_MAX_EOS, "eos");
    check_rope(&s->rope);
    if (hd_is_hybrid(s)) {
        check_rope(&s->rope_compress);
        must(s->rope_dim <= s->head_dim && s->n_heads % s->o_groups == 0, "a V4 size");
        must(s->hc_mult > 0 && s->hc_eps > 0, "hyper-connections");
    }
    for (int32_t l = 0; l < s->n_layers + s->n_mtp; l++) {
        bool compressed = s->layers[l].attention >= HD_ATTN_CSA;
        must(compressed == (s->layers[l].compress_ratio > 0), "a ratio");
        must(s->layers[l].kv_layer >= 0 && s->layers[l].kv_layer <= l, "a cache");
    }
}

static void check_schema(const hd_model_spec *s) {
    hd_schema schema;
    hd_err err = {0};
    if (hd_schema_open(&schema, s, &err) != HD_OK) {
        must(err.msg[0] != '\0', "a silent refusal");
        return;
    }
    for (int32_t i = 0; i < schema.n; i++) {
        must(schema.decls[i].rows > 0 && schema.decls[i].cols > 0, "a shape");
    }
    const hd_parallel_config l = {
        .tp = 2, .dp = 1, .ep = 2, .etp = 1, .dense_tp = 2, .head_tp = 1};
    const hd_plan_args a = {.parallel = &l, .rank = 1, .spec = s, .schema = &schema};
    hd_plan plan;
    if (hd_plan_open(&plan, &a, &err) == HD_OK) {
        must(hd_summary_main(&plan.held).bytes > 0, "the plan's size");
        hd_plan_close(&plan);
    }
    hd_schema_close(&schema);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static char path[64];
    if (!path[0])
        snprintf(path, sizeof path, P_tmpdir "/hadal_fuzz_config.%ld", (long)getpid());
    FILE *f = fopen(path, "wb");
    if (!f) return 0;
    size_t written = fwrite(data, 1, n, f);
    fclose(f);
    if (written != n) return 0;
    hd_err err = {0};
    hd_model_spec *s;
    if (hd_model_spec_open(&s, path, &err) == HD_OK) {
        check_spec(s);
        check_schema(s);
        hd_model_spec_close(s);
    } else {
        must(err.msg[0] != '\0', "a silent refusal");
    }
    unlink(path);
    return 0;
}
