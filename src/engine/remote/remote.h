/* remote.h - rounds of attention groups in several processes: the front, with all requests, is in the
 * process of rank 0. On the leaders' step threads (remote.c), or beside them (thread.c). */
#ifndef HD_ENGINE_REMOTE_REMOTE_H
#define HD_ENGINE_REMOTE_REMOTE_H

#include "engine/rank.h"

hd_status engine_remote_open(engine_remote **out, const hd_engine *e, hd_err *err);
void engine_remote_close(engine_remote *m);  /* NULL is fine */
void engine_remote_forget(engine_remote *m); /* the report of a round that nobody ends */

/* Rank 0 sends its order with the mail of the other groups; they wait for it. When communication
 * has ended, rank 0 ends all requests of the others, and these close. */
void engine_remote_begin(engine_rank *rank);

/* Tells rank 0 what a step has put out, and the state of the group; rank 0 takes it. */
void engine_remote_end(engine_rank *rank, bool idle, int64_t look_ns);

/* For the end of the round. */
void engine_remote_put_output(engine_rank *rank, engine_step_output *p);
void engine_remote_put_prompt(engine_rank *rank, uint64_t id, const hd_prompt_logprobs *p);
/* Returns room in the report for a page of n bytes, until the next call here; NULL: no memory.
 * Then says whether the page is there. */
void *engine_remote_room(engine_rank *rank, uint64_t id, size_t n);
void engine_remote_exported(engine_rank *rank, uint64_t id, size_t n, hd_status st);

/* Counts of a record (recording.c), for rank 0. */
void engine_remote_put_counts(engine_rank *rank, uint64_t record, const int64_t *counts,
                              size_t n);

/* ---- thread.c: the same beside the steps, where groups have none in common ---- */

static inline bool engine_remote_is_beside(const hd_engine *e) {
    return e->remote && e->independent;
}

/* The thread that exchanges, of a leader whose step thread begins or has ended. */
void engine_remote_start(engine_rank *rank);
void engine_remote_stop(engine_rank *rank);

/* Between two steps: recovers if communication has ended, as engine_remote_begin() does. */
void engine_remote_look(engine_rank *rank);
bool engine_remote_has_failed(const hd_engine *e); /* the caller holds the lock */

/* Ends the jobs of all other groups with HD_EPEER. The caller holds the lock. */
void engine_remote_fail_jobs(hd_engine *e);

#endif
