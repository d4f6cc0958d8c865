/* prefix_ring.c - see prefix_ring.h. */
#include "server/prefix_ring.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/base64.h"

enum {
    PLACES = 16384,     /* hashes that are kept */
    KNOWN = 2 * PLACES, /* a power of two */
    MOST_ADDED = 128,   /* by one header */
    MOST_REPORTED = 4096,
    HEADER_ROOM = MOST_ADDED * 8 / 3 * 4 + 4
};

struct prefix_ring {
    pthread_mutex_t lock; /* guards all */
    uint64_t epoch, next; /* next: number of the next hash; hash i is at place i % PLACES */
    uint64_t hashes[PLACES];
    struct {
        uint64_t hash, number;
    } known[KNOWN]; /* by hash, so that those of every turn are not added again by the next */
};

/* Later lives, and later epochs of a life, have higher numbers. */
static void begin_epoch(prefix_ring *r) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const uint64_t epoch = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    r->epoch = epoch > r->epoch ? epoch : r->epoch + 1;
    r->next = 0;
    memset(r->known, 0, sizeof r->known);
}

hd_status prefix_ring_open(prefix_ring **out, hd_err *err) {
    prefix_ring *r = *out = calloc(1, sizeof *r);
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory for the prefixes that routers sent");
    pthread_mutex_init(&r->lock, NULL);
    begin_epoch(r);
    return HD_OK;
}

void prefix_ring_close(prefix_ring *r) {
    if (!r) return;
    pthread_mutex_destroy(&r->lock);
    free(r);
}

/* One that is known is added again before it is overwritten. */
static void add(prefix_ring *r, uint64_t hash) {
    const size_t at = hash & (KNOWN - 1);
    if (r->known[at].hash == hash && r->known[at].number + PLACES / 2 > r->next) return;
    r->known[at].hash = hash;
    r->known[at].number = r->next;
    r->hashes[r->next++ % PLACES] = hash;
}

void prefix_ring_add(prefix_ring *r, const char *header) {
    uint8_t bytes[HEADER_ROOM];
    const size_t length = header ? strlen(header) : 0;
    size_t n;
    if (length == 0 || hd_base64_room(length) > sizeof bytes ||
        !hd_base64_decode(bytes, &n, header, length) || n % sizeof(uint64_t)) {
        return;
    }
    pthread_mutex_lock(&r->lock);
    for (size_t i = 0; i < n; i += sizeof(uint64_t)) {
        uint64_t hash;
        memcpy(&hash, bytes + i, sizeof hash);
        if (hash) add(r, hash);
    }
    pthread_mutex_unlock(&r->lock);
}

void prefix_ring_forget(prefix_ring *r) {
    pthread_mutex_lock(&r->lock);
    begin_epoch(r);
    pthread_mutex_unlock(&r->lock);
}

/* Returns the number of the first hash behind the place that is still there. */
static uint64_t first_behind(const prefix_ring *r, const char *place) {
    char *end = NULL;
    const uint64_t oldest = r->next > PLACES ? r->next - PLACES : 0;
    const uint64_t epoch = place ? strtoull(place, &end, 10) : 0;
    if (!end || *end != '.' || epoch != r->epoch) return oldest;
    const uint64_t first = strtoull(end + 1, NULL, 10);
    return first < oldest ? oldest : first < r->next ? first : r->next;
}

json_t *prefix_ring_report(prefix_ring *r, const char *place) {
    uint64_t *some = malloc(MOST_REPORTED * sizeof *some);
    char *text = malloc(hd_base64_length(MOST_REPORTED * sizeof *some));
    json_t *report = NULL;
    if (some && text) {
        size_t n = 0;
        pthread_mutex_lock(&r->lock);
        uint64_t at = first_behind(r, place);
        const uint64_t epoch = r->epoch;
        while (at < r->next && n < MOST_REPORTED) some[n++] = r->hashes[at++ % PLACES];
        pthread_mutex_unlock(&r->lock);
        n *= sizeof *some;
        hd_base64_encode(text, (const uint8_t *)some, n);
        report = json_pack("{s:I, s:I, s:s%}", "epoch", (json_int_t)epoch, "next",
                           (json_int_t)at, "hashes", text, hd_base64_length(n));
    }
    free(some);
    free(text);
    return report;
}
