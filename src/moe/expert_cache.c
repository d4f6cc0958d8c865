/* expert_cache.c - see expert_cache.h. One lock guards all but the bytes of slots: those belong to
 * the thread that fetches, and then, as long as it is pinned, to its reader. */
#include "moe/expert_cache.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/progress.h"

enum { FORGET_AFTER = 32 }; /* uses per slot, after which all counts are halved */

/* AHEAD: in the list of those to fetch ahead; QUEUED: in the queue, and pinned once at least. */
typedef enum slot_state { UNUSED, AHEAD, QUEUED, FETCHING, STAGED, FAILED } slot_state;

typedef struct cache_slot {
    slot_state state;
    int32_t key, pins;
    bool expected;   /* its key is */
    bool awaited;    /* FETCHING: its key was pinned */
    int64_t used_at; /* number of its last use */
} cache_slot;

struct hd_expert_cache {
    hd_expert_cache_options o;
    hd_map memory; /* [n_slots, slot_bytes] */
    cache_slot *slots;
    int32_t *slot_of; /* [n_keys]; -1: elsewhere */
    uint32_t *uses;   /* [n_keys] recent ones */
    int32_t *queue;   /* [n_slots] a ring of slots to fetch */
    int32_t first, n_queued, n_pinned, n_threads;
    int32_t *ahead;                          /* [n_slots] list of slots to fetch ahead */
    int32_t next_ahead, n_ahead;             /* of the list: those before next_ahead are done */
    int32_t n_fetching, n_awaited, n_unused; /* slots: FETCHING; of them awaited; UNUSED */
    int64_t clock;                           /* uses so far */
    int64_t busy_since;                      /* if something is being fetched */
    pthread_t *threads;
    bool closing;
    hd_err failure; /* of the last fetch that failed */
    hd_expert_cache_stats stats;
    pthread_mutex_t lock;
    pthread_cond_t work, done; /* something is queued; a fetch has ended */
};

static uint8_t *bytes_of(const hd_expert_cache *c, int32_t slot) {
    return hd_map_writable(&c->memory) + (size_t)slot * c->o.slot_bytes;
}

/* ---- fetching ---- */

/* Returns the slot to fetch next; -1: none. Only what is pinned is fetched beside what is. */
static int32_t next_to_fetch(hd_expert_cache *c) {
    if (c->n_queued) {
        const int32_t at = c->queue[c->first];
        c->first = (c->first + 1) % c->o.n_slots;
        c->n_queued--;
        return at;
    }
    while (!c->n_awaited && c->next_ahead < c->n_ahead) {
        const int32_t at = c->ahead[c->next_ahead++];
        if (c->slots[at].state == AHEAD) return at;
    }
    return -1;
}

static void begin_fetch(hd_expert_cache *c, cache_slot *s) {
    s->awaited = s->state == QUEUED;
    s->state = FETCHING;
    c->n_awaited += s->awaited;
    c->stats.ahead += !s->awaited;
    if (c->n_fetching++ == 0) c->busy_since = hd_now_ns();
}

static void end_fetch(hd_expert_cache *c, cache_slot *s, const hd_err *err) {
    s->state = err->status == HD_OK ? STAGED : FAILED;
    c->n_awaited -= s->awaited;
    c->stats.fetched++;
    if (--c->n_fetching == 0) c->stats.busy_ns += hd_now_ns() - c->busy_since;
    if (s->state == FAILED) {
        c->stats.failed++;
        c->failure = *err;
    }
    if (c->n_awaited == 0) pthread_cond_broadcast(&c->work);
    pthread_cond_broadcast(&c->done);
}

static void fetch(hd_expert_cache *c, int32_t at) {
    cache_slot *s = &c->slots[at];
    const int32_t key = s->key;
    hd_err err = {0};
    begin_fetch(c, s);
    pthread_mutex_unlock(&c->lock);
    err.status = c->o.source.fetch(c->o.source.ctx, key, bytes_of(c, at), &err);
    pthread_mutex_lock(&c->lock);
    end_fetch(c, s, &err);
}

