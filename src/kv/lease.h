/* lease.h - who may touch the pages of a sequence while they move from one server to another.
 *
 * A handover moves the pages of one prompt from the server that prefills it (the sender) to the
 * server that decodes it (the receiver). Each side has a lease: pages, an owner and a deadline.
 *
 *     receiver                          sender
 *     RESERVED   -- RESERVE -->         RESERVED    its owner pins pages and starts to prefill
 *     GRANTED    <-- GRANT --           GRANTED
 *     SENDING    <-- PAGE ...           SENDING     pages go out as chunks are computed
 *     COMMITTED  <-- COMMIT --          COMMITTED   all pages have left
 *     OWNED      -- OWNED -->           OWNED       the receiver decodes, the sender releases
 *
 * From any state before OWNED: ABORTING (no page starts to move), QUIESCED (none is moving),
 * FREE. The one or two last states pass within one event.
 *
 * - Memory is reused only after the action RELEASE, and RELEASE comes only when every copy that
 *   the machine asked for has ended. Only a server itself writes to its pages.
 * - A lease has a deadline. Without any message it ends then; both sides count their own time.
 * - An id has a generation, never used twice in the life of a process, and a process has an
 *   epoch, higher in each life. A message of another generation or epoch only counts.
 * - Messages may be lost, repeated, late and out of order.
 *
 * This is a state machine: events in, actions out. No clock, socket, thread or allocation; one
 * block of memory without pointers, which may be copied. Owned by one thread.
 *
 * Calls: hd_leases_step() with an event, then hd_leases_take() until it returns false. */
#ifndef HD_KV_LEASE_H
#define HD_KV_LEASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { HD_LEASE_MAX = 1024 }; /* leases of one process */

typedef enum hd_lease_state {
    HD_LEASE_FREE,
    HD_LEASE_RESERVED,
    HD_LEASE_GRANTED,
    HD_LEASE_SENDING,
    HD_LEASE_COMMITTED,
    HD_LEASE_ABORTING,
    HD_LEASE_OWNED, /* how the last lease of a free slot ended */
    HD_N_LEASE_STATES
} hd_lease_state;

/* Why a lease ended, or why a message was refused. */
typedef enum hd_lease_reason {
    HD_LEASE_DONE,     /* the receiver owns the pages */
    HD_LEASE_CANCEL,   /* the request was aborted */
    HD_LEASE_DEADLINE, /* the time is over before COMMIT */
    HD_LEASE_HOLE,     /* the time is over after COMMIT, and pages are missing */
    HD_LEASE_PEER,     /* the other process was lost or restarted */
    HD_LEASE_BUSY,     /* no slot, or too many leases of one peer */
    HD_LEASE_TYPE,     /* unknown kind of message */
    HD_LEASE_EPOCH,    /* of a former life of either process */
    HD_LEASE_UNKNOWN,  /* no such slot */
    HD_LEASE_STALE,    /* a former lease of the slot */
    HD_LEASE_STATE,    /* not in this state, or by the wrong side */
    HD_LEASE_RANGE,    /* page outside the lease */
    HD_LEASE_REPEATED, /* the page has arrived before */
    HD_LEASE_COUNT,    /* number of pages or tokens */
    HD_LEASE_DIGEST,   /* the bytes of a page are not those that were sent */
    HD_LEASE_WEIGHTS,  /* the sides compute with different weights, by now */
    HD_LEASE_ROOM,     /* no room for a page, or it was evicted */
    HD_N_LEASE_REASONS
} hd_lease_reason;

const char *hd_lease_state_name(hd_lease_state state); /* "reserved" */

/* Returns the reason as one word: "digest". */
const char *hd_lease_reason_name(hd_lease_reason reason);

/* Names a lease of one process in one life. */
typedef struct hd_lease_id {
    uint64_t generation; /* 0: none */
    uint32_t slot, zero;
} hd_lease_id;

typedef enum hd_lease_message_kind {
    HD_LEASE_MSG_RESERVE = 1, /* receiver: compute and send; the owner appends the prompt */
    HD_LEASE_MSG_GRANT,       /* sender: I shall */
    HD_LEASE_MSG_PAGE,        /* sender: one page follows */
    HD_LEASE_MSG_COMMIT,      /* sender: that was all; the owner appends the first token */
    HD_LEASE_MSG_OWNED,       /* receiver: release your pages */
    HD_LEASE_MSG_ABORT,       /* either: it is over; always answered by GONE */
    HD_LEASE_MSG_GONE         /* either: there is no such lease any more; never answered */
} hd_lease_message_kind;

/* On the wire as it is, between processes of one version and one byte order. Any content is safe;
 * the link has checked the length. Fields that a kind does not use are 0. */
typedef struct hd_lease_message {
    uint32_t kind, reason; /* reason: of ABORT and GONE */
    uint64_t from_epoch, to_epoch;
    hd_lease_id from, to;       /* the sender's lease, and the receiver's as it knows it */
    uint64_t request;           /* RESERVE */
    uint64_t time_ns;           /* RESERVE: until the deadline */
    uint64_t digest;            /* PAGE: of its bytes */
    uint32_t n_tokens, n_pages; /* RESERVE, COMMIT */
    uint32_t page, zero;        /* PAGE: index in the lease */
} hd_lease_message;

