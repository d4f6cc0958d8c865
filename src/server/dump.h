/* dump.h - crash dumps of earlier runs are kept until somebody has looked at them. */
#ifndef HD_SERVER_DUMP_H
#define HD_SERVER_DUMP_H

#include "base/status.h"

enum { DUMPS_KEPT = 9 };

/* Before path is opened for the dumps of this run: what an earlier one left there is moved to path.1,
 * what was there to path.2 and so on up to path.9, whose content is the one that goes. A pipe or a
 * device stays as it is. Dumps that lie there are named in the log, with the command that replays
 * the newest of them. path NULL: nothing is done. */
hd_status dump_keep_earlier(const char *path, const char *model_dir, hd_err *err);

#endif
