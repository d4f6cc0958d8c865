/* test_comm_shm.c - messages through shared memory (comm/shm.h): what stands in a segment is read only if it is of
 * this epoch and ticket, and within the segment; whose segments are attached; who sleeps is woken. */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/progress.h"
#include "comm/preflight.h"
#include "comm/shm.h"
#include "comm/stream_internal.h"
#include "comm_cases.h"

enum { WORLD = 3, LATE_MS = 30, FAR_MS = 60000 };

static const hd_message_limits usual = {
    .world = WORLD, .epoch = 5, .max_bytes = 1 << 20, .key = {3, 4}
};

/* Ranks of this process, each with its own mapping of every segment. */
typedef struct ranks {
    hd_message_limits limits[WORLD];
    comm_shm *at[WORLD];
} ranks;

static void open_ranks(ranks *r) {
    for (int32_t i = 0; i < WORLD; i++) {
        r->limits[i] = usual;
        assert_int_equal(comm_shm_open(&r->at[i], i, &r->limits[i], NULL), HD_OK);
    }
    for (int32_t i = 0; i < WORLD; i++) {
        for (int32_t k = 0; k < WORLD; k++) {
            if (i == k) continue;
            assert_int_equal(comm_shm_attach(r->at[i], k, comm_shm_number(r->at[k]), NULL),
                             HD_OK);
        }
    }
}

static void close_ranks(ranks *r) {
    for (int32_t i = 0; i < WORLD; i++) comm_shm_close(r->at[i]);
}

static bool send_as(ranks *r, int32_t from, int32_t to, hd_message_lane lane, uint64_t ticket,
                    const void *data, uint64_t n) {
    const hd_message m = {
        .group = HD_GROUP_EP,
        .lane = (uint8_t)lane,
        .ticket = ticket,
        .n = n,
        .shape = {(int32_t)ticket, 7, 0, -1}
    };
    return comm_shm_send(r->at[from], to, &m, data);
}

static comm_shm_news look_as(const ranks *r, int32_t own, int32_t from, hd_message_lane lane,
                             uint64_t ticket, hd_received *out) {
    return comm_shm_look(r->at[own], from, HD_GROUP_EP, lane, ticket, out);
}

/* ---- what is read ---- */

static void test_a_message_is_read_in_place(void **state) {
    (void)state;
    ranks r;
    hd_received got = {0};
    float x[3] = {1, 2, 3};
    open_ranks(&r);
    assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_DISPATCH, 6, &got), COMM_SHM_NONE);
    assert_true(send_as(&r, 1, 0, HD_MESSAGE_DISPATCH, 6, x, sizeof x));
    x[0] = 9; /* may change now */
    assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_DISPATCH, 6, &got), COMM_SHM_CAME);
    assert_true(got.full && got.head.from == 1 && got.head.n == sizeof x);
    assert_memory_equal(got.head.shape, ((int32_t[4]){6, 7, 0, -1}), 16);
    assert_memory_equal(got.data, ((float[3]){1, 2, 3}), sizeof x);
    /* another ticket, lane, receiver and sender */
    assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_DISPATCH, 10, &got), COMM_SHM_NONE);
    assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_COMBINE, 6, &got), COMM_SHM_NONE);
    assert_int_equal(look_as(&r, 2, 1, HD_MESSAGE_DISPATCH, 6, &got), COMM_SHM_NONE);
    assert_int_equal(look_as(&r, 0, 2, HD_MESSAGE_DISPATCH, 6, &got), COMM_SHM_NONE);
    assert_true(send_as(&r, 1, 0, HD_MESSAGE_DISPATCH, 7, NULL, 0));
    assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_DISPATCH, 7, &got), COMM_SHM_CAME);
    assert_true(got.data == NULL && got.head.n == 0);
    close_ranks(&r);
}

