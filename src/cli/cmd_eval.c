/* cmd_eval.c - `hadal eval`: runs a file of tasks, checks the answers and counts them.
 *
 * Tasks are JSON lines: {"task": name, "messages": [...] or "prompt": text, "tools": [...],
 * "thinking": true, "checker": {...}, "max_tokens": N}. All run through one engine, many at a
 * time; the result does not depend on how many. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/progress.h"
#include "cli/terminal/columns.h"
#include "cli/commands.h"
#include "cli/engine_options.h"
#include "cli/eval_check.h"
#include "engine/engine.h"

enum { MAX_FILE_BYTES = 256 << 20, MAX_CASES = 100000, MAX_TASKS = 256, DEFAULT_RUNNING = 16 };

typedef struct settings {
    engine_settings engine;
    const char *suite, *file, *task, *json;
    int64_t limit;
    bool quiet;
} settings;

typedef struct eval_case {
    json_t *line;
    int32_t group;
    uint64_t id; /* of the engine; 0: not running */
    hd_ids reply;
    bool thinking;
} eval_case;

typedef struct group {
    const char *name;
    int32_t n, right, finished, prompt_tokens, output_tokens, drafted, accepted;
} group;

typedef struct eval {
    settings set;
    hd_engine *engine;
    eval_case *cases;
    int32_t n_cases, next, done;
    group *groups; /* [MAX_TASKS] */
    int32_t n_groups;
} eval;

/* ---- the task file ---- */

static int32_t group_of(eval *v, const char *name) {
    for (int32_t i = 0; i < v->n_groups; i++) {
        const char *known = v->groups[i].name;
        if (known && strcmp(known, name) == 0) return i;
    }
    if (v->n_groups == MAX_TASKS) return -1;
    v->groups[v->n_groups].name = name;
    return v->n_groups++;
}

static hd_status check_case(const json_t *line, const char *where, hd_err *err) {
    const bool messages = json_is_array(json_object_get(line, "messages"));
    const bool prompt = json_is_string(json_object_get(line, "prompt"));
    if (!json_is_string(json_object_get(line, "task"))) {
        return HD_FAIL(err, HD_EINVAL, "%s: task must be a string", where);
    }
    if (messages == prompt) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s: needs either messages (an array) or prompt (a string)", where);
    }
    return eval_check_valid(json_object_get(line, "checker"), where, err);
}

static hd_status add_line(eval *v, const char *text, size_t n, const char *where, hd_err *err) {
    json_t *line;
    HD_TRY(hd_json_parse(&line, text, n, where, err));
    hd_status st = check_case(line, where, err);
    const char *task = json_string_value(json_object_get(line, "task"));
    const bool wanted = st == HD_OK && task && (!v->set.task || strcmp(v->set.task, task) == 0);
    const int32_t g = wanted ? group_of(v, task) : -1;
    if (wanted && g < 0)
        st = HD_FAIL(err, HD_EINVAL, "%s: more than %d tasks", where, MAX_TASKS);
    if (g < 0 || (v->set.limit && v->groups[g].n >= v->set.limit)) {
        json_decref(line);
        return st;
    }
    const json_t *thinking = json_object_get(line, "thinking");
    v->groups[g].n++;
    v->cases[v->n_cases++] = (eval_case){.line = line,
                                         .group = g,
                                         .thinking = thinking ? json_is_true(thinking)
                                                              : hd_engine_thinks(v->engine)};
    return HD_OK;
}

static hd_status load_cases(eval *v, const char *path, hd_err *err) {
    char *text, where[5000];
    size_t n;
    HD_TRY(hd_file_read(&text, &n, path, MAX_FILE_BYTES, err));
    v->cases = calloc(MAX_CASES, sizeof *v->cases);
    v->groups = calloc(MAX_TASKS, sizeof *v->groups);
    hd_status st =
        v->cases && v->groups ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for tasks");
    int32_t number = 1;
    for (size_t at = 0; st == HD_OK && at < n; number++) {
        const char *end = memchr(text + at, '\n', n - at);
        const size_t length = end ? (size_t)(end - text) - at : n - at;
        snprintf(where, sizeof where, "%s: line %d", path, number);
        if (v->n_cases == MAX_CASES) {
            st = HD_FAIL(err, HD_EINVAL, "%s: more than %d tasks", where, MAX_CASES);
        } else if (length > 0) {
            st = add_line(v, text + at, length, where, err);
        }
        at += length + 1;
    }
    free(text);
    if (st == HD_OK && v->n_cases == 0)
        st = HD_FAIL(err, HD_EINVAL, "%s: no tasks in it", path);
    return st;
}

/* ---- running ---- */

