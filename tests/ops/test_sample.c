/* test_sample.c - choosing tokens: every table against the reference, the reference against
 * exact probabilities, and a loop with drafts against one without. */
#include "check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/philox.h"
#include "base/status.h"
#include "ops/ops.h"

enum { MAX_TABLES = 4, N_STREAMS = 3, MAX_ROWS = 24, POOL = 64, N_MASKS = 3, N_COUNTS = 3 };

/* One test per operator of this page, under the name that a walk over all operators expects. */
void op_sample(void **state);
void op_argmax(void **state);
void op_verify(void **state);
void op_count_tokens(void **state);

/* ---- tables and streams ---- */

typedef struct rig {
    hd_ops table[MAX_TABLES]; /* the reference first */
    int32_t n_tables;
    hd_device *device[N_STREAMS];
    hd_stream *stream[N_STREAMS]; /* 1, 2 and 5 threads */
} rig;

static void open_rig(rig *r, int32_t vocab) {
    static const int32_t threads[N_STREAMS] = {1, 2, 5};
    const uint32_t have = hd_cpu_features();
    const uint32_t flags[] = {0, have & HD_CPU_AVX2, have & (HD_CPU_AVX2 | HD_CPU_AVX512)};
    memset(r, 0, sizeof *r);
    hd_ops_init_ref(&r->table[r->n_tables++]);
    for (size_t i = 0; i < HD_LEN(flags); i++) {
        if (i == 0 || flags[i] != flags[i - 1]) {
            hd_ops_init_cpu(&r->table[r->n_tables++], flags[i]);
        }
    }
    for (int i = 0; i < N_STREAMS; i++) {
        const hd_cpu_options options = {.n_threads = threads[i]};
        assert_int_equal(hd_device_open_cpu(&r->device[i], &options, NULL), HD_OK);
        assert_int_equal(hd_stream_open(&r->stream[i], r->device[i], NULL), HD_OK);
        assert_int_equal(hd_stream_reserve(r->stream[i], hd_ops_scratch_bytes(0, vocab), NULL),
                         HD_OK);
    }
}

static void close_rig(rig *r) {
    for (int i = 0; i < N_STREAMS; i++) {
        hd_stream_close(r->stream[i]);
        hd_device_close(r->device[i]);
    }
}

/* ---- random things ---- */

static uint64_t chance;

static uint32_t next_word(void) {
    return hd_philox_at(77, 0, chance++).v[0];
}

static int32_t below(int32_t n) {
    return (int32_t)(next_word() % (uint32_t)n);
}

/* Roughly normal, so that a few candidates stand out. */
static float noise(float spread) {
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) sum += hd_philox_unit(next_word()) - 0.5f;
    return sum * spread;
}

static void *take(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    assert_non_null(p);
    return p;
}

/* ---- a step ---- */

/* A step with room for everything that sample may read. */
typedef struct step {
    hd_sample_args a;
    float *logits;
    hd_sampling *params;
    int32_t *slot, *position, *mask_row, *input, *n_drafted;
    hd_logit_bias *bias;
    uint32_t *mask;
    uint16_t *counts;
} step;

typedef struct answer {
    int32_t token[MAX_ROWS];
    float logprob[MAX_ROWS];
    int32_t top_id[MAX_ROWS * HD_MAX_TOP_LOGPROBS];
    float top_logprob[MAX_ROWS * HD_MAX_TOP_LOGPROBS];
} answer;

static void make_step(step *s, int32_t rows, int32_t vocab) {
    const size_t n = (size_t)vocab, words = (n + 31) / 32;
    s->logits = take((size_t)rows * n * sizeof *s->logits);
    s->params = take((size_t)rows * sizeof *s->params);
    s->slot = take((size_t)rows * sizeof *s->slot);
    s->position = take((size_t)rows * sizeof *s->position);
    s->mask_row = take((size_t)rows * sizeof *s->mask_row);
    s->input = take((size_t)rows * sizeof *s->input);
    s->n_drafted = take((size_t)rows * sizeof *s->n_drafted);
    s->bias = take(POOL * sizeof *s->bias);
    s->mask = take(N_MASKS * words * sizeof *s->mask);
    s->counts = take(N_COUNTS * n * sizeof *s->counts);
    for (int32_t r = 0; r < rows; r++) {
        s->slot[r] = r;
        s->position[r] = r;
        s->mask_row[r] = -1;
    }
    s->a = (hd_sample_args){.logits = s->logits,
                            .params = s->params,
                            .slot = s->slot,
                            .position = s->position,
                            .bias = s->bias,
                            .mask = s->mask,
                            .mask_row = s->mask_row,
                            .counts = s->counts,
                            .input = s->input,
                            .n_drafted = s->n_drafted,
                            .rows = rows,
                            .vocab = vocab,
                            .n_ids = vocab};
}

