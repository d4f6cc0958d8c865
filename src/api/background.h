/* background.h - responses that go on without the client that asked for them: found by their
 * id while they run, cancelled, forgotten, and followed from any event on. */
#ifndef HD_API_BACKGROUND_H
#define HD_API_BACKGROUND_H

#include "api/job.h"
#include "api/store.h"

typedef struct api_background api_background;

api_background *api_background_open(void);    /* NULL: no memory */
void api_background_close(api_background *b); /* nothing runs any more; NULL is fine */
size_t api_background_count(api_background *b);
void api_background_cancel_all(api_background *b);

/* ---- for the job, which calls them in this order ---- */

bool api_background_add(api_background *b, api_job *job); /* false: no memory */
void api_background_write(api_background *b, const api_job *job, const char *bytes, size_t n);
bool api_background_forgotten(api_background *b, const api_job *job);
/* Its events go to the store, if it is kept there. */
void api_background_remove(api_background *b, api_job *job, api_store *store);

/* ---- for others, by id and salt; false: none of this id runs ---- */

bool api_background_cancel(api_background *b, const char *id, uint64_t salt, bool forget);
/* Makes the call a stream of the events behind the first n_seen, and of all that follow. */
bool api_background_follow(api_background *b, const char *id, uint64_t salt, size_t n_seen,
                           http_call *c);

/* Where the events behind the first n begin: each ends with an empty line. */
size_t api_events_behind(const api_text *events, size_t n);

#endif
