/* test_sample.c - the sampler: every table against the reference, and the reference against
 * exact probabilities. */
#include "fakes/sample_rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "base/status.h"
#include "ops/ref/sample_internal.h"

void op_sample(void **state); /* run by the walk over all operators, test_ops.c */

/* Roughly normal, so that a few candidates dominate. */
static float jitter(float spread) {
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) sum += hd_philox_unit(rig_word()) - 0.5f;
    return sum * spread;
}

/* The same rows, one call each, the last row first. */
static void run_apart(const hd_ops *ops, hd_stream *stream, const hd_sample_args *args,
                      answer *out) {
    answer *to = rig_answer();
    stream = rig_stream(ops, stream);
    for (int32_t r = args->rows - 1; r >= 0; r--) {
        hd_sample_args a = *args;
        a.rows = 1;
        a.token = to->token + r;
        a.logprob = to->logprob + r;
        a.top_id = to->top_id + r * a.top_stride;
        a.top_logprob = to->top_logprob + r * a.top_stride;
        a.logits += (int64_t)r * a.vocab;
        a.slot += r;
        a.position += r;
        a.mask_row += r;
        a.input += r;
        a.n_drafted += r;
        a.given += r;
        a.draft += r;
        ops->sample(stream, &a);
    }
    assert_int_equal(hd_stream_sync(stream, NULL), HD_OK);
    *out = *to;
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

/* ---- every table equals the reference ---- */

static float one_of(const float *values, size_t n) {
    return values[rig_below((int32_t)n)];
}

static hd_sampling random_params(int32_t most_top) {
    static const float temperature[] = {0, 1e-6f, 0.1f, 0.7f, 1, 1, 2, 50, 1e9f};
    static const float top_p[] = {0, 1, 1e-7f, 0.1f, 0.5f, 0.9f, 0.95f, 0.999f, 0.9999999f};
    static const float min_p[] = {0, 0, 1e-14f, 1e-3f, 0.05f, 0.5f, 1};
    static const float repetition[] = {0, 1, 1, 0.5f, 1.3f}, other[] = {0, 0, 0.5f, -1, 2};
    static const float delta[] = {0, 1e-6f, 0.1f, 0.6f, 1};
    static const int32_t top_k[] = {0, 0, 1, 2, 7, 40, 1000, INT32_MAX};
    return (hd_sampling){.seed = (uint64_t)rig_word() << 32 | rig_word(),
                         .temperature = one_of(temperature, HD_LEN(temperature)),
                         .top_p = one_of(top_p, HD_LEN(top_p)),
                         .min_p = one_of(min_p, HD_LEN(min_p)),
                         .repetition_penalty = one_of(repetition, HD_LEN(repetition)),
                         .presence_penalty = one_of(other, HD_LEN(other)),
                         .frequency_penalty = one_of(other, HD_LEN(other)),
                         .top_k = top_k[rig_below((int32_t)HD_LEN(top_k))],
                         .counts_row = rig_below(N_COUNTS),
                         .bias_at = rig_below(POOL / 2),
                         .n_bias = rig_below(3) ? 0 : rig_below(POOL / 2),
                         .ban_at = rig_below(POOL / 2),
                         .n_ban = rig_below(POOL / 2),
                         .ban_until = rig_below(3 * MAX_ROWS),
                         .n_top = rig_below(3) ? 0 : rig_below(most_top + 1),
                         .logprob = rig_below(2) != 0,
                         .logprob_mode = (hd_logprob_mode)rig_below(HD_LOGPROB_SAMPLED + 1),
                         .relaxed_top = rig_below(3) * rig_below(9),
                         .relaxed_delta = one_of(delta, HD_LEN(delta))};
}

/* Shapes of logits: a peak, a plain, a grid with many ties, gaps, wide, all equal. */
static void random_logits(float *x, int32_t vocab) {
    const int32_t kind = rig_below(6);
    for (int32_t i = 0; i < vocab; i++) {
        x[i] = jitter(kind == 4 ? 1e4f : kind == 1 ? 1.0f : 12.0f);
        if (kind == 2) x[i] = roundf(x[i]);
        if (kind == 3 && rig_below(2)) x[i] = -INFINITY;
        if (kind == 5) x[i] = i % 2 ? 0.0f : -0.0f;
    }
    if (rig_below(12) == 0) x[rig_below(vocab)] = NAN;
    if (rig_below(12) == 0) x[rig_below(vocab)] = INFINITY;
}

static void random_step(step *s, int32_t rows, int32_t vocab) {
    make_step(s, rows, vocab);
    s->a.n_ids = rig_below(2) ? vocab : 1 + rig_below(vocab);
    s->a.top_stride = rig_below(4) ? HD_DEFAULT_LOGPROBS : RIG_TOPS / MAX_ROWS;
    const int32_t words = (vocab + 31) / 32;
    for (int32_t i = 0; i < N_MASKS * words; i++) {
        s->mask[i] = i < words ? rig_word() : i < 2 * words ? UINT32_MAX << (i % 32) : 0;
    }
    for (int32_t i = 0; i < N_COUNTS * vocab / 3; i++) {
        s->counts[rig_below(N_COUNTS * vocab)] =
            (uint16_t)(rig_below(2) * HD_COUNT_PROMPT + rig_below(4) * rig_below(3));
    }
    for (int32_t i = 0; i < POOL; i++)
        s->bias[i] = (hd_logit_bias){rig_below(vocab), jitter(9.0f)};
    for (int32_t r = 0; r < rows; r++) {
        random_logits(s->logits + (int64_t)r * vocab, vocab);
        s->params[r] = random_params(s->a.top_stride);
        s->slot[r] = rig_below(rows);
        s->position[r] = rig_below(4 * MAX_ROWS);
        s->mask_row[r] = rig_below(3) ? -1 : rig_below(N_MASKS);
        s->input[r] = rig_below(s->a.n_ids);
        s->n_drafted[r] =
            rig_below(2) ? 0 : rig_below(r < HD_MAX_DRAFTS ? r + 1 : HD_MAX_DRAFTS);
        if (rig_below(6) == 0) s->given[r] = rig_below(vocab);
        if (rig_below(2)) s->draft[r] = rig_below(s->a.n_ids);
    }
}

void op_sample(void **state) {
    (void)state;
    static const int32_t vocabs[] = {1, 2, 5, 31, 33, 64, 255, 256, 257, 700, 3001};
    rig r;
    open_rig(&r, 3001);
    const int32_t rounds = r.brief ? 22 : 220;
    const int n_streams = r.brief ? 1 : RIG_STREAMS;
    for (int32_t round = 0; round < rounds; round++) {
        const int32_t rows = round % 20 == 0 ? 0 : 1 + rig_below(MAX_ROWS);
        step s;
        random_step(&s, rows, vocabs[round % (int32_t)HD_LEN(vocabs)]);
        static answer want, got;
        run_sample(&r.table[0], r.stream[0], &s.a, &want);
        for (int32_t t = 1; t < r.n_tables; t++) {
            for (int i = 0; i < n_streams; i++) {
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

/* A token that alone has a score of -0 has the log-probability 0, without a sign. */
static void certainty_has_no_sign(void **state) {
    (void)state;
    enum { VOCAB = 5, SURE = 3 };
    static answer got;
    rig r;
    open_rig(&r, VOCAB);
    step s;
    make_step(&s, 1, VOCAB);
    s.a.n_ids = VOCAB;
    for (int32_t i = 0; i < VOCAB; i++) s.logits[i] = i == SURE ? -0.0f : -INFINITY;
    for (int mode = HD_LOGPROB_RAW; mode <= HD_LOGPROB_SAMPLED; mode++) {
        s.params[0] = (hd_sampling){.temperature = 1,
                                    .n_top = 1,
                                    .logprob = true,
                                    .logprob_mode = (hd_logprob_mode)mode};
        for (int32_t t = 0; t < r.n_tables; t++) {
            run_sample(&r.table[t], r.stream[0], &s.a, &got);
            assert_int_equal(got.token[0], SURE);
            assert_true(got.logprob[0] == 0.0f && !signbit(got.logprob[0]));
            assert_true(got.top_logprob[0] == 0.0f && !signbit(got.top_logprob[0]));
        }
    }
    free_step(&s);
    close_rig(&r);
}

/* One token is likely, and top-k ends among the others. */
static void top_k_ends_among_unlikely_tokens(void **state) {
    (void)state;
    enum { VOCAB = 3000, LIKELY = 5 };
    static answer got;
    rig r;
    open_rig(&r, VOCAB);
    step s;
    make_step(&s, 1, VOCAB);
    s.a.n_ids = VOCAB;
    for (int32_t i = 0; i < VOCAB; i++) s.logits[i] = i == LIKELY ? 0.0f : -100.0f;
    for (int32_t top_k = 2; top_k < HD_DEFAULT_LOGPROBS; top_k += 3) {
        s.params[0] = (hd_sampling){.temperature = 1,
                                    .top_k = top_k,
                                    .n_top = HD_DEFAULT_LOGPROBS,
                                    .logprob_mode = HD_LOGPROB_SAMPLED};
        for (int32_t t = 0; t < r.n_tables; t++) {
            run_sample(&r.table[t], r.stream[0], &s.a, &got);
            assert_int_equal(got.token[0], LIKELY);
            for (int32_t i = 0; i < HD_DEFAULT_LOGPROBS; i++) {
                const int32_t next = i == 0 ? LIKELY : i <= LIKELY ? i - 1 : i;
                assert_int_equal(got.top_id[i], i < top_k ? next : -1);
            }
        }
    }
    free_step(&s);
    close_rig(&r);
}

/* The largest vocabulary: spread out, all equal, and two values only. */
static void large_rows_agree(void **state) {
    (void)state;
    enum { VOCAB = 129280 };
    rig r;
    open_rig(&r, VOCAB);
    step s;
    make_step(&s, 3, VOCAB);
    s.a.n_ids = 128815;
    for (int32_t i = 0; i < VOCAB; i++) {
        s.logits[i] = jitter(20.0f);
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
        const int32_t positions = r.brief ? 2 : 50;
        for (s.position[0] = 0; s.position[0] < positions; s.position[0]++) {
            const int32_t got = one_token(&r, &s);
            if (got != e->token) fail_msg("%s: token %d", e->name, got);
        }
        free_step(&s);
    }
    close_rig(&r);
}

/* A failed row leaves the others unchanged; ids without a token are never sampled; bans end. */
static void rows_fail_alone(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 64);
    step s;
    make_step(&s, 4, 8);
    for (int32_t i = 0; i < 32; i++) s.logits[i] = (float)(i % 8);
    s.logits[8 + 2] = NAN;
    s.a.n_ids = 6;
    s.bias[0].token = 5;
    s.bias[1].token = 4;
    s.params[2] = (hd_sampling){.ban_at = 0, .n_ban = 2, .ban_until = 3};
    s.params[3] = s.params[2];
    static answer got;
    for (int32_t t = 0; t < r.n_tables; t++) {
        run_sample(&r.table[t], r.stream[2], &s.a, &got);
        const int32_t want[4] = {5, HD_TOKEN_BROKEN, 3, 5};
        assert_memory_equal(got.token, want, sizeof want);
    }
    free_step(&s);
    close_rig(&r);
}

/* ---- the distribution ---- */

static void weights_are_exponentials(void **state) {
    (void)state;
    assert_true(ops_weight(0.0f) == UINT64_C(1) << 40);
    assert_true(ops_weight(OPS_LEAST_SCALED) == 0);
    for (int32_t i = 0; i <= 300000; i++) {
        const float z = -(float)i * 1e-4f;
        const double want = exp((double)z) * 0x1p40;
        assert_true(fabs((double)ops_weight(z) - want) <= 1.2e-7 * want + 0.51);
    }
}

enum { N_IDS = 40 };

typedef struct ranked {
    double y;
    int32_t id;
} ranked;

static int by_rank(const void *x, const void *y) {
    const ranked *a = x, *b = y;
    return a->y > b->y ? -1 : a->y < b->y ? 1 : a->id - b->id;
}

/* Returns the score of a token as docs/sampling.md defines it, in double. */
static double exact_score(const step *s, int32_t id) {
    const hd_sampling *p = &s->params[0];
    double y = (double)s->logits[id];
    for (int32_t i = 0; i < p->n_bias; i++) {
        if (s->bias[p->bias_at + i].token == id) y += (double)s->bias[p->bias_at + i].value;
    }
    for (int32_t i = 0; i < p->n_ban; i++) {
        if (s->bias[p->ban_at + i].token == id) return -(double)INFINITY;
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

/* Pearson's statistic: its mean is the number of cells less one, its deviation the root of
 * twice that. Cells that expect fewer than 10 are merged. */
static void check_chi_square(const char *name, const int32_t *seen, int32_t draws,
                             const double *probability) {
    double chi = 0, few_seen = 0, few_wanted = 0;
    int32_t cells = 0;
    for (int32_t id = 0; id < N_IDS; id++) {
        const double want = probability[id] * draws;
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

/* The logits have ties at the borders of top-k and top-p. */
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

/* one seed at many positions, then many seeds at one position */
static void draws_follow_the_probabilities(void **state) {
    (void)state;
    rig r;
    open_rig(&r, N_IDS);
    const hd_ops *ops = &r.table[r.n_host_tables - 1];
    const int32_t draws = r.brief ? 10000 : 100000;
    for (size_t i = 0; i < 2 * HD_LEN(transformations); i++) {
        const transformation *t = &transformations[i / 2];
        int32_t seen[N_IDS] = {0};
        double probability[N_IDS];
        static answer got;
        step s;
        fill_distribution(&s);
        for (int32_t row = 0; row < MAX_ROWS; row++) {
            s.params[row] = t->params;
            if (t->mask) s.mask_row[row] = 0;
            if (i % 2) s.slot[row] = row;
        }
        exact_probabilities(&s, probability);
        for (int32_t n = 0; n < draws;) {
            s.a.rows = draws - n < MAX_ROWS ? draws - n : MAX_ROWS;
            for (int32_t row = 0; row < s.a.rows; row++, n++) {
                s.position[row] = i % 2 ? 1000 : n;
                if (i % 2) s.params[row].seed = (uint64_t)n;
            }
            run_sample(ops, r.stream[0], &s.a, &got);
            for (int32_t row = 0; row < s.a.rows; row++) seen[got.token[row]]++;
        }
        check_chi_square(t->name, seen, draws, probability);
        free_step(&s);
    }
    close_rig(&r);
}

/* ---- log-probabilities ---- */

/* Against log-softmax in double; the transformations of the draw do not change it. */
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
    const int32_t *top = got->top_id + row * s->a.top_stride;
    const float *top_logprob = got->top_logprob + row * s->a.top_stride;
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
        s.a.top_stride = round % 8 ? HD_DEFAULT_LOGPROBS : HD_MAX_ALTERNATIVES;
        for (int32_t i = 0; i < 3 * s.a.vocab; i++) {
            s.logits[i] = jitter((float)(1 << round % 7));
            if (round % 2) s.logits[i] = roundf(s.logits[i]);
        }
        for (int32_t i = 0; i < 3; i++) {
            s.params[i] = (hd_sampling){.temperature = 0.7f * (float)i,
                                        .top_p = 0.9f,
                                        .presence_penalty = 1,
                                        .n_bias = i,
                                        .n_top = i * s.a.top_stride / 2,
                                        .logprob = true};
        }
        static answer got;
        for (int32_t t = 0; t < r.n_tables; t++) {
            run_sample(&r.table[t], r.stream[1], &s.a, &got);
            for (int32_t i = 0; i < 3; i++) check_logprobs(&s, &got, i);
        }
        free_step(&s);
    }
    close_rig(&r);
}

/* Against exact probabilities, over all ids of the row. */
static void check_mode(const step *s, const answer *got, hd_logprob_mode mode) {
    const hd_sampling *p = &s->params[0];
    const float *x = s->logits;
    const double divisor = mode == HD_LOGPROB_RAW ? 1 : (double)p->temperature;
    const float bias = mode == HD_LOGPROB_RAW ? 0 : s->bias[p->bias_at].value;
    const int32_t biased = s->bias[p->bias_at].token, token = got->token[0];
    double score[N_IDS], total = 0;
    bool in[N_IDS];
    for (int32_t id = 0; id < N_IDS; id++) {
        score[id] = (double)(x[id] + (id == biased ? bias : 0)) / divisor;
    }
    for (int32_t id = 0; id < N_IDS; id++) {
        int32_t before = 0;
        for (int32_t k = 0; k < N_IDS; k++) before += score[k] > score[id];
        in[id] = mode != HD_LOGPROB_SAMPLED || before < p->top_k;
        if (in[id]) total += exp(score[id]);
    }
    assert_true(in[token]);
    assert_true(fabs((double)got->logprob[0] - (score[token] - log(total))) < 2e-6);
    for (int32_t i = 0; i < p->n_top; i++) {
        const int32_t id = got->top_id[i];
        assert_true(id < 0 ? mode == HD_LOGPROB_SAMPLED && i >= p->top_k : in[id]);
        if (id < 0) continue;
        assert_true(fabs((double)got->top_logprob[i] - (score[id] - log(total))) < 2e-6);
    }
}

/* A row that samples, then the same logits with that token given: equal bits if no bias
 * applied. Mode tempered at temperature 1 is raw. */
static void modes_rescore_to_the_bit(void **state) {
    (void)state;
    rig r;
    open_rig(&r, N_IDS);
    for (int32_t round = 0; round < 60; round++) {
        const hd_logprob_mode mode = (hd_logprob_mode)(round % 3);
        const bool biased = round % 2;
        step s;
        static answer got, again;
        make_step(&s, 1, N_IDS);
        for (int32_t id = 0; id < N_IDS; id++) s.logits[id] = jitter(5.0f);
        s.bias[0] = (hd_logit_bias){rig_below(N_IDS), 2.0f};
        s.params[0] = (hd_sampling){.seed = rig_word(),
                                    .temperature = round % 4 ? 0.7f : 1.0f,
                                    .top_k = 3,
                                    .n_bias = biased,
                                    .n_top = 5,
                                    .logprob = true,
                                    .logprob_mode = mode};
        s.bias[0].value = biased ? 2.0f : 0.0f;
        for (int32_t t = 0; t < r.n_tables; t++) {
            s.given[0] = -1;
            run_sample(&r.table[t], r.stream[1], &s.a, &got);
            check_mode(&s, &got, mode);
            if (biased) continue;
            s.given[0] = got.token[0];
            run_sample(&r.table[t], r.stream[1], &s.a, &again);
            assert_memory_equal(&again, &got, sizeof got);
            if (mode != HD_LOGPROB_TEMPERED || s.params[0].temperature != 1.0f) continue;
            s.params[0].logprob_mode = HD_LOGPROB_RAW;
            run_sample(&r.table[t], r.stream[1], &s.a, &again);
            assert_memory_equal(&again, &got, sizeof got);
            s.params[0].logprob_mode = mode;
        }
        free_step(&s);
    }
    close_rig(&r);
}

int test_sample(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(certainty_has_no_sign),
        cmocka_unit_test(top_k_ends_among_unlikely_tokens),
        cmocka_unit_test(large_rows_agree),
        cmocka_unit_test(edges_hold),
        cmocka_unit_test(rows_fail_alone),
        cmocka_unit_test(weights_are_exponentials),
        cmocka_unit_test(draws_follow_the_probabilities),
        cmocka_unit_test(logprobs_are_those_of_the_logits),
        cmocka_unit_test(modes_rescore_to_the_bit),
    };
    return cmocka_run_group_tests_name("sample", tests, NULL, NULL);
}
