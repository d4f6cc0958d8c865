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

/* Parses ORG/NAME or ORG/NAME@REVISION. HD_EINVAL: invalid. */
hd_status hub_name_parse(hub_name *out, const char *text, hd_err *err);

/* Returns the folder of a snapshot in the cache at root, malloc'ed; NULL: not found. */
char *hub_cache_find(const char *root, const hub_name *name);

/* Returns "ORG/NAME" of a folder inside such a cache, malloc'ed; NULL: path is not a
 * snapshot. */
char *hub_cache_repo_of(const char *path);

typedef struct hub_options {
    const char *endpoint; /* "https://huggingface.co" */
    const char *cache;    /* ROOT */
    const char *token;    /* sent only to the endpoint's own origin; NULL: none */
    const char *ca_file;  /* PEM bundle to verify servers; NULL: the system's */
    int32_t parallel;     /* concurrent downloads, 1 to 64 */
    int32_t stall_s;      /* a connection that receives nothing for this long is reopened */
    int32_t retries;      /* consecutive failures of one file without progress */
    bool all;             /* every file of the repository, not only what a model needs */
    bool verify;          /* also read and verify files that exist already */
    void (*on_plan)(void *user, int32_t files, int64_t bytes, int64_t there_bytes);
    void (*on_progress)(void *user, int64_t done_bytes);
    /* receives one line about a retry or a wait */
    void (*on_note)(void *user, const char *text);
    void *user;
} hub_options;

/* Downloads the missing files of name. *snapshot is the malloc'ed folder. What was received
 * before a failure is kept, and the next call resumes it. HD_EINVAL: no such model, or no
 * access to it; HD_EFORMAT: invalid replies or digests of the hub; HD_EIO: the network or
 * the disk. */
hd_status hub_pull(char **snapshot, const hub_name *name, const hub_options *o, hd_err *err);

#endif
