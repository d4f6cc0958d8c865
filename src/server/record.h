/* record.h - the living requests: found by their id, logged at their end, dumped in a crash.
 *
 * The request log holds a JSON object per line: what was asked and what was answered, enough
 * for `hadal replay`. A crash dump holds what was asked. */
#ifndef HD_SERVER_RECORD_H
#define HD_SERVER_RECORD_H

#include "base/status.h"
#include "api/api.h"

typedef struct request_records request_records;

/* capacity: calls that can live at once. log_fd and crash_fd: -1 for none; owned. */
request_records *records_new(int32_t capacity, int log_fd, int crash_fd);
void records_free(request_records *r); /* NULL is fine */

/* Before the engine has anything of the call: what crashes from now on leaves it in the dump. */
void records_begin(request_records *r, http_call *c, uint64_t seed);
/* The engine has a prompt of it, as id. False: the call was aborted meanwhile. */
bool records_submit(request_records *r, http_call *c, uint64_t id);
void records_end(request_records *r, const api_outcome *o);

/* Cancels calls by their request id or its beginning, NULL: all. */
void records_abort(request_records *r, hd_engine *e, const char *request_id);

/* The engine's ids of the calls with this request id and salt; how many of ids[max] were written. */
size_t records_find(request_records *r, const char *request_id, uint64_t salt, uint64_t *ids,
                    size_t max);

int32_t records_living(request_records *r);

/* From now on a fatal signal writes the living requests before the process ends. */
void records_watch_crashes(request_records *r);

#endif
