/* disk_files.h - the files of a store of KV pages, behind a table of calls, so that tests can put
 * other files there that fail, tear and lose what was written.
 *
 * A folder has several stores if several processes share it: store 0 has the files `store`,
 * `full.heads` and so on, store 3 `3.store`, `3.full.heads`. Files belong to this user alone (mode
 * 0600, no links). One process at a time has a store open for writing. Calls but open and close may
 * come from any thread. */
#ifndef HD_KV_DISK_FILES_H
#define HD_KV_DISK_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "hadal_types.h"

typedef enum hd_disk_file {
    HD_DISK_STORE,
    HD_DISK_HEADS,                                  /* one of each KV group */
    HD_DISK_PAGES = HD_DISK_HEADS + HD_N_KV_GROUPS, /* the same */
    HD_N_DISK_FILES = HD_DISK_PAGES + HD_N_KV_GROUPS
} hd_disk_file;

enum { HD_DISK_STORES = 64 }; /* of a folder, at most */

/* Calls return 0 or an errno. */
typedef struct hd_disk_files {
    void *ctx;
    int (*read)(void *ctx, hd_disk_file f, void *bytes, size_t n, uint64_t at); /* all of n */
    int (*write)(void *ctx, hd_disk_file f, const void *bytes, size_t n, uint64_t at);
    int (*sync)(void *ctx, hd_disk_file f); /* what was written survives a power cut */
    int (*size)(void *ctx, hd_disk_file f, uint64_t *bytes);
    int (*cut)(void *ctx, hd_disk_file f, uint64_t bytes); /* to at most so many */
    void (*close)(void *ctx);
} hd_disk_files;

const char *hd_disk_file_name(hd_disk_file f);

/* Opens the files of a store in the folder dir, which must exist. writes: makes those that are missing,
 * and locks the store; HD_EAGAIN: another process has it. Otherwise HD_EINVAL: there is no store. */
hd_status hd_disk_files_open(hd_disk_files *out, const char *dir, int32_t store, bool writes,
                             hd_err *err);

/* Deletes the files of a store that no process has open; HD_EINVAL: there is none. *n: how many files
 * there were. */
hd_status hd_disk_files_delete(const char *dir, int32_t store, int *n, hd_err *err);

#endif
