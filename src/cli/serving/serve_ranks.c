/* serve_ranks.c - see serve_ranks.h. */
#include "cli/serving/serve_ranks.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/log.h"
#include "cli/serving/serve_key.h"
#include "comm/rendezvous.h"
#include "server/follow.h"

enum { MAX_WORLD = 64 };

/* ---- flags ---- */

serve_ranks serve_ranks_default(void) {
    return (serve_ranks){.rank = -1, .start_s = 60};
}

void serve_ranks_list(serve_ranks *r, option_list *to) {
    const option options[] = {
        option_int("rank", &r->rank, -1, MAX_WORLD - 1,
                   "which rank this process is; 0 leads; -1: as mpirun or srun says"),
        option_int("world", &r->world, 0, MAX_WORLD,
                   "processes, one per rank; 0: as mpirun or srun says, else threads"),
        option_text("meet", &r->rendezvous, "HOST:PORT",
                    "where rank 0 waits for the others; default " HD_WORLD_RENDEZVOUS),
        option_text("rank-key-file", &r->key_file, "FILE",
                    "secret of all ranks, needed off the loopback interface"),
        option_int("start-seconds", &r->start_s, 1, 86400,
                   "longest wait for the other ranks; default 60"),
    };
    option_list_add(to, options, HD_LEN(options));
}

void serve_ranks_list_hosts(serve_ranks *r, option_list *to) {
    const option hosts =
        option_text("hosts", &r->hosts, "HOST,HOST,...",
                    "starts all ranks on these hosts, by ssh; this host is the first");
    option_list_add(to, &hosts, 1);
}

static bool has_hosts(const serve_ranks *r) {
    return r->hosts && r->hosts[0];
}

/* As many processes as the layout has ranks; this one is rank 0. */
static hd_status complete_hosts(serve_ranks *r, const hd_engine_options *o, hd_err *err) {
    const int32_t all = hd_max_i32(o->tp, 1) * hd_max_i32(o->cp, 1) * hd_max_i32(o->dp, 1);
    if (r->rank >= 0) return HD_FAIL(err, HD_EINVAL, "--hosts starts all ranks: no --rank");
    if (strchr(r->hosts, ',') && !r->rendezvous) {
        return HD_FAIL(
            err, HD_EINVAL,
            "--hosts needs --meet HOST:PORT: an address of this host that the others "
            "reach, and a free port");
    }
    r->rank = 0;
    r->world = o->layout ? o->ranks : hd_max_i32(all, o->ep);
    return HD_OK;
}

static hd_status draw_key(char **out, hd_err *err) {
    enum { BYTES = 32 };
    uint8_t bytes[BYTES];
    *out = malloc(2 * BYTES + 1);
    if (!*out || getrandom(bytes, BYTES, 0) != BYTES) {
        return HD_FAIL(err, HD_EIO, "cannot draw a secret of the ranks");
    }
    for (int i = 0; i < BYTES; i++) snprintf(*out + 2 * i, 3, "%02x", bytes[i]);
    return HD_OK;
}

hd_status serve_ranks_complete(serve_ranks *r, hd_engine_options *engine, hd_err *err) {
    hd_world_options *out = &engine->world;
    int32_t rank, world;
    if ((r->rank < 0) != (r->world == 0)) {
        return HD_FAIL(err, HD_EINVAL, "--rank and --world go together");
    }
    if (has_hosts(r)) {
        HD_TRY(complete_hosts(r, engine, err));
    } else if (r->rank < 0 && hd_rendezvous_from_environment(&rank, &world) && world > 1) {
        r->rank = rank;
        r->world = world;
        out->job = hd_rendezvous_job();
    }
    if (r->world == 0) {
        if (!r->rendezvous && !r->key_file) return HD_OK;
        return HD_FAIL(err, HD_EINVAL, "--%s is for ranks in processes: --rank and --world",
                       r->rendezvous ? "meet" : "rank-key-file");
    }
    if (r->rank >= r->world) {
        return HD_FAIL(err, HD_EINVAL, "--rank %d of --world %d: ranks are 0 to %d",
                       (int)r->rank, (int)r->world, (int)r->world - 1);
    }
    HD_TRY(serve_key_read(&r->key, r->key_file, "HADAL_RANK_KEY", "ranks", err));
    if (has_hosts(r) && !r->key) HD_TRY(draw_key(&r->key, err));
    out->rank = (int32_t)r->rank;
    out->size = (int32_t)r->world;
    out->rendezvous = r->rendezvous;
    out->key = r->key;
    out->start_seconds = (int32_t)r->start_s;
    return HD_OK;
}

hd_status serve_ranks_start(const serve_ranks *r, int argc, char **argv, serve_hosts **out,
                            hd_err *err) {
    *out = NULL;
    if (!has_hosts(r)) return HD_OK;
    const serve_hosts_args args = {.argc = argc,
                                   .argv = argv,
                                   .hosts = r->hosts,
                                   .n_ranks = (int32_t)r->world,
                                   .rendezvous = r->rendezvous,
                                   .key = r->key};
    return serve_hosts_start(out, &args, err);
}

void serve_ranks_deinit(serve_ranks *r) {
    free(r->key);
}

/* ---- following ---- */

typedef struct following {
    int32_t rank;
    atomic_bool started, over;
} following;

static sigset_t stops(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    return set;
}

static void *await_stops(void *user) {
    following *f = user;
    const sigset_t set = stops();
    int n = 0;
    for (int caught; sigwait(&set, &caught) == 0 && !atomic_load(&f->over);) {
        if (++n > 1 || !atomic_load(&f->started)) _exit(n > 1 ? 130 : 0);
        HD_LOG(HD_LOG_INFO, "rank_waits", hd_log_int("rank", f->rank),
               hd_log_text("for", "rank 0 to end; a second signal ends this one at once"));
    }
    return NULL;
}

static void say_started(void *user) {
    following *f = user;
    atomic_store(&f->started, true);
    HD_LOG(HD_LOG_INFO, "rank_follows", hd_log_int("rank", f->rank));
}

hd_status serve_ranks_follow(const server_options *options, hd_err *err) {
    following f = {.rank = options->engine.world.rank};
    const sigset_t set = stops();
    pthread_t thread;
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* for all threads */
    signal(SIGHUP, SIG_IGN);
    if (pthread_create(&thread, NULL, await_stops, &f) != 0) {
        return HD_FAIL(err, HD_EIO, "cannot start a thread");
    }
    const hd_status st = server_follow(options, say_started, &f, err);
    atomic_store(&f.over, true); /* a canceled thread would be reported by sanitizers */
    pthread_kill(thread, SIGINT);
    pthread_join(thread, NULL);
    return st;
}
