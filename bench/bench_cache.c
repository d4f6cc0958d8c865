/* bench_cache.c - the prefix cache at 100,000 cached prefixes, and what a cached token costs.
 *
 *     build/bench_cache [N_PREFIXES]
 *
 * Three parts. Speed: a forest of conversations, each prefix an earlier one and a turn more,
 * 1k to 30k tokens long; inserting them all, matching them all in random order, and inserting
 * more into a full cache. A page operation is one page matched or one page entered. Memory: bytes
 * per cached token of every family at its real sizes, from kv/kv.c. And what stays of a request
 * of 10,000 tokens in a V4 cache. */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/philox.h"
#include "kv/cache.h"
#include "weights/spec.h"

enum {
    LONGEST = 30000,
    SHORTEST = 1000,
    CHUNK = 512,
    SPARE_PAGES = 64,    /* beyond the prefixes, for the sequence that grows */
    WANTED = 1000 * 1000 /* page operations per second that are wanted */
};

/* ---- a forest of conversations ---- */

typedef struct prefix {
    int32_t parent; /* -1: begins by itself */
    int32_t from;   /* tokens shared with the parent */
    int32_t n;
} prefix;

typedef struct forest {
    prefix *prefixes;
    int32_t n;
    int64_t n_tokens, n_own; /* of all prefixes; those that are nobody else's */
    int32_t tokens[LONGEST];
} forest;

static uint32_t draw(uint64_t stream, uint64_t at, uint32_t below) {
    return hd_philox_at(20261122, stream, at).v[0] % below;
}

/* A turn more on a conversation picked at random, or a new conversation. */
static void plant(forest *f, int32_t i) {
    const uint64_t at = (uint64_t)i;
    const int32_t parent = i % 64 ? (int32_t)draw(1, at, (uint32_t)i) : -1;
    const int32_t from = parent < 0 ? 0 : f->prefixes[parent].n;
    const int32_t turn = (parent < 0 ? SHORTEST : 200) + (int32_t)draw(2, at, 2000);
    prefix *p = &f->prefixes[i];
    *p = (prefix){parent, from, from + turn};
    if (p->n > LONGEST) *p = (prefix){-1, 0, LONGEST - turn};
    f->n_tokens += p->n;
    f->n_own += p->n - p->from;
}

/* Writes prefix i into f->tokens, from its end to its conversation's beginning. */
static void reuse(forest *f, int32_t i) {
    int32_t end = f->prefixes[i].n;
    while (i >= 0) {
        const prefix *p = &f->prefixes[i];
        for (int32_t t = p->from; t < end; t++) {
            f->tokens[t] =
                (int32_t)(((uint32_t)t * 2654435761u ^ (uint32_t)i * 40503u) % 129280);
        }
        end = hd_min_i32(end, p->from);
        i = p->parent;
    }
}

/* ---- speed ---- */

typedef struct work {
    int64_t pages, ns;
} work;

enum { SLICES = 5 }; /* of a pass; the median slice counts */

static int64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); /* a busy machine disturbs it least */
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* One request as the scheduler runs it: find the prefix, compute the rest in chunks, end. */
static hd_status insert(hd_cache *c, const int32_t *tokens, int32_t n, int32_t page_tokens,
                        work *w) {
    const int64_t start = cpu_ns();
    int32_t hit, done;
    HD_TRY(hd_cache_acquire(c, 0, 1, tokens, n, &hit));
    for (done = hit; done < n;) {
        done = hd_min_i32(n, done + CHUNK);
        HD_TRY(hd_cache_extend(c, 0, done));
        hd_cache_copied(c);
        hd_cache_commit(c, 0, tokens, done);
    }
    hd_cache_release(c, 0, true);
    w->ns += cpu_ns() - start;
    w->pages += n / page_tokens;
    return HD_OK;
}

static int32_t slice(int32_t i, int32_t n) {
    return (int32_t)((int64_t)i * SLICES / n);
}

