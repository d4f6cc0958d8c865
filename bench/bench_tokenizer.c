/* bench_tokenizer.c - how long encoding a file takes, without opening and printing.
 *
 *     build/bench_tokenizer DIR FILE REPEATS
 *
 * prints one line: the number of tokens, then the seconds of each repeat. */
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/progress.h"
#include "text/tokenizer.h"

static hd_status measure(const char *dir, const char *path, long repeats, hd_err *err) {
    hd_tokenizer *t = NULL;
    hd_ids ids = {0};
    char *text = NULL;
    size_t n = 0;
    hd_status st = hd_tokenizer_open(&t, dir, err);
    if (st == HD_OK) st = hd_file_read(&text, &n, path, INT32_MAX, err);
    for (long i = 0; st == HD_OK && i < repeats; i++) {
        ids.n = 0;
        int64_t start = hd_now_ns();
        st = hd_tokenizer_encode(t, text, n, 0, &ids, err);
        double seconds = (double)(hd_now_ns() - start) * 1e-9;
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
