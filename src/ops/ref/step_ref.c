/* step_ref.c - reference operators of decode graph steps: cursors to rows, and verification. */
#include <string.h>

#include "base/philox.h"
#include "base/progress.h"
#include "ops/ref/ref_internal.h"

enum { DRAW_FORCED = 2 }; /* high counter word; the draws of tokens have 1 */

/* ---- before the forward pass ---- */

/* Returns how many of n drafts a benchmark accepts (forced acceptance). */
static int32_t forced(const hd_acceptance *p, uint64_t seed, int32_t position, int32_t n) {
    const float luck = hd_philox_unit(hd_philox_at(seed, DRAW_FORCED, (uint64_t)position).v[0]);
    int32_t verifiable = 0;
    while (verifiable < n && luck < p->least[verifiable]) verifiable++;
    return verifiable;
}

/* Returns how many drafts of sequence i may be accepted, and where it begins; -1: padding. */
static int32_t begin(const hd_prepare_step_args *a, int32_t i, hd_cursor *from) {
    const hd_step_seq *q = &a->seqs[i];
    memset(from, 0, sizeof *from);
    if (i >= *a->n_live) return -1;
    const hd_cursor *at = q->fresh ? &q->at : &a->cursor[q->slot];
    if (!q->fresh && at->position + 2 * a->n_drafts >= q->capacity) return -1;
    *from = *at;
    if (q->fresh) a->cursor[q->slot] = *at;
    if (a->forced.least[0] <= 0.0f) return q->n_drafts;
    return forced(&a->forced, a->params[q->slot].seed, at->position + 1, q->n_drafts);
}

static void prepare_row(const hd_prepare_step_args *a, int32_t i, int32_t k, int32_t row,
                        const hd_cursor *from) {
    const int32_t verifiable = a->verifiable[i], at = i * (1 + a->n_drafts) + k;
    const hd_step_seq *q = &a->seqs[i];
    const bool of_prompt = verifiable >= 0 && (q->n_before > 0 || q->known > 0);
    const int32_t phase = of_prompt        ? HD_ROW_PREFILL
                          : verifiable > 0 ? HD_ROW_VERIFY
                                           : HD_ROW_DECODE;
    a->token[row] = a->input[at] = k ? from->draft[k - 1] : from->token;
    a->pos[row] = from->position + k;
    a->seq[row] = i;
    a->phase[row] = k > verifiable ? HD_ROW_PADDING : phase;
    a->logit_row[at] = row;
    a->slot[at] = verifiable < 0 ? a->idle_slot : q->slot;
    a->position[at] = from->position + k + 1;
    a->n_drafted[at] = k;
    a->given[at] = a->forced.least[0] > 0.0f && k < verifiable ? from->draft[k] : -1;
    if (of_prompt && k == 0 && q->known) a->given[at] = q->known - 1;
}

/* Rows of a prompt before the one that may sample, or of the padding sequence. */
static void prepare_before(const hd_prepare_step_args *a, int32_t i, int32_t row, int32_t n,
                           const int32_t *tokens, const hd_cursor *to) {
    for (int32_t k = 0; k < n; k++) {
        a->token[row + k] = tokens ? tokens[k] : 0;
        a->next_token[row + k] = !tokens ? 0 : k + 1 < n ? tokens[k + 1] : to->token;
        a->pos[row + k] = tokens ? to->position - n + k : k;
        a->seq[row + k] = i;
        a->phase[row + k] = tokens ? HD_ROW_PREFILL : HD_ROW_PADDING;
    }
}

static void write_scratch_pages(const hd_prepare_step_args *a, int32_t i) {
    for (int group = 0; group < 2; group++) {
        int32_t *table = a->table[group] + (int64_t)i * a->table_stride;
        for (int32_t p = 0; p < a->table_stride; p++) table[p] = a->scratch_page[group];
    }
}

void hd_prepare_step_ref(hd_stream *s, const hd_prepare_step_args *a) {
    (void)s;
    int32_t row = 0, used = 0;
    for (int32_t i = 0; i < a->n; i++) {
        hd_cursor from;
        const int32_t before = i < *a->n_live ? a->seqs[i].n_before : 0;
        a->verifiable[i] = begin(a, i, &from);
        a->first_row[i] = row;
        prepare_before(a, i, row, before, a->before + used, &from);
        used += before;
        row += before;
        for (int32_t k = 0; k <= a->n_drafts; k++) prepare_row(a, i, k, row++, &from);
        if (a->verifiable[i] < 0) write_scratch_pages(a, i);
    }
    a->first_row[a->n] = row;
    *a->parity = !*a->parity;
    if (a->n_before == 0) return;
    prepare_before(a, a->n, row, a->n_before - used, NULL, NULL);
    a->first_row[a->n + 1] = row + a->n_before - used;
    write_scratch_pages(a, a->n);
}

