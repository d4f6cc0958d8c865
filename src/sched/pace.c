/* pace.c - rows of prompts by the times of steps, and their division. */
#include "sched/pace.h"

#include <math.h>

#include "base/checked.h"

void sched_pace_took(sched_pace *p, int64_t ns, int32_t prompt_rows) {
    if (prompt_rows == 0) return;
    const double row_ns = fmax((double)ns / prompt_rows, 1e-6);
    p->row_ns = p->row_ns > 0 ? (p->row_ns + row_ns) / 2 : row_ns;
}

int32_t sched_pace_rows(const sched_pace *p) {
    if (p->budget_ns == 0 || p->row_ns <= 0) return INT32_MAX;
    const double rows = (double)p->budget_ns / p->row_ns;
    return (int32_t)fmin(fmax(rows, SCHED_PACE_LEAST), INT32_MAX);
}

int32_t sched_pace_next(int32_t last) {
    if (last == 0) return SCHED_PACE_FIRST;
    return hd_max_i32(last + last / 4, SCHED_PACE_LEAST);
}

sched_shares sched_shares_of(int32_t rows, const int32_t *wanted, int32_t n) {
    sched_shares s = {.left = rows, .each = rows / hd_max_i32(n, 1)};
    for (int32_t i = 0; i < n; i++) s.reserved += hd_min_i64(wanted[i], s.each);
    return s;
}

int32_t sched_shares_next(sched_shares *s, int32_t wanted) {
    s->reserved -= hd_min_i64(wanted, s->each);
    const int64_t rows = hd_max_i64(hd_min_i64(wanted, s->left - s->reserved), 0);
    s->left -= rows;
    return (int32_t)rows;
}