static void *fetcher(void *arg) {
    hd_expert_cache *c = arg;
    pthread_mutex_lock(&c->lock);
    while (!c->closing) {
        const int32_t at = next_to_fetch(c);
        if (at >= 0) {
            fetch(c, at);
        } else {
            pthread_cond_wait(&c->work, &c->lock);
        }
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* ---- opening ---- */

static hd_status start_threads(hd_expert_cache *c, hd_err *err) {
    for (; c->n_threads < c->o.n_fetchers; c->n_threads++) {
        if (pthread_create(&c->threads[c->n_threads], NULL, fetcher, c) == 0) continue;
        return HD_FAIL(err, HD_EIO, "no thread to fetch experts");
    }
    return HD_OK;
}

static hd_status take_memory(hd_expert_cache *c, hd_err *err) {
    const size_t slots = (size_t)c->o.n_slots, keys = (size_t)c->o.n_keys;
    HD_TRY(hd_map_take(&c->memory, slots * c->o.slot_bytes, "staged experts", err));
    c->slots = calloc(slots, sizeof *c->slots);
    c->queue = calloc(slots, sizeof *c->queue);
    c->ahead = calloc(slots, sizeof *c->ahead);
    c->n_unused = c->o.n_slots;
    c->slot_of = calloc(keys, sizeof *c->slot_of);
    c->uses = calloc(keys, sizeof *c->uses);
    c->threads = calloc((size_t)c->o.n_fetchers, sizeof *c->threads);
    if (!c->slots || !c->queue || !c->ahead || !c->slot_of || !c->uses || !c->threads) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a list of %zu experts", keys);
    }
    for (size_t i = 0; i < keys; i++) c->slot_of[i] = -1;
    return HD_OK;
}

hd_status hd_expert_cache_open(hd_expert_cache **out, const hd_expert_cache_options *o,
                               hd_err *err) {
    assert(o->n_keys > 0 && o->n_slots > 0 && o->n_fetchers > 0);
    hd_expert_cache *c = calloc(1, sizeof *c);
    *out = NULL;
    if (!c) return HD_FAIL(err, HD_ENOMEM, "no memory to stage experts");
    c->o = *o;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->work, NULL);
    pthread_cond_init(&c->done, NULL);
    hd_status st = take_memory(c, err);
    if (st == HD_OK) st = start_threads(c, err);
    if (st == HD_OK) {
        *out = c;
    } else {
        hd_expert_cache_close(c);
    }
    return st;
}

void hd_expert_cache_close(hd_expert_cache *c) {
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    c->closing = true;
    pthread_cond_broadcast(&c->work);
    pthread_mutex_unlock(&c->lock);
    for (int32_t i = 0; i < c->n_threads; i++) pthread_join(c->threads[i], NULL);
    hd_map_close(&c->memory);
    free(c->slots);
    free(c->queue);
    free(c->ahead);
    free(c->slot_of);
    free(c->uses);
    free(c->threads);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->work);
    pthread_cond_destroy(&c->done);
    free(c);
}

/* ---- slots ---- */

/* Whether slot a is given away before slot b. */
static bool goes_first(const hd_expert_cache *c, const cache_slot *a, const cache_slot *b) {
    if (a->expected != b->expected) return b->expected;
    if (a->state == UNUSED || b->state == UNUSED) return a->state == UNUSED;
    const uint32_t x = c->uses[a->key], y = c->uses[b->key];
    return x != y ? x < y : a->used_at < b->used_at;
}

/* Returns a slot that may be given to another key, or NULL. */
static cache_slot *find_free(const hd_expert_cache *c) {
    cache_slot *found = NULL;
    for (int32_t i = 0; i < c->o.n_slots; i++) {
        cache_slot *s = &c->slots[i];
        const bool busy = s->state == QUEUED || s->state == FETCHING;
        if (s->pins || busy) continue;
        if (!found || goes_first(c, s, found)) found = s;
    }
    return found;
}

static void empty(hd_expert_cache *c, cache_slot *s) {
    if (s->state == UNUSED) return;
    c->slot_of[s->key] = -1;
    s->state = UNUSED;
    s->expected = false;
    c->n_unused++;
}

/* Gives a slot to a key that is elsewhere. */
static void give(hd_expert_cache *c, cache_slot *s, int32_t key) {
    empty(c, s);
    c->n_unused--;
    c->slot_of[key] = (int32_t)(s - c->slots);
    s->key = key;
}

static void enqueue(hd_expert_cache *c, cache_slot *s) {
    s->state = QUEUED;
    c->queue[(c->first + c->n_queued++) % c->o.n_slots] = (int32_t)(s - c->slots);
    pthread_cond_signal(&c->work);
}

/* Returns the slot of a key, or one that is given to it; NULL: there is no room. Its fetch is queued
 * if no thread has begun with it. */
static cache_slot *slot_for(hd_expert_cache *c, int32_t key) {
    const bool has = c->slot_of[key] >= 0;
    cache_slot *s = has ? &c->slots[c->slot_of[key]] : find_free(c);
    if (!s) return NULL;
    if (!has) give(c, s, key);
    if (!has || s->state == AHEAD || s->state == FAILED) { /* FAILED: once more */
        enqueue(c, s);
        return s;
    }
    if (s->state == FETCHING && !s->awaited) {
        s->awaited = true;
        c->n_awaited++;
    }
    c->stats.staged++;
    return s;
}

static void forget(hd_expert_cache *c) {
    if (c->clock % ((int64_t)FORGET_AFTER * c->o.n_slots)) return;
    for (int32_t i = 0; i < c->o.n_keys; i++) c->uses[i] /= 2;
}

