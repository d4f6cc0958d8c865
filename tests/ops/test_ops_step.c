/* test_ops_step.c - prepare_step, commit_step and prepare_draft on every table. */
#include "ops/ops_fixture.h"

#include <string.h>

enum { SEQS = 37, SLOTS = 50, VOCAB = 90, STRIDE = 11, MAX_D = 7, PROMPT = 40 };

/* Random inputs of a step; some sequences are padding. */
typedef struct step_case {
    hd_cursor *cursor;
    hd_step_seq *seqs;
    hd_sampling *params;
    int32_t *n_live, *verifiable, *token, *input, *guess, *before, *logit_row;
    int32_t n_before; /* rows of prompts in the shape */
    uint16_t *counts;
    int32_t n, n_drafts, at;
    float forced;
} step_case;

static hd_cursor random_cursor(void) {
    hd_cursor c = {.position = random_below(200), .token = random_below(VOCAB)};
    for (int k = 0; k < HD_MAX_DRAFTS; k++) c.draft[k] = random_below(VOCAB);
    return c;
}

static void make_case(step_case *t, int32_t n, int32_t n_drafts, float forced) {
    const int32_t rows = n * (1 + n_drafts);
    *t = (step_case){.n = n, .n_drafts = n_drafts, .forced = forced};
    t->cursor = take(SLOTS * sizeof *t->cursor);
    t->seqs = take((size_t)n * sizeof *t->seqs);
    t->params = take((SLOTS + 1) * sizeof *t->params);
    t->counts = take((size_t)SLOTS * VOCAB * sizeof *t->counts);
    t->n_live = take_ints(1);
    t->verifiable = take_ints(n);
    t->token = take_ints(rows);
    t->input = take_ints(rows);
    t->guess = take_ints(n);
    t->logit_row = take_ints(rows);
    for (int32_t r = 0; r < rows; r++) t->logit_row[r] = r;
    *t->n_live = n - n / 4;
    memset(t->counts, 0, (size_t)SLOTS * VOCAB * sizeof *t->counts);
    memset(t->params, 0, (SLOTS + 1) * sizeof *t->params);
    for (int32_t i = 0; i < SLOTS; i++) {
        t->cursor[i] = random_cursor();
        t->params[i].seed = (uint64_t)random_below(1 << 30) << 20;
        t->params[i].counts_row = i;
        t->params[i].frequency_penalty = random_below(2) ? 0.5f : 0.0f;
    }
    for (int32_t i = 0; i < n; i++) {
        t->seqs[i] = (hd_step_seq){.slot = (i * 7 + 3) % SLOTS,
                                   .n_drafts = random_below(n_drafts + 1),
                                   .n_wanted = random_below(n_drafts + 1),
                                   .capacity = random_below(240),
                                   .fresh = random_below(2),
                                   .at = random_cursor()};
        t->verifiable[i] = i < *t->n_live ? random_below(n_drafts + 2) - 1 : -1;
        t->guess[i] = random_below(VOCAB);
    }
    for (int32_t r = 0; r < rows; r++) { /* mostly equal; sometimes a failed row */
        t->input[r] = random_below(VOCAB);
        t->token[r] = random_below(3) || r + 1 == rows ? t->input[(r + 1) % rows] : -1;
    }
    for (int32_t r = 0; r + 1 < rows; r++) {
        if (t->token[r] >= 0) t->token[r] = random_below(4) ? t->input[r + 1] : 3;
    }
}

/* Some sequences have rows of prompts, one a single row that goes on; the shape has room for more. */
static void add_prompts(step_case *t) {
    int32_t used = 0, row = 0;
    for (int32_t i = 0; i < t->n; i++) {
        hd_step_seq *q = &t->seqs[i];
        if (i % 5 == 2 || i == 0) {
            q->fresh = 1;
            q->n_drafts = 0;
            q->n_before = i == 7 ? 0 : random_below(PROMPT);
            q->known = i == 7 ? 9 : random_below(2) ? 1 + random_below(VOCAB) : 0;
            q->at.position += q->n_before;
        }
        used += i < *t->n_live ? q->n_before : 0;
    }
    t->n_before = used + random_below(30);
    t->before = take_ints(t->n_before + 1);
    for (int32_t i = 0; i < t->n_before; i++) t->before[i] = random_below(VOCAB);
    for (int32_t i = 0; i < t->n; i++) {
        row += t->seqs[i].n_before;
        for (int32_t k = 0; k <= t->n_drafts; k++)
            t->logit_row[i * (1 + t->n_drafts) + k] = row++;
    }
}

static int32_t *cut(int32_t **at, int32_t n) {
    int32_t *p = *at;
    *at += n;
    return p;
}

