/* expert_moves.c - experts move between ranks, in the leader's order: staged one by one, then a
 * layer's new map is verified by every rank, then all flip to it between the same two steps.
 *
 * Every rank votes on what it was told, with a checksum of it: one that refuses, or was told
 * something else, leaves all maps as they are. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/checksum.h"
#include "runner/expert_moves_internal.h"
#include "weights/experts/expert_moves.h"

enum { TRANSFER_WORDS = 1 << 18 }; /* of one exchange: 1 MiB */

static int32_t n_slots(const hd_model_runner *x) {
    return hd_shard_slots(hd_weights_shard(x->env.weights));
}

static int32_t n_ranks(const hd_model_runner *x) {
    return x->env.comm->groups[HD_GROUP_TP].n * x->env.comm->groups[HD_GROUP_DP].n;
}

size_t runner_order_bytes(const hd_model_runner *x) {
    return sizeof(runner_move_order) + (size_t)n_slots(x) * sizeof(int32_t);
}

hd_status runner_moves_open(hd_model_runner *x, hd_err *err) {
    runner_moves *m = &x->moves;
    hd_weights *w = x->o.movable;
    if (!w || x->env.comm->groups[HD_GROUP_EP].n == 1) return HD_OK;
    for (int32_t l = 0; l < x->env.spec->n_layers + hd_weights_n_mtp(w); l++) {
        const size_t n = hd_weights_packed_bytes(w, l);
        if (n > m->bytes) m->bytes = n;
    }
    if (!m->bytes) return HD_OK;
    m->packed = malloc(m->bytes);
    m->map = calloc((size_t)n_slots(x), sizeof *m->map);
    m->votes = calloc((size_t)n_ranks(x), sizeof *m->votes);
    if (m->packed && m->map && m->votes) return runner_copies_open(x, n_slots(x), err);
    return HD_FAIL(err, HD_ENOMEM, "no memory to move experts of %zu bytes", m->bytes);
}

void runner_moves_close(hd_model_runner *x) {
    runner_copies_close(x);
    free(x->moves.packed);
    free(x->moves.map);
    free(x->moves.votes);
    x->moves = (runner_moves){0};
}

/* ---- on every rank ---- */

/* Each member of the group has `own` votes, which follow those of the members before. */
static void gather_votes(hd_model_runner *x, hd_group group, runner_vote *votes, int32_t own) {
    const hd_rank_group *g = &x->env.comm->groups[group];
    const int32_t words = own * (int32_t)(sizeof(runner_vote) / sizeof(float));
    hd_comm_all_gather(x->env.comm, x->env.stream,
                       &(hd_all_gather_args){.group = group,
                                             .x = (float *)(void *)votes,
                                             .rows = 1,
                                             .cols = g->n * words,
                                             .first = g->index * words,
                                             .own = words,
                                             .on_host = true});
}

/* All ranks, of all attention groups, learn what each says and was told; the first refusal is the
 * result. */
static hd_status vote(hd_model_runner *x, hd_status own, const hd_err *why, hd_err *err) {
    const hd_rank_group *tp = &x->env.comm->groups[HD_GROUP_TP];
    const hd_rank_group *dp = &x->env.comm->groups[HD_GROUP_DP];
    const int32_t index = dp->index * tp->n + tp->index, n = n_ranks(x);
    runner_vote *votes = x->moves.votes;
    votes[index] = (runner_vote){
        (int32_t)own, {(uint32_t)x->moves.told, (uint32_t)(x->moves.told >> 32)}
    };
    gather_votes(x, HD_GROUP_TP, votes + dp->index * tp->n, 1);
    if (dp->n > 1) gather_votes(x, HD_GROUP_DP, votes, tp->n);
    HD_TRY(hd_stream_failure(x->env.stream, err));
    for (int32_t k = 0; k < n; k++) {
        const hd_status of = (hd_status)votes[k].status;
        if (of == HD_OK) continue;
        if (k == index) return HD_FAIL(err, own, "rank %d: %s", k, why->msg);
        return HD_FAIL(err, of, "rank %d %s", k,
                       of == HD_ENOMEM    ? "has no memory for an expert"
                       : of == HD_EFORMAT ? "got other bytes than were sent"
                       : of == HD_EAGAIN  ? "has not got all experts yet"
                                          : "does not have what the leader says");
    }
    for (int32_t k = 1; k < n; k++) {
        if (memcmp(votes[k].told, votes[0].told, sizeof votes[k].told) == 0) continue;
        return HD_FAIL(err, HD_EINVAL, "rank %d was told other moves than rank 0", k);
    }
    return HD_OK;
}

