/* test_drafts.c - the operators for drafts, and generation with drafts compared with generation
 * without. */
#include "fakes/sample_rig.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "base/status.h"

/* run by the walk over all operators, test_ops.c */
void op_argmax(void **state);
void op_verify(void **state);
void op_count_tokens(void **state);

void op_argmax(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 1);
    const float rows[5][4] = {
        {1,         3,         3,         9},
        {-INFINITY, -INFINITY, -INFINITY, 9},
        {NAN,       -5,        NAN,       9},
        {-0.0f,     0,         -1,        9},
        {1,         INFINITY,  INFINITY,  9},
    };
    static const int32_t want[5] = {1, 0, 1, 0, 1};
    /* Mask rows: all, only ids of -inf, all, the last two, none. */
    const uint32_t masks[3] = {0, 6, 1};
    const int32_t mask_rows[5] = {-1, 2, -1, 1, 0};
    static const int32_t want_masked[5] = {1, 0, 1, 1, 0};
    float *logits = rig_copy(rows, sizeof rows);
    uint32_t *mask = rig_copy(masks, sizeof masks);
    int32_t *mask_row = rig_copy(mask_rows, sizeof mask_rows);
    int32_t *five = rig_zeros(sizeof want);
    for (int32_t t = 0; t < r.n_tables; t++) {
        hd_stream *s = rig_stream(&r.table[t], r.stream[1]);
        r.table[t].argmax(
            s, &(hd_argmax_args){
                   .token = five, .logits = logits, .rows = 5, .vocab = 4, .n_ids = 3});
        assert_int_equal(hd_stream_sync(s, NULL), HD_OK);
        assert_memory_equal(five, want, sizeof want);
        r.table[t].argmax(s, &(hd_argmax_args){.token = five,
                                               .logits = logits,
                                               .mask = mask,
                                               .mask_row = mask_row,
                                               .rows = 5,
                                               .vocab = 4,
                                               .n_ids = 3});
        assert_int_equal(hd_stream_sync(s, NULL), HD_OK);
        assert_memory_equal(five, want_masked, sizeof want_masked);
    }
    rig_free(logits);
    rig_free(mask);
    rig_free(mask_row);
    rig_free(five);
    enum { ROWS = 37, VOCAB = 5000 };
    float *x = rig_zeros((size_t)ROWS * VOCAB * sizeof *x);
    for (int32_t i = 0; i < ROWS * VOCAB; i++) x[i] = (float)rig_below(3000);
    enum { WORDS = (VOCAB + 31) / 32 };
    int32_t *token = rig_zeros(3 * ROWS * sizeof *token), *first = token + ROWS;
    mask_row = rig_zeros(ROWS * sizeof *mask_row);
    mask = rig_zeros((size_t)ROWS * WORDS * sizeof *mask);
    for (int32_t i = 0; i < ROWS * WORDS; i++)
        mask[i] = (uint32_t)rig_below(1 << 16) << rig_below(17);
    for (int32_t i = 0; i < ROWS; i++) mask_row[i] = i % 3 ? ROWS - 1 - i : -1;
    for (int32_t i = 0; i < 2 * r.n_tables * RIG_STREAMS; i++) {
        const hd_ops *ops = &r.table[i / 2 / RIG_STREAMS];
        hd_stream *s = rig_stream(ops, r.stream[i / 2 % RIG_STREAMS]);
        int32_t *known = first + i % 2 * ROWS;
        ops->argmax(s, &(hd_argmax_args){.token = token,
                                         .logits = x,
                                         .mask = i % 2 ? mask : NULL,
                                         .mask_row = mask_row,
                                         .rows = ROWS,
                                         .vocab = VOCAB,
                                         .n_ids = VOCAB});
        assert_int_equal(hd_stream_sync(s, NULL), HD_OK);
        if (i < 2) memcpy(known, token, ROWS * sizeof *token);
        assert_memory_equal(token, known, ROWS * sizeof *token);
    }
    assert_memory_not_equal(first, first + ROWS, ROWS * sizeof *first);
    rig_free(token);
    rig_free(mask);
    rig_free(mask_row);
    rig_free(x);
    close_rig(&r);
}

