/* bench_rank_report.c - prints the tables of an emulated rank, as text and as JSON. */
#include <jansson.h>
#include <stdlib.h>
#include <time.h>

#include "base/dtype.h"
#include "cli/bench/bench_rank_internal.h"
#include "cli/terminal/columns.h"
#include "cli/terminal/screen.h"

enum { SHOWN = 40 }; /* lines of the list of slow operators */

/* Returns the least time that so many bytes and operations take on this device. */
static double limit_of(const rank_report *r, const hd_op_profile *l) {
    const int32_t bits = hd_dtype_bits(l->type);
    const bool narrow = bits > 0 && bits <= 8;
    const double moving = l->bytes / r->limits.bytes;
    const double computing = l->flops / (narrow ? r->limits.flops_8bit : r->limits.flops);
    return moving > computing ? moving : computing;
}

/* One line of a step: sums over its calls in one pass. */
typedef struct row {
    const hd_op_profile *l;
    double seconds, bytes, flops, limit;
    double calls;
} row;

static row row_of(const rank_report *r, const hd_op_profile *l) {
    const double n = r->passes;
    return (row){.l = l,
                 .seconds = l->seconds / n,
                 .bytes = l->bytes / n,
                 .flops = l->flops / n,
                 .limit = limit_of(r, l) / n,
                 .calls = (double)l->calls / n};
}

static int by_loss(const void *a, const void *b) {
    const row *x = a, *y = b;
    const double lost = x->seconds - x->limit, other = y->seconds - y->limit;
    return (lost < other) - (lost > other);
}

static void print_head(const rank_report *r, screen *to) {
    const hd_parallel_config *l = &r->parallel;
    char date[32] = "";
    const time_t now = time(NULL);
    struct tm day;
    if (gmtime_r(&now, &day)) strftime(date, sizeof date, "%Y-%m-%d", &day);
    screen_print(to, "%s, %d of %d layers, rank %d of ", r->family, r->layers, r->of_layers,
                 r->rank);
    if (l->ep > 1 && (l->dp < l->ep || l->tp > 1)) {
        screen_print(to, "tp %d, dp %d, ep %d (%d redundant experts)", l->tp, l->dp, l->ep,
                     l->redundant);
    } else if (l->ep > 1) {
        screen_print(to, "ep %d (%d redundant experts)", l->ep, l->redundant);
    } else {
        screen_print(to, "tp %d", l->tp);
    }
    screen_print(to, ", emulated; %s on %s; hadal %s, %s\n", r->table, r->device, HD_VERSION,
                 date);
    if (r->prompt) {
        screen_print(to, "prompt: %d sequences of %d tokens after %d", r->batch, r->prompt,
                     r->context);
    } else {
        screen_print(to, "decode: batch %d, context %d, %d drafts, %.2f tokens a step",
                     r->batch, r->context, r->drafts, r->accepted);
    }
    if (r->chunk) screen_print(to, ", beside %d tokens of a prompt", r->chunk);
    screen_print(to, "; router %s, communication %s\n", r->routing, r->exchange);
    screen_print(to, "rows %d", r->rows);
    if (r->expert_rows) screen_print(to, ", at the experts here at most %d", r->expert_rows);
    screen_print(to, "; %.1f experts of a layer here get rows\n", r->distinct);
    screen_print(
        to,
        "memory in GB: weights %.2f, activations and sampling %.2f, pages of entries %.2f, "
        "of windows %.2f\n",
        r->memory.weights * 1e-9, r->memory.activations * 1e-9, r->memory.kv[0] * 1e-9,
        r->memory.kv[1] * 1e-9);
    if (r->memory.host > 0) {
        screen_print(
            to, "entries in host memory: %.2f GB; %.2f %% of those selected were fetched\n",
            r->memory.host * 1e-9, r->fetched * 100);
    }
    screen_print(
        to,
        "limits: %.2f TB/s, %.1f TFLOP/s, 8-bit %.1f (%s); time of a call is what lies "
        "between two marks around it\n",
        r->limits.bytes * 1e-12, r->limits.flops * 1e-12, r->limits.flops_8bit * 1e-12,
        r->limits.from);
}

static const column slow_table[] = {
    {"part",              16, false},
    {"operator",          14, false},
    {"rows x outs x ins", 22, false},
    {"weights",           8,  false},
    {"calls",             5,  true },
    {"us",                9,  true },
    {"MB",                9,  true },
    {"GF",                8,  true },
    {"limit us",          9,  true },
    {"ratio",             7,  true },
    {"lost ms",           9,  true },
    {"share",             6,  true }
};