static void free_step(step *s) {
    free(s->logits);
    free(s->params);
    free(s->slot);
    free(s->position);
    free(s->mask_row);
    free(s->input);
    free(s->n_drafted);
    free(s->bias);
    free(s->mask);
    free(s->counts);
}

static void run_sample(const hd_ops *ops, hd_stream *stream, const hd_sample_args *args,
                       answer *out) {
    hd_sample_args a = *args;
    memset(out, 0x5a, sizeof *out);
    a.token = out->token;
    a.logprob = out->logprob;
    a.top_id = out->top_id;
    a.top_logprob = out->top_logprob;
    ops->sample(stream, &a);
    assert_int_equal(hd_stream_sync(stream, NULL), HD_OK);
}

/* The same rows, one call each, last row first. */
static void run_apart(const hd_ops *ops, hd_stream *stream, const hd_sample_args *args,
                      answer *out) {
    memset(out, 0x5a, sizeof *out);
    for (int32_t r = args->rows - 1; r >= 0; r--) {
        hd_sample_args a = *args;
        a.rows = 1;
        a.token = out->token + r;
        a.logprob = out->logprob + r;
        a.top_id = out->top_id + r * HD_MAX_TOP_LOGPROBS;
        a.top_logprob = out->top_logprob + r * HD_MAX_TOP_LOGPROBS;
        a.logits += (int64_t)r * a.vocab;
        a.slot += r;
        a.position += r;
        a.mask_row += r;
        a.input += r;
        a.n_drafted += r;
        ops->sample(stream, &a);
    }
    assert_int_equal(hd_stream_sync(stream, NULL), HD_OK);
}

static int32_t one_token(const rig *r, const step *s) {
    static answer want, got;
    run_sample(&r->table[0], r->stream[0], &s->a, &want);
    for (int32_t t = 1; t < r->n_tables; t++) {
        run_sample(&r->table[t], r->stream[1], &s->a, &got);
        assert_memory_equal(&got, &want, sizeof want);
    }
    return want.token[0];
}

/* ---- every table is the reference ---- */

static float one_of(const float *values, size_t n) {
    return values[below((int32_t)n)];
}

static hd_sampling random_params(void) {
    static const float temperature[] = {0, 1e-6f, 0.1f, 0.7f, 1, 1, 2, 50, 1e9f};
    static const float top_p[] = {0, 1, 1e-7f, 0.1f, 0.5f, 0.9f, 0.95f, 0.999f, 0.9999999f};
    static const float min_p[] = {0, 0, 1e-14f, 1e-3f, 0.05f, 0.5f, 1};
    static const float repetition[] = {0, 1, 1, 0.5f, 1.3f}, other[] = {0, 0, 0.5f, -1, 2};
    static const int32_t top_k[] = {0, 0, 1, 2, 7, 40, 1000, INT32_MAX};
    return (hd_sampling){.seed = (uint64_t)next_word() << 32 | next_word(),
                         .temperature = one_of(temperature, HD_LEN(temperature)),
                         .top_p = one_of(top_p, HD_LEN(top_p)),
                         .min_p = one_of(min_p, HD_LEN(min_p)),
                         .repetition_penalty = one_of(repetition, HD_LEN(repetition)),
                         .presence_penalty = one_of(other, HD_LEN(other)),
                         .frequency_penalty = one_of(other, HD_LEN(other)),
                         .top_k = top_k[below((int32_t)HD_LEN(top_k))],
                         .counts_row = below(N_COUNTS),
                         .bias_at = below(POOL / 2),
                         .n_bias = below(3) ? 0 : below(POOL / 2),
                         .ban_at = below(POOL / 2),
                         .n_ban = below(POOL / 2),
                         .ban_until = below(3 * MAX_ROWS),
                         .n_top = below(3) ? 0 : below(HD_MAX_TOP_LOGPROBS + 1),
                         .logprob = below(2) != 0};
}

/* The shapes of logits: a peak, a plain, a grid full of ties, holes, wide, all equal. */
static void random_logits(float *x, int32_t vocab) {
    const int32_t kind = below(6);
    for (int32_t i = 0; i < vocab; i++) {
        x[i] = noise(kind == 4 ? 1e4f : kind == 1 ? 1.0f : 12.0f);
        if (kind == 2) x[i] = roundf(x[i]);
        if (kind == 3 && below(2)) x[i] = -INFINITY;
        if (kind == 5) x[i] = i % 2 ? 0.0f : -0.0f;
    }
    if (below(12) == 0) x[below(vocab)] = NAN;
    if (below(12) == 0) x[below(vocab)] = INFINITY;
}

