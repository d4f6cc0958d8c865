/* shm.c - see shm.h. */
#define _GNU_SOURCE
#include "comm/shm.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/memory.h"
#include "base/siphash.h"
#include "comm/preflight.h"

enum {
    VERSION = 1,
    PAGE = 4096,
    PLACES = (int)HD_N_GROUPS * (int)HD_N_MESSAGE_LANES * (int)HD_COMM_MAX_INFLIGHT,
    LARGEST = 16, /* messages of the largest size for which a segment has addresses */
    SLOW =
        8, /* bytes per ns; near cores read at 40, far ones at 2.4, what was streamed at 25 */
    SLOW_IN_A_ROW = 4, /* interruptions look like one */
    STREAMED = 512,    /* long messages until it looks again */
    NONE = -1
};

/* What a message says. flag: its epoch and ticket. */
typedef struct line {
    _Alignas(HD_CACHE_LINE) _Atomic uint64_t flag;
    uint64_t at, n; /* where its bytes are in the segment */
    int32_t shape[4];
} line;

typedef struct segment {
    uint64_t word;                                 /* proves which one it is */
    _Alignas(HD_CACHE_LINE) _Atomic uint32_t bell; /* the others count it up */
    _Atomic int32_t sleeps_for;                    /* the rank whose message the owner awaits */
    _Atomic int32_t core;                          /* where the owner sent from last */
    _Atomic int32_t reads_slowly; /* the owner, what is in the others' caches */
    line lines[];                 /* [world, PLACES], by receiver */
} segment;

/* Where the bytes of a place's messages are written. */
typedef struct room {
    uint64_t at, bytes, used;
    uint64_t ticket; /* of what is there, + 1 */
    /* What this ticket had before, which became too small: a room, and those from `run` to `at`. */
    uint64_t old, old_bytes, run;
} room;

struct comm_shm {
    const hd_message_limits *limits;
    int32_t rank, number;
    uint64_t bytes, end;    /* of each segment; of this rank's rooms */
    int32_t slow, streamed; /* long messages: slow ones in a row; until this rank looks again */
    segment *own, *of[HD_MESSAGE_MAX_RANKS];
    room rooms[PLACES];
};

/* ---- segments ---- */

static int32_t place_of(hd_group group, hd_message_lane lane, uint64_t ticket) {
    const int32_t row = (int32_t)group * (int32_t)HD_N_MESSAGE_LANES + (int32_t)lane;
    return row * HD_COMM_MAX_INFLIGHT + (int32_t)(ticket % HD_COMM_MAX_INFLIGHT);
}

/* Never 0, which is what a new segment has. */
static uint64_t flag_of(const comm_shm *s, uint64_t ticket) {
    return (uint64_t)s->limits->epoch << 32 | (uint32_t)(ticket + 1);
}

static uint64_t whole_pages(uint64_t bytes) {
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static uint64_t first_room(int32_t world) {
    return whole_pages(sizeof(segment) + (size_t)world * PLACES * sizeof(line));
}

/* Rooms of a lane of a group, which tickets take by turns. */
static uint64_t n_rooms(hd_message_lane lane) {
    return lane == HD_MESSAGE_COLLECTIVE ? 2 : HD_COMM_MAX_INFLIGHT;
}

/* The preflight sends every other rank bytes with each of two tickets, which come only once. */
static uint64_t preflight_memory(int32_t world) {
    const uint64_t each =
        world > HD_PREFLIGHT_MANY ? HD_PREFLIGHT_BYTES_OF_MANY : HD_PREFLIGHT_BYTES;
    return 2 * (uint64_t)(world - 1) * each;
}

uint64_t comm_shm_memory(const comm_shm_most *most, int32_t world) {
    uint64_t bytes = first_room(world) + preflight_memory(world);
    for (int g = 0; g < HD_N_GROUPS; g++) {
        for (int lane = 0; lane < HD_N_MESSAGE_LANES; lane++) {
            bytes += n_rooms((hd_message_lane)lane) * whole_pages(most->bytes[g][lane]);
        }
    }
    return bytes;
}

static uint64_t word_of(const comm_shm *s, int32_t rank, int32_t number) {
    const uint64_t says[] = {VERSION, s->limits->epoch, (uint64_t)rank, (uint64_t)number,
                             s->bytes};
    hd_siphash h;
    hd_siphash_init(&h, s->limits->key);
    hd_siphash_add(&h, says, sizeof says);
    return hd_siphash_value(&h);
}

static hd_status make_segment(comm_shm *s, hd_err *err) {
    s->number = shmget(IPC_PRIVATE, s->bytes, IPC_CREAT | SHM_NORESERVE | 0600);
    if (s->number < 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "rank %d cannot make shared memory: %s", s->rank,
                       strerror(errno));
    }
    void *at = shmat(s->number, NULL, 0);
    const int cause = errno;
    shmctl(s->number, IPC_RMID, NULL); /* Linux lets others attach it as long as it is in use */
    if (at == (void *)-1) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "rank %d cannot map shared memory: %s", s->rank,
                       strerror(cause));
    }
    s->own = s->of[s->rank] = at;
    s->own->word = word_of(s, s->rank, s->number);
    atomic_store(&s->own->sleeps_for, NONE);
    return HD_OK;
}

