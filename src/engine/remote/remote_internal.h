/* remote_internal.h - what leaders of attention groups in several processes exchange: a step thread in
 * every round (remote.c), or a thread of its own (thread.c). */
#ifndef HD_ENGINE_REMOTE_REMOTE_INTERNAL_H
#define HD_ENGINE_REMOTE_REMOTE_INTERNAL_H

#include "engine/remote/remote.h"

/* What each leader says behind an order. */
typedef struct remote_word {
    int64_t look_in_ns; /* -1: never */
    uint64_t n;         /* bytes of its report, a multiple of 4 */
    uint64_t rounds;    /* the last order that its step thread has obeyed */
    int64_t idle;
} remote_word;

struct engine_remote {
    pthread_mutex_t lock;  /* of the report that is made; behind the engine's */
    hd_bytes out;          /* the report, or rank 0's mail */
    hd_err put_err;        /* memory for `out` was missing */
    int64_t sent_loads_ns; /* when the loads that were sent last were read */

    /* of the thread that exchanges */
    hd_bytes sent, in;
    hd_page_job *jobs, **last_job; /* of rank 0: those that were sent, in their order */
    uint64_t n_jobs;
    remote_word *words;      /* [n_groups] */
    engine_step_output post; /* with the memory of its alternatives */

    void *page; /* [cap_page] the next page of the report */
    size_t cap_page;

    /* thread.c */
    pthread_t thread;
    bool started;
    bool failed; /* guarded by the engine's lock, like failure: communication has ended */
    hd_err failure;
    hd_device *device;
    hd_stream *stream; /* NULL: exchanges are the step thread's */
};

/* Each is one side of an exchange between all leaders. take: of the report, before the exchange. */
hd_status remote_send_order(engine_rank *rank, const engine_order *order, hd_err *err);
hd_status remote_await_order(engine_rank *rank, engine_order *order, hd_err *err);
hd_status remote_exchange(engine_rank *rank, const remote_word *own, hd_err *err);

/* Ends the report that is exchanged next, and says what precedes it. */
hd_status remote_close_report(engine_rank *rank, bool idle, int64_t look_ns, uint64_t rounds,
                              remote_word *out, hd_err *err);

/* On the step thread, when communication has ended. Returns whether rank 0 has begun anew. */
bool remote_recover(engine_rank *rank, const hd_err *err);

void remote_thread_close(engine_remote *m);

#endif
