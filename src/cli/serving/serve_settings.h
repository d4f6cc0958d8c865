/* serve_settings.h - the parsed flags of `hadal serve`. */
#ifndef HD_CLI_SERVE_SETTINGS_H
#define HD_CLI_SERVE_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>

#include "cli/engine_options.h"
#include "cli/serving/serve_peers.h"
#include "cli/serving/serve_ranks.h"
#include "server/server.h"

enum { SERVE_LIST_MAX = 16 }; /* origins, names */

typedef struct serve_settings {
    engine_settings engine;
    rank_options ranks;
    serve_peers peers;
    pd_options pd;
    const char *model_name, *host, *cors, *public_name;
    const char *certificate, *private_key, *api_key_file, *admin_key_file;
    const char *access_log, *request_log, *crash_file, *trace_dir, *weights_dir, *record_dir,
        *kv_save;
    const char *user, *group;
    int64_t port, http_threads, connections, per_address, body_mb, bodies_mb, header_kb,
        stream_kb;
    int64_t key_calls, key_tokens, failures;
    int64_t header_s, body_s, idle_s, stall_s, keep_alive_s, drain_s, health_s;
    int64_t answers, messages, batch_prompts, stream_interval, queue_s;
    int compat, record;
    bool half_close, no_sandbox, open;

    int64_t start_ns;
    char *repo;                     /* of the model, if it lies in the cache of a hub */
    char *settings_json, *lists[2]; /* owned */
    const char *origins[SERVE_LIST_MAX], *names[SERVE_LIST_MAX];
    size_t n_origins, n_names;
} serve_settings;

/* As options_parse(). */
bool serve_settings_parse(serve_settings *set, int argc, char **argv, int *code);
void serve_settings_deinit(serve_settings *set);

/* Points into set. */
server_options serve_settings_options(const serve_settings *set);

/* The limits of the HTTP layer by default, on any free port of this machine. */
http_options serve_settings_http(void);

/* A server of this engine, else with all defaults, on any free port of this machine and without
 * a sandbox. Points into engine. */
server_options serve_settings_plain(const engine_settings *engine);

#endif
