/* remote.c - rounds (rounds.c) of attention groups in several processes. The front, with all
 * requests, is in the process of rank 0. Its step thread broadcasts an order and the mail of the
 * other groups to their leaders. After the step these return outputs and their state, by
 * all-gathers.
 *
 * Every leader is in the same exchange at the same time, so that nothing else is needed to keep
 * messages in order. */
#include "engine/new_weights.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "engine/leaders.h"
#include "engine/remote/remote_internal.h"
#include "engine/wire.h"

enum { MAX_MAIL = 1 << 30 };

/* What precedes the mail of a round. */
typedef struct order_head {
    engine_order order;
    uint64_t n; /* bytes of mail */
} order_head;

/* A group's state, followed by its places and its loads. */
typedef struct state_head {
    hd_engine_stats stats; /* last_step_ns: how long ago */
    uint64_t rested_pauses, records_obeyed;
    int32_t n_places, n_loads;
} state_head;

/* A job of pages that rank 0 sent. */
typedef struct remote_job {
    hd_page_job job;
    engine_rank *rank;
} remote_job;

hd_status engine_remote_open(engine_remote **out, const hd_engine *e, hd_err *err) {
    engine_remote *m = calloc(1, sizeof *m);
    *out = m;
    if (m) pthread_mutex_init(&m->lock, NULL);
    if (m) m->last_job = &m->jobs;
    if (m) m->words = calloc((size_t)e->n_groups, sizeof *m->words);
    if (m) m->post.top = calloc(engine_post_tops(e), sizeof *m->post.top);
    if (m && m->words && m->post.top) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for the mail of other processes");
}

void engine_remote_forget(engine_remote *m) {
    m->out.n = 0;
    m->put_err = (hd_err){0};
    m->sent_loads_ns = 0;
}

void engine_remote_close(engine_remote *m) {
    if (!m) return;
    remote_thread_close(m);
    pthread_mutex_destroy(&m->lock);
    hd_bytes_deinit(&m->out);
    hd_bytes_deinit(&m->sent);
    hd_bytes_deinit(&m->in);
    free(m->page);
    free(m->words);
    free(m->post.top);
    free(m);
}

/* ---- the end of communication ---- */

/* Ends every choice of a request. The lock is free while the ring is full. */
static void end_choices(hd_engine *e, engine_request *r, const char *why) {
    const uint64_t id = r->id;
    for (int32_t k = 0; r->id == id && r->n_left && k < r->n_choices; k++) {
        if (r->choices[k].posted) continue;
        engine_step_output *p = &e->remote->post;
        hd_alternative *top = p->top;
        *p = (engine_step_output){.id = id + (uint64_t)k,
                                  .top = top,
                                  .why = strdup(why),
                                  .step.finish_reason = HD_FINISH_ERROR,
                                  .weight_version = e->ranks[0].weight_version};
        engine_post(e, p);
    }
}

void engine_remote_fail_jobs(hd_engine *e) {
    engine_remote *m = e->remote;
    engine_fail_jobs(&m->jobs);
    m->last_job = &m->jobs;
    for (int32_t g = 1; g < e->n_groups; g++) engine_fail_jobs(&e->groups[g].mail.jobs);
}

/* The front ends the requests of all other groups: beginning anew has been of no use. */
static void end_all(engine_rank *rank, const char *why) {
    hd_engine *e = rank->engine;
    pthread_mutex_lock(&e->lock);
    engine_remote_fail_jobs(e);
    for (int32_t g = 1; g < e->n_groups; g++) {
        engine_group *group = &e->groups[g];
        group->mail.n_submitted = group->mail.n_cancelled = 0;
        group->mail.flush = group->mail.retract = false;
        group->n_places = group->stats.running = group->stats.waiting = 0;
        group->rounds = rank->order.number;
        group->rested_pauses = rank->order.pauses;
        group->idle = true;
        group->look_ns = 0;
    }
    for (int32_t i = 0; i < e->n_requests; i++) {
        engine_request *r = &e->requests[i];
        if (r->id && r->n_left && r->group) end_choices(e, r, why);
    }
    pthread_mutex_unlock(&e->lock);
}

