/* test_comm_ucx.c - communication between processes (comm/ucx.h): the cases of comm_cases.h over memory that
 * ranks share (comm/shm.h), and over UCX's shared memory and TCP; a killed and a stopped rank; strangers at the rendezvous. */
#include "check.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/random_fill.h"
#include "comm/channel.h"
#include "comm/messages.h"
#include "comm/ucx.h"
#include "comm_cases.h"
#include "comm_world.h"
#ifdef HD_UCX
#include "comm/ucx_library.h"
#endif

static void need_ucx(void) {
    if (!hd_comm_ucx_is_built()) skip();
}

/* ---- the cases of all backends ---- */

/* Memory that ranks share (NULL), UCX's and TCP in turn; UCX finds no TCP device without sysfs. */
static const char *transport_of(uint64_t i) {
    if (i % 2 == 0) return NULL;
    return i % 4 == 3 && access("/sys/class/net", R_OK) == 0 ? "tcp,self" : "sysv,self";
}

static void test_every_call_in_every_layout(void **state) {
    (void)state;
    need_ucx();
    for (int32_t i = 0; i < 2 * COMM_LAYOUTS; i++) {
        comm_run_world(&(comm_world){
            .transports = transport_of((uint64_t)i),
            .secret = i % 3 ? NULL : "between the ranks",
            .like = {.parallel = comm_layouts[i / 2],
                     .run = comm_call_at_random,
                     .rounds = COMM_ROUNDS,
                     .seed = 1 + (uint64_t)i * COMM_ROUNDS}
        });
    }
}

static void test_sums_do_not_depend_on_the_ranks(void **state) {
    (void)state;
    need_ucx();
    for (int32_t i = 0; i < 8; i++) {
        comm_run_world(&(comm_world){
            .transports = transport_of((uint64_t)i),
            .like = {.parallel = hd_parallel_tensor(1 << i / 2), .run = comm_add_terms}
        });
    }
}

static void test_a_lost_rank_ends_the_waiting_of_all(void **state) {
    (void)state;
    need_ucx();
    for (uint64_t seed = 0; seed < 8; seed++) {
        const int32_t n = 2 + (int32_t)comm_draw(seed, 1, 4);
        comm_run_world(&(comm_world){
            .transports = transport_of(seed),
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
        .like = {.parallel = hd_parallel_expert(2, 0), .run = comm_overflow, .seed = 3}
    });
}

static void test_who_waits_sleeps(void **state) {
    (void)state;
    need_ucx();
    for (int32_t i = 0; i < 4; i++) {
        comm_run_world(&(comm_world){
            .transports = transport_of((uint64_t)i),
            .like = {.parallel = hd_parallel_tensor(2), .run = comm_come_late}
        });
    }
}

static void test_rows_without_room_come_in_rounds(void **state) {
    (void)state;
    need_ucx();
    for (uint64_t seed = 0; seed < 4; seed++) {
        comm_run_world(&(comm_world){
            .transports = transport_of(seed),
            .like = {.parallel = hd_parallel_expert(3 + (int32_t)seed % 2, 0),
                     .run = comm_dispatch_in_rounds,
                     .seed = seed}
        });
    }
}

static void test_exchanges_are_counted(void **state) {
    (void)state;
    need_ucx();
    for (uint64_t seed = 0; seed < 4; seed++) {
        comm_run_world(&(comm_world){
            .transports = transport_of(seed),
            .like = {.parallel = hd_parallel_expert(3, 0),
                     .run = comm_count_exchanges,
                     .seed = seed,
                     .victim = (int32_t)seed % 3}
        });
    }
}

/* ---- a sum of more than one shot ---- */

enum { LARGE = 300000 };

static float term(int32_t rank, int64_t i) {
    return (float)((i * 7 + rank * 13) % 101) / 3.0f;
}

static void sum_much(comm_rank *r) {
    float *x = malloc(LARGE * sizeof *x);
    for (int64_t i = 0; x && i < LARGE; i++) x[i] = term(r->number, i);
    hd_comm_all_reduce(r->comm, r->stream,
                       &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(x), LARGE});
    for (int64_t i = 0; x && i < LARGE; i++) {
        const float want = r->parallel.tp == 3 ? (term(0, i) + term(1, i)) + term(2, i)
                                               : term(0, i) + term(1, i);
        comm_expect(r, x[i] == want, "sum", i);
    }
    free(x);
}

