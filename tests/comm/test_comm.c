/* test_comm.c - communication between ranks of one process (comm/local.h): every call gives
 * every rank what one thread computes from the data of all, in every group of every layout; and
 * a rank that ends ends the waiting of all. With HADAL_BACKEND=cuda the same on GPUs, of which ranks
 * share some if there are too few. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/local.h"
#include "comm_cases.h"
#include "fakes/gpus.h"

static bool on_gpus;

/* ---- ranks ---- */

static hd_ops float_ops(void) {
    hd_ops ops;
    hd_ops_init_ref(&ops, HD_EXACT);
    return ops;
}

static void *run_rank(void *arg) {
    comm_rank *r = arg;
    r->run(r);
    return NULL;
}

static void open_rank(comm_rank *r, const comm_rank *like, hd_comm_local *world,
                      int32_t number) {
    const char *backend = on_gpus ? "cuda" : "ref";
    const hd_ops_options one = {.cpu = {.n_threads = 1},
                                .gpu = on_gpus ? gpus_for(number) : 0,
                                .cuda_path = gpus_path(backend)};
    *r = *like;
    r->number = number;
    assert_int_equal(hd_ops_open(&r->ops, &r->device, backend, &one, NULL), HD_OK);
    assert_int_equal(hd_stream_open(&r->stream, r->device, NULL), HD_OK);
    assert_int_equal(
        hd_comm_local_join(world, number, r->device, r->stream, &r->ops, &r->comm, NULL),
        HD_OK);
}

/* Runs the program of `like` on all ranks of its layout. */
static void run_world(const comm_rank *like, comm_rank *ranks) {
    const int32_t n = hd_parallel_world(&like->parallel);
    pthread_t threads[COMM_MAX_RANKS];
    hd_comm_local *world;
    assert_true(n <= COMM_MAX_RANKS);
    assert_int_equal(hd_comm_local_open(&world, &like->parallel, NULL), HD_OK);
    for (int32_t i = 0; i < n; i++) open_rank(&ranks[i], like, world, i);
    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, run_rank, &ranks[i]), 0);
    }
    for (int32_t i = 0; i < n; i++) pthread_join(threads[i], NULL);
    hd_comm_local_close(world);
    for (int32_t i = 0; i < n; i++) {
        hd_stream_close(ranks[i].stream);
        hd_device_close(ranks[i].device);
        if (ranks[i].wrong[0]) fail_msg("rank %d: %s", i, ranks[i].wrong);
    }
}

/* ---- the cases ---- */

static void test_every_call_in_every_layout(void **state) {
    (void)state;
    for (int32_t i = 0; i < COMM_LAYOUTS; i++) {
        comm_rank ranks[COMM_MAX_RANKS];
        run_world(&(comm_rank){.parallel = comm_layouts[i],
                               .run = comm_call_at_random,
                               .seed = 1 + (uint64_t)i * COMM_ROUNDS,
                               .rounds = COMM_ROUNDS},
                  ranks);
    }
}

/* Members list the same members, each itself at its index; the groups divide the world. */
static void test_groups_divide_the_world(void **state) {
    (void)state;
    for (int32_t i = 0; i < COMM_LAYOUTS; i++) {
        const int32_t n = hd_parallel_world(&comm_layouts[i]);
        for (int32_t k = 0; k < n * HD_N_GROUPS; k++) {
            const hd_group kind = (hd_group)(k / n);
            const hd_rank_group g = hd_parallel_group(&comm_layouts[i], k % n, kind);
            assert_int_equal(g.first + g.index * g.stride, k % n);
            for (int32_t m = 0; m < g.n; m++) {
                const int32_t other = g.first + m * g.stride;
                const hd_rank_group h = hd_parallel_group(&comm_layouts[i], other, kind);
                assert_true(other >= 0 && other < n);
                assert_true(h.first == g.first && h.stride == g.stride && h.n == g.n);
                assert_int_equal(h.index, m);
            }
        }
    }
}

static void test_sums_do_not_depend_on_the_ranks(void **state) {
    (void)state;
    for (int32_t tp = 1; tp <= COMM_TERMS; tp *= 2) {
        comm_rank ranks[COMM_MAX_RANKS];
        run_world(&(comm_rank){.parallel = hd_parallel_tensor(tp), .run = comm_add_terms},
                  ranks);
    }
}

static void test_a_lost_rank_ends_the_waiting_of_all(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 40; seed++) {
        comm_rank ranks[COMM_MAX_RANKS];
        const int32_t n = 2 + (int32_t)comm_draw(seed, 1, 6);
        hd_parallel_config parallel = hd_parallel_expert(n, 0);
        run_world(&(comm_rank){.parallel = parallel,
                               .run = comm_lose_a_rank,
                               .seed = seed,
                               .victim = (int32_t)comm_draw(seed, 2, (uint32_t)n)},
                  ranks);
    }
}

static _Atomic bool sent_ahead;

/* The others begin when the first has made as many broadcasts as may travel, and overwritten what it sent. */
static void broadcast_ahead(comm_rank *r) {
    for (int32_t i = 0; r->number && i < 20000 && !atomic_load(&sent_ahead); i++)
        comm_sleep_ms(1);
    comm_expect(r, !r->number || atomic_load(&sent_ahead), "the first waits for the others", 0);
    for (int32_t i = 0; i < 3 * HD_COMM_MAX_INFLIGHT; i++) {
        int32_t word = r->number ? -1 : 7 * i;
        hd_comm_broadcast(r->comm, r->stream,
                          &(hd_broadcast_args){HD_GROUP_TP, &word, sizeof word});
        comm_expect(r, word == 7 * i, "a word of a broadcast", i);
        word = -2;
        if (i == HD_COMM_MAX_INFLIGHT - 1) atomic_store(&sent_ahead, true);
    }
}

