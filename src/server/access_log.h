/* access_log.h - access log: a JSON line for each request that ended, with its client, path,
 * status and times. Refused requests are included, whatever refused them. Queries, bodies,
 * keys and replies are not logged. */
#ifndef HD_SERVER_ACCESS_LOG_H
#define HD_SERVER_ACCESS_LOG_H

#include "http/listen.h"
#include "server/line_file.h"

/* Has each request that ends logged. path: a file; "-": standard error; NULL: nothing is logged, and
 * the file is that of line_file_close() all the same. */
hd_status access_log_open(line_file *file, const char *path, http_options *http, hd_err *err);

#endif
