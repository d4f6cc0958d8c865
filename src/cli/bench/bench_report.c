/* bench_report.c - see bench_report.h. */
#include "cli/bench/bench_report.h"

#include <jansson.h>
#include <stdlib.h>

#include "cli/bench/bench_block.h"

/* ---- times ---- */

static double ms(int64_t ns) {
    return (double)ns * 1e-6;
}

static double end_to_end(const load_record *q) {
    return ms(q->end_ns - q->sent_ns);
}

static double to_first(const load_record *q) {
    return ms(q->first_ns - q->sent_ns);
}

/* Times of one request; negative if there is none. */
static double per_token(const load_record *q) {
    return q->got > 1 ? ms(q->end_ns - q->first_ns) / (q->got - 1) : -1;
}

static hd_quantiles of_requests(const load_run *run, double (*value)(const load_record *),
                                double *scratch) {
    int64_t n = 0;
    for (int64_t i = 0; i < run->n; i++) {
        if (run->records[i].failed) continue;
        const double v = value(&run->records[i]);
        if (v >= 0) scratch[n++] = v;
    }
    return hd_quantiles_of(scratch, n);
}

hd_status report_make(load_report *out, const load_run *run, hd_err *err) {
    *out = (load_report){.seconds = (double)run->duration_ns * 1e-9};
    const int64_t most = run->n > run->n_gaps ? run->n : run->n_gaps;
    double *scratch = malloc((size_t)(most + 1) * sizeof *scratch);
    if (!scratch) return HD_FAIL(err, HD_ENOMEM, "no memory for the report");
    double busy = 0;
    int64_t steps = 0, drafted[HD_MAX_DRAFTS] = {0}, accepted[HD_MAX_DRAFTS] = {0};
    for (int64_t i = 0; i < run->n; i++) {
        const load_record *q = &run->records[i];
        out->failed += q->failed;
        if (q->failed) continue;
        out->completed++;
        out->input_tokens += q->input;
        out->cached_tokens += q->cached;
        out->output_tokens += q->got;
        steps += q->steps;
        busy += end_to_end(q) * 1e-3;
        for (int k = 0; k < HD_MAX_DRAFTS; k++) {
            drafted[k] += q->drafted_at[k];
            accepted[k] += q->accepted_at[k];
        }
    }
    for (int k = 0; k < HD_MAX_DRAFTS; k++) {
        out->accepted_at[k] = drafted[k] ? (double)accepted[k] / (double)drafted[k] : -1;
    }
    out->accept_length = steps ? (double)out->output_tokens / (double)steps : 0;
    out->requests_s = (double)out->completed / out->seconds;
    out->input_s = (double)out->input_tokens / out->seconds;
    out->output_s = (double)out->output_tokens / out->seconds;
    out->total_s = out->input_s + out->output_s;
    out->concurrency = busy / out->seconds;
    out->e2e = of_requests(run, end_to_end, scratch);
    out->ttft = of_requests(run, to_first, scratch);
    out->tpot = of_requests(run, per_token, scratch);
    for (int64_t i = 0; i < run->n_gaps; i++) scratch[i] = ms(run->gaps_ns[i]);
    out->itl = hd_quantiles_of(scratch, run->n_gaps);
    free(scratch);
    return HD_OK;
}

static double mean_us(int64_t ns, int64_t n) {
    return n ? (double)ns * 1e-3 / (double)n : -1;
}

static int64_t count_gaps(const hd_engine_stats *s) {
    int64_t n = 0;
    for (int i = 0; i < HD_GAP_BINS; i++) n += s->gaps[i];
    return n;
}

/* Returns the median of the gaps between graphs, in microseconds; -1: none. */
static double median_gap(const hd_engine_stats *before, const hd_engine_stats *after) {
    const int64_t n = count_gaps(after) - count_gaps(before);
    int64_t upto = 0;
    for (int i = 0; n && i < HD_GAP_BINS; i++) {
        upto += after->gaps[i] - before->gaps[i];
        if (2 * upto >= n) return 0.5 * i + 0.25;
    }
    return -1;
}

