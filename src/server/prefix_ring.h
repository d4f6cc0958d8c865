/* prefix_ring.h - the prompts that routers sent here lately, as hashes of their beginnings
 * (router/prefix.h), so that every router learns what is probably cached: one that was restarted, and
 * those beside the one that sent them. The newest are kept. What they hash only routers know. */
#ifndef HD_SERVER_PREFIX_RING_H
#define HD_SERVER_PREFIX_RING_H

#include <jansson.h>

#include "base/status.h"

#define PREFIX_RING_HEADER "X-Hadal-Prefix" /* base64 of u64 hashes */

typedef struct prefix_ring prefix_ring;

hd_status prefix_ring_open(prefix_ring **out, hd_err *err);
void prefix_ring_close(prefix_ring *r); /* NULL is fine */

/* Adds what a header says. NULL and what is no list of hashes change nothing. Any thread. */
void prefix_ring_add(prefix_ring *r, const char *header);

/* The cache is empty. Any thread. */
void prefix_ring_forget(prefix_ring *r);

/* Returns the oldest hashes behind a place "EPOCH.NUMBER", at most 4096, with the place behind them:
 * epoch, next and hashes. A place of another epoch is like none. NULL: no memory. Any thread. */
json_t *prefix_ring_report(prefix_ring *r, const char *place);

#endif
