/* serve_ranks.h - ranks of `hadal serve` that are processes: the start of those on other hosts, and the
 * life of one that follows rank 0. */
#ifndef HD_CLI_SERVE_RANKS_H
#define HD_CLI_SERVE_RANKS_H

#include "cli/rank_options.h"
#include "cli/serving/serve_hosts.h"
#include "server/server.h"

/* Starts the other ranks if there is --hosts; *out is NULL without. argc, argv: of `serve`. */
hd_status serve_ranks_start(const rank_options *r, int argc, char **argv, serve_hosts **out,
                            hd_err *err);

/* Runs a rank other than 0 until rank 0 ends. The first SIGTERM or SIGINT waits for that. */
hd_status serve_ranks_follow(const server_options *options, hd_err *err);

#endif
