/* channel.c - frames: check, authenticate, send and read. */
#include "comm/channel.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hadal_types.h"
#include "comm/silence.h"

enum { MAGIC = 0x4c484443, HEAD = (int)sizeof(hd_frame) }; /* "CDHL" */

static const uint32_t most_of_ranks[HD_N_FRAMES] = {
    [HD_FRAME_CHALLENGE] = HD_CHANNEL_NONCE,
    [HD_FRAME_JOIN] = HD_CHANNEL_NONCE + 96 + HD_CHANNEL_MAX_ADDRESS,
    [HD_FRAME_TABLE] = HD_CHANNEL_MAX_PAYLOAD,
    [HD_FRAME_WELCOME] = sizeof(hd_place),
    [HD_FRAME_READY] = HD_CHANNEL_MAX_ADDRESS,
    [HD_FRAME_PING] = sizeof(hd_rank_figures),
    [HD_FRAME_LOST] = 4 + HD_CHANNEL_MAX_TEXT,
};

const hd_frame_limits hd_rank_frames = {most_of_ranks, HD_N_FRAMES};

void hd_channel_key(uint64_t key[2], const char *secret) {
    for (uint64_t i = 0; i < 2; i++) {
        hd_siphash s;
        hd_siphash_init(&s, (const uint64_t[2]){0x68616461, i});
        hd_siphash_add_part(&s, secret);
        key[i] = hd_siphash_value(&s);
    }
}

void hd_channel_init(hd_channel *c, int fd, bool is_server, const uint64_t key[2]) {
    *c = (hd_channel){
        .fd = fd, .is_server = is_server, .limits = hd_rank_frames, .key = {key[0], key[1]}
    };
    hd_nh_init(&c->nh, key);
}

void hd_channel_close(hd_channel *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    free(c->payload);
    c->payload = NULL;
}

hd_status hd_frame_check(const hd_frame *f, const hd_frame_limits *limits, hd_err *err) {
    if (f->magic != MAGIC) return HD_FAIL(err, HD_EFORMAT, "not a message of a rank");
    if (f->version != HD_CHANNEL_VERSION) {
        return HD_FAIL(err, HD_EFORMAT, "a rank speaks version %u, this one %d", f->version,
                       HD_CHANNEL_VERSION);
    }
    if (f->kind < HD_FRAME_CHALLENGE || f->kind >= limits->n_kinds) {
        return HD_FAIL(err, HD_EFORMAT, "a message of unknown kind %u", f->kind);
    }
    if (f->rank < 0 || f->rank >= HD_CHANNEL_MAX_RANKS) {
        return HD_FAIL(err, HD_EFORMAT, "a message of rank %d", f->rank);
    }
    if (f->n > limits->most[f->kind]) {
        return HD_FAIL(err, HD_EFORMAT, "a message of kind %u has %u bytes, at most %u",
                       f->kind, f->n, limits->most[f->kind]);
    }
    return HD_OK;
}

/* The challenge is the first frame, before the ends share anything: its mac has no nonces. */
static uint64_t mac_of(const hd_channel *c, bool from_server, const hd_frame *f,
                       const void *payload) {
    const uint64_t direction = from_server;
    hd_siphash s;
    hd_frame head = *f;
    head.mac = 0;
    hd_siphash_init(&s, c->key);
    hd_siphash_add(&s, c->nonce, sizeof c->nonce);
    hd_siphash_add(&s, &direction, sizeof direction);
    hd_siphash_add(&s, &head, sizeof head);
    hd_nh_add(&c->nh, &s, payload, f->n);
    return hd_siphash_value(&s);
}

static hd_status write_all(const hd_channel *c, const void *bytes, size_t n, int32_t limit_ms,
                           hd_err *err) {
    const char *at = bytes;
    while (n) {
        const ssize_t sent = send(c->fd, at, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            at += sent;
            n -= (size_t)sent;
            continue;
        }
        if (sent < 0 && errno == EINTR) continue;
        struct pollfd p = {.fd = c->fd, .events = POLLOUT};
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) &&
            poll(&p, 1, limit_ms) > 0) {
            continue;
        }
        return HD_FAIL(err, HD_EIO, "cannot send to another rank: %s", strerror(errno));
    }
    return HD_OK;
}

hd_frame hd_channel_seal(hd_channel *c, uint16_t kind, int32_t rank, const void *payload,
                         uint32_t n) {
    hd_frame f = {.magic = MAGIC,
                  .version = HD_CHANNEL_VERSION,
                  .kind = kind,
                  .rank = rank,
                  .n = n,
                  .seq = c->sent++};
    f.mac = mac_of(c, c->is_server, &f, payload);
    return f;
}

hd_status hd_channel_send(hd_channel *c, hd_frame_kind kind, int32_t rank, const void *payload,
                          uint32_t n, int32_t limit_ms, hd_err *err) {
    const hd_frame f = hd_channel_seal(c, (uint16_t)kind, rank, payload, n);
    HD_TRY(write_all(c, &f, sizeof f, limit_ms, err));
    return write_all(c, payload, n, limit_ms, err);
}

/* Reads up to the first `want` bytes of a frame. */
static hd_status read_to(hd_channel *c, uint32_t want, hd_err *err) {
    while (c->have < want) {
        const bool in_head = c->have < HEAD;
        uint8_t *to = in_head ? (uint8_t *)&c->head + c->have : c->payload + (c->have - HEAD);
        const uint32_t n = (in_head ? (uint32_t)HEAD : want) - c->have;
        const ssize_t got = recv(c->fd, to, n, MSG_DONTWAIT);
        if (got > 0) {
            c->have += (uint32_t)got;
        } else if (got == 0) {
            return HD_FAIL(err, HD_EIO, "the other end closed the connection");
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return HD_EAGAIN;
        } else if (errno != EINTR) {
            return HD_FAIL(err, HD_EIO, "%s", strerror(errno));
        }
    }
    return HD_OK;
}

hd_status hd_channel_read(hd_channel *c, hd_err *err) {
    HD_TRY(read_to(c, HEAD, err));
    if (c->have == HEAD) {
        HD_TRY(hd_frame_check(&c->head, &c->limits, err));
        free(c->payload);
        c->payload = malloc(c->head.n + 1);
        if (!c->payload) return HD_FAIL(err, HD_ENOMEM, "no memory for %u bytes", c->head.n);
    }
    HD_TRY(read_to(c, HEAD + c->head.n, err));
    c->have = 0;
    c->payload[c->head.n] = 0;
    hd_channel view = *c; /* the other end's nonce comes with its first frame */
    if (c->head.kind == HD_FRAME_JOIN || c->head.kind == HD_FRAME_CHALLENGE) {
        if (c->head.n < HD_CHANNEL_NONCE || c->received) {
            return HD_FAIL(err, HD_EFORMAT, "a first message that is not one");
        }
        memcpy(view.nonce[c->is_server], c->payload, HD_CHANNEL_NONCE);
    }
    if (c->head.seq != c->received++ ||
        c->head.mac != mac_of(&view, !c->is_server, &c->head, c->payload)) {
        return HD_FAIL(err, HD_EFORMAT, "a message was not made with the key of this world");
    }
    memcpy(c->nonce, view.nonce, sizeof c->nonce);
    return HD_OK;
}
