/* ops_fixture.c - tables, streams, guarded outputs and random inputs of the operator tests. */
#include "ops/ops_fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/philox.h"
#include "fakes/gpus.h"
#include "ops/profile/op_timer.h"

enum { GUARD = 32, MAX_TAKEN = 65536, MAX_KEYS = 20480, MAX_COLS = 8192 };
enum { ROOM = 256 << 20, GAP = 256 };

static const uint32_t guard_word = 0x5a17c0deu;
static const int32_t threads[N_THREADS] = {1, 2, 3, 5};

ops_fixture fix;

/* Host memory that a GPU reads takes long to allocate. So blocks lie in one room, each before GAP bytes of NaN,
 * as many as have room there; in brief each is of its own, for the tools. */
static struct {
    void *block[MAX_TAKEN];
    int32_t n;
    uint64_t drawn; /* random words that this test has drawn */
    uint8_t *room;  /* NULL: none */
    size_t used;    /* of it */
} taken;

/* ---- formats ---- */

/* What no checkpoint has, and blocks that a config may declare. */
static const weight_format odd_formats[] = {
    {UNNAMED,  "BF16, F32 per 2 x 16",   HD_BF16, HD_F32,  2,  16, 1.0f},
    {UNNAMED,  "E4M3 without scales",    HD_E4M3, HD_NONE, 0,  0,  1.0f},
    {FP8_32,   "E4M3, E8M0 per 32 x 32", HD_E4M3, HD_E8M0, 32, 32, 1.0f},
    {UNNAMED,  "E4M3, BF16 per 3 x 48",  HD_E4M3, HD_BF16, 3,  48, 1.0f},
    {E4M3_ODD, "E4M3, F32 per 3 x 5",    HD_E4M3, HD_F32,  3,  5,  1.0f},
    {UNNAMED,  "E2M1, E8M0 per 6",       HD_E2M1, HD_E8M0, 1,  6,  1.0f},
};

weight_format weight_formats[MAX_FORMATS];
int32_t n_weight_formats;

static void add_format(const weight_format *f) {
    assert_true(n_weight_formats < MAX_FORMATS);
    weight_formats[n_weight_formats++] = *f;
}

static void add_row(hd_format format, hd_dtype scale_type) {
    const hd_format_row *row = &hd_formats[format];
    add_format(&(weight_format){.id = FORMAT_ID(format, scale_type),
                                .name = row->name,
                                .type = row->type,
                                .scale_type = scale_type,
                                .block_rows = row->block_rows,
                                .block_cols = row->block_cols,
                                .global = row->global_name ? 0.37f : 1.0f});
}

/* Every row of hd_formats with each of its scale types, and the odd ones. */
static void list_formats(void) {
    n_weight_formats = 0;
    for (int f = HD_FORMAT_NONE + 1; f < HD_N_FORMATS; f++) {
        const hd_dtype *scale_types = hd_formats[f].scale_types;
        add_row((hd_format)f, scale_types[0]);
        for (int i = 1; i < HD_FORMAT_TYPES && scale_types[i] != HD_NONE; i++) {
            add_row((hd_format)f, scale_types[i]);
        }
    }
    for (size_t i = 0; i < HD_LEN(odd_formats); i++) add_format(&odd_formats[i]);
}

const weight_format *weight_format_of(int32_t id) {
    for (int32_t i = 0; i < n_weight_formats; i++) {
        if (weight_formats[i].id == id) return &weight_formats[i];
    }
    fail_msg("no format %d", id);
    return NULL;
}

/* ---- tables and streams ---- */

static void add_table(hd_ops *tables, int32_t *n, const hd_ops *t) {
    for (int32_t i = 0; i < *n; i++) {
        if (strcmp(tables[i].name, t->name) == 0) return;
    }
    assert_true(*n < MAX_TABLES);
    tables[(*n)++] = *t;
}

