/* test_expert_fetch.c - experts that are fetched from peers, on a device whose streams are queues:
 * the bits of resident experts in whatever order copies and operators run. Without the event that
 * says that a set was fetched, or without the one that says that it was consumed, they are
 * others. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/random_fill.h"
#include "fakes/queue_device.h"
#include "model/expert_fetch.h"
#include "model/expert_host.h"
#include "model/model.h"

enum { PROMPT = 20, POSITIONS = 128, STEPS = 3, COMPUTE = 0, COPIES = 1, MOST_RANKS = 4 };

static const int32_t copies_late[QUEUE_STREAMS] = {COMPUTE, COPIES, 2};
static const int32_t copies_early[QUEUE_STREAMS] = {COPIES, COMPUTE, 2};

/* The first has more layers than there are sets, and 7 experts. */
static const char *const models[] = {"v4_odd", "v3_small_mtp"};

/* Every rank's part of a model; of one rank, all of it. */
typedef struct family {
    hd_model_spec *spec;
    hd_weights *whole, *part[MOST_RANKS];
    int32_t n;
} family;

typedef struct rank {
    hd_device *device;
    hd_stream *stream[2];
    hd_ops ops;
    hd_expert_stage *stage;
    hd_model *model;
    hd_kv *kv;
    hd_batch batch;
    int32_t pages[POSITIONS], n_pages;
} rank;

static void must(hd_status st, const hd_err *err) {
    if (st != HD_OK) fail_msg("%s", err->msg);
}

static void open_family(family *f, const char *name, int32_t n) {
    char dir[128];
    hd_err err = {0};
    *f = (family){.n = n};
    snprintf(dir, sizeof dir, "tests/golden/%s", name);
    must(hd_model_spec_open(&f->spec, dir, &err), &err);
    must(hd_weights_open(&f->whole, dir, f->spec, &err), &err);
    for (int32_t i = 0; i < n; i++) { /* three ranks and more have copies */
        const hd_parallel_config parallel = hd_parallel_dwdp(n, n - 2, f->spec);
        must(hd_weights_open_shards(&f->part[i], f->whole, &parallel, i, &err), &err);
    }
}

static void close_family(family *f) {
    for (int32_t i = 0; i < f->n; i++) hd_weights_close(f->part[i]);
    hd_weights_close(f->whole);
    hd_model_spec_close(f->spec);
}

static void open_stage(rank *r, const family *f, int32_t index, int32_t depth) {
    hd_fetch_source peers[MOST_RANKS];
    hd_err err = {0};
    for (int32_t i = 0; i < f->n; i++)
        peers[i] = (hd_fetch_source){.name = "peer", .has = f->part[i]};
    const hd_expert_fetch_options o = {.sources = peers,
                                       .n_sources = f->n,
                                       .first_source = (index + 1) % f->n,
                                       .depth = depth,
                                       .slice_bytes = 1000,
                                       .device = r->device,
                                       .stream = r->stream[COMPUTE],
                                       .copy_stream = r->stream[COPIES],
                                       .queued = true};
    must(hd_expert_fetch_open(&r->stage, f->spec, f->part[index], &o, &err), &err);
}

static void open_device(rank *r) {
    hd_err err = {0};
    *r = (rank){0};
    hd_ops_init_cpu(&r->ops, hd_cpu_features(), HD_EXACT);
    r->device = queue_device_open(&r->ops);
    for (int32_t i = 0; i < 2; i++) must(hd_stream_open(&r->stream[i], r->device, &err), &err);
}

static void open_model(rank *r, const family *f, const hd_weights *w) {
    hd_err err = {0};
    const hd_model_env env = {.spec = f->spec,
                              .weights = w,
                              .ops = &r->ops,
                              .device = r->device,
                              .stream = r->stream[COMPUTE],
                              .stage = r->stage};
    const hd_model_limits limits = {.rows = PROMPT, .logits = 1, .positions = POSITIONS};
    must(hd_model_open(&r->model, &env, &limits, &err), &err);
    r->n_pages = (int32_t)hd_ceil_div(POSITIONS, hd_kv_shape_of(f->spec).page_tokens);
    for (int32_t i = 0; i < r->n_pages; i++) r->pages[i] = i;
    const hd_kv_options kv = {
        .n_pages = {r->n_pages, r->n_pages}
    };
    must(hd_kv_open(&r->kv, f->spec, f->spec->n_layers + f->spec->n_mtp, r->device, &kv, &err),
         &err);
    const hd_batch_limits batch = {PROMPT, 1, r->n_pages};
    must(hd_batch_open(&r->batch, &batch, r->device, &err), &err);
}

