/* rl_remote.c - requests to a sampling server, each with bounded retries. */
#include "cli/training/rl_remote.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/training/posts.h"
#include "train/model_files.h"
#include "weights/export.h"

enum { MOST_REPLY = 256 << 20 };

struct rl_remote {
    rl_remote_options o;
    posts *posts;
    char *folder; /* of the weights that it is given */
};

/* Requests of one job. */
typedef struct job {
    const rl_remote *r;
    const char *what; /* for errors */
    char **bodies;
    int32_t *tries;
    const hd_sample_request *requests;
    hd_sample_reply *const *out; /* NULL: an update */
} job;

hd_status rl_remote_open(rl_remote **out, const rl_remote_options *o, hd_err *err) {
    const posts_options p = {.option = "rollout",
                             .url = o->url,
                             .timeout_s = o->timeout_s,
                             .most_bytes = MOST_REPLY};
    *out = NULL;
    if (!o->dir) {
        return HD_FAIL(err, HD_EINVAL,
                       "--rollout needs --rollout-dir, the server's --weights-dir");
    }
    rl_remote *r = calloc(1, sizeof *r);
    char *dir = realpath(o->dir, NULL);
    if (!r || !dir) {
        free(r);
        free(dir);
        return HD_FAIL(err, HD_EIO, "--rollout-dir %s: %s", o->dir, strerror(errno));
    }
    r->o = *o;
    r->folder = hd_path_join(dir, "rollout-weights");
    free(dir);
    const hd_status st = r->folder ? posts_open(&r->posts, &p, err)
                                   : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    if (st == HD_OK) {
        *out = r;
    } else {
        rl_remote_close(r);
    }
    return st;
}

void rl_remote_close(rl_remote *r) {
    if (!r) return;
    posts_close(r->posts);
    free(r->folder);
    free(r);
}

/* ---- jobs ---- */

static const char *body_of(void *ctx, int32_t i) {
    const job *j = ctx;
    return j->bodies[i];
}

static hd_status read_update(const char *text, size_t n, hd_err *why) {
    json_t *reply;
    HD_TRY(hd_json_parse(&reply, text, n, "reply", why));
    const json_t *message = json_object_get(reply, "message");
    const bool done = json_is_true(json_object_get(reply, "success"));
    const hd_status st = done ? HD_OK
                              : HD_FAIL(why, HD_EFORMAT, "no success: %.200s",
                                        message ? json_string_value(message) : "");
    json_decref(reply);
    return st;
}

static hd_status reply_of(void *ctx, int32_t i, const char *text, size_t n, hd_err *why) {
    const job *j = ctx;
    if (!j->out) return read_update(text, n, why);
    return hd_sample_read(j->out[i], &j->requests[i], text, n, why);
}

static hd_status failed(void *ctx, int32_t i, const char *why, bool *again, int64_t *pause_ns,
                        hd_err *err) {
    const job *j = ctx;
    *pause_ns = posts_pause_ns(j->tries[i]++);
    *again = j->tries[i] <= j->r->o.retries;
    if (*again) return HD_OK;
    return HD_FAIL(err, HD_EPEER, "--rollout: %s, after %d tries: %s", j->what, j->tries[i],
                   why);
}

static hd_status run(rl_remote *r, const char *path, job *j, int32_t n, hd_err *err) {
    const posts_job p = {
        .ctx = j, .n = n, .body = body_of, .reply = reply_of, .failed = failed};
    j->r = r;
    j->tries = calloc((size_t)n, sizeof *j->tries);
    hd_status st = j->tries ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for requests");
    for (int32_t i = 0; st == HD_OK && i < n; i++) {
        if (!j->bodies[i]) st = HD_FAIL(err, HD_ENOMEM, "no memory for a request");
    }
    if (st == HD_OK) st = posts_run(r->posts, path, &p, err);
    for (int32_t i = 0; i < n; i++) free(j->bodies[i]);
    free(j->tries);
    return st;
}

hd_status rl_remote_sample(rl_remote *r, const hd_sample_request *requests,
                           hd_sample_reply *const *out, int32_t n, hd_err *err) {
    job j = {.what = "samples", .requests = requests, .out = out};
    j.bodies = calloc((size_t)n, sizeof *j.bodies);
    if (!j.bodies) return HD_FAIL(err, HD_ENOMEM, "no memory for requests");
    for (int32_t i = 0; i < n; i++) j.bodies[i] = hd_sample_body(&requests[i]);
    const hd_status st = run(r, "/generate", &j, n, err);
    free(j.bodies);
    return st;
}

/* ---- updates ---- */

static hd_status write_model(const rl_remote *r, const hd_weights *w, const char *model_dir,
                             hd_err *err) {
    if (mkdir(r->folder, 0777) != 0 && errno != EEXIST) {
        return HD_FAIL(err, HD_EIO, "%s: %s", r->folder, strerror(errno));
    }
    HD_TRY(hd_model_files_copy(r->folder, model_dir, err));
    char *path = hd_path_join(r->folder, "model.safetensors");
    const hd_status st =
        path ? hd_weights_write(path, w, err) : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    free(path);
    return st;
}

hd_status rl_remote_update(rl_remote *r, const hd_weights *w, const char *model_dir,
                           const char *version, hd_err *err) {
    HD_TRY(write_model(r, w, model_dir, err));
    json_t *all = json_pack("{s:s, s:s}", "model_path", r->folder, "weight_version", version);
    char *body = all ? hd_json_write(all, JSON_COMPACT) : NULL;
    job j = {.what = "new weights", .bodies = &body};
    json_decref(all);
    return run(r, "/update_weights_from_disk", &j, 1, err);
}
