/* serve_hosts.h - starts the other ranks of `hadal serve --hosts A,B,...`: on this host as
 * processes, on other hosts by ssh (docs/ranks.md).
 *
 * The first name is this host. The ranks lie in equal runs over the hosts. Every host has the
 * program, the model and the working folder at the same paths. The ranks' secret goes through the
 * standard input of a process, never through its arguments. */
#ifndef HD_CLI_SERVE_HOSTS_H
#define HD_CLI_SERVE_HOSTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct serve_hosts_args {
    int argc; /* of the command; the first word is its name */
    char **argv;
    const char *hosts; /* comma between */
    int32_t n_ranks;
    const char *rendezvous, *key;
} serve_hosts_args;

typedef struct serve_hosts serve_hosts;

/* Starts ranks 1 .. n_ranks - 1. If one ends before serve_hosts_are_ready(), the process says which and
 * ends. SIGINT of a terminal reaches rank 0 alone, which ends the others. */
hd_status serve_hosts_start(serve_hosts **out, const serve_hosts_args *args, hd_err *err);
void serve_hosts_are_ready(serve_hosts *h); /* NULL is fine */
/* Waits until the others have ended; stops them if they were never ready. NULL is fine. */
void serve_hosts_close(serve_hosts *h);

#endif
