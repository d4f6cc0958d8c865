/* lease_world.h - servers that hand pages over, simulated: the machine of kv/lease.h in each,
 * pages that remember what was written to them, copies that end late, and a network that loses,
 * repeats, reorders and corrupts.
 *
 * All that can happen next is a list of moves. A test draws from it, or tries all. The world has
 * no pointers into itself: it may be copied. */
#ifndef HD_TESTS_LEASE_WORLD_H
#define HD_TESTS_LEASE_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "kv/lease.h"

enum {
    WORLD_SERVERS = 3,
    WORLD_POOL = 12,       /* pages of a server, at most */
    WORLD_SLOTS = 4,       /* leases of a server */
    WORLD_LEASE_PAGES = 4, /* of one lease, at most */
    WORLD_REQUESTS = 6,    /* at a time */
    WORLD_MESSAGES = 64,
    WORLD_COPIES = 96,
    WORLD_MOVES = 512,
    WORLD_MACHINE = 6000, /* bytes of a machine */
    WORLD_TIME_NS = 1000  /* of a lease */
};

/* Checks that the world leaves out, to prove that the shadow memory finds what follows. */
typedef enum world_omission {
    WORLD_OMITS_NOTHING,
    WORLD_OMITS_QUIESCE, /* copies are reported as ended when they start */
    WORLD_OMITS_EPOCH,   /* messages of a former life look like new ones */
    WORLD_OMITS_STALE,   /* messages of a former lease look like those of the present one */
    WORLD_OMITS_DIGEST   /* what arrives is believed */
} world_omission;

typedef struct world_message {
    hd_lease_message head;
    uint64_t content; /* of a PAGE */
    int32_t from, to;
} world_message;

/* A copy between a page and the link that is not over. */
typedef struct world_copy {
    int32_t server;
    bool is_write;
    hd_lease_id id;
    uint32_t page, place;  /* index in the lease, page of the pool */
    uint64_t content;      /* of a write */
    hd_lease_message head; /* of a read: of the message to be */
    int32_t peer;
} world_copy;

typedef struct world_request {
    uint64_t id; /* 0: none */
    int32_t receiver, sender;
    uint32_t n_pages;
    hd_lease_id lease;
    bool is_open, is_held, reserve_arrived;
    int32_t n_ends;
    uint32_t place[WORLD_LEASE_PAGES]; /* of the receiver */
} world_request;

typedef struct world_server {
    uint64_t machine[WORLD_MACHINE / sizeof(uint64_t)];
    uint64_t epoch;
    uint64_t content[WORLD_POOL];
    uint64_t owner[WORLD_POOL]; /* generation of a lease; 0: free */
    /* As sender, by slot. */
    uint32_t place[WORLD_SLOTS][WORLD_LEASE_PAGES], n_computed[WORLD_SLOTS];
    bool asked[WORLD_SLOTS];
    bool hears[WORLD_SERVERS]; /* knows the present life of that server */
} world_server;

typedef struct world {
    uint64_t now_ns, last_request;
    int32_t n_servers, n_pool, n_messages, n_copies;
    world_server server[WORLD_SERVERS];
    world_request request[WORLD_REQUESTS];
    world_omission omits;
    bool has_order;       /* messages of a link stay in order unless a fault says so */
    const char *wrong;    /* the first invariant that failed */
    hd_lease_counts gone; /* counts of former lives */
    world_message message[WORLD_MESSAGES]; /* [n_messages] */
    world_copy copy[WORLD_COPIES];         /* [n_copies] */
} world;

typedef enum world_move_kind {
    WORLD_OPEN,
    WORLD_DELIVER,
    WORLD_LAND,
    WORLD_ACCEPT,
    WORLD_COMPUTE,
    WORLD_FINISH,
    WORLD_HELLO,
    WORLD_TICK,
    /* faults */
    WORLD_DROP,
    WORLD_REPEAT,
    WORLD_REORDER,
    WORLD_CORRUPT,
    WORLD_CANCEL,
    WORLD_CUT,
    WORLD_RESTART,
    WORLD_LATE, /* a deadline passes while work goes on */
    WORLD_N_MOVES
} world_move_kind;

typedef struct world_move {
    world_move_kind kind;
    int32_t i, j;
} world_move;

void lease_world_open(world *w, int32_t n_servers, int32_t n_pool);

/* Adds a request; returns false if the world has no place for it. */
bool lease_world_add(world *w, int32_t receiver, int32_t sender, uint32_t n_pages);

/* Lists the moves: all that the servers and the network do, or faults. */
int32_t lease_world_moves(const world *w, world_move *moves);
int32_t lease_world_faults(const world *w, world_move *moves);

void lease_world_make(world *w, world_move move);

/* Copies what is in use: most of a world is room for messages and copies. */
void lease_world_copy(world *to, const world *from);

/* Checks machines and pages. */
void lease_world_check(world *w, bool idle);

/* A hash of all that decides what follows. */
uint64_t lease_world_hash(const world *w);

/* The sum of the counts of all lives. */
hd_lease_counts lease_world_counts(const world *w);

#endif
