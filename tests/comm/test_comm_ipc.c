/* test_comm_ipc.c - ranks on GPUs as processes (comm/ipc.h): the cases of comm_cases.h, killed and
 * stopped ranks, epochs and what they free; what a rank tells of its memory. Memory is that of
 * fakes/ipc_device.h, or with HADAL_BACKEND=cuda that of GPUs, which the processes share if there are
 * too few: then this group must run alone, since a process that has used CUDA cannot fork. */
#include "check.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/random_fill.h"
#include "comm/export.h"
#include "comm/ucx.h"
#include "comm_world.h"
#include "fakes/gpus.h"
#include "fakes/ipc_device.h"

static void need_ucx(void) {
    if (!hd_comm_ucx_is_built()) skip();
}

/* A GPU that several processes share gives each a slice of its time. */
static int32_t times(int32_t on_cpu, int32_t on_gpus) {
    return gpus_are_wanted() ? on_gpus : on_cpu;
}

/* ---- the cases of all backends ---- */

static void test_every_call_in_every_layout(void **state) {
    (void)state;
    need_ucx();
    for (int32_t i = 0; i < COMM_LAYOUTS; i++) {
        const bool large = hd_parallel_world(&comm_layouts[i]) > 4;
        if (large && gpus_are_wanted()) continue; /* of processes that share one GPU */
        comm_run_world(&(comm_world){
            .on_gpus = true,
            .like = {.parallel = comm_layouts[i],
                     .run = comm_call_at_random,
                     .rounds = times(COMM_ROUNDS, COMM_ROUNDS / 2),
                     .seed = 1 + (uint64_t)i * COMM_ROUNDS}
        });
    }
}

static void test_sums_do_not_depend_on_the_ranks(void **state) {
    (void)state;
    need_ucx();
    for (int32_t tp = 1; tp <= times(COMM_TERMS, 4); tp *= 2) {
        comm_run_world(&(comm_world){
            .on_gpus = true,
            .like = {.parallel = hd_parallel_tensor(tp), .run = comm_add_terms}
        });
    }
}

static void test_a_lost_rank_ends_the_waiting_of_all(void **state) {
    (void)state;
    need_ucx();
    for (uint64_t seed = 0; seed < (uint64_t)times(8, 2); seed++) {
        const int32_t n = 2 + (int32_t)comm_draw(seed, 1, (uint32_t)times(4, 1));
        comm_run_world(&(comm_world){
            .on_gpus = true,
            .like = {.parallel = hd_parallel_expert(n, 0),
                     .run = comm_lose_a_rank,
                     .seed = seed,
                     .victim = (int32_t)comm_draw(seed, 2, (uint32_t)n)}
        });
    }
}

static void test_too_many_rows_are_an_error_of_all(void **state) {
    (void)state;
    need_ucx();
    comm_run_world(&(comm_world){
        .on_gpus = true,
        .like = {.parallel = hd_parallel_expert(2, 0), .run = comm_overflow, .seed = 3}
    });
}

static void test_a_killed_rank_is_named(void **state) {
    (void)state;
    need_ucx();
    for (int32_t i = 0; i < times(3, 1); i++) {
        comm_lose(SIGKILL, i % 3, 60000, &(comm_world){.on_gpus = true});
    }
}

static void test_a_stopped_rank_is_named(void **state) {
    (void)state;
    need_ucx();
    comm_lose(SIGSTOP, 2, 3000, &(comm_world){.on_gpus = true});
}

static void test_rows_without_room_come_in_rounds(void **state) {
    (void)state;
    need_ucx();
    for (uint64_t seed = 0; seed < (uint64_t)times(4, 2); seed++) {
        comm_run_world(&(comm_world){
            .on_gpus = true,
            .like = {.parallel = hd_parallel_expert(3 + (int32_t)seed % 2, 0),
                     .run = comm_dispatch_in_rounds,
                     .seed = seed}
        });
    }
}

