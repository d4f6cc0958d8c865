/* jobs.c - runs concurrent downloads on one thread: starts, retries and delays them. A job that
 * waits (for a retry, a lock, or to hash) still counts as running. If a server requests a
 * delay, all jobs wait, because it is the same server. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/progress.h"
#include "hub/hub_internal.h"

enum { MOST_WAIT_S = 600, MOST_POLL_MS = 1000, MOST_DOUBLINGS = 7 };

static const int64_t SECOND_NS = 1000000000, FIRST_WAIT_NS = 250000000;

typedef struct run {
    const hub_options *o;
    CURLM *multi;
    hub_job *const *jobs; /* [n] */
    int32_t n, first;     /* all jobs before `first` are finished */
    int32_t n_active;     /* running ones */
    int64_t quiet_until_ns;
    hd_err *err;
} run;

static void finish(run *r, hub_job *job) {
    job->state = HUB_JOB_FINISHED;
    r->n_active--;
    hub_job_rest(job); /* many files do not keep as many connections */
}

static hd_status start(run *r, hub_job *job) {
    HD_TRY(hub_job_start(job, r->err));
    if (curl_multi_add_handle(r->multi, job->easy) != CURLM_OK) {
        return HD_FAIL(r->err, HD_ENOMEM, "no memory for a connection");
    }
    job->state = HUB_JOB_RUNNING;
    return HD_OK;
}

/* Starts a file, from the first byte that is missing. */
static hd_status launch(run *r, hub_job *job) {
    job->wait_ns = job->from = 0;
    const hd_status st = job->sink->begin(job, &job->from, r->err);
    if (st == HD_EAGAIN) {
        job->due_ns = hd_now_ns() + job->wait_ns;
        return HD_OK;
    }
    if (st != HD_OK) return st;
    if (job->over) {
        finish(r, job);
        return HD_OK;
    }
    free(job->url);
    job->url = strdup(job->home);
    job->redirects = 0;
    return start(r, job);
}

/* Starts the requests of jobs that are due and have no connection, up to the limit. */
static hd_status launch_due(run *r) {
    const int64_t now = hd_now_ns();
    while (r->first < r->n && r->jobs[r->first]->state == HUB_JOB_FINISHED) r->first++;
    for (int32_t i = r->first; i < r->n; i++) {
        const bool fresh = r->jobs[i]->state == HUB_JOB_WAITING && r->n_active < r->o->parallel;
        if (!fresh && r->jobs[i]->state != HUB_JOB_ACTIVE) {
            if (r->jobs[i]->state == HUB_JOB_WAITING) break; /* so are all after it */
            continue;
        }
        if (fresh) {
            r->jobs[i]->state = HUB_JOB_ACTIVE;
            r->n_active++;
        }
        if (now < r->jobs[i]->due_ns || now < r->quiet_until_ns) continue;
        HD_TRY(launch(r, r->jobs[i]));
    }
    return HD_OK;
}

/* Schedules a retry after a failure that may be temporary. */
static hd_status try_again(run *r, hub_job *job) {
    char text[sizeof job->err.msg + 40];
    const int64_t asked_ns = job->wait_ns;
    if (++job->failures > r->o->retries) {
        return HD_FAIL(r->err, HD_EIO, "%s; given up after %d attempts without a byte",
                       job->err.msg, job->failures);
    }
    if (asked_ns > MOST_WAIT_S * SECOND_NS) {
        return HD_FAIL(r->err, HD_EIO, "%s; it asks to come back in %lld s", job->err.msg,
                       (long long)(asked_ns / SECOND_NS));
    }
    const int doublings = job->failures < MOST_DOUBLINGS ? job->failures - 1 : MOST_DOUBLINGS;
    const int64_t wait_ns = asked_ns ? asked_ns : FIRST_WAIT_NS << doublings;
    job->due_ns = hd_now_ns() + wait_ns;
    if (asked_ns) r->quiet_until_ns = job->due_ns;
    if (job->err.msg[0] && r->o->on_note) {
        snprintf(text, sizeof text, "%s; again in %.3g s", job->err.msg,
                 (double)wait_ns / (double)SECOND_NS);
        r->o->on_note(r->o->user, text);
    }
    return HD_OK;
}

static hd_status take_result(run *r, CURL *easy, CURLcode code) {
    hub_job *job = NULL;
    curl_easy_getinfo(easy, CURLINFO_PRIVATE, &job);
    job->wait_ns = 0;
    const hub_outcome outcome = hub_job_finish(job, code);
    curl_multi_remove_handle(r->multi, easy);
    job->state = HUB_JOB_ACTIVE;
    switch (outcome) {
    case HUB_DONE:
        finish(r, job);
        return HD_OK;
    case HUB_REDIRECTED:
        return start(r, job);
    case HUB_TRY_AGAIN:
        return try_again(r, job);
    case HUB_FAILED:
        break;
    }
    return HD_FAIL(r->err, job->err.status, "%s", job->err.msg);
}

/* Returns how long only connections can have events. */
static int wait_ms(const run *r) {
    const int64_t now = hd_now_ns();
    int64_t wait_ns = (int64_t)MOST_POLL_MS * 1000000;
    for (int32_t i = r->first; i < r->n && r->jobs[i]->state != HUB_JOB_WAITING; i++) {
        if (r->jobs[i]->state != HUB_JOB_ACTIVE) continue;
        int64_t due_ns = r->jobs[i]->due_ns;
        if (due_ns < r->quiet_until_ns) due_ns = r->quiet_until_ns;
        if (due_ns - now < wait_ns) wait_ns = due_ns - now;
    }
    return wait_ns <= 0 ? 0 : (int)(wait_ns / 1000000) + 1;
}

static hd_status step(run *r) {
    int running, left;
    HD_TRY(launch_due(r));
    CURLMcode code = curl_multi_perform(r->multi, &running);
    for (CURLMsg *m; code == CURLM_OK && (m = curl_multi_info_read(r->multi, &left));) {
        if (m->msg == CURLMSG_DONE) HD_TRY(take_result(r, m->easy_handle, m->data.result));
    }
    if (code == CURLM_OK && r->n_active) {
        code = curl_multi_poll(r->multi, NULL, 0, wait_ms(r), NULL);
    }
    return code == CURLM_OK ? HD_OK : HD_FAIL(r->err, HD_EIO, "%s", curl_multi_strerror(code));
}

hd_status hub_run(hub_job *const *jobs, int32_t n, const hub_options *o, hd_err *err) {
    run r = {.o = o, .jobs = jobs, .n = n, .err = err, .multi = curl_multi_init()};
    hd_status st = r.multi ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for connections");
    do {
        if (st == HD_OK) st = step(&r);
    } while (st == HD_OK && (r.n_active || r.first < r.n));
    for (int32_t i = 0; i < n; i++) {
        if (jobs[i]->state == HUB_JOB_RUNNING) curl_multi_remove_handle(r.multi, jobs[i]->easy);
    }
    curl_multi_cleanup(r.multi);
    return st;
}
