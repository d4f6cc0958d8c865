/* leaders.c - see leaders.h. */
#include "engine/leaders.h"
#include "engine/remote/remote_internal.h"

#include <stdlib.h>

hd_status engine_make_room(hd_bytes *b, size_t n, hd_err *err) {
    if (n > b->cap) {
        char *data = realloc(b->data, n);
        if (!data) return HD_FAIL(err, HD_ENOMEM, "no memory for %zu bytes of mail", n);
        b->data = data;
        b->cap = n;
    }
    b->n = n;
    return HD_OK;
}

static hd_status check_comm(const engine_rank *rank, hd_err *err) {
    return rank->comm ? HD_OK : HD_FAIL(err, HD_EPEER, "the other ranks are lost");
}

/* Which remembers a failure: of the thread that exchanges. */
static hd_stream *stream_of(const engine_rank *rank) {
    const engine_remote *m = rank->engine->remote;
    return m && m->stream ? m->stream : rank->stream;
}

hd_status engine_leaders_broadcast(const engine_rank *rank, void *data, size_t n, hd_err *err) {
    HD_TRY(check_comm(rank, err));
    hd_comm_broadcast(rank->comm, stream_of(rank), &(hd_broadcast_args){HD_GROUP_DP, data, n});
    return hd_stream_sync(stream_of(rank), err);
}

hd_status engine_leaders_gather(const engine_rank *rank, void *data, size_t n, size_t first,
                                size_t own, hd_err *err) {
    HD_TRY(check_comm(rank, err));
    hd_comm_all_gather(rank->comm, stream_of(rank),
                       &(hd_all_gather_args){.group = HD_GROUP_DP,
                                             .x = data,
                                             .rows = 1,
                                             .cols = (int32_t)(n / sizeof(float)),
                                             .first = (int32_t)(first / sizeof(float)),
                                             .own = (int32_t)(own / sizeof(float)),
                                             .on_host = true});
    return hd_stream_sync(stream_of(rank), err);
}
