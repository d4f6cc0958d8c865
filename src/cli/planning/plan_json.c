/* plan_json.c - predictions as JSON, and as a chart. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "cli/bench/bench_chart.h"
#include "cli/planning/plan_internal.h"

json_t *plan_memory_json(const hd_capacity *c) {
    const hd_rank_memory *m = &c->memory;
    json_t *parts = json_object();
    for (int i = 0; i < HD_N_PARAM_GROUPS; i++) {
        if (!m->weights[i]) continue;
        json_object_set_new(parts, hd_param_group_name((hd_param_group)i),
                            json_integer(m->weights[i]));
    }
    return json_pack(
        "{s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f}", "weights",
        (json_int_t)hd_rank_memory_weights(m), "weights_by_part", parts, "spare_slots",
        (json_int_t)m->spare, "staged_experts", (json_int_t)m->staged, "kv", (json_int_t)m->kv,
        "activations", (json_int_t)m->activations, "host_snapshots", (json_int_t)m->snapshots,
        "host_entries", (json_int_t)m->entries, "host_tables", (json_int_t)m->tables,
        "host_messages", (json_int_t)m->messages, "free", c->free);
}

static json_t *exchanges_json(const hd_step_cost *c) {
    json_t *to = json_array();
    for (int32_t i = 0; i < c->n; i++) {
        const hd_step_line *l = &c->lines[i];
        if (!l->exchange) continue;
        json_array_append_new(to,
                              json_pack("{s:s, s:s, s:I, s:f, s:f}", "part", l->part,
                                        "operation", l->op, "calls", (json_int_t)l->calls,
                                        "bytes_inside", l->bytes, "bytes_outside", l->outside));
    }
    return to;
}

json_t *plan_step_json(const hd_step_cost *c, double seconds) {
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:I, s:f, s:f, s:f, s:o}", "seconds", seconds,
                     "kernel_seconds", c->kernel_s, "exchange_seconds", c->exchange_s,
                     "fetch_seconds", c->fetch_s, "fetch_bytes", c->fetch_bytes, "kernels",
                     (json_int_t)c->kernels, "bytes", c->bytes, "flops", c->flops, "bytes_sent",
                     c->sent, "exchanges", exchanges_json(c));
}

json_t *plan_layout_json(const hd_parallel_config *l) {
    const int32_t cp = plan_cp(l);
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b, s:s}", "tp", l->tp / cp,
                     "cp", cp, "dp", l->dp, "ep", l->ep, "etp", l->etp, "dense_tp", l->dense_tp,
                     "head_tp", l->head_tp, "redundant", l->redundant, "sum_in_ranks",
                     l->sum_in_ranks, "dispatch_dtype",
                     plan_dispatch_types[l->fp8_rows ? PLAN_ROWS_AS_FP8 : PLAN_ROWS_AS_FLOATS]);
}

static json_t *capacity_json(const plan_settings *s, const hd_capacity *c, bool best) {
    const bool overlap = s->args.load.overlap;
    json_t *to = json_pack(
        "{s:o, s:i, s:i, s:f, s:f, s:f, s:b, s:b, s:o, s:o, s:o, s:f, s:f, s:f, s:f, s:f, s:f}",
        "layout", plan_layout_json(&c->parallel), "dwdp", c->dwdp, "hidden_rows",
        c->hidden_rows, "resident_experts", c->resident, "elsewhere_bytes", c->elsewhere_bytes,
        "on_host", c->on_host, "fits", c->free >= 0, "best", best, "bytes", plan_memory_json(c),
        "prefill", plan_step_json(c->prefill, hd_capacity_step_seconds(c->prefill, overlap)),
        "decode", plan_step_json(c->decode, c->step_s), "ttft_seconds", c->ttft_s,
        "prompt_seconds", c->prefill_s, "user_tokens_per_second", c->user_tokens_s,
        "output_tokens_per_second", c->output_tokens_s, "input_tokens_per_second",
        c->input_tokens_s, "output_tokens_per_second_of_a_gpu",
        c->output_tokens_s / (double)s->gpus);
    if (c->sizes.resident || s->args.hisparse_auto) {
        const hd_hisparse_choice *h = &c->hisparse;
        json_t *more = json_pack("{s:b, s:i, s:f, s:f}", "on", h->on, "rows", h->rows,
                                 "requests", h->requests, "miss_seconds", h->miss_s);
        if (s->args.hisparse_auto && h->fitting >= 1 && more) {
            json_object_set_new(more, "fitting", json_real(h->fitting));
            json_object_set_new(more, "gain_seconds", json_real(h->gain_s));
        }
        json_object_set_new(to, "hisparse", more);
    }
    if (s->price > 0) {
        json_object_set_new(to, "price_per_million_output_tokens", json_real(plan_price(s, c)));
    }
    return to;
}

json_t *plan_gpu_json(const hd_gpu *m) {
    json_t *to = json_pack("{s:s, s:s}", "name", m->name, "source", m->source);
#define X(field, unit, what) json_object_set_new(to, #field, json_real(m->field));
    HD_GPU_NUMBERS(X)
#undef X
    return to;
}

json_t *plan_load_json(const hd_load *l) {
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:b}", "users", l->users, "prompt",
                     l->prompt, "output", l->output, "chunk", l->chunk, "drafts", l->drafts,
                     "accepted", l->accepted, "balancedness", l->balancedness, "overlap",
                     l->overlap);
}

hd_status plan_put_json(json_t *all, hd_err *err) {
    char *text = all ? hd_json_write(all, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(all);
    if (!text) return HD_FAIL(err, HD_ENOMEM, "no memory to print a plan");
    puts(text);
    free(text);
    return HD_OK;
}

hd_status plan_print_json(const plan_settings *s, const plan_result *r, hd_err *err) {
    json_t *layouts = json_array();
    for (int32_t i = 0; i < r->n; i++) {
        json_array_append_new(layouts, capacity_json(s, &r->all[i], r->best[i]));
    }
    json_t *all = json_pack("{s:s, s:s, s:I, s:o, s:o, s:o}", "note", "predicted, not measured",
                            "model", hd_family_name(s->spec->family), "gpus",
                            (json_int_t)s->gpus, "gpu", plan_gpu_json(&s->gpu), "load",
                            plan_load_json(&s->args.load), "layouts", layouts);
    return plan_put_json(all, err);
}

/* ---- the chart ---- */

