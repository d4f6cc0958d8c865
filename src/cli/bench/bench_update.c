/* bench_update.c - `hadal bench update`: replaces the weights of an idle engine by those of a folder,
 * and times each part of it beside a plain copy of as many bytes. */
#include "cli/bench/bench_update.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/checksum.h"
#include "base/json.h"
#include "base/memory.h"
#include "base/progress.h"
#include "base/quantiles.h"
#include "base/terminal.h"
#include "base/thread_pool.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "engine/engine.h"
#include "weights/update.h"

enum { MAX_TIMES = 1000, MOST_COPIED = 1 << 30, TOKENS = 64, SPAN = 1 << 20 };

typedef enum part { READ, CHECK, STILL, HASH, COPY, COPIES, N_PARTS } part;

static const struct {
    const char *name, *about;
} parts[N_PARTS] = {
    [READ] = {"read",   "files to memory of the process"      },
    [CHECK] = {"check",  "names, shapes, every value; rounding"},
    [STILL] = {"still",  "no step runs: into the arrays in use"},
    [HASH] = {"hash",   "checksums of all tensors"            },
    [COPY] = {"copy",   "one thread's memcpy of as many bytes"},
    [COPIES] = {"copies", "the same by all threads"             },
};

typedef struct settings {
    const char *model_dir, *from;
    int64_t times, threads;
    bool json;
} settings;

typedef struct run {
    settings set;
    hd_engine *engine;
    size_t bytes;        /* of the folder's tensors */
    hd_block to, source; /* of the plain copies */
    hd_thread_pool *pool;
    double seconds[N_PARTS][MAX_TIMES];
} run;

static double since(int64_t start) {
    return (double)(hd_now_ns() - start) * 1e-9;
}

static size_t bytes_of(const hd_checkpoint *c) {
    size_t n = 0;
    for (int32_t i = 0; i < hd_checkpoint_count(c); i++) n += hd_checkpoint_at(c, i)->bytes;
    return n;
}

static double time_hash(const hd_checkpoint *c) {
    const int64_t start = hd_now_ns();
    uint64_t all = 0;
    for (int32_t i = 0; i < hd_checkpoint_count(c); i++) {
        const hd_tensor *t = hd_checkpoint_at(c, i);
        all = hd_checksum(all, t->data, t->bytes);
    }
    const double took = since(start);
    return all == 1 ? took + 1e-9 : took; /* the sum is used */
}

/* The blocks' first bytes. */
typedef struct stretch {
    uint8_t *to;
    const uint8_t *from;
    size_t n;
} stretch;

static void copy_span(const void *arg, int32_t task, int32_t worker) {
    const stretch *s = arg;
    const size_t at = (size_t)task * SPAN, left = s->n - at;
    (void)worker;
    memcpy(s->to + at, s->from + at, left < SPAN ? left : SPAN);
}

/* Copies blocks until as many bytes are copied. */
static double time_copy(const run *r, bool all_threads) {
    const int64_t start = hd_now_ns();
    for (size_t done = 0; done < r->bytes;) {
        const size_t left = r->bytes - done, n = left < r->to.bytes ? left : r->to.bytes;
        const stretch s = {r->to.data, r->source.data, n};
        if (all_threads) {
            hd_thread_pool_run(r->pool, (int32_t)hd_ceil_div((int64_t)n, SPAN), copy_span, &s);
        } else {
            memcpy(s.to, s.from, n);
        }
        done += n;
    }
    return since(start);
}

static hd_status open_blocks(run *r, hd_err *err) {
    const size_t n = r->bytes < MOST_COPIED ? r->bytes : MOST_COPIED;
    HD_TRY(hd_block_init(&r->to, n, "a copy", err));
    HD_TRY(hd_block_init(&r->source, n, "a copy", err));
    memset(r->to.data, 1, n);
    memset(r->source.data, 2, n);
    return HD_OK;
}

/* Time without steps so far. */
static double still_seconds(hd_engine *e) {
    hd_engine_stats stats;
    hd_engine_read_stats(e, &stats);
    return (double)stats.weight_updates_ns * 1e-9;
}

/* One update. Takes c. */
static hd_status replace(run *r, hd_checkpoint *c, int64_t time, hd_err *err) {
    const hd_weights_update_rule rule = {.whole = true, .n_threads = (int32_t)r->set.threads};
    hd_weights_update *u = NULL;
    r->seconds[HASH][time] = time_hash(c);
    hd_status st = hd_weights_update_open(&u, hd_engine_weights(r->engine), err);
    if (st != HD_OK) {
        hd_checkpoint_close(c);
        return st;
    }
    const int64_t start = hd_now_ns();
    st = hd_weights_update_add(u, c, &rule, err);
    r->seconds[CHECK][time] = since(start);
    const double before = still_seconds(r->engine);
    if (st == HD_OK) st = hd_engine_update_weights(r->engine, u, NULL, err);
    r->seconds[STILL][time] = still_seconds(r->engine) - before;
    hd_weights_update_close(u);
    return st;
}

