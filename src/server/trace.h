/* trace.h - profiles of steps and requests as Chrome trace files, between /start_profile and
 * /stop_profile. Events are kept in memory up to a limit, and written at the end. */
#ifndef HD_SERVER_TRACE_H
#define HD_SERVER_TRACE_H

#include "base/status.h"
#include "api/api.h"

typedef struct trace trace;

trace *trace_new(const char *dir); /* dir NULL: profiles are refused */
void trace_free(trace *t);         /* NULL is fine */

/* name: a plain file name or NULL. n_steps 0: until stopped. HD_EAGAIN: a profile is already
 * running. */
hd_status trace_start(trace *t, const char *name, int64_t n_steps, hd_err *err);
/* Writes the path of the trace to path[size]. */
hd_status trace_stop(trace *t, char *path, size_t size, hd_err *err);

/* Cheap if no profile is running. Any thread may call. */
void trace_request(trace *t, const api_outcome *o);
void trace_tick(trace *t, hd_engine *e);

#endif