static void test_large_sums(void **state) {
    (void)state;
    need_ucx();
    for (int32_t i = 0; i < 4; i++) {
        comm_run_world(&(comm_world){
            .transports = transport_of((uint64_t)i),
            .like = {.parallel = hd_parallel_tensor(2 + i / 2), .run = sum_much}
        });
    }
}

/* ---- ranks that are killed or stopped ---- */

/* Silence would be noticed after a minute only. */
static void test_a_killed_rank_is_named(void **state) {
    (void)state;
    need_ucx();
    for (int32_t i = 0; i < 6; i++) {
        comm_lose(SIGKILL, i % 3, 60000,
                  &(comm_world){.transports = transport_of((uint64_t)i)});
    }
}

static void test_a_stopped_rank_is_named(void **state) {
    (void)state;
    need_ucx();
    comm_lose(SIGSTOP, 0, 3000, &(comm_world){.transports = transport_of(0)});
    comm_lose(SIGSTOP, 2, 3000, &(comm_world){.transports = transport_of(1)});
}

/* Of the watch's thread. */
static void note_loss(void *why, uint32_t epoch, const char *text) {
    (void)epoch;
    snprintf(why, HD_RENDEZVOUS_TEXT, "%s", text);
}

/* Rank 1 is there, and its watch does not get a core for twice the limit of silence. The world lives
 * until rank 1 ends. */
static void test_a_starved_rank_is_not_lost(void **state) {
    (void)state;
    char at[32];
    comm_find_port(at);
    hd_rendezvous_options o = {.rank = 1, .world = 2, .at = at, .silence_ms = 400};
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        hd_rendezvous *m;
        hd_rendezvous_open(&m, &o, "one", 3, NULL);
        comm_sleep_ms(2 * o.silence_ms);
        _exit(0);
    }
    o.rank = 0;
    char why[HD_RENDEZVOUS_TEXT] = "";
    hd_rendezvous *m;
    assert_int_equal(hd_rendezvous_open(&m, &o, "zero", 4, NULL), HD_OK);
    assert_int_equal(hd_rendezvous_watch(m, note_loss, why, NULL), HD_OK);
    assert_int_equal(hd_rendezvous_next(m, "zero", 4), HD_RENDEZVOUS_EPOCH);
    assert_string_equal(why, "rank 1 is lost: its process has ended");
    hd_rendezvous_close(m);
    waitpid(pid, NULL, 0);
}

/* A rank whose watch lives, but which calls nothing. The other waits for it only once it is
 * there. */
static void hang(comm_rank *r) {
    float x[1] = {0};
    hd_err err = {0};
    volatile int32_t *is_there = &r[r->victim - r->number].rounds;
    if (r->number == r->victim) *is_there = 1;
    while (!*is_there) comm_sleep_ms(1);
    while (r->number == r->victim && !hd_comm_ended(r->comm)) comm_sleep_ms(1);
    hd_comm_all_reduce(r->comm, r->stream, &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(x), 1});
    hd_stream_sync(r->stream, &err);
    comm_expect(r, err.status == HD_EPEER && strstr(err.msg, "rank 1 is lost: rank 0 waited"),
                err.msg, 0);
}

static void test_a_rank_that_hangs_is_named(void **state) {
    (void)state;
    need_ucx();
    comm_run_world(&(comm_world){
        .wait_ms = 100, .like = {.parallel = hd_parallel_tensor(2), .run = hang, .victim = 1}
    });
}

/* ---- before the first epoch ---- */