/* all sets of flags of this processor, so that no table is listed here by name */
static void find_tables(void) {
    uint32_t features = hd_cpu_features();
    if (features & HD_CPU_AVX512_BF16)
        features |= HD_CPU_FAST_BF16; /* some may not, to get its bits */
    hd_ops t;
    fix.n_tables = 0;
    hd_ops_init_ref(&t, HD_EXACT);
    add_table(fix.table, &fix.n_tables, &t);
    if (fix.brief) return;
    for (fast_form f = 0; f < FAST_FORMS; f++) {
        fix.n_fast[f] = 0;
        fast_ref_table(&t, f);
        add_table(fix.fast[f], &fix.n_fast[f], &t);
    }
    for (uint32_t flags = 0; flags <= features; flags++) {
        if (flags & ~features) continue;
        hd_ops_init_cpu(&t, flags, HD_EXACT);
        add_table(fix.table, &fix.n_tables, &t);
        hd_ops_init_cpu(&t, flags, HD_FAST); /* `exact` if there is no faster form */
        if (t.precision != HD_FAST) continue;
        const fast_form f = strstr(t.name, "bf16") ? FAST_BF16 : FAST_INT16;
        add_table(fix.fast[f], &fix.n_fast[f], &t);
    }
}

static int open_gpu(void) {
    const size_t scratch = hd_ops_scratch_bytes(MAX_KEYS, MAX_COLS);
    const hd_ops_options options = {.cuda_path = gpus_path("cuda")};
    hd_ops t;
    hd_err err = {0};
    if (hd_ops_open(&t, &fix.gpu, "cuda", &options, &err) != HD_OK) {
        print_message("[  SKIPPED ] operators on cuda: %s\n", err.msg);
        return 0;
    }
    void *room = NULL;
    if (!fix.brief && hd_device_alloc_host(fix.gpu, &room, ROOM, "tests", NULL) != HD_OK)
        return -1;
    taken.room = room;
    fix.gpu_alone = is_gpu_alone();
    for (fast_form f = 0; f < FAST_FORMS && fix.gpu_alone; f++) fix.n_fast[f] = 0;
    if (hd_stream_open(&fix.gpu_stream, fix.gpu, NULL) != HD_OK) return -1;
    if (hd_stream_reserve(fix.gpu_stream, scratch, NULL) != HD_OK) return -1;
    add_table(fix.table, &fix.n_tables, &t);
#ifdef HD_CUDA
    const hd_cuda_path path = hd_device_cuda_path(fix.gpu);
    hd_ops_init_cuda(&fix.gpu_fast, HD_FAST, false, path);
    hd_ops_init_cuda(&fix.gpu_official, HD_OFFICIAL, false, path);
#endif
    return 0;
}

hd_stream *stream_for(const hd_ops *ops, hd_stream *s) {
    return strncmp(ops->name, "cuda", 4) == 0 ? fix.gpu_stream : s;
}

void finish(const char *what, hd_stream *s) {
    hd_err err = {0};
    if (hd_stream_sync(s, &err) != HD_OK) fail_msg("%s: %s", what, err.msg);
}

int open_fixture(void **state) {
    (void)state;
    fix.brief = is_brief();
    list_formats();
    find_tables();
    for (int i = 0; i < N_THREADS; i++) {
        const hd_cpu_options options = {.n_threads = threads[i]};
        if (hd_device_open_cpu(&fix.device[i], &options, NULL) != HD_OK) return -1;
        if (hd_stream_open(&fix.stream[i], fix.device[i], NULL) != HD_OK) return -1;
        const size_t bytes = hd_ops_scratch_bytes(MAX_KEYS, MAX_COLS);
        if (hd_stream_reserve(fix.stream[i], bytes, NULL) != HD_OK) return -1;
    }
    return open_gpu();
}

int close_fixture(void **state) {
    (void)state;
    for (int i = 0; i < N_THREADS; i++) {
        hd_stream_close(fix.stream[i]);
        hd_device_close(fix.device[i]);
    }
    if (taken.room) hd_device_release(fix.gpu, taken.room);
    taken.room = NULL;
    taken.used = 0;
    hd_stream_close(fix.gpu_stream);
    hd_device_close(fix.gpu);
    return 0;
}

/* ---- inputs ---- */

/* Returns NULL if there is no room. */
static void *take_room(size_t bytes) {
    const size_t whole = (bytes + GAP - 1) / GAP * GAP;
    if (!taken.room || whole + GAP > ROOM - taken.used) return NULL;
    uint8_t *p = taken.room + taken.used;
    memset(p + bytes, 0xff, whole - bytes + GAP);
    taken.used += whole + GAP;
    return p;
}

