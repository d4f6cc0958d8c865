/* wire.h - what two servers say to each other about pages: frames of comm/channel.h, and the
 * fixed structs in them. Between processes of one version and one byte order.
 *
 * The receiver of pages connects. It says who it is (JOIN), and is welcome or refused with a
 * sentence. Then both send messages of leases (kv/lease.h). With RESERVE comes the prompt, with
 * PAGE a page (kv/handover.h). Which message stands in which kind of frame, and every length, is
 * checked before anything is used. */
#ifndef HD_PD_WIRE_H
#define HD_PD_WIRE_H

#include "comm/channel.h"
#include "kv/handover.h"
#include "kv/lease.h"

enum { PD_TRACE_ID = 136, PD_NAME = 272, PD_WORD = 64, PD_MAX_TEXT = 200 };

typedef enum pd_frame_kind {
    PD_FRAME_CHALLENGE = HD_FRAME_CHALLENGE, /* nonce of the listening side */
    PD_FRAME_JOIN = HD_FRAME_JOIN,           /* nonce of the other side, pd_hello */
    PD_FRAME_WELCOME,                        /* pd_hello */
    PD_FRAME_REFUSED,                        /* text: why */
    PD_FRAME_PING,                           /* nothing: the sender lives */
    PD_FRAME_LEASE,                          /* hd_lease_message but RESERVE and PAGE */
    PD_FRAME_RESERVE,                        /* hd_lease_message, pd_prompt, its tokens */
    PD_FRAME_PAGE,                           /* hd_lease_message, hd_page_head, its bytes */
    PD_N_FRAMES
} pd_frame_kind;

/* What must be equal on both sides, so that pages of one are those that the other would compute.
 * Texts end with 0 and are filled up with 0. */
typedef struct pd_facts {
    char version[PD_WORD], family[PD_WORD], number_format[PD_WORD];
    uint64_t weights; /* hd_model_fingerprint() */
    /* with --sum-in-ranks the parts of heads, experts and dense MLPs: the order of sums. Else 0. */
    uint64_t sums[3];
    uint64_t page_tokens, page_bytes[HD_N_KV_GROUPS];
} pd_facts;

/* Returns what differs, as words: "page size". NULL: nothing. */
const char *pd_facts_difference(const pd_facts *a, const pd_facts *b);

typedef struct pd_hello {
    uint64_t epoch; /* of the process, higher in each life */
    pd_facts facts;
    char name[PD_NAME]; /* "host:port" of the server for clients */
} pd_hello;

/* Reads the hello behind `before` bytes of a payload of n. HD_EFORMAT: its length, epoch, a text or the
 * name is wrong. */
hd_status pd_hello_read(pd_hello *out, const void *payload, size_t before, size_t n,
                        hd_err *err);

typedef struct pd_prompt {
    uint64_t salt;
    uint64_t weights; /* hd_page_job.weights of the receiver */
    int32_t n_tokens; /* that follow: all of the pages and one more */
    int32_t priority;
    hd_page_range pages;        /* of the lease */
    char trace_id[PD_TRACE_ID]; /* what the receiver's log calls the request; "": nothing */
} pd_prompt;

/* Reads the message at the beginning of a payload of n bytes in a frame of this kind. HD_EFORMAT:
 * its length, or it is of a kind that has no place there. */
hd_status pd_lease_read(hd_lease_message *out, pd_frame_kind frame, const void *payload,
                        size_t n, hd_err *err);

/* Reads the prompt of a RESERVE. The trace id is a text, tokens are in [0, vocab). *tokens points into payload, which is
 * aligned for them. HD_EFORMAT: a length, count or token is wrong. */
hd_status pd_prompt_read(pd_prompt *out, const int32_t **tokens, const void *payload, size_t n,
                         int32_t page_tokens, int32_t vocab, hd_err *err);

#endif
