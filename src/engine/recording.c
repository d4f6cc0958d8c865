/* recording.c - expert records: begun and ended by the order of a round, on the step threads. A record
 * is that of all attention groups together, and rank 0 has it. Their leaders sum their counts at its
 * end, and join the rows of a round before the next one: these are a pass. Independent groups, which
 * have no rounds in common, add their counts one after the other. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "engine/experts.h"
#include "engine/leaders.h"
#include "engine/remote/remote.h"

enum { MOST_RECORD_BYTES = 64 << 20 }; /* that nobody took yet */

static const uint64_t MOST_JOINED_BYTES = UINT64_C(1) << 30; /* of a round */

struct engine_recording {
    hd_recorder *recorder; /* of rank 0; it has a lock of its own */
    hd_recorder *part;     /* of this group's rows; NULL: there is one group, or counts only */
    int32_t layers, slots; /* of a record */
    bool has_rows;         /* not only counts; read-only after open */
    uint64_t number;       /* of the record that is made; 0: none */
    hd_record_mode mode;
    int64_t *first_loads, first_step; /* at its beginning */
    /* [1 + groups][hd_model_n_expert_rows() + 1] counts of groups and their passes. Of rank 0 the first
     * are, guarded by the engine's lock, sums of what ranks add by themselves; how many are left. */
    int64_t *counts;
    int32_t parts;
    hd_bytes joined;     /* rows of all groups */
    uint64_t *row_bytes; /* [groups] of each */
};

static size_t n_counts(const engine_rank *rank) {
    return (size_t)hd_model_n_expert_rows(rank->engine->spec);
}

/* Whether the leaders of several groups exchange what they recorded. */
static bool joins(const engine_rank *rank) {
    return rank->parallel.dp > 1 && !rank->engine->independent;
}

/* ---- opening ---- */

static void fill_map(const engine_rank *rank, const hd_record_head *h) {
    for (int32_t l = 0; l < h->layers; l++) {
        int32_t *to = h->slot_expert + (int64_t)l * h->slots;
        const hd_expert_map *map = hd_weights_expert_map(rank->weights, l);
        for (int32_t s = 0; s < h->slots; s++) to[s] = map ? map->expert[s] : -1;
    }
}

static hd_status open_recorder(engine_rank *rank, hd_recorder **out, hd_err *err) {
    engine_recording *r = rank->recording;
    const hd_model_spec *c = rank->engine->spec;
    const int32_t drafts = hd_model_n_draft_layers(c, rank->weights);
    const int32_t slots = hd_shard_slots(hd_weights_shard(rank->weights));
    hd_record_head head = {.layers = c->n_layers + drafts,
                           .n_mtp = drafts,
                           .experts = c->route.n_experts,
                           .top_k = c->route.top_k,
                           .slots = slots,
                           .ranks = hd_weights_shard(rank->weights)->parallel.ep,
                           .nodes = 1};
    const size_t n_slots = (size_t)head.layers * (size_t)head.slots;
    r->layers = head.layers;
    r->slots = head.slots;
    head.slot_expert = calloc(n_slots, sizeof *head.slot_expert);
    if (!head.slot_expert) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for records of %zu slots", n_slots);
    }
    fill_map(rank, &head);
    const hd_status st = hd_recorder_open(out, &head, MOST_RECORD_BYTES, err);
    free(head.slot_expert);
    return st;
}

static hd_status open_counts(engine_rank *rank, hd_err *err) {
    engine_recording *r = rank->recording;
    const size_t n = n_counts(rank), groups = (size_t)rank->engine->n_groups;
    r->first_loads = calloc(n, sizeof *r->first_loads);
    r->counts = calloc((groups + 1) * (n + 1), sizeof *r->counts);
    r->row_bytes = calloc(groups, sizeof *r->row_bytes);
    if (r->first_loads && r->counts && r->row_bytes) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for records of %zu counts", n);
}

/* Where the rows of its group go. */
static void record_rows(engine_rank *rank) {
    engine_recording *r = rank->recording;
    if (joins(rank)) hd_recorder_begin_part(r->part, r->mode);
    hd_model_runner_record(rank->model_runner, joins(rank) ? r->part : r->recorder);
}

