/* spin_internal.h - how long a thread that waits for another rank spins before it sleeps.
 *
 * Spinning pays if the other rank runs meanwhile; on a core that both share it only delays it. So a wait
 * that ended while spinning permits longer ones, and one that had to sleep shorter ones. Now and then a
 * long one finds out whether that has changed. */
#ifndef HD_COMM_SPIN_INTERNAL_H
#define HD_COMM_SPIN_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/checked.h"
#include "base/cores.h"

enum { COMM_LEAST_SPIN_NS = 500, COMM_SLEEPS_PER_PROBE = 32 };

typedef struct comm_spin {
    int64_t probe_ns;   /* more than a sleep and the wake-up cost; 0: does not spin */
    int64_t least_ns;   /* shorter ones are not learned */
    _Atomic int64_t ns; /* how long it pays, as of late */
    _Atomic uint32_t n_sleeps;
} comm_spin;

/* With fewer cores than ranks, one that spins would keep another from working. */
static inline void comm_spin_open(comm_spin *s, int32_t ranks, int64_t probe_ns,
                                  int64_t least_ns) {
    s->probe_ns = ranks <= hd_cores_count() ? probe_ns : 0;
    s->least_ns = least_ns;
    atomic_store(&s->ns, s->probe_ns);
    atomic_store(&s->n_sleeps, 0);
}

static inline int64_t comm_spin_ns(const comm_spin *s) {
    return atomic_load_explicit(&s->ns, memory_order_relaxed);
}

static inline void comm_spin_learn(comm_spin *s, bool slept) {
    if (!s->probe_ns) return;
    int64_t ns = comm_spin_ns(s);
    if (!slept) {
        ns = hd_min_i64(2 * ns, 2 * s->probe_ns);
    } else if (atomic_fetch_add(&s->n_sleeps, 1) % COMM_SLEEPS_PER_PROBE ==
               COMM_SLEEPS_PER_PROBE - 1) {
        ns = s->probe_ns;
    } else {
        ns = hd_max_i64(ns / 2, s->least_ns);
    }
    atomic_store_explicit(&s->ns, ns, memory_order_relaxed);
}

#endif