hd_status comm_shm_open(comm_shm **out, int32_t rank, const hd_message_limits *limits,
                        hd_err *err) {
    comm_shm *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory for the messages of rank %d", rank);
    s->limits = limits;
    s->rank = rank;
    s->end = first_room(limits->world);
    s->bytes = s->end + LARGEST * limits->max_bytes;
    const hd_status st = make_segment(s, err);
    if (st == HD_OK)
        *out = s;
    else
        free(s);
    return st;
}

void comm_shm_close(comm_shm *s) {
    if (!s) return;
    for (int32_t i = 0; i < s->limits->world; i++) {
        if (s->of[i]) shmdt(s->of[i]);
    }
    free(s);
}

int32_t comm_shm_number(const comm_shm *s) {
    return s->number;
}

/* Numbers of other hosts may be those of strangers here. */
static hd_status check_owner(const comm_shm *s, int32_t other, int32_t number, hd_err *err) {
    struct shmid_ds is;
    if (shmctl(number, IPC_STAT, &is) != 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "rank %d is not of this host, or shares no memory",
                       other);
    }
    if (is.shm_perm.cuid != geteuid() || is.shm_perm.uid != geteuid() ||
        (is.shm_perm.mode & 0777) != 0600) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "the memory of rank %d is not of this user alone, or of another host",
                       other);
    }
    if (is.shm_segsz == s->bytes) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "rank %d shares %zu bytes of memory, not %zu", other,
                   (size_t)is.shm_segsz, (size_t)s->bytes);
}

hd_status comm_shm_attach(comm_shm *s, int32_t other, int32_t number, hd_err *err) {
    HD_TRY(check_owner(s, other, number, err));
    segment *at = shmat(number, NULL, 0);
    if (at == (void *)-1) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "rank %d cannot map the memory of rank %d: %s",
                       s->rank, other, strerror(errno));
    }
    if (at->word == word_of(s, other, number)) {
        s->of[other] = at;
        return HD_OK;
    }
    shmdt(at);
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "the memory of rank %d is of another host, or of another epoch", other);
}

/* ---- sending ---- */

static void give_back(const comm_shm *s, uint64_t at, uint64_t n) {
    if (n) madvise((uint8_t *)s->own + at, n, MADV_REMOVE);
}

/* A new room for a place. What it had before goes at once if nothing of this ticket is there, else with this ticket:
 * who sends several messages with one ticket sends no others between them. */
static bool enlarge(comm_shm *s, room *r, uint64_t n) {
    const uint64_t bytes = whole_pages(2 * (r->used + n));
    room more = *r;
    if (bytes > s->bytes - s->end) return false;
    more.at = more.run = s->end;
    more.bytes = bytes;
    more.used = 0;
    if (!r->used) {
        give_back(s, r->at, r->bytes);
    } else if (!r->old_bytes) {
        more.old = r->at;
        more.old_bytes = r->bytes;
    } else if (r->at + r->bytes == s->end) {
        more.run = r->run;
    }
    *r = more;
    s->end += bytes;
    return true;
}

/* Nobody reads any more what was there before this ticket. */
static void begin_ticket(const comm_shm *s, room *r, uint64_t ticket) {
    give_back(s, r->old, r->old_bytes);
    give_back(s, r->run, r->at - r->run);
    r->old_bytes = r->used = 0;
    r->run = r->at;
    r->ticket = ticket + 1;
}

/* Every member of a group has released what another one sent it two collectives ago: then that one had to hear
 * it. Two rooms stay in a cache where four may not. */
void *comm_shm_room(comm_shm *s, hd_group group, hd_message_lane lane, uint64_t ticket,
                    uint64_t n) {
    room *r = &s->rooms[place_of(group, lane, ticket % n_rooms(lane))];
    const uint64_t lined = (n + HD_CACHE_LINE - 1) / HD_CACHE_LINE * HD_CACHE_LINE;
    if (n > s->limits->max_bytes) return NULL;
    if (r->ticket != ticket + 1) begin_ticket(s, r, ticket);
    if (lined > r->bytes - r->used && !enlarge(s, r, lined)) return NULL;
    void *at = (uint8_t *)s->own + r->at + r->used;
    r->used += lined;
    return at;
}

