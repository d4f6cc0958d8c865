/* bench_tokenizer.c - how long encoding takes, without opening and printing.
 *
 *     build/bench_tokenizer DIR FILE REPEATS
 *
 * FILE holds documents with a NUL byte between; each is encoded by a call of its own. Prints one
 * line: the number of tokens, then the seconds of processor time of each repeat. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/file.h"
#include "tokenizer/tokenizer.h"

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static hd_status encode_documents(const hd_tokenizer *t, const char *text, size_t n,
                                  hd_ids *ids, hd_err *err) {
    size_t at = 0;
    while (at < n) {
        const char *end = memchr(text + at, 0, n - at);
        size_t length = end ? (size_t)(end - text) - at : n - at;
        HD_TRY(hd_tokenizer_encode(t, text + at, length, 0, ids, err));
        at += length + 1;
    }
    return HD_OK;
}

static hd_status measure(const char *dir, const char *path, long repeats, hd_err *err) {
    hd_tokenizer *t = NULL;
    hd_ids ids = {0};
    char *text = NULL;
    size_t n = 0;
    hd_status st = hd_tokenizer_open(&t, dir, err);
    if (st == HD_OK) st = hd_file_read(&text, &n, path, INT32_MAX, err);
    for (long i = 0; st == HD_OK && i < repeats; i++) {
        ids.n = 0;
        double start = cpu_seconds();
        st = encode_documents(t, text, n, &ids, err);
        double seconds = cpu_seconds() - start;
        if (i == 0) printf("%zu", ids.n);
        printf(" %.6f", seconds);
    }
    putchar('\n');
    hd_ids_deinit(&ids);
    hd_tokenizer_close(t);
    free(text);
    return st;
}

int main(int argc, char **argv) {
    hd_err err = {0};
    if (argc != 4) {
        fputs("usage: bench_tokenizer DIR FILE REPEATS\n", stderr);
        return 2;
    }
    if (measure(argv[1], argv[2], strtol(argv[3], NULL, 10), &err) == HD_OK) return 0;
    fprintf(stderr, "error: %s\n", err.msg);
    return 1;
}
