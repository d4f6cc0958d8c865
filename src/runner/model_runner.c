/* model_runner.c - the model runner's memory, the requests in its slots, and an eager step. */
#include "runner/model_runner.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/progress.h"
#include "runner/expert_moves_internal.h"
#include "runner/groups_internal.h"

enum { MASK_CACHE_BYTES = 32 << 20 };

/* ---- memory ---- */

static int32_t logits_rows(const hd_model_runner_options *o) {
    const int32_t asked = o->sample_rows ? o->sample_rows : o->n_slots * HD_MAX_STEP_TOKENS;
    return hd_min_i32(o->step_rows, asked);
}

static void *take(hd_arena *a, int64_t n, size_t element) {
    return hd_arena_take(a, (size_t)n * element, 64);
}

static void place(runner_sampler_buffers *v, hd_arena *a, const hd_model_runner *x) {
    int32_t **const lists[] = {&v->slot,      &v->position,  &v->input,
                               &v->n_drafted, &v->given,     &v->draft,
                               &v->mask_row,  &v->count_row, &v->count_token};
    const int64_t tops = (int64_t)x->n_rows * x->o.top_stride;
    v->params = take(a, (int64_t)x->o.n_slots + 1, sizeof *v->params);
    v->bias = take(a, (int64_t)x->o.n_slots * RUNNER_BIAS_ENTRIES, sizeof *v->bias);
    v->draft_mask = take(a, x->o.n_slots, sizeof *v->draft_mask);
    v->before = take(a, x->o.n_slots, sizeof *v->before);
    v->confidence = take(a, x->o.n_slots, sizeof *v->confidence);
    v->rows_at = a->used;
    for (size_t i = 0; i < HD_LEN(lists); i++) *lists[i] = take(a, x->n_rows, sizeof(int32_t));
    v->first_row = take(a, x->o.n_slots + 1, sizeof *v->first_row);
    v->outs_at = a->used;
    v->token = take(a, x->n_rows, sizeof *v->token);
    v->accepted = take(a, x->o.n_slots, sizeof *v->accepted);
    v->next = take(a, x->o.n_slots, sizeof *v->next);
    v->top_id = take(a, tops, sizeof *v->top_id);
    v->logprob = take(a, x->n_rows, sizeof *v->logprob);
    v->top_logprob = take(a, tops, sizeof *v->top_logprob);
    v->end = a->used;
}

hd_status runner_mirrored_open(runner_mirrored *t, hd_device *d, size_t bytes, const char *what,
                               hd_err *err) {
    t->bytes = bytes;
    HD_TRY(hd_device_alloc(d, &t->device, bytes, what, err));
    return hd_device_alloc_host(d, &t->host, bytes, what, err);
}

void runner_mirrored_close(runner_mirrored *t, hd_device *d) {
    hd_device_release(d, t->host);
    hd_device_release(d, t->device);
}

static size_t counts_bytes(const hd_model_runner *x) {
    if (x->o.role == HD_RUNNER_FOLLOWS) return 0;
    return (size_t)x->o.n_slots * (size_t)x->env.spec->vocab * sizeof *x->counts;
}

static hd_status open_sampling(hd_model_runner *x, hd_err *err) {
    void *counts;
    hd_arena a = hd_arena_measure();
    place(&x->host, &a, x);
    HD_TRY(runner_mirrored_open(&x->sampling, x->env.device, a.peak, "sampling", err));
    a = hd_arena_over(x->sampling.host, x->sampling.bytes);
    place(&x->host, &a, x);
    a = hd_arena_over(x->sampling.device, x->sampling.bytes);
    place(&x->device, &a, x);
    HD_TRY(hd_device_alloc(x->env.device, &counts, counts_bytes(x), "token counts", err));
    x->counts = counts;
    return HD_OK;
}

