/* bench_serve.c - `hadal bench serve`: its options, the levels of a sweep, and the outputs of
 * results. */
#include "cli/bench/bench_serve.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/json.h"
#include "cli/bench/bench_serve_internal.h"
#include "cli/options.h"
#include "cli/request_options.h"

enum { WARM_UP_LEVEL = 1 << 21 };

typedef struct serve_bench {
    const char *target; /* the URL, or with --compare the second file */
    const char *model, *input, *turn, *output, *concurrency, *rate, *goodput, *extra;
    const char *json, *report, *compare;
    int64_t prompts, turns, prefix, groups, token_ids, seed, warm_up;
    double duration_s, timeout_s, temperature;
    int endpoint;
    bool ignore_eos, details, quiet;
} serve_bench;

static const char *const endpoints[] = {"chat", "completions", NULL};

/* ---- values of options ---- */

/* Parses a number at *text, which advances past it. */
static bool read_number(const char **text, double *out) {
    char *end;
    if (**text < '0' || **text > '9') return false;
    errno = 0;
    *out = strtod(*text, &end);
    if (errno || !isfinite(*out)) return false;
    *text = end;
    return true;
}

static hd_status read_list(double *out, int *n, const char *text, const char *name,
                           double least, double most, hd_err *err) {
    const char *at = text;
    for (*n = 0; *n < RESULT_MAX_LEVELS; at++) {
        if (!read_number(&at, &out[*n]) || out[*n] < least || out[*n] > most) break;
        ++*n;
        if (*at == '\0') return HD_OK;
        if (*at != ',') break;
    }
    return HD_FAIL(err, HD_EINVAL, "--%s: '%s' is no list of at most %d numbers like 1,2,4",
                   name, text, RESULT_MAX_LEVELS);
}

static hd_status read_range(client_range *out, const char *text, const char *name,
                            hd_err *err) {
    enum { MOST = 1 << 24 };
    const char *at = text;
    double low = 0;
    bool good = read_number(&at, &low);
    double high = low;
    if (good && *at == '-') {
        at++;
        good = read_number(&at, &high);
    }
    if (!good || *at || low < 1 || high < low || high > MOST || floor(low) < low ||
        floor(high) < high) {
        return HD_FAIL(err, HD_EINVAL, "--%s: '%s' is no length like 128 or 64-256", name,
                       text);
    }
    *out = (client_range){(int64_t)low, (int64_t)high};
    return HD_OK;
}

/* "ttft:500,tpot:50,e2e:5000" */
static hd_status read_objectives(client_objectives *out, const char *text, hd_err *err) {
    const struct {
        const char *name;
        double *to;
    } known[] = {
        {"ttft:", &out->ttft},
        {"tpot:", &out->tpot},
        {"e2e:",  &out->e2e },
        {"e2el:", &out->e2e }
    };
    if (!text) return HD_OK;
    for (const char *at = text; *at;) {
        size_t i = 0;
        while (i < HD_LEN(known) && strncmp(at, known[i].name, strlen(known[i].name)) != 0) i++;
        if (i == HD_LEN(known)) break;
        at += strlen(known[i].name);
        if (!read_number(&at, known[i].to) || *known[i].to <= 0) break;
        if (*at == '\0') return HD_OK;
        if (*at++ != ',') break;
    }
    return HD_FAIL(err, HD_EINVAL,
                   "--goodput: '%s' is no list of milliseconds like ttft:500,tpot:50,e2e:9000",
                   text);
}

/* ---- a load ---- */

static hd_status check_load(const serve_bench *b, const client_load *load, hd_err *err) {
    if (load->token_ids && (b->endpoint == 0 || load->turns > 1)) {
        return HD_FAIL(err, HD_EINVAL,
                       "--token-ids is for --endpoint completions and single turns");
    }
    if (load->prefix >= load->input.low) {
        return HD_FAIL(err, HD_EINVAL,
                       "a shared prefix of %lld tokens leaves nothing of an input of %lld",
                       (long long)load->prefix, (long long)load->input.low);
    }
    return HD_OK;
}

