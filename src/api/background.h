/* background.h - background responses (/v1/responses with background: true): they run on
 * without their client. They are found by id while they run, and can be cancelled,
 * forgotten, or followed (streamed) from any event on. */
#ifndef HD_API_BACKGROUND_H
#define HD_API_BACKGROUND_H

#include "api/job.h"
#include "api/store.h"

typedef struct api_background api_background;

api_background *api_background_open(void);    /* NULL: no memory */
void api_background_close(api_background *b); /* no job may run any more; NULL is fine */
size_t api_background_count(api_background *b);
void api_background_cancel_all(api_background *b);

/* ---- for the job, which calls these in this order ---- */

bool api_background_add(api_background *b, api_job *job); /* false: no memory */
void api_background_write(api_background *b, const api_job *job, const char *bytes, size_t n);
bool api_background_forgotten(api_background *b, const api_job *job);
/* Its events are moved to the store, if the response is stored there. */
void api_background_remove(api_background *b, api_job *job, api_store *store);

/* ---- for other requests, by id and salt; false: no such response runs (or it has no
 * events) ---- */

bool api_background_cancel(api_background *b, const char *id, uint64_t salt, bool forget);
/* Streams the events behind the first n_seen to the call, and all that follow. */
bool api_background_follow(api_background *b, const char *id, uint64_t salt, size_t n_seen,
                           http_call *c);

/* Returns where the events behind the first n begin; each event ends with an empty line. */
size_t api_events_behind(const api_text *events, size_t n);

#endif