/* depth 0: the complete model. */
static void open_rank(rank *r, const family *f, int32_t index, int32_t depth) {
    open_device(r);
    if (depth) open_stage(r, f, index, depth);
    open_model(r, f, depth ? f->part[index] : f->whole);
}

static void close_rank(rank *r) {
    hd_batch_close(&r->batch);
    hd_kv_close(r->kv);
    hd_model_close(r->model);
    hd_expert_stage_close(r->stage);
    for (int32_t i = 0; i < 2; i++) hd_stream_close(r->stream[i]);
    hd_device_close(r->device);
}

static void write_rows(rank *r, const family *f, int32_t start, int32_t n) {
    int32_t tokens[PROMPT];
    for (int32_t i = 0; i < n; i++) {
        const uint64_t at = (uint64_t)(start + i);
        tokens[i] = (int32_t)(hd_random_fill_at(7, at) % (uint64_t)f->spec->vocab);
    }
    hd_batch_reset(&r->batch);
    hd_batch_add(&r->batch, &(hd_batch_seq){
                                .tokens = tokens,
                                .n = n,
                                .start = start,
                                .after = tokens[0],
                                .n_logits = 1,
                                .pages = {r->pages, r->pages},
                                .n_pages = r->n_pages
    });
    hd_batch_upload(&r->batch, r->stream[COMPUTE]);
}

static void keep(const rank *r, const family *f, float *out) {
    hd_err err = {0};
    hd_stream_download(r->stream[COMPUTE], out, hd_model_logits(r->model),
                       (size_t)f->spec->vocab * sizeof *out);
    must(hd_stream_sync(r->stream[COMPUTE], &err), &err);
}

/* A prompt, a token more, and a draft if there is a drafter: the logits [STEPS, vocab]; free() them. */
static float *run_steps(rank *r, const family *f) {
    const size_t n = (size_t)f->spec->vocab;
    float *logits = calloc(STEPS * n, sizeof *logits);
    assert_non_null(logits);
    write_rows(r, f, 0, PROMPT);
    hd_model_step(r->model, r->kv, &r->batch);
    keep(r, f, logits);
    write_rows(r, f, PROMPT, 1);
    hd_model_step(r->model, r->kv, &r->batch);
    keep(r, f, logits + n);
    if (hd_weights_n_mtp(f->whole) == 0) return logits;
    hd_model_draft(r->model, r->kv, &r->batch, false);
    keep(r, f, logits + 2 * n);
    return logits;
}

static float *plain_logits(const family *f) {
    rank r;
    open_rank(&r, f, 0, 0);
    float *logits = run_steps(&r, f);
    close_rank(&r);
    return logits;
}

/* Returns whether rank `index` computes want. ignore: the stream whose waits do nothing; -1:
 * none. */
static bool agrees(const family *f, int32_t index, int32_t depth, const int32_t *order,
                   int32_t ignore, const float *want) {
    rank r;
    open_rank(&r, f, index, depth);
    queue_device_prefer(r.device, order);
    if (ignore >= 0) queue_device_ignore_events_on(r.device, ignore, true);
    float *logits = run_steps(&r, f);
    const bool same =
        memcmp(logits, want, STEPS * (size_t)f->spec->vocab * sizeof *logits) == 0;
    assert_true(hd_expert_stage_read_stats(r.stage).fetched > 0);
    free(logits);
    close_rank(&r);
    return same;
}

static void check_ranks(const char *model, int32_t n) {
    family f;
    open_family(&f, model, n);
    float *want = plain_logits(&f);
    for (int32_t depth = 1; depth <= HD_MAX_FETCH_DEPTH; depth++) {
        for (int32_t i = 0; i < n; i++) {
            if (!agrees(&f, i, depth, copies_late, -1, want) ||
                !agrees(&f, i, depth, copies_early, -1, want)) {
                fail_msg("%s: rank %d of %d, depth %d", model, i, n, depth);
            }
        }
    }
    free(want);
    close_family(&f);
}

static void the_order_of_copies_does_not_matter(void **state) {
    (void)state;
    for (size_t m = 0; m < HD_LEN(models); m++) {
        for (int32_t n = 2; n <= MOST_RANKS; n++) check_ranks(models[m], n);
    }
}