static void print_row(const row *w, double whole, columns *c) {
    const hd_op_profile *l = w->l;
    columns_cell(c, "%s %s", l->part, l->stage);
    columns_cell(c, "%s", l->op);
    if (l->outs) {
        columns_cell(c, "%d x %d x %d", l->rows, l->outs, l->ins);
    } else {
        columns_cell(c, "%d x %d", l->rows, l->ins);
    }
    columns_cell(c, "%s", l->format);
    columns_cell(c, "%.0f", w->calls);
    columns_cell(c, "%.2f", 1e6 * w->seconds / w->calls);
    columns_cell(c, "%.3f", 1e-6 * w->bytes / w->calls);
    columns_cell(c, "%.3f", 1e-9 * w->flops / w->calls);
    columns_cell(c, "%.2f", 1e6 * w->limit / w->calls);
    columns_cell(c, "%.1f%%", 100 * w->limit / w->seconds);
    columns_cell(c, "%.3f", 1e3 * (w->seconds - w->limit));
    columns_cell(c, "%.1f%%", 100 * w->seconds / whole);
    columns_end(c);
}

static void print_slow(const rank_report *r, row *rows, int32_t n, FILE *to) {
    row rest = {0};
    columns c = columns_open(to, slow_table, (int)HD_LEN(slow_table), 2);
    fprintf(to, "\nby time lost against the limit\n");
    columns_head(&c);
    qsort(rows, (size_t)n, sizeof *rows, by_loss);
    for (int32_t i = 0; i < n; i++) {
        if (i < SHOWN) {
            print_row(&rows[i], r->kernels, &c);
            continue;
        }
        rest.seconds += rows[i].seconds;
        rest.limit += rows[i].limit;
    }
    if (n > SHOWN) {
        fprintf(to, "  and %d lines more: %.3f ms, limit %.3f ms\n", n - SHOWN,
                1e3 * rest.seconds, 1e3 * rest.limit);
    }
}

/* Sums of lines with the same part, in the order of the step. */
static void print_parts(const rank_report *r, const row *rows, int32_t n, FILE *to) {
    static const column table[] = {
        {"part",  10, false},
        {"stage", 12, false},
        {"ms",    9,  true },
        {"limit", 9,  true },
        {"ratio", 7,  true },
        {"share", 6,  true }
    };
    columns c = columns_open(to, table, (int)HD_LEN(table), 2);
    fprintf(to, "\nby stage\n");
    columns_head(&c);
    for (int32_t i = 0; i < n; i++) {
        const hd_op_profile *l = rows[i].l;
        double seconds = 0, limit = 0;
        bool first = true;
        for (int32_t k = 0; k < n; k++) {
            if (rows[k].l->part != l->part || rows[k].l->stage != l->stage) continue;
            if (k < i) first = false;
            seconds += rows[k].seconds;
            limit += rows[k].limit;
        }
        if (!first) continue;
        columns_cell(&c, "%s", l->part);
        columns_cell(&c, "%s", l->stage);
        columns_cell(&c, "%.3f", 1e3 * seconds);
        columns_cell(&c, "%.3f", 1e3 * limit);
        columns_cell(&c, "%.1f%%", 100 * limit / seconds);
        columns_cell(&c, "%.1f%%", 100 * seconds / r->kernels);
        columns_end(&c);
    }
}

static double limit_sum(const rank_report *r) {
    double sum = 0;
    for (int32_t i = 0; i < r->profiler.n; i++)
        sum += limit_of(r, &r->profiler.line[i]) / r->passes;
    return sum;
}

static void print_sums(const rank_report *r, screen *to) {
    const double limit = limit_sum(r);
    const double device = r->device_step > 0 ? r->device_step : r->kernels;
    const double tokens = r->prompt ? r->rows : r->batch * r->accepted;
    screen_print(to, "\noperators %.3f ms, their limits %.3f ms (%.1f%%)\n", 1e3 * r->kernels,
                 1e3 * limit, 100 * limit / r->kernels);
    if (r->device_step > 0) {
        screen_print(to, "step on the device, %s: %.3f ms (%.1f%%)\n",
                     r->graphs ? "one graph" : "op by op", 1e3 * r->device_step,
                     100 * limit / r->device_step);
        if (r->graphs) screen_print(to, "launches in a step: %d\n", r->launches);
    }
    if (r->ahead_step > 0) {
        screen_print(
            to,
            "as an engine runs it: %.3f ms a step (median of %d), device %.3f ms, device "
            "idle between %.1f us, host at work %.1f us, %.1f experts get rows\n",
            1e3 * r->step, r->steps, 1e3 * r->ahead_step, 1e6 * r->gap, 1e6 * r->host,
            r->ahead_distinct);
    } else {
        screen_print(to, "as run, host included: %.3f ms (median of %d)\n", 1e3 * r->step,
                     r->steps);
    }
    if (r->alone_gap > 0) {
        screen_print(
            to,
            "idle between, where the host is not ahead: %.1f us; it was in %.0f %% of steps\n",
            1e6 * r->alone_gap, 100 * r->ahead);
    }
    if (r->charged_step > 0) {
        screen_print(
            to,
            "with %d exchanges of %d us each, and %d + %d ns of a row: %.3f ms a step, "
            "device %.3f ms, %.1f steps/s\n",
            r->exchanges, r->exchange_us, r->dispatch_ns, r->combine_ns, 1e3 * r->charged_step,
            1e3 * r->charged_device_step, 1 / r->charged_step);
    }
    if (r->overlap) {
        screen_print(to,
                     "the same in %d micro-batches: %.3f ms a step, device %.3f ms, %.1f "
                     "steps/s, %.2f times as fast; activations %.3f GB\n",
                     r->overlap, 1e3 * r->overlapped_step, 1e3 * r->overlapped_device_step,
                     1 / r->overlapped_step, r->charged_step / r->overlapped_step,
                     1e-9 * r->overlapped_activations);
    }
    screen_print(to, "%.1f steps/s and %.0f %s tokens/s of this rank at the device's time%s\n",
                 1 / device, tokens / device, r->prompt ? "prompt" : "output",
                 r->layers < r->of_layers ? ", of these layers alone" : "");
}

