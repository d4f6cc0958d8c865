/* door.c - where rank 0 takes connections, while ranks gather and while they work: a stranger or a
 * rank that differs is sent away, a rank of this world gets its connection. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/address.h"
#include "comm/rendezvous_internal.h"

void rendezvous_door_init(rendezvous_door *d) {
    d->listener = -1;
    for (int32_t i = 0; i < RENDEZVOUS_PENDING; i++) d->pending[i] = (hd_channel){.fd = -1};
}

hd_status rendezvous_door_open(hd_rendezvous *m, hd_err *err) {
    if (hd_address_is_here_alone(m->o.at)) {
        return HD_FAIL(err, HD_EINVAL,
                       "rank 0 cannot be met at %s: on its own host that is a loopback address "
                       "(see /etc/hosts; give --meet the address that other hosts reach)",
                       m->o.at);
    }
    return hd_address_bind(&m->door.listener, "rank 0", m->o.at, err);
}

void rendezvous_door_close(rendezvous_door *d) {
    if (d->listener >= 0) close(d->listener);
    d->listener = -1;
    for (int32_t i = 0; i < RENDEZVOUS_PENDING; i++) hd_channel_close(&d->pending[i]);
}

void rendezvous_door_fds(const rendezvous_door *d, struct pollfd *p) {
    p[0] = (struct pollfd){.fd = d->listener, .events = POLLIN};
    for (int32_t i = 0; i < RENDEZVOUS_PENDING; i++) {
        p[i + 1] = (struct pollfd){.fd = d->pending[i].fd, .events = POLLIN};
    }
}

/* Sends a rank away that cannot be one of this world. */
static void send_away(hd_channel *c, const char *why) {
    uint8_t says[4 + HD_CHANNEL_MAX_TEXT] = {0}; /* no epoch */
    const size_t n = strlen(why);
    memcpy(says + 4, why, n);
    hd_channel_send(c, HD_FRAME_LOST, 0, says, (uint32_t)n + 4, 0, NULL);
    hd_channel_close(c);
}

/* Why a rank with an address of n bytes cannot be one of this world; empty: it can. */
static void find_fault(const hd_rendezvous *m, int32_t rank, const rendezvous_join *j,
                       uint32_t n, char why[HD_CHANNEL_MAX_TEXT]) {
    const char *other = rendezvous_difference(m, j);
    if (j->world != m->o.world) {
        snprintf(why, HD_CHANNEL_MAX_TEXT, "rank %d expects %d ranks, rank 0 expects %d", rank,
                 j->world, m->o.world);
    } else if (rank == 0 || rank >= m->o.world || m->to[rank].fd >= 0) {
        snprintf(why, HD_CHANNEL_MAX_TEXT, "rank %d is there already", rank);
    } else if (other) {
        snprintf(why, HD_CHANNEL_MAX_TEXT, "rank %d has another %s than rank 0", rank, other);
    } else if (n > HD_CHANNEL_MAX_ADDRESS) {
        snprintf(why, HD_CHANNEL_MAX_TEXT, "rank %d's address has %u bytes", rank, n);
    }
}

void rendezvous_admit(hd_rendezvous *m, int32_t rank, hd_channel *c, const hd_place *place) {
    m->to[rank] = *c;
    m->places[rank] = *place;
    m->silent_ms[rank] = 0;
    m->left[rank] = false;
    *c = (hd_channel){.fd = -1};
}

/* The rank of a pending connection has said what it is. Returns its bit, or 0. */
static uint64_t admit(hd_rendezvous *m, hd_channel *c) {
    const int32_t rank = c->head.rank;
    char why[HD_CHANNEL_MAX_TEXT] = "";
    rendezvous_join j;
    if (c->head.kind != HD_FRAME_JOIN || c->head.n < HD_CHANNEL_NONCE + sizeof j) {
        hd_channel_close(c);
        return 0;
    }
    memcpy(&j, c->payload + HD_CHANNEL_NONCE, sizeof j);
    const uint32_t before = HD_CHANNEL_NONCE + sizeof j, n = c->head.n - before;
    find_fault(m, rank, &j, n, why);
    if (!why[0] && rendezvous_keep(&m->offer[rank], c->payload + before, n, NULL) != HD_OK) {
        snprintf(why, sizeof why, "rank 0 has no memory for another rank");
    }
    if (why[0]) {
        send_away(c, why);
        return 0;
    }
    rendezvous_admit(m, rank, c, &j.place);
    return 1ull << rank;
}

/* Takes a new connection in the place of the oldest pending one. */
static void accept_one(hd_rendezvous *m) {
    rendezvous_door *d = &m->door;
    uint64_t key[2];
    const int fd = accept(d->listener, NULL, NULL);
    if (fd < 0) return;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    hd_address_no_delay(fd);
    hd_channel_key(key, m->o.secret);
    hd_channel *c = &d->pending[d->accepted++ % RENDEZVOUS_PENDING];
    hd_channel_close(c);
    hd_channel_init(c, fd, true, key);
    uint8_t nonce[HD_CHANNEL_NONCE];
    const bool ok = rendezvous_draw(nonce, sizeof nonce, NULL) == HD_OK;
    memcpy(c->nonce[0], nonce, sizeof nonce);
    if (!ok ||
        hd_channel_send(c, HD_FRAME_CHALLENGE, 0, nonce, sizeof nonce, 0, NULL) != HD_OK) {
        hd_channel_close(c);
    }
}

uint64_t rendezvous_door_serve(hd_rendezvous *m, const struct pollfd *p) {
    uint64_t came = 0;
    for (int32_t i = 0; i < RENDEZVOUS_PENDING; i++) {
        hd_channel *c = &m->door.pending[i];
        if (!p[i + 1].revents || c->fd < 0) continue;
        const hd_status st = hd_channel_read(c, NULL);
        if (st == HD_OK)
            came |= admit(m, c);
        else if (st != HD_EAGAIN)
            hd_channel_close(c);
    }
    if (p[0].revents) accept_one(m);
    return came;
}