static void match(const hd_cache *c, const forest *f, int32_t n, int32_t page_tokens, work *w) {
    const int64_t start = cpu_ns();
    const int32_t hit = hd_cache_match(c, 1, f->tokens, n);
    w->ns += cpu_ns() - start;
    w->pages += hit / page_tokens;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_work(const char *what, const work slices[SLICES]) {
    double rates[SLICES];
    int64_t pages = 0;
    for (int i = 0; i < SLICES; i++) {
        rates[i] = (double)slices[i].pages * 1e9 / (double)slices[i].ns;
        pages += slices[i].pages;
    }
    qsort(rates, SLICES, sizeof *rates, ascending);
    const double rate = rates[SLICES / 2];
    printf("  %-34s %9lld pages  %6.2f M/s  wanted %.2f  ratio %.2f\n", what, (long long)pages,
           rate * 1e-6, WANTED * 1e-6, rate / WANTED);
}

static size_t heap_bytes(void) {
    const struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

/* Pages of all prefixes: whole pages that no earlier prefix has. */
static int64_t pages_of(const forest *f, int32_t page_tokens) {
    int64_t pages = 0;
    for (int32_t i = 0; i < f->n; i++) {
        pages += f->prefixes[i].n / page_tokens - f->prefixes[i].from / page_tokens;
    }
    return pages;
}

static hd_status measure(forest *f, const char *family, const hd_kv_shape *shape, hd_err *err) {
    const int32_t page = shape->page_tokens, half = f->n / 2;
    const int64_t pages = pages_of(f, page);
    const hd_cache_options o = {
        .page_tokens = page,
        .lookback = shape->lookback,
        .n_pages = {(int32_t)pages + SPARE_PAGES, shape->lookback ? 4096 : 0    },
        .n_host = {0,                            shape->lookback ? 2 * f->n : 0},
        .max_seqs = 1,
        .seq_pages = LONGEST / page + 1
    };
    const size_t before = heap_bytes();
    hd_cache *c;
    HD_TRY(hd_cache_open(&c, &o, err));
    const double bytes = (double)(heap_bytes() - before);
    work inserted[SLICES] = {{0}}, matched[SLICES] = {{0}}, evicting[SLICES] = {{0}};
    hd_status st = HD_OK;
    for (int32_t i = 0; i < f->n && st == HD_OK; i++) {
        reuse(f, i);
        st = insert(c, f->tokens, f->prefixes[i].n, page, &inserted[slice(i, f->n)]);
    }
    const hd_cache_stats s = hd_cache_read_stats(c);
    for (int32_t i = 0; i < f->n && st == HD_OK; i++) {
        const int32_t any = (int32_t)draw(3, (uint64_t)i, (uint32_t)f->n);
        reuse(f, any);
        match(c, f, f->prefixes[any].n, page, &matched[slice(i, f->n)]);
    }
    for (int32_t i = 0; i < half && st == HD_OK; i++) { /* other texts, so all of it evicts */
        reuse(f, i);
        for (int32_t t = 0; t < f->prefixes[i].n; t++) f->tokens[t] += 200000;
        st = insert(c, f->tokens, f->prefixes[i].n, page, &evicting[slice(i, half)]);
    }
    if (st == HD_OK) {
        printf("\n%s: pages of %d tokens; %d prefixes, %lld tokens, %lld of them their own; "
               "%d pages cached\n",
               family, page, f->n, (long long)f->n_tokens, (long long)f->n_own, s.nodes);
        print_work("insert (match the rest)", inserted);
        print_work("match", matched);
        print_work("insert into a full cache (evict)", evicting);
        printf("  tree: %.0f bytes per prefix, %.0f per page, %.2f per cached token\n",
               bytes / f->n, bytes / (double)s.nodes, bytes / ((double)s.nodes * page));
    } else {
        HD_FAIL(err, st, "the cache has no room");
    }
    hd_cache_close(c);
    return st;
}

static hd_status measure_speed(int32_t n_prefixes, hd_err *err) {
    const struct {
        const char *family;
        hd_kv_shape shape;
    } cases[] = {
        {"V4",           {.page_tokens = 128, .lookback = 127}},
        {"V2, V3, V3.2", {.page_tokens = 64}                  }
    };
    forest *f = calloc(1, sizeof *f);
    if (f) f->prefixes = calloc((size_t)n_prefixes, sizeof *f->prefixes);
    hd_status st = f && f->prefixes ? HD_OK : HD_ENOMEM;
    if (st == HD_OK) {
        f->n = n_prefixes;
        for (int32_t i = 0; i < n_prefixes; i++) plant(f, i);
        for (size_t i = 0; st == HD_OK && i < 2; i++) {
            st = measure(f, cases[i].family, &cases[i].shape, err);
        }
    }
    if (f) free(f->prefixes);
    free(f);
    return st;
}

/* ---- memory ---- */

enum { BF16 = 2, FLOAT = 4, MAX_DRAFTS = 3, EXAMPLE = 10000, OTHERS = 3, POOL = 1000 };

/* Bytes of one page in all layers. */
static double page_bytes(const hd_model_spec *spec, int32_t n_mtp, hd_kv_group life,
                         int32_t act_bytes) {
    return (double)hd_kv_page_bytes(spec, spec->n_layers + n_mtp, life, act_bytes, MAX_DRAFTS);
}

static void print_memory(const char *name, const hd_model_spec *spec) {
    const hd_kv_shape shape = hd_kv_shape_of(spec);
    printf("  %-12s %6d", name, shape.page_tokens);
    for (int32_t bytes = BF16; bytes <= FLOAT; bytes += FLOAT - BF16) {
        for (int32_t mtp = 0; mtp <= spec->n_mtp; mtp += hd_max_i32(1, spec->n_mtp)) {
            printf(" %9.0f", page_bytes(spec, mtp, HD_KV_FULL, bytes) / shape.page_tokens);
        }
        if (!spec->n_mtp) printf(" %9s", "-");
        printf(" %9.2f", page_bytes(spec, spec->n_mtp, HD_KV_WINDOW, bytes) * 1e-6);
    }
    putchar('\n');
}

static int32_t held_windows(const hd_cache *c) {
    const hd_cache_stats s = hd_cache_read_stats(c);
    return s.pages[HD_KV_WINDOW] - s.free[HD_KV_WINDOW] - s.evictable[HD_KV_WINDOW];
}

/* A request of 10,000 tokens ends, and others want its window pages: what does it keep? */
static hd_status show_example(const char *name, const hd_model_spec *spec, hd_err *err) {
    const hd_kv_shape shape = hd_kv_shape_of(spec);
    const hd_cache_options o = {
        .page_tokens = shape.page_tokens,
        .lookback = shape.lookback,
        .n_pages = {POOL, 16},
        .max_seqs = 1,
        .seq_pages = EXAMPLE / shape.page_tokens + 2
    };
    int32_t *tokens = calloc(EXAMPLE + 1, sizeof *tokens), hit = 0;
    hd_cache *c = NULL;
    hd_status st = tokens ? hd_cache_open(&c, &o, err) : HD_ENOMEM;
    for (int32_t text = OTHERS; text >= 0 && st == HD_OK; text--) {
        work ignored = {0};
        const int32_t which =
            text == OTHERS ? 0 : text + 1; /* the example first, then others */
        for (int32_t i = 0; i <= EXAMPLE; i++) tokens[i] = which * EXAMPLE + i;
        st = insert(c, tokens, EXAMPLE, shape.page_tokens, &ignored);
    }
    for (int32_t i = 0; i <= EXAMPLE; i++) tokens[i] = i;
    if (st == HD_OK) st = hd_cache_acquire(c, 0, 1, tokens, EXAMPLE + 1, &hit);
    if (st == HD_OK) {
        const double entries = page_bytes(spec, spec->n_mtp, HD_KV_FULL, BF16) * 1e-6;
        const double window = page_bytes(spec, spec->n_mtp, HD_KV_WINDOW, BF16) * 1e-6;
        const int32_t pages = hit / shape.page_tokens, kept = held_windows(c);
        printf("  %-12s hit %d: %d pages of entries, %.1f MB, and the window of %d tokens, "
               "%.1f MB;\n%15swindows as long-lived as entries would take %.1f MB more\n",
               name, hit, pages, pages * entries, kept * shape.page_tokens, kept * window, "",
               (pages - kept) * window);
        hd_cache_release(c, 0, false);
    }
    hd_cache_close(c);
    free(tokens);
    return st;
}

static hd_status show_models(hd_err *err) {
    static const char *const names[] = {"v2_lite",  "v2",       "v3",
                                        "v3_2_exp", "v4_flash", "v4_pro"};
    enum { N = sizeof names / sizeof names[0] };
    hd_model_spec *specs[N] = {NULL};
    hd_status st = HD_OK;
    for (int i = 0; i < N && st == HD_OK; i++) {
        char path[64];
        snprintf(path, sizeof path, "tests/configs/%s.json", names[i]);
        st = hd_model_spec_open(&specs[i], path, err);
    }
    if (st == HD_OK) {
        printf("\nbytes of entries per cached token without and with the MTP layer, and "
               "megabytes of a window page\n  %-12s %6s %9s %9s %9s %9s %9s %9s\n",
               "", "page", "bf16", "+ MTP", "window", "float32", "+ MTP", "window");
        for (int i = 0; i < N; i++) print_memory(names[i], specs[i]);
        printf("\nwhat a request of %d tokens leaves in pools of bf16 after %d others\n",
               EXAMPLE, OTHERS);
    }
    for (int i = 0; i < N && st == HD_OK; i++) {
        if (specs[i]->family == HD_FAMILY_V4) st = show_example(names[i], specs[i], err);
    }
    for (int i = 0; i < N; i++) hd_model_spec_close(specs[i]);
    return st;
}

int main(int argc, char **argv) {
    hd_err err = {0};
    const int32_t n = argc > 1 ? (int32_t)strtol(argv[1], NULL, 10) : 100000;
    hd_status st = measure_speed(hd_max_i32(n, 2 * SLICES), &err);
    if (st == HD_OK) st = show_models(&err);
    if (st != HD_OK) fprintf(stderr, "error: %s\n", err.msg);
    return st == HD_OK ? 0 : 1;
}
