/* test_epochs.c - the epochs of a world (comm/rendezvous.h), explored exhaustively for three ranks: the code of the watch
 * (comm/watch.c) over every order of frames, turns of the watches and moves of the step threads, with one or two
 * faults at every point: a rank ends, is too slow, or gives up its step; one that ended comes back. A search in
 * depth over states that are copied. Frames lie in queues between the moves: a rank's sockets exist only while it moves. */
#include "check.h"

#include <sys/socket.h>
#include <unistd.h>

#include "base/siphash.h"
#include "comm/rendezvous_internal.h"
#include "fakes/seen_states.h"

enum { WORLD = 3, QUEUE = 16, FRAME = 512, ADDRESS = 8, LAST_EPOCH = 6 };

/* What a frame said, without what no rank reads. */
typedef struct frame {
    uint16_t kind;
    uint16_t n;
    uint8_t bytes[FRAME];
} frame;

/* From one rank to another; ended: the sender has closed it, or its process has ended. */
typedef struct queue {
    frame at[QUEUE];
    int32_t n;
    bool ended;
} queue;

typedef enum thread_state {
    JOINS,  /* waits to be let in */
    RUNS,   /* exchanges in an epoch */
    OFFERS, /* waits for the next one */
    LEAVES, /* has told that it finished */
    LEFT,
    GONE, /* rank 0 is lost, or has given up this rank */
    DEAD
} thread_state;

/* A process: what remains of its hd_rendezvous between two moves, and its step thread. */
typedef struct process {
    hd_rendezvous m; /* sockets: 0, or -1 */
    thread_state is;
    bool has_offered;
    uint32_t before; /* the epoch that its offer was made in */
    uint32_t over;   /* one more than the last epoch that has ended, as its thread knows */
    uint32_t told;   /* as its watch has told */
} process;

/* A state; a message of an exchange is as good as in the epoch that it was sent in. */
typedef struct world {
    process at[WORLD];
    queue to[WORLD][WORLD]; /* from, to: one of them is rank 0 */
    int32_t faults, returns;
    struct world *next; /* of the free ones */
} world;

typedef enum fault_kind { NONE, ENDS, IS_SLOW, GIVES_UP } fault_kind;

/* Of a rank, at any time, but once and after those before it. */
typedef struct fault {
    fault_kind kind;
    int32_t of;
} fault;

enum { MAX_FAULTS = 2 };

/* What is explored. */
typedef struct scenario {
    fault faults[MAX_FAULTS];
    bool returns; /* a rank that ended comes back, once */
    bool leaves;  /* at any time all leave */
} scenario;

static scenario sc;
static int64_t n_states, n_ends;
static uint32_t most_epoch;

/* ---- copies ---- */

/* Everything but the 61 connections that this world has not, and those that wait at the door. */
static void copy_process(process *to, const process *from) {
    const size_t a = offsetof(hd_rendezvous, to), c = offsetof(hd_rendezvous, table);
    memcpy(&to->m, &from->m, a);
    for (int32_t i = 0; i < WORLD; i++) to->m.to[i] = from->m.to[i];
    memcpy((char *)&to->m + c, (const char *)&from->m + c, sizeof to->m - c);
    memcpy((char *)to + sizeof to->m, (const char *)from + sizeof to->m,
           sizeof *to - sizeof to->m);
}

static void copy_address(rendezvous_address *a) {
    const rendezvous_address from = *a;
    *a = (rendezvous_address){0};
    if (from.data) assert_int_equal(rendezvous_keep(a, from.data, from.n, NULL), HD_OK);
}

static world *free_worlds;

static world *take_world(void) {
    world *w = free_worlds;
    if (w) free_worlds = w->next;
    if (!w) w = calloc(1, sizeof *w);
    assert_non_null(w);
    return w;
}