bool remote_recover(engine_rank *rank, const hd_err *err) {
    if (engine_ranks_recover(rank, err)) return true;
    if (rank->group == 0) {
        end_all(rank, err->msg);
    } else {
        rank->lost = *err;
        rank->order.closing = true;
    }
    return false;
}

/* ---- the beginning of a round ---- */

/* A failure is kept until the end of the round. The caller holds m->lock. */
static void keep(engine_remote *m, hd_status st, const hd_err *err) {
    if (st != HD_OK && m->put_err.status == HD_OK) m->put_err = *err;
}

/* They are the job's until its group has told how they ended. */
static hd_status put_jobs(engine_remote *m, engine_mail *mail, hd_bytes *to, hd_err *err) {
    while (mail->jobs) {
        hd_page_job *job = mail->jobs;
        mail->jobs = job->next;
        job->next = NULL;
        job->number = ++m->n_jobs;
        *m->last_job = job;
        m->last_job = &job->next;
        HD_TRY(engine_put_job(to, job, err));
    }
    return HD_OK;
}

/* A retraction by a pause that is newer than the order waits for the next. */
static hd_status put_mail(hd_engine *e, const engine_order *order, int32_t group, hd_bytes *to,
                          hd_err *err) {
    engine_mail *mail = &e->groups[group].mail;
    for (int32_t i = 0; i < mail->n_submitted; i++) {
        HD_TRY(engine_put_request(to, engine_request_of(e, mail->submitted[i]), err));
    }
    for (int32_t i = 0; i < mail->n_cancelled; i++) {
        HD_TRY(engine_put_record(to, ENGINE_RECORD_CANCEL, group, mail->cancelled[i], err));
    }
    const bool retract = mail->retract && mail->retract_pause <= order->pauses;
    if (retract) HD_TRY(engine_put_record(to, ENGINE_RECORD_RETRACT, group, 0, err));
    if (mail->flush) HD_TRY(engine_put_record(to, ENGINE_RECORD_FLUSH, group, 0, err));
    HD_TRY(put_jobs(e->remote, mail, to, err));
    mail->n_submitted = mail->n_cancelled = 0;
    mail->retract = mail->retract && !retract;
    mail->flush = false;
    return HD_OK;
}

hd_status remote_send_order(engine_rank *rank, const engine_order *order, hd_err *err) {
    hd_engine *e = rank->engine;
    hd_bytes *out = &e->remote->out;
    hd_status st = HD_OK;
    out->n = 0;
    pthread_mutex_lock(&e->lock);
    for (int32_t g = 1; st == HD_OK && g < e->n_present; g++) {
        st = put_mail(e, order, g, out, err);
        e->groups[g].idle = e->groups[g].idle && out->n == 0; /* until it says more */
    }
    pthread_mutex_unlock(&e->lock);
    HD_TRY(st);
    order_head head = {*order, out->n};
    HD_TRY(engine_leaders_broadcast(rank, &head, sizeof head, err));
    return out->n ? engine_leaders_broadcast(rank, out->data, out->n, err) : HD_OK;
}

static void drop_job(remote_job *j) {
    free((void *)(uintptr_t)j->job.tokens);
    free((void *)(uintptr_t)j->job.message);
    free(j->job.copy);
    free(j);
}

/* On the step thread. */
static void on_job_done(hd_page_job *job) {
    remote_job *j = (remote_job *)job;
    engine_remote *m = j->rank->engine->remote;
    hd_err err = {0};
    pthread_mutex_lock(&m->lock);
    keep(m, engine_put_job_done(j->rank->engine, &m->out, job, &err), &err);
    pthread_mutex_unlock(&m->lock);
    drop_job(j);
}

