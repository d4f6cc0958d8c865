/* null_runner.c - tokens and drafts drawn by Philox; see null_runner.h. */
#include "runner/null_runner.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "base/checked.h"
#include "base/philox.h"

enum { TOKEN_STREAM, DRAFT_STREAM }; /* high counter words of the Philox draws */

struct hd_null_runner {
    int32_t *ids; /* [n_ids] printable tokens */
    uint32_t n_ids;
    float logprob;
    int32_t max_drafts, step_us;
    uint64_t *seeds; /* [n_slots] */
};

static bool is_printable(const hd_tokenizer *t, int32_t id) {
    size_t n;
    const uint8_t *piece = hd_tokenizer_piece(t, id, &n);
    if (n == 0 || hd_tokenizer_is_added(t, id)) return false;
    for (size_t i = 0; i < n; i++) {
        if (piece[i] < ' ' || piece[i] > '~') return false;
    }
    return true;
}

hd_status hd_null_runner_open(hd_null_runner **out, const hd_null_runner_options *o,
                              hd_err *err) {
    *out = NULL;
    hd_null_runner *n = calloc(1, sizeof *n);
    if (n) n->ids = calloc((size_t)o->n_ids + 1, sizeof *n->ids);
    if (n) n->seeds = calloc((size_t)o->n_slots, sizeof *n->seeds);
    if (!n || !n->ids || !n->seeds) {
        hd_null_runner_close(n);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a null device");
    }
    for (int32_t id = 0; id < o->n_ids; id++) {
        if (!o->tokenizer || is_printable(o->tokenizer, id)) n->ids[n->n_ids++] = id;
    }
    if (n->n_ids == 0) {
        hd_null_runner_close(n);
        return HD_FAIL(err, HD_EINVAL, "the tokenizer has no printable token");
    }
    n->logprob = -logf((float)n->n_ids);
    n->max_drafts = o->max_drafts;
    n->step_us = o->step_us;
    *out = n;
    return HD_OK;
}

void hd_null_runner_close(hd_null_runner *n) {
    if (!n) return;
    free(n->ids);
    free(n->seeds);
    free(n);
}

void hd_null_runner_enter(hd_null_runner *n, int32_t slot, uint64_t seed) {
    n->seeds[slot] = seed;
}

static uint32_t random_at(uint64_t seed, int stream, int32_t position) {
    return hd_philox_at(seed, (uint64_t)stream, (uint64_t)position).v[0];
}

static int32_t token_at(const hd_null_runner *n, uint64_t seed, int32_t position) {
    return n->ids[random_at(seed, TOKEN_STREAM, position) % n->n_ids];
}

static int32_t draft_at(const hd_null_runner *n, uint64_t seed, int32_t position) {
    const bool right = random_at(seed, DRAFT_STREAM, position) % 4 != 0;
    return token_at(n, seed, right ? position : position + 1);
}

static void choose(const hd_null_runner *n, const hd_seq_input *w, hd_seq_output *c) {
    const uint64_t seed = n->seeds[w->slot];
    *c = (hd_seq_output){.status = HD_OK};
    for (int32_t i = w->n - w->n_sample; i < w->n; i++) {
        const int32_t token = token_at(n, seed, w->start + i + 1);
        c->step.logprobs[c->step.n_tokens] = n->logprob;
        c->step.tokens[c->step.n_tokens++] = token;
        if (i + 1 == w->n || w->tokens[i + 1] != token) break;
    }
    if (!w->n_sample) return;
    const int32_t last = w->start + w->n - w->n_sample + c->step.n_tokens;
    const int32_t drafts = hd_min_i32(w->want_drafts, n->max_drafts);
    while (c->n_drafts < drafts) {
        c->n_drafts++;
        c->drafts[c->n_drafts - 1] = draft_at(n, seed, last + c->n_drafts);
    }
}

static hd_status run(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                     const hd_seq_input *inputs, int32_t n_inputs, hd_seq_output *outputs,
                     hd_err *err) {
    (void)copies;
    (void)n_copies;
    (void)err;
    const hd_null_runner *n = ctx;
    const struct timespec step = {n->step_us / 1000000, n->step_us % 1000000 * 1000L};
    if (n->step_us) nanosleep(&step, NULL);
    for (int32_t i = 0; i < n_inputs; i++) choose(n, &inputs[i], &outputs[i]);
    return HD_OK;
}

hd_runner hd_null_runner_interface(hd_null_runner *n) {
    return (hd_runner){.ctx = n, .run = run};
}
