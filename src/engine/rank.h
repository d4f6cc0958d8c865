/* rank.h - one rank of the engine: its device, stream, weights, runner, scheduler and step
 * thread. What requests and clients see stays with the engine (engine_internal.h). */
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
    hd_weights *weights;
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
    int64_t *fresh_loads; /* [n_loads] expert loads read last */
    /* when they were last published, and after how many steps */
    int64_t loads_ns, loads_steps;
    int64_t audited; /* requests that had finished by the last audit */

    pthread_t thread;
    bool started;
};

/* ---- rank.c: opening, in this order; close accepts a rank that is half open or all zero ---- */

/* Opens rank `index` on its device and maps its weights: GPU o->gpu + index with a cuda
 * backend. Nothing with backend null. */
hd_status engine_rank_open(engine_rank *rank, hd_engine *e, int32_t index,
                           const hd_engine_options *o, hd_precision precision, hd_err *err);
hd_status engine_rank_upload(engine_rank *rank, const hd_engine_options *o, hd_err *err);

/* Opens runner, scheduler and inbox. max_living: choices that may run or wait. */
hd_status engine_rank_open_runner(engine_rank *rank, const engine_sizes *z,
                                  const hd_engine_options *o, hd_err *err);
hd_status engine_rank_open_inbox(engine_rank *rank, const engine_sizes *z, int32_t max_living,
                                 hd_err *err);
void engine_rank_close(engine_rank *rank);

/* ---- step_loop.c ---- */

hd_sched_hooks engine_rank_hooks(engine_rank *rank);
hd_runner engine_rank_runner(engine_rank *rank); /* rank->runner, with its time measured */
hd_status engine_rank_start(engine_rank *rank, hd_err *err); /* starts the step thread */

#endif