static hd_status open_rank_0(hd_comm_ucx **u, const char *at, int32_t preflight_ms,
                             hd_device **d, hd_stream **s, hd_err *err) {
    hd_ops ops;
    const hd_comm_ucx_options o = {
        .rendezvous = {.world = 2, .at = at, .silence_ms = 20000},
        .parallel = hd_parallel_tensor(2),
        .preflight_ms = preflight_ms
    };
    const char *why = comm_open_device(false, 0, d, s, &ops);
    if (why) fail_msg("%s", why);
    return hd_comm_ucx_open(u, &o, *d, *s, &ops, err);
}

static void close_rank_0(hd_comm_ucx *u, hd_device *d, hd_stream *s) {
    hd_comm_ucx_close(u);
    hd_stream_close(s);
    hd_device_close(d);
}

static pid_t start_rank_1(const char *at, void (*run)(const char *at)) {
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid) return pid;
    run(at);
    _exit(0);
}

static void be_rank_1(const char *at) {
    hd_comm_ucx *u;
    hd_device *d;
    hd_stream *s;
    hd_ops ops;
    const hd_comm_ucx_options o = {
        .rendezvous = {.rank = 1, .world = 2, .at = at},
          .parallel = hd_parallel_tensor(2)
    };
    comm_open_device(false, 1, &d, &s, &ops);
    if (hd_comm_ucx_open(&u, &o, d, s, &ops, NULL) == HD_OK) hd_comm_ucx_close(u);
}

static void test_rates_and_hosts_are_known(void **state) {
    (void)state;
    need_ucx();
    char at[32], name[64] = "";
    hd_comm_ucx *u;
    hd_device *d;
    hd_stream *s;
    hd_err err = {0};
    comm_find_port(at);
    const pid_t pid = start_rank_1(at, be_rank_1);
    if (open_rank_0(&u, at, 0, &d, &s, &err) != HD_OK) fail_msg("%s", err.msg);
    gethostname(name, 31);
    assert_true(hd_comm_ucx_rate(u, 0, 1) > 1e5);
    assert_true(hd_comm_ucx_rate(u, 0, 1) == hd_comm_ucx_rate(u, 1, 0));
    assert_string_equal(hd_comm_ucx_host(u, 0), name);
    assert_string_equal(hd_comm_ucx_host(u, 1), name);
    close_rank_0(u, d, s);
    waitpid(pid, NULL, 0);
}

#ifdef HD_UCX
static void ignore_end_of_world(void *ctx, uint32_t epoch, const char *why) {
    (void)ctx, (void)epoch, (void)why;
}

/* A rank with a worker, to which UCX connects, but which sends nothing. */
static void say_nothing(const char *at) {
    enum { NAME = 32 };
    const hd_rendezvous_options o = {.rank = 1, .world = 2, .at = at, .silence_ms = 20000};
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    const ucp_worker_params_t of_worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                           .thread_mode = UCS_THREAD_MODE_SINGLE};
    uint8_t offer[HD_CHANNEL_MAX_ADDRESS] = {0};
    const ucx_library *ucp;
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_address_t *address;
    hd_rendezvous *m;
    size_t n;
    if (ucx_library_load(&ucp, NULL) != HD_OK ||
        ucp->init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, NULL, &context) != UCS_OK ||
        ucp->worker_create(context, &of_worker, &worker) != UCS_OK ||
        ucp->worker_get_address(worker, &address, &n) != UCS_OK) {
        return;
    }
    memcpy(offer, address, n);
    memcpy(offer + n, "elsewhere", sizeof "elsewhere");
    if (hd_rendezvous_open(&m, &o, offer, (uint32_t)n + NAME, NULL) != HD_OK) return;
    hd_rendezvous_watch(m, ignore_end_of_world, NULL, NULL);
    comm_sleep_ms(900);
    hd_rendezvous_close(m);
}