static hd_status read_load(client_load *out, json_t **extra, const serve_bench *b,
                           hd_err *err) {
    *out = (client_load){.conversations = b->prompts,
                         .duration_s = b->duration_s,
                         .turns = b->turns,
                         .prefix = b->prefix,
                         .groups = b->groups,
                         .token_ids = b->token_ids,
                         .seed = b->seed,
                         .temperature = b->temperature,
                         .ignore_eos = b->ignore_eos,
                         .tokens_per_word = 1};
    HD_TRY(read_range(&out->input, b->input, "input-len", err));
    HD_TRY(read_range(&out->turn, b->turn, "turn-len", err));
    HD_TRY(read_range(&out->output, b->output, "output-len", err));
    if (b->extra) {
        HD_TRY(hd_json_parse(extra, b->extra, strlen(b->extra), "--extra-body", err));
        if (!json_is_object(*extra)) {
            return HD_FAIL(err, HD_EINVAL, "--extra-body is no JSON object");
        }
        out->extra = *extra;
    }
    return check_load(b, out, err);
}

typedef struct levels {
    double concurrency[RESULT_MAX_LEVELS], rate[RESULT_MAX_LEVELS];
    int n_concurrency, n_rate, n;
} levels;

static int64_t level_concurrency(const levels *l, int i) {
    return (int64_t)l->concurrency[l->n_concurrency > 1 ? i : 0];
}

static double level_rate(const levels *l, int i) {
    return l->rate[l->n_rate > 1 ? i : 0];
}

static hd_status read_levels(levels *out, const serve_bench *b, hd_err *err) {
    const char *concurrency = b->concurrency ? b->concurrency : b->rate ? "0" : "8";
    HD_TRY(read_list(out->concurrency, &out->n_concurrency, concurrency, "concurrency", 0,
                     1 << 20, err));
    HD_TRY(read_list(out->rate, &out->n_rate, b->rate ? b->rate : "0", "rate", 0, 1e6, err));
    for (int i = 0; i < out->n_concurrency; i++) {
        if (floor(out->concurrency[i]) < out->concurrency[i]) {
            return HD_FAIL(err, HD_EINVAL, "--concurrency: %g is not a whole number",
                           out->concurrency[i]);
        }
    }
    if (out->n_concurrency > 1 && out->n_rate > 1) {
        return HD_FAIL(err, HD_EINVAL, "either --concurrency or --rate may be a list");
    }
    out->n = out->n_concurrency > out->n_rate ? out->n_concurrency : out->n_rate;
    const bool bounded = b->prompts > 0 || b->duration_s <= 0;
    for (int i = 0; !bounded && i < out->n; i++) {
        if (level_rate(out, i) <= 0 && level_concurrency(out, i) == 0) {
            return HD_FAIL(err, HD_EINVAL,
                           "--duration needs a bound: --num-prompts, --concurrency or --rate");
        }
    }
    return HD_OK;
}

/* Without a number of prompts or a duration: eight per place, or five seconds of arrivals. */
static void set_level(client_load *load, const levels *l, int i) {
    load->level = i;
    load->concurrency = level_concurrency(l, i);
    load->rate = level_rate(l, i);
    if (!load->conversations && load->duration_s <= 0) {
        const double n = load->rate > 0 ? 5 * load->rate : 8 * (double)load->concurrency;
        load->conversations = n > 16 ? (int64_t)n : 16;
    }
}

/* ---- running ---- */

static volatile sig_atomic_t stopped;

static void on_signal(int number) {
    stopped = number;
    signal(number, SIG_DFL); /* a second signal ends at once */
}

static hd_status warm_up(const client_server *s, const client_load *load, int64_t n,
                         hd_err *err) {
    client_load other = *load;
    client_run run = {0};
    if (n == 0) return HD_OK;
    other.conversations = n;
    other.duration_s = 0;
    other.rate = 0;
    other.level = WARM_UP_LEVEL; /* nothing of the load itself is cached */
    hd_status st = client_run_all(&run, s, &other, &stopped, true, err);
    if (st == HD_OK && run.n && run.n_errors && run.errors[0].count == run.n) {
        st = HD_FAIL(err, HD_EIO, "every request of the warm-up failed: %s%s%s",
                     run.errors[0].name, *run.errors[0].sample ? ": " : "",
                     run.errors[0].sample);
    }
    client_run_deinit(&run);
    return st;
}