void comm_shm_was_read(comm_shm *s, uint64_t n, int64_t ns) {
    if (n < COMM_SHM_LONG) return;
    if (s->streamed) {
        if (--s->streamed == 0) atomic_store(&s->own->reads_slowly, 0);
        return;
    }
    s->slow = ns * SLOW > (int64_t)n ? s->slow + 1 : 0;
    if (s->slow < SLOW_IN_A_ROW) return;
    s->slow = 0;
    s->streamed = STREAMED;
    atomic_store(&s->own->reads_slowly, 1);
}

bool comm_shm_streams(const comm_shm *s, uint64_t n) {
    bool any = false;
    for (int32_t i = 0; n >= COMM_SHM_LONG && i < s->limits->world; i++) {
        if (i == s->rank || !s->of[i]) continue;
        any |= atomic_load_explicit(&s->of[i]->reads_slowly, memory_order_relaxed) != 0;
    }
    return any;
}

static long futex(_Atomic uint32_t *word, int op, uint32_t value,
                  const struct timespec *limit) {
    return syscall(SYS_futex, word, op, value, limit, NULL, 0);
}

static void ring(segment *of) {
    atomic_fetch_add(&of->bell, 1);
    futex(&of->bell, FUTEX_WAKE, 1, NULL);
}

/* Written only if it is another one: the others read what is beside it in every message. */
static void tell_core(comm_shm *s) {
    const int32_t core = sched_getcpu();
    if (core != atomic_load_explicit(&s->own->core, memory_order_relaxed))
        atomic_store_explicit(&s->own->core, core, memory_order_relaxed);
}

bool comm_shm_shares_core(const comm_shm *s, int32_t with) {
    return with >= 0 &&
           atomic_load_explicit(&s->of[with]->core, memory_order_relaxed) == sched_getcpu();
}

static bool is_in(const comm_shm *s, const void *data) {
    const uintptr_t own = (uintptr_t)s->own, at = (uintptr_t)data;
    return at >= own && at - own < s->bytes;
}

/* One who sleeps says so before it looks at the flag, and this one looks who sleeps after it has set
 * the flag: one of them sees the other. */
bool comm_shm_send(comm_shm *s, int32_t to, const hd_message *m, const void *data) {
    const hd_group group = (hd_group)m->group;
    const hd_message_lane lane = (hd_message_lane)m->lane;
    line *l = &s->own->lines[(int64_t)to * PLACES + place_of(group, lane, m->ticket)];
    if (m->n && !is_in(s, data)) {
        void *copy = comm_shm_room(s, group, lane, m->ticket, m->n);
        if (!copy) return false;
        data = memcpy(copy, data, m->n);
    }
    l->at = m->n ? (uint64_t)((const uint8_t *)data - (const uint8_t *)s->own) : 0;
    l->n = m->n;
    memcpy(l->shape, m->shape, sizeof l->shape);
    tell_core(s);
    atomic_store(&l->flag, flag_of(s, m->ticket));
    if (atomic_load(&s->of[to]->sleeps_for) == s->rank) ring(s->of[to]);
    return true;
}

/* ---- receiving ---- */

comm_shm_news comm_shm_look(const comm_shm *s, int32_t from, hd_group group,
                            hd_message_lane lane, uint64_t ticket, hd_received *out) {
    const segment *of = s->of[from];
    const line *l = &of->lines[(int64_t)s->rank * PLACES + place_of(group, lane, ticket)];
    const uint64_t want = flag_of(s, ticket), flag = atomic_load(&l->flag);
    if (flag != want) {
        const bool later =
            flag >> 32 == want >> 32 && (int32_t)((uint32_t)flag - (uint32_t)want) > 0;
        return later ? COMM_SHM_WRONG : COMM_SHM_NONE;
    }
    const uint64_t at = l->at, n = l->n;
    if (n > s->limits->max_bytes || at > s->bytes - n || at % sizeof(float))
        return COMM_SHM_WRONG;
    *out = (hd_received){
        .head = {.group = (uint8_t)group,
                 .lane = (uint8_t)lane,
                 .from = from,
                 .ticket = ticket,
                 .n = n},
        .data = n ? (const uint8_t *)of + at : NULL,
        .full = true
    };
    memcpy(out->head.shape, l->shape, sizeof l->shape);
    return COMM_SHM_CAME;
}

uint32_t comm_shm_lie_down(comm_shm *s, int32_t from) {
    const uint32_t bell = atomic_load(&s->own->bell);
    atomic_store(&s->own->sleeps_for, from);
    return bell;
}

void comm_shm_sleep(comm_shm *s, uint32_t bell, int32_t limit_ms) {
    const struct timespec limit = {limit_ms / 1000, limit_ms % 1000 * 1000000L};
    futex(&s->own->bell, FUTEX_WAIT, bell, limit_ms < 0 ? NULL : &limit);
}

void comm_shm_get_up(comm_shm *s) {
    atomic_store(&s->own->sleeps_for, NONE);
}

void comm_shm_wake(comm_shm *s) {
    ring(s->own);
}
