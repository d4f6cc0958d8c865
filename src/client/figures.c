/* figures.c - what a run came to. */
#include <stdlib.h>

#include "client/client.h"

static double ms(int64_t ns) {
    return (double)ns * 1e-6;
}

double client_ttft(const client_record *q) {
    return q->first_ns ? ms(q->first_ns - q->sent_ns) : -1;
}

double client_e2e(const client_record *q) {
    return q->last_ns ? ms(q->last_ns - q->sent_ns) : -1;
}

double client_tpot(const client_record *q) {
    if (!q->first_ns || q->output < 2) return -1;
    return ms(q->last_ns - q->first_ns) / (double)(q->output - 1);
}

static double lateness(const client_record *q) {
    return ms(q->sent_ns - q->due_ns);
}

/* Sorts values[n]. */
static client_times times_of(double *values, int64_t n) {
    client_times t = {.quantiles = hd_quantiles_of(values, n)};
    for (int i = 0; n && i < CLIENT_CURVE; i++) {
        t.curve[i] = hd_percentile(values, n, i / (double)(CLIENT_CURVE - 1));
    }
    return t;
}

/* Of good requests; returns how many values there are. */
static int64_t collect(double *values, const client_run *run,
                       double (*value)(const client_record *)) {
    int64_t n = 0;
    for (int64_t i = 0; i < run->n; i++) {
        if (run->records[i].error >= 0) continue;
        const double v = value(&run->records[i]);
        if (v >= 0) values[n++] = v;
    }
    return n;
}

/* An objective needs a value; only a single token has no TPOT and meets that one. */
static bool is_good(const client_record *q, const client_objectives *o) {
    const double ttft = client_ttft(q), e2e = client_e2e(q);
    return (o->ttft <= 0 || (ttft >= 0 && ttft <= o->ttft)) &&
           (o->e2e <= 0 || (e2e >= 0 && e2e <= o->e2e)) &&
           (o->tpot <= 0 || client_tpot(q) <= o->tpot);
}

static void add_request(client_figures *out, const client_record *q) {
    out->completed++;
    out->input_tokens += q->input;
    out->output_tokens += q->output;
    out->uncounted += !q->counted;
    if (q->cached >= 0) {
        out->cached_tokens = (out->cached_tokens < 0 ? 0 : out->cached_tokens) + q->cached;
    }
}

static void add_rates(client_figures *out, int64_t good, const client_objectives *o) {
    const double s = out->seconds > 0 ? out->seconds : 1e-9;
    out->requests_s = (double)out->completed / s;
    out->input_s = (double)out->input_tokens / s;
    out->output_s = (double)out->output_tokens / s;
    out->total_s = out->input_s + out->output_s;
    out->concurrency = out->e2e.quantiles.mean * (double)out->e2e.quantiles.n * 1e-3 / s;
    const int64_t sent = out->completed + out->failed;
    if (o->ttft > 0 || o->tpot > 0 || o->e2e > 0) {
        out->good_s = (double)good / s;
        out->good_share = sent ? (double)good / (double)sent : 0;
    }
}

hd_status client_figures_of(client_figures *out, const client_run *run,
                            const client_objectives *o, hd_err *err) {
    const int64_t most = run->n > run->n_gaps ? run->n : run->n_gaps;
    double *values = malloc((size_t)(most + 1) * sizeof *values);
    int64_t good = 0;
    if (!values) return HD_FAIL(err, HD_ENOMEM, "no memory for the figures");
    *out = (client_figures){.seconds = (double)run->duration_ns * 1e-9,
                            .unfinished = run->unfinished,
                            .cached_tokens = -1,
                            .good_s = -1,
                            .good_share = -1};
    for (int64_t i = 0; i < run->n; i++) {
        const client_record *q = &run->records[i];
        out->failed += q->error >= 0;
        if (q->error >= 0) continue;
        add_request(out, q);
        good += is_good(q, o);
    }
    out->ttft = times_of(values, collect(values, run, client_ttft));
    out->e2e = times_of(values, collect(values, run, client_e2e));
    out->tpot = times_of(values, collect(values, run, client_tpot));
    out->late = hd_quantiles_of(values, collect(values, run, lateness));
    for (int64_t i = 0; i < run->n_gaps; i++) values[i] = run->gaps_ms[i];
    out->itl = times_of(values, run->n_gaps);
    free(values);
    add_rates(out, good, o);
    return HD_OK;
}