void op_verify(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 1);
    const int32_t firsts[6] = {0, 1, 4, 7, 10, 12};
    /* no draft; all accepted; the second rejected; the first rejected, then equal by chance;
     * failed */
    const int32_t inputs[12] = {9, 9, 5, 6, 9, 5, 6, 9, 5, 6, 9, 5};
    const int32_t tokens[12] = {3, 5, 6, 7, 5, 8, 7, 4, 6, 7, HD_TOKEN_BROKEN, 5};
    static const int32_t want_accepted[5] = {0, 2, 1, 0, 0};
    static const int32_t want_next[5] = {3, 7, 8, 4, HD_TOKEN_BROKEN};
    int32_t *out = rig_zeros(10 * sizeof *out), *first_row = rig_copy(firsts, sizeof firsts);
    int32_t *input = rig_copy(inputs, sizeof inputs), *token = rig_copy(tokens, sizeof tokens);
    for (int32_t t = 0; t < r.n_tables; t++) {
        hd_stream *s = rig_stream(&r.table[t], r.stream[1]);
        r.table[t].verify(s, &(hd_verify_args){.accepted = out,
                                               .next = out + 5,
                                               .token = token,
                                               .input = input,
                                               .first_row = first_row,
                                               .n = 5});
        assert_int_equal(hd_stream_sync(s, NULL), HD_OK);
        assert_memory_equal(out, want_accepted, sizeof want_accepted);
        assert_memory_equal(out + 5, want_next, sizeof want_next);
    }
    rig_free(out);
    rig_free(first_row);
    rig_free(input);
    rig_free(token);
    close_rig(&r);
}

void op_count_tokens(void **state) {
    (void)state;
    rig r;
    open_rig(&r, 1);
    const int32_t numbers[13] = {1, 1, 0, 1, 1, 0, 2, 0, 1, 2, -1, 1, 1};
    int32_t *row = rig_copy(numbers, sizeof numbers);
    for (int32_t t = 0; t < r.n_tables; t++) {
        const uint16_t before[2][3] = {
            {1, HD_COUNT_PROMPT | (HD_COUNT_OUTPUT - 1), 0},
            {7, 7,                                       7}
        };
        hd_stream *s = rig_stream(&r.table[t], r.stream[1]);
        uint16_t *counts = rig_copy(before, sizeof before);
        hd_count_tokens_args a = {.counts = counts,
                                  .clear = row + 12,
                                  .row = row,
                                  .token = row + 6,
                                  .n_clear = 1,
                                  .n = 6,
                                  .vocab = 3};
        r.table[t].count_tokens(s, &a);
        a.n_clear = 0;
        a.n = 2;
        a.prompt = true;
        r.table[t].count_tokens(s, &a);
        assert_int_equal(hd_stream_sync(s, NULL), HD_OK);
        const uint16_t want[2][3] = {
            {1,                   0xffff, 0                  },
            {HD_COUNT_PROMPT | 1, 0,      HD_COUNT_PROMPT | 2}
        };
        assert_memory_equal(counts, want, sizeof want);
        rig_free(counts);
    }
    rig_free(row);
    close_rig(&r);
}