static void test_an_old_round_is_not_read(void **state) {
    (void)state;
    ranks r;
    hd_received got = {0};
    open_ranks(&r);
    assert_true(send_as(&r, 1, 0, HD_MESSAGE_COLLECTIVE, 0, "four", 4));
    r.limits[0].epoch++; /* rank 0 has begun anew */
    assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_COLLECTIVE, 0, &got), COMM_SHM_NONE);
    r.limits[0].epoch--;
    assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_COLLECTIVE, 0, &got), COMM_SHM_CAME);
    /* the ticket at the same place comes too early */
    assert_true(send_as(&r, 1, 0, HD_MESSAGE_COLLECTIVE, HD_COMM_MAX_INFLIGHT, "late", 4));
    assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_COLLECTIVE, 0, &got), COMM_SHM_WRONG);
    close_ranks(&r);
}

/* The words of the line of a message, of which the first is its flag, and then where its bytes are and how many. */
static uint64_t *line_of(void *segment, uint64_t ticket) {
    uint64_t *at = segment, flag = (uint64_t)usual.epoch << 32 | (ticket + 1);
    while (*at != flag) at++;
    return at;
}

static void test_bytes_outside_the_segment_are_not_read(void **state) {
    (void)state;
    ranks r;
    hd_received got = {0};
    open_ranks(&r);
    assert_true(send_as(&r, 1, 0, HD_MESSAGE_COMBINE, 40, "eight by", 8));
    void *segment = shmat(comm_shm_number(r.at[1]), NULL, 0);
    uint64_t *line = line_of(segment, 40);
    const uint64_t at = line[1];
    const uint64_t wrong[][2] = {
        {1ull << 60,     8                  },
        {at,             usual.max_bytes + 1},
        {at + 1,         8                  },
        {at,             UINT64_MAX         },
        {UINT64_MAX - 3, 8                  }
    };
    for (size_t i = 0; i < HD_LEN(wrong); i++) {
        memcpy(line + 1, wrong[i], sizeof wrong[i]);
        assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_COMBINE, 40, &got), COMM_SHM_WRONG);
    }
    memcpy(line + 1, ((uint64_t[2]){at, 8}), 16);
    assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_COMBINE, 40, &got), COMM_SHM_CAME);
    shmdt(segment);
    close_ranks(&r);
}

/* ---- the order in which a message is written ---- */

#if defined __x86_64__ && !defined __SANITIZE_THREAD__ /* which puts signals off */

/* A message that rank 1 sends to rank 0, which looks after every instruction of it. */
static struct {
    const ranks *r;
    uint64_t ticket;
    const char *bytes;
    int32_t n_steps, n_came, n_wrong;
} watched;

static void look_at_step(int number) {
    hd_received got = {0};
    (void)number;
    watched.n_steps++;
    const comm_shm_news news =
        look_as(watched.r, 0, 1, HD_MESSAGE_DISPATCH, watched.ticket, &got);
    if (news == COMM_SHM_NONE) return;
    const size_t n = strlen(watched.bytes);
    watched.n_came++;
    watched.n_wrong += news != COMM_SHM_CAME || got.head.n != n || !got.data ||
                       memcmp(got.data, watched.bytes, n) != 0 ||
                       got.head.shape[0] != (int32_t)watched.ticket;
}

static void step_by_step(bool on) {
    enum { TRAP = 0x100 };
    const unsigned long long flags = __builtin_ia32_readeflags_u64();
    __builtin_ia32_writeeflags_u64(on ? flags | TRAP : flags & ~(unsigned long long)TRAP);
}

/* Its flag is written last: whoever sees it sees all of the message, also where another one was before. */
static void test_a_flag_is_written_last(void **state) {
    static const char *const bytes[] = {"one", "another",
                                        "a message that is longer than those"};
    struct sigaction before, trap = {.sa_handler = look_at_step};
    ranks r;
    (void)state;
    open_ranks(&r);
    assert_int_equal(sigaction(SIGTRAP, &trap, &before), 0);
    for (uint64_t i = 0; i < 9; i++) {
        watched.r = &r;
        watched.ticket = 2 + i * HD_COMM_MAX_INFLIGHT; /* of one place */
        watched.bytes = bytes[i % HD_LEN(bytes)];
        watched.n_steps = watched.n_came = watched.n_wrong = 0;
        step_by_step(true);
        const bool sent = send_as(&r, 1, 0, HD_MESSAGE_DISPATCH, watched.ticket, watched.bytes,
                                  strlen(watched.bytes));
        step_by_step(false);
        assert_true(sent && watched.n_steps > 50);
        assert_true(watched.n_came > 0 && watched.n_came < watched.n_steps);
        if (watched.n_wrong) fail_msg("a flag is there before its message");
    }
    sigaction(SIGTRAP, &before, NULL);
    close_ranks(&r);
}

