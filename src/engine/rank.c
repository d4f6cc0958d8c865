/* rank.c - opens and closes a rank: device, shard, runner, scheduler, and memory of its
 * thread. */
#include "engine/experts.h"
#include "engine/new_weights.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cores.h"
#include "weights/experts/expert_moves.h"

/* This rank's share of the threads. */
static int32_t threads_of(const engine_rank *rank, const hd_engine_options *o) {
    const int32_t ranks = hd_parallel_world(&rank->engine->parallel);
    if (ranks == 1 || !engine_process_shares_cores(o)) return o->threads;
    const int32_t all = o->threads ? o->threads : hd_cores_count();
    return hd_max_i32(all / ranks + (rank->index < all % ranks), 1);
}

/* Ranks share GPUs if there are too few. */
static int32_t gpu_of(const engine_rank *rank, const hd_engine_options *o) {
    const int32_t n = hd_device_count_gpus();
    if (hd_parallel_world(&rank->engine->parallel) == 1 || n == 0) return o->gpu;
    return (o->gpu + rank->index) % n;
}

static hd_status open_device(engine_rank *rank, const hd_engine_options *o,
                             hd_precision precision, hd_err *err) {
    hd_engine *e = rank->engine;
    const char *needs_cpu = hd_mla_needs_cpu(e->mla, precision) ? "mla naive"
                            : engine_experts_are_on_disk(o)     ? "a model with experts on disk"
                                                                : NULL;
    const char *backend = o->backend ? o->backend : "auto";
    if (hd_parallel_world(&e->parallel) > 1 && strcmp(backend, "auto") == 0) backend = "cpu";
    hd_ops_options ops = {
        .cpu = {.n_threads = threads_of(rank, o), .pin = o->pin_threads},
        .gpu = strcmp(backend, "cuda") == 0 ? gpu_of(rank, o) : o->gpu,
        .precision = precision,
        .cuda_path = e->cuda_path,
        .no_batch_invariance = o->no_batch_invariance,
        .needs_cpu = needs_cpu,
        .no_gpu = &e->no_gpu
    };
    HD_TRY(hd_kv_type_of(&ops.kv_type, o->kv_cache_dtype, err));
    HD_TRY(hd_kv_check_type(e->spec, ops.kv_type, err));
    HD_TRY(hd_ops_open(&rank->ops, &rank->device, backend, &ops, err));
    if (o->device_memory_gb > 0) {
        HD_TRY(hd_device_limit(rank->device, (size_t)(o->device_memory_gb * 1e9), err));
    }
    if (o->updatable) hd_device_keep_addresses(rank->device);
    const bool fetches = engine_fetches(e) || e->dwdp_from || engine_experts_are_on_host(o);
    rank->graphs = !o->no_graphs && hd_device_has_graphs(rank->device) && !engine_fetches(e);
    HD_TRY(hd_stream_open(&rank->stream, rank->device, err));
    if (fetches) HD_TRY(hd_stream_open_urgent(&rank->copy_stream, rank->device, err));
    if (hd_device_is_host(rank->device)) return HD_OK;
    return hd_stream_open(&rank->beside_stream, rank->device, err);
}

hd_status engine_rank_open(engine_rank *rank, hd_engine *e, int32_t index,
                           const hd_engine_options *o, hd_precision precision, hd_err *err) {
    rank->engine = e;
    rank->index = index;
    rank->parallel = e->parallel;
    rank->place = index;
    rank->group = index / e->parallel.tp;
    rank->weight_version = hd_engine_weight_version(e);
    if (o->backend && strcmp(o->backend, "null") == 0) return HD_OK;
    return open_device(rank, o, precision, err);
}

/* A rank of several processes begins anew with another shard. */
static hd_status open_shard_device(engine_rank *rank, const hd_engine_options *o, hd_err *err) {
    if (!rank->engine->ucx || hd_device_is_host(rank->device)) return HD_OK;
    HD_TRY(hd_device_open_cuda(&rank->shard_device, gpu_of(rank, o), rank->engine->cuda_path,
                               err));
    if (o->device_memory_gb == 0) return HD_OK;
    return hd_device_limit(rank->shard_device, hd_device_free_bytes(rank->device), err);
}

static hd_device *shard_device(const engine_rank *rank) {
    return rank->shard_device ? rank->shard_device : rank->device;
}

