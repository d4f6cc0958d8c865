/* decode_graph.c - a decode step of a fixed shape: memory, operators, capture, launch,
 * output.
 *
 * queue_step() reads nothing of a step but its shape, so its operators can be captured as a
 * CUDA graph and launched again: forward pass, sampling, verification and all drafts.
 * docs/graphs.md lists the shapes and explains why padding rows are harmless. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/progress.h"
#include "runner/model_runner_internal.h"

enum {
    SIZES_PER_OCTAVE = 8, /* at most an eighth of a step is padding */
    /* launch of a shape at which it is captured: a capture takes as long as several eager
     * steps */
    FIRST_CAPTURE = 4,
    LEAST_BEFORE = 16, /* rows of prompts of a shape that has some */
    MIRROR_ALIGN = 16
};

/* ---- memory layout ---- */

static void *take(hd_arena *a, int64_t n, size_t element) {
    return hd_arena_take(a, (size_t)n * element, 64);
}

static int32_t *ints(hd_arena *a, int64_t n) {
    return take(a, n, sizeof(int32_t));
}

static hd_arena over(void *block) {
    return block ? hd_arena_over(block, SIZE_MAX / 2) : hd_arena_measure();
}

static runner_graph_inputs graph_inputs_in(const hd_model_runner *x, void *block,
                                           const runner_graph_shape *z) {
    hd_arena a = over(block);
    runner_graph_inputs o;
    o.n_live = ints(&a, 1);
    o.inflight = ints(&a, 1);
    o.graph_outputs_bytes = ints(&a, 1);
    o.choices_bytes = ints(&a, 1);
    o.seqs = take(&a, z->n, sizeof *o.seqs);
    o.mask_row = ints(&a, runner_shape_logits(z));
    o.before = ints(&a, z->n_before);
    for (int group = 0; group < HD_N_KV_GROUPS; group++) {
        o.tables[group] = ints(&a, (int64_t)runner_shape_seqs(z) * x->fixed.table_stride);
    }
    o.bytes = a.used;
    return o;
}

static runner_graph_outputs graph_outputs_in(const hd_model_runner *x, void *block,
                                             const runner_graph_shape *z) {
    hd_arena a = over(block);
    runner_graph_outputs o;
    const int64_t rows = runner_shape_logits(z);
    o.begun = take(&a, 1, sizeof *o.begun);
    o.ended = take(&a, 1, sizeof *o.ended);
    o.token = ints(&a, rows);
    o.logprob = take(&a, rows, sizeof *o.logprob);
    o.accepted = ints(&a, z->n);
    o.draft = ints(&a, (int64_t)z->n * z->n_drafts);
    o.top_at = a.used;
    o.top_id = ints(&a, rows * x->o.top_stride);
    o.top_logprob = take(&a, rows * x->o.top_stride, sizeof *o.top_logprob);
    o.bytes = a.used;
    return o;
}

static runner_graph_state graph_state_in(const hd_model_runner *x, void *block,
                                         const runner_graph_shape *z) {
    hd_arena a = over(block);
    runner_graph_state b = {0};
    int32_t **const of_rows[] = {&b.token, &b.next_token, &b.pos, &b.seq, &b.phase};
    int32_t **const of_logits[] = {&b.logit_row, &b.slot,      &b.position,
                                   &b.input,     &b.n_drafted, &b.given};
    int32_t **const of_seqs[] = {
        &b.verifiable, &b.wanted,    &b.guess,           &b.chain_token,     &b.chain_next,
        &b.chain_pos,  &b.chain_seq, &b.chain_logit_row, &b.chain_first_row, &b.chain_phase};
    b.parity = ints(&a, 1);
    b.cursor = take(&a, x->o.n_slots, sizeof *b.cursor);
    for (size_t i = 0; i < HD_LEN(of_rows); i++) {
        *of_rows[i] = ints(&a, runner_shape_rows(z));
    }
    for (size_t i = 0; i < HD_LEN(of_logits); i++) {
        *of_logits[i] = ints(&a, runner_shape_logits(z));
    }
    b.first_row = ints(&a, (int64_t)runner_shape_seqs(z) + 1);
    for (size_t i = 0; i < HD_LEN(of_seqs); i++) *of_seqs[i] = ints(&a, (int64_t)z->n + 1);
    int32_t **const of_blocks[] = {&b.block_token, &b.block_pos,       &b.block_last,
                                   &b.block_seq,   &b.block_logit_row, &b.block_phase};
    for (size_t i = 0; i < HD_LEN(of_blocks); i++) {
        *of_blocks[i] = ints(&a, (int64_t)z->n * x->env.spec->dspark.block);
    }
    b.block_first_row = ints(&a, (int64_t)z->n + 1);
    b.bytes = a.used;
    return b;
}

/* ---- memory ---- */