/* ---- after the forward pass ---- */

static void count(const hd_commit_step_args *a, int32_t slot, const int32_t *token, int32_t n) {
    uint16_t *counts = a->counts + (int64_t)a->params[slot].counts_row * a->vocab;
    for (int32_t k = 0; k < n; k++) {
        if (token[k] < 0) continue;
        if ((counts[token[k]] & HD_COUNT_OUTPUT) < HD_COUNT_OUTPUT) counts[token[k]]++;
    }
}

/* A failed row has no token; 0 replaces it. */
static int32_t token_or_zero(int32_t token) {
    return token < 0 ? 0 : token;
}

static void verify_and_commit(const hd_commit_step_args *a, int32_t i) {
    const int32_t first = i * (1 + a->n_drafts), slot = a->seqs[i].slot;
    const int32_t *token = a->token + first, *input = a->input + first;
    const int32_t *row = a->logit_row + first;
    int32_t n_accepted = 0;
    while (n_accepted < a->verifiable[i] && token[n_accepted] == input[n_accepted + 1])
        n_accepted++;
    a->accepted[i] = a->verifiable[i] < 0 ? -1 : n_accepted;
    a->wanted[i] = row[n_accepted];
    for (int32_t k = 0; k <= a->n_drafts; k++) {
        a->next_token[row[k]] = k <= n_accepted ? token_or_zero(token[k]) : 0;
    }
    if (a->verifiable[i] < 0) return;
    a->cursor[slot].position += n_accepted + 1;
    a->cursor[slot].token = token_or_zero(token[n_accepted]);
    if (a->seqs[i].known) return;
    if (hd_has_penalty(&a->params[slot])) count(a, slot, token, n_accepted + 1);
}

void hd_commit_step_ref(hd_stream *s, const hd_commit_step_args *a) {
    (void)s;
    for (int32_t i = 0; i < a->n; i++) verify_and_commit(a, i);
}

void hd_prepare_draft_ref(hd_stream *s, const hd_prepare_draft_args *a) {
    (void)s;
    for (int32_t i = 0; i < a->n; i++) {
        static const hd_cursor is_padding;
        hd_cursor *c = &a->cursor[a->seqs[i].slot];
        const bool live = a->verifiable[i] >= 0;
        const hd_cursor *from = live ? c : &is_padding;
        a->draft[i * a->n_drafts + a->at] = a->guess[i];
        if (live) c->draft[a->at] = a->guess[i];
        a->token[i] = a->at ? from->draft[a->at - 1] : from->token;
        a->next_token[i] = a->guess[i];
        a->pos[i] = from->position + a->at;
        a->phase[i] = live && a->at + 1 < a->seqs[i].n_wanted ? HD_ROW_DECODE : HD_ROW_PADDING;
        a->seq[i] = a->logit_row[i] = a->first_row[i] = i;
    }
    a->first_row[a->n] = a->n;
}

void hd_prepare_block_ref(hd_stream *s, const hd_prepare_block_args *a) {
    (void)s;
    for (int32_t i = 0; i < a->n; i++) {
        static const hd_cursor is_padding;
        const bool live = a->verifiable[i] >= 0;
        const hd_cursor *from = live ? &a->cursor[a->seqs[i].slot] : &is_padding;
        a->guess[i] = from->token;
        a->first_row[i] = i * a->block;
        for (int32_t k = 0; k < a->block; k++) {
            const int32_t row = i * a->block + k;
            a->token[row] = k ? a->filler : from->token;
            a->pos[row] = from->position + k;
            a->last[row] = from->position + a->block - 1;
            a->phase[row] = live && a->seqs[i].n_wanted > 0 ? HD_ROW_DECODE : HD_ROW_PADDING;
            a->seq[row] = i;
            a->logit_row[k * a->n + i] = row;
        }
    }
    a->first_row[a->n] = a->n * a->block;
}

void hd_mirror_ref(hd_stream *s, const hd_mirror_args *a) {
    (void)s;
    const int32_t parity = *a->parity, bytes = a->bytes ? *a->bytes : a->most;
    if (bytes > 0) memcpy(a->to[parity], a->from[parity], (size_t)bytes);
}

void hd_timestamp_ref(hd_stream *s, const hd_timestamp_args *a) {
    (void)s;
    *a->at = hd_now_ns();
}
