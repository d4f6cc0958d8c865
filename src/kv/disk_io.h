/* disk_io.h - threads that read and write pages of a store while steps run.
 *
 * The step thread submits jobs and takes them back when they are done, in any order. Reads go
 * before writes. Nothing allocates after open. */
#ifndef HD_KV_DISK_IO_H
#define HD_KV_DISK_IO_H

#include "kv/disk.h"

typedef struct hd_disk_io hd_disk_io;

typedef enum hd_disk_job_kind {
    HD_DISK_READ,
    HD_DISK_WRITE,
    HD_DISK_SYNC,
    HD_N_DISK_JOBS
} hd_disk_job_kind;

typedef struct hd_disk_job {
    hd_disk_job_kind kind;
    int32_t tag; /* the caller's */
    hd_kv_group group;
    int32_t extent;
    void *page; /* its bytes, which belong to the threads until the job is taken back */
    int why;    /* result: 0 or an errno */
} hd_disk_job;

/* n_threads 0: jobs run in hd_disk_io_take(), for simulations. cap: jobs at a time, submitted and not taken back. wake(ctx): is called on one of the threads
 * when a job is done; may be NULL. */
hd_status hd_disk_io_open(hd_disk_io **out, hd_disk *d, int32_t n_threads, int32_t cap,
                          void (*wake)(void *ctx), void *ctx, hd_err *err);
void hd_disk_io_close(hd_disk_io *io); /* runs what was submitted; NULL is fine */

void hd_disk_io_submit(hd_disk_io *io, const hd_disk_job *job);
bool hd_disk_io_take(hd_disk_io *io, hd_disk_job *out); /* false: no job is done */
void hd_disk_io_wait(hd_disk_io *io);                   /* until all jobs are done */

#endif