/* ---- epochs ---- */

enum { RANKS = 3 };

/* What the processes tell each other: the last epoch in which each has got a sum right. */
typedef struct epochs {
    char at[32];
    _Atomic uint32_t at_epoch[RANKS], members[RANKS];
    _Atomic int32_t blocks[RANKS]; /* of the fake's device */
    _Atomic bool stop;
    char wrong[200];
} epochs;

static bool any_number(void *ctx, int32_t n, hd_parallel_config *out) {
    (void)ctx;
    *out = hd_parallel_tensor(n);
    return true;
}

static void ignore_waiting(void *ctx) {
    (void)ctx;
}

/* Adds until rank 0 says that it is enough; HD_OK: it is. */
static hd_status add(epochs *a, hd_comm_ucx *u, hd_stream *s, float *x, float *on_host,
                     int32_t number, hd_err *err) {
    const hd_comm_members *m = hd_comm_ucx_members(u);
    const hd_comm *c = hd_comm_ucx_interface(u);
    for (;;) {
        int32_t stops = atomic_load(&a->stop);
        float want = 0;
        *on_host = 100 + (float)number;
        hd_stream_upload(s, x, on_host, sizeof *x);
        hd_comm_broadcast(c, s, &(hd_broadcast_args){HD_GROUP_TP, &stops, sizeof stops});
        hd_comm_all_reduce(c, s, &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(x), 1});
        hd_stream_download(s, on_host, x, sizeof *x);
        HD_TRY(hd_stream_sync(s, err));
        for (int32_t i = 0; i < m->n; i++) want += 100 + (float)m->number[i];
        if (*on_host != want)
            snprintf(a->wrong, sizeof a->wrong, "rank %d of %d, epoch %u: %g, not %g", number,
                     m->n, m->epoch, (double)*on_host, (double)want);
        atomic_store(&a->blocks[number], ipc_device_blocks());
        atomic_store(&a->members[number], (uint32_t)m->n);
        atomic_store(&a->at_epoch[number], m->epoch);
        if (stops) return HD_OK;
    }
}

static void work(epochs *a, int32_t number) {
    hd_ops ops;
    hd_device *d;
    hd_stream *s;
    hd_comm_ucx *u = NULL;
    hd_err err = {0};
    hd_parallel_config layout;
    void *x = NULL, *on_host = NULL;
    const hd_comm_ucx_options o = {
        .rendezvous = {.rank = number, .world = RANKS, .at = a->at, .silence_ms = 2000},
        .parallel = hd_parallel_tensor(RANKS),
        .layout_of = any_number
    };
    const char *why = comm_open_device(true, number, &d, &s, &ops);
    hd_status st = why ? HD_FAIL(&err, HD_EDEVICE, "%s", why) : HD_OK;
    if (st == HD_OK) st = hd_device_alloc(d, &x, sizeof(float), "a sum", &err);
    if (st == HD_OK) st = hd_device_alloc_host(d, &on_host, sizeof(float), "a sum", &err);
    if (st == HD_OK) st = hd_comm_ucx_open(&u, &o, d, s, &ops, &err);
    if (st == HD_OK)
        st = hd_stream_sync(s, &err); /* as one that loads, also if it comes late */
    while (st == HD_OK && add(a, u, s, x, on_host, number, &err) != HD_OK) {
        err = (hd_err){0};
        st = hd_comm_ucx_begin_anew(u, &layout, ignore_waiting, &err);
    }
    if (st != HD_OK && st != HD_EAGAIN) snprintf(a->wrong, sizeof a->wrong, "%.190s", err.msg);
    hd_comm_ucx_close(u);
    if (ipc_device_opened()) snprintf(a->wrong, sizeof a->wrong, "memory of others is open");
    _exit(0);
}