static runner_graph_shape largest_shape(const hd_model_runner *x) {
    return (runner_graph_shape){x->o.n_slots, x->n_drafts, x->o.step_rows};
}

static size_t choices_bytes(const hd_model_runner *x, const runner_graph_shape *z) {
    const size_t n = (size_t)runner_n_choices(x, z) * sizeof(int32_t);
    return (n + MIRROR_ALIGN - 1) / MIRROR_ALIGN * MIRROR_ALIGN;
}

static hd_status open_inflight(hd_model_runner *x, runner_inflight_step *f,
                               size_t graph_outputs_bytes, hd_err *err) {
    const size_t n = (size_t)x->o.n_slots;
    f->index = calloc(n, sizeof *f->index);
    f->capacity = calloc(n, sizeof *f->capacity);
    f->chunk = calloc(n, sizeof *f->chunk);
    if (!f->index || !f->capacity || !f->chunk)
        return HD_FAIL(err, HD_ENOMEM, "no memory for a step");
    HD_TRY(hd_device_event_open(&f->done, x->env.device, false, err));
    const runner_graph_shape most = largest_shape(x);
    void *choices;
    HD_TRY(hd_device_alloc_host(x->env.device, &choices, choices_bytes(x, &most) + MIRROR_ALIGN,
                                "choices of experts", err));
    f->choices = choices;
    return hd_device_alloc_host(x->env.device, &f->graph_outputs, graph_outputs_bytes,
                                "a step's outputs", err);
}

/* Batch sizes: every number up to twice SIZES_PER_OCTAVE, then as many per doubling, and the
 * largest. */
static void choose_sizes(runner_decode_graphs *f, int32_t most) {
    for (int32_t n = 1, by = 1; n < most; n += by) {
        if (n == 2 * by * SIZES_PER_OCTAVE) by *= 2;
        f->sizes[f->n_sizes++] = n;
    }
    f->sizes[f->n_sizes++] = most;
}

/* Bytes of the scratch pages, which belong to the KV pools but to no sequence. */
static size_t scratch_bytes(const hd_model_runner *x) {
    const int32_t n_layers = x->env.spec->n_layers + hd_weights_n_mtp(x->env.weights);
    size_t bytes = 0;
    for (int group = 0; group < HD_N_KV_GROUPS; group++) {
        bytes += hd_kv_page_bytes(x->env.spec, n_layers, (hd_kv_group)group,
                                  x->env.ops->kv_type, x->n_drafts);
    }
    return bytes;
}

hd_status runner_decode_graph_open(hd_model_runner *x, hd_err *err) {
    runner_decode_graphs *f = &x->fixed;
    hd_device *d = x->env.device;
    const size_t n = (size_t)x->o.n_slots;
    const runner_graph_shape most = largest_shape(x);
    f->page_tokens = hd_kv_shape_of(x->env.spec).page_tokens;
    f->table_stride = x->o.seq_pages + (int32_t)hd_ceil_div(RUNNER_LOOKAHEAD, f->page_tokens);
    const size_t graph_inputs = graph_inputs_in(x, NULL, &most).bytes;
    const size_t graph_outputs = graph_outputs_in(x, NULL, &most).bytes;
    const size_t graph_state = graph_state_in(x, NULL, &most).bytes;
    f->on = true;
    f->next = &f->inflight[0];
    for (int group = 0; group < HD_N_KV_GROUPS; group++) {
        f->scratch_page[group] = x->o.n_pages[group];
    }
    f->bytes = 3 * graph_inputs + 3 * graph_outputs + graph_state + scratch_bytes(x) +
               2 * choices_bytes(x, &most);
    f->known = calloc(n, sizeof *f->known);
    f->sizes = calloc(n + 1, sizeof *f->sizes);
    f->eager_inputs = calloc(n, sizeof *f->eager_inputs);
    f->eager_outputs = calloc(n, sizeof *f->eager_outputs);
    f->eager_index = calloc(n, sizeof *f->eager_index);
    if (!f->known || !f->sizes || !f->eager_inputs || !f->eager_outputs || !f->eager_index) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for %zu sequences of a step", n);
    }
    choose_sizes(f, x->o.n_slots);
    f->captured = calloc((size_t)f->n_sizes * (size_t)(x->n_drafts + 1), sizeof *f->captured);
    if (!f->captured) return HD_FAIL(err, HD_ENOMEM, "no memory for %d graphs", f->n_sizes);
    HD_TRY(hd_device_alloc(d, &f->graph_inputs_device, graph_inputs, "a step's inputs", err));
    HD_TRY(
        hd_device_alloc(d, &f->graph_outputs_device, graph_outputs, "a step's outputs", err));
    HD_TRY(hd_device_alloc(d, &f->graph_state_device, graph_state, "a step's rows", err));
    f->graph_state = graph_state_in(x, f->graph_state_device, &most);
    for (size_t i = 0; i < HD_LEN(f->inflight); i++) {
        HD_TRY(hd_device_alloc_host(d, &f->graph_inputs_host[i], graph_inputs,
                                    "a step's inputs", err));
        HD_TRY(open_inflight(x, &f->inflight[i], graph_outputs, err));
    }
    for (int32_t s = 0; s < x->o.n_slots; s++) runner_forget_slot(x, s);
    if (!hd_device_has_graphs(d)) return HD_OK;
    void *stamps;
    HD_TRY(hd_device_alloc_host(d, &stamps, 2 * sizeof *f->stamps, "a step's times", err));
    f->stamps = stamps;
    return HD_OK;
}