static hd_status run_level(json_t *to, const serve_bench *b, const client_server *s,
                           const client_load *load, const client_objectives *o, hd_err *err) {
    client_run run;
    client_figures f;
    hd_status st = client_run_all(&run, s, load, &stopped, b->quiet, err);
    if (st == HD_OK) st = client_figures_of(&f, &run, o, err);
    if (st == HD_OK) {
        table_level(s, load, &run, &f, stdout);
        fflush(stdout);
        if (run.gave_up) {
            fprintf(stderr, "ended early: the last thousand requests all failed\n");
        }
        const bool kept =
            json_array_append_new(to, result_level(load, &run, &f, b->details)) == 0;
        if (!kept) st = HD_FAIL(err, HD_ENOMEM, "no memory for the result");
    }
    client_run_deinit(&run);
    return st;
}

static json_t *describe(const serve_bench *b, const client_server *s, const client_load *load) {
    char date[32];
    const time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    json_t *options = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:I, s:f, s:b}", "input_len", b->input, "output_len",
        b->output, "turns", (json_int_t)b->turns, "shared_prefix", (json_int_t)b->prefix,
        "prefix_groups", (json_int_t)b->groups, "seed", (json_int_t)b->seed, "temperature",
        b->temperature, "ignore_eos", load->ignore_eos);
    if (load->token_ids) {
        json_object_set_new(options, "token_ids", json_integer((json_int_t)load->token_ids));
    } else {
        json_object_set_new(options, "tokens_per_word", json_real(load->tokens_per_word));
    }
    if (b->turns > 1) json_object_set_new(options, "turn_len", json_string(b->turn));
    if (b->duration_s > 0) json_object_set_new(options, "duration", json_real(b->duration_s));
    if (b->goodput) json_object_set_new(options, "goodput", json_string(b->goodput));
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:o, s:[]}", "version", HD_VERSION, "date",
                     date, "url", s->base, "model", s->model, "endpoint",
                     endpoints[b->endpoint], "options", options, "levels");
}

static hd_status sweep(json_t *result, const serve_bench *b, const client_server *s,
                       const client_load *load, const levels *l, hd_err *err) {
    client_objectives o = {0};
    json_t *to = json_object_get(result, "levels");
    HD_TRY(read_objectives(&o, b->goodput, err));
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    for (int i = 0; i < l->n && !stopped; i++) {
        client_load level = *load;
        set_level(&level, l, i);
        HD_TRY(warm_up(s, &level, b->warm_up, err));
        if (!stopped) HD_TRY(run_level(to, b, s, &level, &o, err));
    }
    if (json_array_size(to) > 1) table_sweep(result, stdout);
    if (b->json) HD_TRY(result_save(result, b->json, err));
    return b->report ? report_html(b->report, result, NULL, err) : HD_OK;
}

static hd_status measure(client_load *load, const serve_bench *b, const client_server *s,
                         hd_err *err) {
    char why[200];
    if (load->token_ids) return HD_OK; /* lengths are known */
    HD_TRY(client_measure(s, load, why, err));
    if (*why && !b->quiet) {
        fprintf(stderr, "the server refuses ignore_eos, answers may end early: %s\n", why);
    }
    return HD_OK;
}

static hd_status bench(const serve_bench *b, hd_err *err) {
    client_server s = {0};
    client_load load;
    client_objectives o = {0};
    levels l = {0};
    json_t *extra = NULL, *result = NULL;
    const char *key = getenv("HADAL_API_KEY");
    if (!key || !*key) key = getenv("OPENAI_API_KEY");
    hd_status st = read_load(&load, &extra, b, err);
    if (st == HD_OK) st = read_levels(&l, b, err);
    if (st == HD_OK) st = read_objectives(&o, b->goodput, err);
    if (st == HD_OK) {
        st = client_server_open(&s, b->target, key, b->model, b->endpoint == 0, b->timeout_s,
                                err);
    }
    if (st == HD_OK) st = measure(&load, b, &s, err);
    if (st == HD_OK && !(result = describe(b, &s, &load))) {
        st = HD_FAIL(err, HD_ENOMEM, "no memory for the result");
    }
    if (st == HD_OK) st = sweep(result, b, &s, &load, &l, err);
    json_decref(result);
    json_decref(extra);
    client_server_deinit(&s);
    return st;
}