/* Opens the masks, which need a vocabulary; the constant mask is uploaded once. */
static hd_status open_constraints(hd_model_runner *x, hd_err *err) {
    runner_masks *m = &x->masks;
    if (!x->o.vocab) return HD_OK;
    const hd_model_spec *c = x->env.spec;
    *m = (runner_masks){.vocab = x->o.vocab,
                        .eos = c->eos,
                        .n_eos = c->n_eos,
                        .words = hd_grammar_vocab_words(x->o.vocab)};
    if (m->words != hd_ceil_div(c->vocab, 32)) {
        return HD_FAIL(err, HD_EINVAL, "grammar masks of %d words for %d rows of logits",
                       m->words, c->vocab);
    }
    const size_t row = (size_t)m->words * sizeof(uint32_t);
    HD_TRY(runner_mirrored_open(&x->mask, x->env.device, ((size_t)x->n_rows + 1) * row,
                                "token masks", err));
    HD_TRY(hd_grammar_masks_open(&m->cache, m->vocab, MASK_CACHE_BYTES, err));
    x->constraints = calloc((size_t)x->o.n_slots + 1, sizeof *x->constraints);
    m->scratch = malloc(sizeof *m->scratch);
    if (!x->constraints || !m->scratch) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for %d constraints", x->o.n_slots);
    }
    runner_mask_no_end(m, runner_mask_at(x, x->n_rows));
    hd_stream_upload(x->env.stream, (uint8_t *)x->mask.device + (size_t)x->n_rows * row,
                     runner_mask_at(x, x->n_rows), row);
    return hd_stream_sync(x->env.stream, err);
}

/* Memory for the experts that the rows of a pass chose, on the host. */
static hd_status open_choices(hd_model_runner *x, hd_err *err) {
    const int64_t n = runner_most_choices(x);
    void *block;
    if (!x->env.spec->route.n_experts) return HD_OK;
    HD_TRY(hd_device_alloc_host(x->env.device, &block, (size_t)n * sizeof *x->choices,
                                "choices of experts", err));
    x->choices = block;
    return HD_OK;
}

static hd_status open_all(hd_model_runner *x, hd_err *err) {
    const hd_model_runner_options *o = &x->o;
    const int32_t n_layers = x->env.spec->n_layers + hd_weights_n_mtp(x->env.weights);
    const int32_t scratch = o->fixed_steps; /* a page for padding rows */
    const hd_model_limits limits = {.rows = o->step_rows,
                                    .logits = x->n_rows,
                                    .positions = o->positions + scratch * RUNNER_LOOKAHEAD,
                                    .expert_rows = o->expert_rows,
                                    .n_micro = o->n_micro,
                                    .micro_from = o->micro_from,
                                    .keeps_slots = runner_keeps_slots(x)};
    const hd_kv_options kv = {
        .n_pages = {o->n_pages[0] + scratch, o->n_pages[1] + scratch},
        .n_host = {o->n_host[0],            o->n_host[1]           },
        .max_drafts = x->n_drafts,
        .entry_type = x->env.ops->kv_type,
        .rounds = x->env.ops->precision == HD_OFFICIAL,
        .replay = {o->replay[0],            o->replay[1]           },
        .resident = o->resident
    };
    const hd_batch_limits step = {o->step_rows, o->n_slots, o->seq_pages};
    const int32_t each = hd_max_i32(x->env.spec->dspark.block, 1);
    const hd_batch_limits chain = {o->n_slots * each, o->n_slots, o->seq_pages};
    HD_TRY(hd_model_open(&x->model, &x->env, &limits, err));
    HD_TRY(hd_kv_open(&x->kv, x->env.spec, n_layers, x->env.device, &kv, err));
    HD_TRY(hd_batch_open(&x->batch, &step, x->env.device, err));
    HD_TRY(hd_batch_open(&x->chain, &chain, x->env.device, err));
    HD_TRY(runner_commands_open(x, err));
    if (o->role == HD_RUNNER_FOLLOWS) {
        if (hd_device_is_host(x->env.device)) HD_TRY(open_choices(x, err)); /* are summed */
        if (!o->fixed_steps) return HD_OK;
        HD_TRY(open_sampling(x, err)); /* parameters, for the operators of a graph */
        return runner_decode_graph_open(x, err);
    }
    HD_TRY(open_sampling(x, err));
    HD_TRY(open_constraints(x, err));
    if (o->fixed_steps) HD_TRY(runner_decode_graph_open(x, err));
    HD_TRY(open_choices(x, err));
    const size_t n = (size_t)o->n_slots, top_stride = (size_t)o->top_stride;
    x->tops = calloc(n * HD_MAX_STEP_TOKENS * top_stride, sizeof *x->tops);
    x->prompt_tops = calloc((size_t)x->n_rows * top_stride, sizeof *x->prompt_tops);
    x->places = calloc(n, sizeof *x->places);
    x->drafting = calloc(n, sizeof *x->drafting);
    if (x->tops && x->prompt_tops && x->places && x->drafting) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for %d slots", o->n_slots);
}