static void each_event_is_needed(void **state) {
    (void)state;
    family f;
    open_family(&f, models[0], 2);
    float *want = plain_logits(&f);
    for (int32_t depth = 1; depth <= HD_MAX_FETCH_DEPTH; depth++) {
        /* read before it is fetched; overwritten before it is consumed */
        assert_false(agrees(&f, 0, depth, copies_late, COMPUTE, want));
        assert_false(agrees(&f, 0, depth, copies_early, COPIES, want));
    }
    free(want);
    close_family(&f);
}

/* ---- experts in host memory, some of them resident ---- */

enum { PASSES = 8, RESIDENT = 11 }; /* two of each layer, and a spare slot */

/* A pass of PROMPT rows, whose logits are downloaded behind it. */
static void queue_pass(rank *r, const family *f, int32_t pass, float *out) {
    write_rows(r, f, pass * 4, 4);
    hd_model_step(r->model, r->kv, &r->batch);
    hd_stream_download(r->stream[COMPUTE], out, hd_model_logits(r->model),
                       (size_t)f->spec->vocab * sizeof *out);
}

/* Makes other experts seem to be used most. */
static void move_experts(rank *r, int64_t *rows, int64_t n, int32_t pass) {
    if (!r->stage) return;
    for (int64_t i = 0; i < n; i++) {
        rows[i] += (int64_t)(hd_random_fill_at((uint64_t)pass, (uint64_t)i) % 1000);
    }
    hd_expert_stage_follow(r->stage, rows);
    hd_expert_stage_move(r->stage);
}

/* All passes are queued before the first one runs: the logits [PASSES, vocab]; free() them. */
static float *run_passes(rank *r, const family *f) {
    const int64_t n = hd_model_n_expert_rows(f->spec);
    const size_t vocab = (size_t)f->spec->vocab;
    int64_t *rows = calloc((size_t)n, sizeof *rows);
    float *logits = calloc(PASSES * vocab, sizeof *logits);
    hd_err err = {0};
    assert_true(rows && logits);
    for (int32_t k = 0; k < PASSES; k++) {
        queue_pass(r, f, k, logits + (size_t)k * vocab);
        move_experts(r, rows, n, k);
    }
    must(hd_stream_sync(r->stream[COMPUTE], &err), &err);
    free(rows);
    return logits;
}

static void open_host_stage(rank *r, const family *f, const hd_weights *own, size_t bytes) {
    const hd_fetch_source host = {.name = "host", .has = f->whole};
    hd_err err = {0};
    const hd_expert_fetch_options o = {.sources = &host,
                                       .n_sources = 1,
                                       .depth =
                                           2, /* the first layer is fetched behind the last */
                                       .bytes = bytes,
                                       .device = r->device,
                                       .stream = r->stream[COMPUTE],
                                       .copy_stream = r->stream[COPIES],
                                       .queued = true};
    must(hd_expert_fetch_open(&r->stage, f->spec, own, &o, &err), &err);
}

/* Its memory holds what three layers lack, and RESIDENT experts. */
static void open_host_rank(rank *r, const family *f, const hd_weights *own) {
    open_device(r);
    open_host_stage(r, f, own, 0);
    const hd_expert_stage_stats s = hd_expert_stage_read_stats(r->stage);
    hd_expert_stage_close(r->stage);
    open_host_stage(r, f, own, s.bytes + RESIDENT * s.expert_bytes);
    open_model(r, f, own);
}

static void experts_move_while_steps_are_queued(void **state) {
    (void)state;
    const int32_t *const priorities[] = {copies_late, copies_early};
    family f;
    rank r;
    hd_weights *own;
    hd_err err = {0};
    open_family(&f, models[0], 0);
    must(hd_weights_open_without_experts(&own, f.whole, &err), &err);
    open_rank(&r, &f, 0, 0);
    float *want = run_passes(&r, &f);
    close_rank(&r);
    for (size_t k = 0; k < HD_LEN(priorities); k++) {
        open_host_rank(&r, &f, own);
        queue_device_prefer(r.device, priorities[k]);
        float *have = run_passes(&r, &f);
        assert_memory_equal(have, want, PASSES * (size_t)f.spec->vocab * sizeof *have);
        assert_int_equal(hd_expert_stage_read_stats(r.stage).moved, PASSES - 1);
        free(have);
        close_rank(&r);
    }
    free(want);
    hd_weights_close(own);
    close_family(&f);
}

