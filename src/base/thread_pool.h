/* thread_pool.h - a pool of persistent threads that run one parallel job at a time.
 *
 * hd_thread_pool_run() divides a job into numbered tasks and returns when all are done; the
 * caller computes tasks too. Idle threads spin briefly, then sleep, so consecutive jobs cost
 * about a microsecond and an idle program costs nothing. Any thread may run a task, so a
 * task must depend on its number alone: results are then independent of the thread count.
 * One thread owns the pool and calls run. */
#ifndef HD_BASE_THREAD_POOL_H
#define HD_BASE_THREAD_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

HD_BEGIN_C

typedef struct hd_thread_pool hd_thread_pool;

/* worker is in [0, hd_thread_pool_size()): an index for per-worker scratch. */
typedef void hd_task_fn(const void *arg, int32_t task, int32_t worker);

/* n_threads counts the owner: 1 starts no thread. 0 means one per core (cores.h). pin binds
 * worker i to the i-th core, and makes hd_thread_pool_bind_owner do so for the owner, worker 0. */
hd_status hd_thread_pool_open(hd_thread_pool **out, int32_t n_threads, bool pin, hd_err *err);
void hd_thread_pool_close(hd_thread_pool *p); /* NULL is fine */

void hd_thread_pool_bind_owner(
    const hd_thread_pool *p); /* binds the calling thread; does nothing without pin */

int32_t hd_thread_pool_size(const hd_thread_pool *p);
void hd_thread_pool_run(hd_thread_pool *p, int32_t n_tasks, hd_task_fn *fn, const void *arg);

typedef hd_status hd_fallible_task_fn(const void *arg, int32_t task, hd_err *err);

/* Runs tasks that may fail, on n_threads threads of its own, as hd_thread_pool_open() counts them;
 * where threads cannot start, the caller runs all. Returns the failure of the first task, by
 * number, that fails; tasks behind it may be left out. */
hd_status hd_tasks_run(int32_t n_threads, int32_t n_tasks, hd_fallible_task_fn *fn,
                       const void *arg, hd_err *err);

HD_END_C

#endif