static void add_points(const plan_result *r, bool best, double *x, double *y,
                       char (*labels)[64], chart_series *to) {
    int n = 0;
    for (int32_t i = 0; i < r->n; i++) {
        const hd_capacity *c = &r->all[i];
        if (c->free < 0 || r->best[i] != best) continue;
        int k = n++;
        for (; k > 0 && x[k - 1] > c->user_tokens_s; k--) { /* a line goes from left to right */
            x[k] = x[k - 1];
            y[k] = y[k - 1];
            memcpy(labels[k], labels[k - 1], sizeof labels[k]);
        }
        x[k] = c->user_tokens_s;
        y[k] = c->output_tokens_s;
        plan_layout_text(c, labels[k]);
    }
    *to = (chart_series){.x = x,
                         .y = y,
                         .n = n,
                         .colour = !best,
                         .apart = !best,
                         .dashed = !best,
                         .points = true,
                         .labels = labels};
    snprintf(to->name, sizeof to->name, "%s", best ? "Pareto front" : "others that fit");
}

static void write_page(const plan_result *r, FILE *to) {
    static double x[2][PLAN_MAX_LAYOUTS], y[2][PLAN_MAX_LAYOUTS];
    static char labels[2][PLAN_MAX_LAYOUTS][64];
    chart_series series[2] = {{.n = 0}};
    for (int i = 0; i < 2; i++) add_points(r, i == 0, x[i], y[i], labels[i], &series[i]);
    const chart drawn = {.title = "Predicted, not measured: tokens/s by layout",
                         .x_label = "output tokens/s of a user",
                         .y_label = "output tokens/s of all GPUs",
                         .series = series,
                         .n = series[1].n ? 2 : 1};
    fprintf(to,
            "<!DOCTYPE html><meta charset=\"utf-8\"><title>hadal plan</title>"
            "<style>body{max-width:1000px}%s</style>\n",
            chart_style);
    chart_write(&drawn, to);
}

hd_status plan_write_chart(const plan_settings *s, const plan_result *r, hd_err *err) {
    if (!r->n_best) return HD_FAIL(err, HD_EINVAL, "--chart: no layout fits");
    FILE *to = fopen(s->chart, "w");
    if (!to) return HD_FAIL(err, HD_EIO, "cannot write %s: %s", s->chart, strerror(errno));
    write_page(r, to);
    const bool failed = ferror(to);
    if (fclose(to) == 0 && !failed) return HD_OK;
    return HD_FAIL(err, HD_EIO, "cannot write %s", s->chart);
}