static void test_a_rank_that_says_nothing_is_named(void **state) {
    (void)state;
    need_ucx();
    char at[32], name[64] = "", want[200];
    hd_comm_ucx *u;
    hd_device *d;
    hd_stream *s;
    hd_err err = {0};
    comm_find_port(at);
    const pid_t pid = start_rank_1(at, say_nothing);
    assert_int_equal(open_rank_0(&u, at, 200, &d, &s, &err), HD_EPEER);
    gethostname(name, 31);
    snprintf(want, sizeof want,
             "rank 0 on %s: nothing came (open TCP ports, or set UCX_NET_DEVICES) within 0.2 s "
             "from rank 1 on elsewhere",
             name);
    assert_string_equal(err.msg, want);
    close_rank_0(NULL, d, s);
    waitpid(pid, NULL, 0);
}
#endif

/* ---- ranks that are left begin anew, and one comes back ---- */

enum { ANEW = 4 };

typedef struct anew anew;

/* What a rank does in an epoch; HD_OK: it leaves. */
typedef hd_status anew_work(anew *a, hd_comm_ucx *u, hd_stream *s, int32_t number, hd_err *err);

/* What the processes of a test tell each other. */
struct anew {
    char at[32];
    anew_work *work;
    /* of the last sum that each rank has got right; written after what belongs to it */
    _Atomic int32_t members[ANEW];
    uint32_t epochs[ANEW];
    uint64_t losses; /* that rank 0 has counted */
    int32_t stop, left[ANEW], waited;
    char wrong[200];
};

/* Two are too few. */
static bool one_or_at_least_three(void *ctx, int32_t n, hd_parallel_config *out) {
    (void)ctx;
    *out = hd_parallel_tensor(n);
    return n != 2;
}

static void count_waiting(void *ctx) {
    ((volatile anew *)ctx)->waited = 1;
}

static void ignore_end(void *ctx) {
    (void)ctx;
}

/* Members add their numbers, and 100 each, until they are told to stop. */
static hd_status add_numbers(anew *a, hd_comm_ucx *u, hd_stream *s, int32_t number,
                             hd_err *err) {
    const hd_comm_members *m = hd_comm_ucx_members(u);
    const hd_comm *c = hd_comm_ucx_interface(u);
    for (;;) {
        float want = 0, x = 100 + (float)number;
        int32_t stops = *(volatile int32_t *)&a->stop;
        hd_comm_broadcast(c, s, &(hd_broadcast_args){HD_GROUP_TP, &stops, sizeof stops});
        hd_comm_all_reduce(c, s, &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(&x), 1});
        HD_TRY(hd_stream_sync(s, err));
        for (int32_t i = 0; i < m->n; i++) want += 100 + (float)m->number[i];
        if (x != want)
            snprintf(a->wrong, sizeof a->wrong, "%g, not %g", (double)x, (double)want);
        a->epochs[number] = m->epoch;
        if (number == 0) a->losses = m->losses;
        atomic_store(&a->members[number], m->n);
        if (stops) return HD_OK;
    }
}

static void work_anew(anew *a, int32_t number) {
    const hd_cpu_options one = {.n_threads = 1};
    hd_ops ops;
    hd_device *d;
    hd_stream *s;
    hd_comm_ucx *u = NULL;
    hd_err err = {0};
    hd_parallel_config layout;
    const hd_comm_ucx_options o = {
        .rendezvous = {.rank = number, .world = ANEW, .at = a->at, .silence_ms = 20000},
        .parallel = hd_parallel_tensor(ANEW),
        .transports = transport_of(0),
        .on_end = ignore_end,
        .layout_of = one_or_at_least_three,
        .ctx = a
    };
    hd_ops_init_ref(&ops, HD_EXACT);
    hd_status st = hd_device_open_cpu(&d, &one, &err);
    if (st == HD_OK) st = hd_stream_open(&s, d, &err);
    if (st == HD_OK) st = hd_comm_ucx_open(&u, &o, d, s, &ops, &err);
    while (st == HD_OK && a->work(a, u, s, number, &err) != HD_OK) {
        err = (hd_err){0};
        st = hd_comm_ucx_begin_anew(u, &layout, count_waiting, &err);
    }
    if (st != HD_OK && st != HD_EAGAIN) snprintf(a->wrong, sizeof a->wrong, "%.190s", err.msg);
    hd_comm_ucx_close(u);
    a->left[number] = 1;
    _exit(0);
}