static world *copy_world(const world *from) {
    world *w = take_world();
    for (int32_t i = 0; i < WORLD; i++) {
        copy_process(&w->at[i], &from->at[i]);
        for (int32_t k = WORLD; k < HD_CHANNEL_MAX_RANKS; k++) w->at[i].m.to[k].fd = -1;
        copy_address(&w->at[i].m.own);
        for (int32_t k = 0; k < WORLD; k++) {
            copy_address(&w->at[i].m.table.at[k]);
            copy_address(&w->at[i].m.offer[k]);
        }
    }
    memcpy(w->to, from->to, sizeof *w - offsetof(world, to));
    return w;
}

static void forget_all(process *p) {
    rendezvous_forget(&p->m.own);
    for (int32_t k = 0; k < WORLD; k++) {
        rendezvous_forget(&p->m.table.at[k]);
        rendezvous_forget(&p->m.offer[k]);
    }
}

static void free_world(world *w) {
    for (int32_t i = 0; i < WORLD; i++) forget_all(&w->at[i]);
    w->next = free_worlds;
    free_worlds = w;
}

/* ---- sockets, while a rank moves ---- */

typedef struct sockets {
    int other[WORLD]; /* -1: none */
} sockets;

static sockets open_sockets(process *p) {
    sockets s;
    for (int32_t i = 0; i < WORLD; i++) {
        int pair[2];
        s.other[i] = -1;
        if (p->m.to[i].fd < 0) continue;
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
        p->m.to[i].fd = pair[0];
        s.other[i] = pair[1];
    }
    return s;
}

static bool read_n(int fd, void *to, size_t n) {
    const ssize_t got = n ? recv(fd, to, n, MSG_DONTWAIT) : 0;
    if (n && got <= 0) return false;
    assert_int_equal((size_t)got, n);
    return true;
}

/* What the rank sent lies in queues from now on. */
static void close_sockets(world *w, int32_t rank, const sockets *s) {
    process *p = &w->at[rank];
    for (int32_t i = 0; i < WORLD; i++) {
        queue *q = &w->to[rank][i];
        hd_frame head;
        if (s->other[i] < 0) continue;
        while (read_n(s->other[i], &head, sizeof head)) {
            assert_true(q->n < QUEUE && sizeof head + head.n <= FRAME);
            frame *f = &q->at[q->n++];
            *f = (frame){.kind = head.kind, .n = (uint16_t)(sizeof head + head.n)};
            memcpy(f->bytes, &head, sizeof head);
            assert_true(head.n == 0 || read_n(s->other[i], f->bytes + sizeof head, head.n));
        }
        hd_channel *c = &p->m.to[i];
        q->ended |= c->fd < 0 || p->m.ended; /* closed, or shut */
        if (c->fd >= 0) {
            assert_int_equal(c->have, 0);
            close(c->fd);
            free(c->payload);
            c->payload = NULL;
            c->fd = 0;
        }
        close(s->other[i]);
    }
}

/* ---- moves ---- */

static process *acting; /* whose code runs */

/* Of ucx_end_here(): what has ended stays ended. Each epoch ends once. */
static void on_end(void *ctx, uint32_t epoch, const char *why) {
    (void)ctx, (void)why;
    if (epoch != acting->m.table.epoch) fail_msg("the end of epoch %u is told late", epoch);
    if (epoch < acting->told && !acting->m.ended) fail_msg("epoch %u has ended twice", epoch);
    acting->told = epoch + 1;
    if (epoch + 1 > acting->over) acting->over = epoch + 1;
}

static bool is_over(const process *p) {
    return p->over > p->m.table.epoch;
}

static void offer(process *p, int32_t rank) {
    const uint32_t says[2] = {p->m.table.epoch, (uint32_t)rank};
    p->before = p->m.table.epoch;
    assert_true(rendezvous_offer(&p->m, says, sizeof says));
    p->is = OFFERS;
    p->has_offered = true;
}

static void turn(world *w, int32_t rank) {
    acting = &w->at[rank];
    const sockets s = open_sockets(acting);
    rendezvous_look(&acting->m);
    close_sockets(w, rank, &s);
}

static void make_links(process *p, int32_t rank, int32_t with) {
    uint64_t key[2];
    hd_channel_key(key, NULL);
    hd_channel_init(&p->m.to[with], 0, rank == 0, key);
}