void runner_decode_graph_close(hd_model_runner *x) {
    runner_decode_graphs *f = &x->fixed;
    hd_device *d = x->env.device;
    hd_stream_wait(x->env.stream); /* the last in-flight step may not have been collected */
    for (size_t i = 0; i < HD_LEN(f->inflight); i++) {
        free(f->inflight[i].index);
        free(f->inflight[i].capacity);
        free(f->inflight[i].chunk);
        hd_device_event_close(f->inflight[i].done);
        hd_device_release(d, f->inflight[i].graph_outputs);
        hd_device_release(d, f->inflight[i].choices);
        hd_device_release(d, f->graph_inputs_host[i]);
    }
    for (int32_t i = 0; f->captured && i < f->n_sizes * (x->n_drafts + 1); i++) {
        hd_graph_close(f->captured[i].graph);
    }
    for (int32_t i = 0; i < RUNNER_CHUNK_GRAPHS; i++) {
        hd_graph_close(f->chunk_graphs[i].captured.graph);
    }
    hd_device_release(d, f->stamps);
    hd_device_release(d, f->graph_inputs_device);
    hd_device_release(d, f->graph_outputs_device);
    hd_device_release(d, f->graph_state_device);
    free(f->known);
    free(f->sizes);
    free(f->captured);
    free(f->eager_inputs);
    free(f->eager_outputs);
    free(f->eager_index);
}

/* ---- shapes ---- */

static int32_t size_index(const runner_decode_graphs *f, int32_t n) {
    int32_t i = 0;
    while (f->sizes[i] < n) i++;
    return i;
}

/* Returns the next power of two or three quarters of one. */
static int32_t rounded(int32_t n) {
    int32_t to = 1;
    while (to < n) to *= 2;
    return to >= 4 && to / 4 * 3 >= n ? to / 4 * 3 : to;
}

/* Sequences are few beside the rows of prompts, so there are fewer sizes of them than without these. The
 * largest sizes are what fits a step. */
static runner_graph_shape chunk_shape(const hd_model_runner *x, int32_t n, int32_t n_drafts,
                                      int32_t n_before) {
    runner_graph_shape z = {hd_min_i32(rounded(n), x->o.n_slots), n_drafts, 0};
    if (runner_shape_logits(&z) + n_before > x->o.step_rows) z.n = n;
    const int32_t room = hd_max_i32(x->o.step_rows - runner_shape_logits(&z), n_before);
    z.n_before = hd_min_i32(rounded(hd_max_i32(n_before, LEAST_BEFORE)), room);
    return z;
}

static const runner_chunk_graph *find_chunk_graph(const hd_model_runner *x,
                                                  const runner_graph_shape *z) {
    for (int32_t i = 0; i < RUNNER_CHUNK_GRAPHS; i++) {
        const runner_chunk_graph *g = &x->fixed.chunk_graphs[i];
        if (memcmp(&g->shape, z, sizeof *z) == 0) return g;
    }
    return NULL;
}

bool runner_decode_graph_is_short(const hd_model_runner *x, const runner_graph_shape *shape) {
    if (!shape->n_before || x->fixed.queues || !hd_device_has_graphs(x->env.device))
        return true;
    const runner_chunk_graph *g = find_chunk_graph(x, shape);
    return g && g->captured.launches + 1 >= FIRST_CAPTURE;
}

bool runner_decode_graph_shape(const hd_model_runner *x, int32_t n, int32_t n_drafts,
                               int32_t n_before, runner_graph_shape *out) {
    *out = (runner_graph_shape){x->fixed.sizes[size_index(&x->fixed, n)], n_drafts, 0};
    if (n_before) *out = chunk_shape(x, n, n_drafts, n_before);
    return n_drafts <= x->n_drafts && runner_shape_logits(out) <= x->n_rows &&
           runner_shape_rows(out) <= x->o.step_rows;
}

/* ---- operators ---- */