static void random_step(step *s, int32_t rows, int32_t vocab) {
    make_step(s, rows, vocab);
    s->a.n_ids = below(2) ? vocab : 1 + below(vocab);
    const int32_t words = (vocab + 31) / 32;
    for (int32_t i = 0; i < N_MASKS * words; i++) {
        s->mask[i] = i < words ? next_word() : i < 2 * words ? UINT32_MAX << (i % 32) : 0;
    }
    for (int32_t i = 0; i < N_COUNTS * vocab / 3; i++) {
        s->counts[below(N_COUNTS * vocab)] =
            (uint16_t)(below(2) * HD_COUNT_PROMPT + below(4) * below(3));
    }
    for (int32_t i = 0; i < POOL; i++) s->bias[i] = (hd_logit_bias){below(vocab), noise(9.0f)};
    for (int32_t r = 0; r < rows; r++) {
        random_logits(s->logits + (int64_t)r * vocab, vocab);
        s->params[r] = random_params();
        s->slot[r] = below(rows);
        s->position[r] = below(4 * MAX_ROWS);
        s->mask_row[r] = below(3) ? -1 : below(N_MASKS);
        s->input[r] = below(s->a.n_ids);
        s->n_drafted[r] = below(2) ? 0 : below(r < HD_MAX_DRAFTED ? r + 1 : HD_MAX_DRAFTED);
    }
}

void op_sample(void **state) {
    (void)state;
    static const int32_t vocabs[] = {1, 2, 5, 31, 33, 64, 255, 256, 257, 700, 3001};
    rig r;
    open_rig(&r, 3001);
    for (int32_t round = 0; round < 220; round++) {
        const int32_t rows = round % 20 == 0 ? 0 : 1 + below(MAX_ROWS);
        step s;
        random_step(&s, rows, vocabs[round % (int32_t)HD_LEN(vocabs)]);
        answer want, got;
        run_sample(&r.table[0], r.stream[0], &s.a, &want);
        for (int32_t t = 1; t < r.n_tables; t++) {
            for (int i = 0; i < N_STREAMS; i++) {
                run_sample(&r.table[t], r.stream[i], &s.a, &got);
                assert_memory_equal(&got, &want, sizeof want);
                run_apart(&r.table[t], r.stream[i], &s.a, &got);
                assert_memory_equal(&got, &want, sizeof want);
            }
        }
        free_step(&s);
    }
    close_rig(&r);
}

/* A vocabulary as large as they come: spread out, all alike, and two values only. */
static void large_rows_agree(void **state) {
    (void)state;
    enum { VOCAB = 129280 };
    rig r;
    open_rig(&r, VOCAB);
    step s;
    make_step(&s, 3, VOCAB);
    s.a.n_ids = 128815;
    for (int32_t i = 0; i < VOCAB; i++) {
        s.logits[i] = noise(20.0f);
        s.logits[VOCAB + i] = 3.25f;
        s.logits[2 * VOCAB + i] = i % 3 ? 1.0f : 2.0f;
    }
    for (int32_t i = 0; i < 3; i++) {
        s.params[i] = (hd_sampling){
            .seed = 5, .temperature = 1, .top_p = 0.95f, .n_top = 20, .logprob = 1};
    }
    one_token(&r, &s);
    for (int32_t i = 0; i < 3; i++) s.params[i].top_k = 50000;
    one_token(&r, &s);
    free_step(&s);
    close_rig(&r);
}

/* ---- edges ---- */

typedef struct edge {
    const char *name;
    float logits[5];
    hd_sampling params;
    int32_t mask; /* the low five bits; 0: no mask row */
    int32_t token;
} edge;

#define NONE (-INFINITY)
static const edge edges[] = {
    {"greedy",                       {1, 3, 2, 3, 0},                {0},                                 0,  1              },
    {"the highest of negatives",     {-9, -3, -2, -2, -8},           {0},                                 0,  2              },
    {"zeros are equal",              {-1, -0.0f, 0, 0, -1},          {.temperature = 1, .top_k = 1},      0,  1              },
    {"top-k 1",                      {1, 3, 2, 3, 0},                {.temperature = 9, .top_k = 1},      0,  1              },
    {"top-k 1, hot",                 {1, 3, 2, 3.000001f, 0},        {.temperature = 1e30f, .top_k = 1},  0,  3              },
    {"top-p close to 0",             {1, 3, 2, 3, 0},                {.temperature = 1, .top_p = 1e-30f}, 0,  1              },
    {"top-p close to 0, hot",
     {1, 3, 2, 3.000001f, 0},
     {.temperature = 1e30f, .top_p = 1e-30f},
     0,                                                                                                       3              },
    {"min-p 1",                      {1, 2, 3, 2, 0},                {.temperature = 1, .min_p = 1},      0,  2              },
    {"tiny temperature",             {1, 3, 2, 3.000001f, 0},        {.temperature = 1e-38f},             0,  3              },
    {"subnormal temperature",        {1, 3, 2, 3.000001f, 0},        {.temperature = 1e-44f},             0,  3              },
    {"one is possible",              {NONE, NONE, NONE, 0, NONE},    {.temperature = 1},                  0,  3              },
    {"one is left by the mask",      {1, 3, 2, 3, 0},                {.temperature = 1},                  16, 4              },
    {"one is left by the mask, cut", {1, 3, 2, 3, 0},                {.temperature = 1, .top_p = 0.5f},   16, 4              },
    {"nothing is left",              {NONE, 3, 2, 3, 0},             {.temperature = 1},                  1,  HD_TOKEN_NONE  },
    {"nothing is left, greedy",      {NONE, 3, 2, 3, 0},             {0},                                 1,  HD_TOKEN_NONE  },
    {"nothing was there",            {NONE, NONE, NONE, NONE, NONE}, {.logprob = true},                   0,  HD_TOKEN_NONE  },
    {"not a number",                 {1, NAN, 2, 3, 0},              {0},                                 0,  HD_TOKEN_BROKEN},
    {"not a number behind the mask",
     {1, NAN, 2, 3, 0},
     {.temperature = 1},
     16,                                                                                                      HD_TOKEN_BROKEN},
    {"infinite",                     {1, 3, INFINITY, 3, 0},         {.temperature = 1},                  0,  HD_TOKEN_BROKEN},
    {"far apart",                    {1e38f, -1e38f, 0, 3e38f, 0},   {.temperature = 1, .top_p = 0.9f},   0,  3              },
};
#undef NONE

