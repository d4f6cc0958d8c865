/* load_costs.c - estimates of computing and reading from step times. */
#include "sched/load_costs.h"

#include <math.h>

#define FORGETS 0.98 /* what a time of reading counts for after a page that was computed */

/* At least 1e-6 ns, since 0 means that nothing was measured. */
static double mean(double before, double value) {
    return fmax(before > 0 ? (before + value) / 2 : value, 1e-6);
}

void sched_load_costs_took(sched_load_costs *c, int64_t ns, int32_t rows,
                           const int32_t copied[HD_N_KV_GROUPS]) {
    const double took = (double)ns;
    double bytes = 0;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) bytes += copied[g] * (double)c->page_bytes[g];
    if (bytes > 0) {
        if (c->row_ns <= 0) return;
        const double computing = fmax(rows * c->row_ns, c->least_ns);
        c->byte_ns = mean(c->byte_ns, fmax(took - computing, 0) / bytes);
        return;
    }
    if (rows >= c->least_rows) {
        c->row_ns = mean(c->row_ns, took / rows);
    } else if (c->least_ns <= 0 || took < c->least_ns) {
        c->least_ns = took;
    }
}

void sched_load_costs_declined(sched_load_costs *c) {
    c->byte_ns *= FORGETS;
}

hd_cache_costs sched_load_costs_of(const sched_load_costs *c) {
    hd_cache_costs costs = {0};
    if (c->row_ns <= 0 || (c->byte_ns <= 0 && c->disk_byte_ns <= 0)) return costs;
    costs.token = c->row_ns;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        costs.page[g] = c->byte_ns * (double)c->page_bytes[g];
        costs.disk[g] = c->disk_byte_ns * (double)c->page_bytes[g];
    }
    return costs;
}