hd_batch runner_graph_rows(const hd_model_runner *x, const runner_graph_inputs *o,
                           const runner_graph_shape *z) {
    const runner_graph_state *b = &x->fixed.graph_state;
    hd_batch rows = {
        .limits = {.table_stride = x->fixed.table_stride},
        .n_rows = runner_shape_rows(z),
        .n_seqs = runner_shape_seqs(z),
        .n_logits = runner_shape_logits(z),
        .most_rows = z->n_before + 1 + z->n_drafts,
        .device = { .tokens = b->token,
                   .next_tokens = b->next_token,
                   .pos = b->pos,
                   .seq = b->seq,
                   .logit_rows = b->logit_row,
                   .first_row = b->first_row,
                   .tables = {o->tables[0], o->tables[1]},
                   .phase = b->phase}
    };
    rows.n_micro = hd_model_n_micro(x->model, &rows);
    return rows;
}

hd_batch runner_graph_chain(const hd_model_runner *x, const runner_graph_inputs *o,
                            const runner_graph_shape *z) {
    const runner_graph_state *b = &x->fixed.graph_state;
    hd_batch rows = {
        .limits = {.table_stride = x->fixed.table_stride},
        .n_rows = z->n,
        .n_seqs = z->n,
        .n_logits = z->n,
        .most_rows = 1,
        .device = { .tokens = b->chain_token,
                   .next_tokens = b->chain_next,
                   .pos = b->chain_pos,
                   .seq = b->chain_seq,
                   .logit_rows = b->chain_logit_row,
                   .first_row = b->chain_first_row,
                   .tables = {o->tables[0], o->tables[1]},
                   .phase = b->chain_phase}
    };
    rows.n_micro = hd_model_n_micro(x->model, &rows);
    return rows;
}

static void queue_prepare(hd_model_runner *x, const runner_graph_inputs *o,
                          const runner_graph_shape *z) {
    const runner_graph_state *b = &x->fixed.graph_state;
    x->env.ops->prepare_step(
        x->env.stream, &(hd_prepare_step_args){
                           .token = b->token,
                           .pos = b->pos,
                           .seq = b->seq,
                           .phase = b->phase,
                           .next_token = b->next_token,
                           .first_row = b->first_row,
                           .table = {o->tables[0],             o->tables[1]            },
                           .logit_row = b->logit_row,
                           .slot = b->slot,
                           .position = b->position,
                           .input = b->input,
                           .n_drafted = b->n_drafted,
                           .given = b->given,
                           .before = o->before,
                           .verifiable = b->verifiable,
                           .parity = b->parity,
                           .cursor = b->cursor,
                           .seqs = o->seqs,
                           .n_live = o->n_live,
                           .params = x->device.params,
                           .scratch_page = {x->fixed.scratch_page[0], x->fixed.scratch_page[1]},
                           .n = z->n,
                           .n_drafts = z->n_drafts,
                           .n_before = z->n_before,
                           .table_stride = x->fixed.table_stride,
                           .idle_slot = x->o.n_slots,
                           .forced = x->o.forced
    });
}

static void queue_sample(hd_model_runner *x, const runner_graph_inputs *o,
                         const runner_graph_outputs *out, const runner_graph_shape *z) {
    const runner_graph_state *b = &x->fixed.graph_state;
    x->env.ops->sample(x->env.stream, &(hd_sample_args){.token = out->token,
                                                        .logprob = out->logprob,
                                                        .top_id = out->top_id,
                                                        .top_logprob = out->top_logprob,
                                                        .logits = hd_model_logits(x->model),
                                                        .params = x->device.params,
                                                        .slot = b->slot,
                                                        .position = b->position,
                                                        .bias = x->device.bias,
                                                        .mask = x->mask.device,
                                                        .mask_row = o->mask_row,
                                                        .counts = x->counts,
                                                        .input = b->input,
                                                        .n_drafted = b->n_drafted,
                                                        .given = b->given,
                                                        .rows = runner_shape_logits(z),
                                                        .vocab = x->env.spec->vocab,
                                                        .n_ids = x->o.n_ids,
                                                        .top_stride = x->o.top_stride});
}

/* The leader of several ranks samples, and all go on from its tokens, which travel as the bits of
 * floats. */
static void queue_sampling(hd_model_runner *x, const runner_graph_inputs *o,
                           const runner_graph_outputs *out, const runner_graph_shape *z) {
    const runner_graph_state *b = &x->fixed.graph_state;
    const bool leads = x->o.role != HD_RUNNER_FOLLOWS;
    const int32_t rows = runner_shape_logits(z);
    if (leads) queue_sample(x, o, out, z);
    if (x->o.role != HD_RUNNER_ALONE) {
        hd_comm_all_gather(x->env.comm, x->env.stream,
                           &(hd_all_gather_args){.group = HD_GROUP_TP,
                                                 .x = (float *)(void *)out->token,
                                                 .rows = 1,
                                                 .cols = rows,
                                                 .own = leads ? rows : 0});
    }
    x->env.ops->commit_step(x->env.stream, &(hd_commit_step_args){.accepted = out->accepted,
                                                                  .next_token = b->next_token,
                                                                  .wanted = b->wanted,
                                                                  .cursor = b->cursor,
                                                                  .counts = x->counts,
                                                                  .seqs = o->seqs,
                                                                  .verifiable = b->verifiable,
                                                                  .token = out->token,
                                                                  .input = b->input,
                                                                  .logit_row = b->logit_row,
                                                                  .params = x->device.params,
                                                                  .n = z->n,
                                                                  .n_drafts = z->n_drafts,
                                                                  .vocab = x->env.spec->vocab});
}

