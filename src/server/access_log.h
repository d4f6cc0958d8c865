/* access_log.h - access log: a JSON line for each request that ended, with its client, path,
 * status and times. Refused requests are included, whatever refused them. Queries, bodies,
 * keys and replies are not logged. */
#ifndef HD_SERVER_ACCESS_LOG_H
#define HD_SERVER_ACCESS_LOG_H

#include "http/listen.h"
#include "server/line_file.h"

/* For http_options.on_end, with the line_file as user. */
void access_log_write(void *file, const http_ended *e);

#endif