static pid_t start_anew(anew *a, int32_t number) {
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) work_anew(a, number);
    return pid;
}

static void await_members(anew *a, const bool *alive, int32_t n) {
    for (int32_t i = 0; i < ANEW; i++) {
        while (alive[i] && atomic_load(&a->members[i]) != n && !a->wrong[0]) comm_sleep_ms(1);
    }
    if (a->wrong[0]) fail_msg("%s", a->wrong);
}

static void lose_anew(pid_t *pids, bool *alive, int32_t number) {
    kill(pids[number], SIGKILL);
    waitpid(pids[number], NULL, 0);
    alive[number] = false;
}

static void come_anew(anew *a, pid_t *pids, bool *alive, int32_t number) {
    atomic_store(&a->members[number], 0);
    pids[number] = start_anew(a, number);
    alive[number] = true;
}

static anew *share_anew(anew_work *work) {
    anew *a = mmap(NULL, sizeof *a, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(a != MAP_FAILED);
    comm_find_port(a->at);
    a->work = work;
    return a;
}

static void end_anew(anew *a, const pid_t *pids, const bool *alive) {
    *(volatile int32_t *)&a->stop = 1;
    for (int32_t i = 0; i < ANEW; i++) {
        if (!alive[i]) continue;
        waitpid(pids[i], NULL, 0);
        assert_int_equal(a->left[i], 1);
    }
    if (a->wrong[0]) fail_msg("%s", a->wrong);
    munmap(a, sizeof *a);
}

static void test_ranks_that_are_left_begin_anew(void **state) {
    (void)state;
    need_ucx();
    anew *a = share_anew(add_numbers);
    pid_t pids[ANEW];
    bool alive[ANEW];
    for (int32_t i = 0; i < ANEW; i++) come_anew(a, pids, alive, i);
    await_members(a, alive, 4);
    assert_int_equal(a->losses, 0);
    lose_anew(pids, alive, 2);
    await_members(a, alive, 3);
    assert_int_equal(a->losses, 1);
    const uint32_t before = a->epochs[0];
    come_anew(a, pids, alive, 2);
    await_members(a, alive, 4);
    assert_true(a->epochs[0] > before && a->epochs[2] == a->epochs[0] && a->losses == 1);
    lose_anew(pids, alive, 1);
    lose_anew(pids, alive, 3);
    while (!*(volatile int32_t *)&a->waited && !a->wrong[0]) comm_sleep_ms(1); /* for a third */
    come_anew(a, pids, alive, 3);
    await_members(a, alive, 3);
    end_anew(a, pids, alive);
}

/* ---- waiting in a later epoch ---- */

enum { EPOCHS = 12, IDLE_MS = 40 };

/* Waits for rank 0, which comes late. Then one rank after the other ends the epoch itself. */
static hd_status wait_and_abort(anew *a, hd_comm_ucx *u, hd_stream *s, int32_t number,
                                hd_err *err) {
    const uint32_t epoch = hd_comm_ucx_members(u)->epoch;
    const hd_comm *c = hd_comm_ucx_interface(u);
    int32_t word = 0;
    if (number == 0) comm_sleep_ms(IDLE_MS);
    const int64_t before = comm_cpu_time_ns();
    hd_comm_broadcast(c, s, &(hd_broadcast_args){HD_GROUP_TP, &word, sizeof word});
    HD_TRY(hd_stream_sync(s, err));
    if (number && comm_cpu_time_ns() - before > IDLE_MS * 1000000 / 4)
        snprintf(a->wrong, sizeof a->wrong, "rank %d spins in epoch %u", number, epoch);
    if (epoch == EPOCHS) return HD_OK;
    if (epoch % ANEW == (uint32_t)number) hd_comm_abort(c, "again");
    hd_comm_all_reduce(c, s, &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(&(float){0}), 1});
    return hd_stream_sync(s, err);
}