/* So many that several threads count them, and one id so often that its count saturates. */
static void many_tokens_are_counted(void **state) {
    (void)state;
    enum { VOCAB = 1001, N = 90000, PLACES = 3 };
    rig r;
    open_rig(&r, VOCAB);
    const size_t bytes = PLACES * VOCAB * sizeof(uint16_t);
    int32_t *row = rig_zeros(N * sizeof *row), *token = rig_zeros(N * sizeof *token);
    uint16_t *want = rig_zeros(bytes), *counts = rig_zeros(bytes);
    int32_t *clear = rig_zeros(sizeof *clear);
    for (int32_t i = 0; i < N; i++) {
        row[i] = rig_below(PLACES);
        token[i] = i % 2 ? rig_below(VOCAB + 1) - 1 : 1000;
    }
    for (int32_t t = 0; t < r.n_tables; t++) {
        for (int32_t i = 0; i < RIG_STREAMS; i++) {
            hd_stream *s = rig_stream(&r.table[t], r.stream[i]);
            uint16_t *into = t == 0 && i == 0 ? want : counts;
            memset(into, 0x5a, bytes);
            const hd_count_tokens_args a = {.counts = into,
                                            .clear = clear,
                                            .row = row,
                                            .token = token,
                                            .n_clear = 1,
                                            .n = N,
                                            .vocab = VOCAB};
            r.table[t].count_tokens(s, &a);
            assert_int_equal(hd_stream_sync(s, NULL), HD_OK);
            if (into == counts) assert_memory_equal(counts, want, bytes);
        }
    }
    rig_free(row);
    rig_free(token);
    rig_free(want);
    rig_free(counts);
    rig_free(clear);
    close_rig(&r);
}

/* ---- given tokens ---- */

/* A given token is reported, whatever the settings; its row samples nothing. */
static void given_tokens_are_reported(void **state) {
    (void)state;
    enum { VOCAB = 700, ROWS = 8 };
    rig r;
    open_rig(&r, VOCAB);
    step s;
    make_step(&s, ROWS, VOCAB);
    s.a.n_ids = 650;
    for (int32_t i = 0; i < ROWS * VOCAB; i++) s.logits[i] = (float)rig_below(900) / 100.0f;
    s.logits[7 * VOCAB + 3] = NAN;
    for (int32_t i = 0; i < ROWS; i++) {
        s.given[i] = i == 1 ? -1 : i == 2 ? 699 : rig_below(VOCAB);
        s.params[i] = (hd_sampling){.temperature = 1, .n_top = i, .n_ban = 1, .ban_until = 99};
        s.mask_row[i] = 0; /* it allows no token */
    }
    for (int32_t t = 0; t < r.n_tables; t++) {
        static answer got;
        run_sample(&r.table[t], r.stream[1], &s.a, &got);
        for (int32_t i = 0; i < ROWS - 1; i++) {
            if (i == 1) continue;
            const float *x = s.logits + i * VOCAB;
            double total = 0;
            for (int32_t id = 0; id < VOCAB; id++) total += exp((double)x[id]);
            const double want = (double)x[s.given[i]] - log(total);
            assert_int_equal(got.token[i], s.given[i]);
            assert_true(fabs((double)got.logprob[i] - want) < 1e-5);
        }
        assert_int_equal(got.token[1], HD_TOKEN_NONE);
        assert_int_equal(got.token[7], HD_TOKEN_BROKEN);
    }
    free_step(&s);
    close_rig(&r);
}

/* The condition of relaxed acceptance (docs/sampling.md), in double, for scores without
 * ties. */
static bool is_near(const double *y, int32_t n, const hd_sampling *p, int32_t draft) {
    double max = y[0], total = 0;
    int32_t rank = 0;
    for (int32_t id = 1; id < n; id++) max = fmax(max, y[id]);
    for (int32_t id = 0; id < n; id++) {
        total += exp(y[id] - max);
        rank += y[id] > y[draft];
    }
    return p->relaxed_delta > 0 && rank < p->relaxed_top &&
           exp(y[draft] - max) / total >= 1 / total - (double)p->relaxed_delta;
}

/* Every draft under many settings: it is accepted if it satisfies the condition; otherwise the
 * row samples as if there were no draft. Bias, bans, masks and penalties count; the temperature
 * does not. */
