/* api_rig.h - runs the handlers of src/api without sockets and without a model: a call
 * records its response, an engine sends scripted events. One thread. */
#ifndef HD_TESTS_FAKES_API_RIG_H
#define HD_TESTS_FAKES_API_RIG_H

#include "api/api.h"
#include "api/store.h"
#include "tokenizer/tokenizer.h"

/* ---- the engine ---- */

typedef struct rig_request {
    uint64_t id;
    hd_request g; /* its pointers are invalid */
    int32_t n_prompt, n_prompt_scored, living, n_events;
    bool cancelled;
} rig_request;

enum { RIG_REQUESTS = 128 };

typedef struct rig {
    api_context ctx;
    rig_request requests[RIG_REQUESTS];
    int32_t n_requests;
    uint64_t salt;      /* salt of the calls' tenant */
    int64_t key_tokens; /* its quota; 0: none */
    int32_t key_wait;   /* result of reserving some of it */
    int64_t n_reserved;
    hd_status refuse_at_status; /* status of submission refuse_at and later ones */
    int32_t refuse_at;          /* -1: none */
    const char *refuse_why;
    const http_call *begun; /* the call whose handler runs, once it begins */
    int32_t n_begins, n_submits, n_ends, n_tokens_seen, n_cancels;
    char unknown[64];
    api_outcome outcome;
} rig;

void rig_init(rig *r); /* one at a time */
void rig_deinit(rig *r);

/* Sends one token that adds one part to answer a of request i. */
void rig_say(rig *r, int32_t i, int32_t a, hd_delta_kind kind, int32_t call, const char *text);
void rig_end(rig *r, int32_t i, int32_t a, hd_finish_reason end); /* stop_token is 1 */
void rig_stop(rig *r, int32_t i, int32_t a, const char *stop_text);
/* Sends one event of every kind to every unfinished answer and finishes them all. */
void rig_play(rig *r);

/* ---- a call ---- */

typedef struct rig_call rig_call;

/* Runs the route's handler; aborts if there is none. */
rig_call *rig_post(rig *r, const char *path, const char *body);
rig_call *rig_post_bytes(rig *r, const char *path, const char *body, size_t n);
rig_call *rig_get(rig *r, const char *path);
void rig_vanish(rig_call *c); /* the client disconnects */
void rig_stall(rig_call *c);  /* the stream accepts nothing from now on */

int rig_status(const rig_call *c); /* 0: no answer yet */
const char *rig_text(rig_call *c); /* the body, or the stream so far */
const char *rig_header(const rig_call *c, const char *name); /* of the response, or NULL */
bool rig_ended(const rig_call *c);
bool rig_was_handed_over(const rig_call *c);
/* Drops the test's reference. Returns true if it was the last and the call is freed. */
bool rig_release(rig_call *c);

#endif
