/* thread_pool.c - a generation counter starts jobs, an atomic counter distributes tasks.
 *
 * Order: the owner writes the job, then releases `left` and increments `generation`. A
 * thread that sees the increment acquires `left` with every task it takes, and releases
 * `undone` when none is left. The owner acquires `undone` at zero before it returns, so it
 * sees the job's results. It does not wait for threads without a task. A thread that wakes
 * late finds nothing left, or tasks of a later job. It reads a job only while that job waits
 * for a task of this thread. */
#include "base/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "base/cores.h"
#include "base/cpu.h"
#include "base/memory.h"

enum { MAX_THREADS = 1024, SPINS = 4000 };

typedef struct worker {
    hd_thread_pool *pool;
    pthread_t thread;
    int32_t index;
    int32_t cpu; /* processor to run on, or -1 */
} worker;

struct hd_thread_pool {
    hd_task_fn *fn;
    const void *arg;
    int32_t n_tasks;
    _Atomic uint32_t generation; /* incremented once per job */
    _Atomic bool stop;
    /* counters that every task changes have a cache line of their own */
    char before[HD_CACHE_LINE];
    _Atomic int32_t left;   /* tasks not yet taken; 0 and less: none */
    _Atomic int32_t undone; /* tasks not yet finished */
    char behind[HD_CACHE_LINE];
    pthread_mutex_t mutex; /* guards sleeping on wake */
    pthread_cond_t wake;
    int32_t n_workers; /* started threads, without the owner */
    int32_t owner_cpu; /* processor for the owner, or -1 */
    worker workers[];
};

static void take_tasks(hd_thread_pool *p, int32_t index) {
    int32_t mine = 0;
    for (int32_t left;
         (left = atomic_fetch_sub_explicit(&p->left, 1, memory_order_acquire)) > 0; mine++) {
        p->fn(p->arg, p->n_tasks - left, index);
    }
    if (mine > 0) atomic_fetch_sub_explicit(&p->undone, mine, memory_order_release);
}

static uint32_t wait_for_job(hd_thread_pool *p, uint32_t seen) {
    for (int i = 0; i < SPINS; i++) {
        uint32_t now = atomic_load_explicit(&p->generation, memory_order_acquire);
        if (now != seen) return now;
        hd_cpu_relax();
    }
    pthread_mutex_lock(&p->mutex);
    uint32_t now;
    while ((now = atomic_load_explicit(&p->generation, memory_order_acquire)) == seen) {
        pthread_cond_wait(&p->wake, &p->mutex);
    }
    pthread_mutex_unlock(&p->mutex);
    return now;
}

static void *work(void *arg) {
    worker *w = arg;
    hd_thread_pool *p = w->pool;
    uint32_t seen = 0;
    if (w->cpu >= 0) hd_cores_bind(w->cpu); /* best effort: a failure costs speed only */
    for (;;) {
        seen = wait_for_job(p, seen);
        if (atomic_load(&p->stop)) return NULL;
        take_tasks(p, w->index);
    }
}

static void start_generation(hd_thread_pool *p) {
    pthread_mutex_lock(&p->mutex);
    atomic_fetch_add_explicit(&p->generation, 1, memory_order_release);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
}

/* Returns the processor of worker i with pinning. */
static int32_t place_of(const hd_cores *c, int32_t i) {
    return c->cpu[i % c->n_places];
}

