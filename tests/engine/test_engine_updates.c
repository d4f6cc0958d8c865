/* test_engine_updates.c - new weights for an engine of several ranks: the answers are those of one
 * rank, also if a rank is lost before the update or while the ranks rest for it. With
 * HADAL_BACKEND=cuda the same on GPUs. */
#include "check.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/rank.h"
#include "fakes/engine_rig.h"
#include "fakes/gpus.h"
#include "runner/model_runner_internal.h"
#include "weights/update.h"

typedef struct layout {
    int32_t tp, ep, dp;
} layout;

static const layout layouts[] = {
    {2, 2, 1},
    {1, 2, 2},
    {2, 2, 2}
};

static const char why[] = "rank 1: its device is gone";

static bool on_gpus;

static hd_engine *open_layout(const layout *l) {
    return rig_open(
        on_gpus ? "cuda" : "cpu",
        &(hd_engine_options){
            .model_dir = TINY, .tp = l->tp, .ep = l->ep, .dp = l->dp, .updatable = true});
}

static hd_request request(void) {
    return (hd_request){.size = sizeof(hd_request),
                        .text = "Once upon a time there was a little girl",
                        .max_tokens = is_brief() ? 10 : 40,
                        .draft_tokens = 3,
                        .n = 1};
}

/* The model's own weights; others: a norm has the other sign. */
static void update(hd_engine *e, bool others, const char *version) {
    const hd_weights_update_rule rule = {.whole = true};
    hd_checkpoint *c;
    hd_weights_update *u;
    hd_err err = {0};
    assert_int_equal(hd_checkpoint_read(&c, TINY, &err), HD_OK);
    const hd_tensor *t = hd_checkpoint_find(c, "norm.weight");
    uint16_t *norm = (uint16_t *)(uintptr_t)t->data;
    assert_int_equal(t->dtype, HD_BF16);
    for (int64_t i = 0; others && i < t->shape[0]; i++) norm[i] ^= 0x8000;
    assert_int_equal(hd_weights_update_open(&u, hd_engine_weights(e), &err), HD_OK);
    assert_int_equal(hd_weights_update_add(u, c, &rule, &err), HD_OK);
    if (hd_engine_update_weights(e, u, version, &err) != HD_OK) fail_msg("%s", err.msg);
    hd_weights_update_close(u);
    assert_string_equal(hd_engine_weight_version(e), version);
}

static void check_answer(hd_engine *e, const rig_answer *want, const char *version) {
    rig_answer got = {0};
    const hd_request g = request();
    rig_run(e, &g, &got);
    rig_same(want, &got);
    assert_string_equal(got.end.weight_version, version);
    rig_deinit(&got);
}

/* The leader's communication, which ends once when the followers were told to rest, if armed. */
static struct {
    hd_comm_table table;
    const hd_comm *real;
    hd_comm comm;
    const hd_model_runner *runner;
    atomic_bool armed;
} tap;

static void tap_gather(void *ctx, hd_stream *s, const hd_all_gather_args *a) {
    const uint8_t *x = (const uint8_t *)a->x, *command = tap.runner->command;
    const bool rests = x > command && x < command + tap.runner->command_bytes;
    if (rests && atomic_exchange(&tap.armed, false)) hd_comm_abort(tap.real, why);
    tap.real->table->all_gather(ctx, s, a);
}

/* Before anything runs. */
static void tap_leader(hd_engine *e) {
    hd_model_runner *x = e->ranks[0].model_runner;
    tap.real = e->ranks[0].comm;
    tap.runner = x;
    atomic_store(&tap.armed, false);
    tap.table = *tap.real->table;
    tap.table.all_gather = tap_gather;
    tap.comm = *tap.real;
    tap.comm.table = &tap.table;
    x->env.comm = &tap.comm;
}

static void change(const layout *l, const rig_answer *old, const rig_answer *next) {
    hd_engine_stats stats;
    hd_engine *e = open_layout(l);
    tap_leader(e);
    check_answer(e, old, "default");
    update(e, true, "next");
    check_answer(e, next, "next");
    hd_comm_abort(e->ranks[1].comm, why);
    update(e, false, "old");
    check_answer(e, old, "old");
    atomic_store(&tap.armed, true);
    update(e, true, "next");
    check_answer(e, next, "next");
    assert_int_equal(!atomic_load(&tap.armed), l->tp > 1);
    hd_engine_read_stats(e, &stats);
    assert_true(stats.rank_failures > 0 && !stats.ranks_lost);
    assert_int_equal(stats.weight_updates, 3);
    hd_engine_close(e);
}

static void ranks_change_as_one(void **state) {
    (void)state;
    rig_answer old = {0}, next = {0};
    const hd_request g = request();
    hd_engine *one = open_layout(&(layout){1, 1, 1});
    rig_run(one, &g, &old);
    update(one, true, "next");
    rig_run(one, &g, &next);
    hd_engine_close(one);
    assert_true(
        old.tokens.n != next.tokens.n ||
        memcmp(old.tokens.ids, next.tokens.ids, old.tokens.n * sizeof *old.tokens.ids) != 0);
    for (size_t i = is_brief() ? 2 : 0; i < HD_LEN(layouts); i++)
        change(&layouts[i], &old, &next);
    rig_deinit(&old);
    rig_deinit(&next);
}

int test_engine_updates(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_change_as_one),
    };
    int failed = cmocka_run_group_tests_name("engine_updates", tests, NULL, NULL);
    on_gpus = gpus_are_wanted();
    if (on_gpus) {
        failed += cmocka_run_group_tests_name("engine_updates on GPUs", tests, NULL, NULL);
    }
    return failed;
}