static void queue_draft(hd_model_runner *x, const runner_graph_inputs *o,
                        const runner_graph_outputs *out, const runner_graph_shape *z,
                        const float *logits, int32_t at) {
    const runner_graph_state *b = &x->fixed.graph_state;
    x->env.ops->argmax(x->env.stream, &(hd_argmax_args){.token = b->guess,
                                                        .logits = logits,
                                                        .rows = z->n,
                                                        .vocab = x->env.spec->vocab,
                                                        .n_ids = x->o.n_ids});
    x->env.ops->prepare_draft(x->env.stream,
                              &(hd_prepare_draft_args){.draft = out->draft,
                                                       .token = b->chain_token,
                                                       .next_token = b->chain_next,
                                                       .pos = b->chain_pos,
                                                       .seq = b->chain_seq,
                                                       .logit_row = b->chain_logit_row,
                                                       .phase = b->chain_phase,
                                                       .first_row = b->chain_first_row,
                                                       .cursor = b->cursor,
                                                       .seqs = o->seqs,
                                                       .verifiable = b->verifiable,
                                                       .guess = b->guess,
                                                       .n = z->n,
                                                       .n_drafts = z->n_drafts,
                                                       .at = at});
}

static void queue_carry_in(hd_model_runner *x, const runner_graph_inputs *o) {
    const runner_decode_graphs *f = &x->fixed;
    x->env.ops->mirror(x->env.stream,
                       &(hd_mirror_args){
                           .to = {f->graph_inputs_device,  f->graph_inputs_device },
                           .from = {f->graph_inputs_host[0], f->graph_inputs_host[1]},
                           .parity = f->graph_state.parity,
                           .most = (int32_t)o->bytes
    });
}

static void queue_carry_out(hd_model_runner *x, const runner_graph_inputs *o,
                            const runner_graph_outputs *out) {
    const runner_decode_graphs *f = &x->fixed;
    x->env.ops->mirror(x->env.stream,
                       &(hd_mirror_args){
                           .to = {f->inflight[0].graph_outputs, f->inflight[1].graph_outputs},
                           .from = {f->graph_outputs_device,      f->graph_outputs_device     },
                           .parity = o->inflight,
                           .bytes = o->graph_outputs_bytes,
                           .most = (int32_t)out->bytes
    });
}

static void queue_choices_out(hd_model_runner *x, const runner_graph_inputs *o,
                              const runner_graph_shape *z) {
    const runner_decode_graphs *f = &x->fixed;
    const int32_t *choices = hd_model_choices(x->model);
    if (!x->choices) return;
    x->env.ops->mirror(x->env.stream,
                       &(hd_mirror_args){
                           .to = {f->inflight[0].choices, f->inflight[1].choices},
                           .from = {choices,                choices               },
                           .parity = o->inflight,
                           .bytes = o->choices_bytes,
                           .most = (int32_t)choices_bytes(x, z)
    });
}

/* Queues all operators of a step, from the shape alone. A follower has no outputs. */
static void queue_step(hd_model_runner *x, const runner_graph_shape *z) {
    const runner_graph_inputs o = graph_inputs_in(x, x->fixed.graph_inputs_device, z);
    const runner_graph_outputs out = graph_outputs_in(x, x->fixed.graph_outputs_device, z);
    hd_batch rows = runner_graph_rows(x, &o, z);
    const int32_t places = x->n_drafts ? hd_max_i32(z->n_drafts, 1) : 0;
    x->env.ops->timestamp(x->env.stream, &(hd_timestamp_args){out.begun});
    queue_carry_in(x, &o);
    queue_prepare(x, &o, z);
    hd_model_step(x->model, x->kv, &rows);
    queue_sampling(x, &o, &out, z);
    for (int32_t place = 0; place < places; place++) {
        const float *logits = x->drafter->queue(x, &o, z, place).logits;
        if (place < z->n_drafts) queue_draft(x, &o, &out, z, logits, place);
    }
    if (x->o.role == HD_RUNNER_FOLLOWS) return;
    queue_choices_out(x, &o, z);
    x->env.ops->timestamp(x->env.stream, &(hd_timestamp_args){out.ended});
    queue_carry_out(x, &o, &out);
}