static void start(epochs *a, pid_t *pids, int32_t number) {
    atomic_store(&a->at_epoch[number], 0);
    pids[number] = fork();
    assert_true(pids[number] >= 0);
    if (pids[number]) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails ends at once */
    work(a, number);
}

/* Until the ranks of the bits have got a sum right together; fewer or more blocks would be freed too
 * early, or not at all. */
static void await(epochs *a, uint32_t ranks, uint32_t after, int32_t blocks) {
    const uint32_t n = (uint32_t)__builtin_popcount(ranks);
    for (int32_t i = 0; i < RANKS; i++) {
        if (!(ranks >> i & 1)) continue;
        while ((atomic_load(&a->at_epoch[i]) <= after || atomic_load(&a->members[i]) != n) &&
               !a->wrong[0]) {
            comm_sleep_ms(1);
        }
        if (!gpus_are_wanted() && !a->wrong[0])
            assert_int_equal(atomic_load(&a->blocks[i]), blocks);
    }
    if (a->wrong[0]) fail_msg("%s", a->wrong);
}

static uint32_t epoch_of(epochs *a) {
    return atomic_load(&a->at_epoch[0]);
}

/* Memory of a killed rank, and what it had open, is gone in the next epoch. What a stopped one has open
 * stays until it has come again. */