static void begin_process(process *p, int32_t rank) {
    forget_all(p);
    memset(p, 0, sizeof *p);
    p->m.o = (hd_rendezvous_options){.rank = rank, .world = WORLD, .silence_ms = 1000};
    p->m.lost = on_end;
    pthread_mutex_init(&p->m.mutex, NULL);
    pthread_cond_init(&p->m.news, NULL);
    p->m.wake[0] = p->m.wake[1] = -1;
    for (int32_t k = 0; k < HD_CHANNEL_MAX_RANKS; k++) p->m.to[k].fd = -1;
}

/* The process ends: what it has sent may still arrive. */
static void end_process(world *w, int32_t rank, thread_state as) {
    process *p = &w->at[rank];
    for (int32_t i = 0; i < WORLD; i++) {
        if (p->m.to[i].fd < 0) continue;
        w->to[rank][i].ended = true;
        w->to[i][rank].n = 0;
        p->m.to[i].fd = -1;
    }
    forget_all(p);
    p->is = as;
}

/* It joins, as rendezvous_door_serve() and visit() do. */
static void return_process(world *w, int32_t rank) {
    const hd_place here = {0};
    process *first = &w->at[0];
    hd_channel c;
    uint64_t key[2];
    begin_process(&w->at[rank], rank);
    w->to[rank][0] = w->to[0][rank] = (queue){0};
    make_links(&w->at[rank], rank, 0);
    w->at[rank].is = JOINS;
    hd_channel_key(key, NULL);
    hd_channel_init(&c, 0, true, key);
    const uint32_t says[2] = {0, (uint32_t)rank};
    assert_int_equal(rendezvous_keep(&first->m.offer[rank], says, sizeof says, NULL), HD_OK);
    rendezvous_admit(&first->m, rank, &c, &here);
    acting = first;
    const sockets s = open_sockets(first);
    rendezvous_welcome(&first->m, 1ull << rank);
    close_sockets(w, 0, &s);
    w->returns++;
}

/* The next frame, or the end, of the connection comes. */
static void deliver(world *w, int32_t from, int32_t to) {
    queue *q = &w->to[from][to];
    process *p = &w->at[to];
    acting = p;
    const sockets s = open_sockets(p);
    if (q->n) {
        assert_int_equal(send(s.other[from], q->at[0].bytes, q->at[0].n, 0), q->at[0].n);
        memmove(q->at, q->at + 1, (size_t)--q->n * sizeof q->at[0]);
    } else {
        shutdown(s.other[from], SHUT_WR);
    }
    if (p->is == JOINS) { /* as await() */
        hd_channel *c = &p->m.to[0];
        const hd_status st = hd_channel_read(c, NULL);
        if (st == HD_OK && c->head.kind == HD_FRAME_WELCOME) {
            p->m.over = true;
            p->over = 1; /* come_late() */
            p->is = RUNS;
        } else {
            assert_int_not_equal(st, HD_EAGAIN);
            hd_channel_close(c);
            p->is = GONE;
        }
    } else if (p->m.ended) { /* as drain() */
        if (q->ended && !q->n) hd_channel_close(&p->m.to[from]);
    } else {
        rendezvous_take_frames(&p->m, from);
    }
    close_sockets(w, to, &s);
}

/* What the step thread becomes by what it sees; the same: it sees nothing. */
static thread_state see_news(const process *p) {
    hd_rendezvous_news news;
    if (p->is == LEAVES && (p->m.done || is_over(p))) return LEFT;
    if (p->is != OFFERS || !rendezvous_has_news(&p->m, p->before, &news)) return p->is;
    return news == HD_RENDEZVOUS_EPOCH ? RUNS : news == HD_RENDEZVOUS_LEFT ? LEFT : GONE;
}

/* ---- what must hold ---- */

static uint32_t members_of(const process *p) {
    uint32_t members = 0;
    for (int32_t i = 0; i < WORLD; i++) members |= p->m.table.at[i].data ? 1u << i : 0;
    return members;
}

