/* draft_mtp.c - the drafter of models with an MTP layer (multi-token prediction).
 *
 * The MTP layer runs once over all rows of the step, which keeps its KV entries complete and
 * makes the first draft. It then runs over one row per sequence for each further draft. */
#include "base/checked.h"
#include "runner/model_runner_internal.h"

/* Fills the chain batch: one row per sequence that wants a further draft, one position on. */
static void fill_chain(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                       const hd_seq_output *outputs) {
    hd_batch_reset(&x->chain);
    for (int32_t k = 0; k < n; k++) {
        const hd_seq_input *w = &inputs[x->drafting[k]];
        const hd_seq_output *c = &outputs[x->drafting[k]];
        const int32_t before =
            c->n_drafts > 1 ? c->drafts[c->n_drafts - 2] : c->step.tokens[c->step.n_tokens - 1];
        hd_batch_add(&x->chain, &(hd_batch_seq){
                                    .tokens = &before,
                                    .n = 1,
                                    .start = w->start + w->n - w->n_sample + c->step.n_tokens -
                                             1 + c->n_drafts,
                                    .after = c->drafts[c->n_drafts - 1],
                                    .n_logits = 1,
                                    .phase = HD_ROW_DECODE,
                                    .pages = {w->pages[0], w->pages[1]},
                                    .n_pages = w->n_pages
        });
    }
}

static hd_status propose(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                         const hd_seq_output *outputs, int32_t place, hd_draft_logits *out,
                         hd_err *err) {
    if (place) fill_chain(x, inputs, n, outputs);
    *out = (hd_draft_logits){.logits = hd_model_logits(x->model)};
    return runner_forward(x, place ? RUNNER_DRAFT_AGAIN : RUNNER_DRAFT, err);
}

static hd_draft_logits queue(hd_model_runner *x, const runner_graph_inputs *o,
                             const runner_graph_shape *z, int32_t place) {
    hd_batch rows = place ? runner_graph_chain(x, o, z) : runner_graph_rows(x, o, z);
    if (!place) {
        rows.n_logits = z->n_drafts ? z->n : 0;
        rows.device.logit_rows = x->fixed.graph_state.wanted;
    }
    hd_model_draft(x->model, x->kv, &rows, place > 0);
    return (hd_draft_logits){.logits = hd_model_logits(x->model)};
}

static void pass(hd_model_runner *x, hd_batch *batch, bool again) {
    hd_model_draft(x->model, x->kv, batch, again);
}

const runner_drafter runner_drafter_mtp = {.propose = propose, .pass = pass, .queue = queue};