#else

static void test_a_flag_is_written_last(void **state) {
    (void)state;
    skip();
}

#endif

/* ---- rooms ---- */

/* Messages of a ticket to several ranks stay until all have been read, though their rooms grow. */
static void test_bytes_stay_where_they_are(void **state) {
    (void)state;
    enum { TICKETS = 40, LANES = 2 };
    ranks r;
    hd_received got[LANES][WORLD];
    memset(got, 0, sizeof got);
    open_ranks(&r);
    for (uint64_t ticket = 0; ticket < TICKETS; ticket++) {
        for (int32_t lane = 0; lane < LANES; lane++) {
            for (int32_t to = 1; to < WORLD; to++) {
                const uint64_t n =
                    1 + comm_draw(ticket + 100, lane * WORLD + to, 1 << (ticket / 3 + 1));
                uint8_t *at =
                    comm_shm_room(r.at[0], HD_GROUP_EP,
                                  HD_MESSAGE_DISPATCH + (hd_message_lane)lane, ticket, n);
                memset(at, (int)(16 * ticket) + 4 * lane + to, n);
                assert_true(send_as(&r, 0, to, HD_MESSAGE_DISPATCH + (hd_message_lane)lane,
                                    ticket, at, n));
            }
        }
        for (int32_t lane = 0; lane < LANES; lane++) {
            for (int32_t to = 1; to < WORLD; to++) {
                hd_received *g = &got[lane][to];
                assert_int_equal(
                    look_as(&r, to, 0, HD_MESSAGE_DISPATCH + (hd_message_lane)lane, ticket, g),
                    COMM_SHM_CAME);
                const uint8_t *bytes = g->data;
                for (uint64_t i = 0; i < g->head.n; i++) {
                    assert_int_equal(
                        bytes[i], (uint8_t)(16 * ticket + 4 * (uint64_t)lane + (uint64_t)to));
                }
            }
        }
    }
    close_ranks(&r);
}

/* Memory of a segment, as the system counts it. */
static uint64_t resident_bytes(int32_t number) {
    char line[512];
    FILE *f = fopen("/proc/sysvipc/shm", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        unsigned long long rss;
        int id;
        if (sscanf(line, "%*s %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", &id,
                   &rss) != 2 ||
            id != number)
            continue;
        fclose(f);
        return rss;
    }
    fail_msg("no segment %d in /proc/sysvipc/shm", number);
    return 0;
}

/* Messages of three lanes: large ones now and then, and with two tickets of each place the largest; the next one gives
 * back what was too small. */
static void test_rooms_take_the_memory_of_the_largest_messages(void **state) {
    (void)state;
    enum { TICKETS = 64, STEP = 1024, LAST = TICKETS - 2 * HD_COMM_MAX_INFLIGHT };
    static const struct {
        hd_message_lane lane;
        int32_t messages; /* of a ticket */
    } lanes[] = {
        {HD_MESSAGE_COLLECTIVE, 7},
        {HD_MESSAGE_DISPATCH,   7},
        {HD_MESSAGE_COMBINE,    1}
    };
    const comm_shm_most none = {0};
    comm_shm_most most = {0};
    ranks r;
    open_ranks(&r);
    for (uint64_t ticket = 0; ticket < TICKETS + HD_COMM_MAX_INFLIGHT; ticket++) {
        const bool large = ticket < TICKETS && (ticket >= LAST || ticket % 3 == 0);
        const uint64_t n = !large ? STEP / 2 : (ticket < LAST ? ticket + 1 : TICKETS) * STEP;
        for (size_t i = 0; i < HD_LEN(lanes); i++) {
            for (int32_t k = 0; k < lanes[i].messages; k++) {
                void *room = comm_shm_room(r.at[0], HD_GROUP_EP, lanes[i].lane, ticket, n);
                assert_non_null(room);
                memset(room, 1, n);
            }
            most.bytes[HD_GROUP_EP][lanes[i].lane] =
                (uint64_t)lanes[i].messages * TICKETS * STEP;
        }
    }
    const uint64_t fixed = comm_shm_memory(&none, WORLD);
    const uint64_t rooms = comm_shm_memory(&most, WORLD) - fixed;
    const uint64_t lines = fixed - 2 * (WORLD - 1) * HD_PREFLIGHT_BYTES;
    const uint64_t taken = resident_bytes(comm_shm_number(r.at[0]));
    assert_int_equal(rooms, (2 * 7 + HD_COMM_MAX_INFLIGHT * (7 + 1)) * TICKETS * STEP);
    if (taken * 100 < rooms * 99 || taken > rooms + lines)
        fail_msg("%llu bytes are taken, rooms have %llu", (unsigned long long)taken,
                 (unsigned long long)rooms);
    close_ranks(&r);
}

