/* disk_files.c - see disk_files.h. */
#include "fakes/disk_files.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"

enum { SECTOR = 512 };

static uint32_t draw(fake_disk *d, uint32_t below) {
    return hd_philox_at(d->seed, 1, d->draws++).v[0] % below;
}

void fake_disk_init(fake_disk *d, uint64_t seed) {
    *d = (fake_disk){.seed = seed, .dies_at = -1, .fails_at = -1};
}

void fake_disk_deinit(fake_disk *d) {
    for (int f = 0; f < HD_N_DISK_FILES; f++) {
        free(d->files[f].now);
        free(d->files[f].safe);
    }
}

uint64_t fake_disk_bytes(const fake_disk *d) {
    uint64_t n = 0;
    for (int f = 0; f < HD_N_DISK_FILES; f++) n += d->files[f].n;
    return n;
}

static void grow(fake_file *f, uint64_t n) {
    if (n > f->cap) {
        f->cap = n + n / 2;
        f->now = realloc(f->now, f->cap);
        f->safe = realloc(f->safe, f->cap);
    }
    if (n > f->n) {
        memset(f->now + f->n, 0, n - f->n);
        f->n = n;
    }
}

/* What happens at a call that changes files: 0, or an errno; *half: it is half done first. */
static int fate(fake_disk *d, bool *half) {
    const int64_t call = d->n_calls++;
    *half = false;
    if (d->dies_at >= 0 && call >= d->dies_at) {
        *half = call == d->dies_at;
        return EIO;
    }
    if (d->fails_at < 0 || call < d->fails_at || call > d->fails_to) return 0;
    *half = true;
    return d->why;
}

static int read_file(void *ctx, hd_disk_file which, void *bytes, size_t n, uint64_t at) {
    fake_disk *d = ctx;
    const fake_file *f = &d->files[which];
    if (d->reads_fail) return d->why;
    if (at + n > f->n) return ENODATA;
    if (n) memcpy(bytes, f->now + at, n);
    return 0;
}

static int write_file(void *ctx, hd_disk_file which, const void *bytes, size_t n, uint64_t at) {
    fake_disk *d = ctx;
    fake_file *f = &d->files[which];
    bool half;
    const uint64_t more = at + n > f->n ? at + n - f->n : 0;
    if (d->most && fake_disk_bytes(d) + more > d->most) return ENOSPC;
    const int why = fate(d, &half);
    if (why && half) n = draw(d, (uint32_t)n + 1);
    if ((why && !half) || n == 0) return why;
    grow(f, at + n);
    memcpy(f->now + at, bytes, n);
    return why;
}

static int sync_file(void *ctx, hd_disk_file which) {
    fake_disk *d = ctx;
    fake_file *f = &d->files[which];
    bool half;
    const int why = fate(d, &half);
    if (why) return why;
    if (f->n) memcpy(f->safe, f->now, f->n);
    f->n_safe = f->n;
    return 0;
}

static int size_of_file(void *ctx, hd_disk_file which, uint64_t *bytes) {
    fake_disk *d = ctx;
    *bytes = d->files[which].n;
    return 0;
}

static int cut_file(void *ctx, hd_disk_file which, uint64_t bytes) {
    fake_disk *d = ctx;
    bool half;
    const int why = fate(d, &half);
    if (!why && d->files[which].n > bytes) d->files[which].n = bytes;
    return why;
}

static void close_files(void *ctx) {
    (void)ctx;
}

hd_disk_files fake_disk_files(fake_disk *d) {
    return (hd_disk_files){.ctx = d,
                           .read = read_file,
                           .write = write_file,
                           .sync = sync_file,
                           .size = size_of_file,
                           .cut = cut_file,
                           .close = close_files};
}

/* A file that was cut may have its old length again. */
static void lengthen(fake_disk *d, fake_file *f) {
    if (f->n >= f->n_safe || draw(d, 2)) return;
    const uint64_t n = f->n;
    grow(f, f->n_safe);
    memcpy(f->now + n, f->safe + n, f->n - n);
}

/* A sector beyond the end of the synced file reads as zeros until it is written. */
static void cut_power(fake_disk *d, fake_file *f) {
    lengthen(d, f);
    for (uint64_t at = 0; at < f->n; at += SECTOR) {
        const uint64_t n = f->n - at < SECTOR ? f->n - at : SECTOR;
        const uint64_t old = at < f->n_safe ? (f->n_safe - at < n ? f->n_safe - at : n) : 0;
        if (draw(d, 2)) continue;
        memset(f->now + at, 0, n);
        if (old) memcpy(f->now + at, f->safe + at, old);
    }
    if (f->n > f->n_safe && draw(d, 2)) {
        f->n = f->n_safe + draw(d, (uint32_t)(f->n - f->n_safe) + 1);
    }
}

void fake_disk_restart(fake_disk *d, bool power_cut) {
    for (int f = 0; power_cut && f < HD_N_DISK_FILES; f++) cut_power(d, &d->files[f]);
    d->dies_at = d->fails_at = -1;
    d->reads_fail = false;
}