static void edges_hold(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 64);
    for (size_t i = 0; i < HD_LEN(edges); i++) {
        const edge *e = &edges[i];
        step s;
        make_step(&s, 1, 5);
        memcpy(s.logits, e->logits, sizeof e->logits);
        s.params[0] = e->params;
        s.mask[0] = (uint32_t)e->mask;
        s.mask_row[0] = e->mask ? 0 : -1;
        for (s.position[0] = 0; s.position[0] < 50; s.position[0]++) {
            const int32_t got = one_token(&r, &s);
            if (got != e->token) fail_msg("%s: token %d", e->name, got);
        }
        free_step(&s);
    }
    close_rig(&r);
}

/* A row that fails leaves the others alone; ids without a token are never chosen; bans end. */
static void rows_fail_alone(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 64);
    step s;
    make_step(&s, 4, 8);
    for (int32_t i = 0; i < 32; i++) s.logits[i] = (float)(i % 8);
    s.logits[8 + 2] = NAN;
    s.a.n_ids = 6;
    s.bias[0].id = 5;
    s.bias[1].id = 4;
    s.params[2] = (hd_sampling){.ban_at = 0, .n_ban = 2, .ban_until = 3};
    s.params[3] = s.params[2];
    answer got;
    for (int32_t t = 0; t < r.n_tables; t++) {
        run_sample(&r.table[t], r.stream[2], &s.a, &got);
        const int32_t want[4] = {5, HD_TOKEN_BROKEN, 3, 5};
        assert_memory_equal(got.token, want, sizeof want);
    }
    free_step(&s);
    close_rig(&r);
}

/* ---- the distribution ---- */

enum { N_IDS = 40, DRAWS = 100000 };

typedef struct ranked {
    double y;
    int32_t id;
} ranked;

static int by_rank(const void *x, const void *y) {
    const ranked *a = x, *b = y;
    return a->y > b->y ? -1 : a->y < b->y ? 1 : a->id - b->id;
}

/* The score of a token as the documentation has it, in double. */
static double exact_score(const step *s, int32_t id) {
    const hd_sampling *p = &s->params[0];
    double y = (double)s->logits[id];
    for (int32_t i = 0; i < p->n_bias; i++) {
        if (s->bias[p->bias_at + i].id == id) y += (double)s->bias[p->bias_at + i].value;
    }
    for (int32_t i = 0; i < p->n_ban; i++) {
        if (s->bias[p->ban_at + i].id == id) return -(double)INFINITY;
    }
    if (s->mask_row[0] >= 0 && !(s->mask[id / 32] >> (id % 32) & 1u)) return -(double)INFINITY;
    const int32_t output = s->counts[id] & HD_COUNT_OUTPUT;
    if (s->counts[id] && p->repetition_penalty != 0.0f) {
        y = y > 0 ? y / (double)p->repetition_penalty : y * (double)p->repetition_penalty;
    }
    y -= output * (double)p->frequency_penalty;
    return output ? y - (double)p->presence_penalty : y;
}

static void exact_probabilities(const step *s, double *probability) {
    const hd_sampling *p = &s->params[0];
    ranked c[N_IDS];
    double weight[N_IDS], total = 0, reached = 0, kept = 0;
    for (int32_t id = 0; id < N_IDS; id++) c[id] = (ranked){exact_score(s, id), id};
    qsort(c, N_IDS, sizeof *c, by_rank);
    const int32_t k = p->top_k > 0 && p->top_k < N_IDS ? p->top_k : N_IDS;
    for (int32_t i = 0; i < k; i++) {
        weight[i] = exp((c[i].y - c[0].y) / (double)p->temperature);
        total += weight[i];
    }
    memset(probability, 0, N_IDS * sizeof *probability);
    for (int32_t i = 0; i < k; i++) {
        const bool in_nucleus = p->top_p <= 0.0f || reached < (double)p->top_p * total;
        reached += weight[i];
        if (!in_nucleus || weight[i] < (double)p->min_p) continue;
        probability[c[i].id] = weight[i];
        kept += weight[i];
    }
    for (int32_t id = 0; id < N_IDS; id++) probability[id] /= kept;
}

