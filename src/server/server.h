/* server.h - the inference server: a model behind HTTP. Everything that `hadal serve` runs,
 * from binding to draining. */
#ifndef HD_SERVER_SERVER_H
#define HD_SERVER_SERVER_H

#include "base/status.h"
#include "hadal.h"
#include "api/api.h"
#include "moe/record.h"
#include "http/listen.h"
#include "http/keys.h"
#include "pd/pd.h"

typedef enum server_compat { /* further naming schemes of /metrics, as bits */
                             SERVER_COMPAT_SGLANG = 1,
                             SERVER_COMPAT_VLLM = 2
} server_compat;

typedef struct server_options {
    http_options http; /* the server sets its keys, from key_sources */
    hd_engine_options engine;
    pd_options pd; /* the server sets its name, its model and what it calls */
    api_limits api;
    hd_key_sources key_sources;
    const char *model_name; /* as served */
    /* file of JSON lines without content; "-": standard error; NULL: none */
    const char *access_log;
    const char *request_log; /* file that JSON lines are appended to; NULL: none */
    /* file for living requests when a fatal signal arrives; NULL: none */
    const char *crash_file;
    /* folder of checkpoints to update from; NULL: updates are refused */
    const char *weights_dir;
    const char *trace_dir;  /* folder for profiles; NULL: profiles are refused */
    const char *record_dir; /* folder for expert records; NULL: they are refused */
    const char *kv_save;    /* "DIR:GB" for saved conversations; NULL: they are refused */
    hd_record_mode record;
    const char *settings_json; /* a JSON object, shown by /server_info */
    int32_t stall_s;           /* unhealthy if requests run and no step ends for this long */
    int metrics_compat;        /* server_compat bits */
    /* the user that root changes to, NULL: stay root; group NULL: the user's own */
    const char *user, *group;
    bool sandbox;
    bool open; /* allow other hosts to connect without keys */
} server_options;

typedef struct server server;

/* Reads keys, binds the port, changes the user and enters the sandbox; starts no thread. The
 * options and their strings must outlive the server. */
hd_status server_open(server **out, const server_options *options, hd_err *err);

/* Starts the HTTP threads (/health replies "starting") and loads the model. */
hd_status server_start(server *s, hd_err *err);

/* Returns the i-th route of all that a server has, or NULL behind the last one. */
const http_route *server_route(size_t i);

/* Refuses new requests from now on; running ones finish. Any thread may call. */
void server_drain(server *s);

/* Waits until all calls are answered, or until the timeout; true: they are. */
bool server_wait_idle(server *s, int64_t timeout_ns);

/* Logs one line with running and waiting requests and free pages. Any thread may call. */
void server_log_state(server *s);

/* Reads the key files again. On failure the old keys stay. */
hd_status server_reload_keys(server *s, hd_err *err);
hd_status server_reload_certificate(server *s, hd_err *err);
bool server_speaks_tls(const server *s);

/* Aborts running requests and frees the server. NULL is fine. */
void server_close(server *s);

int32_t server_port(const server *s);
bool server_is_loopback(const server *s);
const char *server_address(const server *s, int32_t i); /* like http_address() */
bool server_has_keys(const server *s);
const char *server_sandbox(const server *s); /* what the kernel restricts, as text */
hd_engine *server_engine(server *s);         /* NULL before the model is loaded */

#endif