static bool exchanges(const process *p) {
    return (p->is == RUNS || p->is == LEAVES) && p->m.table.epoch && !is_over(p);
}

/* Ranks in one epoch exchange: with the same members, of which they are, and the same secret; with addresses that
 * were offered after the last one. There are no more epochs than there were reasons for. */
static void check(const world *w) {
    const process *first = &w->at[0];
    for (int32_t i = 0; i < WORLD; i++) {
        const process *p = &w->at[i];
        const uint32_t epoch = p->m.table.epoch;
        if (epoch > most_epoch) most_epoch = epoch;
        if (p->is == DEAD) continue;
        if (first->is != DEAD && epoch > first->m.table.epoch)
            fail_msg("rank %d is in epoch %u before rank 0", i, epoch);
        if (epoch > 1u + (uint32_t)(w->faults + w->returns))
            fail_msg("epoch %u after %d faults and %d returns", epoch, w->faults, w->returns);
        if (!exchanges(p)) continue;
        if (!(members_of(p) >> i & 1)) fail_msg("rank %d is in epoch %u", i, epoch);
        if (epoch > 1 && !p->has_offered) fail_msg("rank %d still loads", i);
        for (int32_t k = 0; k < WORLD; k++) {
            const process *q = &w->at[k];
            uint32_t says[2];
            const rendezvous_address *a = &p->m.table.at[k];
            if (a->data) memcpy(says, a->data, sizeof says);
            if (a->data && says[0] >= epoch) fail_msg("an address of epoch %u", says[0]);
            if (k == i || !exchanges(q) || q->m.table.epoch != epoch) continue;
            if (members_of(p) != members_of(q) ||
                memcmp(p->m.table.session, q->m.table.session, sizeof p->m.table.session))
                fail_msg("ranks %d and %d are in different epochs %u", i, k, epoch);
        }
    }
    if (!sc.leaves && first->m.n_losses > (uint64_t)w->faults)
        fail_msg("a rank that lives is lost");
}

static bool has_fault(fault_kind kind) {
    return sc.faults[0].kind == kind || sc.faults[1].kind == kind;
}

/* Nothing can happen any more, but for faults. */
static void check_end(const world *w) {
    const process *first = &w->at[0];
    const bool first_is_here = first->is != DEAD && first->is != LEFT;
    n_ends++;
    for (int32_t i = 0; i < WORLD; i++) {
        const process *p = &w->at[i];
        if (p->is == DEAD || (p->is == GONE && (!first_is_here || has_fault(IS_SLOW))))
            continue;
        if (sc.leaves && p->is == LEFT) continue;
        if (!sc.leaves && exchanges(p) && p->m.table.epoch == first->m.table.epoch) continue;
        fail_msg("rank %d ends in state %d of epoch %u, which %s", i, (int)p->is,
                 p->m.table.epoch, is_over(p) ? "is over" : "goes on");
    }
}

/* ---- exploring ---- */

enum { TABLE = 1 << 17 };

static uint64_t *seen; /* [TABLE] keys of states; 0: free */

static void add_queue(hd_siphash *s, const queue *q) {
    hd_siphash_add(s, &(const int32_t[]){q->n, q->ended}, 2 * sizeof(int32_t));
    for (int32_t i = 0; i < q->n; i++) {
        const frame *f = &q->at[i];
        uint8_t says[2 + 4] = {(uint8_t)f->kind};
        if (f->kind == HD_FRAME_LOST || f->kind == HD_FRAME_READY)
            memcpy(says + 2, f->bytes + sizeof(hd_frame), 4);
        if (f->kind == HD_FRAME_TABLE)
            memcpy(says + 2, f->bytes + sizeof(hd_frame) + HD_CHANNEL_NONCE, 4);
        hd_siphash_add(s, says, sizeof says);
    }
}

static void add_address(hd_siphash *s, const rendezvous_address *a) {
    uint32_t says = 0;
    if (a->data) memcpy(&says, a->data, sizeof says);
    says = a->data ? says + 1 : 0;
    hd_siphash_add(s, &says, sizeof says);
}

