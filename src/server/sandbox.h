/* sandbox.h - gives up what serving does not need, where the kernel lets us. */
#ifndef HD_SERVER_SANDBOX_H
#define HD_SERVER_SANDBOX_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct sandbox_paths { /* NULLs are skipped */
    const char *read[2];       /* directories or files */
    const char *write;         /* a directory */
    /* Files that are read again. A file that was replaced is another one, so the folders they
     * lie in are granted. */
    const char *reread[4];
} sandbox_paths;

/* For this thread and all that it starts later: no new privileges, files only at the paths and
 * where the system keeps its own, no new listening or outgoing TCP, no other programs, no
 * meddling with other processes or the kernel. said gets what was granted, in words. */
hd_status sandbox_enter(const sandbox_paths *paths, char *note, size_t note_size, hd_err *err);

#endif