/* Pearson's statistic; the mean is the number of cells less one, the deviation the root of
 * twice that. Cells that expect fewer than 10 are taken together. */
static void check_chi_square(const char *name, const int32_t *seen, const double *probability) {
    double chi = 0, few_seen = 0, few_wanted = 0;
    int32_t cells = 0;
    for (int32_t id = 0; id < N_IDS; id++) {
        const double want = probability[id] * DRAWS;
        if (want == 0 && seen[id]) fail_msg("%s: token %d cannot be", name, id);
        if (want < 10) {
            few_seen += seen[id];
            few_wanted += want;
            continue;
        }
        chi += (seen[id] - want) * (seen[id] - want) / want;
        cells++;
    }
    if (few_wanted >= 1) {
        chi += (few_seen - few_wanted) * (few_seen - few_wanted) / few_wanted;
        cells++;
    }
    const double degrees = cells > 1 ? cells - 1 : 1;
    if (chi > degrees + 4 * sqrt(2 * degrees)) {
        fail_msg("%s: chi-square %.1f of %.0f degrees", name, chi, degrees);
    }
}

typedef struct transformation {
    const char *name;
    hd_sampling params;
    bool mask;
} transformation;

static const transformation transformations[] = {
    {"none",            {.temperature = 1},                                                  false},
    {"cold",            {.temperature = 0.4f},                                               false},
    {"hot",             {.temperature = 3},                                                  false},
    {"top-k",           {.temperature = 1, .top_k = 7},                                      false},
    {"top-p",           {.temperature = 1, .top_p = 0.8f},                                   false},
    {"min-p",           {.temperature = 1, .min_p = 0.1f},                                   false},
    {"top-k and top-p", {.temperature = 1.5f, .top_p = 0.7f, .top_k = 11},                   false},
    {"all three",       {.temperature = 2, .top_p = 0.9f, .min_p = 0.05f, .top_k = 20},      false},
    {"repetition",      {.temperature = 1, .repetition_penalty = 1.5f},                      false},
    {"presence",        {.temperature = 1, .presence_penalty = 1.25f},                       false},
    {"frequency",       {.temperature = 1, .frequency_penalty = 0.75f},                      false},
    {"penalties",
     {.temperature = 0.8f,
      .repetition_penalty = 0.8f,
      .presence_penalty = -0.5f,
      .frequency_penalty = 0.25f},
     false                                                                                        },
    {"bias",            {.temperature = 1, .n_bias = 6},                                     false},
    {"bans",            {.temperature = 1, .ban_at = 6, .n_ban = 6, .ban_until = INT32_MAX}, false},
    {"mask",            {.temperature = 1},                                                  true },
    {"everything",
     {.temperature = 1.3f,
      .top_p = 0.95f,
      .min_p = 0.01f,
      .repetition_penalty = 1.2f,
      .presence_penalty = 0.3f,
      .frequency_penalty = 0.1f,
      .top_k = 25,
      .n_bias = 6,
      .ban_at = 6,
      .n_ban = 2,
      .ban_until = INT32_MAX},
     true                                                                                         },
};

/* Ties at the borders of top-k and top-p are in the logits. */
static void fill_distribution(step *s) {
    make_step(s, MAX_ROWS, N_IDS);
    for (int32_t id = 0; id < N_IDS; id++) {
        const float x = 3.0f - 0.25f * (float)(id * 7 % N_IDS / 2);
        for (int32_t r = 0; r < MAX_ROWS; r++) s->logits[r * N_IDS + id] = x;
        s->counts[id] = (uint16_t)(id % 3 == 0 ? HD_COUNT_PROMPT : id % 4);
    }
    for (int32_t i = 0; i < 12; i++) {
        s->bias[i] = (hd_logit_bias){i * 5 % 38, i % 5 == 4 ? -INFINITY : (float)(i - 3)};
    }
    s->mask[0] = 0x35a9c6e1u;
    s->mask[1] = 0x5bu;
    for (int32_t r = 0; r < MAX_ROWS; r++) s->slot[r] = 0;
}