/* Member `from` of the expert group has the bytes; then all have them. */
static void transfer(hd_model_runner *x, int32_t from, size_t bytes) {
    const bool own = x->env.comm->groups[HD_GROUP_EP].index == from;
    const size_t words = bytes / sizeof(float);
    for (size_t at = 0; at < words; at += TRANSFER_WORDS) {
        const size_t some = words - at < TRANSFER_WORDS ? words - at : TRANSFER_WORDS;
        hd_comm_all_gather(x->env.comm, x->env.stream,
                           &(hd_all_gather_args){.group = HD_GROUP_EP,
                                                 .x = (float *)(void *)x->moves.packed + at,
                                                 .rows = 1,
                                                 .cols = (int32_t)some,
                                                 .own = own ? (int32_t)some : 0,
                                                 .on_host = true});
    }
}

static hd_status stage(hd_model_runner *x, const runner_move_order *o, hd_err *err) {
    const int32_t index = x->env.comm->groups[HD_GROUP_EP].index;
    const size_t bytes = hd_weights_packed_bytes(x->env.weights, o->layer);
    hd_err why = {0};
    hd_status st = HD_OK;
    if (index == o->from) {
        st = hd_weights_pack_expert(x->env.weights, o->layer, o->expert, x->moves.packed, &why);
    }
    HD_TRY(vote(x, st, &why, err)); /* a rank without the expert has no bytes to send */
    transfer(x, o->from, bytes);
    HD_TRY(hd_stream_failure(x->env.stream, err));
    if (index == o->to) {
        runner_copies_begin(x);
        st = hd_weights_stage_expert(x->o.movable, o->layer, o->expert, x->moves.packed,
                                     x->moves.copies.stream, &why);
    }
    HD_TRY(vote(x, st, &why, err));
    return runner_copies_add(x, o, err); /* the same on all ranks */
}

/* Whether experts that were copied between devices have the bytes of their sources. HD_EAGAIN: they are
 * still on their way, of this rank or another. */
static hd_status compare_copies(hd_model_runner *x, hd_err *err) {
    const runner_copies *c = &x->moves.copies;
    const int32_t index = x->env.comm->groups[HD_GROUP_EP].index;
    hd_err why = {0};
    hd_status st = HD_OK;
    if (!c->stream) return HD_OK;
    if (!runner_copies_are_done(x)) st = HD_FAIL(&why, HD_EAGAIN, "experts are being copied");
    HD_TRY(vote(x, st, &why, err));
    for (int32_t k = 0; k < c->n; k++) {
        const uint64_t *own = (const uint64_t *)c->sums.host + k;
        if (index == c->list[k].from) memcpy(x->moves.packed, own, sizeof *own);
        transfer(x, c->list[k].from, sizeof *own);
        if (index != c->list[k].to || memcmp(x->moves.packed, own, sizeof *own) == 0) continue;
        st = HD_FAIL(&why, HD_EFORMAT, "layer %d: expert %d arrived with a wrong checksum",
                     c->list[k].layer, c->list[k].expert);
    }
    return vote(x, st, &why, err);
}

static hd_status verify(hd_model_runner *x, const runner_move_order *o, const int32_t *map,
                        hd_err *err) {
    const hd_expert_map *old = hd_weights_expert_map(x->env.weights, o->layer);
    hd_err why = {0};
    x->moves.verified = -1;
    HD_TRY(compare_copies(x, err));
    memcpy(x->moves.map, map, (size_t)n_slots(x) * sizeof *map);
    hd_status st = hd_weights_check_map(x->env.weights, o->layer, map, &why);
    if (st == HD_OK && old->version != o->version) {
        st = HD_FAIL(&why, HD_EINVAL, "layer %d: a map after version %u, not %u", o->layer,
                     o->version, old->version);
    }
    HD_TRY(vote(x, st, &why, err));
    x->moves.verified = o->layer;
    return HD_OK;
}

