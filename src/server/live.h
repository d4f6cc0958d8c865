/* live.h - the live view: /engine/live sends an SSE event of statistics every quarter
 * second. */
#ifndef HD_SERVER_LIVE_H
#define HD_SERVER_LIVE_H

#include <jansson.h>

#include "hadal.h"
#include "api/text.h"
#include "http/http.h"
#include "server/metrics/metrics.h"
#include "server/rank_view.h"

typedef struct live_view live_view;

live_view *live_new(metrics *m, rank_view *ranks); /* NULL: no memory */
void live_free(live_view *v);                      /* NULL is fine */

bool live_add(live_view *v, http_call *c);  /* retains the call; false: too many viewers */
void live_tick(live_view *v, hd_engine *e); /* on the ticker thread, every quarter second */
void live_end(live_view *v);                /* ends all streams; NULL is fine */
double live_tokens_per_s(live_view *v);
void live_history(live_view *v, api_text *out); /* see history.h */

/* Returns a request as the live view describes it: a new reference, or NULL without memory. */
json_t *live_request(const hd_request_status *r);

#endif
