/* plan_pools.c - a plan of two pools: prompts on some GPUs, answers on others. Each pool is divided
 * into equal servers of every number and layout; the fastest prefill is shown with each of the best
 * decode pools. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/planning/plan_internal.h"

typedef struct candidates {
    hd_server_pool_role role;
    hd_server_pool all[PLAN_MAX_LAYOUTS];
    bool best[PLAN_MAX_LAYOUTS]; /* on the Pareto front */
    int32_t n, n_best, first;    /* first: that with most requests per second */
} candidates;

/* ---- predictions ---- */

static const char *const role_names[] = {"prefill", "decode"};

/* Layouts that cannot be are left out; *why keeps the last reason. */
static hd_status add_servers(const plan_settings *s, candidates *c, int32_t servers,
                             int32_t gpus, hd_err *why) {
    hd_parallel_config layouts[PLAN_MAX_LAYOUTS];
    int32_t n = hd_capacity_layouts(layouts, PLAN_MAX_LAYOUTS, gpus, s->spec);
    for (int32_t i = 0; i < n && i < PLAN_MAX_LAYOUTS && c->n < PLAN_MAX_LAYOUTS; i++) {
        hd_status st = plan_complete_layout(s, &layouts[i], why);
        if (st == HD_OK) {
            st = hd_server_pool_predict(&c->all[c->n], &s->args, c->role, &layouts[i], servers,
                                        why);
        }
        c->n += st == HD_OK;
        if (st != HD_OK && st != HD_EUNSUPPORTED && st != HD_EINVAL) return st;
    }
    return HD_OK;
}

static hd_status predict_pool(const plan_settings *s, candidates *c, int32_t gpus,
                              hd_err *err) {
    hd_err why = {0};
    for (int32_t servers = 1; servers <= gpus; servers++) {
        if (gpus % servers) continue;
        const hd_status st = add_servers(s, c, servers, gpus / servers, &why);
        if (st != HD_OK) {
            *err = why;
            return st;
        }
    }
    if (!c->n) {
        *err = why;
        return why.status;
    }
    c->n_best = hd_server_pool_front(c->all, c->n, c->role, c->best);
    for (int32_t i = 0; i < c->n; i++) {
        const bool more = c->all[i].requests_s > c->all[c->first].requests_s;
        if (c->n_best ? c->best[i] && (!c->best[c->first] || more) : more) c->first = i;
    }
    return HD_OK;
}

/* ---- text ---- */

static const char *servers_text(const hd_server_pool *p, char out[96]) {
    char layout[64];
    snprintf(out, 96, "%d x %s", p->servers, plan_layout_text(&p->each, layout));
    return out;
}

static void print_pool(const plan_settings *s, const candidates *c, int64_t gpus) {
    const bool prefill = c->role == HD_POOL_PREFILL;
    printf("%s on %lld GPUs\n  %-34s %9s %9s %9s %9s\n", role_names[c->role], (long long)gpus,
           "servers x layout", "free GB", prefill ? "TTFT ms" : "step ms", "tok/s", "requests");
    printf("  %-34s %9s %9s %9s %9s\n", "", "", "", prefill ? "of all" : "of a user",
           "a second");
    for (int32_t i = 0; i < c->n; i++) {
        const hd_server_pool *p = &c->all[i];
        char servers[96];
        if (!c->best[i]) continue;
        printf("* %-34s %9.1f %9.2f %9.1f %9.2f\n", servers_text(p, servers),
               p->each.free / 1e9, 1e3 * (prefill ? p->each.ttft_s : p->each.step_s),
               prefill ? p->requests_s * s->args.load.prompt : p->each.user_tokens_s,
               p->requests_s);
    }
    if (!c->n_best) {
        printf("  none of %d fits: the nearest lacks %.1f GB of a GPU's memory\n", c->n,
               -c->all[c->first].each.free / 1e9);
    }
    printf("\n");
}

static void print_pair(const plan_settings *s, const hd_server_pool *prefill,
                       const hd_server_pool *decode) {
    const hd_server_pool_pair p = hd_server_pool_join(prefill, decode, &s->args);
    const double gpus = (double)(s->prefill + s->decode);
    char a[96], b[96];
    printf(
        "%s and %s:\n  %.2f requests/s (%s is slower), %.0f tok/s out of all, %.0f of a GPU, "
        "%.1f of a user",
        servers_text(prefill, a), servers_text(decode, b), p.requests_s,
        role_names[prefill->requests_s > decode->requests_s], p.output_tokens_s,
        p.output_tokens_s / gpus, p.user_tokens_s);
    if (s->price > 0)
        printf(", %.2f per Mtoken", s->price * gpus / 3600 / p.output_tokens_s * 1e6);
    printf("\n  TTFT %.0f ms, of which %.2f ms for %.0f MB of KV pages; %.0f of %.0f GPUs in "
           "prefill "
           "would be even\n",
           p.ttft_s * 1e3, p.transfer_s * 1e3, p.kv_bytes / 1e6, p.even_share * gpus, gpus);
}

