/* follow.h - a process with a rank that follows: what it has of a server are the user, the sandbox
 * and the engine, and no HTTP. */
#ifndef HD_SERVER_FOLLOW_H
#define HD_SERVER_FOLLOW_H

#include "server/server.h"

/* Opens the rank of o->engine.world, calls started, and returns when rank 0 has closed its
 * engine (HD_OK) or a rank was lost (HD_EPEER). */
hd_status server_follow(const server_options *o, void (*started)(void *user), void *user,
                        hd_err *err);

#endif
