/* bench_ops_report.c - prints the tables of `hadal bench ops`, as text and as JSON. */
#include <jansson.h>

#include "cli/bench/bench_ops_internal.h"
#include "cli/terminal/columns.h"
#include "cli/terminal/screen.h"

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

static const column table[] = {
    {"operator", 14, false},
    {"shape",    20, false},
    {"weights",  8,  false},
    {"calls",    5,  true },
    {"ms",       9,  true },
    {"share",    6,  true },
    {"GB/s",     7,  true },
    {"GFLOP/s",  8,  true },
    {"limit",    6,  true }
};

static void print_line(columns *c, const hd_op_profile *l, double limit, double whole) {
    char shape[48] = "";
    if (l->outs) {
        snprintf(shape, sizeof shape, "%d x %d x %d", l->rows, l->outs, l->ins);
    } else if (l->rows) {
        snprintf(shape, sizeof shape, "%d x %d", l->rows, l->ins);
    }
    columns_cell(c, "%s", l->op);
    columns_cell(c, "%s", shape);
    columns_cell(c, "%s", l->format);
    columns_cell(c, "%lld", (long long)l->calls);
    columns_cell(c, "%.3f", 1e3 * l->seconds);
    columns_cell(c, "%.1f%%", 100 * l->seconds / whole);
    if (l->bytes > 0) {
        columns_cell(c, "%.2f", l->bytes / l->seconds * 1e-9);
        columns_cell(c, "%.2f", l->flops / l->seconds * 1e-9);
        columns_cell(c, "%.1f%%", 100 * limit / l->seconds);
    }
    columns_end(c);
}

static void print_phase(const ops_report *r, const ops_phase *p, FILE *to) {
    columns c = columns_open(to, table, (int)HD_LEN(table), 2);
    fprintf(to, "\n%s: %d rows, %.3f ms a step, %.1f tokens/s\n", p->name, p->rows,
            1e3 * p->seconds, p->rows / p->seconds);
    columns_head(&c);
    for (int32_t i = 0; i < p->profiler.n; i++) {
        const hd_op_profile *l = &p->profiler.line[i];
        print_line(&c, l, limit_seconds(r, l->bytes, l->flops), p->seconds);
    }
    const hd_op_profile sum = sum_of(&p->profiler);
    print_line(&c, &sum, step_limit(r, &p->profiler), p->seconds);
    if (p->profiler.lost)
        fprintf(to, "  and %lld calls of further shapes\n", (long long)p->profiler.lost);
}

void ops_report_print(const ops_report *r, FILE *to) {
    screen out;
    screen_open(&out, to);
    screen_print(&out,
                 "%s, %d of %d layers, %.2f GB of random weights; %s, %d threads\n"
                 "this machine now: reads %.1f GB/s, multiplies and adds %.1f GFLOP/s\n"
                 "shape: rows x outputs x inputs, of attention rows x heads x key width\n"
                 "limit: the least time that moving and computing so much takes here, as a "
                 "share of the time it took\n",
                 r->family, r->layers, r->of_layers, r->weight_bytes * 1e-9, r->table,
                 r->threads, r->read * 1e-9, r->flops * 1e-9);
    screen_end(&out);
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
