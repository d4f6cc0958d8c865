/* pull.c - a complete download: lists the repository, downloads missing files, then creates
 * the links and the reference. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include "hub/hub_internal.h"
#include "tokenizer/tokenizer.h" /* hd_bytes */

enum { MAX_LISTING_BYTES = 64 << 20 };

typedef struct pull {
    const hub_name *name;
    const hub_options *o;
    hub_listing listing;
    hub_blob *blobs; /* [listing.n], or NULL */
    int32_t n_blobs;
    int64_t done_bytes;
    hd_err *err;
} pull;

static hd_status no_memory(pull *p) {
    return HD_FAIL(p->err, HD_ENOMEM, "no memory to pull %s", p->name->repo);
}

/* Makes ENDPOINT/BEFORE/REPO/KIND/REVISION and tail, malloc'ed. */
static char *url_of(const pull *p, const char *before, const char *kind, const char *revision,
                    const char *tail) {
    char *escaped = hub_escape(revision, false), *url = NULL;
    size_t end = strlen(p->o->endpoint);
    while (end && p->o->endpoint[end - 1] == '/') end--;
    if (escaped && asprintf(&url, "%.*s%s/%s/%s/%s%s", (int)end, p->o->endpoint, before,
                            p->name->repo, kind, escaped, tail) < 0) {
        url = NULL;
    }
    free(escaped);
    return url;
}

static char *file_url(const pull *p, const hub_file *f) {
    char *path = hub_escape(f->path, true), *tail = NULL, *url = NULL;
    if (path && asprintf(&tail, "/%s", path) >= 0) {
        url = url_of(p, "", "resolve", p->listing.commit, tail);
        free(tail);
    }
    free(path);
    return url;
}

/* ---- the listing: a job that fills memory ---- */

typedef struct text_job {
    hub_job job; /* first: the sink casts */
    hd_bytes text;
} text_job;

static hd_status text_begin(hub_job *job, int64_t *from, hd_err *err) {
    (void)err;
    ((text_job *)job)->text.n = 0;
    *from = 0;
    return HD_OK;
}

static hd_status text_restart(hub_job *job, hd_err *err) {
    int64_t from;
    return text_begin(job, &from, err);
}

static hd_status text_take(hub_job *job, const char *bytes, size_t n, hd_err *err) {
    hd_bytes *text = &((text_job *)job)->text;
    if (text->n + n > MAX_LISTING_BYTES) {
        return HD_FAIL(err, HD_EFORMAT, "%s: an answer above %d bytes", job->what,
                       MAX_LISTING_BYTES);
    }
    return hd_bytes_append(text, bytes, n, err);
}

static hd_status text_end(hub_job *job, hd_err *err) {
    (void)job, (void)err;
    return HD_OK;
}

static const hub_sink text_sink = {text_begin, text_restart, text_take, text_end};

static hd_status fetch_listing(pull *p) {
    text_job t = {
        .job = {.sink = &text_sink,
                .what = p->name->repo,
                .bytes = -1,
                .options = p->o,
                .home =
                    url_of(p, "/api/models", "revision", p->name->revision, "?blobs=true")}
    };
    hub_job *jobs[] = {&t.job};
    hd_status st = t.job.home ? hub_run(jobs, 1, p->o, p->err) : no_memory(p);
    if (st == HD_OK) {
        st = hub_listing_parse(&p->listing, t.text.data ? t.text.data : "", t.text.n,
                               p->name->repo, p->err);
    }
    if (st == HD_OK && !p->o->all) st = hub_listing_select(&p->listing, p->name->repo, p->err);
    hd_bytes_deinit(&t.text);
    hub_job_deinit(&t.job);
    return st;
}

/* ---- sizes and digests that the listing lacks come from replies' headers ---- */

static bool is_described(const hub_file *f) {
    return f->kind != HUB_NO_DIGEST && f->bytes >= 0;
}

static hd_status head_begin(hub_job *job, int64_t *from, hd_err *err) {
    (void)job, (void)err;
    *from = 0;
    return HD_OK;
}

static const hub_sink head_sink = {.begin = head_begin}; /* there is no body */

static hd_status take_head(pull *p, hub_file *f, const hub_job *job) {
    if (job->linked_bytes < 0) {
        return HD_FAIL(p->err, HD_EFORMAT, "%s: the hub does not say how large it is", f->path);
    }
    f->bytes = job->linked_bytes;
    f->kind = hub_digest_kind_of(job->etag);
    snprintf(f->digest, sizeof f->digest, "%s", job->etag);
    return HD_OK;
}