/* A rank that begins anew counts from 0, and goes on with its record. */
static void reopen(engine_rank *rank) {
    engine_recording *r = rank->recording;
    memset(r->first_loads, 0, n_counts(rank) * sizeof *r->first_loads);
    if (r->number && r->mode != HD_RECORD_STAT) record_rows(rank);
}

hd_status engine_recording_open(engine_rank *rank, hd_err *err) {
    if (!rank->weights || n_counts(rank) == 0 || !engine_rank_leads(rank)) return HD_OK;
    if (!rank->recording) rank->recording = calloc(1, sizeof *rank->recording);
    engine_recording *r = rank->recording;
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory for records of experts");
    r->has_rows =
        hd_model_runner_records_rows(rank->model_runner) && !rank->engine->independent;
    if (r->has_rows && joins(rank) && !r->part) HD_TRY(open_recorder(rank, &r->part, err));
    if (r->first_loads) {
        reopen(rank);
        return HD_OK;
    }
    HD_TRY(open_counts(rank, err));
    return rank->index == 0 ? open_recorder(rank, &r->recorder, err) : HD_OK;
}

void engine_recording_close(engine_rank *rank) {
    engine_recording *r = rank->recording;
    if (!r) return;
    hd_recorder_close(r->recorder);
    hd_recorder_close(r->part);
    free(r->counts);
    free(r->first_loads);
    free(r->row_bytes);
    hd_bytes_deinit(&r->joined);
    free(r);
}

/* ---- the order of a round ---- */

/* Independent groups obey an order when they can: the next one of records waits for all, so that none is left
 * out. */
static bool have_obeyed(const hd_engine *e) {
    bool all = true;
    for (int32_t g = 0; e->independent && g < e->n_present; g++) {
        all = all && e->groups[g].records_obeyed >= e->groups[0].records_obeyed;
    }
    return all;
}

void engine_recording_obeyed(hd_engine *e, int32_t group, uint64_t requests) {
    const engine_record_wish *w = &e->groups[0].mail.record;
    const bool news = e->groups[group].records_obeyed != requests;
    e->groups[group].records_obeyed = requests;
    if (news && (w->start || w->stop)) engine_tell(e);
}

void engine_recording_order(engine_rank *rank, engine_order *order) {
    engine_recording *r = rank->recording;
    hd_engine *e = rank->engine;
    engine_record_wish *w = &e->groups[0].mail.record;
    if (!r) return;
    if (!have_obeyed(e)) {
        order->record = r->number; /* as before: rank 0 has obeyed */
        order->record_mode = r->mode;
        order->record_requests = e->groups[0].records_obeyed;
        return;
    }
    const bool talks = joins(rank) && r->number && rank->comm && !hd_comm_ended(rank->comm);
    const bool rows = r->mode != HD_RECORD_STAT, start = w->start;
    order->joins_rows = talks && rows;
    order->record = r->number;
    order->record_mode = r->mode;
    if (start) {
        order->record = w->number = order->number;
        order->record_mode = w->mode;
        memset(r->counts, 0, (n_counts(rank) + 1) * sizeof *r->counts);
        e->news |= w->stop; /* it ends in the next round */
    } else if (w->stop) {
        order->record = 0;
        order->sums_counts = talks && !rows;
        if (r->number) r->parts = e->independent ? e->n_present : 1;
        w->stop = false;
    }
    w->start = false;
    order->record_requests = w->requests - w->stop;
}

/* ---- the step thread ---- */

/* Fewer ranks may have another number of slots than the records have. */
static bool map_fits(const engine_rank *rank) {
    return hd_shard_slots(hd_weights_shard(rank->weights)) == rank->recording->slots;
}

static void set_map(const engine_rank *rank, hd_recorder *r) {
    for (int32_t l = 0; l < rank->recording->layers; l++) {
        const hd_expert_map *map = hd_weights_expert_map(rank->weights, l);
        if (map && map_fits(rank)) hd_recorder_set_map(r, l, map->expert);
    }
}

static void begin(engine_rank *rank) {
    engine_recording *r = rank->recording;
    const hd_record_mode mode = r->mode;
    const bool stat = mode == HD_RECORD_STAT;
    if (r->recorder) set_map(rank, r->recorder);
    if (r->recorder) hd_recorder_begin(r->recorder, mode);
    if (r->part) set_map(rank, r->part);
    r->first_step = rank->totals.steps;
    if (!stat) {
        record_rows(rank);
        return;
    }
    hd_model_runner_record(rank->model_runner, NULL);
    hd_model_runner_read_experts(rank->model_runner, r->first_loads, NULL);
}

