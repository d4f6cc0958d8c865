/* preflight.c - see preflight.h. */
#include "comm/preflight.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/progress.h"

/* The tickets of a pair: both are there; bytes, twice, as the first ones also find their way; what member 0 is
 * told: the time, twice, as it does not wait for who exchanges bytes yet, and rates. */
enum { READY, FIRST, SECOND, TIME, TIME_AGAIN, RATES };

/* Fits the shape of a message. */
typedef struct own_state {
    int64_t clock_ns;
    uint64_t free_bytes;
} own_state;

typedef struct preflight {
    const hd_link *link;
    int32_t own, n;
    uint64_t ticket, free_bytes;
    uint8_t *sent, *expected; /* [bytes] */
    uint64_t bytes;
    float *rates; /* [n] of this member's pairs */
} preflight;

int32_t hd_preflight_rounds(int32_t n) {
    return n + n % 2 - 1;
}

/* Round-robin: one member stays, the others turn around it. */
int32_t hd_preflight_partner(int32_t n, int32_t member, int32_t round) {
    const int32_t turning = hd_preflight_rounds(n), last = turning;
    int32_t partner;
    if (member == last) {
        partner = (int32_t)((int64_t)round * (turning + 1) / 2 % turning);
    } else {
        partner = ((round - member) % turning + turning) % turning;
        if (partner == member) partner = last;
    }
    return partner < n ? partner : -1;
}

static void fill(uint8_t *to, uint64_t n, int32_t from) {
    for (uint64_t i = 0; i < n; i++) to[i] = (uint8_t)(i * 131 + i / 251 + (uint64_t)from);
}

static void send(const preflight *p, int32_t to, int step, const void *data, uint64_t n) {
    hd_message head = {
        .lane = HD_MESSAGE_HELLO, .from = p->own, .ticket = p->ticket + (uint64_t)step, .n = n};
    p->link->send(p->link->ctx, to, &head, data, 0);
}

/* Copies n bytes to `to`, if it is one and as many came. False: communication has ended. */
static bool receive(const preflight *p, int32_t from, int step, void *to, uint64_t n) {
    hd_received *r = p->link->wait(p->link->ctx, from, HD_GROUP_TP, HD_MESSAGE_HELLO,
                                   p->ticket + (uint64_t)step);
    if (!r) return false;
    if (to && r->head.n == n) memcpy(to, r->data, n);
    p->link->release(p->link->ctx, r);
    return true;
}

/* Both begin at the same time. *same: the bytes that came are those that the other sends. */
static bool exchange(const preflight *p, int32_t with, bool *same) {
    uint8_t *got = p->expected + p->bytes;
    send(p, with, READY, NULL, 0);
    if (!receive(p, with, READY, NULL, 0)) return false;
    fill(p->expected, p->bytes, with);
    for (int step = FIRST; step <= SECOND; step++) {
        memset(got, 0, p->bytes);
        const int64_t begun = hd_now_ns();
        send(p, with, step, p->sent, p->bytes);
        if (!receive(p, with, step, got, p->bytes)) return false;
        if (!p->link->flush(p->link->ctx, 0)) return false;
        const double seconds = 1e-9 * (double)(hd_now_ns() - begun);
        const float rate = (float)((double)p->bytes / (seconds > 0 ? seconds : 1e-9));
        if (rate > p->rates[with]) p->rates[with] = rate;
        *same &= memcmp(got, p->expected, p->bytes) == 0;
    }
    return true;
}

static int64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool answer(const preflight *p, int step) {
    if (!receive(p, 0, step, NULL, 0)) return false;
    const own_state now = {clock_ns(), p->free_bytes};
    hd_message head = {
        .lane = HD_MESSAGE_HELLO, .from = p->own, .ticket = p->ticket + (uint64_t)step};
    static_assert(sizeof now == sizeof head.shape, "a state is as large as a shape");
    memcpy(head.shape, &now, sizeof now);
    p->link->send(p->link->ctx, 0, &head, NULL, 0);
    return true;
}

/* The time that a member told was that in the middle between question and answer, or not far from it. */
static bool ask(const preflight *p, int32_t member, int step, hd_preflight_rank *out) {
    const int64_t begun = clock_ns();
    own_state says;
    send(p, member, step, NULL, 0);
    hd_received *r = p->link->wait(p->link->ctx, member, HD_GROUP_TP, HD_MESSAGE_HELLO,
                                   p->ticket + (uint64_t)step);
    if (!r) return false;
    const int64_t half = (clock_ns() - begun) / 2;
    memcpy(&says, r->head.shape, sizeof says);
    p->link->release(p->link->ctx, r);
    if (step == TIME || half < out->within_ns) {
        const uint64_t ahead = (uint64_t)says.clock_ns - (uint64_t)(begun + half);
        *out = (hd_preflight_rank){(int64_t)ahead, half, says.free_bytes};
    }
    return true;
}

static bool tell(const preflight *p, hd_preflight_results *out) {
    const uint64_t n = (uint64_t)p->n * sizeof *out->rates;
    if (p->own) {
        if (!answer(p, TIME) || !answer(p, TIME_AGAIN)) return false;
        send(p, 0, RATES, p->rates, n);
        return p->link->flush(p->link->ctx, 0);
    }
    memcpy(out->rates, p->rates, n);
    out->ranks[0] = (hd_preflight_rank){.free_bytes = p->free_bytes};
    for (int32_t i = 1; i < p->n; i++) {
        if (!ask(p, i, TIME, &out->ranks[i]) || !ask(p, i, TIME_AGAIN, &out->ranks[i]))
            return false;
        if (!receive(p, i, RATES, out->rates + (int64_t)i * p->n, n)) return false;
    }
    return true;
}

static bool run(const preflight *p, hd_preflight_results *out) {
    fill(p->sent, p->bytes, p->own);
    for (int32_t round = 0; round < hd_preflight_rounds(p->n); round++) {
        const int32_t with = hd_preflight_partner(p->n, p->own, round);
        bool same = true;
        if (with < 0) continue;
        if (!exchange(p, with, &same)) return false;
        if (same) continue;
        out->other = with;
        return false;
    }
    return tell(p, out);
}

bool hd_preflight_run(const hd_link *link, const hd_preflight_args *a,
                      hd_preflight_results *out) {
    const uint64_t wanted =
        a->n > HD_PREFLIGHT_MANY ? HD_PREFLIGHT_BYTES_OF_MANY : HD_PREFLIGHT_BYTES;
    preflight p = {.link = link,
                   .own = a->own,
                   .n = a->n,
                   .ticket = a->ticket,
                   .free_bytes = a->free_bytes,
                   .bytes = wanted < a->most ? wanted : a->most};
    out->other = -1;
    p.sent = malloc(3 * p.bytes);
    p.expected = p.sent ? p.sent + p.bytes : NULL;
    p.rates = calloc((size_t)a->n, sizeof *p.rates);
    const bool done = p.sent && p.rates && run(&p, out);
    if (!p.sent || !p.rates)
        link->abort(link->ctx, "no memory for the first messages of ranks");
    free(p.sent);
    free(p.rates);
    return done;
}