static void relaxed_drafts_stand_when_near(void **state) {
    (void)state;
    enum { VOCAB = 300, ROWS = 20 };
    rig r;
    open_rig(&r, VOCAB);
    int32_t kept = 0, fell = 0;
    for (int32_t round = 0; round < 60; round++) {
        step s;
        make_step(&s, ROWS, VOCAB);
        double y[VOCAB];
        s.bias[0] = (hd_logit_bias){rig_below(VOCAB), 1.5f};
        s.bias[1].token = rig_below(VOCAB);
        s.counts[rig_below(VOCAB)] = 2;
        for (int32_t i = 0; i < VOCAB; i++) {
            s.logits[i] = 4.0f * hd_philox_unit(rig_word()) + (rig_below(40) ? 0.0f : 3.5f);
            if (i % 32 == 0) s.mask[i / 32] = rig_word() | rig_word();
            y[i] =
                (double)s.logits[i] + (i == s.bias[0].token ? 1.5 : 0) - (s.counts[i] ? 1 : 0);
            if (i == s.bias[1].token || !(s.mask[i / 32] >> (i % 32) & 1u)) y[i] = -HUGE_VAL;
        }
        s.params[0] = (hd_sampling){.seed = (uint64_t)round,
                                    .temperature = round % 3 ? 0.5f * (float)(round % 7) : 0,
                                    .frequency_penalty = 0.5f,
                                    .n_bias = 1,
                                    .ban_at = 1,
                                    .n_ban = 1,
                                    .ban_until = INT32_MAX,
                                    .relaxed_top = 1 + rig_below(12),
                                    .relaxed_delta =
                                        0.02f * (float)rig_below(20) + (round % 8 ? 1e-4f : 0)};
        for (int32_t i = 0; i < ROWS; i++) {
            memcpy(s.logits + i * VOCAB, s.logits, VOCAB * sizeof *s.logits);
            s.slot[i] = s.mask_row[i] = 0;
            s.draft[i] = i == 0 ? -1 : rig_below(VOCAB);
            for (int32_t id = 0; i % 2 && id < VOCAB; id++) { /* a likely one */
                if (y[id] > y[s.draft[i]] && rig_below(3)) s.draft[i] = id;
            }
            s.position[i] = 5;
        }
        for (int32_t t = 0; t < r.n_tables; t++) {
            static answer got;
            run_sample(&r.table[t], r.stream[1], &s.a, &got);
            for (int32_t i = 1; i < ROWS; i++) {
                const bool near = is_near(y, VOCAB, &s.params[0], s.draft[i]);
                assert_int_equal(got.token[i], near ? s.draft[i] : got.token[0]);
                kept += near && got.token[0] != s.draft[i];
                fell += !near;
            }
        }
        free_step(&s);
    }
    assert_true(kept > 300 && fell > 300);
    close_rig(&r);
}

/* ---- the distribution of two tokens, of which the first is drafted ---- */

enum { PAIR_VOCAB = 6, PAIRS = PAIR_VOCAB * PAIR_VOCAB, PAIR_DRAWS = 60000 };

/* The logits before the first token, and those after each first token. */
static void fill_pair_logits(float x[PAIR_VOCAB + 1][PAIR_VOCAB]) {
    for (int32_t i = 0; i <= PAIR_VOCAB; i++) {
        for (int32_t id = 0; id < PAIR_VOCAB; id++)
            x[i][id] = 0.3f * (float)(i * 5 + id * 3 % 7);
    }
}

static void softmax(const float *x, double *p) {
    double total = 0;
    for (int32_t id = 0; id < PAIR_VOCAB; id++) total += exp((double)x[id]);
    for (int32_t id = 0; id < PAIR_VOCAB; id++) p[id] = exp((double)x[id]) / total;
}

/* Inputs and outputs of verify, in memory that a device can address. */
typedef struct verdict {
    int32_t accepted, next, token[2], first_row[2];
} verdict;

/* Returns the two tokens of one seed: a step of two rows, and a second step if the draft was
 * rejected. */