static void test_who_waits_in_a_later_epoch_sleeps(void **state) {
    (void)state;
    need_ucx();
    anew *a = share_anew(wait_and_abort);
    pid_t pids[ANEW];
    bool alive[ANEW];
    for (int32_t i = 0; i < ANEW; i++) come_anew(a, pids, alive, i);
    end_anew(a, pids, alive);
}

/* ---- ranks that cannot connect ---- */

static void ignore_loss(void *ctx, uint32_t epoch, const char *why) {
    (void)ctx;
    (void)epoch;
    (void)why;
}

/* Comes as the last rank, first without a network, then with the address that rank 0 had then and has
 * closed since. Nobody can connect to it. */
static void come_with_a_stale_address(const anew *a) {
    const hd_rendezvous_options o = {
        .rank = ANEW - 1, .world = ANEW, .at = a->at, .silence_ms = 20000};
    char stale[HD_CHANNEL_MAX_ADDRESS];
    hd_rendezvous *m;
    uint32_t n;
    assert_int_equal(hd_rendezvous_open(&m, &o, "", 1, NULL), HD_OK);
    assert_int_equal(hd_rendezvous_watch(m, ignore_loss, NULL, NULL), HD_OK);
    assert_int_equal(hd_rendezvous_next(m, "", 1), HD_RENDEZVOUS_EPOCH);
    const void *first = hd_rendezvous_address(m, 0, &n);
    memcpy(stale, first, n);
    assert_int_equal(hd_rendezvous_next(m, stale, n), HD_RENDEZVOUS_EPOCH);
    /* the others live */
    assert_int_equal(hd_rendezvous_next(m, stale, n), HD_RENDEZVOUS_EPOCH);
    hd_rendezvous_close(m);
}

static void test_ranks_that_cannot_connect_try_again(void **state) {
    (void)state;
    need_ucx();
    anew *a = share_anew(add_numbers);
    pid_t pids[ANEW];
    bool alive[ANEW];
    for (int32_t i = 0; i < ANEW; i++) come_anew(a, pids, alive, i);
    await_members(a, alive, 4);
    lose_anew(pids, alive, 3);
    await_members(a, alive, 3);
    const uint32_t before = a->epochs[0];
    come_with_a_stale_address(a);
    while (((volatile uint32_t *)a->epochs)[0] <= before && !a->wrong[0]) comm_sleep_ms(1);
    come_anew(a, pids, alive, 3);
    await_members(a, alive, 4);
    end_anew(a, pids, alive);
}

/* ---- strangers ---- */

static int connect_to(const char *at) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    a.sin_port = htons((uint16_t)atoi(strchr(at, ':') + 1));
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    while (connect(fd, (struct sockaddr *)&a, sizeof a)) comm_sleep_ms(5);
    return fd;
}

/* Rank 0 in a process of its own; *world_ok says how it ended. */
static pid_t start_host(const hd_rendezvous_options *o, hd_err *err) {
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid) return pid;
    hd_rendezvous *m;
    hd_rendezvous_open(&m, o, "zero", 4, err);
    hd_rendezvous_close(m);
    _exit(0);
}

