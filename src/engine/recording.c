/* recording.c - expert records of a rank: begun and ended by mail, on the step thread. */
#include <stdlib.h>
#include <string.h>

#include "engine/rank.h"

enum { MOST_RECORD_BYTES = 64 << 20 }; /* that nobody took yet */

/* ---- the step thread ---- */

static void fill_map(const engine_rank *rank, const hd_record_head *h) {
    for (int32_t l = 0; l < h->layers; l++) {
        int32_t *to = h->slot_expert + (int64_t)l * h->slots;
        const hd_expert_map *map = hd_weights_expert_map(rank->weights, l);
        for (int32_t s = 0; s < h->slots; s++) to[s] = map ? map->expert[s] : -1;
    }
}

hd_status engine_recording_open(engine_rank *rank, hd_err *err) {
    const hd_model_spec *c = rank->engine->spec;
    const size_t n_rows = (size_t)hd_model_n_expert_rows(c);
    if (!rank->weights || n_rows == 0 || rank->index != 0 || rank->recorder) return HD_OK;
    const hd_parallel_config *p = &hd_weights_shard(rank->weights)->parallel;
    const int32_t drafts = hd_model_n_draft_layers(c, rank->weights);
    hd_record_head head = {.layers = c->n_layers + drafts,
                           .n_mtp = drafts,
                           .experts = c->route.n_experts,
                           .top_k = c->route.top_k,
                           .slots = hd_shard_slots(hd_weights_shard(rank->weights)),
                           .ranks = p->ep,
                           .nodes = 1};
    const size_t n_slots = (size_t)head.layers * (size_t)head.slots;
    rank->record_layers = head.layers;
    rank->record_slots = head.slots;
    rank->records_rows = hd_model_runner_routes_all(rank->model_runner);
    rank->first_loads = calloc(n_rows, sizeof *rank->first_loads);
    head.slot_expert = calloc(n_slots, sizeof *head.slot_expert);
    if (!rank->first_loads || !head.slot_expert) {
        free(head.slot_expert);
        return HD_FAIL(err, HD_ENOMEM, "no memory for records of %zu slots", n_slots);
    }
    fill_map(rank, &head);
    const hd_status st = hd_recorder_open(&rank->recorder, &head, MOST_RECORD_BYTES, err);
    free(head.slot_expert);
    return st;
}

void engine_recording_close(engine_rank *rank) {
    hd_recorder_close(rank->recorder);
    free(rank->first_loads);
}

/* Fewer ranks may have another number of slots than the records have. */
static bool map_fits(const engine_rank *rank) {
    return hd_shard_slots(hd_weights_shard(rank->weights)) == rank->record_slots;
}

static void begin(engine_rank *rank, hd_record_mode mode) {
    const bool stat = mode == HD_RECORD_STAT;
    hd_model_runner_record(rank->model_runner, stat ? NULL : rank->recorder);
    rank->first_step = rank->totals.steps;
    if (stat) hd_model_runner_read_experts(rank->model_runner, rank->first_loads, NULL);
    for (int32_t l = 0; l < rank->record_layers; l++) {
        const hd_expert_map *map = hd_weights_expert_map(rank->weights, l);
        if (map && map_fits(rank)) hd_recorder_set_map(rank->recorder, l, map->expert);
    }
    hd_recorder_begin(rank->recorder, mode);
}

/* A record of counts is the difference of the device's counters. */
static void end(engine_rank *rank) {
    const int64_t n = hd_model_n_expert_rows(rank->engine->spec);
    int64_t *counts = rank->fresh_loads;
    hd_model_runner_record(rank->model_runner, NULL);
    if (hd_model_runner_read_experts(rank->model_runner, counts, NULL) == HD_OK) {
        for (int64_t i = 0; i < n; i++) {
            counts[i] = (counts[i] - rank->first_loads[i]) / rank->parallel.etp;
        }
        hd_recorder_stat(rank->recorder, counts,
                         (uint64_t)(rank->totals.steps - rank->first_step));
    }
    hd_recorder_end(rank->recorder);
}

void engine_recording_obey(engine_rank *rank, const engine_mail *in) {
    hd_engine *e = rank->engine;
    if (!in->record_start && !in->record_stop) return;
    if (in->record_start) begin(rank, in->record_mode);
    if (in->record_stop && !hd_recorder_read_state(rank->recorder).ended) end(rank);
    pthread_mutex_lock(&e->lock);
    e->records_obeyed = in->record_requests;
    pthread_mutex_unlock(&e->lock);
}

/* ---- any thread ---- */

hd_recorder *hd_engine_recorder(const hd_engine *e) {
    return e->n_ranks ? e->ranks[0].recorder : NULL;
}

static void order(hd_engine *e, bool start, hd_record_mode mode) {
    pthread_mutex_lock(&e->lock);
    engine_mail *m = &e->groups[0].mail;
    m->record_start |= start;
    m->record_stop = !start;
    if (start) m->record_mode = mode;
    m->record_requests++;
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
}

hd_status hd_engine_record_start(hd_engine *e, hd_record_mode mode, hd_err *err) {
    if (!hd_engine_recorder(e)) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "this model has no experts to record");
    }
    if (e->n_groups > 1) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "records of several attention groups (--dp)");
    }
    if (mode != HD_RECORD_STAT && !e->ranks[0].records_rows) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "ranks divide the rows of a step: only counts can be recorded");
    }
    order(e, true, mode);
    return HD_OK;
}

void hd_engine_record_stop(hd_engine *e) {
    if (hd_engine_recorder(e)) order(e, false, HD_RECORD_STAT);
}

bool hd_engine_record_settled(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    const bool settled = e->records_obeyed == e->groups[0].mail.record_requests;
    pthread_mutex_unlock(&e->lock);
    return settled;
}
