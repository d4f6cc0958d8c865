/* experts.c - see experts.h: the options, and the memory in which they are staged. */
#include "engine/experts.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/checked.h"
#include "base/cores.h"
#include "base/memory.h"
#include "engine/notices.h"
#include "engine/peers.h"
#include "engine/sizes.h"
#include "model/expert_disk.h"
#include "model/expert_fetch.h"
#include "model/expert_host.h"

static const double HOST_PART = 0.9; /* of the host memory that is free */
static const double MOST_GB = 1e9;
enum { MOST_SENT_ROWS = 512 }; /* that the host computes of a layer */

static bool is_on(const char *option) {
    return option && strcmp(option, "off") != 0;
}

bool engine_experts_are_on_disk(const hd_engine_options *o) {
    return is_on(o->experts_disk);
}

bool engine_experts_are_on_host(const hd_engine_options *o) {
    return is_on(o->experts_host);
}

/* Returns bytes; 0: auto. */
static hd_status read_bytes(const char *name, const char *text, double *bytes, hd_err *err) {
    char *end = NULL;
    *bytes = 0;
    if (!is_on(text) || strcmp(text, "auto") == 0) return HD_OK;
    const double gb = strtod(text, &end);
    *bytes = gb * 1e9;
    if (*text >= '0' && *text <= '9' && *end == '\0' && gb > 0 && gb <= MOST_GB) return HD_OK;
    return HD_FAIL(err, HD_EINVAL,
                   "%s is '%s'; must be off, auto or a number of gigabytes above 0", name,
                   text);
}

/* Who computes experts that are not in device memory. */
static bool computes_on_host(const hd_engine_options *o, bool *always) {
    const char *who = o->experts_host_compute ? o->experts_host_compute : "device";
    *always = strcmp(who, "host") == 0;
    return *always || strcmp(who, "auto") == 0;
}

static hd_status check_compute(const hd_engine_options *o, hd_err *err) {
    bool always;
    const char *who = o->experts_host_compute;
    if (computes_on_host(o, &always) && !engine_experts_are_on_host(o)) {
        return HD_FAIL(err, HD_EINVAL,
                       "experts_host_compute is '%s', and experts are not in host memory "
                       "(experts_host)",
                       who);
    }
    if (!who || computes_on_host(o, &always) || strcmp(who, "device") == 0) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "experts_host_compute is '%s'; must be device, auto or host",
                   who);
}

hd_status engine_experts_check(const hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const bool disk = engine_experts_are_on_disk(o), host = engine_experts_are_on_host(o);
    const char *why = NULL;
    double bytes;
    HD_TRY(check_compute(o, err));
    if (!disk && !host) return HD_OK;
    HD_TRY(read_bytes("experts_disk", o->experts_disk, &bytes, err));
    HD_TRY(read_bytes("experts_host", o->experts_host, &bytes, err));
    const bool null = o->backend && strcmp(o->backend, "null") == 0;
    if (e->spec->route.n_experts == 0) why = "the model has no experts";
    if (o->updatable) why = "weights that can be replaced are in memory of their own";
    if (o->dummy_weights && disk) why = "random weights are in no file";
    if (null) why = "the null backend has none";
    if (hd_parallel_world(&e->parallel) > 1) why = "several ranks hold parts of them";
    if (disk && host) why = "they lie on disk or in host memory, not in both";
    if (!why) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "experts cannot stay %s here: %s",
                   disk ? "on disk" : "in host memory", why);
}

/* What KV pages will take is not free. */
static size_t free_bytes(const engine_rank *rank, const hd_engine_options *o) {
    const hd_engine *e = rank->engine;
    const hd_engine_sizes z = hd_engine_sizes_of(e->spec, e->drafts, o);
    const int32_t n_layers = e->spec->n_layers + hd_weights_n_mtp(rank->weights);
    const size_t kv = hd_engine_kv_bytes(&z, e->spec, n_layers, rank->ops.kv_type);
    const double left =
        (double)hd_device_free_bytes(rank->device) - (double)kv - o->kv_host_gb * 1e9;
    return left > 0 ? (size_t)(left * HD_EXPERTS_PART) : 0;
}

static hd_status open_disk(engine_rank *rank, const hd_engine_options *o, hd_err *err) {
    double bytes;
    if (!hd_device_is_host(rank->device)) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "experts cannot stay on disk here: backend '%s' is not the cpu's",
                       rank->ops.name);
    }
    HD_TRY(read_bytes("experts_disk", o->experts_disk, &bytes, err));
    const hd_expert_disk_options disk = {.bytes =
                                             bytes > 0 ? (size_t)bytes : free_bytes(rank, o)};
    HD_TRY(hd_expert_disk_open(&rank->stage, rank->engine->spec, rank->weights, &disk, err));
    const hd_expert_stage_stats s = hd_expert_stage_read_stats(rank->stage);
    rank->totals.weight_bytes += s.bytes;
    rank->totals.weight_bytes -= s.elsewhere_bytes;
    return HD_OK;
}