static hd_status submit(eval *v, eval_case *c, hd_err *err) {
    char why[600];
    char *messages = hd_json_write(json_object_get(c->line, "messages"), JSON_COMPACT);
    char *tools = hd_json_write(json_object_get(c->line, "tools"), JSON_COMPACT);
    const hd_request g = {
        .size = sizeof g,
        .messages = messages,
        .tools = tools,
        .text = json_string_value(json_object_get(c->line, "prompt")),
        .thinking = c->thinking ? 1 : -1,
        .max_tokens = (int32_t)json_integer_value(json_object_get(c->line, "max_tokens")),
        .draft_tokens = v->set.engine.draft_tokens};
    c->id = hd_engine_submit(v->engine, &g, NULL, why, sizeof why);
    free(messages);
    free(tools);
    if (c->id) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "task %d (%s): %s", (int)(c - v->cases) + 1,
                   v->groups[c->group].name, why);
}

static hd_status judge(eval *v, eval_case *c, const hd_event *e, hd_err *err) {
    group *g = &v->groups[c->group];
    hd_bytes text = {0};
    eval_verdict verdict = {0};
    if (e->step.finish_reason == HD_FINISH_ERROR) return HD_FAIL(err, HD_EDEVICE, "%s", e->why);
    const size_t n = c->reply.n - (e->step.finish_reason == HD_FINISH_STOP && c->reply.n);
    hd_status st =
        hd_tokenizer_decode(hd_engine_tokenizer(v->engine), c->reply.ids, n, false, &text, err);
    if (st == HD_OK) {
        st = eval_check(&verdict, json_object_get(c->line, "checker"), text.data, text.n,
                        hd_engine_encoding(v->engine), c->thinking, err);
    }
    g->right += verdict.right;
    g->finished += verdict.finished && e->step.finish_reason == HD_FINISH_STOP;
    g->prompt_tokens += e->prompt_tokens;
    g->output_tokens += e->output_tokens;
    g->drafted += e->drafted;
    g->accepted += e->accepted;
    hd_bytes_deinit(&text);
    hd_ids_deinit(&c->reply);
    return st;
}

static eval_case *find(eval *v, uint64_t id) {
    for (int32_t i = 0; i < v->next; i++) {
        if (v->cases[i].id == id) return &v->cases[i];
    }
    return NULL;
}

static hd_status run_all(eval *v, hd_err *err) {
    hd_progress progress;
    hd_event e;
    hd_status st = HD_OK;
    const hd_engine_options *o = &v->set.engine.options;
    const int32_t ahead = o->max_running + o->queue_limit;
    hd_progress_init(&progress, "eval", "tasks", v->n_cases, v->set.quiet);
    while (st == HD_OK && v->done < v->n_cases) {
        while (st == HD_OK && v->next < v->n_cases && v->next - v->done < ahead) {
            st = submit(v, &v->cases[v->next++], err);
        }
        if (st != HD_OK || !hd_engine_poll(v->engine, &e, -1)) break;
        eval_case *c = find(v, e.id);
        st = hd_ids_append(&c->reply, e.step.tokens, (size_t)e.step.n_tokens, err);
        if (st != HD_OK || e.step.finish_reason == HD_FINISH_NONE) continue;
        st = judge(v, c, &e, err);
        c->id = 0;
        v->done++;
        hd_progress_add(&progress, 1);
    }
    hd_progress_end(&progress);
    return st;
}

/* ---- reporting ---- */

/* Wilson's score interval at 95 %, which is valid for few cases and for rates near 0 and 1. */
static void interval(int32_t right, int32_t n, double *low, double *high) {
    const double z = 1.959964, p = (double)right / n, zz = z * z / n;
    const double middle = (p + zz / 2) / (1 + zz);
    const double half = z * sqrt(p * (1 - p) / n + zz / (4 * n)) / (1 + zz);
    *low = fmax(middle - half, 0);
    *high = fmin(middle + half, 1);
}

static const column table[] = {
    {"task",          20, false},
    {"n",             5,  true },
    {"right",         10, true },
    {"95 % interval", 18, true },
    {"finished",      12, true },
    {"accepted",      10, true }
};

static void print_row(columns *c, const char *name, const group *g) {
    double low, high;
    interval(g->right, g->n, &low, &high);
    columns_cell(c, "%s", name);
    columns_cell(c, "%d", g->n);
    columns_cell(c, "%.1f %%", 100.0 * g->right / g->n);
    columns_cell(c, "%5.1f .. %5.1f %%", low * 100, high * 100);
    columns_cell(c, "%.1f %%", 100.0 * g->finished / g->n);
    if (g->drafted) columns_cell(c, "%.1f %%", 100.0 * g->accepted / g->drafted);
    columns_end(c);
}