static void run_prepare_step(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                             int32_t n, void *const *out) {
    const step_case *t = c->args;
    const int32_t logits = t->n * (1 + t->n_drafts), rows = logits + t->n_before;
    const int32_t seqs = t->n + (t->n_before > 0);
    int32_t *at = out[0];
    (void)first;
    (void)n;
    memcpy(out[1], t->cursor, SLOTS * sizeof *t->cursor);
    memset(out[2], 0, 2 * sizeof(int32_t) * STRIDE * (size_t)seqs);
    memset(at, 0, sizeof(int32_t) * (size_t)rows); /* the next tokens, which few rows have */
    hd_prepare_step_args a = {
        .cursor = out[1],
        .seqs = t->seqs,
        .n_live = t->n_live,
        .params = t->params,
        .before = t->before,
        .n_before = t->n_before,
        .table = {out[2], (int32_t *)out[2] + STRIDE * seqs},
        .scratch_page = {77,     88                               },
        .n = t->n,
        .n_drafts = t->n_drafts,
        .table_stride = STRIDE,
        .idle_slot = SLOTS,
        .forced = hd_acceptance_of(t->forced)
    };
    int32_t **const of_rows[] = {&a.next_token, &a.token, &a.pos, &a.seq, &a.phase};
    int32_t **const of_logits[] = {&a.logit_row, &a.slot,      &a.position,
                                   &a.input,     &a.n_drafted, &a.given};
    for (size_t i = 0; i < HD_LEN(of_rows); i++) *of_rows[i] = cut(&at, rows);
    for (size_t i = 0; i < HD_LEN(of_logits); i++) *of_logits[i] = cut(&at, logits);
    a.first_row = cut(&at, seqs + 1);
    a.verifiable = cut(&at, t->n);
    a.parity = cut(&at, 1);
    *a.parity = t->n_drafts % 2;
    ops->prepare_step(s, &a);
}

static const int32_t depths[] = {0, 1, 3, MAX_D};

void op_prepare_step(void **state) {
    (void)state;
    static const float means[] = {0.0f, 0.4f, 2.7f, 8.0f};
    const size_t n_cases = HD_LEN(depths) * HD_LEN(means);
    for (size_t i = 0; i < 2 * n_cases; i++) {
        const int32_t depth = depths[i % HD_LEN(depths)];
        step_case t;
        make_case(&t, i ? SEQS : 1, depth, means[i % n_cases / HD_LEN(depths)]);
        if (i >= n_cases) add_prompts(&t);
        const int32_t logits = t.n * (1 + depth), seqs = t.n + (t.n_before > 0);
        check_op(&(op_case){
            .name = "prepare_step",
            .rows = 1,
            .n_outs = 3,
            .width = {5 * (logits + t.n_before) + 6 * logits + seqs + t.n + 2,
                      SLOTS * (int32_t)(sizeof(hd_cursor) / sizeof(int32_t)),
                      2 * STRIDE * seqs},
            .all_rows = true,
            .not_recorded = true,
            .args = &t,
            .run = run_prepare_step
        });
    }
}

static void run_commit_step(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                            int32_t n, void *const *out) {
    const step_case *t = c->args;
    int32_t *at = out[0];
    (void)first;
    (void)n;
    memcpy(out[1], t->cursor, SLOTS * sizeof *t->cursor);
    memcpy(out[2], t->counts, (size_t)SLOTS * VOCAB * sizeof *t->counts);
    hd_commit_step_args a = {.cursor = out[1],
                             .counts = out[2],
                             .seqs = t->seqs,
                             .verifiable = t->verifiable,
                             .token = t->token,
                             .input = t->input,
                             .logit_row = t->logit_row,
                             .params = t->params,
                             .n = t->n,
                             .n_drafts = t->n_drafts,
                             .vocab = VOCAB};
    const int32_t rows = t->n * (1 + t->n_drafts) + t->n_before;
    memset(at, 0, sizeof(int32_t) * (size_t)rows); /* rows before have theirs already */
    a.next_token = cut(&at, rows);
    a.accepted = cut(&at, t->n);
    a.wanted = cut(&at, t->n);
    ops->commit_step(s, &a);
}

void op_commit_step(void **state) {
    (void)state;
    for (size_t i = 0; i < 3 * HD_LEN(depths); i++) {
        const int32_t depth = depths[i / 3];
        step_case t;
        make_case(&t, i ? SEQS : 1, depth, 0.0f);
        if (i % 3 == 2) add_prompts(&t);
        check_op(&(op_case){
            .name = "commit_step",
            .rows = 1,
            .n_outs = 3,
            .width = {t.n * (1 + depth) + t.n_before + 2 * t.n,
                      SLOTS * (int32_t)(sizeof(hd_cursor) / sizeof(int32_t)),
                      SLOTS * VOCAB / 2},
            .all_rows = true,
            .not_recorded = true,
            .args = &t,
            .run = run_commit_step
        });
    }
}

