/* rendezvous_internal.h - what rendezvous.c, door.c and watch.c share. */
#ifndef HD_COMM_RENDEZVOUS_INTERNAL_H
#define HD_COMM_RENDEZVOUS_INTERNAL_H

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "comm/channel.h"
#include "comm/rendezvous.h"
#include "comm/silence.h"

enum { RENDEZVOUS_PENDING = 64, RENDEZVOUS_DOOR_FDS = 1 + RENDEZVOUS_PENDING };

/* An address; data is owned. */
typedef struct rendezvous_address {
    void *data; /* NULL: none */
    uint32_t n;
} rendezvous_address;

/* What a rank says of itself; the nonce comes before it, its address after it. */
typedef struct rendezvous_join {
    int32_t world, pad;
    hd_place place;
    uint64_t facts[HD_RENDEZVOUS_FACTS];
} rendezvous_join;

/* Who works together in an epoch. */
typedef struct rendezvous_table {
    uint32_t epoch;
    uint64_t session[2];
    hd_place first; /* where rank 0 is */
    rendezvous_address at[HD_CHANNEL_MAX_RANKS];
} rendezvous_table;

/* Where rank 0 takes connections. */
typedef struct rendezvous_door {
    int listener;                           /* -1: closed */
    hd_channel pending[RENDEZVOUS_PENDING]; /* have not said who they are */
    uint64_t accepted;
} rendezvous_door;

struct hd_rendezvous {
    hd_rendezvous_options o; /* with copies of its texts */
    hd_place here;
    hd_channel to[HD_CHANNEL_MAX_RANKS]; /* rank 0: to every other; others: to[0] only */
    rendezvous_door door;
    rendezvous_table table;
    rendezvous_address offer[HD_CHANNEL_MAX_RANKS]; /* rank 0: addresses for the next epoch */
    hd_place places[HD_CHANNEL_MAX_RANKS];          /* rank 0: of the others */
    /* of the watch */
    pthread_t thread;
    bool watches;
    int wake[2]; /* a pipe: abort, offer, leave, close */
    hd_rendezvous_lost_fn *lost;
    void *ctx;
    pthread_mutex_t mutex; /* of the table's replacement, own, why, gone, figures and losses */
    pthread_cond_t news;
    char why[HD_CHANNEL_MAX_TEXT]; /* of the abort asked for here */
    uint32_t abort_epoch;
    rendezvous_address own; /* offered by the step thread, until the watch has taken it */
    bool gone;              /* the connection to rank 0 has ended */
    _Atomic bool leaves, closes, done, aborts;
    bool left[HD_CHANNEL_MAX_RANKS];
    bool over;  /* the epoch has ended, or there was none */
    bool ended; /* nothing more is sent */
    bool told;
    int64_t over_ms;
    int64_t silent_ms[HD_CHANNEL_MAX_RANKS];
    hd_rank_figures figures[HD_CHANNEL_MAX_RANKS];         /* rank 0: as told last */
    char losses[HD_CHANNEL_MAX_RANKS][HD_RENDEZVOUS_TEXT]; /* rank 0: how each was lost last */
    uint64_t n_losses;
};

int64_t rendezvous_now_ms(void);

/* ---- rendezvous.c ---- */

/* Returns the name of the first fact in which a rank differs from this one, or NULL. */
const char *rendezvous_difference(const hd_rendezvous *m, const rendezvous_join *other);

hd_status rendezvous_draw(void *bytes, size_t n, hd_err *err);
hd_status rendezvous_keep(rendezvous_address *a, const void *bytes, uint32_t n, hd_err *err);
void rendezvous_forget(rendezvous_address *a);
void rendezvous_table_deinit(rendezvous_table *t);

/* Rank 0: makes a table of the offers, which it takes, and sends it to their ranks. */
hd_status rendezvous_send_table(hd_rendezvous *m, rendezvous_table *out, hd_err *err);
hd_status rendezvous_read_table(const hd_rendezvous *m, rendezvous_table *out,
                                const uint8_t *bytes, uint32_t n, hd_err *err);

/* ---- door.c: rank 0's, on one thread ---- */

void rendezvous_door_init(rendezvous_door *d);
hd_status rendezvous_door_open(hd_rendezvous *m, hd_err *err);
void rendezvous_door_close(rendezvous_door *d);

/* Fills p[RENDEZVOUS_DOOR_FDS]. */
void rendezvous_door_fds(const rendezvous_door *d, struct pollfd *p);

/* Reads what has arrived: a rank of this world that proves it gets its connection in m->to, and its
 * address is an offer; others are sent away. Returns the ranks that came, a bit for each. */
uint64_t rendezvous_door_serve(hd_rendezvous *m, const struct pollfd *p);

/* The connection *c is from now on that of a rank, which has said where it is. */
void rendezvous_admit(hd_rendezvous *m, int32_t rank, hd_channel *c, const hd_place *place);

/* ---- watch.c: a turn of its thread takes frames, admits and welcomes, and looks ---- */

/* Reads what another rank has sent, and does what it says. */
void rendezvous_take_frames(hd_rendezvous *m, int32_t rank);

/* Ranks that have come, a bit for each, are loading: they say later what they offer. */
void rendezvous_welcome(hd_rendezvous *m, uint64_t came);

/* Does what the step thread has asked for, says the last word when all have left, and begins an epoch for
 * which all are ready. */
void rendezvous_look(hd_rendezvous *m);

/* Of hd_rendezvous_next(), which waits between them; the caller has the mutex. */
bool rendezvous_offer(hd_rendezvous *m, const void *address, uint32_t n);
bool rendezvous_has_news(const hd_rendezvous *m, uint32_t before, hd_rendezvous_news *news);

void rendezvous_stop_watch(hd_rendezvous *m);

#endif