/* One seed at many positions, then many seeds at one position. */
static void draws_follow_the_probabilities(void **state) {
    (void)state;
    rig r;
    open_rig(&r, N_IDS);
    const hd_ops *ops = &r.table[r.n_tables - 1];
    for (size_t i = 0; i < 2 * HD_LEN(transformations); i++) {
        const transformation *t = &transformations[i / 2];
        int32_t seen[N_IDS] = {0};
        double probability[N_IDS];
        answer got;
        step s;
        fill_distribution(&s);
        for (int32_t row = 0; row < MAX_ROWS; row++) {
            s.params[row] = t->params;
            if (t->mask) s.mask_row[row] = 0;
            if (i % 2) s.slot[row] = row;
        }
        exact_probabilities(&s, probability);
        for (int32_t n = 0; n < DRAWS;) {
            s.a.rows = DRAWS - n < MAX_ROWS ? DRAWS - n : MAX_ROWS;
            for (int32_t row = 0; row < s.a.rows; row++, n++) {
                s.position[row] = i % 2 ? 1000 : n;
                if (i % 2) s.params[row].seed = (uint64_t)n;
            }
            run_sample(ops, r.stream[0], &s.a, &got);
            for (int32_t row = 0; row < s.a.rows; row++) seen[got.token[row]]++;
        }
        check_chi_square(t->name, seen, probability);
        free_step(&s);
    }
    close_rig(&r);
}

/* ---- log-probabilities ---- */

/* Against log-softmax in double, whatever the transformations do to the draw. */
static void check_logprobs(const step *s, const answer *got, int32_t row) {
    const float *x = s->logits + (int64_t)row * s->a.vocab;
    double max = -(double)INFINITY, total = 0;
    for (int32_t id = 0; id < s->a.vocab; id++) max = fmax(max, (double)x[id]);
    for (int32_t id = 0; id < s->a.vocab; id++) total += exp((double)x[id] - max);
    const double norm = max + log(total);
    const double want = (double)x[got->token[row]] - norm;
    if (!(fabs((double)got->logprob[row] - want) <= 5e-7 * (1 + fabs(want)))) {
        fail_msg("%.9g and not %.9g", (double)got->logprob[row], want);
    }
    const int32_t *top = got->top_id + row * HD_MAX_TOP_LOGPROBS;
    const float *top_logprob = got->top_logprob + row * HD_MAX_TOP_LOGPROBS;
    const int32_t n = s->params[row].n_top;
    for (int32_t i = 0; i < n; i++) {
        if (i >= s->a.n_ids) {
            assert_int_equal(top[i], -1);
            continue;
        }
        const double each = (double)x[top[i]] - norm;
        assert_true(fabs((double)top_logprob[i] - each) <= 5e-7 * (1 + fabs(each)));
        int32_t before = 0;
        for (int32_t id = 0; id < s->a.n_ids; id++) {
            before += x[id] > x[top[i]] || (x[id] == x[top[i]] && id < top[i]);
        }
        assert_int_equal(before, i);
    }
}

static void logprobs_are_those_of_the_logits(void **state) {
    (void)state;
    static const int32_t vocabs[] = {1, 3, 19, 20, 21, 256, 700, 20000};
    rig r;
    open_rig(&r, 20000);
    for (int32_t round = 0; round < 48; round++) {
        step s;
        make_step(&s, 3, vocabs[round % (int32_t)HD_LEN(vocabs)]);
        s.a.n_ids = round % 3 ? s.a.vocab : (s.a.vocab + 1) / 2;
        for (int32_t i = 0; i < 3 * s.a.vocab; i++) {
            s.logits[i] = noise((float)(1 << round % 7));
            if (round % 2) s.logits[i] = roundf(s.logits[i]);
        }
        for (int32_t i = 0; i < 3; i++) {
            s.params[i] = (hd_sampling){.temperature = 0.7f * (float)i,
                                        .top_p = 0.9f,
                                        .presence_penalty = 1,
                                        .n_bias = i,
                                        .n_top = i * 10,
                                        .logprob = true};
        }
        answer got;
        for (int32_t t = 0; t < r.n_tables; t++) {
            run_sample(&r.table[t], r.stream[1], &s.a, &got);
            for (int32_t i = 0; i < 3; i++) check_logprobs(&s, &got, i);
        }
        free_step(&s);
    }
    close_rig(&r);
}

/* ---- the other operators ---- */

void op_argmax(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 1);
    static const float logits[5][4] = {
        {1,         3,         3,         9},
        {-INFINITY, -INFINITY, -INFINITY, 9},
        {NAN,       -5,        NAN,       9},
        {-0.0f,     0,         -1,        9},
        {1,         INFINITY,  INFINITY,  9},
    };
    static const int32_t want[5] = {1, 0, 1, 0, 1};
    for (int32_t t = 0; t < r.n_tables; t++) {
        int32_t token[5];
        r.table[t].argmax(
            r.stream[1],
            &(hd_argmax_args){
                .token = token, .logits = &logits[0][0], .rows = 5, .vocab = 4, .n_ids = 3});
        assert_memory_equal(token, want, sizeof want);
    }
    enum { ROWS = 37, VOCAB = 5000 };
    float *x = take((size_t)ROWS * VOCAB * sizeof *x);
    for (int32_t i = 0; i < ROWS * VOCAB; i++) x[i] = (float)below(3000);
    int32_t token[MAX_TABLES * N_STREAMS][ROWS];
    for (int32_t i = 0; i < r.n_tables * N_STREAMS; i++) {
        r.table[i / N_STREAMS].argmax(
            r.stream[i % N_STREAMS],
            &(hd_argmax_args){
                .token = token[i], .logits = x, .rows = ROWS, .vocab = VOCAB, .n_ids = VOCAB});
        assert_memory_equal(token[i], token[0], sizeof token[0]);
    }
    free(x);
    close_rig(&r);
}

