/* rank_options.c - see rank_options.h. */
#include "cli/rank_options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/log.h"
#include "cli/secret_key.h"
#include "comm/rendezvous.h"

enum { MAX_WORLD = 64 };

rank_options rank_options_default(void) {
    return (rank_options){.rank = -1, .start_s = 60};
}

void rank_options_list(rank_options *r, option_list *to) {
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

void rank_options_list_hosts(rank_options *r, option_list *to) {
    const option hosts =
        option_text("hosts", &r->hosts, "HOST,HOST,...",
                    "starts all ranks on these hosts, by ssh; this host is the first");
    option_list_add(to, &hosts, 1);
}

static bool has_hosts(const rank_options *r) {
    return r->hosts && r->hosts[0];
}

/* As many processes as the layout has ranks; this one is rank 0. */
static hd_status complete_hosts(rank_options *r, const hd_engine_options *o, hd_err *err) {
    const int32_t all = hd_max_i32(o->tp, 1) * hd_max_i32(o->cp, 1) * hd_max_i32(o->dp, 1);
    if (r->rank >= 0) return HD_FAIL(err, HD_EINVAL, "--hosts starts all ranks: no --rank");
    if (strchr(r->hosts, ',') && o->backend && strcmp(o->backend, "cuda") == 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "--hosts of several hosts with --backend cuda: no rows of GPUs travel "
                       "between two hosts");
    }
    if (strchr(r->hosts, ',') && !r->rendezvous) {
        return HD_FAIL(
            err, HD_EINVAL,
            "--hosts needs --meet HOST:PORT: an address of this host that the others "
            "reach, and a free port");
    }
    r->rank = 0;
    r->world =
        o->layout ? o->ranks : hd_max_i32(all, hd_max_i32(o->ep, 1) * hd_max_i32(o->dwdp, 1));
    return HD_OK;
}

/* Processes that a launcher has started make as many attention groups as there are, where no --dp says how many. */
static void count_groups(const rank_options *r, hd_engine_options *o) {
    const int32_t each = hd_max_i32(o->tp, 1) * hd_max_i32(o->cp, 1), ep = hd_max_i32(o->ep, 1);
    if (o->dp > 0 || o->cp < 0 || o->layout || o->dwdp > 1 || each * ep == 1) return;
    if (r->world > hd_max_i32(each, ep) && r->world % each == 0 && r->world % ep == 0) {
        o->dp = (int32_t)r->world / each;
    }
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

static void name_rank(int32_t rank) {
    char host[65] = "";
    gethostname(host, sizeof host - 1);
    hd_log_name_rank(rank, host);
}

hd_status rank_options_complete(rank_options *r, hd_engine_options *engine, hd_err *err) {
    hd_world_options *out = &engine->world;
    int32_t rank, world;
    if ((r->rank < 0) != (r->world == 0)) {
        return HD_FAIL(err, HD_EINVAL, "--rank and --world go together");
    }
    if (r->hosts && !r->hosts[0] && r->rank < 0) { /* ranks that were started have it, too */
        return HD_FAIL(err, HD_EINVAL, "--hosts names no host");
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
    count_groups(r, engine);
    HD_TRY(secret_key_read(&r->key, r->key_file, "HADAL_RANK_KEY", "ranks", err));
    if (has_hosts(r) && !r->key) HD_TRY(draw_key(&r->key, err));
    out->rank = (int32_t)r->rank;
    out->size = (int32_t)r->world;
    out->rendezvous = r->rendezvous;
    out->key = r->key;
    out->start_seconds = (int32_t)r->start_s;
    if (out->size > 1) name_rank(out->rank);
    return HD_OK;
}

void rank_options_deinit(rank_options *r) {
    free(r->key);
}
