/* crew.c - the other ranks of data parallel training as threads of this process, over the same weights. */
#include <pthread.h>
#include <stdlib.h>

#include "base/checked.h"
#include "base/cores.h"
#include "train/trainer_internal.h"

typedef struct member {
    train_crew *crew;
    hd_trainer_options o;
    pthread_t thread;
    bool started;
} member;

struct train_crew {
    hd_comm_local *world;
    member *members; /* [n], of ranks 1 to n */
    int32_t n;
};

int32_t train_crew_threads(const hd_trainer_options *o) {
    const int32_t all = o->threads ? o->threads : hd_cores_count();
    return hd_max_i32(all * (o->rank + 1) / o->n_ranks - all * o->rank / o->n_ranks, 1);
}

static void *work(void *arg) {
    member *m = arg;
    hd_trainer *t;
    hd_err err = {0};
    if (trainer_open_rank(&t, &m->o, m->crew->world, &err) == HD_OK) {
        hd_trainer_follow(t, NULL, &err); /* a failure ends the work of all ranks */
        hd_trainer_close(t);
    } else {
        hd_comm_local_abort(m->crew->world, trainer_reason(m->o.rank, &err).text);
    }
    return NULL;
}

static hd_status start(train_crew *c, const hd_trainer_options *o, hd_err *err) {
    const hd_parallel_config ranks = {
        .tp = 1, .dp = o->n_ranks, .ep = 1, .etp = 1, .dense_tp = 1, .head_tp = 1};
    HD_TRY(hd_comm_local_open(&c->world, &ranks, err));
    c->members = calloc((size_t)o->n_ranks, sizeof *c->members);
    if (!c->members) return HD_FAIL(err, HD_ENOMEM, "no memory for %d ranks", o->n_ranks);
    for (int32_t i = 0; i < o->n_ranks - 1; i++) {
        member *m = &c->members[c->n++];
        m->crew = c;
        m->o = *o;
        m->o.rank = i + 1;
        m->o.upload = NULL; /* rank 0 does */
        m->started = pthread_create(&m->thread, NULL, work, m) == 0;
        if (!m->started) {
            return HD_FAIL(err, HD_EIO, "cannot start the thread of rank %d", m->o.rank);
        }
    }
    return HD_OK;
}

hd_status train_crew_open(train_crew **out, const hd_trainer_options *o, hd_err *err) {
    train_crew *c = calloc(1, sizeof *c);
    if (!c) return HD_FAIL(err, HD_ENOMEM, "no memory for %d ranks", o->n_ranks);
    const hd_status st = start(c, o, err);
    if (st == HD_OK) {
        *out = c;
    } else {
        train_crew_abort(c);
        train_crew_close(c);
    }
    return st;
}

hd_comm_local *train_crew_world(const train_crew *c) {
    return c ? c->world : NULL;
}

void train_crew_abort(train_crew *c) {
    if (c && c->world) hd_comm_local_abort(c->world, "rank 0 has not opened");
}

void train_crew_close(train_crew *c) {
    if (!c) return;
    for (int32_t i = 0; i < c->n; i++) {
        if (c->members[i].started) pthread_join(c->members[i].thread, NULL);
    }
    hd_comm_local_close(c->world);
    free(c->members);
    free(c);
}
