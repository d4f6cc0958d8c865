/* messages.h - the operations of comm.h by messages between ranks that share no memory.
 *
 * A link carries messages: a fixed header, checked before use, and bytes. A message is named by
 * its sender, group, lane and ticket; tickets of a lane are used in their order, at most
 * HD_COMM_MAX_INFLIGHT of them at once. */
#ifndef HD_COMM_MESSAGES_H
#define HD_COMM_MESSAGES_H

#include "comm/comm.h"

enum { HD_MESSAGE_VERSION = 1, HD_MESSAGE_MAX_RANKS = 64 };

typedef enum hd_message_lane {
    HD_MESSAGE_COLLECTIVE,
    HD_MESSAGE_BROADCAST, /* and, without bytes, back: it has arrived */
    HD_MESSAGE_DISPATCH,
    HD_MESSAGE_COMBINE,
    HD_MESSAGE_HELLO, /* of the transport: two rounds when it opens */
    HD_N_MESSAGE_LANES
} hd_message_lane;

typedef struct hd_message {
    uint32_t magic;
    uint16_t version;
    uint8_t group, lane;
    int32_t from;
    uint32_t epoch;
    uint64_t ticket;
    uint64_t n;       /* bytes that follow */
    int32_t shape[4]; /* what the lane says, compared with what the receiver expects */
    uint64_t mac;     /* SipHash of all before, and of the bytes if limits say so */
} hd_message;

/* What a header must fit. */
typedef struct hd_message_limits {
    int32_t world;
    uint32_t epoch;
    uint64_t max_bytes;
    uint64_t key[2];
    bool authenticates_bytes; /* of the messages too: between hosts */
} hd_message_limits;

/* Completes magic, version, epoch and mac of a message of m->n bytes. */
void hd_message_seal(hd_message *m, const hd_message_limits *limits, const void *bytes);

/* HD_EFORMAT: not made by a rank of this world, or outside the limits. HD_EAGAIN: of an earlier
 * epoch; drop it. bytes[n] arrived after the header. */
hd_status hd_message_check(const hd_message *m, const hd_message_limits *limits,
                           const void *bytes, uint64_t n, hd_err *err);

typedef struct hd_received {
    hd_message head;
    const void *data; /* NULL: none; aligned for float */
    bool full;
} hd_received;

/* A transport; ctx is that of the link. */
typedef struct hd_link {
    /* Sends m and m->n bytes of data, which stay until flush() of the same set. */
    void (*send)(void *ctx, int32_t to, hd_message *m, const void *data, int32_t set);
    /* Returns n bytes, aligned for float, in which a message of this ticket is sent without a copy, to one
     * member or to several. NULL: the link has no such memory. */
    void *(*room)(void *ctx, hd_group group, hd_message_lane lane, uint64_t ticket, uint64_t n);
    /* Whether a message of n bytes is better written past the caches, and how long n bytes took to be read, by
     * which the receiver finds that out. NULL: never. */
    bool (*streams)(void *ctx, uint64_t n);
    void (*was_read)(void *ctx, uint64_t n, int64_t ns);
    /* Waits until the bytes of a set's sends may change. False: communication has ended. */
    bool (*flush)(void *ctx, int32_t set);
    /* Waits for a message. NULL: communication has ended. */
    hd_received *(*wait)(void *ctx, int32_t from, hd_group group, hd_message_lane lane,
                         uint64_t ticket);
    void (*release)(void *ctx, hd_received *r);
    void (*abort)(void *ctx, const char *why);
    const char *(*ended)(void *ctx); /* why communication has ended, or NULL */
    void *ctx;
} hd_link;

/* Sets of sends: collectives, and one per dispatch and combine that travels. */
enum { HD_LINK_SETS = 1 + 2 * HD_COMM_MAX_INFLIGHT };

typedef struct hd_messages hd_messages;

/* figures: where exchanges are counted, or NULL; they outlive the messages. */
hd_status hd_messages_open(hd_messages **out, const hd_link *link,
                           const hd_parallel_config *parallel, int32_t rank,
                           comm_figures *figures, hd_err *err);
const hd_comm *hd_messages_comm(const hd_messages *m);
void hd_messages_close(hd_messages *m); /* NULL is fine */

#endif
