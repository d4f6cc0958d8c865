/* expert_sets.c - streams layers whose rows choose nearly all experts: what slots lack is copied to sets, one
 * round of a layer in each, on a stream of its own, while the rounds before are computed. Copies run on into
 * the next layers, whose experts need not be chosen yet. Slots keep what they hold.
 *
 * Two events guard a set: *fetched* before operators read it, *consumed* before copies overwrite it. What was
 * queued before rounds are streamed anew, a step for example, may still use slots, so copies wait for it. */
#include "base/checked.h"
#include "model/expert_host_internal.h"

enum { MANY = 4 }; /* places for each expert: fewer than one in fifty is not chosen */

static int32_t rounds_of(const expert_host *s, const host_layer *u) {
    const int32_t lacks = u->n_experts - u->slots.n_slots;
    return hd_max_i32(1, (int32_t)hd_ceil_div(lacks, s->stream.most));
}

static host_set *set_of(host_stream *x, int64_t round) {
    return &x->sets[round % HOST_SETS];
}

/* What is fetched is not wanted: the compute stream passes it by. */
static void drop_fetched(expert_host *s) {
    host_stream *x = &s->stream;
    if (x->computed < x->fetched) {
        hd_stream_wait_event(s->layer.stream, set_of(x, x->fetched - 1)->fetched);
    }
    x->computed = x->fetched = 0;
}

static void begin_anew(expert_host *s, int32_t unit) {
    host_stream *x = &s->stream;
    drop_fetched(s);
    x->unit = unit;
    x->round = 0;
    x->end = unit < s->n_main_units ? s->n_main_units : unit + 1;
    for (int32_t i = 0; i < HOST_SETS; i++) x->sets[i].used = false;
    hd_stream_record_event(s->layer.stream, x->begun);
    hd_stream_wait_event(s->o.copy_stream, x->begun);
}

static void fetch_round(expert_host *s) {
    host_stream *x = &s->stream;
    const host_layer *u = &s->units[x->unit];
    host_set *set = set_of(x, x->fetched), *before = set_of(x, x->fetched + HOST_SETS - 1);
    hd_moe_fetch_args a = host_fetch_args(s, u, &set->round);
    if (set->used) hd_stream_wait_event(s->o.copy_stream, set->consumed);
    a.round_offset = NULL;
    a.offset = NULL;
    a.before = x->round ? before->round.range : NULL;
    a.set = set->memory;
    a.most = x->most;
    a.host.mail = NULL;
    s->layer.ops->moe_fetch(s->o.copy_stream, &a);
    hd_stream_record_event(s->o.copy_stream, set->fetched);
    x->fetched++;
    if (++x->round < rounds_of(s, u)) return;
    x->round = 0;
    while (++x->unit < x->end && s->units[x->unit].whole) {
    }
}

static void fetch_ahead(expert_host *s) {
    host_stream *x = &s->stream;
    while (x->unit < x->end && x->fetched < x->computed + HOST_SETS) fetch_round(s);
}

/* Whether the next round that was fetched and not computed is the first one of this unit. */
static bool is_expected(const expert_host *s, int32_t unit) {
    const host_stream *x = &s->stream;
    int64_t ahead = x->fetched - x->computed;
    int32_t u = x->unit, round = x->round;
    if (ahead == 0) return false;
    for (; ahead > 0; ahead--) {
        if (round-- > 0) continue;
        do u--;
        while (s->units[u].whole);
        round = rounds_of(s, &s->units[u]) - 1;
    }
    return u == unit && round == 0;
}

bool host_stream_begin(expert_host *s, int32_t unit) {
    const bool expected = is_expected(s, unit);
    const host_layer *u = &s->units[unit];
    const bool many = s->layer.n_places >= MANY * u->n_experts;
    const bool on = s->stream.most > 0 && !u->whole && u->slots.n_slots < u->n_experts;
    if (expected) return true;
    if (on && many) {
        begin_anew(s, unit);
        s->n_rounds = rounds_of(s, u);
        return true;
    }
    if (s->stream.most > 0 && !u->whole) drop_fetched(s);
    return false;
}

void host_stream_next(expert_host *s, hd_expert_wave *out) {
    host_stream *x = &s->stream;
    const host_layer *u = s->unit;
    if (s->round > 0) {
        host_set *done = set_of(x, x->computed++);
        hd_stream_record_event(s->layer.stream, done->consumed);
        done->used = true;
    }
    fetch_ahead(s);
    if (s->round++ == rounds_of(s, u)) return;
    const host_set *set = set_of(x, x->computed);
    hd_stream_wait_event(s->layer.stream, set->fetched);
    s->layer.ops->moe_round(s->layer.stream,
                            &(hd_moe_round_args){.round_offset = set->round.round_offset,
                                                 .offset = s->layer.offset,
                                                 .range = set->round.range,
                                                 .n_experts = u->n_experts});
    const hd_expert_table *tables = u->streamed[x->computed % HOST_SETS];
    *out = (hd_expert_wave){.n = u->n_experts,
                            .n_places = s->layer.n_places,
                            .offset = set->round.round_offset,
                            .gate = &tables[0],
                            .up = &tables[1],
                            .down = &tables[2]};
}

hd_status host_stream_open(expert_host *s, hd_err *err) {
    host_stream *x = &s->stream;
    if (x->most == 0) return HD_OK;
    HD_TRY(hd_device_event_open(&x->begun, s->o.device, false, err));
    for (int32_t i = 0; i < HOST_SETS; i++) {
        HD_TRY(hd_device_event_open(&x->sets[i].fetched, s->o.device, false, err));
        HD_TRY(hd_device_event_open(&x->sets[i].consumed, s->o.device, false, err));
    }
    if (s->o.copy_stream != s->o.stream) hd_stream_report_to(s->o.copy_stream, s->o.stream);
    return HD_OK;
}

void host_stream_close(expert_host *s) {
    host_stream *x = &s->stream;
    if (x->most > 0) hd_stream_wait(s->o.copy_stream);
    hd_device_event_close(x->begun);
    for (int32_t i = 0; i < HOST_SETS; i++) {
        hd_device_event_close(x->sets[i].fetched);
        hd_device_event_close(x->sets[i].consumed);
    }
}