static bool is_late(const hd_rendezvous *m) {
    return m->o.rank == 0 && m->over && rendezvous_now_ms() - m->over_ms > 1800000;
}

static uint64_t key_of(const world *w) {
    hd_siphash s;
    hd_siphash_init(&s, (const uint64_t[2]){1, 2});
    for (int32_t i = 0; i < WORLD; i++) {
        const process *p = &w->at[i];
        const hd_rendezvous *m = &p->m;
        const int32_t says[] = {p->is,
                                (int32_t)p->before,
                                (int32_t)p->over,
                                (int32_t)p->told,
                                m->leaves,
                                m->done,
                                m->aborts,
                                m->gone,
                                m->over,
                                m->ended,
                                m->told,
                                (int32_t)is_late(m),
                                (int32_t)m->table.epoch,
                                m->left[0],
                                m->left[1],
                                m->left[2],
                                m->to[0].fd,
                                m->to[1].fd,
                                m->to[2].fd,
                                w->faults,
                                w->returns,
                                m->aborts ? (int32_t)m->abort_epoch : 0};
        hd_siphash_add(&s, says, sizeof says);
        add_address(&s, &m->own);
        for (int32_t k = 0; k < WORLD; k++) {
            add_address(&s, &m->table.at[k]);
            add_address(&s, &m->offer[k]);
            add_queue(&s, &w->to[i][k]);
        }
    }
    return hd_siphash_value(&s) | 1;
}

static bool is_new(const world *w) {
    if (!seen_states_add(seen, TABLE, key_of(w))) return false;
    assert_true(++n_states < TABLE / 2);
    return true;
}

static void explore(world *w);

/* Takes next. */
static void go_on(world *next) {
    if (is_new(next)) explore(next);
    free_world(next);
}

/* Rank 0 ends the others by a last command, in an epoch of which all are; or it leaves while it waits for the
 * next one. */
static bool may_leave(const world *w, int32_t i) {
    const process *p = &w->at[i], *first = &w->at[0];
    if (sc.leaves && i == 0 && p->is == OFFERS) return !p->m.leaves;
    if (!sc.leaves || p->is != RUNS || !exchanges(p)) return false;
    return i == 0 || ((first->is == LEAVES || first->is == LEFT) &&
                      first->m.table.epoch == p->m.table.epoch);
}

static bool move_thread(const world *w, int32_t i) {
    const process *p = &w->at[i];
    const thread_state becomes = see_news(p);
    const bool offers = p->is == RUNS && is_over(p);
    if (becomes == p->is && !offers && !may_leave(w, i)) return false;
    world *next = copy_world(w);
    process *q = &next->at[i];
    if (offers) {
        offer(q, i);
    } else if (becomes == LEFT && !q->m.done) {
        end_process(next, i, LEFT); /* hd_comm_ucx_close() */
    } else if (becomes != p->is) {
        q->is = becomes;
    } else {
        hd_rendezvous_leave(&q->m);
        if (q->is == RUNS) q->is = LEAVES;
    }
    go_on(next);
    return true;
}

static void move_by_fault(const world *w) {
    const fault f = w->faults < MAX_FAULTS ? sc.faults[w->faults] : (fault){0};
    const process *p = &w->at[f.of];
    if (f.kind == NONE || p->is == LEFT || p->is == DEAD) return;
    if (f.kind == GIVES_UP && !(p->is == RUNS && exchanges(p))) return;
    if (f.kind == IS_SLOW && (!w->at[0].m.over || w->at[0].is == DEAD)) return;
    world *next = copy_world(w);
    next->faults++;
    if (f.kind == ENDS) {
        end_process(next, f.of, DEAD);
    } else if (f.kind == IS_SLOW) {
        next->at[0].m.over_ms -= 3600000; /* more than the patience of rank 0 */
    } else {                              /* as ucx_end_all() */
        process *q = &next->at[f.of];
        q->over = q->m.table.epoch + 1;
        hd_rendezvous_abort(&q->m, "a step failed");
    }
    go_on(next);
}

