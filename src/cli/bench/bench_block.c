/* bench_block.c - see bench_block.h. */
#include "cli/bench/bench_block.h"

#include "base/status.h"

void block_heading(FILE *to, const char *text, char fill) {
    enum { WIDTH = 50 };
    const int n = (int)snprintf(NULL, 0, "%s", text), left = (WIDTH - n) / 2;
    for (int i = 0; i < left; i++) fputc(fill, to);
    fputs(text, to);
    for (int i = left + n; i < WIDTH; i++) fputc(fill, to);
    fputc('\n', to);
}

void block_text(FILE *to, const char *label, const char *text) {
    fprintf(to, "%-40s %s\n", label, text);
}

void block_count(FILE *to, const char *label, int64_t n) {
    fprintf(to, "%-40s %lld\n", label, (long long)n);
}

void block_real(FILE *to, const char *label, double value) {
    fprintf(to, "%-40s %.2f\n", label, value);
}

enum { N_FIGURES = 6 };

/* Figures by their words in lines (i = 0) and in keys (i = 1). */
static const char *const words[N_FIGURES][2] = {
    {"Mean",   "mean"  },
    {"Median", "median"},
    {"P90",    "p90"   },
    {"P95",    "p95"   },
    {"P99",    "p99"   },
    {"Max",    "max"   }
};

static double figure(const hd_quantiles *t, int i) {
    const double values[N_FIGURES] = {t->mean, t->median, t->p90, t->p95, t->p99, t->max};
    return values[i];
}

void block_times(FILE *to, const char *title, const char *name, const hd_quantiles *t) {
    block_heading(to, title, '-');
    for (int i = 0; i < N_FIGURES; i++) {
        char label[64];
        snprintf(label, sizeof label, "%s %s (ms):", words[i][0], name);
        block_real(to, label, figure(t, i));
    }
}

void block_put_times(json_t *o, const char *name, const hd_quantiles *t) {
    for (int i = 0; i < N_FIGURES; i++) {
        char key[64];
        snprintf(key, sizeof key, "%s_%s_ms", words[i][1], name);
        json_object_set_new(o, key, json_real(figure(t, i)));
    }
}