void op_verify(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 1);
    static const int32_t first_row[6] = {0, 1, 4, 7, 10, 12};
    /* no draft; all right; the second wrong; the first wrong, then right by chance; failed */
    static const int32_t input[12] = {9, 9, 5, 6, 9, 5, 6, 9, 5, 6, 9, 5};
    static const int32_t token[12] = {3, 5, 6, 7, 5, 8, 7, 4, 6, 7, HD_TOKEN_BROKEN, 5};
    static const int32_t want_accepted[5] = {0, 2, 1, 0, 0};
    static const int32_t want_next[5] = {3, 7, 8, 4, HD_TOKEN_BROKEN};
    for (int32_t t = 0; t < r.n_tables; t++) {
        int32_t accepted[5], next[5];
        r.table[t].verify(r.stream[1], &(hd_verify_args){.accepted = accepted,
                                                         .next = next,
                                                         .token = token,
                                                         .input = input,
                                                         .first_row = first_row,
                                                         .n = 5});
        assert_memory_equal(accepted, want_accepted, sizeof want_accepted);
        assert_memory_equal(next, want_next, sizeof want_next);
    }
    close_rig(&r);
}

void op_count_tokens(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 1);
    const int32_t row[6] = {1, 1, 0, 1, 1, 0}, token[6] = {2, 0, 1, 2, -1, 1}, clear = 1;
    for (int32_t t = 0; t < r.n_tables; t++) {
        uint16_t counts[2][3] = {
            {1, HD_COUNT_PROMPT | (HD_COUNT_OUTPUT - 1), 0},
            {7, 7,                                       7}
        };
        hd_count_tokens_args a = {.counts = &counts[0][0],
                                  .clear = &clear,
                                  .row = row,
                                  .token = token,
                                  .n_clear = 1,
                                  .n = 6,
                                  .vocab = 3};
        r.table[t].count_tokens(r.stream[1], &a);
        a.n_clear = 0;
        a.n = 2;
        a.prompt = true;
        r.table[t].count_tokens(r.stream[1], &a);
        const uint16_t want[2][3] = {
            {1,                   0xffff, 0                  },
            {HD_COUNT_PROMPT | 1, 0,      HD_COUNT_PROMPT | 2}
        };
        assert_memory_equal(counts, want, sizeof want);
    }
    close_rig(&r);
}

/* ---- drafts ---- */

enum { LENGTH = 120, PROMPT = 4, SPEC_VOCAB = 50, MAX_DRAFTS = 7, N_REQUESTS = 3 };

/* A model whose logits depend on the last two tokens and the position. */
static void fake_model(float *x, const int32_t *text, int32_t length) {
    for (int32_t id = 0; id < SPEC_VOCAB; id++) {
        const uint64_t before =
            (uint64_t)text[length - 1] << 32 | (uint64_t)text[length - 2] << 16 | (uint64_t)id;
        const hd_philox h = hd_philox_at(11, before, (uint64_t)length);
        x[id] = 3.0f * (hd_philox_unit(h.v[0]) + hd_philox_unit(h.v[1]) - 1.0f);
        if (h.v[2] % 64 == 0) x[id] += 4.0f;
    }
}

typedef struct generation {
    int32_t text[N_REQUESTS][LENGTH + MAX_DRAFTS + 1];
    int32_t length[N_REQUESTS];
    int32_t n_steps, n_accepted;
} generation;

static void start(generation *g, const hd_ops *ops, hd_stream *stream, step *s) {
    memset(g, 0, sizeof *g);
    memset(s->counts, 0, (size_t)N_COUNTS * SPEC_VOCAB * sizeof *s->counts);
    for (int32_t i = 0; i < N_REQUESTS; i++) {
        s->params[i] = (hd_sampling){.seed = 100 + (uint64_t)i,
                                     .temperature = 0.5f * (float)i,
                                     .top_p = 0.9f,
                                     .repetition_penalty = 1.1f,
                                     .presence_penalty = 0.2f,
                                     .frequency_penalty = 0.4f,
                                     .counts_row = i};
        const int32_t row[PROMPT] = {i, i, i, i};
        for (int32_t t = 0; t < PROMPT; t++) g->text[i][t] = 5 * i + t;
        g->length[i] = PROMPT;
        ops->count_tokens(stream, &(hd_count_tokens_args){.counts = s->counts,
                                                          .row = row,
                                                          .token = g->text[i],
                                                          .n = PROMPT,
                                                          .vocab = SPEC_VOCAB,
                                                          .prompt = true});
    }
}