static hd_status open_fetch(engine_rank *rank, hd_expert_fetch_options fetch, hd_err *err) {
    fetch.device = rank->device;
    fetch.stream = rank->stream;
    fetch.copy_stream = rank->copy_stream;
    fetch.queued = !hd_device_is_host(rank->device);
    return hd_expert_fetch_open(&rank->stage, rank->engine->spec, rank->weights, &fetch, err);
}

/* Of the group that divides the experts, in the order in which ranks are asked, this one last: so all have
 * the same number of readers. */
static hd_status list_ranks(const engine_rank *rank, hd_fetch_source **out, int32_t *n,
                            hd_err *err) {
    const hd_engine *e = rank->engine;
    *n = engine_fetches(e) ? e->parallel.dwdp : e->n_ranks;
    *out = calloc((size_t)*n, sizeof **out);
    if (!*out) return HD_FAIL(err, HD_ENOMEM, "no memory for a list of %d ranks", *n);
    const int32_t own = rank->place % *n, first = rank->place - own;
    for (int32_t i = 0; i < *n; i++) {
        const engine_rank *peer = &e->ranks[first + (own + 1 + i) % *n];
        (*out)[i] = (hd_fetch_source){.name = "peer", .has = peer->weights};
    }
    return HD_OK;
}

/* Every rank begins to fetch from the one behind it, which is the first of its list. */
static hd_status open_peers(engine_rank *rank, const hd_engine_options *o, hd_err *err) {
    const hd_engine *e = rank->engine;
    hd_fetch_source *peers;
    int32_t n;
    hd_status st = e->ucx ? engine_peers_sources(rank, &peers, &n, err)
                          : list_ranks(rank, &peers, &n, err);
    if (st == HD_OK) {
        const hd_expert_fetch_options fetch = {.sources = peers,
                                               .n_sources = n,
                                               .timed = e->dwdp_from != 0,
                                               .depth =
                                                   o->prefetch_depth ? o->prefetch_depth : 1};
        st = open_fetch(rank, fetch, err);
    }
    free(peers);
    return st;
}

/* Returns whether all that host memory holds is pinned. If not, copies wait for the host, and are right all
 * the same. */
static bool hold(engine_rank *rank, int32_t layers) {
    struct rlimit locked;
    size_t pinned;
    hd_err why = {0};
    if (hd_weights_hold_experts(rank->engine->whole, layers, rank->device, &pinned, &why) ==
        HD_OK) {
        return true;
    }
    const bool limited =
        getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY;
    engine_note_pageable(rank->engine, pinned, &why, limited ? locked.rlim_cur : UINT64_MAX);
    return false;
}

/* How many layers, the first ones, hold their experts in host memory: as many as that has room for. */
static int32_t held_layers(const engine_rank *rank, const hd_engine_options *o) {
    const hd_engine *e = rank->engine;
    const double snapshots = o->kv_host_gb * 1e9;
    const double free = (double)hd_memory_free() - snapshots;
    const double bytes = o->host_memory_gb > 0 ? o->host_memory_gb * 1e9 : HOST_PART * free;
    return hd_expert_host_layers(e->spec, e->whole, bytes > 0 ? (size_t)bytes : 0);
}

/* The step thread and one that serves clients go on beside those that compute. */
static int32_t computing_threads(const engine_rank *rank, const hd_engine_options *o) {
    if (o->threads || hd_device_is_host(rank->device)) return o->threads;
    return hd_max_i32(1, hd_cores_count() - 2);
}

/* A host that cannot compute rows is no failure: the device computes all. */
static void open_host_experts(engine_rank *rank, const hd_engine_options *o, int32_t held) {
    hd_err why = {0};
    hd_host_experts_options host = {
        .whole = rank->engine->whole,
        .held = held,
        .device = rank->device,
        .stream = rank->stream,
        .precision = rank->ops.precision,
        .cpu = {.n_threads = computing_threads(rank, o), .pin = o->pin_threads},
        .rows = MOST_SENT_ROWS
    };
    if (!computes_on_host(o, &host.always)) return;
    if (hd_host_experts_open(&rank->host_experts, rank->engine->spec, &host, &why) != HD_OK) {
        engine_note_no_host_rows(rank->engine, &why);
    }
}

static void close_host_experts(engine_rank *rank) {
    hd_host_experts_close(rank->host_experts);
    rank->host_experts = NULL;
}

