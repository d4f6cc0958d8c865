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

void records_submit(request_records *r, uint64_t id, http_call *c, const hd_generation *g);
void records_end(request_records *r, const api_outcome *o);

/* Cancels requests by their id or its beginning, NULL: all; how many. */
int32_t records_abort(request_records *r, hd_engine *e, const char *request_id);

/* From now on a fatal signal writes the living requests before the process ends. */
void records_watch_crashes(request_records *r);

#endif
