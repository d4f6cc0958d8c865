/* posts.c - transfers of libcurl, AT_ONCE at a time. */
#include "cli/training/posts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/progress.h"
#include "client/multi.h"
#include "tokenizer/tokenizer.h"

enum { AT_ONCE = 8, QUOTED = 200 };

typedef struct post {
    CURL *easy;
    const posts *owner;
    int32_t at; /* the body that is under way or waits; -1: none */
    hd_bytes reply;
    int64_t due_ns; /* when it is sent; 0: it is under way */
    bool too_long;
} post;

struct posts {
    posts_options o;
    client_multi multi;
    struct curl_slist *headers;
    post all[AT_ONCE];
    bool opened;
};

int64_t posts_pause_ns(int32_t tries) {
    enum { FIRST_MS = 50, MOST_DOUBLINGS = 7 };
    return ((int64_t)FIRST_MS << (tries < MOST_DOUBLINGS ? tries : MOST_DOUBLINGS)) * 1000000;
}

/* ---- opening ---- */

static size_t take(char *bytes, size_t size, size_t n, void *user) {
    post *p = user;
    p->too_long = p->reply.n + n > p->owner->o.most_bytes;
    if (p->too_long || hd_bytes_append(&p->reply, bytes, n, NULL) != HD_OK) return 0;
    return size * n;
}

static bool add_header(posts *all, const char *line) {
    struct curl_slist *more = curl_slist_append(all->headers, line);
    if (more) all->headers = more;
    return more != NULL;
}

