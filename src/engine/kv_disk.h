/* kv_disk.h - folders for KV pages: options of the form "DIR:GB", and what pages on a disk are of. */
#ifndef HD_ENGINE_KV_DISK_H
#define HD_ENGINE_KV_DISK_H

#include "hadal.h"
#include "kv/disk_format.h"

/* Splits the option of that name. *dir: free() it. bytes may be NULL. */
hd_status hd_kv_disk_split(char **dir, double *bytes, const char *name, const char *option,
                           hd_err *err);

/* Writes what the bits of pages depend on, beside weights that came since the engine was opened with o:
 * pages with the same name have the same bits if this text is the same. */
hd_status hd_engine_page_identity(char out[HD_DISK_IDENTITY], const hd_engine *e,
                                  const hd_engine_options *o, hd_err *err);

#endif
