/* bench_serve_result.c - converts figures of a load to JSON, and back. */
#include <errno.h>
#include <string.h>

#include "base/json.h"
#include "cli/bench/bench_block.h"
#include "cli/bench/bench_serve_internal.h"

enum { MAX_BYTES = 1 << 30 };

const result_column result_columns[] = {
    {"request_throughput",    "requests",    "req/s", 2, false},
    {"output_throughput",     "output",      "tok/s", 1, false},
    {"total_throughput",      "in + out",    "tok/s", 1, false},
    {"median_ttft_ms",        "TTFT median", "ms",    1, true },
    {"p99_ttft_ms",           "TTFT p99",    "ms",    1, true },
    {"median_itl_ms",         "ITL median",  "ms",    2, true },
    {"p99_itl_ms",            "ITL p99",     "ms",    2, true },
    {"median_tpot_ms",        "TPOT median", "ms",    2, true },
    {"median_e2e_latency_ms", "E2E median",  "ms",    1, true },
    {"p99_e2e_latency_ms",    "E2E p99",     "ms",    1, true }
};
const int n_result_columns = (int)HD_LEN(result_columns);

/* ---- writing ---- */

static void put_times(json_t *o, const char *name, const client_times *t) {
    char key[64];
    json_t *curve = json_array();
    block_put_times(o, name, &t->quantiles);
    for (int i = 0; i < CLIENT_CURVE; i++) json_array_append_new(curve, json_real(t->curve[i]));
    snprintf(key, sizeof key, "%s_percentiles_ms", name);
    json_object_set_new(o, key, curve);
}

static json_t *errors_of(const client_run *run) {
    json_t *errors = json_array();
    for (int32_t i = 0; i < run->n_errors; i++) {
        const client_error *e = &run->errors[i];
        json_array_append_new(errors, json_pack("{s:s, s:I, s:s}", "name", e->name, "count",
                                                (json_int_t)e->count, "message", e->sample));
    }
    return errors;
}

static json_t *request_of(const client_run *run, const client_record *q) {
    json_t *o = json_pack(
        "{s:I, s:i, s:f, s:I, s:I, s:I}", "conversation", (json_int_t)q->conversation, "turn",
        q->turn, "sent_ms", (double)q->sent_ns * 1e-6, "input_tokens", (json_int_t)q->input,
        "output_tokens", (json_int_t)q->output, "cached_tokens", (json_int_t)q->cached);
    json_object_set_new(o, "ttft_ms", json_real(client_ttft(q)));
    json_object_set_new(o, "e2e_ms", json_real(client_e2e(q)));
    json_object_set_new(o, "error",
                        q->error < 0 ? json_null() : json_string(run->errors[q->error].name));
    return o;
}

json_t *result_level(const client_load *load, const client_run *run, const client_figures *f,
                     bool details) {
    json_t *o = json_pack(
        "{s:I, s:f, s:I, s:I, s:I, s:f, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:b}",
        "max_concurrency", (json_int_t)load->concurrency, "request_rate", load->rate,
        "completed", (json_int_t)f->completed, "failed", (json_int_t)f->failed, "unfinished",
        (json_int_t)f->unfinished, "duration", f->seconds, "total_input_tokens",
        (json_int_t)f->input_tokens, "cached_tokens", (json_int_t)f->cached_tokens,
        "total_output_tokens", (json_int_t)f->output_tokens, "answers_without_usage",
        (json_int_t)f->uncounted, "request_throughput", f->requests_s, "input_throughput",
        f->input_s, "output_throughput", f->output_s, "total_throughput", f->total_s,
        "concurrency", f->concurrency, "client_processor", run->processor, "gave_up",
        run->gave_up);
    if (f->good_s >= 0) {
        json_object_set_new(o, "request_goodput", json_real(f->good_s));
        json_object_set_new(o, "goodput_share", json_real(f->good_share));
    }
    put_times(o, "ttft", &f->ttft);
    put_times(o, "itl", &f->itl);
    put_times(o, "tpot", &f->tpot);
    put_times(o, "e2e_latency", &f->e2e);
    block_put_times(o, "late", &f->late);
    json_object_set_new(o, "errors", errors_of(run));
    json_t *requests = details ? json_array() : NULL;
    for (int64_t i = 0; details && i < run->n; i++) {
        json_array_append_new(requests, request_of(run, &run->records[i]));
    }
    if (details) json_object_set_new(o, "requests", requests);
    return o;
}

hd_status result_save(const json_t *result, const char *path, hd_err *err) {
    FILE *to = fopen(path, "w");
    if (!to) return HD_FAIL(err, HD_EIO, "cannot write %s: %s", path, strerror(errno));
    const bool dumped = json_dumpf(result, to, JSON_INDENT(1)) == 0 && fputc('\n', to) != EOF;
    if (fclose(to) != 0 || !dumped) {
        return HD_FAIL(err, HD_EIO, "cannot write %s: %s", path, strerror(errno));
    }
    return HD_OK;
}

/* ---- reading ---- */

hd_status result_load(json_t **out, const char *path, hd_err *err) {
    HD_TRY(hd_json_load(out, path, MAX_BYTES, err));
    const json_t *levels = json_object_get(*out, "levels");
    size_t i;
    json_t *level;
    bool good = json_array_size(levels) > 0 && json_array_size(levels) <= RESULT_MAX_LEVELS;
    json_array_foreach(levels, i, level) {
        good &= json_is_object(level);
    }
    if (good) return HD_OK;
    json_decref(*out);
    *out = NULL;
    return HD_FAIL(err, HD_EFORMAT, "%s is no result of hadal bench serve --json", path);
}

double result_number(const json_t *level, const char *key) {
    return json_number_value(json_object_get(level, key));
}

const char *result_text(const json_t *result, const char *key) {
    const char *text = json_string_value(json_object_get(result, key));
    return text ? text : "";
}

void result_level_name(char *out, size_t size, const json_t *level) {
    const double rate = result_number(level, "request_rate");
    const double most = result_number(level, "max_concurrency");
    if (rate > 0) {
        snprintf(out, size, "%g per second", rate);
    } else if (most > 0) {
        snprintf(out, size, "%g at once", most);
    } else {
        snprintf(out, size, "all at once");
    }
}

const json_t *result_same_level(const json_t *other, const json_t *level) {
    static const char *const keys[] = {"max_concurrency", "request_rate"};
    size_t i;
    json_t *candidate;
    json_array_foreach(json_object_get(other, "levels"), i, candidate) {
        bool same = true;
        for (size_t k = 0; k < HD_LEN(keys); k++) {
            const double a = result_number(candidate, keys[k]);
            const double b = result_number(level, keys[k]);
            same &= !(a < b) && !(a > b);
        }
        if (same) return candidate;
    }
    return NULL;
}
