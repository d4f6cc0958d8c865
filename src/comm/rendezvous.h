/* rendezvous.h - rendezvous of the ranks of a world, and the watch over them while they run.
 *
 * Every rank connects to rank 0 at HOST:PORT; rank 0 gathers the address of each and sends all
 * of them to all. The connections stay. A thread per rank sends and awaits a heartbeat on them:
 * a rank whose process has ended is known at once, since the kernel closes its connection; one
 * that is stopped or unreachable after `silence_ms` (silence.h). Rank 0 tells the others. Its own loss is
 * seen by all. Off the loopback interface a shared secret is required.
 *
 * An epoch is the time in which the same ranks work together. It ends when one of them is lost or
 * gives up, or when another one has come and is ready. The next one begins with all that are
 * connected, once each has offered an address for it: hd_rendezvous_next(). Rank 0 listens as long
 * as it lives, so a lost rank can come again. */
#ifndef HD_COMM_RENDEZVOUS_H
#define HD_COMM_RENDEZVOUS_H

#include <stdbool.h>
#include <stdint.h>

#include "hadal_types.h"
#include "base/status.h"

typedef struct hd_rendezvous hd_rendezvous;

enum { HD_RENDEZVOUS_FACTS = 6, HD_RENDEZVOUS_TEXT = 200 };

/* What must be equal on all ranks: "model", "layout". */
typedef struct hd_rendezvous_fact {
    const char *name; /* NULL: none */
    uint64_t value;
} hd_rendezvous_fact;

typedef struct hd_rendezvous_options {
    int32_t rank, world;
    const char *at;     /* "HOST:PORT" of rank 0 */
    const char *secret; /* shared by all ranks; NULL: loopback only */
    /* A rank that differs from rank 0 is refused, by the name of the first one. */
    hd_rendezvous_fact facts[HD_RENDEZVOUS_FACTS];
    int32_t start_ms;   /* longest wait for all ranks; 0: 60 s */
    int32_t silence_ms; /* silence.h; 0: 1 s */
    bool again;         /* rank 0 has been there: refused connections say that it ended */
    /* What this rank has exchanged, which its heartbeats tell rank 0; NULL: they do not. */
    const struct comm_figures *figures;
} hd_rendezvous_options;

/* Fills rank and world from the environment of mpirun (OMPI_COMM_WORLD_*, PMI_*) or srun
 * (SLURM_PROCID, SLURM_STEP_NUM_TASKS, which a batch script outside of srun has not). Returns false
 * if there is none or it makes no sense. */
bool hd_rendezvous_from_environment(int32_t *rank, int32_t *world);

/* The launcher's name of this job, or NULL: two jobs on one port are told apart by it. */
const char *hd_rendezvous_job(void);

/* Waits until all ranks are there, each with its address of n bytes. If they work without this rank
 * already, it is in no epoch yet. */
hd_status hd_rendezvous_open(hd_rendezvous **out, const hd_rendezvous_options *o,
                             const void *address, uint32_t n, hd_err *err);

/* The epoch, from 1 on; 0: none yet. Like the following, as of the last hd_rendezvous_next(). */
uint32_t hd_rendezvous_epoch(const hd_rendezvous *m);

/* A rank's address, or NULL if it is no member; its bytes live until hd_rendezvous_next(). */
const void *hd_rendezvous_address(const hd_rendezvous *m, int32_t rank, uint32_t *n);

/* A secret of this epoch, new each time. */
const uint64_t *hd_rendezvous_session(const hd_rendezvous *m);

/* Starts the watch. The thread calls `lost` once in each epoch, when that ends before all left. */
typedef void hd_rendezvous_lost_fn(void *ctx, uint32_t epoch, const char *why);
hd_status hd_rendezvous_watch(hd_rendezvous *m, hd_rendezvous_lost_fn *lost, void *ctx,
                              hd_err *err);

/* On rank 0: what another rank told last, zeros before. Any thread. */
void hd_rendezvous_read_figures(hd_rendezvous *m, int32_t rank, hd_rank_figures *out);

/* On rank 0: how another rank was lost last, into why [HD_RENDEZVOUS_TEXT]; empty: never. Any
 * thread. */
void hd_rendezvous_read_loss(hd_rendezvous *m, int32_t rank, char *why);

/* On rank 0: how many times another rank was lost. Any thread. */
uint64_t hd_rendezvous_count_losses(hd_rendezvous *m);

/* Ends the epoch of all ranks. Any thread. */
void hd_rendezvous_abort(hd_rendezvous *m, const char *why);

typedef enum hd_rendezvous_news {
    HD_RENDEZVOUS_EPOCH, /* the next one has begun */
    HD_RENDEZVOUS_LEFT,  /* this rank or rank 0 has finished */
    HD_RENDEZVOUS_GONE   /* rank 0 is lost, or has given up this rank */
} hd_rendezvous_news;

/* Offers this rank's address of n bytes for the next epoch, and waits for that. */
hd_rendezvous_news hd_rendezvous_next(hd_rendezvous *m, const void *address, uint32_t n);

/* Says that this rank has finished. hd_rendezvous_done(): all have, or communication has ended. */
void hd_rendezvous_leave(hd_rendezvous *m);
bool hd_rendezvous_done(const hd_rendezvous *m);

void hd_rendezvous_close(hd_rendezvous *m); /* NULL is fine */

#endif
