/* engine.c - what the engine does, in /metrics: attention groups, time of steps, drafts by
 * place, balance of experts. */
#include <stddef.h>
#include <string.h>

#include "server/metrics/metrics_internal.h"
#include "server/server.h"

/* Of each attention group, if there are several. */
static void put_groups(FILE *out, const metrics_view *v) {
    static const struct {
        const char *name, *type, *help;
        size_t at; /* of an int64_t or, of a gauge, an int32_t in hd_engine_stats */
    } of_group[] = {
        {"group_running_reqs",             "gauge",   "choices that a group computes",
         offsetof(hd_engine_stats, running)      },
        {"group_queue_reqs",               "gauge",   "choices that wait in a group",
         offsetof(hd_engine_stats, waiting)      },
        {"group_free_pages",               "gauge",   "free pages of entries in a group",
         offsetof(hd_engine_stats, pages_free)   },
        {"group_steps_total",              "counter", "steps of a group that had rows",
         offsetof(hd_engine_stats, steps)        },
        {"group_step_rows_total",          "counter", "rows that a group computed",
         offsetof(hd_engine_stats, rows)         },
        {"group_prompt_tokens_total",      "counter", "prompt tokens of a group",
         offsetof(hd_engine_stats, prompt_tokens)},
        {"group_cached_tokens_total",      "counter", "of them found in its prefix cache",
         offsetof(hd_engine_stats, cached_tokens)},
        {"group_generation_tokens_total",  "counter", "tokens that a group generated",
         offsetof(hd_engine_stats, output_tokens)},
        {"group_retracted_requests_total", "counter", "choices that a group preempted",
         offsetof(hd_engine_stats, retracted)    },
    };
    hd_engine_stats e;
    const int32_t n = v->from->engine ? hd_engine_read_group(v->from->engine, -1, &e) : 0;
    for (size_t i = 0; n > 1 && i < HD_LEN(of_group); i++) {
        metrics_put_head(out, "hadal_", of_group[i].name, of_group[i].type, of_group[i].help);
        for (int32_t g = 0; g < n; g++) {
            hd_engine_read_group(v->from->engine, g, &e);
            const char *at = (const char *)&e + of_group[i].at;
            int64_t value;
            int32_t small;
            memcpy(&value, at, sizeof value);
            memcpy(&small, at, sizeof small);
            fprintf(out, "hadal_%s{%s,group=\"%d\"} %lld\n", of_group[i].name, v->m->label, g,
                    (long long)(of_group[i].type[0] == 'g' ? small : value));
        }
    }
}

/* Skips layers without routed experts, and layers whose experts have computed nothing yet. */
static void put_layers(FILE *out, const metrics_view *v) {
    const size_t per_layer = (size_t)v->n_experts;
    metrics_put_head(out, "hadal_", "expert_layer_balancedness", "gauge",
                     "mean load of a layer's experts over the largest");
    for (size_t at = 0; at < v->n_load; at += per_layer) {
        const double even = metrics_balancedness(v->load + at, per_layer, v->n_experts);
        if (even <= 0) continue;
        fprintf(out, "hadal_expert_layer_balancedness{%s,layer=\"%zu\"} %.17g\n", v->m->label,
                at / per_layer, even);
    }
}

static void put_step_time(FILE *out, const metrics_view *v) {
    metrics_put_head(out, "hadal_", "step_seconds_total", "counter",
                     "time in steps, by who was busy");
    fprintf(out, "hadal_step_seconds_total{%s,part=\"host\"} %.9f\n", v->m->label,
            metrics_seconds(v->e.host_ns));
    fprintf(out, "hadal_step_seconds_total{%s,part=\"device\"} %.9f\n", v->m->label,
            metrics_seconds(v->e.step_ns - v->e.host_ns));
}

/* Steps that ran as one CUDA graph each. */
static void put_graphs(FILE *out, const metrics_view *v) {
    metrics_put_head(out, "hadal_", "gpu_graph_steps_total", "counter",
                     "steps launched as one graph");
    fprintf(out, "hadal_gpu_graph_steps_total{%s} %lld\n", v->m->label,
            (long long)v->e.graph_steps);
    metrics_put_head(out, "hadal_", "gpu_graph_seconds_total", "counter",
                     "time of the GPU in graphs, and idle between one and the next behind it");
    fprintf(out, "hadal_gpu_graph_seconds_total{%s,part=\"busy\"} %.9f\n", v->m->label,
            metrics_seconds(v->e.graph_ns));
    fprintf(out, "hadal_gpu_graph_seconds_total{%s,part=\"idle\"} %.9f\n", v->m->label,
            metrics_seconds(v->e.gap_ns));
}

void metrics_put_places(FILE *out, const metrics_view *v, const metrics_dialect *d) {
    static const char name[] = "spec_decode_num_accepted_tokens_per_pos_total";
    if (d->bit == SERVER_COMPAT_SGLANG) return;
    metrics_put_head(out, d->prefix, name, "counter",
                     "drafts that stood, by place in the step");
    for (int i = 0; i < HD_MAX_DRAFTS; i++) {
        fprintf(out, "%s%s{%s%s,position=\"%d\"} %lld\n", d->prefix, name, v->m->label,
                d->labels, i, (long long)v->e.accepted_at[i]);
    }
    if (d->bit) return;
    metrics_put_head(out, d->prefix, "spec_decode_num_draft_tokens_per_pos_total", "counter",
                     "drafts made, by place in the step");
    for (int i = 0; i < HD_MAX_DRAFTS; i++) {
        fprintf(out,
                "hadal_spec_decode_num_draft_tokens_per_pos_total{%s,position=\"%d\"} "
                "%lld\n",
                v->m->label, i, (long long)v->e.drafted_at[i]);
    }
}

const char *metrics_wait_name(metrics_wait why) {
    static const char *const names[METRICS_N_WAITS] = {"prefill", "pause", "place", "kv"};
    return names[why];
}

void metrics_waiting(const hd_engine_stats *e, int32_t n[METRICS_N_WAITS]) {
    const bool full = e->running >= e->max_running;
    memset(n, 0, METRICS_N_WAITS * sizeof *n);
    n[METRICS_WAIT_PREFILL] = e->fetching;
    n[e->paused ? METRICS_WAIT_PAUSE
      : full    ? METRICS_WAIT_PLACE
                : METRICS_WAIT_KV] = e->waiting;
}

static void put_waiting(FILE *out, const metrics_view *v) {
    int32_t n[METRICS_N_WAITS];
    metrics_waiting(&v->e, n);
    metrics_put_head(out, "hadal_", "waiting_answers", "gauge", "choices that wait, by reason");
    for (int i = 0; i < METRICS_N_WAITS; i++) {
        fprintf(out, "hadal_waiting_answers{%s,reason=\"%s\"} %d\n", v->m->label,
                metrics_wait_name((metrics_wait)i), n[i]);
    }
}

void metrics_put_engine(FILE *out, const metrics_view *v) {
    put_waiting(out, v);
    put_groups(out, v);
    put_step_time(out, v);
    if (v->e.graph_steps) put_graphs(out, v);
    put_layers(out, v);
}