/* What the device's counters have counted since the beginning, and the steps since then: [n + 1]. */
static hd_status count(engine_rank *rank, int64_t *out, hd_err *err) {
    engine_recording *r = rank->recording;
    const size_t n = n_counts(rank);
    out[n] = rank->totals.steps - r->first_step;
    HD_TRY(hd_model_runner_read_experts(rank->model_runner, rank->fresh_loads, err));
    for (size_t i = 0; i < n; i++) {
        out[i] = (rank->fresh_loads[i] - r->first_loads[i]) / rank->parallel.etp;
    }
    return HD_OK;
}

/* Adds a group's counts. Its passes may be those of the others. */
static void add(int64_t *to, const int64_t *counts, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] += counts[i];
    to[n] = hd_max_i64(to[n], counts[n]);
}

static hd_status sum_counts(engine_rank *rank, hd_err *err) {
    engine_recording *r = rank->recording;
    const hd_rank_group *g = &rank->comm->groups[HD_GROUP_DP];
    const size_t n = n_counts(rank), each = (n + 1) * sizeof(int64_t);
    int64_t *counts = r->counts, *own = counts + (size_t)g->index * (n + 1);
    HD_TRY(count(rank, own, err));
    HD_TRY(engine_leaders_gather(rank, counts, (size_t)g->n * each, (size_t)g->index * each,
                                 each, err));
    for (int32_t k = 1; k < g->n; k++) add(counts, counts + (size_t)k * (n + 1), n);
    if (r->recorder) hd_recorder_stat(r->recorder, counts, (uint64_t)counts[n]);
    return HD_OK;
}

static void end_record(engine_recording *r, size_t n) {
    r->parts = 0;
    hd_recorder_stat(r->recorder, r->counts, (uint64_t)r->counts[n]);
    hd_recorder_end(r->recorder);
}

int64_t *engine_recording_room(const engine_rank *first, size_t *n) {
    const engine_recording *r = first->recording;
    *n = r ? n_counts(first) + 1 : 0;
    return r ? r->counts + 2 * *n : NULL;
}

void engine_recording_add(engine_rank *first, uint64_t number, const int64_t *counts) {
    engine_recording *r = first->recording;
    const size_t n = n_counts(first);
    if (number != first->engine->groups[0].mail.record.number || r->parts == 0) return;
    add(r->counts, counts, n);
    if (--r->parts == 0) end_record(r, n);
}

void engine_recording_lost(engine_rank *first) {
    engine_recording *r = first->recording;
    if (r && first->engine->independent && r->parts > 0) end_record(r, n_counts(first));
}

/* Rank 0's counts end the record; of independent groups those of the last one. */
static void end(engine_rank *rank, uint64_t number) {
    engine_recording *r = rank->recording;
    hd_engine *e = rank->engine;
    engine_rank *first = &e->ranks[0];
    const size_t n = n_counts(rank);
    hd_model_runner_record(rank->model_runner, NULL);
    if (joins(rank)) {
        if (r->recorder) hd_recorder_end(r->recorder);
        return;
    }
    int64_t *own = rank == first ? first->recording->counts + n + 1 : r->counts;
    if (count(rank, own, NULL) != HD_OK) memset(own, 0, (n + 1) * sizeof *own);
    if (engine_rank_is_remote(rank)) {
        engine_remote_put_counts(rank, number, own, n + 1);
        return;
    }
    pthread_mutex_lock(&e->lock);
    engine_recording_add(first, number, own);
    pthread_mutex_unlock(&e->lock);
}

static size_t padded(uint64_t n) {
    return (size_t)(n + sizeof(float) - 1) / sizeof(float) * sizeof(float);
}