static void read_for(ranks *r, int32_t who, int64_t ns, int32_t times) {
    for (int32_t i = 0; i < times; i++) comm_shm_was_read(r->at[who], COMM_SHM_LONG, ns);
}

/* Who reads several long messages slowly has the others stream theirs, and looks again later. */
static void test_slow_reads_are_streamed(void **state) {
    (void)state;
    enum { SLOW_NS = COMM_SHM_LONG, FAST_NS = COMM_SHM_LONG / 40, LIMIT = 100000 };
    ranks r;
    open_ranks(&r);
    read_for(&r, 1, SLOW_NS, 3);
    read_for(&r, 1, FAST_NS, 1);
    read_for(&r, 1, SLOW_NS, 3);
    for (int32_t i = 0; i < 99; i++) comm_shm_was_read(r.at[1], COMM_SHM_LONG - 1, 1 << 30);
    assert_false(comm_shm_streams(r.at[0], COMM_SHM_LONG));
    read_for(&r, 1, SLOW_NS, 1);
    assert_true(comm_shm_streams(r.at[0], COMM_SHM_LONG));
    assert_true(comm_shm_streams(r.at[2], 1 << 20));
    assert_false(comm_shm_streams(r.at[0], COMM_SHM_LONG - 1));
    assert_false(comm_shm_streams(r.at[1], COMM_SHM_LONG)); /* its own reading */
    int32_t n = 0;
    while (comm_shm_streams(r.at[0], COMM_SHM_LONG) && n++ < LIMIT) read_for(&r, 1, FAST_NS, 1);
    assert_true(n > 3 && n < LIMIT);
    close_ranks(&r);
}

static void test_what_is_streamed_is_the_same(void **state) {
    (void)state;
    enum { MOST = 300, AROUND = 40 };
    uint8_t from[MOST + AROUND], to[MOST + AROUND];
    for (int32_t i = 0; i < MOST + AROUND; i++) from[i] = (uint8_t)comm_draw(9, i, 255);
    for (int32_t n = 0; n < MOST; n += 1 + n / 40) {
        const int32_t a = (int32_t)comm_draw(10, n, 17), b = (int32_t)comm_draw(11, n, 17);
        memset(to, 255, sizeof to);
        comm_stream(to + a, from + b, (size_t)n);
        assert_memory_equal(to + a, from + b, (size_t)n);
        for (int32_t i = 0; i < MOST + AROUND; i++) {
            if (i < a || i >= a + n) assert_int_equal(to[i], 255);
        }
    }
}

static void test_a_full_segment_takes_no_more(void **state) {
    (void)state;
    static uint8_t most[1 << 20];
    ranks r;
    open_ranks(&r);
    assert_null(
        comm_shm_room(r.at[0], HD_GROUP_TP, HD_MESSAGE_COMBINE, 0, usual.max_bytes + 1));
    int32_t n = 0;
    while (comm_shm_room(r.at[0], HD_GROUP_TP, HD_MESSAGE_COMBINE, 0, usual.max_bytes)) n++;
    assert_true(n > 4 && n < 17);
    while (send_as(&r, 0, 1, HD_MESSAGE_DISPATCH, 0, most, sizeof most)) n++;
    assert_true(n < 17);
    close_ranks(&r);
}

/* ---- whose segments are attached ---- */

static void refuses(comm_shm *s, int32_t number, const char *why) {
    hd_err err = {0};
    assert_int_equal(comm_shm_attach(s, 1, number, &err), HD_EUNSUPPORTED);
    if (!strstr(err.msg, why)) fail_msg("'%s' is not in '%s'", why, err.msg);
}

