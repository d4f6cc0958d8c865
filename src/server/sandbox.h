/* sandbox.h - restricts the process to what serving needs, with Landlock and seccomp if the
 * kernel has them. */
#ifndef HD_SERVER_SANDBOX_H
#define HD_SERVER_SANDBOX_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct sandbox_paths { /* NULL paths are skipped */
    const char *read[3];       /* directories or files */
    const char *write[5];      /* directories */
    /* Files that are read again later. A replaced file is a new one, so access is granted to
     * their folders. */
    const char *reread[4];
    bool ranks;    /* TCP and abstract sockets, by which ranks reach each other, stay allowed */
    bool connects; /* TCP stays allowed: to other servers */
} sandbox_paths;

/* Restricts this thread and all threads that it starts later. Forbidden are new privileges,
 * files outside the paths and the system's folders, new listening or outgoing TCP, other
 * programs, and access to other processes or the kernel. said receives a description of what
 * was restricted. */
hd_status sandbox_enter(const sandbox_paths *paths, char *note, size_t note_size, hd_err *err);

#endif