/* The bytes of all groups, one behind the other; *first: where this group's begin. */
static hd_status place_rows(engine_rank *rank, uint64_t own, size_t *first, hd_err *err) {
    engine_recording *r = rank->recording;
    const hd_rank_group *g = &rank->comm->groups[HD_GROUP_DP];
    uint64_t *n = r->row_bytes;
    size_t all = 0;
    n[g->index] = own;
    HD_TRY(engine_leaders_gather(rank, n, (size_t)g->n * sizeof *n,
                                 (size_t)g->index * sizeof *n, sizeof *n, err));
    for (int32_t k = 0; k < g->n; k++) {
        if (k == g->index) *first = all;
        if (n[k] > MOST_RECORD_BYTES || all > MOST_JOINED_BYTES) {
            return HD_FAIL(err, HD_EPEER, "group %d recorded %llu bytes in a round", k,
                           (unsigned long long)n[k]);
        }
        all += padded(n[k]);
    }
    return engine_make_room(&r->joined, all, err);
}

static hd_status join_rows(engine_rank *rank, hd_err *err) {
    engine_recording *r = rank->recording;
    const hd_rank_group *g = &rank->comm->groups[HD_GROUP_DP];
    const hd_recorder_state part = hd_recorder_read_state(r->part);
    size_t first = 0;
    HD_TRY(place_rows(rank, part.waiting, &first, err));
    if (r->joined.n == 0) return HD_OK;
    uint8_t *rows = (uint8_t *)r->joined.data;
    hd_recorder_take(r->part, part.begun, rows + first, part.waiting);
    HD_TRY(engine_leaders_gather(rank, rows, r->joined.n, first, padded(part.waiting), err));
    for (int32_t k = 0; k < g->n && r->recorder; k++) {
        HD_TRY(hd_recorder_join(r->recorder, rows, (size_t)r->row_bytes[k], err));
        rows += padded(r->row_bytes[k]);
    }
    if (r->recorder) hd_recorder_end_pass(r->recorder);
    return HD_OK;
}

static void change(engine_rank *rank) {
    engine_recording *r = rank->recording;
    const uint64_t before = r->number;
    r->number = rank->order.record;
    r->mode = rank->order.record_mode;
    if (!rank->model_runner) {
        if (r->recorder) hd_recorder_end(r->recorder);
    } else if (r->number) {
        begin(rank);
    } else {
        end(rank, before);
    }
}

bool engine_recording_step(engine_rank *rank) {
    engine_recording *r = rank->recording;
    hd_engine *e = rank->engine;
    const engine_order *o = &rank->order;
    hd_err err = {0};
    hd_status st = HD_OK;
    if (!r) return true;
    if (o->joins_rows) st = join_rows(rank, &err);
    if (o->sums_counts) st = sum_counts(rank, &err);
    if (o->record != r->number) change(rank);
    pthread_mutex_lock(&e->lock);
    engine_recording_obeyed(e, rank->group, o->record_requests);
    pthread_mutex_unlock(&e->lock);
    if (st != HD_OK) engine_ranks_recover(rank, &err);
    return st == HD_OK;
}

/* ---- any thread ---- */

hd_recorder *hd_engine_recorder(const hd_engine *e) {
    return e->n_ranks && e->ranks[0].recording ? e->ranks[0].recording->recorder : NULL;
}

static void order(hd_engine *e, bool start, hd_record_mode mode) {
    engine_record_wish *w = &e->groups[0].mail.record;
    pthread_mutex_lock(&e->lock);
    w->start |= start;
    w->stop = !start;
    if (start) w->mode = mode;
    w->requests++;
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
}

hd_status hd_engine_record_start(hd_engine *e, hd_record_mode mode, hd_err *err) {
    if (!hd_engine_recorder(e)) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "this model has no experts to record");
    }
    if (mode != HD_RECORD_STAT && e->independent) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "groups have no passes in common (--dwdp): only counts can be recorded");
    }
    if (mode != HD_RECORD_STAT && !e->ranks[0].recording->has_rows) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "GPUs divide the rows of a step: only counts can be recorded");
    }
    order(e, true, mode);
    return HD_OK;
}

void hd_engine_record_stop(hd_engine *e) {
    if (hd_engine_recorder(e)) order(e, false, HD_RECORD_STAT);
}

bool hd_engine_record_settled(hd_engine *e) {
    pthread_mutex_lock(&e->lock);
    const int32_t n = e->independent ? e->n_present : 1; /* the others go with the first */
    bool settled = true;
    for (int32_t g = 0; g < n; g++) {
        settled = settled && e->groups[g].records_obeyed == e->groups[0].mail.record.requests;
    }
    pthread_mutex_unlock(&e->lock);
    return settled;
}