static json_t *row_json(const char *name, const group *g) {
    double low, high;
    interval(g->right, g->n, &low, &high);
    return json_pack("{s:s, s:i, s:i, s:f, s:f, s:f, s:i, s:i, s:i, s:i, s:i}", "task", name,
                     "n", g->n, "right", g->right, "rate", (double)g->right / g->n, "low", low,
                     "high", high, "finished", g->finished, "prompt_tokens", g->prompt_tokens,
                     "output_tokens", g->output_tokens, "drafted", g->drafted, "accepted",
                     g->accepted);
}

static hd_status report(const eval *v, hd_err *err) {
    group all = {.name = "all"};
    json_t *rows = json_array();
    columns c = columns_open(stdout, table, (int)HD_LEN(table), 0);
    columns_head(&c);
    for (int32_t i = 0; i < v->n_groups; i++) {
        const group *g = &v->groups[i];
        print_row(&c, g->name, g);
        json_array_append_new(rows, row_json(g->name, g));
        all.n += g->n;
        all.right += g->right;
        all.finished += g->finished;
        all.prompt_tokens += g->prompt_tokens;
        all.output_tokens += g->output_tokens;
        all.drafted += g->drafted;
        all.accepted += g->accepted;
    }
    print_row(&c, all.name, &all);
    json_t *out = json_pack("{s:s, s:o, s:o}", "model", v->set.engine.options.model_dir,
                            "tasks", rows, "all", row_json(all.name, &all));
    hd_status st = HD_OK;
    if (v->set.json && json_dump_file(out, v->set.json, JSON_INDENT(1)) != 0) {
        st = HD_FAIL(err, HD_EIO, "%s: cannot write", v->set.json);
    }
    json_decref(out);
    return st;
}

/* ---- the command ---- */

static hd_status evaluate(eval *v, hd_err *err) {
    char path[4200];
    if ((v->set.suite != NULL) == (v->set.file != NULL)) {
        return HD_FAIL(err, HD_EINVAL, "hadal eval needs either --suite NAME or --tasks FILE");
    }
    snprintf(path, sizeof path, "%s/eval/%s.jsonl", v->set.engine.options.model_dir,
             v->set.suite ? v->set.suite : "");
    HD_TRY(engine_settings_open(&v->engine, &v->set.engine, v->set.quiet, err));
    HD_TRY(load_cases(v, v->set.file ? v->set.file : path, err));
    HD_TRY(run_all(v, err));
    return report(v, err);
}

static void close_all(eval *v) {
    hd_engine_close(v->engine);
    for (int32_t i = 0; i < v->n_cases; i++) {
        json_decref(v->cases[i].line);
        hd_ids_deinit(&v->cases[i].reply);
    }
    free(v->cases);
    free(v->groups);
}

int cmd_eval(int argc, char **argv) {
    eval v = {.set = {.engine = engine_settings_default()}};
    settings *set = &v.set;
    int32_t *running = &set->engine.options.max_running;
    const option options[] = {
        option_text("suite", &set->suite, "NAME",
                    "the model's own tasks, MODEL_DIR/eval/NAME.jsonl"),
        option_text("tasks", &set->file, "FILE", "a file of tasks"),
        option_text("task", &set->task, "NAME", "only tasks of this name"),
        option_int("limit", &set->limit, 0, MAX_CASES, "cases of each name; 0: all"),
        {.name = "running",
                                                                            .kind = OPTION_INT,
                                                                            .value = running,
                                                                            .bytes = sizeof *running,
                                                                            .metavar = "N",
                                                                            .help = "the same as --max-running",
                                                                            .min = 1,
                                                                            .max = 256},
        option_text("json", &set->json, "FILE", "also write the report as JSON"),
        with_letter(option_flag("quiet", &set->quiet, "no progress on standard error"), 'q'),
    };
    const positional model = {"MODEL_DIR", &set->engine.options.model_dir, false,
                              POSITIONAL_MODEL};
    const command_line line = {
        .command = "eval",
        .summary = "Runs tasks through a model and counts the right answers.",
        .details =
            "A task is a JSON object on one line: {\"task\": NAME, \"messages\": [...] or\n"
            "\"prompt\": TEXT, \"thinking\": true, \"max_tokens\": N, \"checker\": {\"type\": "
            "exact,\n"
            "contains, final_number, regex, tool_call or countdown, \"expect\": ...}}. "
            "Decoding\n"
            "is greedy. \"finished\" counts answers that ended by themselves and were well "
            "formed.",
        .positionals = &model,
        .n_positionals = 1,
        .options = options,
        .n_options = (int)HD_LEN(options)};
    int code;
    hd_err err = {0};
    if (!engine_options_parse(&line, ENGINE_EVAL, &set->engine, argc, argv, &code)) return code;
    if (!*running) *running = DEFAULT_RUNNING;
    set->engine.options.queue_limit = *running; /* as many wait as run */
    hd_status st = evaluate(&v, &err);
    close_all(&v);
    return st == HD_OK ? 0 : report_error(&err);
}