static bool pin(hd_expert_cache *c, int32_t key) {
    cache_slot *s = slot_for(c, key);
    while (!s && c->n_pinned == 0) { /* a fetch whose pins were given up has a slot */
        pthread_cond_wait(&c->done, &c->lock);
        s = slot_for(c, key);
    }
    if (!s) return false;
    s->pins++;
    c->n_pinned++;
    c->stats.used++;
    c->uses[key]++;
    s->used_at = ++c->clock;
    forget(c);
    return true;
}

int32_t hd_expert_cache_pin(hd_expert_cache *c, const int32_t *keys, int32_t n) {
    int32_t i = 0;
    pthread_mutex_lock(&c->lock);
    while (i < n && pin(c, keys[i])) i++;
    pthread_mutex_unlock(&c->lock);
    return i;
}

/* ---- waiting ---- */

static cache_slot *pinned(const hd_expert_cache *c, int32_t key) {
    assert(c->slot_of[key] >= 0);
    cache_slot *s = &c->slots[c->slot_of[key]];
    assert(s->pins > 0);
    return s;
}

static bool is_ready(const cache_slot *s) {
    return s->state == STAGED || s->state == FAILED;
}

bool hd_expert_cache_is_ready(hd_expert_cache *c, int32_t key) {
    pthread_mutex_lock(&c->lock);
    const bool ready = is_ready(pinned(c, key));
    pthread_mutex_unlock(&c->lock);
    return ready;
}

hd_status hd_expert_cache_wait(hd_expert_cache *c, int32_t key, const uint8_t **slot,
                               hd_err *err) {
    hd_status st = HD_OK;
    pthread_mutex_lock(&c->lock);
    cache_slot *s = pinned(c, key);
    const int64_t began = is_ready(s) ? 0 : hd_now_ns();
    while (!is_ready(s)) pthread_cond_wait(&c->done, &c->lock);
    if (began) c->stats.wait_ns += hd_now_ns() - began;
    if (s->state == FAILED) {
        st = HD_FAIL(err, c->failure.status, "%s", c->failure.msg);
    } else {
        *slot = bytes_of(c, (int32_t)(s - c->slots));
    }
    pthread_mutex_unlock(&c->lock);
    return st;
}

void hd_expert_cache_unpin(hd_expert_cache *c, const int32_t *keys, int32_t n) {
    pthread_mutex_lock(&c->lock);
    for (int32_t i = 0; i < n; i++) {
        pinned(c, keys[i])->pins--;
        c->n_pinned--;
    }
    pthread_mutex_unlock(&c->lock);
}

/* ---- ahead ---- */

int32_t hd_expert_cache_elsewhere(hd_expert_cache *c, int32_t *keys, int32_t n) {
    int32_t kept = 0;
    pthread_mutex_lock(&c->lock);
    for (int32_t i = 0; i < n; i++) {
        if (c->slot_of[keys[i]] < 0) keys[kept++] = keys[i];
    }
    pthread_mutex_unlock(&c->lock);
    return kept;
}

static void forget_expected(hd_expert_cache *c) {
    for (int32_t i = 0; i < c->o.n_slots; i++) {
        c->slots[i].expected = false;
        if (c->slots[i].state == AHEAD) empty(c, &c->slots[i]);
    }
    c->next_ahead = c->n_ahead = 0;
}

/* Returns whether there was a slot. */
static bool fetch_ahead(hd_expert_cache *c, int32_t key) {
    cache_slot *s = find_free(c);
    if (!s || s->expected) return false;
    give(c, s, key);
    s->state = AHEAD;
    s->expected = true;
    c->ahead[c->n_ahead++] = (int32_t)(s - c->slots);
    return true;
}

void hd_expert_cache_expect(hd_expert_cache *c, const int32_t *keys, int32_t n, int32_t most) {
    pthread_mutex_lock(&c->lock);
    forget_expected(c);
    for (int32_t i = 0; i < n; i++) {
        if (c->slot_of[keys[i]] >= 0) c->slots[c->slot_of[keys[i]]].expected = true;
    }
    for (int32_t i = 0; i < n && c->n_ahead < most; i++) {
        if (c->slot_of[keys[i]] < 0 && !fetch_ahead(c, keys[i])) break;
    }
    if (c->n_ahead) pthread_cond_broadcast(&c->work);
    pthread_mutex_unlock(&c->lock);
}

bool hd_expert_cache_is_full(hd_expert_cache *c) {
    pthread_mutex_lock(&c->lock);
    const bool full = c->n_unused == 0;
    pthread_mutex_unlock(&c->lock);
    return full;
}

hd_expert_cache_stats hd_expert_cache_read_stats(hd_expert_cache *c) {
    pthread_mutex_lock(&c->lock);
    const hd_expert_cache_stats stats = c->stats;
    pthread_mutex_unlock(&c->lock);
    return stats;
}
