/* hub.h - models of a hub that speaks the Hugging Face API, and the cache they are kept in.
 *
 * The cache has the standard layout, shared with other programs:
 *   ROOT/models--ORG--NAME/blobs/DIGEST             the bytes of every file, by what they are
 *   ROOT/models--ORG--NAME/snapshots/COMMIT/FILE    links to blobs, one folder per commit
 *   ROOT/models--ORG--NAME/refs/REVISION            the commit that a branch or tag stood for
 * A blob gets its name, a link its place and a reference its text only when they are complete. */
#ifndef HD_HUB_HUB_H
#define HD_HUB_HUB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { HUB_NAME_BYTES = 256 };

typedef struct hub_name {
    char repo[HUB_NAME_BYTES];     /* "deepseek-ai/DeepSeek-V2-Lite" */
    char revision[HUB_NAME_BYTES]; /* a branch, a tag or a commit; "main" if none is given */
} hub_name;

/* Parses ORG/NAME or ORG/NAME@REVISION. HD_EINVAL: it is neither. */
hd_status hub_name_parse(hub_name *out, const char *text, hd_err *err);

/* The folder of a snapshot in the cache at root, malloc'ed; NULL: there is none. */
char *hub_cache_find(const char *root, const hub_name *name);

/* "ORG/NAME" of a folder inside such a cache, malloc'ed; NULL: path is no snapshot. */
char *hub_cache_repo_of(const char *path);

typedef struct hub_options {
    const char *endpoint; /* "https://huggingface.co" */
    const char *cache;    /* ROOT */
    const char *token;    /* sent to the endpoint's own origin alone; NULL: none */
    const char *ca_file;  /* PEM bundle to verify servers with; NULL: the system's */
    int32_t parallel;     /* files at once, 1 to 64 */
    int32_t stall_s;      /* a connection without a byte for so long is made again */
    int32_t retries;      /* failures of one file in a row, without a byte between them */
    bool all;             /* every file of the repository, not only what a model needs */
    bool verify;          /* read and check files that are there already */
    void (*on_plan)(void *user, int32_t files, int64_t bytes, int64_t there_bytes);
    void (*on_progress)(void *user, int64_t done_bytes);
    void (*on_note)(void *user, const char *text); /* a retry, a wait; one line */
    void *user;
} hub_options;

/* Downloads what is missing of name. *snapshot is the malloc'ed folder. What was received before a
 * failure is kept and continued by the next call. HD_EINVAL: no such model, or no access to it;
 * HD_EFORMAT: the hub's answers or bytes are not what they claim to be; HD_EIO: the network or
 * the disk. */
hd_status hub_pull(char **snapshot, const hub_name *name, const hub_options *o, hd_err *err);

#endif