/* The rows of request i: its last token and the drafts the greedy model makes of itself. */
static int32_t lay_rows(generation *g, const hd_ops *ops, hd_stream *stream, step *s, int32_t i,
                        int32_t n_drafts, int32_t r) {
    for (int32_t d = 0; d <= n_drafts; d++, r++) {
        float *x = s->logits + (int64_t)r * SPEC_VOCAB;
        int32_t *text = g->text[i];
        fake_model(x, text, g->length[i] + d);
        s->input[r] = text[g->length[i] + d - 1];
        s->n_drafted[r] = d;
        s->slot[r] = i;
        s->position[r] = g->length[i] + d;
        ops->argmax(stream, &(hd_argmax_args){.token = &text[g->length[i] + d],
                                              .logits = x,
                                              .rows = 1,
                                              .vocab = SPEC_VOCAB,
                                              .n_ids = SPEC_VOCAB});
    }
    return r;
}

/* Request i drafts n_drafts[i] tokens in every step. */
static void generate(generation *g, const hd_ops *ops, hd_stream *stream,
                     const int32_t *n_drafts) {
    step s;
    answer got;
    make_step(&s, MAX_ROWS, SPEC_VOCAB);
    start(g, ops, stream, &s);
    for (bool running = true; running; g->n_steps++) {
        int32_t first_row[N_REQUESTS + 1] = {0}, accepted[N_REQUESTS], next[N_REQUESTS];
        for (int32_t i = 0; i < N_REQUESTS; i++) {
            const int32_t left = LENGTH - g->length[i];
            const int32_t drafts = left < n_drafts[i] ? left : n_drafts[i];
            first_row[i + 1] = lay_rows(g, ops, stream, &s, i, drafts, first_row[i]);
        }
        s.a.rows = first_row[N_REQUESTS];
        run_sample(ops, stream, &s.a, &got);
        ops->verify(stream, &(hd_verify_args){.accepted = accepted,
                                              .next = next,
                                              .token = got.token,
                                              .input = s.input,
                                              .first_row = first_row,
                                              .n = N_REQUESTS});
        running = false;
        for (int32_t i = 0; i < N_REQUESTS; i++) {
            if (g->length[i] >= LENGTH) continue;
            int32_t row[MAX_DRAFTS + 1], *text = g->text[i] + g->length[i];
            for (int32_t d = 0; d <= accepted[i]; d++) row[d] = i;
            text[accepted[i]] = next[i];
            ops->count_tokens(stream, &(hd_count_tokens_args){.counts = s.counts,
                                                              .row = row,
                                                              .token = text,
                                                              .n = accepted[i] + 1,
                                                              .vocab = SPEC_VOCAB});
            g->length[i] += accepted[i] + 1;
            g->n_accepted += accepted[i];
            running = running || g->length[i] < LENGTH;
        }
    }
    free_step(&s);
}

/* The text is the same with drafts and without, greedy and drawn, with penalties that count
 * drafts of the same step. */
static void drafts_change_nothing(void **state) {
    (void)state;
    rig r;
    open_rig(&r, SPEC_VOCAB);
    generation alone, drafted;
    const int32_t none[N_REQUESTS] = {0};
    generate(&alone, &r.table[0], r.stream[0], none);
    for (int32_t t = 0; t < r.n_tables; t++) {
        for (int32_t k = 0; k <= MAX_DRAFTS; k++) {
            const int32_t drafts[N_REQUESTS] = {k, MAX_DRAFTS - k, k};
            generate(&drafted, &r.table[t], r.stream[2], drafts);
            for (int32_t i = 0; i < N_REQUESTS; i++) {
                assert_memory_equal(drafted.text[i], alone.text[i],
                                    LENGTH * sizeof alone.text[i][0]);
            }
            if (k == MAX_DRAFTS) assert_true(drafted.n_accepted > LENGTH / 2);
        }
    }
    close_rig(&r);
}

int test_sample(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(op_sample),
        cmocka_unit_test(large_rows_agree),
        cmocka_unit_test(edges_hold),
        cmocka_unit_test(rows_fail_alone),
        cmocka_unit_test(draws_follow_the_probabilities),
        cmocka_unit_test(logprobs_are_those_of_the_logits),
        cmocka_unit_test(op_argmax),
        cmocka_unit_test(op_verify),
        cmocka_unit_test(op_count_tokens),
        cmocka_unit_test(drafts_change_nothing),
    };
    return cmocka_run_group_tests_name("sample", tests, NULL, NULL);
}