static int32_t draw_pair(const hd_ops *ops, hd_stream *stream, step *s, verdict *v,
                         float x[PAIR_VOCAB + 1][PAIR_VOCAB], int32_t draft, bool relaxed) {
    static answer got;
    s->a.rows = 2;
    s->input[1] = draft;
    s->n_drafted[1] = 1;
    s->position[1] = 1;
    s->slot[1] = 0;
    s->draft[0] = relaxed ? draft : -1;
    memcpy(s->logits, x[PAIR_VOCAB], sizeof x[0]);
    memcpy(s->logits + PAIR_VOCAB, x[draft], sizeof x[0]);
    run_sample(ops, stream, &s->a, &got);
    memcpy(v->token, got.token, sizeof v->token);
    v->first_row[1] = 2;
    ops->verify(rig_stream(ops, stream), &(hd_verify_args){.accepted = &v->accepted,
                                                           .next = &v->next,
                                                           .token = v->token,
                                                           .input = s->input,
                                                           .first_row = v->first_row,
                                                           .n = 1});
    assert_int_equal(hd_stream_sync(rig_stream(ops, stream), NULL), HD_OK);
    if (v->accepted) return draft * PAIR_VOCAB + v->next;
    s->a.rows = 1;
    s->position[0] = 1;
    s->draft[0] = -1;
    memcpy(s->logits, x[v->next], sizeof x[0]);
    run_sample(ops, stream, &s->a, &got);
    s->position[0] = 0;
    return v->next * PAIR_VOCAB + got.token[0];
}

/* Drafts are every token in turn. Strict acceptance changes neither distribution. A relaxed
 * first draft is itself wherever it satisfies the condition (here the two most probable ones),
 * and the next token's distribution is unchanged. */
static void acceptance_keeps_the_distribution(void **state) {
    (void)state;
    rig r;
    open_rig(&r, PAIR_VOCAB);
    float x[PAIR_VOCAB + 1][PAIR_VOCAB];
    double first[PAIR_VOCAB], second[PAIR_VOCAB];
    verdict *v = rig_zeros(sizeof *v);
    fill_pair_logits(x);
    for (int32_t relaxed = 0; relaxed < 2; relaxed++) {
        step s;
        int32_t seen[PAIRS] = {0};
        make_step(&s, 2, PAIR_VOCAB);
        s.params[0] = (hd_sampling){.temperature = 1, .relaxed_top = 2, .relaxed_delta = 1.0f};
        for (int32_t n = 0; n < PAIR_DRAWS; n++) {
            s.params[0].seed = (uint64_t)n;
            seen[draw_pair(&r.table[r.n_tables - 1], r.stream[0], &s, v, x, n % PAIR_VOCAB,
                           relaxed)]++;
        }
        softmax(x[PAIR_VOCAB], first);
        double chi = 0;
        for (int32_t i = 0; i < PAIRS; i++) {
            const int32_t own = i / PAIR_VOCAB;
            int32_t better = 0;
            for (int32_t k = 0; k < PAIR_VOCAB; k++) better += first[k] > first[own];
            double p = first[own];
            if (relaxed) p = (p * (PAIR_VOCAB - 2) + (better < 2)) / PAIR_VOCAB;
            softmax(x[own], second);
            const double want = PAIR_DRAWS * p * second[i % PAIR_VOCAB];
            chi += (seen[i] - want) * (seen[i] - want) / want;
        }
        if (chi > PAIRS - 1 + 4 * sqrt(2 * (PAIRS - 1))) fail_msg("chi-square %.1f", chi);
        free_step(&s);
    }
    rig_free(v);
    close_rig(&r);
}

/* ---- a loop ---- */

enum { LENGTH = 120, PROMPT = 4, SPEC_VOCAB = 50, MAX_DRAFTS = 7, N_REQUESTS = 3 };

/* A model whose logits depend on the last two tokens and on the position. */
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
    int32_t row[N_REQUESTS][MAX_DRAFTS + 1]; /* of counts; each has its request's number */
    int32_t first_row[N_REQUESTS + 1], accepted[N_REQUESTS], next[N_REQUESTS];
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
        for (int32_t d = 0; d <= MAX_DRAFTS; d++) g->row[i][d] = i;
        for (int32_t t = 0; t < PROMPT; t++) g->text[i][t] = 5 * i + t;
        g->length[i] = PROMPT;
        ops->count_tokens(stream, &(hd_count_tokens_args){.counts = s->counts,
                                                          .row = g->row[i],
                                                          .token = g->text[i],
                                                          .n = PROMPT,
                                                          .vocab = SPEC_VOCAB,
                                                          .prompt = true});
    }
}