typedef enum hd_lease_event_kind {
    HD_LEASE_EV_OPEN,     /* peer, request, n_tokens, n_pages, time_ns: reserve as receiver */
    HD_LEASE_EV_ACCEPT,   /* id: as sender; the pages are pinned and prefill starts */
    HD_LEASE_EV_COMPUTED, /* id, n_pages: the first n_pages of the lease are final */
    HD_LEASE_EV_SENT,     /* id, n_pages: so many more were read and handed to the link */
    HD_LEASE_EV_WRITTEN,  /* id, page: the page lies in its place */
    HD_LEASE_EV_ABORT,    /* id, reason: by its owner */
    HD_LEASE_EV_MESSAGE,  /* peer, message; digest: of the bytes that arrived with a PAGE */
    HD_LEASE_EV_HELLO,    /* peer, epoch: the link is up, the peer has proved who it is */
    HD_LEASE_EV_LOST,     /* peer: the link is down */
    HD_LEASE_EV_TICK      /* time passes */
} hd_lease_event_kind;

typedef struct hd_lease_event {
    hd_lease_event_kind kind;
    uint64_t now_ns; /* never less than before */
    int32_t peer;    /* [0, max_peers) */
    hd_lease_id id;
    uint64_t request, time_ns, epoch, digest;
    uint32_t n_tokens, n_pages, page;
    hd_lease_reason reason;
    const hd_lease_message *message;
} hd_lease_event;

typedef enum hd_lease_action_kind {
    HD_LEASE_DO_SEND,    /* peer, message */
    HD_LEASE_DO_PREFILL, /* sender: id; pin pages and ACCEPT, or ABORT */
    HD_LEASE_DO_PAGES, /* sender: id; send page .. page + n_pages - 1, then SENT. message is the
                          * head of each; page and digest are missing */
    HD_LEASE_DO_WRITE, /* receiver: id; write the page that arrived, then WRITTEN */
    HD_LEASE_DO_OWN,   /* receiver: id; all is here, decode may start */
    HD_LEASE_DO_RELEASE /* id, reason; the pages of this lease may be reused */
} hd_lease_action_kind;

typedef struct hd_lease_action {
    hd_lease_action_kind kind;
    int32_t peer;
    hd_lease_id id;
    uint64_t request;
    uint32_t page, n_pages;
    hd_lease_reason reason;
    hd_lease_message message; /* of SEND and PAGES */
} hd_lease_action;

typedef struct hd_lease {
    hd_lease_id id;
    hd_lease_id peer_id; /* the other side's; generation 0: not known yet */
    uint64_t request, deadline_ns;
    uint32_t n_tokens, n_pages;
    uint32_t n_computed;       /* sender: pages that are final */
    uint32_t n_moving, n_done; /* pages that a copy reads or writes; pages sent or written */
    int32_t peer;
    hd_lease_state state;
    hd_lease_reason reason; /* of ABORTING, and of the end */
    bool is_receiver;
} hd_lease;

typedef struct hd_lease_options {
    uint64_t epoch;       /* of this process, higher in each life */
    uint64_t max_time_ns; /* no lease lasts longer */
    int32_t max_leases;   /* <= HD_LEASE_MAX; the same in every process */
    int32_t max_per_peer; /* leases that one peer may ask for */
    int32_t max_peers;
    int32_t max_pages; /* of one lease */
} hd_lease_options;

/* Counts since the opening. */
typedef struct hd_lease_counts {
    uint64_t opened[2], owned[2];           /* [0]: as sender, [1]: as receiver */
    uint64_t aborted[HD_N_LEASE_REASONS];   /* leases, by reason */
    uint64_t discarded[HD_N_LEASE_REASONS]; /* messages and late events that changed nothing */
} hd_lease_counts;

typedef struct hd_leases hd_leases;

/* Returns the bytes of a machine; 0: the options are out of range. */
size_t hd_leases_bytes(const hd_lease_options *options);

/* Places a machine in zeroed memory of hd_leases_bytes(), aligned for uint64_t, which the caller
 * frees. */
hd_leases *hd_leases_place(void *memory, const hd_lease_options *options);

/* Takes one event. HD_EAGAIN: OPEN found no slot, or the peer is away. HD_EINVAL: OPEN asks for
 * no page or for more than fit. HD_EFORMAT: a message was discarded. Else HD_OK. */
hd_status hd_leases_step(hd_leases *l, const hd_lease_event *event);

/* Returns the next action of the last event, or false. */
bool hd_leases_take(hd_leases *l, hd_lease_action *out);

/* Returns the lease of a slot, [0, max_leases). */
const hd_lease *hd_leases_at(const hd_leases *l, int32_t slot);

/* Returns when the next deadline is; UINT64_MAX: never. */
uint64_t hd_leases_next_deadline(const hd_leases *l);

/* Makes place for another peer of that number, whose epochs are its own. HD_EAGAIN: the peer is up,
 * or has leases. */
hd_status hd_leases_forget(hd_leases *l, int32_t peer);

/* Returns how often what a peer sent was wrong: digests, ranges, counts. */
uint64_t hd_leases_suspicion(const hd_leases *l, int32_t peer);

hd_lease_counts hd_leases_read_counts(const hd_leases *l);

/* Verifies every count. If idle, no lease may be open. */
hd_status hd_leases_check(const hd_leases *l, bool idle, hd_err *err);

#endif