/* ---- layers that are streamed from host memory ---- */

/* Room for most experts, of which an eighth is for sets. */
static void open_streams(rank *r, const family *f, const hd_weights *own) {
    hd_err err = {0};
    open_device(r);
    hd_expert_host_options o = {.whole = f->whole,
                                .held = f->spec->n_layers + f->spec->n_mtp,
                                .bytes = (size_t)1 << 30,
                                .device = r->device,
                                .stream = r->stream[COMPUTE],
                                .copy_stream = r->stream[COPIES]};
    must(hd_expert_host_open(&r->stage, f->spec, own, &o, &err), &err);
    const hd_expert_stage_stats s = hd_expert_stage_read_stats(r->stage);
    hd_expert_stage_close(r->stage);
    o.bytes = (size_t)(s.n_experts * 4 / 5) * s.expert_bytes;
    must(hd_expert_host_open(&r->stage, f->spec, own, &o, &err), &err);
    open_model(r, f, own);
}

/* As agrees(). Slots are full before, so that sets are used: two rounds of each layer. */
static bool streams_agree(const family *f, const hd_weights *own, const int32_t *order,
                          int32_t ignore, const float *want) {
    rank r;
    open_streams(&r, f, own);
    for (int32_t i = 0; i < 2; i++) free(run_steps(&r, f));
    const int32_t waits = queue_device_waits(r.device);
    queue_device_prefer(r.device, order);
    if (ignore >= 0) queue_device_ignore_events_on(r.device, ignore, true);
    float *logits = run_steps(&r, f);
    const bool same =
        memcmp(logits, want, STEPS * (size_t)f->spec->vocab * sizeof *logits) == 0;
    assert_true(queue_device_waits(r.device) - waits > 3 * f->spec->n_layers);
    free(logits);
    close_rank(&r);
    return same;
}

static void layers_are_streamed_in_any_order(void **state) {
    (void)state;
    family f;
    hd_weights *own;
    hd_err err = {0};
    open_family(&f, models[0], 0);
    must(hd_weights_open_without_experts(&own, f.whole, &err), &err);
    float *want = plain_logits(&f);
    assert_true(streams_agree(&f, own, copies_late, -1, want));
    assert_true(streams_agree(&f, own, copies_early, -1, want));
    /* read before they are fetched; overwritten before they are consumed */
    assert_false(streams_agree(&f, own, copies_late, COMPUTE, want));
    assert_false(streams_agree(&f, own, copies_early, COPIES, want));
    free(want);
    hd_weights_close(own);
    close_family(&f);
}

static void what_cannot_be_fetched_is_refused(void **state) {
    (void)state;
    family f;
    rank r = {0};
    hd_err err = {0};
    open_family(&f, models[0], 2);
    r.device = queue_device_open(&r.ops);
    assert_int_equal(hd_stream_open(&r.stream[0], r.device, NULL), HD_OK);
    const hd_fetch_source own = {.name = "peer", .has = f.part[0]},
                          all = {.name = "host", .has = f.whole};
    hd_expert_fetch_options o = {.sources = &own,
                                 .n_sources = 1,
                                 .depth = 1,
                                 .device = r.device,
                                 .stream = r.stream[0],
                                 .copy_stream = r.stream[0],
                                 .queued = true};
    assert_int_equal(hd_expert_fetch_open(&r.stage, f.spec, f.part[0], &o, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "no rank and no memory has expert"));
    err = (hd_err){0};
    o.sources = &all;
    o.bytes = 100;
    assert_int_equal(hd_expert_fetch_open(&r.stage, f.spec, f.part[0], &o, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "100 bytes for experts hold 0 of"));
    assert_non_null(strstr(err.msg, "at least 8 are fetched at once here")); /* 4 of 7, twice */
    err = (hd_err){0};
    assert_int_equal(hd_expert_fetch_open(&r.stage, f.spec, f.whole, &o, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "nothing to fetch"));
    hd_stream_close(r.stream[0]);
    hd_device_close(r.device);
    close_family(&f);
}

int test_expert_fetch(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_order_of_copies_does_not_matter),
        cmocka_unit_test(each_event_is_needed),
        cmocka_unit_test(experts_move_while_steps_are_queued),
        cmocka_unit_test(layers_are_streamed_in_any_order),
        cmocka_unit_test(what_cannot_be_fetched_is_refused),
    };
    return cmocka_run_group_tests_name("expert_fetch", tests, NULL, NULL);
}