static hd_status compare(const serve_bench *b, hd_err *err) {
    json_t *first = NULL, *second = NULL;
    hd_status st = result_load(&first, b->compare, err);
    if (st == HD_OK) st = result_load(&second, b->target, err);
    if (st == HD_OK) st = table_compare(first, second, stdout, err);
    if (st == HD_OK && b->report) st = report_html(b->report, first, second, err);
    json_decref(first);
    json_decref(second);
    return st;
}

static const char details[] =
    "URL is http(s)://HOST[:PORT], with or without /v1. A key is taken from HADAL_API_KEY or "
    "OPENAI_API_KEY.\n\n"
    "--concurrency and --rate may be lists, such as 1,2,4,8: a run for each. Without --rate as "
    "many\nconversations as allowed are always open; with it they arrive at random times.\n\n"
    "With --compare A.json the argument is the second file: hadal bench serve --compare A.json "
    "B.json.";

/* As options_parse(). */
static bool read_options(serve_bench *b, int argc, char **argv, int *code) {
    const option options[] = {
        option_text("concurrency", &b->concurrency, "LIST",
                    "conversations at once, at most; 0: no bound; default 8, with --rate 0"),
        option_text("rate", &b->rate, "LIST",
                    "conversations that arrive per second, Poisson; 0: as soon as allowed"),
        option_int("num-prompts", &b->prompts, 0, 10000000,
                   "conversations of a run; 0: until --duration, or 8 for each at once"),
        option_real("duration", &b->duration_s, 0, 1e6, "seconds in which requests are sent"),
        option_text("input-len", &b->input, "N[-N]", "tokens of a prompt, or a range"),
        option_text("output-len", &b->output, "N[-N]", "most output tokens of a request"),
        option_int("prefix-len", &b->prefix, 0, 1 << 24,
                   "tokens of the prompt that a group shares"),
        option_int("prefix-groups", &b->groups, 1, 1 << 20, "groups of shared prefixes"),
        option_int("turns", &b->turns, 1, 10000,
                   "requests of a conversation, each with the answers before it"),
        option_text("turn-len", &b->turn, "N[-N]", "tokens that each later turn adds"),
        option_int("seed", &b->seed, 0, INT64_MAX, "of lengths, times and texts"),
        option_int("warmup", &b->warm_up, 0, 10000, "conversations before the clock starts"),
        option_choice("endpoint", &b->endpoint, endpoints, "what is asked"),
        option_text("model", &b->model, "NAME",
                    "the first that the server lists, if not given"),
        option_int("token-ids", &b->token_ids, 0, 1 << 24,
                   "completions: prompts of random token ids below N; 0: text"),
        option_temperature(&b->temperature),
        option_flag("ignore-eos", &b->ignore_eos,
                    "answers have their full length, where the server knows this"),
        option_text("extra-body", &b->extra, "JSON", "members that every request gets"),
        option_real("timeout", &b->timeout_s, 0.001, 1e6, "seconds of a request"),
        option_text("goodput", &b->goodput, "LIST",
                    "objectives in ms, such as ttft:500,tpot:50,e2e:9000"),
        option_text("json", &b->json, "FILE", "where the figures go"),
        option_flag("details", &b->details, "every request in --json too"),
        option_text("report", &b->report, "FILE", "where a page with charts goes"),
        option_text("compare", &b->compare, "FILE",
                    "no load: figures of this file of --json, and of URL, another"),
        with_letter(option_flag("quiet", &b->quiet, "no progress on standard error"), 'q'),
    };
    const positional target = {.name = "URL", .value = &b->target};
    const command_line line = {.command = "bench serve",
                               .summary = "Load on a server, and what each request saw.",
                               .details = details,
                               .positionals = &target,
                               .n_positionals = 1,
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    return options_parse(&line, argc, argv, code);
}

int bench_serve(int argc, char **argv) {
    serve_bench b = {.input = "512",
                     .turn = "64",
                     .output = "128",
                     .turns = 1,
                     .groups = 1,
                     .warm_up = 1,
                     .timeout_s = 600};
    int code;
    if (!read_options(&b, argc, argv, &code)) return code;
    hd_err err = {0};
    const hd_status st = b.compare ? compare(&b, &err) : bench(&b, &err);
    if (st != HD_OK) return report_error(&err);
    return stopped ? 128 + stopped : 0; /* exit codes of shells after a signal */
}