static void test_strangers_do_not_stop_the_rendezvous(void **state) {
    (void)state;
    char at[32], bytes[3000];
    int fds[100];
    hd_err mine = {0};
    hd_err *err =
        mmap(NULL, sizeof *err, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    comm_find_port(at);
    hd_rendezvous_options o = {
        .world = 2, .at = at, .secret = "right", .facts = {{"version", 1}, {"model", 2}}
    };
    const pid_t pid = start_host(&o, err);
    for (int32_t i = 0; i < 100; i++) {
        fds[i] = connect_to(at);
        for (size_t k = 0; k < sizeof bytes; k++) {
            bytes[k] = (char)hd_random_fill_at((uint64_t)i, k);
        }
        send(fds[i], bytes, comm_draw((uint64_t)i, 1, sizeof bytes), MSG_NOSIGNAL);
    }
    hd_rendezvous *m;
    o.rank = 1;
    o.secret = "wrong";
    assert_int_equal(hd_rendezvous_open(&m, &o, "one", 3, &mine), HD_EFORMAT);
    assert_non_null(strstr(mine.msg, "key of this world"));
    o.secret = "right";
    o.world = 3;
    mine = (hd_err){0};
    assert_int_equal(hd_rendezvous_open(&m, &o, "one", 3, &mine), HD_EPEER);
    assert_non_null(strstr(mine.msg, "rank 1 expects 3 ranks, rank 0 expects 2"));
    o.world = 2;
    o.facts[1].value = 1;
    mine = (hd_err){0};
    assert_int_equal(hd_rendezvous_open(&m, &o, "one", 3, &mine), HD_EPEER);
    assert_non_null(strstr(mine.msg, "rank 1 has another model than rank 0"));
    o.facts[1].value = 2;
    uint32_t n;
    assert_int_equal(hd_rendezvous_open(&m, &o, "one", 3, NULL), HD_OK);
    assert_memory_equal(hd_rendezvous_address(m, 0, &n), "zero", 4);
    assert_int_equal(n, 4);
    hd_rendezvous_close(m);
    for (int32_t i = 0; i < 100; i++) close(fds[i]);
    waitpid(pid, NULL, 0);
    assert_string_equal(err->msg, "");
    munmap(err, sizeof *err);
}

static void test_rendezvous_refusals(void **state) {
    (void)state;
    hd_rendezvous *m;
    hd_err err = {0};
    char at[32];
    hd_rendezvous_options o = {.world = 2, .at = "10.0.0.1:70"};
    assert_int_equal(hd_rendezvous_open(&m, &o, "", 0, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "need a shared secret"));
    o.at = "nowhere";
    assert_int_equal(hd_rendezvous_open(&m, &o, "", 0, NULL), HD_EINVAL);
    comm_find_port(at);
    o.at = at;
    o.start_ms = 50;
    err = (hd_err){0};
    assert_int_equal(hd_rendezvous_open(&m, &o, "", 0, &err), HD_EPEER);
    assert_non_null(strstr(err.msg, "rank 1 did not come"));
    o.rank = 1;
    err = (hd_err){0};
    assert_int_equal(hd_rendezvous_open(&m, &o, "", 0, &err), HD_EPEER);
    assert_non_null(strstr(err.msg, "rank 1 cannot reach rank 0"));
    assert_null(m);
}

static void test_rank_and_world_from_the_environment(void **state) {
    (void)state;
    int32_t rank = -1, n = -1;
    assert_false(hd_rendezvous_from_environment(&rank, &n));
    setenv("SLURM_PROCID", "3", 1);
    setenv("SLURM_STEP_NUM_TASKS", "3", 1);
    assert_false(hd_rendezvous_from_environment(&rank, &n));
    setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    assert_true(hd_rendezvous_from_environment(&rank, &n));
    assert_true(rank == 3 && n == 4);
    setenv("OMPI_COMM_WORLD_RANK", "1", 1);
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    assert_true(hd_rendezvous_from_environment(&rank, &n));
    assert_true(rank == 1 && n == 2);
    setenv("OMPI_COMM_WORLD_RANK", "one", 1);
    assert_true(hd_rendezvous_from_environment(&rank, &n) && rank == 3);
    unsetenv("SLURM_PROCID");
    unsetenv("SLURM_STEP_NUM_TASKS");
    unsetenv("OMPI_COMM_WORLD_RANK");
    unsetenv("OMPI_COMM_WORLD_SIZE");
}

/* ---- headers of messages ---- */

static const hd_message_limits limits = {
    .world = 4, .epoch = 3, .max_bytes = 100, .key = {1, 2},
               .authenticates_bytes = true
};

static void test_headers_are_checked(void **state) {
    (void)state;
    const char bytes[101] = "a payload";
    const hd_message good = {.group = 1, .lane = 2, .from = 3, .ticket = 9, .n = 8};
    hd_message m = good;
    hd_message_seal(&m, &limits, bytes);
    assert_int_equal(hd_message_check(&m, &limits, bytes, 8, NULL), HD_OK);
    assert_int_equal(hd_message_check(&m, &limits, bytes, 9, NULL), HD_EFORMAT);
    for (size_t i = 0; i < sizeof m; i++) { /* every byte counts */
        hd_message bad = m;
        ((uint8_t *)&bad)[i] ^= 1;
        assert_int_equal(hd_message_check(&bad, &limits, bytes, 8, NULL), HD_EFORMAT);
    }
    const hd_message wrong[] = {{.group = HD_N_GROUPS},
                                {.lane = HD_N_MESSAGE_LANES},
                                {.from = 4},
                                {.from = -1},
                                {.n = 101}};
    for (size_t i = 0; i < HD_LEN(wrong); i++) {
        m = wrong[i];
        hd_message_seal(&m, &limits, bytes);
        assert_int_equal(hd_message_check(&m, &limits, bytes, m.n, NULL), HD_EFORMAT);
    }
    m = good;
    hd_message_limits earlier = limits;
    earlier.epoch = 2;
    hd_message_seal(&m, &earlier, bytes);
    assert_int_equal(hd_message_check(&m, &limits, bytes, 8, NULL), HD_EAGAIN);
}

static void test_bytes_are_authenticated_between_hosts(void **state) {
    (void)state;
    char bytes[8] = "payload";
    hd_message_limits here = limits;
    here.authenticates_bytes = false;
    hd_message m = {.from = 1, .n = sizeof bytes};
    hd_message_seal(&m, &limits, bytes);
    assert_int_equal(hd_message_check(&m, &limits, bytes, sizeof bytes, NULL), HD_OK);
    assert_int_equal(hd_message_check(&m, &here, bytes, sizeof bytes, NULL), HD_EFORMAT);
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] ^= 1;
        assert_int_equal(hd_message_check(&m, &limits, bytes, sizeof bytes, NULL), HD_EFORMAT);
        bytes[i] ^= 1;
    }
}

