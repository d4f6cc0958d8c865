/* kv_disk.h - the engine option kv_disk: "DIR:GB". */
#ifndef HD_ENGINE_KV_DISK_H
#define HD_ENGINE_KV_DISK_H

#include "base/status.h"

/* Splits the option. *dir: free() it. bytes may be NULL. */
hd_status hd_kv_disk_split(char **dir, double *bytes, const char *option, hd_err *err);

#endif