void rank_report_print(const rank_report *r, FILE *to) {
    row *rows = calloc((size_t)r->profiler.n + 1, sizeof *rows);
    screen out;
    screen_open(&out, to);
    print_head(r, &out);
    screen_end(&out);
    for (int32_t i = 0; rows && i < r->profiler.n; i++)
        rows[i] = row_of(r, &r->profiler.line[i]);
    if (rows) print_parts(r, rows, r->profiler.n, to);
    if (rows) print_slow(r, rows, r->profiler.n, to);
    print_sums(r, &out);
    screen_end(&out);
    free(rows);
}

static json_t *line_json(const rank_report *r, const hd_op_profile *l) {
    const row w = row_of(r, l);
    return json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f}", "part",
                     l->part, "stage", l->stage, "op", l->op, "weights", l->format, "rows",
                     l->rows, "outs", l->outs, "ins", l->ins, "calls", w.calls, "seconds",
                     w.seconds, "bytes", w.bytes, "flops", w.flops, "limit_seconds", w.limit);
}

void rank_report_print_json(const rank_report *r, FILE *to) {
    const hd_parallel_config *l = &r->parallel;
    json_t *lines = json_array();
    for (int32_t i = 0; i < r->profiler.n; i++) {
        json_array_append_new(lines, line_json(r, &r->profiler.line[i]));
    }
    json_t *j = json_pack(
        "{s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:s, "
        "s:s}",
        "family", r->family, "backend", r->table, "device", r->device, "tp", l->tp, "dp", l->dp,
        "ep", l->ep, "redundant", l->redundant, "rank", r->rank, "layers", r->layers,
        "of_layers", r->of_layers, "batch", r->batch, "context", r->context, "prompt",
        r->prompt, "drafts", r->drafts, "expert_rows", r->expert_rows, "tokens_per_step",
        r->accepted, "router", r->routing, "communication", r->exchange);
    json_t *more = json_pack(
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, "
        "s:f, s:i, s:o}",
        "distinct_experts", r->distinct, "weight_bytes", r->memory.weights, "activation_bytes",
        r->memory.activations, "entry_page_bytes", r->memory.kv[0], "window_page_bytes",
        r->memory.kv[1], "host_entry_bytes", r->memory.host, "fetched_entries", r->fetched,
        "limit_bytes_per_second", r->limits.bytes, "limit_flops_per_second", r->limits.flops,
        "limit_8bit_flops_per_second", r->limits.flops_8bit, "step_seconds", r->step,
        "device_step_seconds", r->device_step, "engine_device_step_seconds", r->ahead_step,
        "engine_distinct_experts", r->ahead_distinct, "gap_seconds", r->gap, "host_seconds",
        r->host, "operator_seconds", r->kernels, "limit_seconds", limit_sum(r), "launches",
        r->launches, "ops", lines);
    json_object_update(j, more);
    json_object_set_new(j, "exchanges", json_integer(r->exchanges));
    json_object_set_new(j, "chunk", json_integer(r->chunk));
    json_object_set_new(j, "alone_gap_seconds", json_real(r->alone_gap));
    json_object_set_new(j, "mixed_steps_ahead", json_real(r->ahead));
    if (r->charged_step > 0) {
        json_t *with =
            json_pack("{s:i, s:i, s:i, s:f, s:f}", "exchange_us", r->exchange_us, "dispatch_ns",
                      r->dispatch_ns, "combine_ns", r->combine_ns, "charged_step_seconds",
                      r->charged_step, "charged_device_step_seconds", r->charged_device_step);
        json_object_update(j, with);
        json_decref(with);
    }
    if (r->overlap) {
        json_t *cut = json_pack("{s:i, s:f, s:f, s:f}", "overlap", r->overlap,
                                "overlapped_step_seconds", r->overlapped_step,
                                "overlapped_device_step_seconds", r->overlapped_device_step,
                                "overlapped_activation_bytes", r->overlapped_activations);
        json_object_update(j, cut);
        json_decref(cut);
    }
    json_dumpf(j, to, JSON_INDENT(1));
    fputc('\n', to);
    json_decref(more);
    json_decref(j);
}
