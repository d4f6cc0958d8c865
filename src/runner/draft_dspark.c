/* draft_dspark.c - the drafter of models with DSpark stages: a block of drafts in one pass.
 *
 * Every step leaves the stages' KV entries of its rows. A block of rows per sequence then
 * gives the logits of all drafts but for what depends on the token before; the Markov head
 * adds that place by place. */
#include "base/checked.h"
#include "runner/model_runner_internal.h"

/* Fills the chain batch: the last token of every sequence, then filler tokens. */
static void fill_blocks(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                        const hd_seq_output *outputs) {
    const hd_dspark_spec *d = &x->env.spec->dspark;
    int32_t tokens[HD_MAX_DRAFTS];
    for (int32_t k = 1; k < d->block; k++) tokens[k] = d->filler;
    hd_batch_reset(&x->chain);
    for (int32_t k = 0; k < n; k++) {
        const hd_seq_input *w = &inputs[x->drafting[k]];
        const hd_step_tokens *step = &outputs[x->drafting[k]].step;
        tokens[0] = step->tokens[step->n_tokens - 1];
        hd_batch_add(&x->chain, &(hd_batch_seq){
                                    .tokens = tokens,
                                    .n = d->block,
                                    .start = w->start + w->n - w->n_sample + step->n_tokens,
                                    .after = -1,
                                    .phase = HD_ROW_DECODE,
                                    .pages = {w->pages[0], w->pages[1]},
                                    .n_pages = w->n_pages
        });
    }
    hd_batch_make_block(&x->chain, d->block);
}

/* Uploads the token before the draft of every sequence. */
static void upload_before(hd_model_runner *x, int32_t n, const hd_seq_output *outputs) {
    for (int32_t k = 0; k < n; k++) {
        const hd_seq_output *c = &outputs[x->drafting[k]];
        x->host.before[k] =
            c->n_drafts ? c->drafts[c->n_drafts - 1] : c->step.tokens[c->step.n_tokens - 1];
    }
    hd_stream_upload(x->env.stream, x->device.before, x->host.before,
                     (size_t)n * sizeof *x->host.before);
}

static hd_status propose(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                         const hd_seq_output *outputs, int32_t place, hd_draft_logits *out,
                         hd_err *err) {
    *out = (hd_draft_logits){0};
    if (place == 0) {
        HD_TRY(runner_forward(x, RUNNER_DRAFT, err));
        if (x->draft_places == 0) return HD_OK;
        fill_blocks(x, inputs, n, outputs);
        HD_TRY(runner_forward(x, RUNNER_DRAFT_AGAIN, err));
    }
    if (n == 0) return HD_OK;
    upload_before(x, n, outputs);
    *out = hd_model_draft_place(x->model, place, x->device.before, n, x->chain.n_seqs);
    return HD_OK;
}

/* Returns the batch of the blocks of a graph step. */
static hd_batch graph_blocks(const hd_model_runner *x, const runner_graph_inputs *o,
                             const runner_graph_shape *z) {
    const runner_graph_state *b = &x->fixed.graph_state;
    const int32_t block = x->env.spec->dspark.block;
    hd_batch rows = {
        .limits = {.table_stride = x->fixed.table_stride},
        .n_rows = z->n * block,
        .n_seqs = z->n,
        .n_logits = z->n * block,
        .most_rows = block,
        .block = block,
        .device = { .tokens = b->block_token,
                   .pos = b->block_pos,
                   .last = b->block_last,
                   .seq = b->block_seq,
                   .logit_rows = b->block_logit_row,
                   .first_row = b->block_first_row,
                   .tables = {o->tables[0], o->tables[1]},
                   .phase = b->block_phase}
    };
    rows.n_micro = hd_model_n_micro(x->model, &rows);
    return rows;
}

static void queue_blocks(hd_model_runner *x, const runner_graph_inputs *o,
                         const runner_graph_shape *z) {
    const runner_graph_state *b = &x->fixed.graph_state;
    hd_batch rows = graph_blocks(x, o, z);
    x->env.ops->prepare_block(x->env.stream,
                              &(hd_prepare_block_args){.token = b->block_token,
                                                       .pos = b->block_pos,
                                                       .last = b->block_last,
                                                       .seq = b->block_seq,
                                                       .logit_row = b->block_logit_row,
                                                       .phase = b->block_phase,
                                                       .first_row = b->block_first_row,
                                                       .guess = b->guess,
                                                       .cursor = b->cursor,
                                                       .seqs = o->seqs,
                                                       .verifiable = b->verifiable,
                                                       .n = z->n,
                                                       .block = rows.block,
                                                       .filler = x->env.spec->dspark.filler});
    hd_model_draft_block(x->model, x->kv, &rows);
}

static hd_draft_logits queue(hd_model_runner *x, const runner_graph_inputs *o,
                             const runner_graph_shape *z, int32_t place) {
    if (place == 0) {
        const hd_batch rows = runner_graph_rows(x, o, z);
        hd_model_absorb(x->model, x->kv, &rows);
        if (z->n_drafts == 0) return (hd_draft_logits){0};
        queue_blocks(x, o, z);
    }
    return hd_model_draft_place(x->model, place, x->fixed.graph_state.guess, z->n, z->n);
}

/* Keys of the step's rows, then the blocks of the chain batch. */
static void pass(hd_model_runner *x, hd_batch *batch, bool again) {
    if (again) {
        hd_model_draft_block(x->model, x->kv, batch);
    } else {
        hd_model_absorb(x->model, x->kv, batch);
    }
}

const runner_drafter runner_drafter_dspark = {.propose = propose, .pass = pass, .queue = queue};
