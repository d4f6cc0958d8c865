/* expert_cache.h - experts that are not resident: staged in slots of host memory when they are
 * needed, and kept there by use.
 *
 * Keys number the experts of all layers. A key is *elsewhere* (its source has it), being fetched,
 * or *staged*: in a slot. Who needs experts pins their keys, which queues fetches of those that
 * are elsewhere; waits for each; reads it; and unpins it. A slot is given to another key only
 * while no one has pinned it: of those the key with the fewest recent uses leaves, of equal ones
 * the one that was used longest ago.
 *
 * Keys that will be pinned soon can be fetched ahead, while nothing that is pinned is fetched.
 *
 * One thread pins; threads of the cache fetch. Where from is a row of hd_expert_source. */
#ifndef HD_MOE_EXPERT_CACHE_H
#define HD_MOE_EXPERT_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Where experts come from. */
typedef struct hd_expert_source {
    const char *name; /* "file" */
    void *ctx;
    /* Writes the expert of a key into a slot, or fails; any thread may call it. */
    hd_status (*fetch)(void *ctx, int32_t key, uint8_t *slot, hd_err *err);
} hd_expert_source;

typedef struct hd_expert_cache_options {
    hd_expert_source source;
    int32_t n_keys, n_slots;
    size_t slot_bytes;  /* a multiple of the page size */
    int32_t n_fetchers; /* threads */
} hd_expert_cache_options;

typedef struct hd_expert_cache_stats {
    int64_t used;    /* experts that were pinned */
    int64_t staged;  /* of them: were staged already */
    int64_t fetched; /* experts that were fetched */
    int64_t ahead;   /* of them: before they were pinned */
    int64_t failed;  /* fetches that failed */
    int64_t busy_ns; /* time in which any was fetched */
    int64_t wait_ns; /* time that was spent in hd_expert_cache_wait() */
} hd_expert_cache_stats;

typedef struct hd_expert_cache hd_expert_cache;

/* Takes the memory of all slots, and starts the threads. */
hd_status hd_expert_cache_open(hd_expert_cache **out, const hd_expert_cache_options *o,
                               hd_err *err);
void hd_expert_cache_close(hd_expert_cache *c); /* waits for fetches; NULL is fine */

/* Pins the first of keys[n], in this order, as many as there are slots for, and queues their
 * fetches. Returns how many; at least one if nothing else is pinned. */
int32_t hd_expert_cache_pin(hd_expert_cache *c, const int32_t *keys, int32_t n);

/* Returns whether hd_expert_cache_wait() would not wait for a pinned key. */
bool hd_expert_cache_is_ready(hd_expert_cache *c, int32_t key);

/* Waits until a pinned key is staged: *slot holds it until it is unpinned. Returns the failure of
 * its fetch; then it is elsewhere, and pinned still. */
hd_status hd_expert_cache_wait(hd_expert_cache *c, int32_t key, const uint8_t **slot,
                               hd_err *err);

/* Gives up pins; fetches that are under way end later. */
void hd_expert_cache_unpin(hd_expert_cache *c, const int32_t *keys, int32_t n);

/* Keeps those of keys[n] that are elsewhere, in their order. Returns how many. */
int32_t hd_expert_cache_elsewhere(hd_expert_cache *c, int32_t *keys, int32_t n);

/* keys[n]: which will probably be pinned next, the most probable first. Until the next call they leave
 * after all others. The first `most` of those that are elsewhere are fetched ahead, into
 * slots of keys that were not expected; those of the call before that were not begun are not. */
void hd_expert_cache_expect(hd_expert_cache *c, const int32_t *keys, int32_t n, int32_t most);

/* Whether every slot holds a key, or will. */
bool hd_expert_cache_is_full(hd_expert_cache *c);

hd_expert_cache_stats hd_expert_cache_read_stats(hd_expert_cache *c); /* any thread */

#endif
