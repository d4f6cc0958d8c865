/* exchange.c - sums and gathers in parts over comm.h. */
#include "train/exchange.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum { PART = 1 << 20 }; /* floats */

typedef struct span {
    int64_t first, n; /* first counts from the part's beginning */
} span;

/* The share of [first, first + own) in the part that begins at `at`. */
static span share_of(int64_t first, int64_t own, int64_t at, int64_t n) {
    const int64_t from = hd_min_i64(hd_max_i64(first, at), at + n);
    const int64_t to = hd_min_i64(hd_max_i64(first + own, from), at + n);
    return (span){from - at, to - from};
}

hd_status train_ranks_sum(const train_ranks *r, float *x, int64_t n, int64_t first, int64_t own,
                          hd_err *err) {
    for (int64_t at = 0; r->comm && at < n; at += PART) {
        const int64_t m = hd_min_i64(PART, n - at);
        const span s = share_of(first, own, at, m);
        const hd_reduce_scatter_args a = {
            .group = HD_GROUP_DP, .x = hd_f32(x + at), .n = m, .first = s.first, .own = s.n};
        hd_comm_reduce_scatter(r->comm, r->stream, &a);
    }
    return hd_stream_sync(r->stream, err);
}

hd_status train_ranks_gather(const train_ranks *r, const float *slice, int64_t first,
                             int64_t own, float *to, int64_t n, hd_err *err) {
    float *part = to ? NULL : malloc(PART * sizeof *part);
    if (!to && !part) return HD_FAIL(err, HD_ENOMEM, "no memory for an exchange of ranks");
    for (int64_t at = 0; at < n; at += PART) {
        const int64_t m = hd_min_i64(PART, n - at);
        const span s = share_of(first, own, at, m);
        float *x = to ? to + at : part;
        if (s.n) memcpy(x + s.first, slice + at + s.first - first, (size_t)s.n * sizeof *x);
        const hd_all_gather_args a = {.group = HD_GROUP_DP,
                                      .x = x,
                                      .rows = 1,
                                      .cols = (int32_t)m,
                                      .first = (int32_t)s.first,
                                      .own = (int32_t)s.n,
                                      .on_host = true};
        if (r->comm) hd_comm_all_gather(r->comm, r->stream, &a);
    }
    free(part);
    return hd_stream_sync(r->stream, err);
}

hd_status train_ranks_collect(const train_ranks *r, const void *block, int64_t bytes, void *all,
                              hd_err *err) {
    const int64_t own = bytes / (int64_t)sizeof(float), n = r->comm->groups[HD_GROUP_DP].n;
    return train_ranks_gather(r, block, r->comm->rank * own, own, all, n * own, err);
}

hd_status train_ranks_broadcast(const train_ranks *r, void *data, size_t bytes, hd_err *err) {
    const hd_broadcast_args a = {HD_GROUP_DP, data, bytes};
    hd_comm_broadcast(r->comm, r->stream, &a);
    return hd_stream_sync(r->stream, err);
}