/* A turn of a watch that finds nothing to do is none. */
static bool move_watch(const world *w, int32_t i) {
    const process *p = &w->at[i];
    if (p->is == DEAD || p->is == LEFT || p->is == GONE || p->is == JOINS) return false;
    world *next = copy_world(w);
    turn(next, i);
    const bool moved = key_of(next) != key_of(w);
    go_on(next);
    return moved;
}

static bool move_frames(const world *w, int32_t from, int32_t to) {
    const queue *q = &w->to[from][to];
    const process *p = &w->at[to];
    if (p->is == DEAD || p->is == LEFT || p->m.to[from].fd < 0 || (!q->n && !q->ended))
        return false;
    world *next = copy_world(w);
    deliver(next, from, to);
    go_on(next);
    return true;
}

static void expect_same(world *one, world *other, const char *what) {
    if (key_of(one) != key_of(other)) fail_msg("%s changed something", what);
    free_world(one);
    free_world(other);
}

/* Of a rank that gave up the epoch before, which its watch sees now. */
static void abort_late(const world *w, int32_t i) {
    world *with = copy_world(w), *without = copy_world(w);
    hd_rendezvous *m = &with->at[i].m;
    m->abort_epoch = m->table.epoch - 1;
    m->aborts = true;
    turn(with, i);
    turn(without, i);
    expect_same(with, without, "a step that failed in the epoch before");
}

/* Another rank says now that the epoch before has ended. */
static void lose_late(const world *w, int32_t from, int32_t to) {
    world *with = copy_world(w);
    process *p = &with->at[from];
    const uint32_t epoch = w->at[to].m.table.epoch - 1;
    const sockets s = open_sockets(p);
    assert_int_equal(
        hd_channel_send(&p->m.to[to], HD_FRAME_LOST, from, &epoch, sizeof epoch, 0, NULL),
        HD_OK);
    close_sockets(with, from, &s);
    deliver(with, from, to);
    expect_same(with, copy_world(w), "the end of the epoch before");
}

/* What comes late, from the epoch before, changes nothing. */
static void check_late(const world *w) {
    for (int32_t i = 0; i < WORLD; i++) {
        const process *p = &w->at[i];
        if (p->is == JOINS || p->is > LEAVES || p->m.ended || p->m.table.epoch < 2) continue;
        if (!p->m.aborts) abort_late(w, i);
        for (int32_t k = 0; k < WORLD; k++) {
            const queue *q = &w->to[k][i];
            if (p->m.to[k].fd < 0 || w->at[k].m.to[i].fd < 0 || q->n || q->ended) continue;
            lose_late(w, k, i);
        }
    }
}

static void explore(world *w) {
    bool moved = false;
    check(w);
    check_late(w);
    for (int32_t i = 0; i < WORLD; i++) {
        moved |= move_thread(w, i);
        moved |= move_watch(w, i);
        for (int32_t k = 0; k < WORLD; k++) moved |= move_frames(w, i, k);
        /* rank 0 has noticed that it ended */
        if (!sc.returns || w->at[i].is != DEAD || w->returns || w->at[0].m.to[i].fd >= 0)
            continue;
        if (w->at[0].is == DEAD || w->at[0].m.ended) continue;
        world *next = copy_world(w);
        return_process(next, i);
        go_on(next);
        moved = true;
    }
    if (!moved) check_end(w);
    move_by_fault(w);
}