static void run_prepare_draft(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                              int32_t n, void *const *out) {
    const step_case *t = c->args;
    int32_t *at = out[0];
    (void)first;
    (void)n;
    memcpy(out[1], t->cursor, SLOTS * sizeof *t->cursor);
    memset(out[2], 0, (size_t)(t->n * t->n_drafts) * sizeof(int32_t));
    hd_prepare_draft_args a = {.draft = out[2],
                               .cursor = out[1],
                               .seqs = t->seqs,
                               .verifiable = t->verifiable,
                               .guess = t->guess,
                               .n = t->n,
                               .n_drafts = t->n_drafts,
                               .at = t->at};
    int32_t **const lists[] = {&a.token, &a.next_token, &a.pos, &a.seq, &a.logit_row, &a.phase};
    for (size_t i = 0; i < HD_LEN(lists); i++) *lists[i] = cut(&at, t->n);
    a.first_row = cut(&at, t->n + 1);
    ops->prepare_draft(s, &a);
}

void op_prepare_draft(void **state) {
    (void)state;
    for (int32_t k = 0; k < MAX_D; k++) {
        step_case t;
        make_case(&t, k ? SEQS : 1, MAX_D, 0.0f);
        t.at = k;
        check_op(&(op_case){
            .name = "prepare_draft",
            .rows = 1,
            .n_outs = 3,
            .width = {7 * t.n + 1, SLOTS * (int32_t)(sizeof(hd_cursor) / sizeof(int32_t)),
                      t.n * MAX_D},
            .all_rows = true,
            .not_recorded = true,
            .args = &t,
            .run = run_prepare_draft
        });
    }
}

static void run_prepare_block(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                              int32_t n, void *const *out) {
    const step_case *t = c->args;
    int32_t *at = out[0];
    (void)first;
    (void)n;
    hd_prepare_block_args a = {.cursor = t->cursor,
                               .seqs = t->seqs,
                               .verifiable = t->verifiable,
                               .n = t->n,
                               .block = t->at,
                               .filler = 77};
    int32_t **const lists[] = {&a.token, &a.pos, &a.last, &a.seq, &a.logit_row, &a.phase};
    for (size_t i = 0; i < HD_LEN(lists); i++) *lists[i] = cut(&at, t->n * t->at);
    a.first_row = cut(&at, t->n + 1);
    a.guess = cut(&at, t->n);
    ops->prepare_block(s, &a);
}

void op_prepare_block(void **state) {
    (void)state;
    for (int32_t block = 1; block <= HD_MAX_DRAFTS; block += 2) {
        step_case t;
        make_case(&t, block > 1 ? SEQS : 1, MAX_D, 0.0f);
        t.at = block;
        check_op(&(op_case){.name = "prepare_block",
                            .rows = 1,
                            .n_outs = 1,
                            .width = {6 * t.n * block + 2 * t.n + 1},
                            .all_rows = true,
                            .not_recorded = true,
                            .args = &t,
                            .run = run_prepare_block});
    }
}

typedef struct carry_case {
    const float *from;
    int32_t *parity, *bytes;
    int32_t most;
} carry_case;

static void run_carry(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    const carry_case *t = c->args;
    (void)first;
    (void)n;
    memset(out[0], 0, (size_t)t->most);
    memset(out[1], 0, (size_t)t->most);
    ops->mirror(s, &(hd_mirror_args){
                       .to = {out[0],  out[1]     },
                       .from = {t->from, t->from + 4},
                       .parity = t->parity,
                       .bytes = t->bytes,
                       .most = t->most
    });
}

void op_mirror(void **state) {
    (void)state;
    static const int32_t sizes[] = {4, 16, 76, 4096, 70004};
    for (size_t i = 0; i < 4 * HD_LEN(sizes); i++) {
        const int32_t most = sizes[i / 4];
        carry_case t = {.from = take_random(most / 4 + 4, 9.0f), .most = most};
        t.parity = take_ints(1);
        *t.parity = i % 2;
        if (i % 4 > 1) {
            t.bytes = take_ints(1);
            *t.bytes = most - 4 * random_below(most / 4 + 1);
        }
        check_op(&(op_case){
            .name = "mirror",
            .rows = 1,
            .n_outs = 2,
            .width = {most / 4, most / 4},
            .all_rows = true,
            .args = &t,
            .run = run_carry
        });
    }
}

/* Clocks differ, but advance. */
void op_timestamp(void **state) {
    (void)state;
    int64_t *at = take(2 * sizeof *at);
    for (int32_t i = 0; i < fix.n_tables; i++) {
        hd_stream *s = stream_for(&fix.table[i], fix.stream[0]);
        memset(at, 0, 2 * sizeof *at);
        fix.table[i].timestamp(s, &(hd_timestamp_args){&at[0]});
        fix.table[i].timestamp(s, &(hd_timestamp_args){&at[1]});
        finish("timestamp", s);
        assert_true(at[0] > 0 && at[1] >= at[0]);
    }
}
