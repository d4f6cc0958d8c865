/* disk_survey.h - what a store of KV pages has, without its server: for people who look at it. */
#ifndef HD_KV_DISK_SURVEY_H
#define HD_KV_DISK_SURVEY_H

#include "kv/disk_files.h"
#include "kv/disk_format.h"

typedef struct hd_disk_survey {
    hd_disk_header header;
    int32_t pages[HD_N_KV_GROUPS]; /* that can be found */
    int32_t wrong[HD_N_KV_GROUPS]; /* of them: with a wrong checksum, if they were read */
    uint64_t bytes;                /* of all files */
} hd_disk_survey;

/* Reads heads, and with `check` all pages. HD_EFORMAT, HD_EINVAL: as hd_disk_header_read(). */
hd_status hd_disk_survey_read(hd_disk_survey *out, const hd_disk_files *f, const char *where,
                              bool check, hd_err *err);

#endif