int test_comm_ucx(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_headers_are_checked),
        cmocka_unit_test(test_bytes_are_authenticated_between_hosts),
        cmocka_unit_test(test_a_rank_that_hangs_is_named),
        cmocka_unit_test(test_rates_and_hosts_are_known),
#ifdef HD_UCX
        cmocka_unit_test(test_a_rank_that_says_nothing_is_named),
#endif
        cmocka_unit_test(test_ranks_that_are_left_begin_anew),
        cmocka_unit_test(test_who_waits_in_a_later_epoch_sleeps),
        cmocka_unit_test(test_ranks_that_cannot_connect_try_again),
        cmocka_unit_test(test_rank_and_world_from_the_environment),
        cmocka_unit_test(test_rendezvous_refusals),
        cmocka_unit_test(test_strangers_do_not_stop_the_rendezvous),
        cmocka_unit_test(test_every_call_in_every_layout),
        cmocka_unit_test(test_sums_do_not_depend_on_the_ranks),
        cmocka_unit_test(test_a_lost_rank_ends_the_waiting_of_all),
        cmocka_unit_test(test_too_many_rows_are_an_error_of_all),
        cmocka_unit_test(test_who_waits_sleeps),
        cmocka_unit_test(test_rows_without_room_come_in_rounds),
        cmocka_unit_test(test_exchanges_are_counted),
        cmocka_unit_test(test_large_sums),
        cmocka_unit_test(test_a_killed_rank_is_named),
        cmocka_unit_test(test_a_stopped_rank_is_named),
        cmocka_unit_test(test_a_starved_rank_is_not_lost),
    };
    return cmocka_run_group_tests_name("comm_ucx", tests, NULL, NULL);
}
