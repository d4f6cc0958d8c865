/* process.c - a rank of several processes: what they compare before weights are read, and their
 * meeting. */
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/siphash.h"
#include "engine/experts.h"
#include "engine/peers.h"
#include "comm/address.h"
#include "comm/silence.h"
#include "weights/fingerprint.h"

static uint64_t hash_of(const void *bytes, size_t n) {
    hd_siphash s;
    hd_siphash_init(&s, (const uint64_t[2]){0});
    hd_siphash_add(&s, bytes, n);
    return hd_siphash_value(&s);
}

static uint64_t hash_of_layout(const hd_parallel_config *l) {
    const int32_t numbers[] = {
        l->tp,         l->dp,           l->ep, l->etp,  l->dense_tp, l->head_tp, l->redundant,
        l->head_parts, l->sum_in_ranks, l->cp, l->dwdp, l->copies,   l->fp8_rows};
    return hash_of(numbers, sizeof numbers);
}

static uint64_t hash_of_text(const char *text) {
    return text ? hash_of(text, strlen(text)) : 0;
}

static bool is_text(const char *text, const char *other) {
    return strcmp(text ? text : other, other) == 0;
}

/* Whatever sizes batches, pools or commands, or changes bits. */
static uint64_t hash_of_options(const hd_engine *e, const hd_engine_options *o) {
    hd_siphash s;
    const int64_t numbers[] = {o->max_running,
                               o->max_context,
                               o->kv_tokens,
                               o->chunk_tokens,
                               o->step_tokens,
                               o->no_drafts,
                               (int64_t)e->spec->drafter,
                               is_text(o->prompt_decoder, "tail"),
                               is_text(o->prompt_decoder, "replay"),
                               o->dummy_weights,
                               o->snapshot_tokens,
                               (int64_t)e->mla,
                               (int64_t)e->split,
                               is_text(o->backend, "ref"),
                               is_text(o->backend, "cuda"),
                               o->queue_limit,
                               o->max_logprobs,
                               o->updatable,
                               engine_rebalance_is_on(o),
                               e->n_micro,
                               e->micro_from,
                               e->cp_part,
                               (int64_t)(o->kv_host_gb * 1e9)};
    hd_siphash_init(&s, (const uint64_t[2]){0});
    hd_siphash_add(&s, numbers, sizeof numbers);
    hd_siphash_add_part(&s, o->precision ? o->precision : "auto");
    hd_siphash_add_part(&s, o->hisparse ? o->hisparse : "off");
    return hd_siphash_value(&s);
}

/* Ranks on GPUs read each other's memory. */
#define ONE_HOST "host or container (no rows of GPUs travel between two)"

static uint64_t host_of(const engine_rank *rank) {
    return hd_device_is_host(rank->device) ? 0 : hd_place_here().host;
}

static const char *rendezvous_of(const hd_engine_options *o) {
    return o->world.rendezvous ? o->world.rendezvous : HD_WORLD_RENDEZVOUS;
}

bool engine_process_shares_cores(const hd_engine_options *o) {
    return o->world.size == 0 || (o->threads == 0 && engine_process_is_on_one_host(o));
}

bool engine_process_is_on_one_host(const hd_engine_options *o) {
    return o->world.size == 0 || hd_address_is_loopback(rendezvous_of(o));
}

hd_status engine_process_check(const hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const hd_world_options *w = &o->world;
    const int32_t n = hd_parallel_world(&e->parallel);
    if (w->size == 0) return HD_OK;
    if (w->rank < 0 || w->rank >= w->size) {
        return HD_FAIL(err, HD_EINVAL, "rank %d of a world of %d", w->rank, w->size);
    }
    if (w->size == n) return HD_OK;
    if (engine_fetches(e)) {
        return HD_FAIL(err, HD_EINVAL,
                       "%d processes for dwdp %d and ep %d, which have %d ranks", w->size,
                       e->parallel.dwdp, e->parallel.ep, n);
    }
    char by_dp[24] = "", by_cp[24] = "";
    if (e->parallel.dp > 1) snprintf(by_dp, sizeof by_dp, ", dp %d", e->parallel.dp);
    if (o->cp > 1) snprintf(by_cp, sizeof by_cp, ", cp %d", o->cp);
    return HD_FAIL(err, HD_EINVAL, "%d processes for tp %d%s%s and ep %d, which have %d ranks",
                   w->size, hd_max_i32(o->tp, 1), by_cp, by_dp, hd_max_i32(o->ep, 1), n);
}

hd_status engine_process_join(hd_engine *e, const hd_engine_options *o, hd_err *err) {
    const hd_world_options *w = &o->world;
    engine_rank *rank = &e->ranks[0];
    uint32_t card_bytes;
    uint64_t model;
    if (w->size == 1) return HD_OK;
    if (!rank->device) return HD_FAIL(err, HD_EUNSUPPORTED, "the null backend has no ranks");
    HD_TRY(hd_model_fingerprint(&model, o->model_dir, err));
    HD_TRY(engine_peers_open(rank, o, err));
    const void *card = engine_peers_card(rank, &card_bytes);
    const hd_comm_ucx_options ucx = {
        .rendezvous = {.rank = w->rank,
                       .world = w->size,
                       .at = rendezvous_of(o),
                       .secret = w->key,
                       .start_ms = w->start_seconds * 1000,
                       .facts = {{"version", hash_of_text(HD_VERSION)},
                                 {"job", hash_of_text(w->job)},
                                 {"layout", hash_of_layout(&e->parallel)},
                                 {"model", model},
                                 {"set of options", hash_of_options(e, o)},
                                 {ONE_HOST, host_of(rank)}}},
        .parallel = e->parallel,
        .on_end = engine_world_on_end,
        .layout_of = engine_layout_of,
        .ctx = e,
        .card = card,
        .card_bytes = card_bytes
    };
    HD_TRY(hd_comm_ucx_open(&e->ucx, &ucx, rank->device, rank->stream, &rank->ops, err));
    rank->comm = hd_comm_ucx_interface(e->ucx);
    return HD_OK;
}

int32_t hd_engine_read_pair(const hd_engine *e, int32_t i, hd_engine_pair *out) {
    const int32_t n = e->ucx ? hd_parallel_world(&e->parallel) : 1;
    int32_t a = 0, left = i;
    for (; a < n - 1 && left >= n - 1 - a; a++) left -= n - 1 - a;
    const int32_t b = a + 1 + left;
    if (a >= n - 1) return n * (n - 1) / 2;
    *out = (hd_engine_pair){
        {a,                        b },
        { hd_comm_ucx_host(e->ucx, a), hd_comm_ucx_host(e->ucx, b)},
        hd_comm_ucx_rate(e->ucx, a, b)
    };
    return n * (n - 1) / 2;
}

int32_t hd_engine_read_found(const hd_engine *e, int32_t rank, hd_engine_found *out) {
    const int32_t n = e->ucx ? hd_parallel_world(&e->parallel) : 0;
    hd_preflight_rank says;
    if (rank >= n || !hd_comm_ucx_read_rank(e->ucx, rank, &says)) return 0;
    *out = (hd_engine_found){hd_comm_ucx_host(e->ucx, rank), says.clock_ns, says.within_ns,
                             says.free_bytes};
    return n;
}