static void test_memory_that_others_have_open_stays(void **state) {
    (void)state;
    enum { OWN = 2 }; /* the sum, and memory for exchanges */
    need_ucx();
    epochs *a =
        mmap(NULL, sizeof *a, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[RANKS];
    assert_true(a != MAP_FAILED);
    comm_find_port(a->at);
    for (int32_t i = 0; i < RANKS; i++) start(a, pids, i);
    await(a, 7, 0, OWN);
    uint32_t epoch = epoch_of(a);
    kill(pids[2], SIGKILL);
    waitpid(pids[2], NULL, 0);
    await(a, 3, epoch, OWN);
    epoch = epoch_of(a);
    start(a, pids, 2);
    await(a, 7, epoch, OWN);
    epoch = epoch_of(a);
    kill(pids[1], SIGSTOP);
    await(a, 5, epoch, OWN + 1);
    epoch = epoch_of(a);
    kill(pids[1], SIGCONT);
    await(a, 7, epoch, OWN);
    atomic_store(&a->stop, true);
    for (int32_t i = 0; i < RANKS; i++) waitpid(pids[i], NULL, 0);
    if (a->wrong[0]) fail_msg("%s", a->wrong);
    munmap(a, sizeof *a);
}

/* ---- what ranks tell ---- */

static hd_export good_export(const hd_place *here) {
    return (hd_export){
        .magic = 0x58454448, .version = 1, .address = 4096, .bytes = 100, .place = *here};
}

static void test_exports_are_checked(void **state) {
    (void)state;
    const hd_place here = hd_place_here(), nowhere = {0};
    const hd_export good = good_export(&here);
    hd_err err = {0};
    assert_int_equal(hd_export_check(&good, 3, 100, &here, &err), HD_OK);
    const struct {
        size_t at;
        uint64_t value;
        hd_status status;
        const char *says;
    } wrong[] = {
        {offsetof(hd_export, magic),      1,          HD_EFORMAT,      "rank 3 told of no memory" },
        {offsetof(hd_export, bytes),      99,         HD_EFORMAT,      "rank 3 shares 99 bytes"   },
        {offsetof(hd_export, address),    0,          HD_EFORMAT,      "rank 3 shares 100 bytes"  },
        {offsetof(hd_export, address),    UINT64_MAX, HD_EFORMAT,      "rank 3 shares 100 bytes"  },
        {offsetof(hd_export, place.host), 1,          HD_EUNSUPPORTED, "rank 3 is on another host"},
        {offsetof(hd_export, place.pid),  INT32_MAX,  HD_EUNSUPPORTED, "is none of this user"     },
    };
    for (size_t i = 0; i < HD_LEN(wrong); i++) {
        hd_export e = good;
        memcpy((char *)&e + wrong[i].at, &wrong[i].value,
               wrong[i].at == offsetof(hd_export, magic) ||
                       wrong[i].at == offsetof(hd_export, place.pid)
                   ? 4
                   : 8);
        err = (hd_err){0};
        assert_int_equal(hd_export_check(&e, 3, 100, &here, &err), wrong[i].status);
        if (!strstr(err.msg, wrong[i].says)) fail_msg("%s", err.msg);
    }
    assert_int_equal(hd_export_check(&good, 3, 100, &nowhere, NULL), HD_EUNSUPPORTED);
}

/* Bytes at random open nothing. */
static void test_random_exports_are_refused(void **state) {
    (void)state;
    const hd_place here = hd_place_here();
    for (uint64_t i = 0; i < 20000; i++) {
        hd_export e;
        for (size_t k = 0; k < sizeof e; k++) {
            ((uint8_t *)&e)[k] = (uint8_t)hd_random_fill_at(i, k);
        }
        if (i % 2) e.magic = good_export(&here).magic;
        if (i % 4 == 3) e.version = 1;
        assert_true(hd_export_check(&e, 1, 1, &here, NULL) != HD_OK);
    }
}

/* Its owner has less than it says, or none; a GPU that is out of reach. */
static void test_memory_that_does_not_open(void **state) {
    (void)state;
    hd_device *d = ipc_device_open();
    void *block;
    const void *at;
    hd_export e;
    hd_err err = {0};
    assert_non_null(d);
    assert_int_equal(hd_device_alloc(d, &block, 100, "a test", NULL), HD_OK);
    assert_int_equal(hd_export_make(&e, d, block, 100, NULL), HD_OK);
    assert_int_equal(hd_export_open(&e, 5, d, &at, NULL), HD_OK);
    hd_device_close_shared(d, at);
    e.bytes = 200;
    assert_int_equal(hd_export_open(&e, 5, d, &at, &err), HD_EFORMAT);
    assert_non_null(strstr(err.msg, "rank 5 shares 200 bytes, and 100 are there"));
    assert_int_equal(ipc_device_opened(), 0);
    e.gpu[0]++;
    err = (hd_err){0};
    assert_int_equal(hd_export_open(&e, 5, d, &at, &err), HD_EUNSUPPORTED);
    assert_non_null(
        strstr(err.msg, "the GPU of rank 5: GPU 0 cannot read the memory of GPU 1"));
    assert_int_equal(hd_export_make(&e, d, block, 100, NULL), HD_OK);
    memset(e.handle, 0xff, sizeof e.handle);
    err = (hd_err){0};
    assert_int_equal(hd_export_open(&e, 5, d, &at, &err), HD_EFORMAT);
    assert_non_null(strstr(err.msg, "the GPU of rank 5: "));
    hd_device_release(d, block);
    assert_int_equal(ipc_device_blocks(), 1);
    hd_device_end_sharing(d);
    assert_int_equal(ipc_device_blocks(), 0);
    hd_device_close(d);
}

int test_comm_ipc(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exports_are_checked),
        cmocka_unit_test(test_random_exports_are_refused),
        cmocka_unit_test(test_memory_that_does_not_open),
        cmocka_unit_test(test_sums_do_not_depend_on_the_ranks),
        cmocka_unit_test(test_every_call_in_every_layout),
        cmocka_unit_test(test_rows_without_room_come_in_rounds),
        cmocka_unit_test(test_too_many_rows_are_an_error_of_all),
        cmocka_unit_test(test_a_lost_rank_ends_the_waiting_of_all),
        cmocka_unit_test(test_a_killed_rank_is_named),
        cmocka_unit_test(test_a_stopped_rank_is_named),
        cmocka_unit_test(test_memory_that_others_have_open_stays),
    };
    return cmocka_run_group_tests_name("comm_ipc", tests, NULL, NULL);
}