static hd_status take_job(engine_rank *rank, const engine_record *record, engine_reader *from,
                          hd_err *err) {
    remote_job *j = calloc(1, sizeof *j);
    if (!j) return HD_FAIL(err, HD_ENOMEM, "no memory for a job of pages");
    j->rank = rank;
    j->job.done = on_job_done;
    const hd_status st = engine_take_job(rank->engine, from, &j->job, err);
    if (st == HD_OK) {
        j->job.number = record->id;
        hd_engine_post_job(rank->engine, rank->group, &j->job);
    } else {
        drop_job(j);
    }
    return st;
}

/* The caller holds the lock. */
static hd_status take_request(engine_rank *rank, const engine_record *record,
                              engine_reader *from, hd_err *err) {
    hd_engine *e = rank->engine;
    engine_mail *mail = &e->groups[rank->group].mail;
    switch ((engine_record_kind)record->kind) {
    case ENGINE_RECORD_SUBMIT:
        HD_TRY(engine_take_request(e, from, record->id, err));
        mail->submitted[mail->n_submitted++] = record->id;
        return HD_OK;
    case ENGINE_RECORD_CANCEL:
        if (mail->n_cancelled < 2 * e->max_living) {
            mail->cancelled[mail->n_cancelled++] = record->id;
            return HD_OK;
        }
        break;
    case ENGINE_RECORD_RETRACT:
        mail->retract = true;
        return HD_OK;
    case ENGINE_RECORD_FLUSH:
        mail->flush = true;
        return HD_OK;
    default:
        break;
    }
    return HD_FAIL(err, HD_EPEER, "rank 0 sent a record of kind %d", record->kind);
}

/* A record for this group goes to its mailbox, from which the step thread takes it. */
static hd_status take_record(engine_rank *rank, const engine_record *record,
                             engine_reader *from, hd_err *err) {
    hd_engine *e = rank->engine;
    if (record->kind == ENGINE_RECORD_JOB) return take_job(rank, record, from, err);
    pthread_mutex_lock(&e->lock);
    const hd_status st = take_request(rank, record, from, err);
    pthread_mutex_unlock(&e->lock);
    return st;
}

static hd_status take_mail(engine_rank *rank, engine_reader from, hd_err *err) {
    while (from.n) {
        engine_record record;
        HD_TRY(engine_take_bytes(&from, &record, sizeof record, err));
        if (record.n > from.n) return HD_FAIL(err, HD_EPEER, "rank 0 sent half a record");
        engine_reader body = {from.at, (size_t)record.n};
        from.at += record.n;
        from.n -= (size_t)record.n;
        if (record.group == rank->group) HD_TRY(take_record(rank, &record, &body, err));
    }
    return HD_OK;
}

hd_status remote_await_order(engine_rank *rank, engine_order *order, hd_err *err) {
    engine_remote *m = rank->engine->remote;
    order_head head;
    HD_TRY(engine_leaders_broadcast(rank, &head, sizeof head, err));
    *order = head.order;
    if (head.n == 0) return HD_OK;
    if (head.n > MAX_MAIL) return HD_FAIL(err, HD_EPEER, "rank 0 sent too much mail");
    HD_TRY(engine_make_room(&m->in, (size_t)head.n, err));
    HD_TRY(engine_leaders_broadcast(rank, m->in.data, m->in.n, err));
    return take_mail(rank, (engine_reader){m->in.data, m->in.n}, err);
}

void engine_remote_begin(engine_rank *rank) {
    hd_err err = {0};
    rank->began_anew = false;
    if (rank->group == 0) engine_update_look(rank); /* ranks that come need what was changed */
    while ((rank->group ? remote_await_order(rank, &rank->order, &err)
                        : remote_send_order(rank, &rank->order, &err)) != HD_OK) {
        if (!remote_recover(rank, &err)) return;
        rank->began_anew = false; /* the order is sent to those that are there now */
        err = (hd_err){0};
    }
}

/* ---- a leader's report ---- */

