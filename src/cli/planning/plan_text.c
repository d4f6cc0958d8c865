/* plan_text.c - predictions as a table, and where the bytes and the time of one layout go. */
#include <stdio.h>
#include <string.h>

#include "cli/planning/plan_internal.h"

enum { MAX_KINDS = 160 };

static double gb(int64_t bytes) {
    return (double)bytes / 1e9;
}

/* ---- the table ---- */

void plan_print_assumed(const plan_settings *s) {
    const hd_gpu *m = &s->gpu;
    const hd_load *l = &s->args.load;
    printf("PREDICTED, not measured: %s on %lld x %s\n", hd_family_name(s->spec->family),
           (long long)s->gpus, m->name);
    printf("GPU: %g GB, %g TB/s, %g and %g TFLOP/s, nodes of %g; %s\n", m->memory_gb,
           m->memory_tb_s, m->tflops_8bit, m->tflops_16bit, m->node, m->source);
    printf("load: %d requests at a time, %d tokens in and %d out, chunks of %d, %d drafts of "
           "which\n      %g are accepted, experts' balancedness %g, exchanges %s\n\n",
           l->users, l->prompt, l->output, l->chunk, l->drafts, l->accepted, l->balancedness,
           l->overlap ? "behind kernels" : "between kernels");
}

static void print_row(const plan_settings *s, const hd_capacity *c, bool best) {
    char layout[64], price[32] = "";
    if (s->price > 0) snprintf(price, sizeof price, "%9.2f", plan_price(s, c));
    printf("%c %-28s %8.1f %7.1f %7.1f %7.1f  %8.0f %8.2f %9.1f %11.0f %10.0f%s\n",
           best ? '*' : ' ', plan_layout_text(c, layout),
           gb(hd_rank_memory_weights(&c->memory)), gb(c->memory.kv), gb(c->memory.activations),
           c->free / 1e9, c->ttft_s * 1e3, c->step_s * 1e3, c->user_tokens_s,
           c->output_tokens_s, c->output_tokens_s / (double)s->gpus, price);
}

static void print_table(const plan_settings *s, const plan_result *r) {
    printf("  %-28s %8s %7s %7s %7s  %8s %8s %9s %11s %10s%s\n", "", "weights", "KV", "activ.",
           "free", "TTFT", "step", "tok/s", "out tok/s", "of a",
           s->price > 0 ? "   $ per" : "");
    printf("  %-28s %8s %7s %7s %7s  %8s %8s %9s %11s %10s%s\n", "layout", "GB", "GB", "GB",
           "GB", "ms", "ms", "of a user", "of all", "GPU", s->price > 0 ? "   Mtoken" : "");
    for (int32_t i = 0; i < r->n; i++) print_row(s, &r->all[i], r->best[i]);
}

static void print_verdict(const plan_settings *s, const plan_result *r) {
    const hd_capacity *c = &r->all[r->first];
    if (r->n_refused) {
        printf("\n%d other layouts cannot divide the model: %s\n", r->n_refused,
               r->refused.msg);
    }
    if (!r->n_best) {
        printf("\nNo layout fits: the nearest lacks %.1f GB of a GPU's memory.\n",
               -c->free / 1e9);
        return;
    }
    char ranks[80], by_cp[24] = "";
    const int32_t cp = plan_cp(&c->parallel);
    if (cp > 1) snprintf(by_cp, sizeof by_cp, " --cp %d", cp);
    snprintf(ranks, sizeof ranks, "--tp %d%s --dp %d --ep %d", c->parallel.tp / cp, by_cp,
             c->parallel.dp, c->parallel.ep);
    if (c->dwdp > 1) snprintf(ranks, sizeof ranks, "--dwdp %d", c->dwdp);
    const char *flag = s->args.experts == HD_EXPERTS_ON_DISK ? " --experts-disk auto"
                       : s->args.experts == HD_EXPERTS_HELD  ? ""
                       : s->args.host_rate > 0
                           ? " --experts-host auto --experts-host-compute auto"
                           : " --experts-host auto";
    char hisparse[32] = "", entries[32] = "";
    if (s->kv_type) {
        snprintf(entries, sizeof entries, " --kv-cache-dtype %s", hd_kv_type_names[s->kv_type]);
    }
    if (c->sizes.resident) {
        snprintf(hisparse, sizeof hisparse, " --hisparse %d", c->sizes.resident);
    }
    printf("\n* no other layout that fits has more of both tokens/s\n"
           "serve's options of the one with most: %s%s%s%s%s%s --max-running %d "
           "--context %d --kv-tokens %lld --chunk %d --precision %s\n",
           ranks, flag, entries, hisparse, s->sum_in_ranks ? " --sum-in-ranks" : "",
           c->parallel.fp8_rows ? " --dispatch-dtype fp8" : "", c->sizes.running,
           c->sizes.context,
           (long long)c->sizes.n_pages[HD_KV_FULL] * c->sizes.shape.page_tokens, c->sizes.chunk,
           hd_precision_names[s->args.precision]);
}