void *take(size_t bytes) {
    void *p = take_room(bytes);
    if (!p && fix.gpu) {
        assert_int_equal(hd_device_alloc_host(fix.gpu, &p, bytes, "a test", NULL), HD_OK);
    } else if (!p) {
        p = malloc(bytes ? bytes : 1);
    }
    assert_non_null(p);
    assert_true(taken.n < MAX_TAKEN);
    taken.block[taken.n++] = p;
    return p;
}

void *take_copy(const void *from, size_t bytes) {
    return memcpy(take(bytes), from, bytes);
}

static void forget_to(int32_t mark) {
    while (taken.n > mark) {
        void *p = taken.block[--taken.n];
        const size_t at = (size_t)((uintptr_t)p - (uintptr_t)taken.room);
        if (taken.room && at < ROOM) {
            taken.used = at;
        } else if (fix.gpu) {
            hd_device_release(fix.gpu, p);
        } else {
            free(p);
        }
    }
}

int forget_all(void **state) {
    (void)state;
    forget_to(0);
    taken.drawn = 0;
    return 0;
}

static uint32_t random_word(void) {
    const uint64_t at = taken.drawn++;
    return hd_philox_at(0x6861646c, 0, at / 4).v[at % 4];
}

int32_t random_below(int32_t n) {
    return (int32_t)(random_word() % (uint32_t)n);
}

void fill_random(float *x, int64_t n, float spread) {
    for (int64_t i = 0; i < n; i++)
        x[i] = (2.0f * hd_philox_unit(random_word()) - 1.0f) * spread;
}

float *take_random(int64_t n, float spread) {
    float *x = take((size_t)n * sizeof *x);
    fill_random(x, n, spread);
    return x;
}

float *take_nan(int64_t n) {
    float *x = take((size_t)n * sizeof *x);
    memset(x, 0xff, (size_t)n * sizeof *x);
    return x;
}

int32_t *take_ints(int64_t n) {
    int32_t *x = take((size_t)n * sizeof *x);
    memset(x, 0, (size_t)n * sizeof *x);
    return x;
}

/* ---- stored matrices ---- */

/* Stores f as element i. The first element of a byte clears it, so elements come in order. */
static void put(uint8_t *to, hd_dtype type, int64_t i, float f) {
    const hd_dtype_row *row = &hd_dtypes[type];
    const int32_t shift = (int32_t)(i * row->bits % 8);
    uint32_t code = row->encode(f) << shift;
    to += i * row->bits / 8;
    *to = (uint8_t)((shift ? *to : 0u) | code);
    for (int32_t left = shift + row->bits - 8; left > 0; left -= 8) {
        code >>= 8;
        *++to = (uint8_t)code;
    }
}

/* n random elements or random bits. */
static const void *take_stored(hd_dtype type, int64_t n, float low, float high, bool bits) {
    const size_t bytes = ((size_t)n * (size_t)hd_dtype_bits(type) + 7) / 8;
    uint8_t *p = (uint8_t *)take(bytes + 1) + (fix.n_cases % 3 == 0);
    if (bits) {
        for (size_t i = 0; i < bytes; i++) p[i] = (uint8_t)random_word();
        return p;
    }
    for (int64_t i = 0; i < n; i++) {
        put(p, type, i, low + (high - low) * hd_philox_unit(random_word()));
    }
    return p;
}

hd_weight *take_weight(const weight_format *f, int32_t rows, int32_t cols, bool all_codes) {
    const hd_dtype_row *row = &hd_dtypes[f->type];
    while ((int64_t)cols * row->bits % 8) cols++;
    hd_weight *w = take(sizeof *w);
    *w = (hd_weight){.type = f->type,
                     .scale_type = f->scale_type,
                     .rows = rows,
                     .cols = cols,
                     .block_rows = f->block_rows,
                     .block_cols = f->block_cols,
                     .global = f->global};
    const float spread = row->bits < 8 ? 1.05f * row->decode(row->largest) : 1.0f;
    w->data = take_stored(f->type, (int64_t)rows * cols, -spread, spread, all_codes);
    if (f->scale_type == HD_NONE) return w;
    const int64_t n = (int64_t)((rows + f->block_rows - 1) / f->block_rows) *
                      ((cols + f->block_cols - 1) / f->block_cols);
    /* Of wider scales, random bits are so large that an order of sums decides about infinity. */
    const bool any_scale = all_codes && hd_dtype_bits(f->scale_type) == 8;
    w->scale = take_stored(f->scale_type, n, 0.1f, 1.5f, any_scale);
    return w;
}

