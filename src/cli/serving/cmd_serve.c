/* cmd_serve.c - `hadal serve`: parses the flags of the server, starts it and drains it. */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/progress.h"
#include "base/terminal.h"
#include "cli/commands.h"
#include "cli/terminal/screen.h"
#include "cli/serving/serve_settings.h"
#include "cli/terminal/upload_bar.h"

enum { EXIT_RESTART_ME = 75, RESERVED_FILES = 64, FEW_CONNECTIONS = 64 };

/* ---- signals: one thread handles them, so that no handler does work ---- */

typedef struct follower {
    server *server;
    sem_t stop;
    atomic_bool loaded, over;
    int n_stops;
} follower;

static sigset_t followed_signals(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGUSR1);
    return set;
}

/* Before the thread runs, requests by signal wait for it, and signals that end the process end
 * it. Otherwise a slow name resolution could not be stopped. */
static sigset_t waiting_signals(void) {
    sigset_t set = followed_signals();
    sigdelset(&set, SIGINT);
    sigdelset(&set, SIGTERM);
    return set;
}

/* A background job of a terminal continues after SIGTTOU and SIGTTIN; a stray SIGUSR2 does not
 * end it. */
static void ignore_strays(void) {
    static const int strays[] = {SIGUSR2, SIGTTOU, SIGTTIN};
    for (size_t i = 0; i < HD_LEN(strays); i++) signal(strays[i], SIG_IGN);
}

/* A file that cannot be read again keeps its old content; the other files are read. */
static void reload(server *s) {
    hd_err keys = {0}, certificate = {0};
    if (server_reload_keys(s, &keys) == HD_OK) {
        hd_log_write(HD_LOG_INFO, "keys_reloaded", NULL, 0);
    } else {
        HD_LOG(HD_LOG_ERROR, "keys_not_reloaded", hd_log_text("why", keys.msg));
    }
    if (!server_speaks_tls(s)) return;
    if (server_reload_certificate(s, &certificate) == HD_OK) {
        hd_log_write(HD_LOG_INFO, "certificate_reloaded", NULL, 0);
    } else {
        HD_LOG(HD_LOG_ERROR, "certificate_not_reloaded", hd_log_text("why", certificate.msg));
    }
}

static void *follow_signals(void *user) {
    follower *f = user;
    const sigset_t set = followed_signals();
    for (int caught; sigwait(&set, &caught) == 0 && !atomic_load(&f->over);) {
        if (caught == SIGHUP) {
            reload(f->server);
        } else if (caught == SIGUSR1) {
            server_log_state(f->server);
        } else if (++f->n_stops > 1 || !atomic_load(&f->loaded)) {
            _exit(f->n_stops > 1 ? 130 : 0); /* a second signal, or still loading */
        } else {
            sem_post(&f->stop);
        }
    }
    return NULL;
}

/* A step that never ends would keep the process alive for ever. The settings are gone then. */
static void *give_up(void *health_s) {
    const struct timespec patience = {(intptr_t)health_s, 0};
    nanosleep(&patience, NULL);
    HD_LOG(HD_LOG_ERROR, "device_stuck", hd_log_int("exit", EXIT_RESTART_ME));
    _exit(EXIT_RESTART_ME);
}

static void give_up_later(const serve_settings *set) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, give_up, (void *)(intptr_t)set->health_s) == 0) {
        pthread_detach(thread);
    }
}

/* ---- the banner ---- */

/* Returns an address as it is written in a URL. */
static void bracket(char *out, size_t cap, const char *address) {
    snprintf(out, cap, strchr(address, ':') ? "[%s]" : "%s", address);
}

enum { BANNER_COLUMN = 13 };

/* A line of the banner; where it is wrapped, it goes on below its text. */
static void print_entry(screen *out, const char *name, const char *text) {
    out->indent = BANNER_COLUMN;
    screen_print(out, "  %-*s%s\n", BANNER_COLUMN - 2, name, text);
}

