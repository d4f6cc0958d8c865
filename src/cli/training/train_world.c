/* train_world.c - see train_world.h. */
#include "cli/training/train_world.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/checksum.h"
#include "base/cores.h"
#include "comm/address.h"
#include "weights/fingerprint.h"

/* What rank 0 tells: its trainer's options, without pointers, and what to open. */
typedef struct hello {
    hd_trainer_options o;
    uint64_t fingerprint;
    char model[2048];
} hello;

enum { DAY_MS = 86400000 };

static hd_status join(train_world *w, const hd_world_options *o, const char *at, hd_err *err) {
    const char *job = o->job ? o->job : "";
    const hd_comm_ucx_options ucx = {
        .rendezvous = {.rank = w->rank,
                       .world = w->n,
                       .at = at,
                       .secret = o->key,
                       .start_ms = o->start_seconds * 1000,
                       .facts = {{"version", hd_checksum(0, HD_VERSION, strlen(HD_VERSION))},
                                 {"job", hd_checksum(0, job, strlen(job))},
                                 {"build", sizeof(hello)}}                                        },
        .parallel = {.tp = 1,         .dp = w->n, .ep = 1, .etp = 1, .dense_tp = 1, .head_tp = 1},
        .wait_ms = DAY_MS  /* a rank may compute for long; its loss is seen by heartbeats */
    };
    HD_TRY(hd_comm_ucx_open(&w->ucx, &ucx, w->device, w->ranks.stream, &w->ops, err));
    w->ranks.comm = hd_comm_ucx_interface(w->ucx);
    return HD_OK;
}

hd_status train_world_open(train_world *w, train_settings *s, hd_err *err) {
    const hd_ops_options ops = {.cpu = {.n_threads = 1}, .precision = HD_EXACT};
    hd_engine_options engine = {.dp = (int32_t)s->ranks};
    *w = (train_world){.set = s};
    HD_TRY(rank_options_complete(&s->processes, &engine, err));
    const hd_world_options *o = &engine.world;
    const char *at = o->rendezvous ? o->rendezvous : HD_WORLD_RENDEZVOUS;
    if (o->size < 2) return HD_OK;
    if (s->ranks > 1 && s->ranks != o->size) {
        return HD_FAIL(err, HD_EINVAL, "--dp %d in %d processes: a rank is a process",
                       (int)s->ranks, o->size);
    }
    s->ranks = w->n = o->size;
    w->rank = o->rank;
    if (!s->threads && hd_address_is_loopback(at)) {
        s->threads = hd_max_i32(hd_cores_count() / w->n, 1);
    }
    HD_TRY(hd_ops_open(&w->ops, &w->device, "cpu", &ops, err));
    HD_TRY(hd_stream_open(&w->ranks.stream, w->device, err));
    return join(w, o, at, err);
}

hd_status train_world_lead(const train_world *w, hd_trainer_options *o, const char *model,
                           hd_err *err) {
    hello h = {.o = *o};
    if (!w->n) return HD_OK;
    o->comm = w->ranks.comm;
    h.o.spec = NULL;
    h.o.weights = h.o.upload = NULL;
    h.o.backend = NULL;
    if (snprintf(h.model, sizeof h.model, "%s", model) >= (int)sizeof h.model) {
        return HD_FAIL(err, HD_EINVAL, "%.100s...: the path is too long", model);
    }
    HD_TRY(hd_model_fingerprint(&h.fingerprint, model, err));
    return train_ranks_broadcast(&w->ranks, &h, sizeof h, err);
}

typedef struct following {
    hd_model_spec *spec;
    hd_weights *weights;
    hd_trainer *trainer;
} following;

static hd_status follow(const train_world *w, following *f, hd_err *err) {
    hello h = {.fingerprint = 0};
    uint64_t fingerprint;
    HD_TRY(train_ranks_broadcast(&w->ranks, &h, sizeof h, err));
    h.model[sizeof h.model - 1] = '\0';
    HD_TRY(hd_model_fingerprint(&fingerprint, h.model, err));
    if (fingerprint != h.fingerprint) {
        return HD_FAIL(err, HD_EINVAL, "%s: another model than that of rank 0", h.model);
    }
    HD_TRY(hd_model_spec_open(&f->spec, h.model, err));
    HD_TRY(hd_weights_open_updatable(&f->weights, h.model, f->spec, err));
    h.o.spec = f->spec;
    h.o.weights = f->weights;
    h.o.comm = w->ranks.comm;
    h.o.rank = w->rank;
    h.o.threads = (int32_t)w->set->threads;
    HD_TRY(hd_trainer_open(&f->trainer, &h.o, err));
    return hd_trainer_follow(f->trainer, f->weights, err);
}

hd_status train_world_follow(const train_world *w, hd_err *err) {
    following f = {.spec = NULL};
    train_run_catch_signals(); /* rank 0 ends the run */
    const hd_status st = follow(w, &f, err);
    hd_trainer_close(f.trainer);
    hd_weights_close(f.weights);
    hd_model_spec_close(f.spec);
    return st;
}

void train_world_close(train_world *w, const char *why) {
    char text[200];
    if (why && w->ranks.comm) {
        snprintf(text, sizeof text, "rank %d: %.180s", w->rank, why);
        hd_comm_abort(w->ranks.comm, text);
    }
    hd_comm_ucx_close(w->ucx);
    hd_stream_close(w->ranks.stream);
    hd_device_close(w->device);
    if (w->set) rank_options_deinit(&w->set->processes);
}
