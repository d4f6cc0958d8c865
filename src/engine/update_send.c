/* update_send.c - new weights for ranks in processes of their own. Each process has the complete
 * weights of the same files. Rank 0 has applied the update; before the next step it sends what has
 * changed to the leaders of the other attention groups, and every leader to its followers. A rank that
 * comes later has read the files, so all that was ever changed is sent again. */
#include "base/checked.h"
#include "base/progress.h"
#include "engine/new_weights.h"

enum { PIECE_BYTES = 1 << 20 }; /* of a part, in one message */

void engine_update_look(engine_rank *first) {
    const hd_weights_changes *c = first->engine->changes;
    if (c && hd_weights_changes_are_due(c)) first->order.renewed = true;
}

/* From the first member of the group to all. */
static hd_status pass_on(const engine_rank *rank, hd_group group, void *data, size_t n,
                         hd_err *err) {
    for (size_t at = 0; at < n; at += PIECE_BYTES) {
        const size_t some = n - at < PIECE_BYTES ? n - at : PIECE_BYTES;
        hd_comm_broadcast(rank->comm, rank->stream,
                          &(hd_broadcast_args){group, (uint8_t *)data + at, some});
        HD_TRY(hd_stream_sync(rank->stream, err));
    }
    return HD_OK;
}

/* Takes the next part from the first member of a group; part->bytes 0: there is none. */
static hd_status take_part(const engine_rank *rank, hd_group group, hd_map *part, hd_err *err) {
    uint64_t n = 0;
    HD_TRY(pass_on(rank, group, &n, sizeof n, err));
    if (n == 0) return HD_OK;
    HD_TRY(hd_map_take(part, (size_t)n, "changed weights", err));
    return pass_on(rank, group, hd_map_writable(part), part->bytes, err);
}

static hd_status send_part(const engine_rank *rank, hd_group group, const hd_map *part,
                           hd_err *err) {
    uint64_t n = part->bytes;
    HD_TRY(pass_on(rank, group, &n, sizeof n, err));
    return n ? pass_on(rank, group, hd_map_writable(part), part->bytes, err) : HD_OK;
}

/* ---- rank 0 ---- */

static hd_status send_all(const engine_rank *first, hd_err *err) {
    hd_map part;
    size_t n;
    do {
        HD_TRY(hd_weights_changes_take(first->engine->changes, &part, err));
        n = part.bytes;
        hd_status st = send_part(first, HD_GROUP_DP, &part, err);
        if (st == HD_OK) st = send_part(first, HD_GROUP_TP, &part, err);
        if (n) hd_map_close(&part);
        HD_TRY(st);
    } while (n);
    return HD_OK;
}

/* ---- the others ---- */

/* Takes all parts from the group's first member, and passes them on to followers. */
static hd_status take_all(const engine_rank *rank, hd_group from, hd_weights_update *u,
                          hd_err *err) {
    for (;;) {
        hd_map part = {0};
        hd_status st = take_part(rank, from, &part, err);
        if (st == HD_OK && from == HD_GROUP_DP) st = send_part(rank, HD_GROUP_TP, &part, err);
        if (st != HD_OK || part.bytes == 0) {
            hd_map_close(&part);
            return st;
        }
        HD_TRY(hd_weights_changes_read(u, rank->engine->whole, &part, err));
    }
}

static hd_status renew(engine_rank *rank, hd_group from, hd_err *err) {
    hd_engine *e = rank->engine;
    hd_weights_update *u;
    HD_TRY(hd_weights_update_open(&u, e->whole, err));
    hd_status st = take_all(rank, from, u, err);
    if (st == HD_OK) st = hd_weights_update_apply(u, e->whole, rank->stream, err);
    if (st == HD_OK) st = engine_update_renew_shards(e, u, err);
    hd_weights_update_close(u);
    return st;
}

hd_status engine_update_exchange(engine_rank *leader, hd_err *err) {
    const int64_t begun = hd_now_ns();
    if (!leader->comm) return HD_OK;
    hd_model_runner_renew(leader->model_runner);
    if (leader->index) return renew(leader, HD_GROUP_DP, err);
    const hd_status st = send_all(leader, err);
    leader->totals.weight_updates_ns += hd_now_ns() - begun;
    return st;
}

hd_status engine_update_follow(void *follower, hd_err *err) {
    return renew(follower, HD_GROUP_TP, err);
}