/* ---- pages ---- */

float *page_entry(const hd_paged *p, int32_t seq, int32_t entry) {
    const int32_t page = p->table[seq * p->table_stride + entry / p->page_entries];
    return (float *)p->rows.data +
           ((int64_t)page * p->page_entries + entry % p->page_entries) * p->width;
}

const hd_weight *take_aligned(int32_t format, int32_t rows, int32_t cols, bool powers) {
    fix.n_cases = 1; /* no odd address */
    hd_weight *w =
        take_copy(take_weight(weight_format_of(format), rows, cols, false), sizeof *w);
    w->power_scales = powers;
    return w;
}

hd_paged take_pages(int32_t n_seqs, const int32_t *n_entries, int32_t page_entries,
                    int32_t width, float spread) {
    int32_t longest = 0, n_pages = 1; /* one page belongs to no sequence */
    for (int32_t s = 0; s < n_seqs; s++) {
        const int32_t pages = (n_entries[s] + page_entries - 1) / page_entries;
        longest = pages > longest ? pages : longest;
        n_pages += pages;
    }
    int32_t *page = take_ints(n_pages), *table = take_ints((int64_t)n_seqs * (longest + 1));
    for (int32_t i = 0; i < n_pages; i++) { /* a random order */
        const int32_t j = random_below(i + 1);
        page[i] = page[j];
        page[j] = i;
    }
    hd_paged p = {.rows = hd_f32(take_nan((int64_t)n_pages * page_entries * width)),
                  .table = table,
                  .table_stride = longest + 1,
                  .page_entries = page_entries,
                  .width = width};
    for (int32_t s = 0, next = 0; s < n_seqs; s++) {
        for (int32_t i = 0; i <= longest; i++) {
            const bool live = i * page_entries < n_entries[s];
            table[s * (longest + 1) + i] = live ? page[next++] : INT32_MIN;
        }
        for (int32_t e = 0; e < n_entries[s]; e++) {
            fill_random(page_entry(&p, s, e), width, spread);
        }
    }
    return p;
}

hd_paged narrow_pages(const hd_paged *p, int32_t n_seqs, const int32_t *n_entries) {
    hd_paged narrow = *p;
    int64_t last = -1;
    for (int32_t s = 0; s < n_seqs; s++) {
        for (int32_t e = 0; e < n_entries[s]; e++) {
            const int64_t at = page_entry(p, s, e) - (const float *)p->rows.data;
            last = at > last ? at : last;
        }
    }
    const size_t n = (size_t)(last < 0 ? 0 : last + p->width);
    uint16_t *to = take(n * sizeof *to);
    memset(to, 0xff, n * sizeof *to);
    for (int32_t s = 0; s < n_seqs; s++) {
        for (int32_t e = 0; e < n_entries[s]; e++) {
            const float *from = page_entry(p, s, e);
            const int64_t at = from - (const float *)p->rows.data;
            for (int32_t c = 0; c < p->width; c++) {
                to[at + c] = (uint16_t)hd_dtypes[HD_BF16].encode(from[c]);
            }
        }
    }
    narrow.rows = (hd_rows){.data = to, .type = HD_BF16};
    return narrow;
}

/* ---- attention ---- */

void run_attention_lists(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                         int32_t n, void *const *out) {
    const attention_lists *lists = c->args;
    hd_attention_args a = lists->a;
    if (ops->kv_type == HD_BF16) {
        a.recent = lists->narrow_recent;
        a.entries = lists->narrow_entries;
    }
    a.out = hd_f32(out[0]);
    a.q = hd_rows_at(a.q, (int64_t)first * a.heads * a.k_dim);
    if (a.selected) a.selected += (int64_t)first * a.n_selected;
    a.seq += first;
    a.pos += first;
    a.rows = n;
    ops->attention(s, &a);
}

/* ---- running and comparing ---- */