static void print_addresses(screen *out, const server *s) {
    enum { MAX_BYTES = 1000 };
    char text[MAX_BYTES] = "";
    const char *address;
    for (int32_t i = 0; (address = server_address(s, i)); i++) {
        const size_t n = strlen(text);
        char one[80];
        bracket(one, sizeof one, address);
        snprintf(text + n, sizeof text - n, "%s%s:%d", i ? ", " : "", one, server_port(s));
    }
    print_entry(out, "listens", text);
}

static void print_experts(screen *out, const hd_expert_figures *x) {
    const bool file = strcmp(x->source, "file") == 0, host = strcmp(x->source, "host") == 0;
    char text[160];
    snprintf(text, sizeof text, "%d of %d experts fit into memory, others are %s", x->slots,
             x->elsewhere,
             file   ? "read from disk"
             : host ? "copied from host memory"
                    : "copied from other ranks");
    print_entry(out, "experts", text);
}

static void print_engine(screen *out, hd_engine *engine) {
    hd_engine_stats e;
    char text[300], kv[32], weights[32];
    const char *no_gpu, *backend = hd_engine_backend(engine, &no_gpu);
    const char *path = hd_engine_cuda_path(engine);
    hd_engine_read_stats(engine, &e);
    snprintf(
        text, sizeof text,
        "%s%s%s; %d answers side by side, context %d tokens, KV %lld tokens (%s), weights %s",
        backend, path ? ", path " : "", path ? path : "", e.max_running, e.max_context,
        (long long)e.pages[HD_KV_FULL] * e.page_tokens,
        hd_bytes_text(kv, sizeof kv, (double)e.kv_bytes),
        hd_bytes_text(weights, sizeof weights, (double)e.weight_bytes));
    print_entry(out, "engine", text);
    if (e.hisparse.rows) {
        snprintf(text, sizeof text,
                 "%d entries of each layer on the device, all in %s of host "
                 "memory",
                 e.hisparse.rows, hd_bytes_text(kv, sizeof kv, (double)e.hisparse.host_bytes));
        print_entry(out, "hisparse", text);
    }
    if (e.experts.elsewhere) print_experts(out, &e.experts);
    if (no_gpu) print_entry(out, "no GPU", no_gpu);
}

/* "fast: activations of products in bfloat16". */
static void print_precision(screen *out, const char *name, const hd_engine *e) {
    hd_precision used, asked;
    hd_err err = {0};
    char text[200];
    const char *format = hd_engine_activations(e, &used);
    if (!format || hd_precision_of(&asked, name, &err) != HD_OK) return;
    if (asked == HD_AUTO) asked = used;
    snprintf(text, sizeof text, "%s%s: activations of products in %s",
             hd_precision_names[asked], used == asked ? "" : ", computed as exact", format);
    print_entry(out, "precision", text);
}

static void print_start(const serve_settings *set, server *s) {
    const char *scheme = set->certificate ? "https" : "http";
    const int32_t port = server_port(s);
    char host[300], text[400];
    screen out;
    screen_open(&out, stdout);
    bracket(host, sizeof host, set->host);
    screen_print(&out, "hadal %s serves %s at %s://%s:%d\n\n", HD_VERSION, set->model_name,
                 scheme, host, port);
    print_addresses(&out, s);
    print_engine(&out, server_engine(s));
    print_precision(&out, set->engine.options.precision, server_engine(s));
    print_entry(&out, "keys",
                server_has_keys(s)      ? "needed: Authorization: Bearer KEY"
                : server_is_loopback(s) ? "none needed; only this machine can reach it"
                                        : "NONE, and others can reach it");
    print_entry(&out, "sandbox", server_sandbox(s));
    snprintf(text, sizeof text, "%s://%s:%d/    metrics  /metrics    health  /health", scheme,
             host, port);
    print_entry(&out, "page", text);
    screen_end(&out);
    printf("\ncurl %s://%s:%d/v1/chat/completions -H 'Content-Type: application/json' \\\n"
           "  -d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is 347 + "
           "586?\"}]}'\n\n",
           scheme, host, port);
    printf("ready after %.3f s\n", (double)(hd_now_ns() - set->start_ns) * 1e-9);
    fflush(stdout);
}

