/* fetch_order.c - see fetch_order.h. */
#include "moe/fetch_order.h"

#include <assert.h>
#include <stdlib.h>

/* Where a peer's next slice begins. */
typedef struct cursor {
    int32_t copy; /* n: no more */
    size_t done;  /* bytes of it */
} cursor;

static size_t slices_of(const hd_fetch_copy *c, size_t slice_bytes) {
    return (c->bytes + slice_bytes - 1) / slice_bytes;
}

static void skip_to_own(cursor *at, const hd_fetch_copy *copies, int32_t n, int32_t peer) {
    while (at->copy < n && (copies[at->copy].peer != peer || copies[at->copy].bytes == 0)) {
        at->copy++;
    }
}

static hd_fetch_copy take_slice(cursor *at, const hd_fetch_copy *copies, size_t slice_bytes) {
    const hd_fetch_copy *c = &copies[at->copy];
    const size_t left = c->bytes - at->done, bytes = left < slice_bytes ? left : slice_bytes;
    const hd_fetch_copy slice = {.peer = c->peer,
                                 .what = c->what,
                                 .to = (uint8_t *)c->to + at->done,
                                 .from = (const uint8_t *)c->from + at->done,
                                 .bytes = bytes};
    at->done += bytes;
    if (at->done == c->bytes) *at = (cursor){.copy = at->copy + 1};
    return slice;
}

static void deal(hd_fetch_order *o, const hd_fetch_copy *copies, int32_t n, int32_t n_peers,
                 int32_t first_peer, size_t slice_bytes, cursor *cursors) {
    const int32_t all = o->n;
    o->n = 0;
    for (int32_t k = first_peer; o->n < all; k++) {
        const int32_t peer = k % n_peers;
        skip_to_own(&cursors[peer], copies, n, peer);
        if (cursors[peer].copy == n) continue;
        o->slices[o->n++] = take_slice(&cursors[peer], copies, slice_bytes);
    }
}

hd_status hd_fetch_order_open(hd_fetch_order *out, const hd_fetch_copy *copies, int32_t n,
                              int32_t n_peers, int32_t first_peer, size_t slice_bytes,
                              hd_err *err) {
    size_t all = 0;
    assert(n_peers > 0 && first_peer >= 0 && slice_bytes > 0);
    for (int32_t i = 0; i < n; i++) {
        assert(copies[i].peer >= 0 && copies[i].peer < n_peers);
        all += slices_of(&copies[i], slice_bytes);
    }
    cursor *cursors = calloc((size_t)n_peers, sizeof *cursors);
    *out = (hd_fetch_order){.slices = calloc(all + 1, sizeof *out->slices), .n = (int32_t)all};
    if (!cursors || !out->slices || all > INT32_MAX) {
        hd_fetch_order_close(out);
        free(cursors);
        return HD_FAIL(err, HD_ENOMEM, "no memory for %zu slices of a fetch", all);
    }
    deal(out, copies, n, n_peers, first_peer, slice_bytes, cursors);
    free(cursors);
    return HD_OK;
}

void hd_fetch_order_close(hd_fetch_order *o) {
    free(o->slices);
    *o = (hd_fetch_order){0};
}