static uint32_t *take_guarded(int64_t n) {
    uint32_t *p = (uint32_t *)take((size_t)(n + 2 * GUARD) * sizeof *p);
    for (int i = 0; i < GUARD; i++) p[i] = p[GUARD + n + i] = guard_word;
    memset(p + GUARD, 0xff, (size_t)n * sizeof *p);
    return p + GUARD;
}

static void check_guard(const char *what, const uint32_t *p, int64_t n) {
    for (int i = 0; i < GUARD; i++) {
        if (p[-1 - i] != guard_word) fail_msg("%s: wrote %d before its output", what, i + 1);
        if (p[n + i] != guard_word) fail_msg("%s: wrote %d behind its output", what, i);
    }
}

/* Fills the scratch of every worker with NaN. */
static void poison_scratch(hd_stream *s) {
    const size_t scratch = hd_ops_scratch_bytes(MAX_KEYS, MAX_COLS);
    if (s != fix.gpu_stream) {
        for (int32_t w = 0; w < hd_stream_workers(s); w++) {
            memset(hd_stream_scratch(s, w, scratch), 0xff, scratch);
        }
        return;
    }
    if (fix.poisoned) return;
    void *poison = malloc(scratch);
    assert_non_null(poison);
    memset(poison, 0xff, scratch);
    void *first = hd_stream_scratch(s, 0, scratch);
    hd_stream_upload(s, first, poison, scratch);
    for (int32_t w = 1; w < hd_stream_workers(s); w++) {
        hd_stream_copy(s, hd_stream_scratch(s, w, scratch), first, scratch);
    }
    free(poison);
    fix.poisoned = true;
}

static void run_rows(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                     int32_t n, void **out) {
    for (int i = 0; i < c->n_outs; i++) out[i] = take_guarded((int64_t)n * c->width[i]);
    c->run(c, ops, s, first, n, out);
    finish(c->name, s);
    for (int i = 0; i < c->n_outs; i++) check_guard(c->name, out[i], (int64_t)n * c->width[i]);
}

void run_op(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first, int32_t n,
            void **out) {
    s = stream_for(ops, s);
    poison_scratch(s);
    run_rows(c, ops, s, first, n, out);
}

static bool same_bits(uint32_t a, uint32_t b) {
    return a == b || ((a & 0x7fffffffu) > 0x7f800000u && (b & 0x7fffffffu) > 0x7f800000u);
}

void check_bits(const char *what, const void *got, const void *want, int64_t n) {
    const uint32_t *a = got, *b = want;
    for (int64_t i = 0; i < n; i++) {
        if (!same_bits(a[i], b[i])) {
            fail_msg("%s: element %ld is %08x (%g) and not %08x (%g)", what, (long)i, a[i],
                     (double)hd_f32_from_bits(a[i]), b[i], (double)hd_f32_from_bits(b[i]));
        }
    }
}

void check_near(const char *what, const void *got_bits, const void *want_bits, int64_t n,
                double tolerance) {
    const uint32_t *got = got_bits, *want = want_bits;
    double square = 0.0;
    int64_t finite = 0;
    for (int64_t i = 0; i < n; i++) {
        const double w = (double)hd_f32_from_bits(want[i]);
        if (!isfinite(w)) continue;
        square += w * w;
        finite++;
    }
    const double rms = finite ? sqrt(square / (double)finite) : 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (same_bits(got[i], want[i])) continue;
        const double g = (double)hd_f32_from_bits(got[i]),
                     w = (double)hd_f32_from_bits(want[i]);
        if (!(fabs(g - w) <= tolerance * (fabs(w) + rms))) {
            fail_msg("%s: element %ld is %.9g and not %.9g (%.2g of what is allowed)", what,
                     (long)i, g, w, fabs(g - w) / (tolerance * (fabs(w) + rms)));
        }
    }
}

void check_mean(const char *what, const float *got, const float *want, int64_t n,
                double tolerance) {
    double error = 0.0, size = 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(want[i])) continue;
        error += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
        size += (double)want[i] * (double)want[i];
    }
    if (!(sqrt(error) <= tolerance * sqrt(size))) {
        fail_msg("%s: relative error %g", what, sqrt(error / size));
    }
}