/* Where operators cannot read the experts in place, or slots are fewer than layers, the host queues
 * copies, and holds all experts. */
static hd_status open_host(engine_rank *rank, const hd_engine_options *o, hd_err *err) {
    const hd_fetch_source source = {.name = "host", .has = rank->engine->whole};
    hd_err why = {0};
    double asked;
    HD_TRY(read_bytes("experts_host", o->experts_host, &asked, err));
    const size_t bytes = asked > 0 ? (size_t)asked : free_bytes(rank, o);
    const int32_t all = rank->engine->spec->n_layers + rank->engine->spec->n_mtp;
    const int32_t held = held_layers(rank, o);
    hd_expert_host_options host = {.whole = rank->engine->whole,
                                   .held = held,
                                   .bytes = bytes,
                                   .device = rank->device,
                                   .stream = rank->stream,
                                   .copy_stream = rank->copy_stream};
    const hd_expert_fetch_options fetch = {
        .sources = &source, .n_sources = 1, .depth = 1, .bytes = bytes};
    hd_status st = HD_EUNSUPPORTED;
    if (hold(rank, held)) {
        open_host_experts(rank, o, held);
        host.host = rank->host_experts;
        st = hd_expert_host_open(&rank->stage, rank->engine->spec, rank->weights, &host, &why);
    }
    if (st != HD_OK && rank->host_experts) {
        close_host_experts(rank);
        engine_note_no_host_rows(rank->engine, &why);
    }
    if (held < all && st == HD_OK) engine_note_layers(rank->engine, all - held, all);
    if (held == all && st == HD_EUNSUPPORTED) {
        rank->graphs = false;
        HD_TRY(open_fetch(rank, fetch, err));
    } else if (st != HD_OK) {
        return HD_FAIL(err, st, "%s",
                       *why.msg
                           ? why.msg
                           : "host memory has no room for all experts, and cannot be pinned");
    }
    rank->totals.weight_bytes += hd_expert_stage_read_stats(rank->stage).bytes;
    return HD_OK;
}

hd_status engine_experts_open(engine_rank *rank, const hd_engine_options *o, hd_err *err) {
    if (!rank->weights) return HD_OK;
    if (engine_experts_are_on_disk(o)) HD_TRY(open_disk(rank, o, err));
    if (engine_experts_are_on_host(o)) HD_TRY(open_host(rank, o, err));
    if (rank->parallel.dwdp > 1 || rank->engine->dwdp_from) HD_TRY(open_peers(rank, o, err));
    engine_experts_read(rank);
    return HD_OK;
}

void engine_experts_read(engine_rank *rank) {
    if (!rank->stage) return;
    const hd_expert_stage_stats s = hd_expert_stage_read_stats(rank->stage);
    const hd_expert_figures *before = &rank->experts_before;
    rank->totals.experts =
        (hd_expert_figures){.source = s.source,
                            .slots = s.n_slots,
                            .elsewhere = s.n_experts,
                            .slot_bytes = s.expert_bytes,
                            .used = before->used + s.used,
                            .staged = before->staged + s.staged,
                            .fetched = before->fetched + s.fetched,
                            .fetched_bytes = before->fetched_bytes + s.fetched_bytes,
                            .predicted = before->predicted + s.predicted,
                            .right = before->right + s.right,
                            .ahead = before->ahead + s.ahead,
                            .moved = before->moved + s.moved,
                            .failed = before->failed + s.failed,
                            .wait_ns = before->wait_ns + s.wait_ns,
                            .sent = before->sent + s.sent,
                            .sent_rows = before->sent_rows + s.sent_rows,
                            .sent_ns = before->sent_ns,
                            .split_ns = before->split_ns + s.taken_ns,
                            .split_predicted_ns = before->split_predicted_ns + s.predicted_ns,
                            .network_bytes = before->network_bytes,
                            .file_bytes = before->file_bytes};
    if (rank->model_runner) {
        const hd_model_runner_times *t = hd_model_runner_read_times(rank->model_runner);
        rank->totals.experts.fetch_steps = t->fetch_steps;
        rank->totals.experts.fetch_from = t->fetch_from < INT32_MAX ? t->fetch_from : 0;
    }
    if (rank->host_experts) {
        rank->totals.experts.sent_ns += hd_host_experts_ns(rank->host_experts);
    }
    engine_peers_read(rank);
}

void engine_experts_close(engine_rank *rank) {
    engine_experts_read(rank);
    hd_expert_stage_close(rank->stage);
    rank->stage = NULL;
    close_host_experts(rank);
    engine_peers_leave(rank);
    rank->totals.experts.slots = rank->totals.experts.elsewhere = 0;
    rank->experts_before = rank->totals.experts;
}
