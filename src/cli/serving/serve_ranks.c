/* serve_ranks.c - see serve_ranks.h. */
#include "cli/serving/serve_ranks.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/log.h"
#include "server/follow.h"

hd_status serve_ranks_start(const rank_options *r, int argc, char **argv, serve_hosts **out,
                            hd_err *err) {
    *out = NULL;
    if (!r->hosts || !r->hosts[0]) return HD_OK;
    const serve_hosts_args args = {.argc = argc,
                                   .argv = argv,
                                   .hosts = r->hosts,
                                   .n_ranks = (int32_t)r->world,
                                   .rendezvous = r->rendezvous,
                                   .key = r->key};
    return serve_hosts_start(out, &args, err);
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