static void choose_drafter(hd_model_runner *x) {
    const hd_model_spec *c = x->env.spec;
    const bool dspark = c->drafter == HD_DRAFTER_DSPARK;
    x->drafter = dspark ? &runner_drafter_dspark : &runner_drafter_mtp;
    x->n_drafts = hd_weights_n_mtp(x->env.weights) ? x->o.max_drafts : 0;
    if (dspark) x->n_drafts = hd_min_i32(x->n_drafts, c->dspark.block);
}

/* A block of every sequence must fit a step. */
static hd_status check_blocks(const hd_model_runner *x, hd_err *err) {
    const int32_t rows = x->o.n_slots * x->env.spec->dspark.block;
    if (!x->n_drafts || (rows <= x->o.step_rows && rows <= x->n_rows)) return HD_OK;
    return HD_FAIL(err, HD_EINVAL,
                   "a step of %d rows, %d with logits, cannot hold %d draft blocks of %d",
                   x->o.step_rows, x->n_rows, x->o.n_slots, x->env.spec->dspark.block);
}

hd_status hd_model_runner_open(hd_model_runner **out, const hd_model_env *env,
                               const hd_model_runner_options *options, hd_err *err) {
    *out = NULL;
    hd_model_runner *x = calloc(1, sizeof *x);
    if (!x) return HD_FAIL(err, HD_ENOMEM, "no memory for a model runner");
    x->env = *env;
    x->o = *options;
    x->n_rows = logits_rows(options);
    choose_drafter(x);
    hd_status st = check_blocks(x, err);
    if (st == HD_OK) st = open_all(x, err);
    if (st == HD_OK) {
        *out = x;
    } else {
        hd_model_runner_close(x);
    }
    return st;
}

void hd_model_runner_close(hd_model_runner *x) {
    if (!x) return;
    if (x->fixed.on) runner_decode_graph_close(x);
    free(x->command);
    free(x->words);
    runner_moves_close(x);
    runner_mirrored_close(&x->loads, x->env.device);
    hd_batch_close(&x->batch);
    hd_batch_close(&x->chain);
    runner_mirrored_close(&x->sampling, x->env.device);
    runner_mirrored_close(&x->mask, x->env.device);
    hd_device_release(x->env.device, x->counts);
    hd_device_release(x->env.device, x->choices);
    hd_grammar_masks_close(x->masks.cache);
    hd_kv_close(x->kv);
    hd_model_close(x->model);
    free(x->constraints);
    free(x->masks.scratch);
    free(x->tops);
    free(x->prompt_tops);
    free(x->places);
    free(x->drafting);
    free(x);
}

size_t hd_model_runner_bytes(const hd_model_runner *x) {
    const size_t constraints =
        x->constraints ? ((size_t)x->o.n_slots + 1) * sizeof *x->constraints : 0;
    return hd_model_bytes(x->model) + x->batch.bytes + x->chain.bytes + x->sampling.bytes +
           x->mask.bytes + constraints + (x->constraints ? MASK_CACHE_BYTES : 0) +
           counts_bytes(x) + x->fixed.bytes;
}

/* ---- requests ---- */

/* Adds n tokens of one kind to the penalty counts of a slot, as many at a time as there are
 * rows. */
static void count(hd_model_runner *x, int32_t slot, const int32_t *tokens, int32_t n,
                  bool prompt) {
    for (int32_t i = 0; i < n; i += x->n_rows) {
        const int32_t some = hd_min_i32(n - i, x->n_rows);
        for (int32_t k = 0; k < some; k++) x->host.count_row[k] = slot;
        memcpy(x->host.count_token, tokens + i, (size_t)some * sizeof *tokens);
        runner_upload_rows(x);
        x->env.ops->count_tokens(x->env.stream,
                                 &(hd_count_tokens_args){.counts = x->counts,
                                                         .row = x->device.count_row,
                                                         .token = x->device.count_token,
                                                         .n = some,
                                                         .vocab = x->env.spec->vocab,
                                                         .prompt = prompt});
    }
}

