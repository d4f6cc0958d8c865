/* test_pd_faults.c - two servers in this process, and a proxy between them that does something wrong
 * with each message of a handover in turn, in both directions. The answer is always that of one
 * engine, and afterwards no lease and no page is left. */
#include "check.h"

#include <arpa/inet.h>
#include <semaphore.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/progress.h"
#include "comm/address.h"
#include "fakes/engine_rig.h"
#include "fakes/pd_proxy.h"
#include "pd/pd_internal.h"

enum { N_TOKENS = 260, LIMIT_MS = 500, PREFILL = 0, DECODE = 1 };

/* The messages of a handover of two FULL pages and a WINDOW page, by who sends them. */
enum { N_UP = 2 /* RESERVE, OWNED */, N_DOWN = 5 /* GRANT, 3 PAGE, COMMIT */ };

static const char NAME[] = "127.0.0.1:1"; /* by which requests name the prefill server */

typedef struct side {
    hd_engine *engine;
    pd *pd;
    sem_t news;
    pthread_t poller;
    atomic_bool closing;
} side;

static side sides[2];
static proxy between;
static int32_t tokens[N_TOKENS];
static rig_answer straight;
static char target[32];

static hd_engine *open_engine(const char *hisparse) {
    return rig_open("cpu", &(hd_engine_options){.model_dir = "models/tiny-v4",
                                                .hisparse = hisparse,
                                                .max_running = 2,
                                                .max_context = 512,
                                                .kv_tokens = 1024,
                                                .kv_host_gb = 0.05});
}

static void on_submitted(void *ctx) {
    side *s = ctx;
    sem_post(&s->news);
}

/* The events of the prefill server's own requests. */
static void *poll_events(void *arg) {
    side *s = arg;
    hd_event ignored;
    while (!atomic_load(&s->closing)) {
        while (hd_engine_poll(s->engine, &ignored, -1)) {
        }
        sem_wait(&s->news);
    }
    return NULL;
}

static void open_side(side *s, pd_role role, int listener, const char *peers) {
    hd_err err = {0};
    const pd_options o = {.role = role,
                          .name = role == PD_ROLE_PREFILL ? "p:1" : "d:1",
                          .peers = peers,
                          .limit_ms = LIMIT_MS,
                          .model_dir = "models/tiny-v4",
                          .submitted = on_submitted,
                          .ctx = s};
    s->engine = open_engine(role == PD_ROLE_DECODE ? "256" : NULL); /* pages go to its mirror */
    sem_init(&s->news, 0, 0);
    if (pd_open(&s->pd, s->engine, &o, listener, &err) != HD_OK) fail_msg("%s", err.msg);
}

static hd_request request_of(const char *server) {
    return (hd_request){.size = sizeof(hd_request),
                        .tokens = tokens,
                        .n_tokens = N_TOKENS,
                        .max_tokens = 3,
                        .temperature = 1,
                        .seed = 5,
                        .prefill = server};
}

static int open_all(void **state) {
    (void)state;
    static char peers[80];
    struct sockaddr_in name;
    socklen_t n = sizeof name;
    int listener;
    for (int32_t i = 0; i < N_TOKENS; i++) tokens[i] = i * 31 % 997 + 5;
    assert_int_equal(hd_address_bind(&listener, "test", "127.0.0.1:0", NULL), HD_OK);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&name, &n), 0);
    snprintf(target, sizeof target, "127.0.0.1:%d", ntohs(name.sin_port));
    open_side(&sides[PREFILL], PD_ROLE_PREFILL, listener, NULL);
    assert_int_equal(pthread_create(&sides[PREFILL].poller, NULL, poll_events, &sides[PREFILL]),
                     0);
    proxy_open(&between, target);
    snprintf(peers, sizeof peers, "%s=%s", NAME, between.at);
    open_side(&sides[DECODE], PD_ROLE_DECODE, -1, peers);
    const hd_request g = request_of(NULL);
    rig_run(sides[DECODE].engine, &g, &straight);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    side *p = &sides[PREFILL], *d = &sides[DECODE];
    rig_deinit(&straight);
    pd_close(d->pd);
    hd_engine_close(d->engine);
    proxy_close(&between);
    pd_close(p->pd);
    atomic_store(&p->closing, true);
    sem_post(&p->news);
    hd_engine_wake(p->engine);
    pthread_join(p->poller, NULL);
    hd_engine_close(p->engine);
    return 0;
}