void engine_remote_put_output(engine_rank *rank, engine_step_output *p) {
    hd_engine *e = rank->engine;
    engine_remote *m = e->remote;
    hd_err err = {0};
    pthread_mutex_lock(&m->lock);
    keep(m, engine_put_output(&m->out, rank->group, p, &err), &err);
    pthread_mutex_unlock(&m->lock);
    free(p->why);
    p->why = NULL;
    if (p->step.finish_reason == HD_FINISH_NONE) return;
    engine_request *r = engine_request_of(e, p->id);
    if (--r->n_left == 0) engine_forget_request(e, r);
}

void engine_remote_put_prompt(engine_rank *rank, uint64_t id, const hd_prompt_logprobs *p) {
    engine_remote *m = rank->engine->remote;
    hd_err err = {0};
    pthread_mutex_lock(&m->lock);
    keep(m, engine_put_prompt(&m->out, rank->group, id, p, &err), &err);
    pthread_mutex_unlock(&m->lock);
}

void *engine_remote_room(engine_rank *rank, uint64_t id, size_t n) {
    engine_remote *m = rank->engine->remote;
    if (n > m->cap_page) {
        free(m->page);
        m->page = malloc(n);
        m->cap_page = m->page ? n : 0;
    }
    if (!m->page) engine_remote_exported(rank, id, 0, HD_ENOMEM);
    return m->page;
}

void engine_remote_exported(engine_rank *rank, uint64_t id, size_t n, hd_status st) {
    engine_remote *m = rank->engine->remote;
    hd_err err = {0};
    if (st != HD_OK) n = 0;
    pthread_mutex_lock(&m->lock);
    keep(m, engine_put_page(&m->out, rank->group, id, st, m->page, n, &err), &err);
    pthread_mutex_unlock(&m->lock);
}

void engine_remote_put_counts(engine_rank *rank, uint64_t record, const int64_t *counts,
                              size_t n) {
    engine_remote *m = rank->engine->remote;
    hd_err err = {0};
    pthread_mutex_lock(&m->lock);
    keep(m, engine_put_counts(&m->out, rank->group, record, counts, n, &err), &err);
    pthread_mutex_unlock(&m->lock);
}

/* The caller holds m->lock, and the engine's where other threads change the state. */
static hd_status put_state(engine_rank *rank, hd_err *err) {
    hd_engine *e = rank->engine;
    engine_remote *m = e->remote;
    const engine_group *group = &e->groups[rank->group];
    const bool fresh = m->sent_loads_ns != group->loads_ns;
    state_head s = {.stats = group->stats,
                    .rested_pauses = group->rested_pauses,
                    .records_obeyed = group->records_obeyed,
                    .n_places = group->n_places,
                    .n_loads = fresh ? e->n_loads : 0};
    if (s.stats.last_step_ns) s.stats.last_step_ns = hd_now_ns() - s.stats.last_step_ns;
    m->sent_loads_ns = group->loads_ns;
    HD_TRY(engine_put_record(&m->out, ENGINE_RECORD_STATE, rank->group, 0, err));
    HD_TRY(hd_bytes_append(&m->out, &s, sizeof s, err));
    HD_TRY(hd_bytes_append(&m->out, group->places, (size_t)s.n_places * sizeof *group->places,
                           err));
    HD_TRY(
        hd_bytes_append(&m->out, group->loads, (size_t)s.n_loads * sizeof *group->loads, err));
    return hd_bytes_append(&m->out, "\0\0\0", (4 - m->out.n % 4) % 4, err); /* whole words */
}

/* ---- the front ---- */

static hd_status wrong_report(int32_t group, hd_err *err) {
    return HD_FAIL(err, HD_EPEER, "attention group %d sent a report that cannot be right",
                   group);
}

/* The request that a record is about, if the group computes it and it has not ended. */
static engine_request *request_of(hd_engine *e, const engine_record *record) {
    engine_request *r = engine_request_of(e, record->id);
    const int32_t k = engine_choice_of(record->id);
    const bool is = r && r->group == record->group && r->n_left && k < r->n_choices &&
                    !r->choices[k].posted;
    return is ? r : NULL;
}

