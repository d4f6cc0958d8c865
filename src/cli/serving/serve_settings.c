/* serve_settings.c - the option table of `hadal serve`, with every limit and its default. */
#include "cli/serving/serve_settings.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cores.h"
#include "base/progress.h"
#include "base/json.h"
#include "hub/hub.h"

enum { MOST_HTTP_THREADS = 8 };

static const char *const compat_names[] = {"none", "sglang", "vllm", "both", NULL};

static const char *const record_modes[] = {"stat", "per-pass", "per-token", NULL};

static const serve_settings defaults = {
    .host = "127.0.0.1",
    .port = 30000,
    .connections = 10000,
    .per_address = -1,
    .body_mb = 8,
    .bodies_mb = 512,
    .failures = -1,
    .header_kb = 16,
    .stream_kb = 1024,
    .header_s = 10,
    .body_s = 20,
    .idle_s = 75,
    .stall_s = 30,
    .keep_alive_s = 10,
    .drain_s = 120,
    .health_s = 10,
    .answers = 8,
    .messages = 4096,
    .batch_prompts = 64,
    .stream_interval = 1,
    .queue_s = 600,
};

static const char details[] =
    "Speaks the OpenAI, Anthropic and SGLang interfaces; docs/server.md lists the endpoints.\n"
    "API keys are read from --api-key-file and from HADAL_API_KEY, the admin key from\n"
    "--admin-key-file and HADAL_ADMIN_KEY; a key on the command line would be seen by "
    "everyone\n"
    "on this machine. SIGHUP reads the files again. SIGTERM and SIGINT drain; twice: at once.";

/* Splits "a,b" in place, in a copy. */
static hd_status split(char **copy, const char *flag, const char *list, const char **out,
                       size_t *n, hd_err *err) {
    *copy = list ? strdup(list) : NULL;
    if (list && !*copy) return HD_FAIL(err, HD_ENOMEM, "no memory for --%s", flag);
    for (char *rest = *copy; rest && *rest;) {
        char *next = strchr(rest, ',');
        if (next) *next++ = '\0';
        if (*rest && *n == SERVE_LIST_MAX) {
            return HD_FAIL(err, HD_EINVAL, "--%s: more than %d", flag, SERVE_LIST_MAX);
        }
        if (*rest) out[(*n)++] = rest;
        rest = next;
    }
    return HD_OK;
}

static const char *last_name(const char *path) {
    const char *name = path;
    for (const char *p = path; *p; p++) {
        if (*p == '/' && p[1] && p[1] != '/') name = p + 1;
    }
    return name;
}

/* The flags of /server_info, by name. */
static char *describe(const option_list *list) {
    json_t *all = json_object();
    for (int i = 0; i < list->n; i++) {
        const option *o = &list->all[i];
        char name[64];
        size_t k = 0;
        for (; o->name[k] && k + 1 < sizeof name; k++) {
            name[k] = o->name[k];
            if (name[k] == '-') name[k] = '_';
        }
        name[k] = '\0';
        json_t *value = NULL;
        switch (o->kind) {
        case OPTION_FLAG:
            value = json_boolean(*(const bool *)o->value);
            break;
        case OPTION_TEXT:
        case OPTION_WORD:
            value = *(const char *const *)o->value ? json_string(*(const char *const *)o->value)
                                                   : json_null();
            break;
        case OPTION_INT:
            value = json_integer(option_int_value(o));
            break;
        case OPTION_REAL:
            value = json_real(option_real_value(o));
            break;
        case OPTION_CHOICE:
            value = json_string(o->choices[option_int_value(o)]);
            break;
        }
        json_object_set_new(all, name, value);
    }
    char *text = hd_json_write(all, JSON_COMPACT);
    json_decref(all);
    return text;
}

static hd_status complete(serve_settings *set, const option_list *options, hd_err *err) {
    const char *model_dir = set->engine.options.model_dir;
    HD_TRY(rank_options_complete(&set->ranks, &set->engine.options, err));
    HD_TRY(serve_peers_complete(&set->peers, &set->pd, err));
    set->repo = hub_cache_repo_of(model_dir);
    if (!set->model_name) set->model_name = set->repo ? set->repo : last_name(model_dir);
    set->settings_json = describe(options);
    set->engine.options.updatable = set->weights_dir != NULL;
    HD_TRY(split(&set->lists[0], "cors", set->cors, set->origins, &set->n_origins, err));
    return split(&set->lists[1], "public-name", set->public_name, set->names, &set->n_names,
                 err);
}

