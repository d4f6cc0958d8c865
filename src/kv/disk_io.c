/* disk_io.c - a pool of threads over two queues of jobs, reads first. */
#include "kv/disk_io.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

typedef struct job_ring {
    hd_disk_job *jobs; /* [cap] */
    int32_t first, n;
} job_ring;

struct hd_disk_io {
    hd_disk *disk;
    void (*wake)(void *ctx);
    void *ctx;
    int32_t cap, n_threads;
    pthread_t *threads;

    /* guarded by the lock */
    pthread_mutex_t lock;
    pthread_cond_t work, rest; /* signalled for the threads; for hd_disk_io_wait() */
    job_ring reads, writes, done;
    int32_t n_running;
    bool closing;
};

static void push(hd_disk_io *io, job_ring *r, const hd_disk_job *job) {
    assert(r->n < io->cap);
    r->jobs[(r->first + r->n++) % io->cap] = *job;
}

static hd_disk_job pop(hd_disk_io *io, job_ring *r) {
    const hd_disk_job job = r->jobs[r->first];
    r->first = (r->first + 1) % io->cap;
    r->n--;
    return job;
}

static int run_job(hd_disk *d, const hd_disk_job *job) {
    switch (job->kind) {
    case HD_DISK_READ:
        return hd_disk_read(d, job->group, job->extent, job->page);
    case HD_DISK_WRITE:
        return hd_disk_write(d, job->group, job->extent, job->page);
    case HD_DISK_SYNC:
    case HD_N_DISK_JOBS:
        break;
    }
    return hd_disk_sync(d);
}

static void *run_jobs(void *arg) {
    hd_disk_io *io = arg;
    pthread_mutex_lock(&io->lock);
    for (;;) {
        while (!io->reads.n && !io->writes.n && !io->closing) {
            pthread_cond_wait(&io->work, &io->lock);
        }
        if (!io->reads.n && !io->writes.n) break;
        hd_disk_job job = pop(io, io->reads.n ? &io->reads : &io->writes);
        io->n_running++;
        pthread_mutex_unlock(&io->lock);
        job.why = run_job(io->disk, &job);
        pthread_mutex_lock(&io->lock);
        io->n_running--;
        push(io, &io->done, &job);
        pthread_cond_broadcast(&io->rest);
        if (!io->wake || io->closing) continue;
        pthread_mutex_unlock(&io->lock);
        io->wake(io->ctx);
        pthread_mutex_lock(&io->lock);
    }
    pthread_mutex_unlock(&io->lock);
    return NULL;
}

static hd_status start(hd_disk_io *io, int32_t n_threads, hd_err *err) {
    job_ring *const rings[] = {&io->reads, &io->writes, &io->done};
    for (size_t i = 0; i < HD_LEN(rings); i++) {
        rings[i]->jobs = calloc((size_t)io->cap, sizeof *rings[i]->jobs);
        if (!rings[i]->jobs) return HD_FAIL(err, HD_ENOMEM, "no memory for %d jobs", io->cap);
    }
    io->threads = calloc((size_t)n_threads + 1, sizeof *io->threads);
    if (!io->threads) return HD_FAIL(err, HD_ENOMEM, "no memory for %d threads", n_threads);
    for (; io->n_threads < n_threads; io->n_threads++) {
        if (pthread_create(&io->threads[io->n_threads], NULL, run_jobs, io) == 0) continue;
        return HD_FAIL(err, HD_EIO, "cannot start a thread for the disk tier");
    }
    return HD_OK;
}

hd_status hd_disk_io_open(hd_disk_io **out, hd_disk *d, int32_t n_threads, int32_t cap,
                          void (*wake)(void *ctx), void *ctx, hd_err *err) {
    *out = NULL;
    hd_disk_io *io = calloc(1, sizeof *io);
    if (!io) return HD_FAIL(err, HD_ENOMEM, "no memory for the disk tier");
    io->disk = d;
    io->wake = wake;
    io->ctx = ctx;
    io->cap = cap;
    pthread_mutex_init(&io->lock, NULL);
    pthread_cond_init(&io->work, NULL);
    pthread_cond_init(&io->rest, NULL);
    const hd_status st = start(io, n_threads, err);
    if (st == HD_OK) {
        *out = io;
    } else {
        hd_disk_io_close(io);
    }
    return st;
}

void hd_disk_io_close(hd_disk_io *io) {
    if (!io) return;
    pthread_mutex_lock(&io->lock);
    io->closing = true;
    pthread_cond_broadcast(&io->work);
    pthread_mutex_unlock(&io->lock);
    for (int32_t i = 0; i < io->n_threads; i++) pthread_join(io->threads[i], NULL);
    pthread_mutex_destroy(&io->lock);
    pthread_cond_destroy(&io->work);
    pthread_cond_destroy(&io->rest);
    free(io->reads.jobs);
    free(io->writes.jobs);
    free(io->done.jobs);
    free(io->threads);
    free(io);
}

void hd_disk_io_submit(hd_disk_io *io, const hd_disk_job *job) {
    pthread_mutex_lock(&io->lock);
    push(io, job->kind == HD_DISK_READ ? &io->reads : &io->writes, job);
    pthread_cond_signal(&io->work);
    pthread_mutex_unlock(&io->lock);
}

/* Without threads. */
static void run_next(hd_disk_io *io) {
    if (!io->reads.n && !io->writes.n) return;
    hd_disk_job job = pop(io, io->reads.n ? &io->reads : &io->writes);
    job.why = run_job(io->disk, &job);
    push(io, &io->done, &job);
}

bool hd_disk_io_take(hd_disk_io *io, hd_disk_job *out) {
    if (!io->n_threads) run_next(io);
    pthread_mutex_lock(&io->lock);
    const bool any = io->done.n > 0;
    if (any) *out = pop(io, &io->done);
    pthread_mutex_unlock(&io->lock);
    return any;
}

void hd_disk_io_wait(hd_disk_io *io) {
    while (!io->n_threads && (io->reads.n || io->writes.n)) run_next(io);
    pthread_mutex_lock(&io->lock);
    while (io->reads.n || io->writes.n || io->n_running) {
        pthread_cond_wait(&io->rest, &io->lock);
    }
    pthread_mutex_unlock(&io->lock);
}