static bool has_room(const engine_request *r, const engine_step_output *p) {
    const engine_choice *c = &r->choices[engine_choice_of(p->id)];
    return p->step.n_tokens <= r->request.max_new - c->n_posted;
}

static hd_status take_state(hd_engine *e, engine_group *group, engine_reader *from,
                            hd_err *err) {
    state_head s;
    HD_TRY(engine_take_bytes(from, &s, sizeof s, err));
    const int32_t most = e->groups[0].stats.max_running;
    if (s.n_places < 0 || s.n_places > most || (s.n_loads && s.n_loads != e->n_loads)) {
        return HD_FAIL(err, HD_EPEER, "a group of %d running choices, at most %d", s.n_places,
                       most);
    }
    group->stats = s.stats;
    group->stats.hindrance = NULL; /* addresses of the other process */
    group->stats.experts.source = e->groups[0].stats.experts.source;
    group->rested_pauses = s.rested_pauses;
    engine_recording_obeyed(e, (int32_t)(group - e->groups), s.records_obeyed);
    group->n_places = s.n_places;
    if (s.stats.last_step_ns) group->stats.last_step_ns = hd_now_ns() - s.stats.last_step_ns;
    HD_TRY(engine_take_bytes(from, group->places, (size_t)s.n_places * sizeof *group->places,
                             err));
    return engine_take_bytes(from, group->loads, (size_t)s.n_loads * sizeof *group->loads, err);
}

static hd_status take_job_done(hd_engine *e, const engine_record *record, engine_reader *from,
                               hd_err *err) {
    engine_remote *m = e->remote;
    hd_page_job **at = &m->jobs;
    while (*at && ((*at)->number != record->id || (*at)->group != record->group)) {
        at = &(*at)->next;
    }
    hd_page_job *job = *at;
    if (!job) return wrong_report(record->group, err);
    HD_TRY(engine_take_job_done(e, from, job, err));
    *at = job->next;
    if (!*at) m->last_job = at;
    job->done(job);
    return HD_OK;
}

static hd_status take_counts(hd_engine *e, const engine_record *record, engine_reader *from,
                             hd_err *err) {
    size_t n;
    int64_t *room = engine_recording_room(&e->ranks[0], &n);
    if (!room || record->n != n * sizeof *room) return wrong_report(record->group, err);
    HD_TRY(engine_take_bytes(from, room, n * sizeof *room, err));
    engine_recording_add(&e->ranks[0], record->id, room);
    return HD_OK;
}

static hd_status take_report(hd_engine *e, int32_t group, engine_reader from, hd_err *err) {
    engine_step_output *p = &e->remote->post;
    while (from.n >= sizeof(engine_record)) {
        engine_record record;
        HD_TRY(engine_take_bytes(&from, &record, sizeof record, err));
        if (record.group != group) return wrong_report(group, err);
        if (record.kind == ENGINE_RECORD_STATE) {
            HD_TRY(take_state(e, &e->groups[group], &from, err));
            continue;
        }
        if (record.kind == ENGINE_RECORD_JOB_DONE) {
            HD_TRY(take_job_done(e, &record, &from, err));
            continue;
        }
        if (record.kind == ENGINE_RECORD_COUNTS) {
            HD_TRY(take_counts(e, &record, &from, err));
            continue;
        }
        engine_request *r = request_of(e, &record);
        if (!r) return wrong_report(group, err);
        if (record.kind == ENGINE_RECORD_PROMPT) {
            HD_TRY(engine_take_prompt(&from, r, err));
        } else if (record.kind == ENGINE_RECORD_PAGE) {
            HD_TRY(engine_take_page(e, &from, r, record.n, err));
        } else if (record.kind == ENGINE_RECORD_OUTPUT) {
            HD_TRY(engine_take_output(e, &from, record.id, p, err));
            if (!has_room(r, p)) return wrong_report(group, err);
            p->weight_version = e->ranks[0].weight_version;
            engine_post(e, p);
        } else {
            return wrong_report(group, err);
        }
    }
    return HD_OK;
}

