/* dump.h - keeps the crash dumps of earlier runs until an operator has looked at them. */
#ifndef HD_SERVER_DUMP_H
#define HD_SERVER_DUMP_H

#include "base/status.h"

enum { DUMPS_KEPT = 9 };

/* Called before path is opened for the dumps of this run. A dump of an earlier run is moved
 * to path.1, path.1 to path.2 and so on up to path.9, whose content is lost. Pipes and
 * devices are left alone. Existing dumps are named in the log, with the command that replays
 * the newest. Does nothing if path is NULL. */
hd_status dump_keep_earlier(const char *path, const char *model_dir, hd_err *err);

#endif
