/* posts.h - JSON bodies that are posted to a server, some at once, with bounded retries, time and
 * replies. Proxies of the environment are not used, and redirects are not followed. */
#ifndef HD_CLI_TRAINING_POSTS_H
#define HD_CLI_TRAINING_POSTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct posts posts;

typedef struct posts_options {
    const char *option; /* that gave the URL, for errors */
    const char *url;    /* http(s)://... */
    double timeout_s;   /* of a reply */
    size_t most_bytes;  /* of a reply */
} posts_options;

hd_status posts_open(posts **out, const posts_options *o, hd_err *err);
void posts_close(posts *p); /* NULL is fine */

/* What is asked, and what becomes of it; ctx is the caller's. */
typedef struct posts_job {
    void *ctx;
    int32_t n;
    const char *(*body)(void *ctx, int32_t i); /* lives until the job ends */
    /* Reads a reply of status 200; a failure's reason goes to *why. */
    hd_status (*reply)(void *ctx, int32_t i, const char *text, size_t n, hd_err *why);
    /* After a failed try: *again false, or the pause before the next try; or the job ends. */
    hd_status (*failed)(void *ctx, int32_t i, const char *why, bool *again, int64_t *pause_ns,
                        hd_err *err);
} posts_job;

/* Posts all bodies and waits for the replies. path is appended to the URL. */
hd_status posts_run(posts *p, const char *path, const posts_job *job, hd_err *err);

/* The pause after so many failed tries: 50 ms, doubled each time, to 6.4 s. */
int64_t posts_pause_ns(int32_t tries);

#endif
