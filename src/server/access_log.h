/* access_log.h - a JSON line per request that ended: who asked for what and when, and no content.
 *
 * Refused requests are in it too, whoever refused them; queries, bodies, keys and answers are not. */
#ifndef HD_SERVER_ACCESS_LOG_H
#define HD_SERVER_ACCESS_LOG_H

#include "http/listen.h"
#include "server/line_file.h"

/* Of http_options.on_end, with the line_file as user. */
void access_log_write(void *file, const http_ended *e);

#endif
