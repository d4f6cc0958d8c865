/* leaders.h - exchanges between the leaders of attention groups, on their threads. All make the same
 * ones in the same order: what a round's order says. */
#ifndef HD_ENGINE_LEADERS_H
#define HD_ENGINE_LEADERS_H

#include "engine/rank.h"

hd_status engine_make_room(hd_bytes *b, size_t n, hd_err *err); /* makes it n bytes long */

/* Bytes of the first leader, for all. */
hd_status engine_leaders_broadcast(const engine_rank *rank, void *data, size_t n, hd_err *err);
/* data [n], of which bytes first .. first + own - 1 are this leader's; all in units of 4. */
hd_status engine_leaders_gather(const engine_rank *rank, void *data, size_t n, size_t first,
                                size_t own, hd_err *err);

#endif