/* The rows of request i: its last token, and the drafts that the greedy model makes of
 * itself. */
static int32_t write_rows(generation *g, const hd_ops *ops, hd_stream *stream, step *s,
                          int32_t i, int32_t n_drafts, int32_t r) {
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
        assert_int_equal(hd_stream_sync(stream, NULL), HD_OK);
    }
    return r;
}

/* Request i drafts n_drafts[i] tokens in every step. */
static void generate(generation *g, const hd_ops *ops, hd_stream *stream,
                     const int32_t *n_drafts) {
    step s;
    static answer got;
    int32_t *sampled = rig_zeros(sizeof got.token);
    stream = rig_stream(ops, stream);
    make_step(&s, MAX_ROWS, SPEC_VOCAB);
    start(g, ops, stream, &s);
    for (bool running = true; running; g->n_steps++) {
        const int32_t *accepted = g->accepted;
        int32_t *first_row = g->first_row;
        for (int32_t i = 0; i < N_REQUESTS; i++) {
            const int32_t left = LENGTH - g->length[i];
            const int32_t drafts = left < n_drafts[i] ? left : n_drafts[i];
            first_row[i + 1] = write_rows(g, ops, stream, &s, i, drafts, first_row[i]);
        }
        s.a.rows = first_row[N_REQUESTS];
        run_sample(ops, stream, &s.a, &got);
        memcpy(sampled, got.token, sizeof got.token);
        ops->verify(stream, &(hd_verify_args){.accepted = g->accepted,
                                              .next = g->next,
                                              .token = sampled,
                                              .input = s.input,
                                              .first_row = first_row,
                                              .n = N_REQUESTS});
        assert_int_equal(hd_stream_sync(stream, NULL), HD_OK);
        running = false;
        for (int32_t i = 0; i < N_REQUESTS; i++) {
            if (g->length[i] >= LENGTH) continue;
            int32_t *text = g->text[i] + g->length[i];
            text[accepted[i]] = g->next[i];
            ops->count_tokens(stream, &(hd_count_tokens_args){.counts = s.counts,
                                                              .row = g->row[i],
                                                              .token = text,
                                                              .n = accepted[i] + 1,
                                                              .vocab = SPEC_VOCAB});
            g->length[i] += accepted[i] + 1;
            g->n_accepted += accepted[i];
            running = running || g->length[i] < LENGTH;
        }
    }
    rig_free(sampled);
    free_step(&s);
}

/* The text is the same with and without drafts, greedy and sampled, with penalties that count
 * drafts of the same step. */
static void drafts_change_nothing(void **state) {
    (void)state;
    rig r;
    open_rig(&r, SPEC_VOCAB);
    generation *alone = rig_zeros(sizeof *alone), *drafted = rig_zeros(sizeof *drafted);
    const int32_t none[N_REQUESTS] = {0};
    generate(alone, &r.table[0], r.stream[0], none);
    for (int32_t t = 0; t < r.n_tables; t++) {
        for (int32_t k = 0; k <= MAX_DRAFTS; k++) {
            const int32_t drafts[N_REQUESTS] = {k, MAX_DRAFTS - k, k};
            generate(drafted, &r.table[t], r.stream[2], drafts);
            for (int32_t i = 0; i < N_REQUESTS; i++) {
                assert_memory_equal(drafted->text[i], alone->text[i],
                                    LENGTH * sizeof alone->text[i][0]);
            }
            if (k == MAX_DRAFTS) assert_true(drafted->n_accepted > LENGTH / 2);
        }
    }
    rig_free(alone);
    rig_free(drafted);
    close_rig(&r);
}

int test_drafts(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_tokens_are_counted),
        cmocka_unit_test(given_tokens_are_reported),
        cmocka_unit_test(relaxed_drafts_stand_when_near),
        cmocka_unit_test(acceptance_keeps_the_distribution),
        cmocka_unit_test(drafts_change_nothing),
    };
    return cmocka_run_group_tests_name("drafts", tests, NULL, NULL);
}
