/* hub_internal.h - names, listings, digests and transfers, shared by the files of src/hub. */
#ifndef HD_HUB_HUB_INTERNAL_H
#define HD_HUB_HUB_INTERNAL_H

#include <curl/curl.h>
#include <gnutls/crypto.h>
#include <jansson.h>

#include "hub/hub.h"

/* ---- name.c ---- */

/* Returns whether it is a relative path inside its folder, without control characters. */
bool hub_path_is_plain(const char *path);
bool hub_is_hex(const char *text, size_t n); /* text is n small hexadecimal digits */
/* text with everything but letters, digits and -._~ escaped; slashes too unless keep_slashes.
 * malloc'ed, NULL without memory. */
char *hub_escape(const char *text, bool keep_slashes);

/* ---- digest.c ---- */

typedef enum hub_digest_kind {
    HUB_NO_DIGEST, /* not known yet */
    HUB_SHA256,    /* of the bytes */
    HUB_GIT_SHA1   /* of git's header of a blob and the bytes */
} hub_digest_kind;

enum { HUB_HEX_BYTES = 65 };

/* Returns the kind by the number of digits; HUB_NO_DIGEST: text is no digest. */
hub_digest_kind hub_digest_kind_of(const char *text);

typedef struct hub_digest {
    gnutls_hash_hd_t state; /* NULL: not begun */
} hub_digest;

hd_status hub_digest_begin(hub_digest *d, hub_digest_kind kind, int64_t bytes, hd_err *err);
hd_status hub_digest_add(hub_digest *d, const void *bytes, size_t n, hd_err *err);
void hub_digest_end(hub_digest *d, hub_digest_kind kind, char hex[HUB_HEX_BYTES]);
void hub_digest_deinit(hub_digest *d); /* again does nothing */

/* ---- listing.c ---- */

typedef struct hub_file {
    char *path;                 /* as the repository names it; checked by hub_path_is_plain() */
    int64_t bytes;              /* -1: not listed */
    char digest[HUB_HEX_BYTES]; /* "" while its kind is HUB_NO_DIGEST */
    hub_digest_kind kind;
} hub_file;

typedef struct hub_listing {
    char commit[41];
    hub_file *files; /* [n] */
    int32_t n;
} hub_listing;

/* Parses the reply to /api/models/REPO/revision/REVISION?blobs=true; `what` names it in
 * errors. */
hd_status hub_listing_parse(hub_listing *out, const char *text, size_t n, const char *what,
                            hd_err *err);
void hub_listing_deinit(hub_listing *l);

/* Keeps the files that a model needs: JSON, safetensors, tokenizer and chat template of the
 * repository's own folder. HD_EINVAL: none of them can be loaded. */
hd_status hub_listing_select(hub_listing *l, const char *repo, hd_err *err);

/* ---- cache.c ---- */

/* Paths are malloc'ed, NULL without memory. */
char *hub_cache_path(const char *root, const char *repo, const char *kind, const char *name);
hd_status hub_make_folders(const char *file, hd_err *err); /* all above the file */
hd_status hub_cache_link(const char *root, const char *repo, const char *commit,
                         const hub_file *f, hd_err *err);
hd_status hub_cache_refer(const char *root, const hub_name *name, const char *commit,
                          hd_err *err);

/* ---- transfer.c: one download ---- */

typedef struct hub_job hub_job;

/* Receives the bytes of a download. */
typedef struct hub_sink {
    /* Before every attempt: *from is the first byte to request. HD_EAGAIN: call again after
     * job->wait_ns. Sets job->over if nothing is to be downloaded. */
    hd_status (*begin)(hub_job *job, int64_t *from, hd_err *err);
    hd_status (*restart)(hub_job *job, hd_err *err); /* the server begins at byte 0 */
    hd_status (*take)(hub_job *job, const char *bytes, size_t n, hd_err *err);
    /* All bytes are there. HD_EAGAIN: they were wrong and are requested again, from byte 0. */
    hd_status (*end)(hub_job *job, hd_err *err);
} hub_sink;

typedef enum hub_outcome {
    HUB_DONE,
    HUB_REDIRECTED, /* job->url is the redirect's target */
    HUB_TRY_AGAIN,  /* after job->wait_ns if that is set; err says what happened */
    HUB_FAILED
} hub_outcome;

typedef enum hub_job_state {
    HUB_JOB_WAITING,
    HUB_JOB_ACTIVE,  /* running, but without a connection */
    HUB_JOB_RUNNING, /* has a connection */
    HUB_JOB_FINISHED
} hub_job_state;

struct hub_job {
    const hub_sink *sink;
    const char *what; /* named in messages */
    char *home;       /* URL at the endpoint, owned */
    int64_t bytes;    /* expected; -1: unknown */
    bool head;        /* only the headers are wanted */
    bool over;        /* nothing remains to be done */

    /* of the current attempt */
    const hub_options *options;
    CURL *easy;
    char *url; /* owned */
    struct curl_slist *headers;
    int64_t from, got; /* first byte asked for; bytes taken since */
    int redirects;
    bool body_begun;
    hd_err err;
    char range_reply[64], reply[200], etag[HUB_HEX_BYTES]; /* of the reply's headers */
    int64_t linked_bytes;

    /* of all attempts */
    hub_job_state state;
    int failures;    /* consecutive, without a byte between them */
    int64_t due_ns;  /* not before */
    int64_t wait_ns; /* requested by the sink or the server */
};

bool hub_is_endpoint(const char *url);              /* http or https, with a host */
hd_status hub_job_start(hub_job *job, hd_err *err); /* sets up job->easy for job->url */
hub_outcome hub_job_finish(hub_job *job, CURLcode code);
void hub_job_rest(hub_job *job); /* closes its connection and what belongs to an attempt */
void hub_job_deinit(hub_job *job);

/* ---- jobs.c ---- */

/* Runs all jobs, options->parallel at once, with retries. The first failure ends it. */
hd_status hub_run(hub_job *const *jobs, int32_t n, const hub_options *o, hd_err *err);

/* ---- blob.c: a job that fills one blob of the cache ---- */

typedef struct hub_blob {
    hub_job job; /* first: the sink casts */
    const hub_file *file;
    char *path, *partial, *lock_path;
    int fd, lock_fd;     /* -1: closed */
    int64_t kept;        /* bytes of the file on disk */
    int64_t hashed;      /* bytes of them that are hashed */
    int64_t counted;     /* bytes that are part of *done_bytes */
    int64_t *done_bytes; /* of all blobs, for the progress bar */
    hub_digest digest;
    bool verifying;     /* fd is the finished blob */
    bool again, waited; /* downloaded a second time; another program held the lock */
} hub_blob;

/* Takes ownership of url, also after a failure. Adds the existing bytes to *done_bytes. */
hd_status hub_blob_open(hub_blob *b, const hub_file *f, const hub_name *name, char *url,
                        const hub_options *o, int64_t *done_bytes, hd_err *err);
void hub_blob_close(hub_blob *b);

#endif