static void test_who_broadcasts_does_not_wait(void **state) {
    (void)state;
    comm_rank ranks[COMM_MAX_RANKS];
    atomic_store(&sent_ahead, false);
    run_world(&(comm_rank){.parallel = hd_parallel_tensor(4), .run = broadcast_ahead}, ranks);
}

static void test_too_many_rows_are_an_error_of_all(void **state) {
    (void)state;
    comm_rank ranks[COMM_MAX_RANKS];
    run_world(
        &(comm_rank){.parallel = hd_parallel_expert(2, 0), .run = comm_overflow, .seed = 3},
        ranks);
}

static void test_who_waits_sleeps(void **state) {
    (void)state;
    comm_rank ranks[COMM_MAX_RANKS];
    run_world(&(comm_rank){.parallel = hd_parallel_tensor(2), .run = comm_come_late}, ranks);
}

static void test_rows_without_room_come_in_rounds(void **state) {
    (void)state;
    for (int32_t i = 0; i < 4 * COMM_LAYOUTS; i++) {
        comm_rank ranks[COMM_MAX_RANKS];
        const hd_parallel_config *l = &comm_layouts[i % COMM_LAYOUTS];
        if (l->ep == 1) continue;
        run_world(
            &(comm_rank){.parallel = *l, .run = comm_dispatch_in_rounds, .seed = (uint64_t)i},
            ranks);
    }
}

/* On GPUs that ranks share blocks are few, and each takes its rows in several passes. */
static void test_many_rows_find_their_experts(void **state) {
    (void)state;
    for (int32_t n = 2; n <= 4; n += 2) {
        comm_rank ranks[COMM_MAX_RANKS];
        run_world(&(comm_rank){.parallel = hd_parallel_expert(n, 0), .run = comm_dispatch_many},
                  ranks);
    }
}

static void test_exchanges_are_counted(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 3; seed++) {
        comm_rank ranks[COMM_MAX_RANKS];
        run_world(&(comm_rank){.parallel = hd_parallel_expert(3, 0),
                               .run = comm_count_exchanges,
                               .seed = seed,
                               .victim = (int32_t)seed},
                  ranks);
    }
}

/* ---- opening ---- */

static void test_refusals(void **state) {
    (void)state;
    const hd_cpu_options one = {.n_threads = 1};
    const hd_parallel_config many = hd_parallel_tensor(HD_LOCAL_MAX_RANKS + 1);
    const hd_parallel_config two = hd_parallel_tensor(2), odd = {.tp = 2, .dp = 1};
    hd_comm_local *w;
    const hd_comm *comm;
    hd_device *device;
    hd_ops ops = float_ops();
    hd_err err = {0};
    assert_int_equal(hd_comm_local_open(&w, &many, &err), HD_EUNSUPPORTED);
    assert_non_null(strstr(err.msg, "65 ranks in one process; at most 64"));
    assert_int_equal(hd_comm_local_open(&w, &odd, NULL), HD_EINVAL);
    assert_null(w);
    assert_int_equal(hd_comm_local_open(&w, &two, NULL), HD_OK);
    assert_int_equal(hd_device_open_cpu(&device, &one, NULL), HD_OK);
    err = (hd_err){0};
    assert_int_equal(hd_comm_local_join(w, 2, device, NULL, &ops, &comm, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "rank 2 joins a world of 2 ranks"));
    assert_null(comm);
    ops.act_type = HD_BF16;
    assert_int_equal(hd_comm_local_join(w, 1, device, NULL, &ops, &comm, NULL),
                     HD_EUNSUPPORTED);
    hd_device_close(device);
    hd_comm_local_close(w);
    hd_comm_local_close(NULL);
}

int test_comm(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups_divide_the_world),
        cmocka_unit_test(test_every_call_in_every_layout),
        cmocka_unit_test(test_sums_do_not_depend_on_the_ranks),
        cmocka_unit_test(test_a_lost_rank_ends_the_waiting_of_all),
        cmocka_unit_test(test_too_many_rows_are_an_error_of_all),
        cmocka_unit_test(test_who_waits_sleeps),
        cmocka_unit_test(test_who_broadcasts_does_not_wait),
        cmocka_unit_test(test_rows_without_room_come_in_rounds),
        cmocka_unit_test(test_many_rows_find_their_experts),
        cmocka_unit_test(test_exchanges_are_counted),
        cmocka_unit_test(test_refusals),
    };
    const struct CMUnitTest of_gpus[] = {
        cmocka_unit_test(test_every_call_in_every_layout),
        cmocka_unit_test(test_sums_do_not_depend_on_the_ranks),
        cmocka_unit_test(test_a_lost_rank_ends_the_waiting_of_all),
        cmocka_unit_test(test_too_many_rows_are_an_error_of_all),
        cmocka_unit_test(test_many_rows_find_their_experts),
    };
    int failed = cmocka_run_group_tests_name("comm", tests, NULL, NULL);
    on_gpus = gpus_are_wanted();
    if (on_gpus) failed += cmocka_run_group_tests_name("comm on GPUs", of_gpus, NULL, NULL);
    return failed;
}