/* Options of access and limits. */
static void list_front(serve_settings *set, option_list *to) {
    const option options[] = {
        option_text("host", &set->host, "NAME",
                    "every address of it listens; default 127.0.0.1"),
        option_int("port", &set->port, 0, 65535, "default 30000; 0: any free one"),
        option_text("model-name", &set->model_name, "NAME",
                    "default: the folder's or the hub's name"),
        option_text("api-key-file", &set->api_key_file, "FILE", "API keys, one per line"),
        option_text("admin-key-file", &set->admin_key_file, "FILE", "keys of admin endpoints"),
        option_flag("insecure-no-auth", &set->open, "let others reach it without keys"),
        option_text("cors", &set->cors, "ORIGINS", "web origins that may call, comma between"),
        option_text("public-name", &set->public_name, "NAMES",
                    "further host names on loopback, comma between"),
        option_text("tls-cert", &set->certificate, "FILE",
                    "PEM certificate chain: speak TLS; SIGHUP reads it again"),
        option_text("tls-key", &set->private_key, "FILE", "PEM private key"),
        option_flag("no-sandbox", &set->no_sandbox, "keep all rights of the process"),
        option_text("user", &set->user, "NAME", "whom root becomes once the port is bound"),
        option_text("group", &set->group, "NAME", "default: the user's own"),
        option_int("http-threads", &set->http_threads, 0, 256,
                   "per address; 0: one per core, 2 to 8"),
        option_int("max-connections", &set->connections, 1, 65536,
                   "default 10000; more are closed at once"),
        option_int("max-connections-per-address", &set->per_address, -1, 65536,
                   "0: no bound; default 256, none on loopback"),
        option_int("key-requests", &set->key_calls, 0, 65536,
                   "of one API key at once; 0, the default: no bound"),
        option_int("key-tokens-per-minute", &set->key_tokens, 0, 1000000000000,
                   "of one API key, read and written; 0, the default: no bound"),
        option_int("key-failures", &set->failures, -1, 1000000,
                   "of one address per minute; 0: no bound; default 20, none on loopback"),
        option_int("max-body-mb", &set->body_mb, 1, 256, "of one request; default 8"),
        option_int("max-bodies-mb", &set->bodies_mb, 1, 1 << 20,
                   "of all requests and unread responses together; default 512"),
        option_int("max-header-kb", &set->header_kb, 4, 64, "all headers; default 16"),
        option_int("stream-buffer-kb", &set->stream_kb, 16, 16384,
                   "a reader further behind for long is cut off; default 1024"),
        option_int("header-seconds", &set->header_s, 1, 60, "for all headers; default 10"),
        option_int("body-seconds", &set->body_s, 1, 3600, "and 1 per 64 KiB; default 20"),
        option_int("idle-seconds", &set->idle_s, 1, 3600, "between requests; default 75"),
        option_int("stall-seconds", &set->stall_s, 1, 300,
                   "a reader that takes nothing is cut off, and one that stays further "
                   "behind, with 1 more per 64 KiB; default 30"),
        option_int("ping-seconds", &set->keep_alive_s, 1, 300,
                   "comments in silent streams; default 10"),
        option_flag("allow-half-close", &set->half_close,
                    "a client that closed its sending side still gets its response"),
        option_int("drain-seconds", &set->drain_s, 0, 86400,
                   "for responses at the end; default 120"),
        option_int("health-seconds", &set->health_s, 1, 3600,
                   "work is due and no step ends: unhealthy; default 10"),
    };
    option_list_add(to, options, HD_LEN(options));
}

/* What requests may ask for, and what is kept of them. */
static void list_requests(serve_settings *set, option_list *to) {
    const option options[] = {
        option_int("queue-seconds", &set->queue_s, 0, 3600,
                   "in the queue at most; default 600"),
        option_int("stream-interval", &set->stream_interval, 1, 1024,
                   "tokens per streamed event after the first; default 1"),
        option_int("max-answers", &set->answers, 1, HD_MAX_CHOICES, "of a request; default 8"),
        option_int("max-messages", &set->messages, 1, 65536, "of a request; default 4096"),
        option_int("max-prompts", &set->batch_prompts, 1, 1024, "of a request; default 64"),
        option_choice("metrics-compat", &set->compat, compat_names,
                      "names of SGLang or vLLM beside ours"),
        option_text("log-access", &set->access_log, "FILE",
                    "append a JSON line per request, without content; -: standard error"),
        option_text("log-requests", &set->request_log, "FILE",
                    "append prompts and outputs as JSON lines"),
        option_text("crash-dump", &set->crash_file, "FILE",
                    "living requests, written on a fatal signal"),
        option_text("weights-dir", &set->weights_dir, "DIR",
                    "take new weights while serving, from folders below DIR and from memory"),
        option_text("weights-backup", &set->engine.options.weights_backup, "DIR",
                    "keep released weights in a file without a name in DIR"),
        option_text("trace-dir", &set->trace_dir, "DIR", "where /start_profile may write"),
        option_text("kv-save", &set->kv_save, "DIR:GB",
                    "with --kv-host: where /kv/save may keep conversations, so many gigabytes"),
        option_text("expert-record-dir", &set->record_dir, "DIR",
                    "where expert records may be written"),
        option_choice("expert-record", &set->record, record_modes,
                      "what it records of the experts that rows choose"),
    };
    option_list_add(to, options, HD_LEN(options));
}

void serve_settings_deinit(serve_settings *set) {
    free(set->settings_json);
    free(set->repo);
    rank_options_deinit(&set->ranks);
    serve_peers_deinit(&set->peers);
    free(set->lists[0]);
    free(set->lists[1]);
}

