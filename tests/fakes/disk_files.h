/* disk_files.h - files of a store of KV pages in memory, which fail as disks do: at any call with
 * any errno, with half of a write done, or with what was not synced lost, kept or reordered sector
 * by sector. */
#ifndef HD_TESTS_FAKES_DISK_FILES_H
#define HD_TESTS_FAKES_DISK_FILES_H

#include "kv/disk_files.h"

typedef struct fake_file {
    uint8_t *now, *safe; /* what is read; what a power cut leaves for sure */
    uint64_t n, n_safe, cap;
} fake_file;

typedef struct fake_disk {
    fake_file files[HD_N_DISK_FILES];
    uint64_t seed, draws;
    int64_t n_calls;  /* writes, syncs and cuts so far */
    int64_t dies_at;  /* the process is gone from this call on, which is half done; -1: never */
    int64_t fails_at; /* this call fails, half done; -1: none */
    int64_t fails_to; /* so do those before this one */
    int why;          /* errno of these, and of reads if set */
    bool reads_fail;  /* all of them */
    uint64_t most;    /* bytes of all files before ENOSPC; 0: no limit */
} fake_disk;

void fake_disk_init(fake_disk *d, uint64_t seed);
void fake_disk_deinit(fake_disk *d);
hd_disk_files fake_disk_files(fake_disk *d);

/* What is found when the process was killed, or the power was cut: of every sector that was written
 * after the last sync the old or the new content. */
void fake_disk_restart(fake_disk *d, bool power_cut);

uint64_t fake_disk_bytes(const fake_disk *d);

#endif
