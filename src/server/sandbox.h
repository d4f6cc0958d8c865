/* sandbox.h - gives up what serving does not need, where the kernel lets us. */
#ifndef HD_SERVER_SANDBOX_H
#define HD_SERVER_SANDBOX_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

enum { SANDBOX_PATHS = 4 };

typedef struct sandbox_paths { /* NULLs are skipped */
    const char *read[SANDBOX_PATHS];
    const char *write[SANDBOX_PATHS]; /* directories */
    /* Files that are read again. A file that was replaced is another one, so the folders they
     * lie in are granted. */
    const char *reread[SANDBOX_PATHS];
} sandbox_paths;

/* For this thread and all that it starts later: no new privileges, files only at the paths and
 * where the system keeps its own, no new listening or outgoing TCP, no other programs, no
 * meddling with other processes or the kernel. said gets what was granted, in words. */
hd_status sandbox_enter(const sandbox_paths *paths, char *said, size_t said_size, hd_err *err);

#endif
