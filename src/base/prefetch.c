/* prefetch.c - one thread with madvise(WILLNEED), which starts a read and returns; see prefetch.h. */
#include "base/prefetch.h"

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct hd_prefetch {
    hd_prefetch_piece *pieces; /* [most] the thread's from start until n is 0 */
    int32_t most, n;
    bool ends;
    size_t page;
    pthread_t thread;
    pthread_mutex_t lock; /* guards n, ends and stats */
    pthread_cond_t change;
    hd_prefetch_stats stats;
};

/* The pages of a piece. */
typedef struct range {
    uint8_t *first;
    size_t bytes;
} range;

/* madvise takes addresses that may be written, and writes nothing here. */
static range pages_of(const void *at, size_t bytes, size_t page) {
    const uintptr_t first = (uintptr_t)at / page * page, end = (uintptr_t)at + bytes;
    return (range){(uint8_t *)first, (end - first + page - 1) / page * page};
}

static int64_t absent_bytes(const range *r, size_t page) {
    unsigned char in_memory;
    int64_t absent = 0;
    for (size_t at = 0; at < r->bytes; at += page) {
        const bool known = mincore(r->first + at, page, &in_memory) == 0;
        if (known && !(in_memory & 1)) absent += (int64_t)page;
    }
    return absent;
}

static void ask(const hd_prefetch *p, int32_t n, hd_prefetch_stats *sum) {
    for (int32_t i = 0; i < n; i++) {
        const range r = pages_of(p->pieces[i].at, p->pieces[i].bytes, p->page);
        const int64_t absent = absent_bytes(&r, p->page);
        sum->pieces++;
        sum->resident += absent == 0;
        sum->read_bytes += absent;
        madvise(r.first, r.bytes, MADV_WILLNEED);
    }
}

static void *work(void *arg) {
    hd_prefetch *p = arg;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->n && !p->ends) pthread_cond_wait(&p->change, &p->lock);
        if (!p->n) break;
        hd_prefetch_stats sum = {0};
        const int32_t n = p->n;
        pthread_mutex_unlock(&p->lock);
        ask(p, n, &sum);
        pthread_mutex_lock(&p->lock);
        p->stats.pieces += sum.pieces;
        p->stats.resident += sum.resident;
        p->stats.read_bytes += sum.read_bytes;
        p->n = 0;
        pthread_cond_broadcast(&p->change);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

hd_status hd_prefetch_open(hd_prefetch **out, int32_t most, hd_err *err) {
    *out = NULL;
    hd_prefetch *p = calloc(1, sizeof *p);
    if (p) p->pieces = calloc((size_t)most, sizeof *p->pieces);
    if (!p || !p->pieces) {
        free(p);
        return HD_FAIL(err, HD_ENOMEM, "no memory to prefetch %d pieces", most);
    }
    p->most = most;
    p->page = (size_t)sysconf(_SC_PAGESIZE);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->change, NULL);
    if (pthread_create(&p->thread, NULL, work, p) != 0) {
        pthread_cond_destroy(&p->change);
        pthread_mutex_destroy(&p->lock);
        free(p->pieces);
        free(p);
        return HD_FAIL(err, HD_ENOMEM, "cannot start a thread that prefetches");
    }
    *out = p;
    return HD_OK;
}

void hd_prefetch_close(hd_prefetch *p) {
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->ends = true;
    pthread_cond_broadcast(&p->change);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->change);
    pthread_mutex_destroy(&p->lock);
    free(p->pieces);
    free(p);
}

void hd_prefetch_at_random(const void *at, size_t bytes) {
    const range r = pages_of(at, bytes, (size_t)sysconf(_SC_PAGESIZE));
    madvise(r.first, r.bytes, MADV_RANDOM);
}

hd_prefetch_piece *hd_prefetch_list(hd_prefetch *p, int32_t n) {
    pthread_mutex_lock(&p->lock);
    const bool busy = p->n > 0;
    if (busy) p->stats.skipped += n;
    pthread_mutex_unlock(&p->lock);
    return busy ? NULL : p->pieces;
}

void hd_prefetch_start(hd_prefetch *p, int32_t n) {
    assert(n <= p->most);
    pthread_mutex_lock(&p->lock);
    p->n = n;
    pthread_cond_broadcast(&p->change);
    pthread_mutex_unlock(&p->lock);
}

void hd_prefetch_wait(hd_prefetch *p) {
    pthread_mutex_lock(&p->lock);
    while (p->n) pthread_cond_wait(&p->change, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

hd_prefetch_stats hd_prefetch_read_stats(hd_prefetch *p) {
    pthread_mutex_lock(&p->lock);
    const hd_prefetch_stats s = p->stats;
    pthread_mutex_unlock(&p->lock);
    return s;
}