/* ---- launching ---- */

/* Writes a block table; entries after the sequence's pages point to the scratch page. */
static void fill_tables(const hd_model_runner *x, const runner_graph_inputs *o, int32_t i,
                        const hd_seq_input *w) {
    for (int group = 0; group < HD_N_KV_GROUPS; group++) {
        int32_t *table = o->tables[group] + (int64_t)i * x->fixed.table_stride;
        memcpy(table, w->pages[group], (size_t)w->n_pages * sizeof *table);
        for (int32_t p = w->n_pages; p < x->fixed.table_stride; p++) {
            table[p] = x->fixed.scratch_page[group];
        }
    }
}

static hd_step_seq step_seq_of(const hd_model_runner *x, const runner_graph_shape *z,
                               const hd_seq_input *w, bool fresh) {
    hd_step_seq q = {.slot = w->slot,
                     .n_wanted = w->n_sample ? hd_min_i32(w->want_drafts, z->n_drafts) : 0,
                     .capacity = w->n_pages * x->fixed.page_tokens,
                     .fresh = fresh};
    if (!fresh) { /* as many as the step before makes */
        q.n_drafts = q.n_wanted;
        return q;
    }
    q.n_drafts = hd_max_i32(w->n_sample - 1, 0);
    q.n_before = w->n - 1 - q.n_drafts;
    q.known = w->n_sample ? 0 : 1 + w->after;
    q.at.position = w->start + q.n_before;
    q.at.token = w->tokens[q.n_before];
    memcpy(q.at.draft, w->tokens + q.n_before + 1, (size_t)q.n_drafts * sizeof(int32_t));
    return q;
}

/* What the next step computes of a prompt that goes on. */
static hd_seq_input next_rows_of(const hd_seq_input *w) {
    hd_seq_input next = *w;
    next.tokens = w->tokens + w->n;
    next.start = w->start + w->n;
    next.n = w->n_next;
    next.n_sample = w->next_is_last;
    next.after = w->next_is_last ? -1 : next.tokens[next.n];
    return next;
}

/* Returns the mask row of a sequence. A constrained sequence has one row: its next token
 * depends on the last one alone. */
static int32_t mask_row_of(hd_model_runner *x, const hd_seq_input *w, int32_t *used) {
    if (!x->constraints || !w->n_sample) return -1;
    const int32_t position = w->start + w->n - w->n_sample + 1;
    uint32_t *mask = runner_mask_at(x, *used);
    return runner_mask_row(
        x, runner_constraint_limit(&x->constraints[w->slot], &x->masks, position, mask), used);
}

static void fill_graph_inputs(hd_model_runner *x, runner_inflight_step *f,
                              const hd_seq_input *inputs, int32_t n, bool fresh) {
    runner_decode_graphs *a = &x->fixed;
    const runner_graph_inputs o =
        graph_inputs_in(x, a->graph_inputs_host[a->parity], &f->shape);
    const runner_graph_outputs out = graph_outputs_in(x, f->graph_outputs, &f->shape);
    const int32_t per_seq = 1 + f->shape.n_drafts;
    int32_t live = 0, masks = 0, before = 0, decoding = 0;
    for (int32_t s = 0; s < x->o.n_slots; s++) f->index[s] = -1;
    for (int32_t row = 0; row < f->shape.n * per_seq; row++) o.mask_row[row] = -1;
    f->tops = false;
    for (int32_t i = 0; i < n; i++) {
        const hd_seq_input *w = &inputs[i];
        const bool goes_on = !fresh && !w->n_sample; /* its rows are known as if fresh */
        hd_seq_input next;
        if (!fresh && !runner_continues(w)) continue;
        if (goes_on) {
            next = next_rows_of(w);
            w = &next;
        }
        hd_step_seq *q = &o.seqs[live];
        *q = step_seq_of(x, &f->shape, w, fresh || goes_on);
        if (fresh) o.mask_row[live * per_seq] = mask_row_of(x, w, &masks);
        memcpy(o.before + before, w->tokens, (size_t)q->n_before * sizeof *o.before);
        before += q->n_before;
        fill_tables(x, &o, live, w);
        const bool of_prompt = goes_on || (fresh && w->n_sample < w->n);
        f->chunk[w->slot] = (runner_chunk){w->start, of_prompt ? w->n : 0, w->n_sample > 0};
        decoding += !of_prompt;
        f->capacity[w->slot] = q->capacity;
        f->index[w->slot] = live++;
        f->tops |= x->host.params[w->slot].n_top > 0;
    }
    f->mixed = decoding > 0 && decoding < live;
    memset(o.seqs + live, 0, (size_t)(f->shape.n - live) * sizeof *o.seqs);
    *o.n_live = live;
    *o.inflight = (int32_t)(f - a->inflight);
    *o.graph_outputs_bytes = (int32_t)(f->tops ? out.bytes : out.top_at);
    f->recorded = x->recorder != NULL;
    *o.choices_bytes = f->recorded ? (int32_t)choices_bytes(x, &f->shape) : 0;
    a->parity = !a->parity;
    if (masks) runner_upload_masks(x, masks);
}

