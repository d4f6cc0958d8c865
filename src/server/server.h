/* server.h - a model behind HTTP: everything `hadal serve` runs, from binding to draining. */
#ifndef HD_SERVER_SERVER_H
#define HD_SERVER_SERVER_H

#include "base/status.h"
#include "hadal.h"
#include "api/api.h"
#include "http/listen.h"
#include "http/keys.h"

typedef enum server_compat { /* further name sets of /metrics, bits */
                             SERVER_COMPAT_SGLANG = 1,
                             SERVER_COMPAT_VLLM = 2
} server_compat;

typedef struct server_options {
    http_options http; /* its keys are the server's, from key_sources */
    hd_engine_options engine;
    api_limits api;
    hd_key_sources key_sources;
    const char *model_name;    /* as served */
    const char *access_log;    /* JSON lines without content; "-": standard error; NULL: none */
    const char *request_log;   /* JSON lines are appended; NULL: none */
    const char *crash_file;    /* living requests, on a fatal signal; NULL: none */
    const char *trace_dir;     /* where profiles may be written; NULL: nowhere */
    const char *settings_json; /* an object, shown by /server_info */
    int32_t stall_s;           /* work is due and no step ends for so long: not healthy */
    int metrics_compat;        /* server_compat bits */
    const char *user, *group;  /* whom root becomes; NULL: it stays, the user's own */
    bool sandbox;
    bool open; /* others may reach it without keys */
} server_options;

typedef struct server server;

/* Reads keys, binds the port, changes the user and enters the sandbox; nothing runs yet.
 * Options and the texts in them outlive the server. */
hd_status server_open(server **out, const server_options *options, hd_err *err);

/* Starts the HTTP threads (/health says "starting") and loads the model. */
hd_status server_start(server *s, hd_err *err);

/* From now on new work is refused; what runs goes on. From any thread. */
void server_drain(server *s);

/* Waits until all calls are answered, at most for so long; true: they are. */
bool server_wait_idle(server *s, int64_t timeout_ns);

/* One line of the log says what runs, what waits and what is free. From any thread. */
void server_log_state(server *s);

/* Read the files again. On failure what was read before stays. */
hd_status server_reload_keys(server *s, hd_err *err);
hd_status server_reload_certificate(server *s, hd_err *err);
bool server_speaks_tls(const server *s);

/* Drops what still runs. NULL is fine. */
void server_close(server *s);

int32_t server_port(const server *s);
bool server_is_loopback(const server *s);
const char *server_address(const server *s, int32_t i); /* as http_address */
bool server_has_keys(const server *s);
const char *server_sandbox(const server *s); /* what the kernel granted, in words */
hd_engine *server_engine(server *s);         /* NULL before the start */

#endif