/* Cannot fail where the map was verified: everything is there. */
static hd_status flip(hd_model_runner *x, const runner_move_order *o, hd_err *err) {
    const hd_expert_map *old = hd_weights_expert_map(x->env.weights, o->layer);
    if (x->moves.verified != o->layer || old->version != o->version) {
        return HD_FAIL(err, HD_EPEER, "layer %d: told to flip to a map that was not verified",
                       o->layer);
    }
    hd_err why = {0};
    x->moves.verified = -1;
    const hd_status st =
        hd_weights_place_experts(x->o.movable, o->layer, x->moves.map, x->env.stream, &why);
    runner_copies_flipped(x);
    return vote(x, st, &why, err); /* then all have flipped */
}

hd_status runner_move(hd_model_runner *x, const void *payload, hd_err *err) {
    const int32_t members = x->env.comm->groups[HD_GROUP_EP].n;
    runner_move_order o;
    memcpy(&o, payload, sizeof o);
    x->moves.told = hd_checksum(0, payload, runner_order_bytes(x));
    const int32_t *map = (const int32_t *)(const void *)((const uint8_t *)payload + sizeof o);
    const bool fits = x->moves.packed && o.layer >= 0 &&
                      o.layer < x->env.spec->n_layers + hd_weights_n_mtp(x->env.weights) &&
                      hd_weights_packed_bytes(x->env.weights, o.layer) > 0 && o.from >= 0 &&
                      o.from < members && o.to >= 0 && o.to < members && o.expert >= 0 &&
                      o.expert < x->env.spec->route.n_experts;
    if (!fits) {
        return HD_FAIL(err, HD_EPEER, "told to move expert %d of layer %d from %d to %d",
                       o.expert, o.layer, o.from, o.to);
    }
    switch (o.kind) {
    case RUNNER_MOVE_STAGE:
        return stage(x, &o, err);
    case RUNNER_MOVE_VERIFY:
        return verify(x, &o, map, err);
    case RUNNER_MOVE_FLIP:
        return flip(x, &o, err);
    case RUNNER_MOVE_DROP:
        x->moves.copies.n = 0; /* what is under way ends before anything is verified */
        hd_weights_drop_staged(x->o.movable);
        return HD_OK;
    }
    return HD_FAIL(err, HD_EPEER, "told to do %d with experts", (int)o.kind);
}

/* ---- the leader ---- */

hd_status hd_model_runner_stage_expert(hd_model_runner *x, const hd_expert_move *m,
                                       hd_err *err) {
    return runner_order_move(x,
                             &(runner_move_order){.kind = RUNNER_MOVE_STAGE,
                                                  .layer = m->layer,
                                                  .expert = m->expert,
                                                  .from = m->from,
                                                  .to = m->to},
                             NULL, err);
}

hd_status hd_model_runner_verify_map(hd_model_runner *x, int32_t layer, const int32_t *map,
                                     uint32_t version, hd_err *err) {
    const runner_move_order o = {
        .kind = RUNNER_MOVE_VERIFY, .layer = layer, .version = version};
    return runner_order_move(x, &o, map, err);
}

hd_status hd_model_runner_flip_map(hd_model_runner *x, int32_t layer, uint32_t version,
                                   hd_err *err) {
    const runner_move_order o = {.kind = RUNNER_MOVE_FLIP, .layer = layer, .version = version};
    return runner_order_move(x, &o, NULL, err);
}

hd_status hd_model_runner_drop_staged(hd_model_runner *x, int32_t layer, hd_err *err) {
    return runner_order_move(x, &(runner_move_order){.kind = RUNNER_MOVE_DROP, .layer = layer},
                             NULL, err);
}