bool serve_settings_parse(serve_settings *set, int argc, char **argv, int *code) {
    option_list own = {.n = 0};
    *set = defaults;
    set->engine = engine_settings_default();
    set->ranks = rank_options_default();
    set->peers = serve_peers_default();
    set->start_ns = hd_now_ns();
    list_front(set, &own);
    list_requests(set, &own);
    rank_options_list(&set->ranks, &own);
    rank_options_list_hosts(&set->ranks, &own);
    serve_peers_list(&set->peers, &own);
    const positional model = {"MODEL_DIR", &set->engine.options.model_dir, false,
                              POSITIONAL_MODEL};
    const command_line line = {.command = "serve",
                               .summary = "Serves a model over HTTP.",
                               .details = details,
                               .positionals = &model,
                               .n_positionals = 1,
                               .options = own.all,
                               .n_options = own.n};
    hd_err err = {0};
    if (!engine_options_parse(&line, ENGINE_SERVE, &set->engine, argc, argv, code))
        return false;
    if (complete(set, engine_options_parsed(), &err) == HD_OK) return true;
    *code = report_error(&err);
    serve_settings_deinit(set);
    return false;
}

static http_options http_options_of(const serve_settings *set) {
    int32_t threads = (int32_t)set->http_threads;
    if (!threads) threads = hd_max_i32(2, hd_cores_count());
    if (!set->http_threads && threads > MOST_HTTP_THREADS) threads = MOST_HTTP_THREADS;
    return (http_options){
        .host = set->host,
        .port = (int32_t)set->port,
        .threads = threads,
        .certificate = set->certificate,
        .private_key = set->private_key,
        .origins = set->origins,
        .n_origins = set->n_origins,
        .names = set->names,
        .n_names = set->n_names,
        .half_close = set->half_close,
        .quotas = {.key_calls = (int32_t)set->key_calls,
                   .key_tokens = set->key_tokens,
                   .failures = (int32_t)set->failures        },
        .limits = { .body_bytes = (size_t)set->body_mb << 20,
                   .bodies_bytes =
                       (size_t)(set->bodies_mb > set->body_mb ? set->bodies_mb : set->body_mb)
                       << 20,
                   .header_bytes = (size_t)set->header_kb << 10,
                   .one_header_bytes = (size_t)set->header_kb << 9,
                   .target_bytes = 8 << 10,
                   .stream_bytes = (size_t)set->stream_kb << 10,
                   .headers = 64,
                   .query_args = 16,
                   .connections = (int32_t)set->connections,
                   .connections_per_address = (int32_t)set->per_address,
                   .header_s = (int32_t)set->header_s,
                   .body_s = (int32_t)set->body_s,
                   .idle_s = (int32_t)set->idle_s,
                   .stall_s = (int32_t)set->stall_s,
                   .keep_alive_s = (int32_t)set->keep_alive_s}
    };
}

server_options serve_settings_options(const serve_settings *set) {
    const char *key = getenv("HADAL_API_KEY"), *admin = getenv("HADAL_ADMIN_KEY");
    return (server_options){
        .http = http_options_of(set),
        .engine = set->engine.options,
        .pd = set->pd,
        .api = {.max_choices = (int32_t)set->answers,
                .max_top_logprobs = set->engine.options.max_logprobs
                                        ? set->engine.options.max_logprobs
                                        : HD_DEFAULT_LOGPROBS,
                .max_messages = (int32_t)set->messages,
                .max_batch_prompts = (int32_t)set->batch_prompts,
                .stream_interval = (int32_t)set->stream_interval,
                .draft_tokens = set->engine.draft_tokens,
                .queue_timeout_ns = set->queue_s * 1000000000},
        .key_sources = {.file = set->api_key_file,
                .admin_file = set->admin_key_file,
                .text = key,
                .admin_text = admin},
        .model_name = set->model_name,
        .access_log = set->access_log,
        .request_log = set->request_log,
        .crash_file = set->crash_file,
        .trace_dir = set->trace_dir,
        .weights_dir = set->weights_dir,
        .record_dir = set->record_dir,
        .kv_save = set->kv_save,
        .record = (hd_record_mode)set->record,
        .settings_json = set->settings_json,
        .stall_s = (int32_t)set->health_s,
        .metrics_compat = set->compat, /* indices of choices */
        .user = set->user,
        .group = set->group,
        .sandbox = !set->no_sandbox,
        .open = set->open,
    };
}

http_options serve_settings_http(void) {
    serve_settings set = defaults;
    set.port = 0;
    http_options options = http_options_of(&set);
    options.origins = options.names = NULL;
    return options;
}

server_options serve_settings_plain(const engine_settings *engine) {
    serve_settings set = defaults;
    set.engine = *engine;
    set.model_name = last_name(engine->options.model_dir);
    set.port = 0;
    set.no_sandbox = true;
    set.connections = 64;
    server_options options = serve_settings_options(&set);
    options.http.origins = options.http.names = NULL;
    options.key_sources = (hd_key_sources){0};
    options.settings_json = "{}";
    return options;
}
