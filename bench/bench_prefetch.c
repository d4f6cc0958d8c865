/* bench_prefetch.c - how long rows of a large mapped file take, as a step reads those of an Engram
 * table: asked for ahead or not, when the file is in memory and when it is not.
 *
 *     build/bench_prefetch FILE GIGABYTES [TOKENS]
 *
 * Writes FILE unless it has that size. A token reads 48 rows of 264 bytes at random places.
 * Prints microseconds per token of the reader, and the share of rows that were in memory. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/philox.h"
#include "base/prefetch.h"

enum { ROWS = 48, ROW = 264, ROUNDS = 40 };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int write_file(const char *path, size_t bytes) {
    static char block[1 << 20];
    const int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0) return -1;
    if ((size_t)lseek(fd, 0, SEEK_END) == bytes) return fd;
    for (size_t at = 0; at < bytes; at += sizeof block) {
        for (size_t i = 0; i < sizeof block; i += 64) block[i] = (char)(at >> 20);
        if (pwrite(fd, block, sizeof block, (off_t)at) != (ssize_t)sizeof block) return -1;
    }
    return fsync(fd) == 0 ? fd : -1;
}

static const uint8_t *row_at(const hd_map *map, uint64_t round, int32_t i) {
    const hd_philox b = hd_philox_at(round, 1, (uint64_t)i);
    const uint64_t rows = map->bytes / ROW;
    return map->data + ((uint64_t)b.v[0] << 32 | b.v[1]) % rows * ROW;
}

/* Reads the rows of all rounds; lead: seconds between asking and reading, as an earlier layer
 * takes. */
static void measure(const char *what, const hd_map *map, hd_prefetch *p, int32_t tokens,
                    uint64_t seed, double lead) {
    const hd_prefetch_stats before = hd_prefetch_read_stats(p);
    double spent = 0, longest = 0;
    unsigned sum = 0;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        hd_prefetch_piece *list = lead >= 0 ? hd_prefetch_list(p, tokens * ROWS) : NULL;
        for (int32_t i = 0; list && i < tokens * ROWS; i++) {
            list[i] = (hd_prefetch_piece){row_at(map, seed + round, i), ROW};
        }
        if (list) hd_prefetch_start(p, tokens * ROWS);
        const double from = seconds() + (lead > 0 ? lead : 0);
        while (seconds() < from) {
        }
        const double start = seconds();
        for (int32_t i = 0; i < tokens * ROWS; i++) {
            const uint8_t *row = row_at(map, seed + round, i);
            for (int32_t k = 0; k < ROW; k += 64) sum += row[k];
        }
        const double took = seconds() - start;
        spent += took;
        if (took > longest) longest = took;
    }
    const hd_prefetch_stats s = hd_prefetch_read_stats(p);
    const double asked = (double)(s.pieces - before.pieces);
    printf("%-34s %9.1f us/token, longest step %8.2f ms, in memory %5.1f %% (%u)\n", what,
           spent * 1e6 / (ROUNDS * tokens), longest * 1e3,
           asked > 0 ? 100 * (double)(s.resident - before.resident) / asked : 0.0, sum & 1);
}

/* Drops the file from memory, as far as the system does. */
static void cool(int fd, hd_map *map, const char *path) {
    hd_err err = {0};
    hd_map_close(map);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (hd_map_open(map, path, &err) != HD_OK) fprintf(stderr, "%s\n", err.msg);
}

int main(int argc, char **argv) {
    hd_err err = {0};
    hd_map map;
    hd_prefetch *p;
    if (argc < 3) {
        fputs("usage: bench_prefetch FILE GIGABYTES [TOKENS]\n", stderr);
        return 2;
    }
    const size_t bytes = (size_t)(atof(argv[2]) * 1e3) << 20;
    const int32_t tokens = argc > 3 ? atoi(argv[3]) : 1;
    const int fd = write_file(argv[1], bytes);
    if (fd < 0 || hd_map_open(&map, argv[1], &err) != HD_OK ||
        hd_prefetch_open(&p, tokens * ROWS, &err) != HD_OK) {
        fprintf(stderr, "%s: cannot be used: %s\n", argv[1], err.msg);
        return 1;
    }
    printf("%zu MB, steps of %d tokens\n", bytes >> 20, tokens);
    const struct {
        const char *what;
        bool cold, random;
        double lead;
    } cases[] = {
        {"cold, mapped as it is",      true,  false, -1  },
        {"cold, read at random",       true,  true,  -1  },
        {"cold, asked for when read",  true,  true,  0   },
        {"cold, asked for 5 ms ahead", true,  true,  5e-3},
        {"warm, not asked for",        false, true,  -1  },
        {"warm, asked for 5 ms ahead", false, true,  5e-3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (cases[i].cold) cool(fd, &map, argv[1]);
        if (cases[i].random) hd_prefetch_at_random(map.data, map.bytes);
        const uint64_t seed =
            cases[i].cold ? 1000 * i : 3000; /* warm: rows of the case before */
        measure(cases[i].what, &map, p, tokens, seed, cases[i].lead);
    }
    hd_prefetch_close(p);
    hd_map_close(&map);
    close(fd);
    return 0;
}
