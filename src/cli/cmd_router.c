/* cmd_router.c - `hadal router`: one address in front of many servers. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "cli/commands.h"
#include "cli/serving/serve_settings.h"
#include "router/router.h"
#include "server/access_log.h"
#include "server/page.h"

static const char details[] = "Has the whole API of the servers, and sends each request to the "
                              "one that will answer first:\n"
                              "docs/router.md. Servers need not be there yet. Requests carry "
                              "their keys on to the servers;\n"
                              "load reports are asked for with HADAL_API_KEY. SIGHUP reads key "
                              "and certificate files again.\n"
                              "SIGTERM and SIGINT drain; twice: at once.";

typedef struct settings {
    const char *host, *decode, *prefill, *api_key_file, *admin_key_file, *certificate,
        *private_key, *access_log;
    int64_t port, connections, drain_s;
    bool open;
} settings;

static router_options options_of(const settings *set) {
    router_options o = {
        .http = serve_settings_http(),
        .key_sources = {.file = set->api_key_file,
                        .admin_file = set->admin_key_file,
                        .text = getenv("HADAL_API_KEY"),
                        .admin_text = getenv("HADAL_ADMIN_KEY")},
        .decode = set->decode,
        .prefill = set->prefill,
        .key = getenv("HADAL_API_KEY"),
        .route = server_route,
        .page = page_routes,
        .n_page = page_n_routes,
        .open = set->open
    };
    o.http.host = set->host;
    o.http.port = (int32_t)set->port;
    o.http.certificate = set->certificate;
    o.http.private_key = set->private_key;
    o.http.limits.connections = (int32_t)set->connections;
    return o;
}

static void reload(router *r) {
    hd_err err = {0};
    if (router_reload(r, &err) != HD_OK) {
        HD_LOG(HD_LOG_ERROR, "reload_failed", hd_log_text("why", err.msg));
    }
}

/* Waits for the signal to end. */
static void wait_for_end(router *r, const sigset_t *signals) {
    for (int which = 0; which != SIGTERM && which != SIGINT;) {
        if (sigwait(signals, &which) == 0 && which == SIGHUP) reload(r);
    }
}

static hd_status run(const settings *set, hd_err *err) {
    router_options o = options_of(set);
    line_file access_log;
    router *r;
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &signals, NULL); /* for all threads */
    signal(SIGPIPE, SIG_IGN);
    HD_TRY(access_log_open(&access_log, set->access_log, &o.http, err));
    const hd_status st = router_open(&r, &o, err);
    if (st != HD_OK) {
        line_file_close(&access_log);
        return st;
    }
    printf("hadal %s routes at %s://%s:%d\nready\n", HD_VERSION,
           set->certificate ? "https" : "http", set->host, router_port(r));
    fflush(stdout);
    wait_for_end(r, &signals);
    HD_LOG(HD_LOG_INFO, "draining", hd_log_int("seconds_at_most", set->drain_s));
    router_drain(r);
    sigdelset(&signals, SIGHUP);
    pthread_sigmask(SIG_UNBLOCK, &signals, NULL); /* the second one ends the process */
    if (!router_wait_idle(r, set->drain_s * 1000000000)) {
        hd_log_write(HD_LOG_WARN, "drain_cut_short", NULL, 0);
    }
    router_close(r);
    line_file_close(&access_log);
    return HD_OK;
}

int cmd_router(int argc, char **argv) {
    settings set = {.host = "127.0.0.1", .port = 30080, .connections = 10000, .drain_s = 120};
    const option options[] = {
        option_text("decode", &set.decode, "HOST:PORT,...",
                    "servers that answer; dns:HOST:PORT: all that the name resolves to"),
        option_text("prefill", &set.prefill, "HOST:PORT,...",
                    "servers that compute long prompts for them"),
        option_text("host", &set.host, "NAME",
                    "every address of it listens; default 127.0.0.1"),
        option_int("port", &set.port, 0, 65535, "default 30080; 0: any free one"),
        option_text("api-key-file", &set.api_key_file, "FILE",
                    "API keys, one per line: those of the servers"),
        option_text("admin-key-file", &set.admin_key_file, "FILE", "keys of admin endpoints"),
        option_flag("insecure-no-auth", &set.open, "let others reach it without keys"),
        option_text("tls-cert", &set.certificate, "FILE", "PEM certificate chain: speak TLS"),
        option_text("tls-key", &set.private_key, "FILE", "PEM private key"),
        option_int("max-connections", &set.connections, 1, 65536, "default 10000"),
        option_text("log-access", &set.access_log, "FILE",
                    "append a JSON line per request, without content; -: standard error"),
        option_int("drain-seconds", &set.drain_s, 0, 86400,
                   "for responses at the end; default 120"),
    };
    const command_line line = {.command = "router",
                               .summary = "Spreads requests over servers.",
                               .details = details,
                               .options = options,
                               .n_options = (int)HD_LEN(options)};
    hd_err err = {0};
    int code;
    if (!options_parse(&line, argc, argv, &code)) return code;
    return run(&set, &err) == HD_OK ? 0 : report_error(&err);
}
