/* kv_disk.c - KV pages on a disk: the option, what a store belongs to, and the disk tier of a
 * rank. */
#include "engine/kv_disk.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "engine/rank.h"
#include "weights/fingerprint.h"

enum { N_THREADS = 4 };

static const double MOST_GB = 1e6;

hd_status hd_kv_disk_split(char **dir, double *bytes, const char *name, const char *option,
                           hd_err *err) {
    const char *colon = strrchr(option, ':');
    char *end = NULL;
    const double gb = colon ? strtod(colon + 1, &end) : 0;
    *dir = NULL;
    if (!colon || colon == option || colon[1] < '0' || colon[1] > '9' || *end || !(gb > 0) ||
        gb > MOST_GB) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s is '%s'; must be DIR:GB, a folder and a number above 0, at most "
                       "%.0f",
                       name, option, MOST_GB);
    }
    if (bytes) *bytes = gb * 1e9;
    *dir = strndup(option, (size_t)(colon - option));
    return *dir ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a path");
}

hd_status engine_kv_disk_check(const hd_engine_options *o, hd_err *err) {
    char *dir;
    if (!o->kv_disk) return HD_OK;
    HD_TRY(hd_kv_disk_split(&dir, NULL, "kv_disk", o->kv_disk, err));
    free(dir);
    if (o->kv_host_gb <= 0) {
        return HD_FAIL(err, HD_EINVAL,
                       "kv_disk without kv_host: pages go to the disk from host memory");
    }
    if (!o->backend || strcmp(o->backend, "null") != 0) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "KV pages cannot be kept on a disk here: the null backend has none");
}

/* Every layout has the bits of one rank, unless ranks sum parts or round rows that travel. */
static void write_sums(char *out, size_t n, const hd_parallel_config *l) {
    const char *rows = l->fp8_rows ? "fp8 rows, " : "";
    if (!l->sum_in_ranks) {
        snprintf(out, n, "%s", rows);
        return;
    }
    snprintf(out, n, "%ssums of %d, %d and %d parts, ", rows,
             l->head_parts ? l->head_parts : l->tp, l->etp, l->dense_tp);
}

hd_status hd_engine_page_identity(char out[HD_DISK_IDENTITY], const hd_engine *e,
                                  const hd_engine_options *o, hd_err *err) {
    const hd_ops *ops = &e->ranks[0].ops;
    const hd_engine_sizes z = hd_engine_sizes_of(e->spec, e->drafts, o);
    uint64_t model = 0, weights = 0;
    unsigned replay = 0;
    char sums[64] = "";
    HD_TRY(hd_model_fingerprint(&model, o->model_dir, err));
    if (!o->dummy_weights) HD_TRY(hd_weights_change_times(&weights, o->model_dir, err));
    for (int k = 0; k < HD_N_REPLAYS; k++) replay |= (unsigned)e->replay[k] << k;
    write_sums(sums, sizeof sums, &e->parallel);
    snprintf(out, HD_DISK_IDENTITY,
             "hadal %s, %s, precision %d, %s activations, %s cache, %s mla, %d drafts of %s, "
             "choices %u, "
             "%smodel %016" PRIx64 ", weights %016" PRIx64,
             HD_VERSION, ops->name, (int)ops->precision, ops->activations,
             hd_kv_type_name(ops->kv_type), e->mla == HD_MLA_NAIVE ? "naive" : "absorbed",
             z.drafts, hd_drafter_name(e->spec->drafter), replay, sums, model, weights);
    return HD_OK;
}

static void *host_page(void *ctx, hd_kv_group group, hd_host_page host) {
    const engine_rank *rank = ctx;
    size_t bytes;
    return hd_model_runner_host_page(rank->model_runner, group, host, &bytes);
}

/* The followers of an attention group have the same pages under the same numbers. */
static void spread(void *ctx, hd_kv_group group, hd_host_page host) {
    const engine_rank *rank = ctx;
    const hd_page_ranks others = hd_model_runner_page_ranks(rank->model_runner);
    if (others.spread) others.spread(others.ctx, group, host);
}

static hd_status wait_copies(void *ctx, hd_err *err) {
    const engine_rank *rank = ctx;
    return hd_stream_sync(rank->stream, err);
}

static void wake(void *ctx) {
    engine_rank *rank = ctx;
    hd_engine *e = rank->engine;
    pthread_mutex_lock(&e->lock);
    engine_tell(e);
    pthread_mutex_unlock(&e->lock);
}