hd_status engine_rank_open_shard(engine_rank *rank, const hd_engine_options *o, hd_err *err) {
    hd_engine *e = rank->engine;
    if (e->whole && engine_experts_are_on_host(o)) {
        return hd_weights_open_without_experts(&rank->weights, e->whole, err);
    }
    if (hd_parallel_world(&e->parallel) == 1) {
        rank->weights = e->whole;
        return HD_OK;
    }
    if (e->world) {
        HD_TRY(hd_comm_local_join(e->world, rank->index, rank->device, rank->stream, &rank->ops,
                                  &rank->comm, err));
    }
    HD_TRY(open_shard_device(rank, o, err));
    const bool moves = engine_rebalance_is_on(o);
    if (!o->dummy_weights || hd_device_is_host(rank->device)) {
        HD_TRY(hd_weights_open_shards(&rank->weights, e->whole, &rank->parallel, rank->place,
                                      err));
        if (moves && !hd_device_is_host(rank->device)) hd_weights_make_movable(rank->weights);
        return HD_OK;
    }
    const hd_dummy_options dummy = {.parallel = rank->parallel,
                                    .rank = rank->place,
                                    .device = shard_device(rank),
                                    .stream = rank->stream,
                                    .movable = moves};
    return hd_weights_open_dummy(&rank->weights, e->spec, &dummy, err);
}

hd_status engine_rank_upload(engine_rank *rank, const hd_engine_options *o, hd_err *err) {
    const hd_upload_watch watch = {o->on_upload, o->on_upload_ctx};
    if (!rank->weights) return HD_OK;
    return hd_weights_upload(rank->weights, shard_device(rank), rank->stream, &watch, err);
}

/* ---- runner and scheduler ---- */

static hd_status open_null_runner(engine_rank *rank, const hd_engine_sizes *z,
                                  const hd_engine_options *o, hd_err *err) {
    const hd_null_runner_options null = {.tokenizer = rank->engine->tokenizer,
                                         .n_ids = rank->engine->n_ids,
                                         .n_slots = z->running,
                                         .max_drafts = z->drafts,
                                         .step_us = o->null_step_us};
    HD_TRY(hd_null_runner_open(&rank->null, &null, err));
    rank->runner = hd_null_runner_interface(rank->null);
    return HD_OK;
}

static hd_runner_role role_of(const engine_rank *rank) {
    if (!rank->comm || rank->engine->independent) return HD_RUNNER_ALONE;
    return engine_rank_leads(rank) ? HD_RUNNER_LEADS : HD_RUNNER_FOLLOWS;
}

static hd_status open_model_runner(engine_rank *rank, const hd_engine_sizes *z,
                                   const hd_engine_options *o, hd_err *err) {
    const hd_engine *e = rank->engine;
    const hd_model_env env = {.spec = e->spec,
                              .weights = rank->weights,
                              .ops = &rank->ops,
                              .device = rank->device,
                              .stream = rank->stream,
                              .beside_stream = rank->beside_stream,
                              .stage = rank->stage,
                              .comm = e->independent ? NULL : rank->comm,
                              .mla = e->mla,
                              .split = e->split,
                              .cp_part = e->cp_part};
    hd_model_runner_options x = hd_engine_runner_options(z);
    x.n_ids = e->n_ids;
    x.vocab = e->vocab;
    x.forced = hd_acceptance_of(o->forced_acceptance);
    x.fixed_steps = rank->graphs;
    x.n_micro = env.comm && hd_parallel_exchanges(&rank->parallel) ? e->n_micro : 1;
    x.micro_from = e->micro_from;
    memcpy(x.replay, e->replay, sizeof x.replay);
    x.role = role_of(rank);
    x.fetch_from = e->dwdp_from;
    x.renew = engine_update_follow;
    x.renew_ctx = rank;
    x.movable = rank->comm && engine_rebalance_is_on(o) ? rank->weights : NULL;
    HD_TRY(hd_model_runner_open(&rank->model_runner, &env, &x, err));
    rank->runner = hd_model_runner_interface(rank->model_runner);
    return HD_OK;
}

static void count_memory(engine_rank *rank, const hd_engine_sizes *z) {
    const hd_model_spec *spec = rank->engine->spec;
    const int32_t n_layers = spec->n_layers + hd_weights_n_mtp(rank->weights);
    rank->totals.activation_bytes = hd_model_runner_bytes(rank->model_runner);
    for (int k = 0; k < HD_N_REPLAYS; k++) {
        if (!rank->engine->replay[k]) continue;
        rank->totals.replay_bytes[k] = (size_t)z->n_pages[HD_KV_FULL] *
                                       (size_t)z->shape.page_tokens *
                                       (size_t)hd_replay_shape_of(spec, (hd_replay)k).row_bytes;
    }
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        rank->totals.page_bytes[g] =
            hd_kv_page_bytes(spec, n_layers, (hd_kv_group)g, rank->ops.kv_type, z->drafts);
    }
    rank->totals.kv_bytes = hd_engine_kv_bytes(z, spec, n_layers, rank->ops.kv_type);
    rank->totals.hisparse.rows = z->resident;
    rank->totals.hisparse.host_bytes =
        hd_engine_mirror_bytes(z, spec, n_layers, rank->ops.kv_type);
}

/* Not where choices of every position are kept, nor by several attention groups, which would have to
 * agree on the rows that are left. */
static bool may_rebuild(const hd_engine *e) {
    if (e->replay[HD_REPLAY_EXPERTS] || e->replay[HD_REPLAY_KEYS]) return false;
    return e->parallel.dp == 1 || e->independent;
}

