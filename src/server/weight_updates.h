/* weight_updates.h - what the endpoints that replace and inspect weights share: one of them at
 * a time has the weights. */
#ifndef HD_SERVER_WEIGHT_UPDATES_H
#define HD_SERVER_WEIGHT_UPDATES_H

#include <stdatomic.h>

#include "server/server_internal.h"
#include "weights/update.h"

/* An update in parts, between its begin and its end. */
typedef struct update_session {
    hd_weights_update *update; /* NULL: none has begun */
    json_int_t number;         /* of this update, or of the last */
    json_int_t parts;          /* how many were taken */
    hd_weights_selector selector;
    char version[HD_MAX_WEIGHT_VERSION + 1]; /* the last part's that named one; "": none did */
    bool spoilt;                             /* a part was refused */
} update_session;

struct weight_updates {
    const char *model_dir, *weights_dir; /* weights_dir NULL: updates are refused */
    pthread_mutex_t busy;                /* whoever has the weights; guards the next */
    update_session session;
    uint64_t *snapshot;   /* [tensors of the checkpoint] checksums; NULL: none */
    atomic_bool begun;    /* session.update is not NULL; anyone may read it */
    pthread_mutex_t lock; /* guards path */
    char path[4096];      /* folder of the weights in use */
};

/* A call that has the weights for itself, and its reply. */
typedef struct weight_call {
    http_call *http;
    int status;
    json_t *reply;
} weight_call;

typedef void weight_updates_handler(server *s, weight_call *c, json_t *body);

/* Runs fn on a worker thread with the call's body, then sends the reply. Refuses, as 501
 * without --weights-dir and as 409 while another call has the weights. */
void weight_updates_handle(http_call *c, server *s, weight_updates_handler *fn);

void weight_updates_answer(weight_call *c, int status, json_t *reply); /* takes reply */

/* {"success": ..., "message": ...}, SGLang's, with status 200; with another also the error as
 * other endpoints have it. */
HD_PRINTF(3, 4)
void weight_updates_reply(weight_call *c, int status, const char *format, ...);

/* Replies to a failed update; 400 if the caller can mend it. */
void weight_updates_failed(weight_call *c, const hd_err *err);

/* Replies to calls that need the weights' values while they are released or lost; true: it did. */
bool weight_updates_refuse_lost(server *s, weight_call *c);

/* weights_folder.c: opens an update by all tensors of a folder. The folder must lie below
 * --weights-dir or be the model's own, and be the same model. *out may be set also on failure. */
hd_status weights_read_folder(server *s, hd_weights_update **out, const char *path,
                              hd_weights_selector selector, hd_err *err);

/* weights_checker.c */
void weights_on_checker(http_call *c, void *user);
void weights_on_by_name(http_call *c, void *user);

/* memory_occupation.c */
void weights_on_release(http_call *c, void *user);
void weights_on_resume(http_call *c, void *user);

#endif