static hd_status run_once(run *r, int64_t time, hd_err *err) {
    hd_checkpoint *c;
    const int64_t start = hd_now_ns();
    HD_TRY(hd_checkpoint_read(&c, r->set.from, err));
    r->seconds[READ][time] = since(start);
    r->bytes = bytes_of(c);
    if (!r->to.data) {
        const hd_status st = open_blocks(r, err);
        if (st != HD_OK) {
            hd_checkpoint_close(c);
            return st;
        }
    }
    HD_TRY(replace(r, c, time, err));
    r->seconds[COPY][time] = time_copy(r, false);
    r->seconds[COPIES][time] = time_copy(r, true);
    return HD_OK;
}

/* ---- the report ---- */

static void print_lines(const run *r, const hd_quantiles *q) {
    const double copy = q[COPY].median;
    char size[32];
    printf("%s, %lld times, medians\n", hd_bytes_text(size, sizeof size, (double)r->bytes),
           (long long)r->set.times);
    printf("%-6s %12s %12s %8s %8s\n", "part", "ms", "90th ms", "GB/s", "of copy");
    for (int i = 0; i < N_PARTS; i++) {
        printf("%-6s %12.3f %12.3f %8.2f %8.2f  %s\n", parts[i].name, q[i].median * 1e3,
               q[i].p90 * 1e3, (double)r->bytes / q[i].median * 1e-9, copy / q[i].median,
               parts[i].about);
    }
}

static hd_status print_json(const run *r, const hd_quantiles *q, hd_err *err) {
    json_t *o = json_pack("{s:I, s:I}", "bytes", (json_int_t)r->bytes, "times",
                          (json_int_t)r->set.times);
    for (int i = 0; i < N_PARTS; i++) {
        json_object_set_new(o, parts[i].name,
                            json_pack("{s:f, s:f, s:f}", "seconds", q[i].median, "p90",
                                      q[i].p90, "of_copy", q[COPY].median / q[i].median));
    }
    char *text = hd_json_write(o, JSON_COMPACT);
    json_decref(o);
    if (!text) return HD_FAIL(err, HD_ENOMEM, "no memory for the report");
    puts(text);
    free(text);
    return HD_OK;
}

static hd_status report(run *r, hd_err *err) {
    hd_quantiles q[N_PARTS];
    for (int i = 0; i < N_PARTS; i++) q[i] = hd_quantiles_of(r->seconds[i], r->set.times);
    if (r->set.json) return print_json(r, q, err);
    print_lines(r, q);
    return HD_OK;
}

static hd_status bench(run *r, hd_err *err) {
    char why[512];
    const hd_engine_options options = {.size = sizeof options,
                                       .model_dir = r->set.model_dir,
                                       .updatable = true,
                                       .threads = (int32_t)r->set.threads,
                                       .max_running = 1,
                                       .max_context = TOKENS,
                                       .kv_tokens = TOKENS};
    if (hd_engine_open(&r->engine, &options, why, sizeof why) != 0) {
        return HD_FAIL(err, HD_EINVAL, "%s", why);
    }
    HD_TRY(hd_thread_pool_open(&r->pool, (int32_t)r->set.threads, false, err));
    for (int64_t i = 0; i < r->set.times; i++) HD_TRY(run_once(r, i, err));
    return report(r, err);
}

int bench_update(int argc, char **argv) {
    run *r = calloc(1, sizeof *r);
    hd_err err = {0};
    if (!r) {
        HD_FAIL(&err, HD_ENOMEM, "no memory for a benchmark");
        return report_error(&err);
    }
    r->set.times = 5;
    const option options[] = {
        option_text("from", &r->set.from, "DIR", "new weights; default MODEL_DIR itself"),
        option_int("times", &r->set.times, 1, MAX_TIMES, "updates; default 5"),
        option_int("threads", &r->set.threads, 0, 1024,
                   "of the engine, of checks and of copies; default: one per core"),
        option_flag("json", &r->set.json, "print one JSON object"),
    };
    const positional model = {"MODEL_DIR", &r->set.model_dir, false, POSITIONAL_MODEL};
    const command_line line = {
        .command = "bench update",
        .summary = "Times new weights on their way into an engine, beside a plain copy.",
        .positionals = &model,
        .n_positionals = 1,
        .options = options,
        .n_options = (int)HD_LEN(options)};
    int code = 0;
    if (options_parse(&line, argc, argv, &code)) {
        if (!r->set.from) r->set.from = r->set.model_dir;
        if (bench(r, &err) != HD_OK) code = report_error(&err);
    }
    hd_engine_close(r->engine);
    hd_thread_pool_close(r->pool);
    hd_block_deinit(&r->to);
    hd_block_deinit(&r->source);
    free(r);
    return code;
}
