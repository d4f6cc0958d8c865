/* rank_options.h - flags of a command for a rank in a process of its own. */
#ifndef HD_CLI_RANK_OPTIONS_H
#define HD_CLI_RANK_OPTIONS_H

#include "cli/options.h"
#include "hadal.h"

typedef struct rank_options {
    int64_t rank, world, start_s;
    const char *rendezvous, *key_file, *hosts;
    char *key; /* owned */
} rank_options;

rank_options rank_options_default(void);
void rank_options_list(rank_options *r, option_list *to);
void rank_options_list_hosts(rank_options *r, option_list *to); /* --hosts */

/* Fills engine->world: by the flags, else by the environment of mpirun or srun. The key comes from its
 * file or from HADAL_RANK_KEY; with --hosts it is drawn if there is none. */
hd_status rank_options_complete(rank_options *r, hd_engine_options *engine, hd_err *err);
void rank_options_deinit(rank_options *r);

#endif