static void clear_counts(hd_model_runner *x, int32_t slot) {
    x->host.count_row[0] = slot;
    runner_upload_rows(x);
    x->env.ops->count_tokens(x->env.stream,
                             &(hd_count_tokens_args){.counts = x->counts,
                                                     .clear = x->device.count_row,
                                                     .n_clear = 1,
                                                     .vocab = x->env.spec->vocab});
}

static void set_params(hd_model_runner *x, int32_t slot, const hd_request_sampling *sampling) {
    hd_sampling *p = &x->host.params[slot];
    hd_logit_bias *bias = x->host.bias + (int64_t)slot * RUNNER_BIAS_ENTRIES;
    const int32_t n = sampling->params.n_bias + sampling->params.n_ban;
    assert(n <= RUNNER_BIAS_ENTRIES);
    *p = sampling->params;
    p->counts_row = slot;
    p->bias_at = slot * RUNNER_BIAS_ENTRIES;
    p->ban_at = p->bias_at + p->n_bias;
    p->relaxed_top = sampling->constraint ? sampling->constraint->relaxed_top : 0;
    p->relaxed_delta = sampling->constraint ? sampling->constraint->relaxed_delta : 0.0f;
    if (p->n_bias) memcpy(bias, sampling->bias, (size_t)p->n_bias * sizeof *bias);
    for (int32_t i = 0; i < p->n_ban; i++) bias[p->n_bias + i].token = sampling->ban[i];
    hd_stream_upload(x->env.stream, &x->device.params[slot], p, sizeof *p);
    if (x->o.forced.least[0] > 0.0f) runner_command_seed(x, slot, p->seed);
    hd_stream_upload(x->env.stream, x->device.bias + p->bias_at, bias,
                     (size_t)n * sizeof *bias);
}

static void set_constraint(hd_model_runner *x, int32_t slot, const hd_constraint *constraint,
                           const int32_t *tokens, int32_t n) {
    assert(x->constraints || !constraint);
    if (!x->constraints) return;
    runner_constraint *r = &x->constraints[slot];
    runner_constraint_start(r, x->o.forced.least[0] > 0.0f ? NULL : constraint);
    for (int32_t i = 0; i < n; i++) runner_constraint_advance(r, &x->masks, tokens[i]);
}

void hd_model_runner_enter(hd_model_runner *x, int32_t slot,
                           const hd_request_sampling *sampling, const int32_t *tokens,
                           int32_t n, int32_t n_prompt) {
    if (x->fixed.on) runner_forget_slot(x, slot);
    set_params(x, slot, sampling);
    set_constraint(x, slot, sampling->constraint, tokens + n_prompt, n - n_prompt);
    if (hd_has_penalty(&sampling->params)) {
        clear_counts(x, slot);
        count(x, slot, tokens, n_prompt, true);
        count(x, slot, tokens + n_prompt, n - n_prompt, false);
    }
}

/* ---- a step ---- */

/* Writes the device's clock to host memory, at both ends of a step. */
static void stamp(hd_model_runner *x, int end) {
    if (!x->fixed.stamps) return;
    x->env.ops->timestamp(x->env.stream, &(hd_timestamp_args){&x->fixed.stamps[end]});
}

void runner_note_eager(hd_model_runner *x, const hd_seq_input *inputs, int32_t n) {
    int32_t decoding = 0;
    if (!x->fixed.stamps || !x->has_rows) return;
    for (int32_t i = 0; i < n; i++) decoding += inputs[i].n_sample == inputs[i].n;
    if (decoding && decoding < n) runner_note_mixed(x, x->fixed.stamps[0], false);
    x->fixed.last_ended = x->fixed.stamps[1];
}