/* No tails as long as what windows read. */
static bool computes_all(const hd_engine *e) {
    return e->whole_prompts || e->replays_prompts;
}

static hd_status open_sched(engine_rank *rank, const hd_engine_sizes *z, hd_err *err) {
    const hd_sched_options s = {
        .cache = {.page_tokens = z->shape.page_tokens,
                  .lookback = z->shape.lookback,
                  .tail = computes_all(rank->engine) ? 0 : hd_kv_longest_tail(&z->shape),
                  .replayed = rank->engine->replays_prompts ? rank->engine->spec->window : 0,
                  .rebuild = may_rebuild(rank->engine) ? hd_kv_rebuild_length(&z->shape) : 0,
                  .n_pages = {z->n_pages[0], z->n_pages[1]},
                  .n_host = {z->n_host[0], z->n_host[1]},
                  .write_through = z->write_through,
                  .max_seqs = z->running,
                  .seq_pages = z->seq_pages},
        .step_rows = z->step_rows,
        .chunk_rows = z->chunk,
        .sample_rows = z->sample_rows,
        .prompt_ns = z->prompt_ms * INT64_C(1000000),
        .queue_limit = z->queue + z->running * rank->engine->parallel.dp,
        .ahead = rank->graphs ? 2 * HD_MAX_STEP_TOKENS : 0,
        .max_positions = z->context,
        .draft_block = z->drafts ? rank->engine->spec->dspark.block : 0,
        .page_bytes = {rank->totals.page_bytes[0], rank->totals.page_bytes[1]},
        .disk = rank->kv_disk,
        .joins = rank->engine->parallel.dp > 1 && !rank->engine->independent
    };
    const hd_runner runner = engine_rank_runner(rank);
    const hd_sched_hooks hooks = engine_rank_hooks(rank);
    rank->totals.max_running = z->running;
    rank->totals.max_context = z->context;
    rank->totals.page_tokens = z->shape.page_tokens;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) rank->totals.host_pages[l] = z->n_host[l];
    return hd_sched_open(&rank->sched, &s, &runner, &hooks, err);
}

hd_status engine_rank_open_runner(engine_rank *rank, const hd_engine_sizes *z,
                                  const hd_engine_options *o, hd_err *err) {
    if (rank->weights) {
        HD_TRY(open_model_runner(rank, z, o, err));
        for (int g = 0; g < HD_N_KV_GROUPS; g++) {
            hd_model_runner_host_page(rank->model_runner, (hd_kv_group)g, (hd_host_page){0},
                                      &rank->engine->page_bytes[g]);
        }
        HD_TRY(engine_recording_open(rank, err));
        HD_TRY(engine_rebalance_open(rank, o, err));
        count_memory(rank, z);
        HD_TRY(engine_kv_disk_open(rank, z, o, err));
    } else {
        HD_TRY(open_null_runner(rank, z, o, err));
    }
    return engine_rank_leads(rank) && !rank->sched ? open_sched(rank, z, err) : HD_OK;
}

hd_status engine_rank_open_inbox(engine_rank *rank, const hd_engine_sizes *z,
                                 int32_t max_living, hd_err *err) {
    const size_t n = (size_t)z->running, n_tops = engine_post_tops(rank->engine);
    if (!engine_rank_leads(rank)) return HD_OK;
    const size_t n_rows = (size_t)hd_model_n_expert_rows(rank->engine->spec);
    rank->cap_step_outputs = z->running;
    rank->step_outputs = calloc(n, sizeof *rank->step_outputs);
    rank->tops = calloc(n * n_tops, sizeof *rank->tops);
    rank->fresh_loads = calloc(n_rows + 1, sizeof *rank->fresh_loads);
    rank->watched = calloc(n, sizeof *rank->watched);
    if (!rank->watched || !rank->step_outputs || !rank->tops || !rank->fresh_loads ||
        !engine_mail_open(&rank->inbox, max_living)) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for %d requests", max_living);
    }
    for (size_t i = 0; i < n; i++) {
        rank->step_outputs[i].top = rank->tops + i * n_tops;
    }
    return HD_OK;
}

void engine_rank_close(engine_rank *rank) {
    if (!rank->engine) return;
    hd_sched_close(rank->sched);
    hd_disk_tier_close(rank->kv_disk);
    hd_model_runner_close(rank->model_runner);
    hd_null_runner_close(rank->null);
    hd_stream_close(rank->beside_stream);
    hd_stream_close(rank->copy_stream);
    hd_stream_close(rank->stream);
    hd_device_close(rank->shard_device);
    hd_device_close(rank->device);
    if (rank->weights != rank->engine->whole) hd_weights_close(rank->weights);
    free(rank->step_outputs);
    free(rank->tops);
    free(rank->fresh_loads);
    free(rank->watched);
    engine_recording_close(rank);
    engine_rebalance_close(rank);
    engine_mail_close(&rank->inbox);
}