/* Runs the case again in slices of `size` rows. The first one on a stream finds NaN in its scratch,
 * the others what other rows left there. */
static void check_slices(const op_case *c, const char *what, const hd_ops *ops, int32_t size,
                         void *const *base) {
    for (int32_t r = 0; r < c->rows; r += size) {
        const int32_t mark = taken.n, n = c->rows - r < size ? c->rows - r : size;
        hd_stream *s = stream_for(ops, fix.stream[(r / size) % 2]);
        void *out[MAX_OUTS];
        if (r < 2 * size) poison_scratch(s);
        run_rows(c, ops, s, r, n, out);
        for (int i = 0; i < c->n_outs; i++) {
            check_bits(what, out[i], (const uint32_t *)base[i] + (int64_t)r * c->width[i],
                       (int64_t)n * c->width[i]);
        }
        forget_to(mark);
    }
}

/* Captures a run and launches it. */
typedef struct recorded_run {
    const op_case *c;
    const hd_ops *ops;
    void *out[MAX_OUTS];
} recorded_run;

static void run_recorded(hd_stream *s, void *arg) {
    recorded_run *r = arg;
    r->c->run(r->c, r->ops, s, 0, r->c->rows, r->out);
}

/* An operator may be captured in a graph: it neither allocates nor waits. */
static void check_recorded(const op_case *c, const hd_ops *ops, void *const *base) {
    const int32_t mark = taken.n;
    recorded_run r = {.c = c, .ops = ops};
    hd_err err = {0};
    char what[256];
    snprintf(what, sizeof what, "%s on %s, recorded", c->name, ops->name);
    for (int i = 0; i < c->n_outs; i++) r.out[i] = take_guarded((int64_t)c->rows * c->width[i]);
    if (hd_time_ops(fix.gpu_stream, fix.gpu, run_recorded, &r, 1, 0, NULL, &err) != HD_OK) {
        fail_msg("%s: %s", what, err.msg);
    }
    for (int i = 0; i < c->n_outs; i++) {
        check_bits(what, r.out[i], base[i], (int64_t)c->rows * c->width[i]);
    }
    forget_to(mark);
}

static void check_threads(const op_case *c, const hd_ops *ops, void *const *base) {
    for (int t = 1; t < N_THREADS; t++) {
        const int32_t mark = taken.n;
        void *out[MAX_OUTS];
        char what[256];
        snprintf(what, sizeof what, "%s on %s, %d threads", c->name, ops->name, threads[t]);
        run_op(c, ops, fix.stream[t], 0, c->rows, out);
        for (int i = 0; i < c->n_outs; i++) {
            check_bits(what, out[i], base[i], (int64_t)c->rows * c->width[i]);
        }
        forget_to(mark);
    }
}

static void check_table(const op_case *c, const hd_ops *ops, const double *tolerance,
                        void *const *want, void **base) {
    char what[256];
    snprintf(what, sizeof what, "%s on %s", c->name, ops->name);
    run_op(c, ops, fix.stream[0], 0, c->rows, base);
    for (int i = 0; i < c->n_outs; i++) {
        const int64_t n = (int64_t)c->rows * c->width[i];
        if (tolerance[i] > 0.0) {
            check_near(what, base[i], want[i], n, tolerance[i]);
        } else {
            check_bits(what, base[i], want[i], n);
        }
    }
    if (fix.brief) return;
    if (!stream_for(ops, NULL)) {
        check_threads(c, ops, base);
    } else if (!c->not_recorded) {
        check_recorded(c, ops, base);
    }
    if (c->all_rows) return;
    snprintf(what, sizeof what, "%s on %s, row by row", c->name, ops->name);
    check_slices(c, what, ops, 1, base);
    snprintf(what, sizeof what, "%s on %s, seven rows at a time", c->name, ops->name);
    check_slices(c, what, ops, 7, base);
}

static void check_form_bits(const op_case *c, fast_form f) {
    static const double same_bits = 0.0;
    const int32_t mark = taken.n;
    void *want[MAX_OUTS], *base[MAX_OUTS];
    run_op(c, &fix.fast[f][0], fix.stream[0], 0, c->rows, want);
    for (int32_t t = 1; t < fix.n_fast[f]; t++) {
        check_table(c, &fix.fast[f][t], &same_bits, want, base);
    }
    forget_to(mark);
}