void report_engine(load_report *out, const hd_engine_stats *before,
                   const hd_engine_stats *after) {
    out->steps = after->steps - before->steps;
    out->graph_steps = after->graph_steps - before->graph_steps;
    out->host_us = mean_us(after->host_ns - before->host_ns, out->steps);
    out->graph_us = mean_us(after->graph_ns - before->graph_ns, out->graph_steps);
    out->idle_us =
        mean_us(after->gap_ns - before->gap_ns, count_gaps(after) - count_gaps(before));
    out->median_idle_us = median_gap(before, after);
    out->graphs = after->graphs - before->graphs;
    out->record_us = mean_us(after->record_ns - before->record_ns, out->graphs);
    out->experts = after->experts;
    out->experts.used -= before->experts.used;
    out->experts.staged -= before->experts.staged;
    out->experts.fetched -= before->experts.fetched;
    out->experts.fetched_bytes -= before->experts.fetched_bytes;
    out->rebalance = after->rebalance;
    out->rebalance.flips -= before->rebalance.flips;
    out->rebalance.moves -= before->rebalance.moves;
    out->rebalance.bytes -= before->rebalance.bytes;
}

/* ---- the block ---- */

void report_print(const load_report *r, const load_options *o, const char *backend, FILE *to) {
    block_heading(to, " Serving Benchmark Result ", '=');
    fprintf(to, "%-40s hadal %s\n", "Backend:", backend);
    if (o->rate > 0) {
        block_real(to, "Traffic request rate:", o->rate);
    } else {
        fprintf(to, "%-40s inf\n", "Traffic request rate:");
    }
    if (o->concurrency) block_count(to, "Max request concurrency:", o->concurrency);
    block_count(to, "Successful requests:", r->completed);
    if (r->failed) block_count(to, "Failed requests:", r->failed);
    block_real(to, "Benchmark duration (s):", r->seconds);
    block_count(to, "Total input tokens:", r->input_tokens);
    block_count(to, "Of them cached:", r->cached_tokens);
    block_count(to, "Total generated tokens:", r->output_tokens);
    block_real(to, "Request throughput (req/s):", r->requests_s);
    block_real(to, "Input token throughput (tok/s):", r->input_s);
    block_real(to, "Output token throughput (tok/s):", r->output_s);
    block_real(to, "Total token throughput (tok/s):", r->total_s);
    block_real(to, "Concurrency:", r->concurrency);
    block_real(to, "Accept length:", r->accept_length);
    for (int k = 0; k < HD_MAX_DRAFTS && r->accepted_at[k] >= 0; k++) {
        char label[64];
        snprintf(label, sizeof label, "Draft %d accepted (%%):", k + 1);
        block_real(to, label, 100 * r->accepted_at[k]);
    }
    block_count(to, "Engine steps:", r->steps);
    block_real(to, "Host time per step (us):", r->host_us);
    if (r->graph_steps) {
        block_count(to, "Steps as one GPU graph:", r->graph_steps);
        block_real(to, "GPU time per graph (us):", r->graph_us);
    }
    if (r->graphs) {
        block_count(to, "Graphs recorded:", r->graphs);
        block_real(to, "Time per recording (us):", r->record_us);
    }
    if (r->idle_us >= 0) {
        block_real(to, "Mean GPU idle between graphs (us):", r->idle_us);
        block_real(to, "Median GPU idle between graphs (us):", r->median_idle_us);
    }
    if (r->experts.elsewhere) {
        block_real(to, "Experts used that were there (%):",
                   100.0 * (double)r->experts.staged /
                       (double)(r->experts.used + !r->experts.used));
        block_real(to, "Experts fetched (GB):", (double)r->experts.fetched_bytes * 1e-9);
    }
    if (r->rebalance.on) {
        block_count(to, "Experts moved between ranks:", r->rebalance.moves);
        block_real(to, "Their bytes (GB):", r->rebalance.bytes * 1e-9);
    }
    block_times(to, "End-to-End Latency", "E2E Latency", &r->e2e);
    block_times(to, "Time to First Token", "TTFT", &r->ttft);
    block_times(to, "Time per Output Token (excl. 1st token)", "TPOT", &r->tpot);
    block_times(to, "Inter-Token Latency", "ITL", &r->itl);
    block_heading(to, "", '=');
}