/* As hd_rendezvous_open() leaves three ranks. */
static world *first_epoch(void) {
    world *w = take_world();
    for (int32_t i = 0; i < WORLD; i++) {
        process *p = &w->at[i];
        begin_process(p, i);
        for (int32_t k = 0; k < WORLD; k++) {
            if ((i == 0) != (k == 0)) make_links(p, i, k);
            const uint32_t says[2] = {0, (uint32_t)k};
            if (i == 0)
                assert_int_equal(rendezvous_keep(&p->m.offer[k], says, sizeof says, NULL),
                                 HD_OK);
        }
        p->is = RUNS;
    }
    acting = &w->at[0];
    const sockets s = open_sockets(acting);
    assert_int_equal(rendezvous_send_table(&acting->m, &acting->m.table, NULL), HD_OK);
    close_sockets(w, 0, &s);
    for (int32_t i = 1; i < WORLD; i++) {
        process *p = &w->at[i];
        const sockets t = open_sockets(p);
        hd_channel *c = &p->m.to[0];
        queue *q = &w->to[0][i];
        assert_int_equal(send(t.other[0], q->at[0].bytes, q->at[0].n, 0), q->at[0].n);
        q->n = 0;
        assert_int_equal(hd_channel_read(c, NULL), HD_OK);
        assert_int_equal(rendezvous_read_table(&p->m, &p->m.table, c->payload, c->head.n, NULL),
                         HD_OK);
        close_sockets(w, i, &t);
    }
    return w;
}

static void run(scenario s, uint32_t epochs) {
    sc = s;
    n_states = n_ends = 0;
    most_epoch = 0;
    memset(seen, 0, TABLE * sizeof *seen);
    world *w = first_epoch();
    explore(w);
    free_world(w);
    assert_true(n_ends > 0);
    assert_int_equal(most_epoch, epochs);
}

/* The second one comes before, within and after the epoch that the first one ends. */
static scenario fail_twice(fault_kind first, int32_t i, fault_kind second, int32_t k) {
    scenario twice = {.returns = false};
    twice.faults[0] = (fault){first, i};
    twice.faults[1] = (fault){second, k};
    return twice;
}

static void ranks_leave(void **state) {
    (void)state;
    run((scenario){.leaves = true}, 1);
}

static void a_rank_fails_while_they_leave(void **state) {
    (void)state;
    for (int32_t i = 0; i < WORLD; i++) {
        scenario ends = fail_twice(ENDS, i, NONE, 0),
                 gives_up = fail_twice(GIVES_UP, i, NONE, 0);
        ends.leaves = gives_up.leaves = true;
        run(ends, i ? 2 : 1);
        run(gives_up, 2);
    }
}

static void two_ranks_fail(void **state) {
    (void)state;
    for (int32_t i = 0; i < WORLD; i++) {
        for (int32_t k = 0; k < WORLD; k++) {
            run(fail_twice(GIVES_UP, i, GIVES_UP, k), 3);
            run(fail_twice(GIVES_UP, i, ENDS, k), k ? 3 : 2);
            if (i == k) continue;
            run(fail_twice(ENDS, i, GIVES_UP, k), i ? 3 : 1);
            run(fail_twice(ENDS, i, ENDS, k), i && k ? 3 : i ? 2 : 1);
        }
    }
}

static void a_rank_is_too_slow(void **state) {
    (void)state;
    for (int32_t i = 0; i < WORLD; i++) run(fail_twice(GIVES_UP, i, IS_SLOW, 0), 2);
}

static void a_rank_comes_back(void **state) {
    (void)state;
    for (int32_t i = 0; i < WORLD; i++) {
        scenario gives_up = fail_twice(ENDS, 1, GIVES_UP, i);
        scenario ends = fail_twice(ENDS, 1, i == 1 ? NONE : ENDS, i);
        gives_up.returns = ends.returns = true;
        run(gives_up, 4);
        run(ends, i == 2 ? 4 : 3);
    }
}

static int take_table_of_states(void **state) {
    (void)state;
    seen = calloc(TABLE, sizeof *seen);
    return seen ? 0 : -1;
}

static int free_table_of_states(void **state) {
    (void)state;
    for (world *w = free_worlds, *next; w; w = next) {
        next = w->next;
        free(w);
    }
    free(seen);
    return 0;
}

int test_epochs(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_leave),       cmocka_unit_test(a_rank_fails_while_they_leave),
        cmocka_unit_test(two_ranks_fail),    cmocka_unit_test(a_rank_is_too_slow),
        cmocka_unit_test(a_rank_comes_back),
    };
    return cmocka_run_group_tests_name("epochs", tests, take_table_of_states,
                                       free_table_of_states);
}
