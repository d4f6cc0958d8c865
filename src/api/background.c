/* background.c - see background.h: a list of running background jobs and the streams that
 * follow them. Jobs are added on HTTP threads; the polling thread writes their events and
 * removes them. */
#define _GNU_SOURCE /* memmem */
#include "api/background.h"

#include <stdlib.h>
#include <string.h>

enum { FOLLOWERS = 16 }; /* followers of one response; further ones are told to retry */

typedef struct running {
    struct running *next;
    api_job *job;
    uint64_t salt;
    bool forgotten;
    /* events of a stream so far, and their bytes that count as unread; failed: they are not
     * kept */
    api_text events;
    size_t n_held;
    http_call *followers[FOLLOWERS];
    size_t n_followers;
} running;

struct api_background {
    pthread_mutex_t lock; /* guards the fields below */
    running *first;
    size_t n;
};

api_background *api_background_open(void) {
    api_background *b = calloc(1, sizeof *b);
    if (b && pthread_mutex_init(&b->lock, NULL) != 0) {
        free(b);
        return NULL;
    }
    return b;
}

void api_background_close(api_background *b) {
    if (!b) return;
    pthread_mutex_destroy(&b->lock);
    free(b);
}

size_t api_background_count(api_background *b) {
    pthread_mutex_lock(&b->lock);
    const size_t n = b->n;
    pthread_mutex_unlock(&b->lock);
    return n;
}

void api_background_cancel_all(api_background *b) {
    pthread_mutex_lock(&b->lock);
    for (running *r = b->first; r; r = r->next) api_job_cancel(r->job);
    pthread_mutex_unlock(&b->lock);
}

/* ---- called by the job ---- */

static running **link_of(api_background *b, const api_job *job) {
    running **link = &b->first;
    while (*link && (*link)->job != job) link = &(*link)->next;
    return link;
}

bool api_background_add(api_background *b, api_job *job) {
    running *r = calloc(1, sizeof *r);
    if (!r) return false;
    r->job = job;
    r->salt = http_salt(job->call);
    pthread_mutex_lock(&b->lock);
    r->next = b->first;
    b->first = r;
    b->n++;
    pthread_mutex_unlock(&b->lock);
    return true;
}

static void drop_follower(running *r, size_t i) {
    http_stream_end(r->followers[i]);
    http_release(r->followers[i]);
    r->followers[i] = r->followers[--r->n_followers];
}

/* Without memory, or beyond the limit on unread replies, no events are kept: the response goes
 * on, but cannot be followed from now on. */
static void keep(running *r, const char *bytes, size_t n) {
    http_call *c = r->job->call;
    if (r->events.failed) return;
    api_put(&r->events, bytes, n);
    const size_t more = r->events.cap - r->n_held;
    if (!r->events.failed && (more == 0 || http_hold(c, more))) {
        r->n_held += more;
        return;
    }
    http_let_go(c, r->n_held);
    r->n_held = 0;
    api_text_deinit(&r->events);
    r->events.failed = true;
}

void api_background_write(api_background *b, const api_job *job, const char *bytes, size_t n) {
    pthread_mutex_lock(&b->lock);
    running *r = *link_of(b, job);
    keep(r, bytes, n);
    for (size_t i = r->n_followers; i-- > 0;) {
        if (!http_stream_write(r->followers[i], bytes, n)) drop_follower(r, i);
    }
    pthread_mutex_unlock(&b->lock);
}

bool api_background_forgotten(api_background *b, const api_job *job) {
    pthread_mutex_lock(&b->lock);
    const running *r = *link_of(b, job);
    const bool forgotten = r && r->forgotten;
    pthread_mutex_unlock(&b->lock);
    return forgotten;
}

void api_background_remove(api_background *b, api_job *job, api_store *store) {
    pthread_mutex_lock(&b->lock);
    running **link = link_of(b, job), *r = *link;
    if (r) {
        api_store_attach(store, job->id, r->salt, &r->events);
        http_let_go(job->call, r->n_held);
        while (r->n_followers) drop_follower(r, r->n_followers - 1);
        *link = r->next;
        b->n--;
    }
    pthread_mutex_unlock(&b->lock);
    if (r) api_text_deinit(&r->events);
    free(r);
}

/* ---- called by other requests ---- */

/* Forgotten responses are not found again. */
static running *find(const api_background *b, const char *id, uint64_t salt) {
    running *r = b->first;
    while (r && (r->forgotten || r->salt != salt || strcmp(r->job->id, id) != 0)) r = r->next;
    return r;
}

bool api_background_cancel(api_background *b, const char *id, uint64_t salt, bool forget) {
    pthread_mutex_lock(&b->lock);
    running *r = find(b, id, salt);
    if (r) {
        r->forgotten = r->forgotten || forget;
        api_job_cancel(r->job);
    }
    pthread_mutex_unlock(&b->lock);
    return r != NULL;
}

size_t api_events_behind(const api_text *events, size_t n) {
    size_t at = 0;
    for (; n > 0 && at < events->n; n--) {
        const char *end = memmem(events->data + at, events->n - at, "\n\n", 2);
        at = end ? (size_t)(end - events->data) + 2 : events->n;
    }
    return at;
}

bool api_background_follow(api_background *b, const char *id, uint64_t salt, size_t n_seen,
                           http_call *c) {
    pthread_mutex_lock(&b->lock);
    running *r = find(b, id, salt);
    if (r && !r->job->w.stream) r = NULL; /* a response without stream has no events */
    if (r && r->events.failed) {
        http_error(c, 503, "overloaded_error", "out_of_memory", NULL,
                   "no room for the events of this response: others have not read theirs yet");
    } else if (r && r->n_followers < FOLLOWERS) {
        const size_t at = api_events_behind(&r->events, n_seen);
        http_retain(c);
        http_stream_begin(c);
        if (at < r->events.n) http_stream_write(c, r->events.data + at, r->events.n - at);
        r->followers[r->n_followers++] = c;
    } else if (r) {
        http_error(c, 503, "overloaded_error", "too_many_followers", NULL,
                   "too many follow this response already");
    }
    pthread_mutex_unlock(&b->lock);
    return r != NULL;
}
