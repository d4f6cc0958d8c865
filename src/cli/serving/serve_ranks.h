/* serve_ranks.h - flags of commands for a rank in a process of its own, and its life if it
 * follows rank 0. */
#ifndef HD_CLI_SERVE_RANKS_H
#define HD_CLI_SERVE_RANKS_H

#include "cli/options.h"
#include "cli/serving/serve_hosts.h"
#include "hadal.h"
#include "server/server.h"

typedef struct serve_ranks {
    int64_t rank, world, start_s;
    const char *rendezvous, *key_file, *hosts;
    char *key; /* owned */
} serve_ranks;

serve_ranks serve_ranks_default(void);
void serve_ranks_list(serve_ranks *r, option_list *to);
void serve_ranks_list_hosts(serve_ranks *r, option_list *to); /* --hosts */

/* Fills engine->world: by the flags, else by the environment of mpirun or srun. The key comes from its
 * file or from HADAL_RANK_KEY; with --hosts it is drawn if there is none. */
hd_status serve_ranks_complete(serve_ranks *r, hd_engine_options *engine, hd_err *err);

/* Starts the other ranks if there is --hosts; *out is NULL without. argc, argv: of `serve`. */
hd_status serve_ranks_start(const serve_ranks *r, int argc, char **argv, serve_hosts **out,
                            hd_err *err);
void serve_ranks_deinit(serve_ranks *r);

/* Runs a rank other than 0 until rank 0 ends. The first SIGTERM or SIGINT waits for that. */
hd_status serve_ranks_follow(const server_options *options, hd_err *err);

#endif
