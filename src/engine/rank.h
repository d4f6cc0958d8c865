/* rank.h - one rank of the engine: its device, stream, weights, runner and thread. The first
 * rank leads: it has the scheduler, and its thread is the step thread. The others follow its
 * commands (runner/commands.c). What requests and clients see stays with the engine
 * (engine_internal.h). */
#ifndef HD_ENGINE_RANK_H
#define HD_ENGINE_RANK_H

#include "engine/engine_internal.h"
#include "runner/model_runner.h"
#include "runner/null_runner.h"
#include "sched/sched.h"

/* What every rank is opened with: limits and capacities, chosen by open.c. */
typedef struct engine_sizes {
    int32_t running, context, chunk, step_rows, sample_rows, queue, drafts;
    hd_kv_shape shape;
    int32_t seq_pages, n_pages[HD_N_KV_GROUPS], n_snapshots;
} engine_sizes;

struct engine_rank {
    hd_engine *engine;
    int32_t index;

    /* read-only after open */
    hd_ops ops;
    hd_device *device; /* NULL, like weights, stream and model_runner: the null runner */
    hd_stream *stream;
    const hd_comm *comm; /* NULL: one rank */
    hd_weights *weights; /* its shard; closed by the engine if it is the complete model */
    hd_model_runner *model_runner;
    hd_null_runner *null; /* NULL: a model runs */
    hd_runner runner;
    bool graphs;

    /* owned by the step thread */
    hd_sched *sched;
    engine_step_output *step_outputs; /* [cap_step_outputs] of the step */
    hd_alternative *tops;             /* their alternatives */
    int32_t n_step_outputs, cap_step_outputs;
    engine_mail inbox;
    uint64_t seen_pauses; /* number of pauses requested, as of the last mail */
    hd_err step_err;
    int64_t in_runner_ns; /* time of this step */
    hd_engine_stats totals;
    size_t follower_bytes; /* of the leader: activations of all followers */
    int64_t *fresh_loads;  /* [n_loads] expert loads read last */
    /* when they were last published, and after how many steps */
    int64_t loads_ns, loads_steps;
    int64_t audited; /* requests that had finished by the last audit */

    pthread_t thread;
    bool started;
};

/* ---- ranks.c ---- */

/* Sets e->parallel by the options. Refuses what cannot be divided so, and backends without
 * ranks, before a weight is read. */
hd_status engine_ranks_choose(hd_engine *e, const hd_engine_options *o, hd_err *err);

/* Opens all ranks up to their weights. */
hd_status engine_ranks_open(hd_engine *e, const hd_engine_options *o, hd_precision precision,
                            hd_err *err);

/* Adds the memory of all followers to what the leader reports. */
void engine_ranks_count_memory(hd_engine *e);

/* Starts the threads of all ranks. */
hd_status engine_ranks_start(hd_engine *e, hd_err *err);

/* Joins the threads, once the engine is closing, and closes the ranks. */
void engine_ranks_join(hd_engine *e);
void engine_ranks_close(hd_engine *e);

/* ---- rank.c: opening, in this order; close accepts a rank that is half open or all zero ---- */

static inline bool engine_rank_leads(const engine_rank *rank) {
    return rank->index == 0;
}

/* Opens the device of rank `index`. Nothing with backend null. */
hd_status engine_rank_open(engine_rank *rank, hd_engine *e, int32_t index,
                           const hd_engine_options *o, hd_precision precision, hd_err *err);
/* Joins the engine's world and takes its shard of the complete weights. */
hd_status engine_rank_open_shard(engine_rank *rank, hd_err *err);
hd_status engine_rank_upload(engine_rank *rank, const hd_engine_options *o, hd_err *err);

/* Opens the runner, and of the leader scheduler and inbox. max_living: choices that may run or wait. */
hd_status engine_rank_open_runner(engine_rank *rank, const engine_sizes *z,
                                  const hd_engine_options *o, hd_err *err);
hd_status engine_rank_open_inbox(engine_rank *rank, const engine_sizes *z, int32_t max_living,
                                 hd_err *err);
void engine_rank_close(engine_rank *rank);

/* ---- step_loop.c ---- */

hd_sched_hooks engine_rank_hooks(engine_rank *rank);
hd_runner engine_rank_runner(engine_rank *rank); /* rank->runner, with its time measured */
hd_status engine_rank_start(engine_rank *rank, hd_err *err); /* starts its thread */

#endif
