/* rank.h - one rank of the engine: its device, stream, weights, runner and thread. The first
 * rank of an attention group leads it: it has a scheduler, and its thread is the step thread. The
 * others follow its commands (runner/commands.c). What requests and clients see stays with the
 * engine (engine_internal.h). */
#ifndef HD_ENGINE_RANK_H
#define HD_ENGINE_RANK_H

#include "engine/engine_internal.h"
#include "engine/sizes.h"
#include "model/host_experts.h"
#include "runner/model_runner.h"
#include "runner/null_runner.h"
#include "sched/sched.h"

typedef struct engine_rebalance engine_rebalance; /* rebalance.c */
typedef struct engine_recording engine_recording; /* recording.c */
typedef struct engine_peers engine_peers;         /* peers.c */

/* A request, and the positions of it that the step has computed. */
typedef struct engine_watched {
    engine_request *request;
    int32_t n_done;
} engine_watched;

struct engine_rank {
    hd_engine *engine;
    int32_t index; /* of the world */

    /* changed only when a rank of several processes begins anew (world.c), like comm, weights and
     * runner: its place in the layout, which is the index as long as all ranks work; attention
     * group */
    hd_parallel_config parallel;
    int32_t place, group;

    /* read-only after open */
    hd_ops ops;
    hd_device *device; /* NULL, like weights, stream and model_runner: the null runner */
    hd_stream *stream, *beside_stream; /* beside: NULL on a CPU */
    /* The same GPU, if this is a rank of several processes: the memory of its shard goes back when that
     * closes. NULL: the shard is on the device. */
    hd_device *shard_device;
    hd_stream *copy_stream; /* NULL: no experts of other ranks are fetched */
    const hd_comm *comm;    /* NULL: one rank */
    hd_weights *weights;    /* its shard; closed by the engine if it is the complete model */
    hd_expert_stage *stage; /* NULL: all experts are resident */
    hd_host_experts *host_experts;    /* of the stage; NULL: the host computes none */
    hd_expert_figures experts_before; /* counted by stages of earlier places */
    engine_peers *peers;              /* NULL: none are on other hosts */
    hd_model_runner *model_runner;
    hd_null_runner *null; /* NULL: a model runs */
    hd_runner runner;
    bool graphs;

    /* owned by the step thread */
    hd_sched *sched;
    hd_disk_tier *kv_disk;            /* NULL: none */
    engine_step_output *step_outputs; /* [cap_step_outputs] of the step */
    hd_alternative *tops;             /* their alternatives */
    int32_t n_step_outputs, cap_step_outputs;
    engine_mail inbox;
    engine_watched *watched; /* [n_watched] requests of the step whose pages somebody awaits */
    int32_t n_watched;       /* at most max_running */
    const char *weight_version;
    engine_order order;       /* of this round */
    bool began_anew;          /* rank 0: in this round, of which others know nothing */
    uint64_t recoveries;      /* as of the last mail */
    bool discarded;           /* the lost weights are those that were given back */
    size_t released_bytes[2]; /* of each hd_memory bit */
    hd_err step_err;
    hd_err lost;          /* of a leader in another process than rank 0: why it ended */
    int64_t in_runner_ns; /* time of this step */
    hd_engine_stats totals;
    int32_t failures;            /* of rank 0: steps that failed since all groups succeeded */
    int32_t successes;           /* its own steps that succeeded since */
    int64_t failed_ns;           /* when one failed last */
    size_t follower_bytes;       /* of a leader: activations of its followers */
    int64_t *fresh_loads;        /* [hd_model_n_expert_rows()] as read last */
    engine_recording *recording; /* NULL: there are no experts */
    engine_rebalance *rebalance; /* NULL: experts stay where they are */
    hd_err rebalance_err;        /* why moves were given up last */
    /* when they were last published, and after how many steps */
    int64_t loads_ns, loads_steps;
    int64_t audited; /* requests that had finished by the last audit */

    pthread_t thread;
    bool started, followed; /* runs; has ended as a follower (hd_engine_follow) */
};

/* ---- layout.c ---- */

/* Sets e->parallel by the options. Refuses what cannot be divided so, and backends without
 * ranks, before a weight is read. */
hd_status engine_ranks_choose(hd_engine *e, const hd_engine_options *o, hd_err *err);

/* ---- ranks.c ---- */

/* Opens all ranks up to their weights. */
hd_status engine_ranks_open(hd_engine *e, const hd_engine_options *o, hd_precision precision,
                            hd_err *err);

/* Adds the memory of all followers to what the leader reports. */
void engine_ranks_count_memory(hd_engine *e);

/* Starts the threads of all ranks. */
hd_status engine_ranks_start(hd_engine *e, hd_err *err);

/* After a step failed, on a leader's thread: once all leaders are here or between two rounds, rank
 * 0 ends the followers' threads and starts them again. False if that has been of no use, as no
 * step succeeded since; then what runs must end. */
bool engine_ranks_recover(engine_rank *leader, const hd_err *why);

/* Counts a restart of rank 0. False after failures one after the other, until it is time to try
 * again. */
bool engine_ranks_may_restart(engine_rank *first);
void engine_ranks_count_failure(engine_rank *first, const char *why);

/* A step of a leader succeeded. */
void engine_ranks_count_success(engine_rank *leader);

/* Joins the threads, once the engine is closing, and closes the ranks. */
void engine_ranks_join(hd_engine *e);
void engine_ranks_close(hd_engine *e);