static void test_segments_of_others_are_refused(void **state) {
    (void)state;
    const hd_message_limits later = {
        .world = WORLD, .epoch = 6, .max_bytes = 1 << 20, .key = {3, 4}
    };
    const hd_message_limits world = {
        .world = WORLD, .epoch = 5, .max_bytes = 1 << 20, .key = {3, 5}
    };
    const hd_message_limits less = {
        .world = WORLD, .epoch = 5, .max_bytes = 1 << 19, .key = {3, 4}
    };
    const hd_message_limits *of[] = {&later, &world, &less};
    const char *why[] = {"of another epoch", "of another host, or", "rank 1 shares"};
    comm_shm *own, *other;
    assert_int_equal(comm_shm_open(&own, 0, &usual, NULL), HD_OK);
    for (size_t i = 0; i < HD_LEN(of); i++) {
        assert_int_equal(comm_shm_open(&other, 1, of[i], NULL), HD_OK);
        refuses(own, comm_shm_number(other), why[i]);
        comm_shm_close(other);
    }
    assert_int_equal(comm_shm_open(&other, 2, &usual, NULL), HD_OK); /* another rank's */
    refuses(own, comm_shm_number(other), "of another host, or");
    const int32_t gone = comm_shm_number(other);
    comm_shm_close(other);
    refuses(own, gone, "not of this host");
    refuses(own, -1, "not of this host");
    const int32_t open_to_all = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0666);
    refuses(own, open_to_all, "of this user alone");
    shmctl(open_to_all, IPC_RMID, NULL);
    comm_shm_close(own);
}

static void test_a_killed_rank_leaves_no_segment(void **state) {
    (void)state;
    struct shmid_ds is;
    int32_t number = -1;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        comm_shm *s;
        if (comm_shm_open(&s, 0, &usual, NULL) == HD_OK) number = comm_shm_number(s);
        if (write(ends[1], &number, sizeof number) == sizeof number) pause();
        _exit(1);
    }
    assert_int_equal(read(ends[0], &number, sizeof number), sizeof number);
    const int found = shmctl(number, IPC_STAT, &is);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    assert_int_equal(found, 0);
    assert_true(is.shm_perm.mode & SHM_DEST);
    assert_int_equal(shmctl(number, IPC_STAT, &is), -1);
    close(ends[0]);
    close(ends[1]);
}

/* ---- sleeping ---- */

typedef struct waker {
    ranks *r;
    bool sends;
} waker;

static void *wake_late(void *arg) {
    const waker *w = arg;
    comm_sleep_ms(LATE_MS);
    if (w->sends)
        send_as(w->r, 1, 0, HD_MESSAGE_COLLECTIVE, 0, "word", 4);
    else
        comm_shm_wake(w->r->at[0]);
    return NULL;
}

static void test_who_sleeps_is_woken(void **state) {
    (void)state;
    for (int sends = 0; sends < 2; sends++) {
        ranks r;
        pthread_t thread;
        hd_received got = {0};
        waker w = {&r, sends};
        open_ranks(&r);
        const uint32_t bell = comm_shm_lie_down(r.at[0], 1);
        pthread_create(&thread, NULL, wake_late, &w);
        const int64_t before = hd_now_ns(), used = comm_cpu_time_ns();
        comm_shm_sleep(r.at[0], bell, FAR_MS);
        comm_shm_get_up(r.at[0]);
        assert_true(hd_now_ns() - before < FAR_MS / 2 * 1000000LL);
        assert_true(comm_cpu_time_ns() - used < LATE_MS * 1000000LL / 2);
        assert_int_equal(look_as(&r, 0, 1, HD_MESSAGE_COLLECTIVE, 0, &got),
                         sends ? COMM_SHM_CAME : COMM_SHM_NONE);
        pthread_join(thread, NULL);
        close_ranks(&r);
    }
}