/* One line when transfers begin to fail, and one when they work again. */
static void tell(void *ctx, hd_disk_job_kind kind, int why) {
    static const char *const kinds[HD_N_DISK_JOBS] = {"read", "write", "sync"};
    const engine_rank *rank = ctx;
    if (why) {
        HD_LOG(HD_LOG_WARN, "kv_disk_failed", hd_log_text("call", kinds[kind]),
               hd_log_text("reason", why == EBADMSG ? "wrong checksum" : strerror(why)),
               hd_log_int("rank", rank->index));
    } else {
        HD_LOG(HD_LOG_INFO, "kv_disk_works_again", hd_log_text("call", kinds[kind]),
               hd_log_int("rank", rank->index));
    }
}

/* Stores of attention groups that this layout has not would take bytes beyond the quota. */
static void drop_others(const char *dir, int32_t n_stores) {
    for (int32_t i = n_stores; i < HD_DISK_STORES; i++) {
        hd_err err = {0};
        int n = 0;
        if (hd_disk_files_delete(dir, i, &n, &err) != HD_OK) continue;
        HD_LOG(HD_LOG_INFO, "kv_disk_dropped", hd_log_int("store", i),
               hd_log_text("reason", "there are fewer attention groups in processes"));
    }
}

static hd_status open_store(hd_disk **out, const engine_rank *rank, const char *dir,
                            int32_t store, double bytes, const hd_disk_tier_options *tier,
                            const hd_engine_options *o, hd_err *err) {
    char identity[HD_DISK_IDENTITY];
    hd_disk_options x = {
        .where = dir,
        .bytes = (uint64_t)bytes,
        .page_tokens = tier->page_tokens,
        .page_bytes = {tier->page_bytes[0], tier->page_bytes[1]},
        .identity = identity
    };
    HD_TRY(hd_engine_page_identity(identity, rank->engine, o, err));
    HD_TRY(hd_disk_files_open(&x.files, dir, store, true, err));
    return hd_disk_open(out, &x, err);
}

/* Attention groups in one process share a store; each of those in others has one with its part of the
 * bytes. */
static hd_status open_or_share(hd_disk **out, const engine_rank *rank,
                               const hd_disk_tier_options *tier, const hd_engine_options *o,
                               hd_err *err) {
    const hd_engine *e = rank->engine;
    const int32_t n_stores = o->world.size ? e->parallel.dp : 1;
    const hd_disk_tier *first = e->ranks[0].kv_disk;
    double bytes;
    char *dir;
    if (first) {
        *out = hd_disk_share(hd_disk_tier_store(first));
        return HD_OK;
    }
    HD_TRY(hd_kv_disk_split(&dir, &bytes, "kv_disk", o->kv_disk, err));
    drop_others(dir, n_stores);
    const hd_status st = open_store(out, rank, dir, rank->index / e->parallel.tp,
                                    bytes / n_stores, tier, o, err);
    free(dir);
    return st;
}

hd_status engine_kv_disk_open(engine_rank *rank, const hd_engine_sizes *z,
                              const hd_engine_options *o, hd_err *err) {
    hd_disk_tier_options tier = {.page_tokens = z->shape.page_tokens,
                                 .seq_pages = z->seq_pages,
                                 .lookback = z->shape.lookback,
                                 .host_page = host_page,
                                 .wait_copies = wait_copies,
                                 .spread = spread,
                                 .wake = wake,
                                 .tell = tell,
                                 .ctx = rank,
                                 .n_threads = N_THREADS};
    if (!o->kv_disk || !engine_rank_leads(rank)) return HD_OK;
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        if (!z->n_host[g]) continue;
        hd_model_runner_host_page(rank->model_runner, (hd_kv_group)g, (hd_host_page){0},
                                  &tier.page_bytes[g]);
    }
    HD_TRY(open_or_share(&tier.disk, rank, &tier, o, err));
    return hd_disk_tier_open(&rank->kv_disk, &tier, err);
}

void engine_kv_disk_read(engine_rank *rank) {
    hd_kv_disk_figures *f = &rank->totals.kv_disk;
    if (!rank->kv_disk) return;
    const hd_disk_tier_stats s = hd_disk_tier_read_stats(rank->kv_disk);
    const bool opened =
        rank == rank->engine->ranks; /* others of this process share its store */
    for (int g = 0; g < HD_N_KV_GROUPS; g++) {
        f->extents[g] = opened ? s.disk.extents[g] : 0;
        f->pages[g] = opened ? s.disk.used[g] : 0;
        f->replaced[g] = opened ? s.disk.replaced[g] : 0;
        f->written[g] = s.written[g];
        f->read[g] = s.read[g];
    }
    f->bytes = opened ? s.disk.bytes : 0;
    f->tokens = hd_cache_read_stats(hd_sched_cache(rank->sched)).disk_tokens;
    f->read_bytes = s.read_bytes;
    f->read_ns = s.read_ns;
    f->write_failed = s.write_failed;
    f->read_failed = s.read_failed;
    f->late = s.late;
    f->declined = s.declined;
}
