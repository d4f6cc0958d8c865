/* bench_ops_report.c - prints the tables of `hadal bench ops`, as text and as JSON. */
#include <jansson.h>

#include "cli/bench/bench_ops_internal.h"

/* Returns the least time that so many bytes and operations take on this machine. */
static double limit_seconds(const ops_report *r, double bytes, double flops) {
    const double moving = bytes / r->read, computing = flops / r->flops;
    return moving > computing ? moving : computing;
}

static hd_op_profile sum_of(const hd_op_profiler *m) {
    hd_op_profile sum = {.op = "all operators", .format = ""};
    for (int32_t i = 0; i < m->n; i++) {
        sum.calls += m->line[i].calls;
        sum.seconds += m->line[i].seconds;
        sum.bytes += m->line[i].bytes;
        sum.flops += m->line[i].flops;
    }
    return sum;
}

/* The sum of the lines' own limits; a step cannot overlap them. */
static double step_limit(const ops_report *r, const hd_op_profiler *m) {
    double sum = 0;
    for (int32_t i = 0; i < m->n; i++) {
        sum += limit_seconds(r, m->line[i].bytes, m->line[i].flops);
    }
    return sum;
}

static void print_line(const hd_op_profile *l, double limit, double whole, FILE *to) {
    char shape[48] = "";
    if (l->outs) {
        snprintf(shape, sizeof shape, "%d x %d x %d", l->rows, l->outs, l->ins);
    } else if (l->rows) {
        snprintf(shape, sizeof shape, "%d x %d", l->rows, l->ins);
    }
    fprintf(to, "  %-14s %-20s %-8s %5lld %9.3f %5.1f%%", l->op, shape, l->format,
            (long long)l->calls, 1e3 * l->seconds, 100 * l->seconds / whole);
    if (l->bytes > 0) {
        fprintf(to, " %7.2f %8.2f %5.1f%%", l->bytes / l->seconds * 1e-9,
                l->flops / l->seconds * 1e-9, 100 * limit / l->seconds);
    }
    fputc('\n', to);
}

static void print_phase(const ops_report *r, const ops_phase *p, FILE *to) {
    fprintf(to, "\n%s: %d rows, %.3f ms a step, %.1f tokens/s\n", p->name, p->rows,
            1e3 * p->seconds, p->rows / p->seconds);
    fprintf(to, "  %-14s %-20s %-8s %5s %9s %6s %7s %8s %6s\n", "operator", "shape", "weights",
            "calls", "ms", "share", "GB/s", "GFLOP/s", "limit");
    for (int32_t i = 0; i < p->profiler.n; i++) {
        const hd_op_profile *l = &p->profiler.line[i];
        print_line(l, limit_seconds(r, l->bytes, l->flops), p->seconds, to);
    }
    const hd_op_profile sum = sum_of(&p->profiler);
    print_line(&sum, step_limit(r, &p->profiler), p->seconds, to);
    if (p->profiler.lost)
        fprintf(to, "  and %lld calls of further shapes\n", (long long)p->profiler.lost);
}

void ops_report_print(const ops_report *r, FILE *to) {
    fprintf(to,
            "%s, %d of %d layers, %.2f GB of random weights; %s, %d threads\n"
            "this machine now: reads %.1f GB/s, multiplies and adds %.1f GFLOP/s\n"
            "shape: rows x outputs x inputs, of attention rows x heads x key width; limit: the "
            "least time that\nmoving and computing so much takes here, as a share of the time "
            "it took\n",
            r->family, r->layers, r->of_layers, r->weight_bytes * 1e-9, r->table, r->threads,
            r->read * 1e-9, r->flops * 1e-9);
    for (int i = 0; i < OPS_N_PHASES; i++) print_phase(r, &r->phase[i], to);
}

static json_t *line_json(const ops_report *r, const hd_op_profile *l) {
    return json_pack("{s:s, s:s, s:i, s:i, s:i, s:I, s:f, s:f, s:f, s:f}", "op", l->op,
                     "weights", l->format, "rows", l->rows, "outs", l->outs, "ins", l->ins,
                     "calls", (json_int_t)l->calls, "seconds", l->seconds, "bytes", l->bytes,
                     "flops", l->flops, "limit_seconds", limit_seconds(r, l->bytes, l->flops));
}

static json_t *phase_json(const ops_report *r, const ops_phase *p) {
    json_t *lines = json_array();
    for (int32_t i = 0; i < p->profiler.n; i++) {
        json_array_append_new(lines, line_json(r, &p->profiler.line[i]));
    }
    return json_pack("{s:i, s:f, s:f, s:o}", "rows", p->rows, "seconds", p->seconds,
                     "limit_seconds", step_limit(r, &p->profiler), "ops", lines);
}

void ops_report_print_json(const ops_report *r, FILE *to) {
    json_t *j = json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:f}", "family",
                          r->family, "backend", r->table, "layers", r->layers, "of_layers",
                          r->of_layers, "threads", r->threads, "context", r->context, "repeat",
                          r->repeat, "weight_bytes", r->weight_bytes, "read_bytes_per_second",
                          r->read, "flops_per_second", r->flops);
    for (int i = 0; i < OPS_N_PHASES; i++) {
        json_object_set_new(j, r->phase[i].name, phase_json(r, &r->phase[i]));
    }
    json_dumpf(j, to, JSON_INDENT(1));
    fputc('\n', to);
    json_decref(j);
}