/* No step in flight has the graph that was used longest ago. */
static runner_captured_graph *chunk_graph_of(hd_model_runner *x, const runner_graph_shape *z) {
    runner_decode_graphs *f = &x->fixed;
    runner_chunk_graph *to = &f->chunk_graphs[0];
    const runner_chunk_graph *known = find_chunk_graph(x, z);
    for (int32_t i = 1; !known && i < RUNNER_CHUNK_GRAPHS; i++) {
        if (f->chunk_graphs[i].used < to->used) to = &f->chunk_graphs[i];
    }
    if (known) {
        to = &f->chunk_graphs[known - f->chunk_graphs];
    } else {
        if (to->captured.graph) f->bytes -= hd_graph_bytes(to->captured.graph);
        hd_graph_close(to->captured.graph);
        *to = (runner_chunk_graph){.shape = *z};
    }
    to->used = ++f->chunk_launches;
    return &to->captured;
}

static runner_captured_graph *captured_graph_of(hd_model_runner *x,
                                                const runner_graph_shape *z) {
    if (z->n_before) return chunk_graph_of(x, z);
    return &x->fixed.captured[size_index(&x->fixed, z->n) * (x->n_drafts + 1) + z->n_drafts];
}

/* Launches a shape as a graph once it is used often; capture costs time, and kernels are
 * loaded by then. */
static hd_status launch_shape(hd_model_runner *x, runner_inflight_step *f, hd_err *err) {
    const runner_graph_shape *z = &f->shape;
    const int64_t begun = hd_now_ns();
    runner_captured_graph *r = captured_graph_of(x, z);
    r->launches += r->launches < FIRST_CAPTURE;
    f->as_graph =
        hd_device_has_graphs(x->env.device) && !x->fixed.queues && r->launches >= FIRST_CAPTURE;
    if (!f->as_graph) {
        queue_step(x, z);
        return HD_OK;
    }
    if (!r->graph) {
        hd_stream_begin_capture(x->env.stream);
        queue_step(x, z);
        HD_TRY(hd_stream_end_capture(x->env.stream, &r->graph, err));
        x->fixed.times.graphs++;
        x->fixed.times.graph_launches = hd_graph_launches(r->graph);
        x->fixed.bytes += hd_graph_bytes(r->graph);
        x->fixed.times.record_ns += hd_now_ns() - begun;
        f->continues = false; /* the device may have become idle meanwhile */
    }
    hd_stream_launch(x->env.stream, r->graph);
    return HD_OK;
}

static hd_status launch(hd_model_runner *x, runner_inflight_step *f, hd_err *err) {
    const int64_t begun = hd_comm_begin_pass(x->env.comm);
    HD_TRY(launch_shape(x, f, err));
    hd_comm_end_pass(x->env.comm, begun);
    hd_stream_record_event(x->env.stream, f->done);
    f->under_way = true;
    return HD_OK;
}

hd_status runner_decode_graph_launch(hd_model_runner *x, runner_inflight_step *f,
                                     const runner_graph_shape *shape,
                                     const hd_seq_input *inputs, int32_t n, bool fresh,
                                     hd_err *err) {
    const void *block = x->fixed.graph_inputs_host[x->fixed.parity];
    f->shape = *shape;
    f->continues = !fresh;
    fill_graph_inputs(x, f, inputs, n, fresh);
    runner_command_launch(x, shape, block, graph_inputs_in(x, NULL, shape).bytes);
    return launch(x, f, err);
}

size_t runner_decode_graph_input_bytes(const hd_model_runner *x) {
    const runner_graph_shape most = largest_shape(x);
    return graph_inputs_in(x, NULL, &most).bytes;
}

hd_status runner_decode_graph_follow(hd_model_runner *x, const runner_graph_shape *shape,
                                     const void *inputs, hd_err *err) {
    runner_decode_graphs *a = &x->fixed;
    runner_inflight_step *f = &a->inflight[a->parity];
    if (f->under_way) HD_TRY(hd_stream_sync_event(x->env.stream, f->done, err));
    f->under_way = false;
    f->shape = *shape;
    memcpy(a->graph_inputs_host[a->parity], inputs, graph_inputs_in(x, NULL, shape).bytes);
    a->parity = !a->parity;
    return launch(x, f, err);
}

