/* record.h - records of living requests: found by id for aborts, logged when they end
 * (request log), written to a file in a crash (crash dump). The request log contains a JSON
 * object per line with request and reply, enough for `hadal replay`. A crash dump contains
 * the requests. */
#ifndef HD_SERVER_RECORD_H
#define HD_SERVER_RECORD_H

#include "base/status.h"
#include "api/api.h"

typedef struct request_records request_records;

/* capacity: the most calls that can live at once. log_fd and crash_fd are owned; -1: no
 * file. */
request_records *records_new(int32_t capacity, int log_fd, int crash_fd);
void records_free(request_records *r); /* NULL is fine */

/* Called before any of the call is submitted: the dump of a later crash contains it. */
void records_begin(request_records *r, http_call *c, uint64_t seed);
/* The engine accepted a prompt of the call as id. Returns false if the call was aborted
 * meanwhile. */
bool records_submit(request_records *r, http_call *c, uint64_t id);
void records_end(request_records *r, const api_outcome *o);

/* Aborts calls whose request id begins with the given text; NULL: all calls. */
void records_abort(request_records *r, hd_engine *e, const char *request_id);

/* Writes the engine's ids of the calls with this request id and salt to ids[max]; returns
 * how many. */
size_t records_find(request_records *r, const char *request_id, uint64_t salt, uint64_t *ids,
                    size_t max);

int32_t records_living(request_records *r);

/* Installs handlers: a fatal signal writes the living requests before the process ends. */
void records_watch_crashes(request_records *r);

#endif