static hd_status take_reports(engine_rank *rank, const char *data, hd_err *err) {
    hd_engine *e = rank->engine;
    const remote_word *words = e->remote->words;
    hd_status st = HD_OK;
    size_t at = (size_t)words[0].n;
    pthread_mutex_lock(&e->lock);
    for (int32_t g = 1; st == HD_OK && g < e->n_present; g++) {
        engine_group *group = &e->groups[g];
        st = take_report(e, g, (engine_reader){data + at, (size_t)words[g].n}, err);
        at += (size_t)words[g].n;
        group->rounds = words[g].rounds;
        group->idle = words[g].idle != 0;
        group->look_ns = words[g].look_in_ns < 0 ? 0 : hd_now_ns() + words[g].look_in_ns;
    }
    pthread_cond_broadcast(&e->wake);
    pthread_mutex_unlock(&e->lock);
    return st;
}

/* ---- the end of a round ---- */

/* Sums the bytes of all reports; *first: where that of this group begins. */
static hd_status place_reports(const hd_engine *e, int32_t group, size_t *first, size_t *all,
                               hd_err *err) {
    *all = 0;
    for (int32_t g = 0; g < e->n_present; g++) {
        const uint64_t n = e->remote->words[g].n;
        if (g == group) *first = *all;
        if (n > MAX_MAIL || n % sizeof(float)) return wrong_report(g, err);
        *all += (size_t)n;
    }
    return *all > MAX_MAIL ? wrong_report(group, err) : HD_OK;
}

/* The report so far becomes m->sent, and the next one is empty. */
static hd_status close_report(engine_rank *rank, hd_err *err) {
    engine_remote *m = rank->engine->remote;
    pthread_mutex_lock(&m->lock);
    if (rank->group) keep(m, put_state(rank, err), err);
    const hd_bytes before = m->sent;
    m->sent = m->out;
    m->out = before;
    m->out.n = 0;
    const hd_err failed = m->put_err;
    pthread_mutex_unlock(&m->lock);
    if (failed.status != HD_OK) *err = failed;
    return failed.status;
}

hd_status remote_exchange(engine_rank *rank, const remote_word *own, hd_err *err) {
    hd_engine *e = rank->engine;
    engine_remote *m = e->remote;
    const size_t size = sizeof *m->words;
    size_t first = 0, all;
    m->words[rank->group] = *own;
    m->words[rank->group].n = m->sent.n;
    HD_TRY(engine_leaders_gather(rank, m->words, (size_t)e->n_present * size,
                                 (size_t)rank->group * size, size, err));
    HD_TRY(place_reports(e, rank->group, &first, &all, err));
    HD_TRY(engine_make_room(&m->in, all, err));
    if (m->sent.n) memcpy(m->in.data + first, m->sent.data, m->sent.n);
    HD_TRY(engine_leaders_gather(rank, m->in.data, all, first, m->sent.n, err));
    return rank->group ? HD_OK : take_reports(rank, m->in.data, err);
}

hd_status remote_close_report(engine_rank *rank, bool idle, int64_t look_ns, uint64_t rounds,
                              remote_word *out, hd_err *err) {
    const int64_t left = look_ns - hd_now_ns();
    *out = (remote_word){
        .look_in_ns = look_ns ? (left > 0 ? left : 0) : -1, .idle = idle, .rounds = rounds};
    if (rank->group) return close_report(rank, err);
    rank->engine->remote->sent.n = 0; /* what was sent were orders */
    return HD_OK;
}

static hd_status end_round(engine_rank *rank, bool idle, int64_t look_ns, hd_err *err) {
    remote_word own;
    HD_TRY(remote_close_report(rank, idle, look_ns, rank->order.number, &own, err));
    return remote_exchange(rank, &own, err);
}

void engine_remote_end(engine_rank *rank, bool idle, int64_t look_ns) {
    hd_err err = {0};
    if (rank->began_anew) return; /* the others wait for the next order */
    if (end_round(rank, idle, look_ns, &err) != HD_OK) remote_recover(rank, &err);
}