/* Entries in host memory: what fetching them takes, and what the larger batch gains. */
static void print_hisparse(const plan_settings *s, const hd_capacity *c) {
    const hd_hisparse_choice *h = &c->hisparse;
    if (!s->args.hisparse_auto && !c->sizes.resident) return;
    if (h->rows == 0) {
        printf("\nhisparse: off, since %s\n",
               c->free < 0 ? "attention selects no entries" : "all entries fit on the device");
        return;
    }
    printf("\nhisparse: %s", h->on ? "on" : "off");
    if (s->args.hisparse_auto)
        printf("; %.0f requests of a group fit without it, of %.0f", h->fitting, h->requests);
    printf("\n  with %d rows of each layer a step of decode fetches for %.2f ms", h->rows,
           h->miss_s * 1e3);
    if (s->args.hisparse_auto && h->fitting >= 1)
        printf("; its batch gains %.2f ms", h->gain_s * 1e3);
    printf("\n");
}

/* Experts that are elsewhere: how many, what a step fetches of them, and what that leads to. */
static void print_elsewhere(const plan_settings *s, const hd_capacity *c) {
    static const char *const places[] = {"on other ranks", "in host memory", "on disk"};
    if (c->dwdp == 1 && s->args.experts == HD_EXPERTS_HELD) return;
    printf("\nexperts: %.0f %% on the rank, %.1f GB %s; a step of decode fetches %.1f GB in "
           "%.0f ms, of prefill %.1f GB in %.0f ms\n",
           c->resident * 100, c->elsewhere_bytes / 1e9, places[s->args.experts],
           c->decode->fetch_bytes / 1e9, c->decode->fetch_s * 1e3,
           c->prefill->fetch_bytes / 1e9, c->prefill->fetch_s * 1e3);
    if (c->on_host > 0) {
        printf("the host computes %.0f %% of those that a step of decode needs\n",
               c->on_host * 100);
    }
    if (c->free >= 0) {
        printf("predicted: %.3g tokens/s of a user, first token after %.3g s\n",
               c->user_tokens_s, c->ttft_s);
    }
    if (c->dwdp == 1) return;
    if (c->hidden_rows) {
        printf(
            "kernels of a prompt hide the copies from %d tokens in a step on; for shorter ones "
            "take ep\n",
            c->hidden_rows);
    } else {
        printf("kernels of no prompt of up to 64K tokens hide the copies: take ep\n");
    }
}

/* ---- --explain ---- */

/* All ranks of a host have their parts in its memory. */
static void explain_messages(const plan_settings *s, const hd_capacity *c) {
    const int32_t world = hd_parallel_world(&c->parallel);
    const int64_t each = c->memory.messages;
    if (world == 1) return;
    if (each) {
        printf("  %-30s %10.3f GB  of %d processes, %.3f GB of each%s\n", "host: messages",
               gb(world * each), world, gb(each),
               s->gpu.cpu ? ", in the memory of the ranks" : "");
    } else {
        printf("  %-30s %10s     ranks on several hosts%s share no memory\n", "host: messages",
               "0", s->gpu.node > 1 ? "" : ", one on each,");
    }
}

void plan_explain_memory(const plan_settings *s, const hd_capacity *c) {
    const hd_rank_memory *m = &c->memory;
    printf("\nbytes of a rank\n");
    for (int i = 0; i < HD_N_PARAM_GROUPS; i++) {
        if (!m->weights[i]) continue;
        printf("  %-30s %10.3f GB\n", hd_param_group_name((hd_param_group)i),
               gb(m->weights[i]));
    }
    if (m->spare) printf("    of them in spare slots       %10.3f GB\n", gb(m->spare));
    if (m->staged) printf("  %-30s %10.3f GB\n", "experts of two layers", gb(m->staged));
    printf("  %-30s %10.3f GB  %d pages of %d tokens, %d of the window\n", "KV pools",
           gb(m->kv), c->sizes.n_pages[HD_KV_FULL], c->sizes.shape.page_tokens,
           c->sizes.n_pages[HD_KV_WINDOW]);
    printf("  %-30s %10.3f GB  steps of %d rows\n", "activations and buffers",
           gb(m->activations), c->sizes.step_rows);
    printf("  %-30s %10.3f GB\n", "driver and graphs (assumed)", s->gpu.reserved_gb);
    printf("  %-30s %10.3f GB\n", "free", c->free / 1e9);
    if (m->snapshots) printf("  %-30s %10.3f GB\n", "host: snapshots", gb(m->snapshots));
    if (m->entries) printf("  %-30s %10.3f GB\n", "host: entries (HiSparse)", gb(m->entries));
    if (m->tables) printf("  %-30s %10.3f GB\n", "host: Engram tables", gb(m->tables));
    explain_messages(s, c);
}