hd_status hd_thread_pool_open(hd_thread_pool **out, int32_t n_threads, bool pin, hd_err *err) {
    *out = NULL;
    hd_cores cores;
    hd_cores_read(&cores, NULL);
    if (n_threads == 0) n_threads = cores.n;
    if (n_threads < 1 || n_threads > MAX_THREADS) {
        return HD_FAIL(err, HD_EINVAL, "%d threads: must be 1 to %d", n_threads, MAX_THREADS);
    }
    hd_thread_pool *p = calloc(1, sizeof *p + (size_t)(n_threads - 1) * sizeof p->workers[0]);
    if (!p) return HD_FAIL(err, HD_ENOMEM, "no memory for a worker pool");
    p->owner_cpu = pin ? place_of(&cores, 0) : -1;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->wake, NULL);
    for (int32_t i = 1; i < n_threads; i++) {
        worker *w = &p->workers[i - 1];
        *w = (worker){.pool = p, .index = i, .cpu = pin ? place_of(&cores, i) : -1};
        if (pthread_create(&w->thread, NULL, work, w) != 0) {
            hd_thread_pool_close(p);
            return HD_FAIL(err, HD_EIO, "cannot start worker thread %d of %d", i, n_threads);
        }
        p->n_workers++;
    }
    *out = p;
    return HD_OK;
}

void hd_thread_pool_close(hd_thread_pool *p) {
    if (!p) return;
    atomic_store(&p->stop, true);
    start_generation(p);
    for (int32_t i = 0; i < p->n_workers; i++) pthread_join(p->workers[i].thread, NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->mutex);
    free(p);
}

void hd_thread_pool_bind_owner(const hd_thread_pool *p) {
    if (p->owner_cpu >= 0) hd_cores_bind(p->owner_cpu);
}

int32_t hd_thread_pool_size(const hd_thread_pool *p) {
    return p->n_workers + 1;
}

void hd_thread_pool_run(hd_thread_pool *p, int32_t n_tasks, hd_task_fn *fn, const void *arg) {
    if (n_tasks <= 0) return;
    if (p->n_workers == 0 || n_tasks == 1) {
        for (int32_t i = 0; i < n_tasks; i++) fn(arg, i, 0);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    p->n_tasks = n_tasks;
    atomic_store_explicit(&p->undone, n_tasks, memory_order_relaxed);
    atomic_store_explicit(&p->left, n_tasks, memory_order_release);
    start_generation(p);
    take_tasks(p, 0);
    for (int i = 0; atomic_load_explicit(&p->undone, memory_order_acquire) > 0; i++) {
        if (i < SPINS) {
            hd_cpu_relax();
        } else {
            sched_yield(); /* more threads than processors: let the one with a task run */
        }
    }
}

/* ---- tasks that may fail ---- */

/* The first failure so far. */
typedef struct failure {
    pthread_mutex_t lock; /* of the others */
    int32_t task;
    hd_err err;
} failure;

typedef struct fallible_job {
    hd_fallible_task_fn *fn;
    const void *arg;
    failure *first;
} fallible_job;

static bool is_behind(failure *f, int32_t task) {
    pthread_mutex_lock(&f->lock);
    const bool behind = task > f->task;
    pthread_mutex_unlock(&f->lock);
    return behind;
}

static void run_fallible(const void *arg, int32_t task, int32_t index) {
    const fallible_job *job = arg;
    hd_err err = {0};
    (void)index;
    if (is_behind(job->first, task) || job->fn(job->arg, task, &err) == HD_OK) return;
    pthread_mutex_lock(&job->first->lock);
    if (task < job->first->task) {
        job->first->task = task;
        job->first->err = err;
    }
    pthread_mutex_unlock(&job->first->lock);
}

hd_status hd_tasks_run(int32_t n_threads, int32_t n_tasks, hd_fallible_task_fn *fn,
                       const void *arg, hd_err *err) {
    failure first = {.lock = PTHREAD_MUTEX_INITIALIZER, .task = n_tasks};
    const fallible_job job = {fn, arg, &first};
    hd_thread_pool *pool;
    if (hd_thread_pool_open(&pool, n_threads, false, NULL) == HD_OK) {
        hd_thread_pool_run(pool, n_tasks, run_fallible, &job);
    } else {
        for (int32_t i = 0; i < n_tasks; i++) run_fallible(&job, i, 0);
    }
    hd_thread_pool_close(pool);
    pthread_mutex_destroy(&first.lock);
    if (first.task == n_tasks) return HD_OK;
    if (err && err->status == HD_OK) *err = first.err;
    return first.err.status;
}