hd_status runner_run_eager(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                           hd_seq_output *outputs, hd_err *err) {
    const int64_t begun = hd_now_ns();
    stamp(x, 0);
    runner_build_batch(x, inputs, n);
    HD_TRY(runner_forward(x, RUNNER_STEP, err));
    if (!x->has_rows) return HD_OK;
    HD_TRY(runner_sample(x, inputs, n, outputs, err));
    if (!x->fetches)
        runner_time_rows(x, hd_now_ns() - begun); /* sampling waits for the logits */
    HD_TRY(runner_record_step(x, err));
    if (x->n_drafts) HD_TRY(runner_draft(x, inputs, n, outputs, err));
    stamp(x, 1);
    return hd_stream_sync(x->env.stream, err);
}

hd_status hd_model_runner_fill_kv(hd_model_runner *x, hd_err *err) {
    assert(x->o.role == HD_RUNNER_ALONE);
    hd_kv_random_fill(x->kv, x->env.stream);
    return hd_stream_sync(x->env.stream, err);
}

void hd_model_runner_use_graphs(hd_model_runner *x, bool on) {
    x->fixed.queues = !on;
}

static hd_status run(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                     const hd_seq_input *inputs, int32_t n, hd_seq_output *outputs,
                     hd_err *err) {
    hd_model_runner *x = ctx;
    runner_copy_pages(x, copies, n_copies);
    if (n == 0 && x->o.role == HD_RUNNER_ALONE) return hd_stream_sync(x->env.stream, err);
    const hd_status st = x->fixed.on ? runner_run_overlapped(x, inputs, n, outputs, err)
                                     : runner_run_eager(x, inputs, n, outputs, err);
    if (x->recorder && st == HD_OK) hd_recorder_end_pass(x->recorder);
    return st;
}

const hd_model_runner_times *hd_model_runner_read_times(const hd_model_runner *x) {
    return &x->fixed.times;
}

hd_runner hd_model_runner_interface(hd_model_runner *x) {
    return (hd_runner){.ctx = x, .run = run};
}

/* Sums the loads that the ranks of the group counted of the rows that they computed. */
static hd_status sum_loads(hd_model_runner *x, int64_t *rows, hd_err *err) {
    const size_t n = runner_n_loads(x);
    const int64_t *all = x->loads.host;
    runner_gather_loads(x);
    hd_stream_download(x->env.stream, x->loads.host, x->loads.device, x->loads.bytes);
    HD_TRY(hd_stream_sync(x->env.stream, err));
    memset(rows, 0, n * sizeof *rows);
    for (size_t i = 0; i < x->loads.bytes / sizeof *rows; i++) rows[i % n] += all[i];
    return HD_OK;
}

hd_status hd_model_runner_read_experts(hd_model_runner *x, int64_t *rows, hd_err *err) {
    const int64_t *of_model = hd_model_expert_rows(x->model);
    if (!of_model) return HD_OK;
    if (x->loads.bytes) return sum_loads(x, rows, err);
    hd_stream_download(x->env.stream, rows, of_model, runner_n_loads(x) * sizeof *rows);
    return hd_stream_sync(x->env.stream, err);
}

void hd_model_runner_read_replay(const hd_model_runner *x, hd_replay kind, const int32_t *pages,
                                 int32_t first, int32_t n, uint8_t *out) {
    hd_replay_read(hd_kv_replay(x->kv, kind), pages, first, n, out);
}

hd_kv *hd_model_runner_kv(hd_model_runner *x) {
    return x->kv;
}

hd_resident_counts hd_model_runner_read_resident(const hd_model_runner *x) {
    return hd_kv_read_resident(x->kv);
}

hd_prefetch_stats hd_model_runner_engram_stats(const hd_model_runner *x) {
    return hd_model_engram_stats(x->model);
}

void *hd_model_runner_host_page(const hd_model_runner *x, hd_kv_group group, hd_host_page host,
                                size_t *bytes) {
    return hd_kv_host_page(x->kv, group, host, bytes);
}

hd_status hd_model_runner_discard_kv(hd_model_runner *x, size_t *bytes, hd_err *err) {
    hd_stream_wait(x->env.stream);
    return hd_kv_discard(x->kv, bytes, err);
}

hd_status hd_model_runner_restore_kv(hd_model_runner *x, hd_err *err) {
    return hd_kv_restore(x->kv, err);
}