static hd_status describe_files(pull *p) {
    const hub_listing *l = &p->listing;
    hub_job *jobs = calloc((size_t)l->n + 1, sizeof *jobs);
    hub_job **list = calloc((size_t)l->n + 1, sizeof(hub_job *));
    int32_t n = 0, at = 0;
    hd_status st = jobs && list ? HD_OK : no_memory(p);
    for (int32_t i = 0; i < l->n && st == HD_OK; i++) {
        if (is_described(&l->files[i])) continue;
        list[n] = &jobs[n];
        jobs[n++] = (hub_job){.sink = &head_sink,
                              .what = l->files[i].path,
                              .bytes = -1,
                              .head = true,
                              .options = p->o,
                              .home = file_url(p, &l->files[i])};
        if (!jobs[n - 1].home) st = no_memory(p);
    }
    if (st == HD_OK && n) st = hub_run(list, n, p->o, p->err);
    for (int32_t i = 0; i < l->n && st == HD_OK && at < n; i++) {
        if (!is_described(&l->files[i])) st = take_head(p, &l->files[i], &jobs[at++]);
    }
    for (int32_t i = 0; i < n; i++) hub_job_deinit(&jobs[i]);
    free(list);
    free(jobs);
    return st;
}

/* ---- the files ---- */

/* Checks the disk's space before the first byte is downloaded. */
static hd_status check_room(const pull *p, int64_t missing) {
    struct statvfs disk;
    if (statvfs(p->o->cache, &disk) != 0) return HD_OK;
    const double free_bytes = (double)disk.f_bavail * (double)disk.f_frsize;
    if ((double)missing <= free_bytes) return HD_OK;
    return HD_FAIL(p->err, HD_EIO, "%s needs %.1f GB more; the disk of %s has %.1f GB free",
                   p->name->repo, (double)missing / 1e9, p->o->cache, free_bytes / 1e9);
}

static hd_status plan(pull *p) {
    const hub_listing *l = &p->listing;
    int64_t total = 0;
    p->blobs = calloc((size_t)l->n + 1, sizeof *p->blobs);
    if (!p->blobs) return no_memory(p);
    for (int32_t i = 0; i < l->n; i++) {
        const hub_file *f = &l->files[i];
        total += f->bytes;
        if (total < 0 || total > INT64_MAX / 2) {
            return HD_FAIL(p->err, HD_EFORMAT, "%s: the listed sizes have no sum",
                           p->name->repo);
        }
        p->n_blobs++;
        HD_TRY(hub_blob_open(&p->blobs[i], f, p->name, file_url(p, f), p->o, &p->done_bytes,
                             p->err));
    }
    if (p->o->on_plan) p->o->on_plan(p->o->user, l->n, total, p->done_bytes);
    if (l->n) HD_TRY(hub_make_folders(p->blobs[0].path, p->err));
    return check_room(p, total - p->done_bytes);
}

static hd_status fetch_files(pull *p) {
    hub_job **jobs = calloc((size_t)p->n_blobs + 1, sizeof *jobs);
    if (!jobs) return no_memory(p);
    for (int32_t i = 0; i < p->n_blobs; i++) jobs[i] = &p->blobs[i].job;
    const hd_status st = hub_run(jobs, p->n_blobs, p->o, p->err);
    free(jobs);
    return st;
}

static hd_status link_files(const pull *p) {
    const hub_listing *l = &p->listing;
    for (int32_t i = 0; i < l->n; i++) {
        HD_TRY(hub_cache_link(p->o->cache, p->name->repo, l->commit, &l->files[i], p->err));
    }
    return hub_cache_refer(p->o->cache, p->name, l->commit, p->err);
}

static hd_status run(pull *p) {
    HD_TRY(fetch_listing(p));
    HD_TRY(describe_files(p));
    HD_TRY(plan(p));
    HD_TRY(fetch_files(p));
    return link_files(p);
}

/* A token must not contain characters that end a request's header. */
static hd_status check_token(const char *token, hd_err *err) {
    for (const char *c = token ? token : ""; *c; c++) {
        if (*c > ' ' && *c <= '~') continue;
        return HD_FAIL(err, HD_EINVAL, "HF_TOKEN holds a byte that no token has");
    }
    return HD_OK;
}

hd_status hub_pull(char **snapshot, const hub_name *name, const hub_options *o, hd_err *err) {
    pull p = {.name = name, .o = o, .err = err};
    *snapshot = NULL;
    HD_TRY(check_token(o->token, err));
    if (!hub_is_endpoint(o->endpoint)) {
        return HD_FAIL(err, HD_EINVAL, "HF_ENDPOINT is no http or https address: '%.200s'",
                       o->endpoint);
    }
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
        return HD_FAIL(err, HD_EIO, "libcurl does not start");
    }
    hd_status st = run(&p);
    if (st == HD_OK) {
        *snapshot = hub_cache_path(o->cache, name->repo, "snapshots", p.listing.commit);
        if (!*snapshot) st = no_memory(&p);
    }
    for (int32_t i = 0; i < p.n_blobs; i++) hub_blob_close(&p.blobs[i]);
    free(p.blobs);
    hub_listing_deinit(&p.listing);
    curl_global_cleanup();
    return st;
}