void runner_decode_graph_reset(hd_model_runner *x) {
    runner_decode_graphs *f = &x->fixed;
    for (int32_t s = 0; s < x->o.n_slots; s++) runner_forget_slot(x, s);
    f->inflight[0].under_way = f->inflight[1].under_way = false;
    f->parity = 0;
    hd_stream_upload(x->env.stream, f->graph_state.parity, &f->parity, sizeof f->parity);
}

/* ---- output ---- */

hd_status runner_decode_graph_wait(hd_model_runner *x, runner_inflight_step *f, hd_err *err) {
    hd_model_runner_times *t = &x->fixed.times;
    const hd_batch rows = {.n_rows = runner_shape_rows(&f->shape)};
    f->under_way = false;
    HD_TRY(hd_stream_sync_event(x->env.stream, f->done, err));
    const runner_graph_outputs o = graph_outputs_in(x, f->graph_outputs, &f->shape);
    t->steps++;
    t->graph_steps += f->as_graph;
    t->micro_steps += hd_model_n_micro(x->model, &rows) > 1;
    t->step_ns += *o.ended - *o.begun;
    t->busy_ns += f->as_graph ? *o.ended - *o.begun : 0;
    if (f->continues && f->as_graph) {
        const int64_t gap_ns = *o.begun - x->fixed.last_ended;
        t->gap_ns += gap_ns;
        t->gaps[hd_min_i32((int32_t)(gap_ns / HD_GAP_NS), HD_GAP_BINS - 1)]++;
    }
    if (f->mixed) runner_note_mixed(x, *o.begun, f->continues);
    x->fixed.last_ended = *o.ended;
    return HD_OK;
}

void runner_note_mixed(hd_model_runner *x, int64_t begun, bool ahead) {
    hd_model_runner_times *t = &x->fixed.times;
    if (x->fixed.last_ended == 0) return;
    t->mixed_steps++;
    t->mixed_ahead += ahead;
    t->mixed_gap_ns += begun - x->fixed.last_ended;
}

/* Copies the device's cursor of a sequence; a failed token is 0 there. */
static void note_cursor(hd_model_runner *x, const runner_inflight_step *f,
                        const runner_graph_outputs *o, const hd_seq_input *w, int32_t i) {
    const int32_t n_drafts = f->shape.n_drafts;
    hd_cursor *k = &x->fixed.known[w->slot];
    const int32_t token = o->token[i * (1 + n_drafts) + o->accepted[i]];
    k->position = w->start + w->n - w->n_sample + o->accepted[i] + 1;
    k->token = hd_max_i32(token, 0);
    if (n_drafts) {
        memcpy(k->draft, o->draft + (int64_t)i * n_drafts, (size_t)n_drafts * sizeof(int32_t));
    }
}

/* Takes a token. Returns false if the tokens after it in this step were sampled without the
 * constraint that now limits them. */
static bool take_token(hd_model_runner *x, const hd_seq_input *w, hd_seq_output *c,
                       int32_t token) {
    runner_constraint *r = x->constraints ? &x->constraints[w->slot] : NULL;
    const bool was_free = !r || runner_constraint_is_free(r);
    runner_note_failure(c, token);
    if (r) runner_constraint_advance(r, &x->masks, token);
    return !was_free || !r || runner_constraint_is_free(r);
}

void runner_decode_graph_output(hd_model_runner *x, const runner_inflight_step *f,
                                const hd_seq_input *w, hd_seq_output *c) {
    const runner_graph_outputs o = graph_outputs_in(x, f->graph_outputs, &f->shape);
    const int32_t i = f->index[w->slot], n_drafts = f->shape.n_drafts;
    const int32_t first = i * (1 + n_drafts);
    assert(o.accepted[i] >= 0);
    *c = (hd_seq_output){.status = HD_OK};
    if (!w->n_sample) {
        x->fixed.known[w->slot].position = -1;
        return;
    }
    const int32_t most = hd_min_i32(o.accepted[i], w->n_sample - 1) + 1;
    hd_step_tokens *step = &c->step;
    bool goes_on = true;
    while (goes_on && step->n_tokens < most) {
        const int32_t row = first + step->n_tokens;
        step->tokens[step->n_tokens] = o.token[row];
        step->logprobs[step->n_tokens++] = o.logprob[row];
        goes_on = take_token(x, w, c, o.token[row]);
    }
    runner_show_tops(x, w->slot, o.top_id + (int64_t)first * x->o.top_stride,
                     o.top_logprob + (int64_t)first * x->o.top_stride, step);
    if (!goes_on) {
        x->fixed.known[w->slot].position = -1;
        return;
    }
    note_cursor(x, f, &o, w, i);
    /* the drafts follow a token that this input does not take */
    if (c->status != HD_OK || o.accepted[i] >= w->n_sample) return;
    c->n_drafts = hd_min_i32(w->want_drafts, n_drafts);
    memcpy(c->drafts, x->fixed.known[w->slot].draft, (size_t)c->n_drafts * sizeof(int32_t));
}