/* What comes between lying down and sleeping ends the sleep, too; other ranks' messages do not. */
static void test_no_wake_up_is_lost(void **state) {
    (void)state;
    ranks r;
    open_ranks(&r);
    const uint32_t bell = comm_shm_lie_down(r.at[0], 1);
    assert_true(send_as(&r, 2, 0, HD_MESSAGE_COLLECTIVE, 0, "word", 4));
    const int64_t before = hd_now_ns();
    comm_shm_sleep(r.at[0], bell, LATE_MS);
    assert_true(hd_now_ns() - before >= LATE_MS * 1000000LL);
    assert_true(send_as(&r, 1, 0, HD_MESSAGE_COLLECTIVE, 0, "word", 4));
    comm_shm_sleep(r.at[0], bell, -1);
    comm_shm_get_up(r.at[0]);
    close_ranks(&r);
}

/* ---- two at work ---- */

enum { ROUNDS = 50000, MOST = 40, LOOKS = 3000 };

typedef struct player {
    ranks *r;
    int32_t own, wrong;
} player;

/* Looks at once when the flag is set, if the other one has a core of its own; sleeps now and then. */
static void await(const player *p, int32_t from, uint64_t ticket, hd_received *out) {
    comm_shm *own = p->r->at[p->own];
    for (int32_t i = 1;; i++) {
        if (look_as(p->r, p->own, from, HD_MESSAGE_COLLECTIVE, ticket, out) == COMM_SHM_CAME)
            return;
        if (i % LOOKS) continue;
        const uint32_t bell = comm_shm_lie_down(own, from);
        if (look_as(p->r, p->own, from, HD_MESSAGE_COLLECTIVE, ticket, out) == COMM_SHM_NONE)
            comm_shm_sleep(own, bell, -1);
        comm_shm_get_up(own);
    }
}

/* An exchange after the other, as messages.c makes them: then no bytes change before they were read. */
static void *exchange(void *arg) {
    player *p = arg;
    const int32_t other = 1 - p->own;
    hd_received got = {0};
    for (uint64_t t = 0; t < ROUNDS; t++) {
        const uint64_t n = 1 + comm_draw(t, p->own, MOST), come = 1 + comm_draw(t, other, MOST);
        uint32_t *x =
            comm_shm_room(p->r->at[p->own], HD_GROUP_EP, HD_MESSAGE_COLLECTIVE, t, 4 * n);
        for (uint64_t i = 0; i < n; i++) x[i] = (uint32_t)(t * 31 + i);
        send_as(p->r, p->own, other, HD_MESSAGE_COLLECTIVE, t, x, 4 * n);
        await(p, other, t, &got);
        const uint32_t *y = got.data;
        p->wrong += got.head.n != 4 * come || got.head.shape[0] != (int32_t)t;
        for (uint64_t i = 0; i < come; i++) p->wrong += y[i] != (uint32_t)(t * 31 + i);
    }
    return NULL;
}

static void test_two_exchange_without_an_error(void **state) {
    (void)state;
    ranks r;
    pthread_t thread;
    player players[2] = {
        {&r, 0, 0},
        {&r, 1, 0}
    };
    open_ranks(&r);
    pthread_create(&thread, NULL, exchange, &players[1]);
    exchange(&players[0]);
    pthread_join(thread, NULL);
    assert_int_equal(players[0].wrong + players[1].wrong, 0);
    close_ranks(&r);
}

int test_comm_shm(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_message_is_read_in_place),
        cmocka_unit_test(test_an_old_round_is_not_read),
        cmocka_unit_test(test_bytes_outside_the_segment_are_not_read),
        cmocka_unit_test(test_a_flag_is_written_last),
        cmocka_unit_test(test_bytes_stay_where_they_are),
        cmocka_unit_test(test_rooms_take_the_memory_of_the_largest_messages),
        cmocka_unit_test(test_slow_reads_are_streamed),
        cmocka_unit_test(test_what_is_streamed_is_the_same),
        cmocka_unit_test(test_a_full_segment_takes_no_more),
        cmocka_unit_test(test_segments_of_others_are_refused),
        cmocka_unit_test(test_a_killed_rank_leaves_no_segment),
        cmocka_unit_test(test_who_sleeps_is_woken),
        cmocka_unit_test(test_no_wake_up_is_lost),
        cmocka_unit_test(test_two_exchange_without_an_error),
    };
    return cmocka_run_group_tests_name("comm_shm", tests, NULL, NULL);
}