void check_fast_bits(const op_case *c) {
    fix.poisoned = false;
    fix.n_cases++;
    for (fast_form f = 0; f < FAST_FORMS; f++) {
        if (fix.n_fast[f] > 1) check_form_bits(c, f);
    }
}

static void check_fast(const op_case *c, void *const *want) {
    void *base[MAX_OUTS];
    for (fast_form f = 0; f < FAST_FORMS; f++) {
        if (fix.n_fast[f] == 0) continue;
        run_op(c, &fix.fast[f][0], fix.stream[0], 0, c->rows, base);
        check_near(fix.fast[f][0].name, base[0], want[0], (int64_t)c->rows * c->width[0],
                   c->fast_tolerance);
        for (int32_t t = 1; t < fix.n_fast[f] && c->fast_near; t++) {
            check_table(c, &fix.fast[f][t], &c->fast_tolerance, want, base);
        }
    }
    if (!c->fast_near) check_fast_bits(c);
}

void check_gpu_table(const op_case *c, const hd_ops *ops, double tolerance, void *const *want) {
    void *base[MAX_OUTS];
    if (!fix.gpu) return;
    check_table(c, ops, &tolerance, want, base);
}

static void check_gpu_fast(const op_case *c, void *const *want) {
    if (c->gpu_fast_tolerance == 0.0) return;
    check_gpu_table(c, &fix.gpu_fast, c->gpu_fast_tolerance, want);
}

void check_gpu_official(const op_case *c, double tolerance, double mean, void *const *want) {
    void *base[MAX_OUTS];
    if (!fix.gpu) return;
    check_table(c, &fix.gpu_official, &tolerance, want, base);
    check_mean(c->name, base[0], want[0], (int64_t)c->rows * c->width[0], mean);
}

static void check_official(const op_case *c) {
    hd_ops official;
    void *want[MAX_OUTS];
    if (c->official_tolerance == 0.0 || !fix.gpu) return;
    hd_ops_init_ref(&official, HD_OFFICIAL);
    run_op(c, &official, fix.stream[0], 0, c->rows, want);
    check_gpu_official(c, c->official_tolerance, c->official_mean, want);
}

/* The reference has one thread by definition. Slices show that its rows are independent. */
void check_op(const op_case *c) {
    const int32_t mark = taken.n;
    void *want[MAX_OUTS], *avx2[MAX_OUTS], *base[MAX_OUTS];
    fix.poisoned = false;
    fix.n_cases++;
    bool have_avx2 = false;
    run_op(c, &fix.table[0], fix.stream[0], 0, c->rows, want);
    if (!c->all_rows && !fix.brief && !fix.gpu_alone)
        check_slices(c, "the reference, seven rows at a time", &fix.table[0], 7, want);
    for (int32_t t = 1; t < fix.n_tables; t++) {
        const bool on_gpu = stream_for(&fix.table[t], NULL);
        if (on_gpu ? c->cpu_only : fix.gpu_alone) continue;
        check_table(c, &fix.table[t], c->tolerance, want, base);
        if (strcmp(fix.table[t].name, "cpu avx2") == 0) {
            memcpy(avx2, base, sizeof avx2);
            have_avx2 = true;
        }
        if (!have_avx2 || strcmp(fix.table[t].name, "cpu avx512") != 0) continue;
        for (int i = 0; i < c->n_outs; i++) {
            check_bits("AVX-512 against AVX2", base[i], avx2[i],
                       (int64_t)c->rows * c->width[i]);
        }
    }
    if (c->fast_tolerance > 0.0) check_fast(c, want);
    check_gpu_fast(c, want);
    check_official(c);
    forget_to(mark);
}

void check_on_gpu(const op_case *c) {
    const int32_t mark = taken.n;
    void *want[MAX_OUTS], *base[MAX_OUTS];
    if (!fix.gpu) return;
    fix.poisoned = false;
    fix.n_cases++;
    run_op(c, &fix.table[0], fix.stream[0], 0, c->rows, want);
    check_table(c, &fix.table[fix.n_tables - 1], c->tolerance, want, base);
    check_gpu_fast(c, want);
    check_official(c);
    forget_to(mark);
}