/* ---- running ---- */

static void warn_of_root(const serve_settings *set) {
    if (geteuid() != 0 || set->user) return;
    HD_LOG(HD_LOG_WARN, "running_as_root", hd_log_text("advice", "--user NAME gives that up"));
}

static hd_status run(const serve_settings *set, const server_options *options,
                     serve_hosts *others, hd_err *err) {
    follower f = {0};
    pthread_t thread;
    const sigset_t waiting = waiting_signals(), signals = followed_signals();
    pthread_sigmask(SIG_BLOCK, &waiting, NULL);
    ignore_strays();
    sem_init(&f.stop, 0, 0);
    HD_TRY(server_open(&f.server, options, err));
    pthread_sigmask(SIG_BLOCK, &signals, NULL); /* for all threads that start later */
    if (pthread_create(&thread, NULL, follow_signals, &f) != 0) {
        server_close(f.server);
        return HD_FAIL(err, HD_EIO, "cannot start a thread");
    }
    hd_status st = server_start(f.server, err);
    if (st == HD_OK) {
        atomic_store(&f.loaded, true);
        serve_hosts_are_ready(others);
        print_start(set, f.server);
        warn_of_root(set);
        while (sem_wait(&f.stop) != 0) {
        }
        HD_LOG(HD_LOG_INFO, "draining", hd_log_int("seconds_at_most", set->drain_s));
        server_drain(f.server);
        if (!server_wait_idle(f.server, set->drain_s * 1000000000)) {
            hd_log_write(HD_LOG_WARN, "drain_cut_short", NULL, 0);
        }
        give_up_later(set);
    }
    atomic_store(&f.over, true); /* a canceled thread would be reported by sanitizers */
    pthread_kill(thread, SIGHUP);
    pthread_join(thread, NULL);
    server_close(f.server);
    sem_destroy(&f.stop);
    return st;
}

/* Every connection is a file descriptor. The process may raise the soft limit. */
static hd_status raise_file_limit(int64_t *connections, hd_err *err) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return HD_OK;
    const rlim_t wanted = (rlim_t)*connections + RESERVED_FILES;
    if (limit.rlim_cur < wanted) {
        limit.rlim_cur = limit.rlim_max < wanted ? limit.rlim_max : wanted;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (limit.rlim_cur >= wanted) return HD_OK;
    if (limit.rlim_cur < RESERVED_FILES + FEW_CONNECTIONS) {
        return HD_FAIL(err, HD_EIO, "only %llu files may be open; %d are needed (ulimit -n)",
                       (unsigned long long)limit.rlim_cur, RESERVED_FILES + FEW_CONNECTIONS);
    }
    *connections = (int64_t)limit.rlim_cur - RESERVED_FILES;
    HD_LOG(HD_LOG_WARN, "fewer_connections", hd_log_int("connections", *connections),
           hd_log_text("why", "limit of open files"));
    return HD_OK;
}

int cmd_serve(int argc, char **argv) {
    serve_settings set;
    int code;
    hd_err err = {0};
    if (!serve_settings_parse(&set, argc, argv, &code)) return code;
    hd_status st = raise_file_limit(&set.connections, &err);
    if (st == HD_OK) {
        upload_bar bar = {.quiet = !isatty(STDERR_FILENO)}; /* not into the log */
        server_options options = serve_settings_options(&set);
        options.engine.on_upload = upload_bar_draw;
        options.engine.on_upload_ctx = &bar;
        serve_hosts *others = NULL;
        st = serve_ranks_start(&set.ranks, argc, argv, &others, &err);
        if (st == HD_OK) {
            st = options.engine.world.rank ? serve_ranks_follow(&options, &err)
                                           : run(&set, &options, others, &err);
        }
        serve_hosts_close(others);
    }
    serve_settings_deinit(&set);
    return st == HD_OK ? 0 : report_error(&err);
}