static void explain(const plan_settings *s, const hd_server_pool *prefill,
                    const hd_server_pool *decode) {
    char text[96];
    printf("\n%s\n", servers_text(prefill, text));
    plan_explain_memory(s, &prefill->each);
    plan_explain_step("a step of prefill", prefill->each.prefill,
                      hd_capacity_step_seconds(prefill->each.prefill, s->args.load.overlap));
    printf("\n%s\n", servers_text(decode, text));
    plan_explain_memory(s, &decode->each);
    plan_explain_step("a step of decode", decode->each.decode, decode->each.step_s);
    printf("\nrequests/s of prefill: servers x dp / prompt; of decode: users x (1 + accepted) "
           "/ step "
           "/ output.\nKV pages: %g us + bytes / %g GB/s\n",
           s->gpu.network_us, s->gpu.network_gb_s);
}

static void print_text(const plan_settings *s, const candidates *prefill,
                       const candidates *decode) {
    plan_print_assumed(s);
    print_pool(s, prefill, s->prefill);
    print_pool(s, decode, s->decode);
    const hd_server_pool *first = &prefill->all[prefill->first];
    for (int32_t i = 0; prefill->n_best && i < decode->n; i++) {
        if (decode->best[i]) print_pair(s, first, &decode->all[i]);
    }
    if (s->explain) explain(s, first, &decode->all[decode->first]);
}

/* ---- JSON ---- */

static json_t *pool_json(const plan_settings *s, const candidates *c) {
    json_t *list = json_array();
    for (int32_t i = 0; i < c->n; i++) {
        const hd_server_pool *p = &c->all[i];
        const hd_capacity *e = &p->each;
        const bool prefill = c->role == HD_POOL_PREFILL;
        const hd_step_cost *step = prefill ? e->prefill : e->decode;
        const double seconds = hd_capacity_step_seconds(step, s->args.load.overlap);
        json_array_append_new(
            list, json_pack("{s:i, s:o, s:b, s:b, s:o, s:o, s:f, s:f}", "servers", p->servers,
                            "layout", plan_layout_json(&e->parallel), "fits", e->free >= 0,
                            "best", c->best[i], "bytes", plan_memory_json(e), "step",
                            plan_step_json(step, seconds), "requests_per_second", p->requests_s,
                            prefill ? "ttft_seconds" : "user_tokens_per_second",
                            prefill ? e->ttft_s : e->user_tokens_s));
    }
    return list;
}

static json_t *pairs_json(const plan_settings *s, const candidates *prefill,
                          const candidates *decode) {
    json_t *list = json_array();
    for (int32_t i = 0; prefill->n_best && i < decode->n; i++) {
        if (!decode->best[i]) continue;
        const hd_server_pool_pair p =
            hd_server_pool_join(&prefill->all[prefill->first], &decode->all[i], &s->args);
        json_array_append_new(
            list,
            json_pack("{s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "prefill",
                      prefill->first, "decode", i, "requests_per_second", p.requests_s,
                      "output_tokens_per_second", p.output_tokens_s, "input_tokens_per_second",
                      p.input_tokens_s, "kv_bytes_of_prompt", p.kv_bytes, "transfer_seconds",
                      p.transfer_s, "ttft_seconds", p.ttft_s, "user_tokens_per_second",
                      p.user_tokens_s, "even_share_of_prefill", p.even_share));
    }
    return list;
}

static hd_status print_json(const plan_settings *s, const candidates *prefill,
                            const candidates *decode, hd_err *err) {
    return plan_put_json(
        json_pack("{s:s, s:s, s:o, s:o, s:o, s:o, s:o}", "note", "predicted, not measured",
                  "model", hd_family_name(s->spec->family), "gpu", plan_gpu_json(&s->gpu),
                  "load", plan_load_json(&s->args.load), "prefill", pool_json(s, prefill),
                  "decode", pool_json(s, decode), "pairs", pairs_json(s, prefill, decode)),
        err);
}

/* ---- the plan ---- */

static hd_status run(const plan_settings *s, candidates *prefill, candidates *decode,
                     hd_err *err) {
    HD_TRY(predict_pool(s, prefill, (int32_t)s->prefill, err));
    HD_TRY(predict_pool(s, decode, (int32_t)s->decode, err));
    if (s->json) return print_json(s, prefill, decode, err);
    print_text(s, prefill, decode);
    return HD_OK;
}

hd_status plan_pools(const plan_settings *s, hd_err *err) {
    candidates *c = calloc(2, sizeof *c);
    if (!c) return HD_FAIL(err, HD_ENOMEM, "no memory for a plan");
    c[0].role = HD_POOL_PREFILL;
    c[1].role = HD_POOL_DECODE;
    const hd_status st = run(s, &c[0], &c[1], err);
    for (int i = 0; i < 2; i++) {
        for (int32_t k = 0; k < c[i].n; k++) hd_server_pool_close(&c[i].all[k]);
    }
    free(c);
    return st;
}