/* While no rank runs, waits until no expert is being copied from one device to another. */
void engine_ranks_await_moves(hd_engine *e);

/* ---- rank.c: opening, in this order; close accepts a rank that is half open or all zero ---- */

/* Whether it leads its attention group. */
static inline bool engine_rank_leads(const engine_rank *rank) {
    return rank->place % rank->parallel.tp == 0;
}

/* Whether it leads an attention group, and the front is in another process. */
static inline bool engine_rank_is_remote(const engine_rank *rank) {
    return rank->engine->remote && rank->group;
}

/* ---- rank.c ---- */

/* Opens the device of rank `index`. Nothing with backend null. */
hd_status engine_rank_open(engine_rank *rank, hd_engine *e, int32_t index,
                           const hd_engine_options *o, hd_precision precision, hd_err *err);
/* Joins the engine's world and takes its shard of the complete weights. */
hd_status engine_rank_open_shard(engine_rank *rank, const hd_engine_options *o, hd_err *err);
hd_status engine_rank_upload(engine_rank *rank, const hd_engine_options *o, hd_err *err);

/* Opens the runner, and of the leader scheduler and inbox. max_living: choices that may run or wait. */
hd_status engine_rank_open_runner(engine_rank *rank, const hd_engine_sizes *z,
                                  const hd_engine_options *o, hd_err *err);
hd_status engine_rank_open_inbox(engine_rank *rank, const hd_engine_sizes *z,
                                 int32_t max_living, hd_err *err);
void engine_rank_close(engine_rank *rank);

/* ---- rounds.c: on a leader's thread ---- */

/* Waits until there is something to do, and sets rank->order. False: the engine is closing. */
bool engine_round_begin(engine_rank *rank);

/* look_ns: when the group wants a round although it is idle; 0: never. */
void engine_round_end(engine_rank *rank, bool idle, int64_t look_ns);

/* Waits until every other leader is parked or has ended the round. */
void engine_round_await_rest(hd_engine *e);
void engine_round_resume(hd_engine *e, bool recovered);

/* Waits for engine_round_resume(), and returns what that says; false if the engine closes. */
bool engine_round_park(engine_rank *rank);

/* ---- step_loop.c ---- */

/* Moves an output, with its why, into the ring. Waits while that is full because the polling
 * thread is behind. The caller holds the lock. */
void engine_post(hd_engine *e, engine_step_output *p);

hd_sched_hooks engine_rank_hooks(engine_rank *rank);
hd_runner engine_rank_runner(engine_rank *rank); /* rank->runner, with its time measured */
hd_status engine_rank_start(engine_rank *rank, hd_err *err); /* starts its thread */
void engine_rank_work(engine_rank *rank); /* leads or follows, until closed or lost */

/* ---- pages.c: on a leader's thread ---- */

void engine_pages_note(engine_rank *rank, uint64_t id, int32_t n_done); /* of a step */
void engine_pages_show(engine_rank *rank);                              /* behind the step */
void engine_pages_run_jobs(engine_rank *rank, engine_mail *in);
void engine_pages_read(engine_rank *rank, uint64_t id); /* what a job waited for */

/* ---- recording.c: close accepts all zeros ---- */

hd_status engine_recording_open(engine_rank *rank, hd_err *err);
void engine_recording_close(engine_rank *rank);
/* What the next order says of records. The caller, the first leader, holds the lock. */
void engine_recording_order(engine_rank *rank, engine_order *order);
/* A group has obeyed what so many requests asked for. The caller holds the lock. */
void engine_recording_obeyed(hd_engine *e, int32_t group, uint64_t requests);
/* Does what it says, on all leaders. False: that failed, and the round computes nothing. */
bool engine_recording_step(engine_rank *rank);
/* Of rank 0, for counts of groups in other processes: room for *n of them, NULL without a record; adds what
 * a group has counted for a record. The caller holds the lock. */
int64_t *engine_recording_room(const engine_rank *first, size_t *n);
void engine_recording_add(engine_rank *first, uint64_t number, const int64_t *counts);
void engine_recording_lost(engine_rank *first); /* those of lost ranks do not come any more */

/* ---- rebalance.c: close accepts all zeros ---- */

/* Refuses what the option says, or a layout without experts to move. */
hd_status engine_rebalance_check(const hd_engine *e, const hd_engine_options *o, hd_err *err);
bool engine_rebalance_is_on(const hd_engine_options *o);
hd_status engine_rebalance_open(engine_rank *rank, const hd_engine_options *o, hd_err *err);
void engine_rebalance_close(engine_rank *rank);
/* Whether the first leader has something to do with experts before the next step. */
bool engine_rebalance_wants(engine_rank *rank);
/* Does it, on all leaders whose order says so. False: that failed, and the round computes nothing. */
bool engine_rebalance_step(engine_rank *rank);
/* After a failure, while no follower runs: gives every rank the same maps again. */
hd_status engine_rebalance_recover(hd_engine *e, hd_err *err);
void engine_rebalance_obey(engine_rank *rank, const engine_mail *in);

/* ---- kv_disk.c: KV pages on a disk ---- */

/* Refuses, by name, what it cannot be used with. */
hd_status engine_kv_disk_check(const hd_engine_options *o, hd_err *err);

/* Opens the disk tier of a rank whose runner is open, if the option says so. */
hd_status engine_kv_disk_open(engine_rank *rank, const hd_engine_sizes *z,
                              const hd_engine_options *o, hd_err *err);
void engine_kv_disk_read(engine_rank *rank); /* into its totals */

#endif
