/* serve_ranks.h - flags of `hadal serve` for a rank in a process of its own, and its life if it
 * follows rank 0. */
#ifndef HD_CLI_SERVE_RANKS_H
#define HD_CLI_SERVE_RANKS_H

#include "cli/options.h"
#include "hadal.h"
#include "server/server.h"

typedef struct serve_ranks {
    int64_t rank, world, start_s;
    const char *rendezvous, *key_file;
    char *key; /* owned */
} serve_ranks;

serve_ranks serve_ranks_default(void);
void serve_ranks_list(serve_ranks *r, option_list *to);

/* Fills the options of an engine: by the flags, else by the environment of mpirun or srun. The
 * key comes from its file or from HADAL_RANK_KEY. */
hd_status serve_ranks_complete(serve_ranks *r, hd_world_options *out, hd_err *err);
void serve_ranks_deinit(serve_ranks *r);

/* Runs a rank other than 0 until rank 0 ends. The first SIGTERM or SIGINT waits for that. */
hd_status serve_ranks_follow(const server_options *options, hd_err *err);

#endif