/* Lines of one operator in one part of the model, whatever their shapes. */
static int32_t merge(const hd_step_cost *c, hd_step_line *kinds) {
    int32_t n = 0;
    for (int32_t i = 0; i < c->n; i++) {
        const hd_step_line *l = &c->lines[i];
        int32_t k = 0;
        while (k < n &&
               (strcmp(kinds[k].part, l->part) != 0 || strcmp(kinds[k].op, l->op) != 0 ||
                strcmp(kinds[k].format, l->format) != 0)) {
            k++;
        }
        if (k == MAX_KINDS) continue;
        if (k == n) {
            kinds[n++] = *l;
            continue;
        }
        kinds[k].calls += l->calls;
        kinds[k].bytes += l->bytes;
        kinds[k].flops += l->flops;
        kinds[k].outside += l->outside;
        kinds[k].seconds += l->seconds;
    }
    return n;
}

void plan_explain_step(const char *title, const hd_step_cost *c, double seconds) {
    static hd_step_line kinds[MAX_KINDS];
    const int32_t n = merge(c, kinds);
    printf("\n%s: %.3f ms = %.3f ms of %lld kernels, %.3f ms of exchanges\n", title,
           seconds * 1e3, c->kernel_s * 1e3, (long long)c->kernels, c->exchange_s * 1e3);
    printf("  %-10s %-18s %-5s %6s %10s %10s %10s %9s\n", "part", "operator", "", "calls", "MB",
           "GFLOP", "MB to net", "us");
    for (int32_t i = 0; i < n; i++) {
        const hd_step_line *l = &kinds[i];
        printf("  %-10s %-18s %-5s %6lld %10.1f %10.1f %10.1f %9.1f\n", l->part, l->op,
               l->format, (long long)l->calls, l->bytes / 1e6, l->flops / 1e9, l->outside / 1e6,
               l->seconds * 1e6);
    }
}

/* What dense_tp would take least memory, of V3's kind of dense layers. */
static void explain_dense(const plan_settings *s, const hd_capacity *c) {
    const hd_model_spec *spec = s->spec;
    const hd_load *l = &s->args.load;
    const double weights = (double)spec->dense_inter * spec->hidden;
    const double users = (double)l->users / c->parallel.dp;
    bool dense = false;
    for (int32_t i = 0; i < spec->n_layers; i++) dense |= spec->layers[i].mlp == HD_MLP_DENSE;
    if (!dense) return;
    printf(
        "dense MLPs: weights / n + n x hidden states is least for n = %.1f in prefill, %.1f in "
        "decode\n",
        hd_capacity_dense_tp(weights, (double)l->chunk / c->parallel.tp * spec->hidden),
        hd_capacity_dense_tp(weights, users * (1 + l->drafts) / c->parallel.tp * spec->hidden));
}

static void explain(const plan_settings *s, const hd_capacity *c) {
    const hd_gpu *m = &s->gpu;
    const bool overlap = s->args.load.overlap;
    char layout[64];
    printf("\n%s\n", plan_layout_text(c, layout));
    plan_explain_memory(s, c);
    explain_dense(s, c);
    plan_explain_step("a step of prefill", c->prefill,
                      hd_capacity_step_seconds(c->prefill, overlap));
    plan_explain_step("a step of decode", c->decode, c->step_s);
    printf("\nkernel: %g us + max(bytes / %g TB/s, FLOP / %g TFLOP/s; %g if 8-bit or less)\n"
           "exchange: %g us + bytes / %g GB/s; to other nodes %g us + bytes / %g GB/s\n"
           "TTFT: the chunks of a prompt. tok/s of a user: (1 + accepted) / step.\n"
           "of all: users x output / (users of a group x prefill + output / (1 + accepted) x "
           "step)\n",
           m->launch_us, m->memory_tb_s, m->tflops_16bit, m->tflops_8bit, m->link_us,
           m->link_gb_s, m->network_us, m->network_gb_s);
}

void plan_print_text(const plan_settings *s, const plan_result *r) {
    plan_print_assumed(s);
    print_table(s, r);
    print_hisparse(s, &r->all[r->first]);
    print_elsewhere(s, &r->all[r->first]);
    print_verdict(s, r);
    if (s->explain) explain(s, &r->all[r->first]);
}