static void pause_briefly(void) {
    nanosleep(&(struct timespec){0, 2000000}, NULL);
}

static int32_t open_leases(pd *p) {
    pd_stats s;
    int32_t n = 0;
    pd_read_stats(p, &s);
    for (int i = 0; i < HD_N_LEASE_STATES; i++) n += s.open[0][i] + s.open[1][i];
    return n;
}

static void wait_quiet(void) {
    for (int i = 0; i < 2; i++) {
        hd_engine_stats s;
        do {
            pause_briefly();
            hd_engine_read_stats(sides[i].engine, &s);
        } while (open_leases(sides[i].pd) || s.living || s.running);
        assert_int_equal(s.audits_failed, 0);
    }
}

/* Waits until the servers are connected, and forgives what was wrong. */
static void wait_paired(void) {
    pd_peer *q = &sides[DECODE].pd->peers[0];
    for (bool up = false; !up; pause_briefly()) {
        pthread_mutex_lock(&sides[DECODE].pd->lock);
        q->rest_until_ns = 0;
        up = q->up;
        pthread_mutex_unlock(&sides[DECODE].pd->lock);
    }
}

static uint64_t owned(void) {
    pd_stats s;
    pd_read_stats(sides[DECODE].pd, &s);
    return s.leases.owned[true];
}

static void ask_once(void) {
    rig_answer answer;
    const hd_request g = request_of(NAME);
    hd_engine_flush(sides[DECODE].engine);
    rig_run(sides[DECODE].engine, &g, &answer);
    rig_same(&straight, &answer);
    rig_deinit(&answer);
}

/* On a loaded machine a handover may end by its deadline before the message comes. */
static void ask_with(int from, int32_t index, proxy_fault fault) {
    const int32_t before = proxy_applied(&between);
    while (proxy_applied(&between) == before) {
        wait_paired();
        proxy_order(&between, from, index, fault);
        ask_once();
        wait_quiet();
    }
    proxy_order(&between, -1, 0, fault);
}

/* FT46, FT47, FT49, FT50, FT53, FT54, FT56, FT57, X08, X26 */
static void every_message_may_go_wrong(void **state) {
    (void)state;
    const int apart = is_brief() ? 3 : 1; /* every message and every fault, not every pair */
    for (int fault = 0; fault < PROXY_N_FAULTS; fault++) {
        for (int i = fault % apart; i < N_UP + N_DOWN; i += apart) {
            ask_with(i >= N_UP, i < N_UP ? i : i - N_UP, (proxy_fault)fault);
        }
    }
    for (const uint64_t before = owned(); owned() == before;) { /* all goes well again */
        wait_paired();
        ask_once();
        wait_quiet();
    }
}

/* An engine that is idle for a second looks for pages and slots that nobody gave back. */
static void nothing_is_left(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        hd_engine_stats s = {0};
        for (; s.audits == 0; pause_briefly()) hd_engine_read_stats(sides[i].engine, &s);
        assert_int_equal(s.audits_failed, 0);
        assert_int_equal(s.living, 0);
        assert_int_equal(s.fetching, 0);
    }
}

/* A wrong page counts against the server, which then rests. */
static void a_wrong_page_is_counted(void **state) {
    (void)state;
    pd_peer_status q;
    pd_stats s;
    pd_read_peer(sides[DECODE].pd, 0, &q);
    const uint64_t before = q.suspicion;
    ask_with(1, 1, PROXY_LAST_BYTE);
    pd_read_peer(sides[DECODE].pd, 0, &q);
    pd_read_stats(sides[DECODE].pd, &s);
    assert_int_equal(q.suspicion, before + 1);
    assert_true(s.leases.aborted[HD_LEASE_DIGEST] > 0);
    const int64_t skipped = s.skipped[PD_SKIP_SUSPECT];
    ask_once();
    pd_read_stats(sides[DECODE].pd, &s);
    assert_int_equal(s.skipped[PD_SKIP_SUSPECT], skipped + 1);
}

int test_pd_faults(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_message_may_go_wrong),
        cmocka_unit_test(nothing_is_left),
        cmocka_unit_test(a_wrong_page_is_counted),
    };
    return cmocka_run_group_tests_name("pd_faults", tests, open_all, close_all);
}
