/* recording.c - expert records: begun and ended by mail, on the step threads. Counts are those of all
 * attention groups together: each leader adds its own at the end, and the last one ends the record,
 * which rank 0 keeps. */
#include <stdlib.h>
#include <string.h>
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

static hd_status open_recorder(engine_rank *rank, size_t n_rows, hd_err *err) {
    const hd_model_spec *c = rank->engine->spec;
    const int32_t drafts = hd_model_n_draft_layers(c, rank->weights);
    hd_record_head head = {.layers = c->n_layers + drafts,
                           .n_mtp = drafts,
                           .experts = c->route.n_experts,
                           .top_k = c->route.top_k,
                           .slots = hd_shard_slots(hd_weights_shard(rank->weights)),
                           .ranks = hd_weights_shard(rank->weights)->parallel.ep,
                           .nodes = 1};
    const size_t n_slots = (size_t)head.layers * (size_t)head.slots;
    rank->record_layers = head.layers;
    rank->record_slots = head.slots;
    rank->records_rows = hd_model_runner_routes_all(rank->model_runner);
    rank->record_counts = calloc(n_rows, sizeof *rank->record_counts);
    head.slot_expert = calloc(n_slots, sizeof *head.slot_expert);
    if (!rank->record_counts || !head.slot_expert) {
        free(head.slot_expert);
        return HD_FAIL(err, HD_ENOMEM, "no memory for records of %zu slots", n_slots);
    }
    fill_map(rank, &head);
    const hd_status st = hd_recorder_open(&rank->recorder, &head, MOST_RECORD_BYTES, err);
    free(head.slot_expert);
    return st;
}

hd_status engine_recording_open(engine_rank *rank, hd_err *err) {
    const size_t n_rows = (size_t)hd_model_n_expert_rows(rank->engine->spec);
    if (!rank->weights || n_rows == 0 || !engine_rank_leads(rank) || rank->first_loads) {
        return HD_OK;
    }
    rank->first_loads = calloc(n_rows, sizeof *rank->first_loads);
    if (!rank->first_loads) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for records of %zu counts", n_rows);
    }
    return rank->index == 0 ? open_recorder(rank, n_rows, err) : HD_OK;
}

void engine_recording_close(engine_rank *rank) {
    hd_recorder_close(rank->recorder);
    free(rank->record_counts);
    free(rank->first_loads);
}

/* Fewer ranks may have another number of slots than the records have. */
static bool map_fits(const engine_rank *rank) {
    return hd_shard_slots(hd_weights_shard(rank->weights)) == rank->record_slots;
}

static void begin_recorder(engine_rank *rank, hd_record_mode mode) {
    for (int32_t l = 0; l < rank->record_layers; l++) {
        const hd_expert_map *map = hd_weights_expert_map(rank->weights, l);
        if (map && map_fits(rank)) hd_recorder_set_map(rank->recorder, l, map->expert);
    }
    hd_recorder_begin(rank->recorder, mode);
}

static void begin(engine_rank *rank, const engine_mail *in) {
    const bool stat = in->record_mode == HD_RECORD_STAT;
    hd_model_runner_record(rank->model_runner, stat ? NULL : rank->recorder);
    rank->record_number = in->record_number;
    rank->first_step = rank->totals.steps;
    if (stat) hd_model_runner_read_experts(rank->model_runner, rank->first_loads, NULL);
    if (rank->recorder) begin_recorder(rank, in->record_mode);
}

/* Adds a group's counts; the last one's complete the record. The caller holds the lock, without which
 * no other record can be ordered. */
static void add_part(engine_rank *first, const int64_t *counts, int64_t passes) {
    const int64_t n = hd_model_n_expert_rows(first->engine->spec);
    for (int64_t i = 0; i < n; i++) first->record_counts[i] += counts[i];
    if (passes > first->record_passes) first->record_passes = passes;
    if (--first->record_parts > 0) return;
    hd_recorder_stat(first->recorder, first->record_counts, (uint64_t)first->record_passes);
    hd_recorder_end(first->recorder);
}

/* A record of counts is the difference of the device's counters. */
static void end(engine_rank *rank) {
    hd_engine *e = rank->engine;
    const int64_t n = hd_model_n_expert_rows(e->spec);
    int64_t *counts = rank->fresh_loads;
    hd_model_runner_record(rank->model_runner, NULL);
    if (hd_model_runner_read_experts(rank->model_runner, counts, NULL) == HD_OK) {
        for (int64_t i = 0; i < n; i++) {
            counts[i] = (counts[i] - rank->first_loads[i]) / rank->parallel.etp;
        }
    } else {
        memset(counts, 0, (size_t)n * sizeof *counts);
    }
    pthread_mutex_lock(&e->lock);
    if (rank->record_number == e->groups[0].mail.record_number) {
        add_part(&e->ranks[0], counts, rank->totals.steps - rank->first_step);
    }
    pthread_mutex_unlock(&e->lock);
    rank->record_number = 0;
}

void engine_recording_obey(engine_rank *rank, const engine_mail *in) {
    hd_engine *e = rank->engine;
    if (!in->record_start && !in->record_stop) return;
    if (in->record_start) begin(rank, in);
    if (in->record_stop && rank->record_number) end(rank);
    pthread_mutex_lock(&e->lock);
    e->groups[rank->group].records_obeyed = in->record_requests;
    pthread_mutex_unlock(&e->lock);
}

/* ---- any thread ---- */

hd_recorder *hd_engine_recorder(const hd_engine *e) {
    return e->n_ranks ? e->ranks[0].recorder : NULL;
}

/* The caller holds the lock. */
static void clear_parts(hd_engine *e) {
    engine_rank *first = &e->ranks[0];
    memset(first->record_counts, 0,
           (size_t)hd_model_n_expert_rows(e->spec) * sizeof *first->record_counts);
    first->record_passes = 0;
    first->record_parts = e->n_groups;
}

static void order(hd_engine *e, bool start, hd_record_mode mode) {
    pthread_mutex_lock(&e->lock);
    if (start) clear_parts(e);
    for (int32_t g = 0; g < e->n_groups; g++) {
        engine_mail *m = &e->groups[g].mail;
        m->record_start |= start;
        m->record_stop = !start;
        if (start) m->record_mode = mode;
        m->record_number += start;
        m->record_requests++;
    }
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
}

hd_status hd_engine_record_start(hd_engine *e, hd_record_mode mode, hd_err *err) {
    if (!hd_engine_recorder(e)) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "this model has no experts to record");
    }
    if (e->n_groups > 1 && e->ucx) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "records of attention groups (--dp) in several processes");
    }
    if (mode != HD_RECORD_STAT && (!e->ranks[0].records_rows || e->n_groups > 1)) {
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
    bool settled = true;
    for (int32_t g = 0; g < e->n_groups; g++) {
        settled = settled && e->groups[g].records_obeyed == e->groups[g].mail.record_requests;
    }
    pthread_mutex_unlock(&e->lock);
    return settled;
}
