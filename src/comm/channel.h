/* channel.h - connection between two ranks, or two servers: authenticated frames over a TCP
 * socket.
 *
 * A frame is a fixed header and a payload whose length is checked against a maximum before
 * anything is allocated. Its SipHash-2-4 covers the shared key, the nonces of both ends, the
 * direction, a sequence number, the header and the payload, which NH shortens: a frame of another
 * connection, of an earlier time or without the key is refused. Both ends have the same byte
 * order. */
#ifndef HD_COMM_CHANNEL_H
#define HD_COMM_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/nh.h"
#include "base/status.h"

enum {
    HD_CHANNEL_VERSION = 6,
    HD_CHANNEL_NONCE = 16,
    HD_CHANNEL_MAX_RANKS = 64,
    HD_CHANNEL_MAX_ADDRESS = 4096, /* bytes of a rank's address */
    HD_CHANNEL_MAX_TEXT = 200,
    HD_CHANNEL_MAX_PAYLOAD = 64 + HD_CHANNEL_MAX_RANKS * (HD_CHANNEL_MAX_ADDRESS + 4)
};

typedef enum hd_frame_kind {
    HD_FRAME_CHALLENGE = 1, /* nonce of rank 0 */
    HD_FRAME_JOIN,          /* nonce of the other rank, hd_join, its address */
    /* nonce and u32 number of an epoch, hd_place of rank 0; u32 length and bytes of each address, 0: no
     * member */
    HD_FRAME_TABLE,
    HD_FRAME_WELCOME, /* hd_place of rank 0: the world works already; say READY once loaded */
    HD_FRAME_READY,   /* the sender's address in the next epoch */
    HD_FRAME_PING,    /* the sender lives; to rank 0: its hd_rank_figures */
    HD_FRAME_LOST,    /* u32 epoch that has ended (0: refused), text: why */
    HD_FRAME_LEAVE,   /* nothing: the sender, or with rank 0 all, have finished */
    HD_N_FRAMES
} hd_frame_kind;

/* What the other end may send. */
typedef struct hd_frame_limits {
    const uint32_t *most; /* [n_kinds] bytes of payload, by kind; a kind of 0 is no kind */
    uint32_t n_kinds;
} hd_frame_limits;

extern const hd_frame_limits hd_rank_frames;

typedef struct hd_frame {
    uint32_t magic;
    uint16_t version, kind;
    int32_t rank; /* of the sender */
    uint32_t n;   /* bytes of payload */
    uint64_t seq, mac;
} hd_frame;

typedef struct hd_channel {
    int fd; /* -1: closed */
    bool is_server;
    hd_frame_limits limits; /* of what is read; those of ranks until the caller sets others */
    uint64_t key[2];
    hd_nh nh;
    uint8_t nonce[2][HD_CHANNEL_NONCE]; /* of rank 0, of the other end */
    uint64_t sent, received;            /* frames */
    hd_frame head;
    uint8_t *payload; /* of head */
    uint32_t have;    /* bytes of head and payload so far */
} hd_channel;

/* Turns a shared secret (NULL: none) into a key. */
void hd_channel_key(uint64_t key[2], const char *secret);

void hd_channel_init(hd_channel *c, int fd, bool is_server, const uint64_t key[2]);
void hd_channel_close(hd_channel *c);

/* Makes the header of the next frame, which the caller sends before its payload. */
hd_frame hd_channel_seal(hd_channel *c, uint16_t kind, int32_t rank, const void *payload,
                         uint32_t n);

/* Sends a frame; the socket does not block, so waits at most limit_ms for room. */
hd_status hd_channel_send(hd_channel *c, hd_frame_kind kind, int32_t rank, const void *payload,
                          uint32_t n, int32_t limit_ms, hd_err *err);

/* Reads what has arrived. HD_OK: c->head and c->payload are the next frame, until the next call.
 * HD_EAGAIN: not all of it has arrived. HD_EIO: the other end has closed. HD_EFORMAT: it sent
 * what is no frame or was not made with the key. */
hd_status hd_channel_read(hd_channel *c, hd_err *err);

/* Returns whether a header can be one: magic, version, kind, rank and length. */
hd_status hd_frame_check(const hd_frame *f, const hd_frame_limits *limits, hd_err *err);

#endif