static bool open_post(post *p, const posts *all) {
    p->at = -1;
    p->owner = all;
    p->easy = curl_easy_init();
    if (!p->easy) return false;
    curl_easy_setopt(p->easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(p->easy, CURLOPT_HTTPHEADER, all->headers);
    curl_easy_setopt(p->easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(p->easy, CURLOPT_TIMEOUT_MS, (long)(all->o.timeout_s * 1000) + 1);
    curl_easy_setopt(p->easy, CURLOPT_PROXY, "");
    curl_easy_setopt(p->easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(p->easy, CURLOPT_WRITEFUNCTION, take);
    curl_easy_setopt(p->easy, CURLOPT_WRITEDATA, p);
    curl_easy_setopt(p->easy, CURLOPT_PRIVATE, p);
    return true;
}

static hd_status open_all(posts *all, hd_err *err) {
    HD_TRY(client_multi_open(&all->multi, err));
    all->opened = true;
    bool whole =
        add_header(all, "Content-Type: application/json") && add_header(all, "Expect:");
    for (int i = 0; whole && i < AT_ONCE; i++) whole = open_post(&all->all[i], all);
    return whole ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for requests");
}

hd_status posts_open(posts **out, const posts_options *o, hd_err *err) {
    const bool known =
        strncasecmp(o->url, "http://", 7) == 0 || strncasecmp(o->url, "https://", 8) == 0;
    *out = NULL;
    if (!known) {
        return HD_FAIL(err, HD_EINVAL, "--%s %s: must begin with http:// or https://",
                       o->option, o->url);
    }
    posts *all = calloc(1, sizeof *all);
    if (!all) return HD_FAIL(err, HD_ENOMEM, "no memory for requests");
    all->o = *o;
    const hd_status st = open_all(all, err);
    if (st == HD_OK) {
        *out = all;
    } else {
        posts_close(all);
    }
    return st;
}

void posts_close(posts *all) {
    if (!all) return;
    for (int i = 0; i < AT_ONCE; i++) {
        post *p = &all->all[i];
        if (p->easy && p->at >= 0 && !p->due_ns)
            curl_multi_remove_handle(all->multi.multi, p->easy);
        curl_easy_cleanup(p->easy);
        hd_bytes_deinit(&p->reply);
    }
    if (all->opened) client_multi_close(&all->multi);
    curl_slist_free_all(all->headers);
    free(all);
}

/* ---- a job ---- */

typedef struct run {
    posts *all;
    const posts_job *job;
    char url[2048];
    int32_t next, left; /* the next body, those without an end */
} run;

static hd_status send_post(const run *r, post *p, hd_err *err) {
    const char *body = r->job->body(r->job->ctx, p->at);
    p->reply.n = 0;
    p->due_ns = 0;
    p->too_long = false;
    curl_easy_setopt(p->easy, CURLOPT_URL, r->url);
    curl_easy_setopt(p->easy, CURLOPT_POSTFIELDS, body);
    curl_easy_setopt(p->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(body));
    if (curl_multi_add_handle(r->all->multi.multi, p->easy) == CURLM_OK) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for a request");
}

static hd_status read_post(const run *r, const post *p, CURLcode code, hd_err *why) {
    const char *text = p->reply.n ? (const char *)p->reply.data : "";
    long status = 0;
    curl_easy_getinfo(p->easy, CURLINFO_RESPONSE_CODE, &status);
    if (p->too_long) {
        return HD_FAIL(why, HD_EFORMAT, "a reply over %zu bytes", r->all->o.most_bytes);
    }
    if (code != CURLE_OK) return HD_FAIL(why, HD_EIO, "%s", curl_easy_strerror(code));
    if (status != 200) {
        return HD_FAIL(why, HD_EIO, "HTTP %ld: %.*s", status,
                       p->reply.n < QUOTED ? (int)p->reply.n : QUOTED, text);
    }
    return r->job->reply(r->job->ctx, p->at, text, p->reply.n, why);
}

static hd_status end_post(run *r, post *p, CURLcode code, hd_err *err) {
    hd_err why = {0};
    bool again = false;
    int64_t pause = 0;
    const hd_status st = read_post(r, p, code, &why);
    curl_multi_remove_handle(r->all->multi.multi, p->easy);
    p->due_ns = 1; /* no longer under way */
    if (st != HD_OK) HD_TRY(r->job->failed(r->job->ctx, p->at, why.msg, &again, &pause, err));
    p->due_ns = hd_now_ns() + pause;
    if (again) return HD_OK;
    p->at = -1;
    r->left--;
    return HD_OK;
}

/* Sends what is due, new bodies among it; *due_ns is when the next one is. */
static hd_status send_due(run *r, int64_t *due_ns, hd_err *err) {
    const int64_t now = hd_now_ns();
    *due_ns = -1;
    for (int i = 0; i < AT_ONCE; i++) {
        post *p = &r->all->all[i];
        if (p->at < 0 && r->next < r->job->n) {
            p->at = r->next++;
            p->due_ns = now;
        }
        if (p->at < 0 || !p->due_ns) continue;
        if (p->due_ns <= now) {
            HD_TRY(send_post(r, p, err));
        } else if (*due_ns < 0 || p->due_ns < *due_ns) {
            *due_ns = p->due_ns;
        }
    }
    return HD_OK;
}

static hd_status step(run *r, hd_err *err) {
    int queued;
    int64_t due;
    HD_TRY(send_due(r, &due, err));
    HD_TRY(client_multi_step(&r->all->multi, due, err));
    for (CURLMsg *m; (m = curl_multi_info_read(r->all->multi.multi, &queued));) {
        char *user;
        if (m->msg != CURLMSG_DONE) continue;
        curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &user);
        HD_TRY(end_post(r, (post *)(void *)user, m->data.result, err));
    }
    return HD_OK;
}

hd_status posts_run(posts *all, const char *path, const posts_job *job, hd_err *err) {
    run r = {.all = all, .job = job, .left = job->n};
    const int n = snprintf(r.url, sizeof r.url, "%s%s", all->o.url, path);
    if (n < 0 || (size_t)n >= sizeof r.url) {
        return HD_FAIL(err, HD_EINVAL, "--%s: too long", all->o.option);
    }
    while (r.left > 0) HD_TRY(step(&r, err));
    return HD_OK;
}
