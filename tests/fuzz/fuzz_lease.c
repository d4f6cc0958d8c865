/* fuzz_lease.c - any bytes as messages of a peer, and as events of the owner, of a machine of
 * kv/lease.h. Its counts must stay right, and a page is written only while its lease is open. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kv/lease.h"

enum { MAX_LEASES = 3, MAX_PAGES = 4, EPOCH = 1 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void step(hd_leases *l, const hd_lease_event *e) {
    hd_lease_action a;
    hd_leases_step(l, e);
    while (hd_leases_take(l, &a)) {
        const hd_lease *lease = hd_leases_at(l, (int32_t)(a.id.slot % MAX_LEASES));
        if (a.kind == HD_LEASE_DO_WRITE && a.page >= lease->n_pages) abort();
    }
    if (hd_leases_check(l, false, NULL) != HD_OK) abort();
}

/* An event of five bytes, or a message of which one byte says whether its epochs are right. */
static size_t take_event(hd_leases *l, const uint8_t *data, size_t n) {
    hd_lease_message m;
    hd_lease_event e = {.kind = (hd_lease_event_kind)(data[0] % (HD_LEASE_EV_TICK + 1)),
                        .now_ns = hd_leases_read_counts(l).opened[0],
                        .peer = data[1] & 1,
                        .time_ns = 50,
                        .epoch = data[2],
                        .n_pages = data[3],
                        .page = data[4],
                        .message = &m};
    e.id = hd_leases_at(l, data[2] % MAX_LEASES)->id;
    if (e.kind == HD_LEASE_EV_ABORT) e.reason = HD_LEASE_CANCEL;
    if (e.kind == HD_LEASE_EV_MESSAGE) {
        if (n < 5 + sizeof m) return n;
        memcpy(&m, data + 5, sizeof m);
        if (data[1] & 2) m.from_epoch = m.to_epoch = EPOCH;
        if (data[1] & 4) m.to = hd_leases_at(l, data[2] % MAX_LEASES)->id;
        e.digest = data[1] & 8 ? m.digest : 0;
    }
    step(l, &e);
    return e.kind == HD_LEASE_EV_MESSAGE ? 5 + sizeof m : 5;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    const hd_lease_options o = {.epoch = EPOCH,
                                .max_time_ns = 100,
                                .max_leases = MAX_LEASES,
                                .max_per_peer = 2,
                                .max_peers = 2,
                                .max_pages = MAX_PAGES};
    void *memory = calloc(1, hd_leases_bytes(&o));
    if (!memory) abort();
    hd_leases *l = hd_leases_place(memory, &o);
    for (int32_t p = 0; p < 2; p++) {
        step(l, &(hd_lease_event){.kind = HD_LEASE_EV_HELLO, .peer = p, .epoch = EPOCH});
    }
    while (n >= 5) {
        const size_t used = take_event(l, data, n);
        data += used;
        n -= used;
    }
    free(memory);
    return 0;
}