/* ---- JSON ---- */

static json_t *experts_json(const hd_expert_figures *x) {
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}",
                     "elsewhere", (json_int_t)x->elsewhere, "slots", (json_int_t)x->slots,
                     "slot_bytes", (json_int_t)x->slot_bytes, "used", (json_int_t)x->used,
                     "staged", (json_int_t)x->staged, "fetched", (json_int_t)x->fetched,
                     "fetched_bytes", (json_int_t)x->fetched_bytes, "sent", (json_int_t)x->sent,
                     "sent_rows", (json_int_t)x->sent_rows, "sent_ns", (json_int_t)x->sent_ns,
                     "split_ns", (json_int_t)x->split_ns, "split_predicted_ns",
                     (json_int_t)x->split_predicted_ns);
}

void report_print_json(const load_report *r, const load_options *o, const char *backend,
                       FILE *to) {
    json_t *j = json_pack(
        "{s:s, s:f, s:I, s:I, s:I, s:I, s:I, s:f, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f}",
        "backend", backend, "request_rate", o->rate, "max_concurrency",
        (json_int_t)o->concurrency, "random_input_len", (json_int_t)o->input_tokens,
        "random_output_len", (json_int_t)o->output_tokens, "completed",
        (json_int_t)r->completed, "failed", (json_int_t)r->failed, "duration", r->seconds,
        "total_input_tokens", (json_int_t)r->input_tokens, "cached_tokens",
        (json_int_t)r->cached_tokens, "total_output_tokens", (json_int_t)r->output_tokens,
        "request_throughput", r->requests_s, "input_throughput", r->input_s,
        "output_throughput", r->output_s, "total_throughput", r->total_s, "concurrency",
        r->concurrency, "accept_length", r->accept_length);
    json_t *places = json_array();
    for (int k = 0; k < HD_MAX_DRAFTS && r->accepted_at[k] >= 0; k++) {
        json_array_append_new(places, json_real(r->accepted_at[k]));
    }
    json_object_set_new(j, "accepted_at", places);
    json_object_set_new(j, "steps", json_integer((json_int_t)r->steps));
    json_object_set_new(j, "host_us_per_step", json_real(r->host_us));
    json_object_set_new(j, "graph_steps", json_integer((json_int_t)r->graph_steps));
    if (r->graph_steps) json_object_set_new(j, "graph_us", json_real(r->graph_us));
    if (r->idle_us >= 0) {
        json_object_set_new(j, "mean_gpu_idle_us", json_real(r->idle_us));
        json_object_set_new(j, "median_gpu_idle_us", json_real(r->median_idle_us));
    }
    if (r->experts.elsewhere) {
        json_object_set_new(j, "experts", experts_json(&r->experts));
    }
    if (r->rebalance.on) {
        json_object_set_new(
            j, "rebalance",
            json_pack("{s:I, s:I, s:f}", "flips", (json_int_t)r->rebalance.flips, "moves",
                      (json_int_t)r->rebalance.moves, "bytes", r->rebalance.bytes));
    }
    block_put_times(j, "e2e_latency", &r->e2e);
    block_put_times(j, "ttft", &r->ttft);
    block_put_times(j, "tpot", &r->tpot);
    block_put_times(j, "itl", &r->itl);
    json_dumpf(j, to, JSON_COMPACT);
    fputc('\n', to);
    json_decref(j);
}
