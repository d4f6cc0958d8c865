/* crowd.c - requests on a model runner without a scheduler; see crowd.h. */
#include "fakes/crowd.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/philox.h"
#include "fakes/gpus.h"
#include "fakes/tape.h"
#include "model/expert_host.h"

/* Id 4 and on. Some tokens are several characters, two are halves of one, and five are markers
 * of calls. */
static const char *const pieces[] = {
    "0",   "1",     "2",    "3",     "4",    "5",    "6",  "7",    "8",    "9",  "a",  "b",
    "c",   "d",     "e",    "f",     "g",    "h",    "i",  "j",    "k",    "l",  "m",  "n",
    "o",   "p",     "q",    "r",     "s",    "t",    "u",  "v",    "w",    "x",  "y",  "z",
    "{",   "}",     "[",    "]",     ":",    ",",    "-",  "+",    ".",    "\\", "/",  " ",
    "\n",  "\"",    "\xf8", "\xf9",  "\xfa", "\xfb", "!",  "\xc3", "\xfc", "a",  "tr", "ue",
    "\":", "\",\"", "{\"",  "false", "null", "ab",   "12", "\"}",  "\xa9",
};

static const char *piece_of(int32_t id) {
    const int32_t at = id - UNTHINK - 1;
    return at >= 0 && at < (int32_t)HD_LEN(pieces) ? pieces[at] : NULL;
}

int32_t id_of(char c) {
    for (int32_t i = 0; i < (int32_t)HD_LEN(pieces); i++) {
        if (pieces[i][0] == c && !pieces[i][1]) return i + UNTHINK + 1;
    }
    fail_msg("no token for '%c'", c);
    return -1;
}

void text_of(const int32_t *tokens, int32_t n, char *out) {
    *out = 0;
    for (int32_t i = 0; i < n; i++) {
        const char *piece = piece_of(tokens[i]);
        if (piece) out = (char *)memcpy(out, piece, strlen(piece) + 1) + strlen(piece);
    }
}

/* ---- the runner ---- */

static void must(hd_status st, const hd_err *err) {
    if (st != HD_OK) fail_msg("%s", err->msg);
}

static void open_vocab(machine *m) {
    const uint8_t *piece[128] = {NULL};
    size_t bytes[128] = {0};
    const int32_t eos = EOS;
    hd_err err = {0};
    m->n_ids = UNTHINK + 1 + (int32_t)HD_LEN(pieces);
    assert_true(m->n_ids <= m->spec->vocab && m->n_ids <= (int32_t)HD_LEN(piece));
    for (int32_t id = 0; id < m->n_ids; id++) {
        const char *own = piece_of(id);
        piece[id] = (const uint8_t *)own;
        bytes[id] = own ? strlen(own) : 0;
    }
    const hd_grammar_vocab_args a = {.pieces = piece,
                                     .piece_bytes = bytes,
                                     .n_pieces = m->n_ids,
                                     .n_rows = m->spec->vocab,
                                     .eos = &eos,
                                     .n_eos = 1};
    must(hd_grammar_vocab_open(&m->vocab, &a, &err), &err);
}

static hd_model_env env_of(const machine *m) {
    return (hd_model_env){.spec = m->spec,
                          .weights = m->weights,
                          .ops = &m->ops,
                          .device = m->device,
                          .stream = m->stream,
                          .stage = m->stage,
                          .comm = m->comm};
}

enum { HOST_ROWS = 64 };

/* Where the experts of a machine are. */
typedef struct experts_at {
    const hd_expert_disk_options *disk; /* NULL: not on disk */
    bool host, in_place;                /* in_place: operators read them there */
    int32_t n;                          /* of host: that fit on the device; 0: all */
    int32_t n_whole; /* of in_place: the last layers, whose experts are on the device alone */
    missing_experts missing; /* of in_place */
} experts_at;

static void open_host(machine *m, size_t bytes, const experts_at *at) {
    const hd_fetch_source host = {.name = "host", .has = m->whole};
    assert_int_equal(at->n_whole, 0);
    const hd_expert_fetch_options fetch = {.sources = &host,
                                           .n_sources = 1,
                                           .depth = 1,
                                           .bytes = bytes,
                                           .device = m->device,
                                           .stream = m->stream,
                                           .copy_stream = m->copy_stream};
    hd_err err = {0};
    must(hd_expert_fetch_open(&m->stage, m->spec, m->weights, &fetch, &err), &err);
}

static void open_host_rows(machine *m, int32_t held, bool always) {
    const hd_host_experts_options o = {.whole = m->whole,
                                       .held = held,
                                       .device = m->device,
                                       .stream = m->stream,
                                       .precision = m->ops.precision,
                                       .cpu = {.n_threads = 2},
                                       .rows = HOST_ROWS,
                                       .always = always};
    hd_err err = {0};
    must(hd_host_experts_open(&m->host_experts, m->spec, &o, &err), &err);
}

static void close_stage(machine *m) {
    hd_expert_stage_close(m->stage);
    hd_host_experts_close(m->host_experts);
    m->host_experts = NULL;
}

static void open_in_place(machine *m, size_t bytes, const experts_at *at) {
    const int32_t held = m->spec->n_layers + m->spec->n_mtp - at->n_whole;
    if (at->missing != FETCHED) open_host_rows(m, held, at->missing == LEFT_TO_HOST);
    const hd_expert_host_options host = {.whole = m->whole,
                                         .held = held,
                                         .host = m->host_experts,
                                         .bytes = bytes,
                                         .device = m->device,
                                         .stream = m->stream,
                                         .copy_stream = m->copy_stream};
    size_t pinned;
    hd_err err = {0};
    must(hd_weights_hold_experts(m->whole, host.held, m->device, &pinned, &err), &err);
    must(hd_expert_host_open(&m->stage, m->spec, m->weights, &host, &err), &err);
}

static void open_fetched(machine *m, const experts_at *at) {
    void (*open)(machine *, size_t, const experts_at *) =
        at->in_place ? open_in_place : open_host;
    hd_err err = {0};
    m->whole = m->weights;
    must(hd_weights_open_without_experts(&m->weights, m->whole, &err), &err);
    must(hd_stream_open(&m->copy_stream, m->device, &err), &err);
    must(hd_weights_upload(m->weights, m->device, m->stream, NULL, &err), &err);
    open(m, (size_t)1 << 30, at);
    if (at->n == 0) return;
    const size_t each = hd_expert_stage_read_stats(m->stage).expert_bytes;
    close_stage(m);
    open(m, (size_t)at->n * each, at);
}

static void open_shard(machine *m, const machine_rank *r) {
    hd_err err = {0};
    m->whole = m->weights;
    must(hd_weights_open_shards(&m->weights, m->whole, &r->parallel, r->number, &err), &err);
    must(hd_comm_local_join(r->world, r->number, m->device, m->stream, &m->ops, &m->comm, &err),
         &err);
}

/* How a machine is opened beside its model. */
typedef struct machine_options {
    float forced_acceptance;
    bool fixed;
    hd_precision precision;
    bool all_ids; /* every row of the vocabulary is a token, and there are no constraints */
    const experts_at *at;     /* NULL: all experts are resident */
    const machine_rank *rank; /* NULL: alone */
} machine_options;

static hd_runner_role role_of(const machine_rank *r) {
    if (!r) return HD_RUNNER_ALONE;
    return r->number % r->parallel.tp ? HD_RUNNER_FOLLOWS : HD_RUNNER_LEADS;
}

static void open_any(machine *m, const char *backend, const char *name, machine_options how) {
    const hd_expert_disk_options *disk = how.at ? how.at->disk : NULL;
    char dir[128];
    hd_err err = {0};
    memset(m, 0, sizeof *m);
    snprintf(dir, sizeof dir, "tests/golden/%s", name);
    hd_precision precision = how.precision;
    if (precision == HD_EXACT)
        must(hd_precision_of(&precision, gpus_precision(backend), &err), &err);
    const hd_ops_options ops = {
        .cpu = {.n_threads = 1},
        .precision = precision,
        .gpu = how.rank && strcmp(backend, "cuda") == 0 ? gpus_for(how.rank->number) : 0,
        .cuda_path = gpus_path(backend)};
    must(hd_model_spec_open(&m->spec, dir, &err), &err);
    must((disk ? hd_weights_open_unstaged : hd_weights_open)(&m->weights, dir, m->spec, &err),
         &err);
    must(hd_ops_open(&m->ops, &m->device, backend, &ops, &err), &err);
    must(hd_stream_open(&m->stream, m->device, &err), &err);
    if (how.rank) open_shard(m, how.rank);
    if (!how.at || !how.at->host) {
        must(hd_weights_upload(m->weights, m->device, m->stream, NULL, &err), &err);
    }
    if (disk) must(hd_expert_disk_open(&m->stage, m->spec, m->weights, disk, &err), &err);
    if (how.at && how.at->host) open_fetched(m, how.at);
    if (how.fixed && !how.rank && !hd_device_has_graphs(m->device)) tape_open(&m->ops);
    m->n_ids = m->spec->vocab;
    if (!how.all_ids) open_vocab(m);
    const int32_t page = hd_kv_shape_of(m->spec).page_tokens;
    m->seq_pages = (int32_t)hd_ceil_div(POSITIONS + HD_MAX_DRAFTS, page);
    assert_true(m->seq_pages <= MAX_PAGES);
    for (int32_t s = 0; s < SLOTS; s++) {
        for (int32_t i = 0; i < m->seq_pages; i++) {
            for (int g = 0; g < HD_N_KV_GROUPS; g++) m->pages[g][s][i] = s * m->seq_pages + i;
        }
    }
    const hd_model_runner_options options = {
        .n_slots = SLOTS,
        .step_rows = STEP_ROWS,
        .positions = POSITIONS + HD_MAX_DRAFTS,
        .seq_pages = m->seq_pages,
        .n_pages = {SLOTS * m->seq_pages, SLOTS * m->seq_pages},
        .n_ids = m->n_ids,
        .max_drafts = HD_MAX_DRAFTS,
        .sample_rows = STEP_ROWS,
        .top_stride = TOPS,
        .vocab = m->vocab,
        .forced = hd_acceptance_of(how.forced_acceptance),
        .fixed_steps = how.fixed,
 /* steps of a fixed shape have entries in host memory, if an indexer selects them */
        .resident = how.fixed ? 2 * m->spec->index_topk : 0,
        .role = role_of(how.rank),
        .n_micro = how.rank ? how.rank->n_micro : 0
    };
    const hd_model_env env = env_of(m);
    must(hd_model_runner_open(&m->model_runner, &env, &options, &err), &err);
}

void open_machine_on(machine *m, const char *backend, const char *name, float forced_acceptance,
                     bool fixed) {
    open_any(m, backend, name,
             (machine_options){.forced_acceptance = forced_acceptance, .fixed = fixed});
}

void open_machine_all_ids(machine *m, const char *name) {
    open_any(m, "cpu", name, (machine_options){.all_ids = true});
}

void open_machine_staged(machine *m, const char *name, const hd_expert_disk_options *stage) {
    open_any(m, "cpu", name, (machine_options){.at = &(experts_at){.disk = stage}});
}

void open_machine_fetched(machine *m, const char *name, int32_t experts) {
    open_any(m, "cpu", name,
             (machine_options){
                 .at = &(experts_at){.host = true, .n = experts}
    });
}

void open_machine_rounding(machine *m, const char *backend, const char *name,
                           hd_precision precision) {
    open_any(m, backend, name, (machine_options){.fixed = true, .precision = precision});
}

void open_machine_in_place(machine *m, const char *backend, const char *name,
                           hd_precision precision, int32_t experts, int32_t n_whole,
                           missing_experts missing) {
    open_any(m, backend, name,
             (machine_options){
                 .fixed = true,
                 .precision = precision,
                 .at = &(experts_at){.host = true,
                                     .in_place = true,
                                     .n = experts,
                                     .n_whole = n_whole,
                                     .missing = missing}
    });
}

void open_machine_rank(machine *m, const char *backend, const char *name,
                       float forced_acceptance, const machine_rank *rank) {
    open_any(
        m, backend, name,
        (machine_options){.forced_acceptance = forced_acceptance, .fixed = true, .rank = rank});
}

void open_machine(machine *m, const char *name, float forced_acceptance) {
    open_machine_on(m, "cpu", name, forced_acceptance, false);
}

void close_machine(machine *m) {
    hd_model_runner_close(m->model_runner);
    hd_grammar_vocab_close(m->vocab);
    close_stage(m);
    hd_stream_close(m->copy_stream);
    hd_stream_close(m->stream);
    hd_device_close(m->device);
    hd_weights_close(m->weights);
    hd_weights_close(m->whole);
    hd_model_spec_close(m->spec);
}

float *logits_of(const machine *m, const int32_t *tokens, int32_t n) {
    const hd_model_env env = env_of(m);
    const hd_model_limits limits = {.rows = n, .logits = n, .positions = n};
    const hd_kv_options kv_options = {
        .n_pages = {m->seq_pages, m->seq_pages},
        .entry_type = m->ops.kv_type,
        .rounds = m->ops.precision == HD_OFFICIAL
    };
    const hd_batch_limits batch_limits = {n, 1, m->seq_pages};
    hd_model *model;
    hd_kv *kv;
    hd_batch b;
    assert_int_equal(hd_model_open(&model, &env, &limits, NULL), HD_OK);
    assert_int_equal(hd_kv_open(&kv, m->spec, m->spec->n_layers, m->device, &kv_options, NULL),
                     HD_OK);
    assert_int_equal(hd_batch_open(&b, &batch_limits, m->device, NULL), HD_OK);
    hd_batch_reset(&b);
    hd_batch_add(&b, &(hd_batch_seq){
                         .tokens = tokens,
                         .n = n,
                         .after = -1,
                         .n_logits = n,
                         .pages = {m->pages[0][0], m->pages[1][0]},
                         .n_pages = m->seq_pages
    });
    hd_batch_upload(&b, m->stream);
    hd_model_step(model, kv, &b);
    const size_t bytes = (size_t)n * (size_t)m->spec->vocab * sizeof(float);
    float *logits = malloc(bytes);
    assert_non_null(logits);
    hd_stream_download(m->stream, logits, hd_model_logits(model), bytes);
    assert_int_equal(hd_stream_sync(m->stream, NULL), HD_OK);
    hd_batch_close(&b);
    hd_kv_close(kv);
    hd_model_close(model);
    return logits;
}

double log_softmax(const machine *m, const float *logits, int32_t id) {
    double total = 0;
    for (int32_t i = 0; i < m->spec->vocab; i++) total += exp((double)logits[i]);
    return (double)logits[id] - log(total);
}

/* ---- requests ---- */

static int32_t random_id(const machine *m, uint64_t seed, uint64_t at) {
    const uint32_t n_text = (uint32_t)(m->n_ids - UNTHINK - 1);
    return UNTHINK + 1 + (int32_t)(hd_philox_at(seed, 1, at).v[0] % n_text);
}

void init_request(request *r, const machine *m, int32_t slot, int32_t n_prompt, uint64_t seed) {
    memset(r, 0, sizeof *r);
    r->slot = slot;
    r->n = r->n_prompt = n_prompt;
    r->most = POSITIONS;
    r->constraint = (hd_constraint){.think = -1, .unthink = UNTHINK};
    r->sampling.params = (hd_sampling){.seed = seed, .logprob = true};
    r->text[0] = BOS;
    for (int32_t i = 1; i < n_prompt; i++) r->text[i] = random_id(m, seed, (uint64_t)i);
}

void enter(machine *m, request *r) {
    r->done = r->n_next = 0;
    hd_model_runner_enter(m->model_runner, r->slot, &r->sampling, r->text, r->n, r->n_prompt);
}

/* Returns the drafts of this step: those of the last step, or the oracle's. */
static int32_t choose_drafts(const machine *m, const request *r, int32_t *drafts) {
    int32_t n = r->oracle ? r->n_drafts : r->n_next;
    n = hd_min_i32(n, r->most - r->n - 1);
    for (int32_t k = 0; k < n; k++) {
        const uint64_t at = (uint64_t)(r->n + k);
        drafts[k] = r->oracle ? r->oracle[r->n + k] : r->drafts[k];
        if (!r->oracle || !r->one_wrong_in) continue;
        const uint32_t luck = hd_philox_at(r->sampling.params.seed, 9, at).v[0];
        if (luck % (uint32_t)r->one_wrong_in == 0) drafts[k] = random_id(m, luck, at);
    }
    return n;
}

/* Makes a sequence input; tokens has space for the rows and their drafts. */
static hd_seq_input plan(const machine *m, const request *r, int32_t *tokens) {
    const int32_t left = r->n - r->done;
    const int32_t known = r->chunk ? hd_min_i32(left, r->chunk) : left;
    hd_seq_input w = {
        .slot = r->slot,
        .tokens = tokens,
        .n = known,
        .start = r->done,
        .after = known < left ? r->text[r->done + known] : -1,
        .want_drafts = r->oracle ? 0 : r->n_drafts,
        .ends = r->ends,
        .pages = {m->pages[0][r->slot], m->pages[1][r->slot]},
        .n_pages = m->seq_pages
    };
    memcpy(tokens, r->text + r->done, (size_t)left * sizeof *tokens);
    if (r->announces && known < left) {
        w.n_next = hd_min_i32(left - known, r->next_chunk ? r->next_chunk : r->chunk);
        w.next_is_last = w.n_next == left - known;
    }
    if (known == left) {
        const int32_t drafts = choose_drafts(m, r, tokens + known);
        w.n += drafts;
        w.n_sample = drafts + 1;
        w.left = r->most - r->n;
    }
    if (r->ahead) {
        const int32_t page = hd_kv_shape_of(m->spec).page_tokens;
        const int32_t drafts = w.want_drafts ? m->spec->dspark.block : 0;
        const int32_t lookback =
            w.start + w.n + w.n_next + hd_max_i32(w.want_drafts, drafts) + r->ahead;
        w.n_pages = hd_min_i32((int32_t)hd_ceil_div(lookback, page), m->seq_pages);
    }
    if (r->prompt_logprobs_from && r->n == r->n_prompt) {
        const int32_t end = r->done + w.n - w.n_sample;
        const int32_t first = hd_max_i32(r->done, r->prompt_logprobs_from - 1);
        w.n_prompt_logprobs = hd_max_i32(end - first, 0);
    }
    return w;
}

static void note(request *r, int32_t at, float logprob, const hd_alternative *top,
                 int32_t n_top) {
    r->logprob[at] = logprob;
    assert_int_equal(n_top, r->sampling.params.n_top);
    if (n_top) memcpy(r->top[at], top, (size_t)n_top * sizeof *top);
}

static void process_output(request *r, const hd_seq_input *w, const hd_seq_output *c) {
    const int32_t first_scored = w->start + w->n - w->n_sample - w->n_prompt_logprobs + 1;
    const hd_prompt_logprobs *prompt = &c->prompt;
    const hd_step_tokens *step = &c->step;
    assert_int_equal(prompt->n, w->n_prompt_logprobs);
    for (int32_t k = 0; k < prompt->n; k++) {
        note(r, first_scored + k, prompt->logprobs[k], prompt->top + k * prompt->n_top,
             prompt->n_top);
    }
    r->status = c->status;
    r->steps++;
    r->ended = c->status != HD_OK;
    if (!w->n_sample) r->done += w->n;
    if (!w->n_sample || r->ended) return;
    assert_true(step->n_tokens >= 1 && step->n_tokens <= w->n_sample);
    r->done = r->n + step->n_tokens - 1;
    r->drafted += w->n_sample - 1;
    r->accepted += step->n_tokens - 1;
    for (int32_t k = 0; k < step->n_tokens && !r->ended; k++) {
        if (k + 1 < step->n_tokens) {
            assert_int_equal(step->tokens[k], w->tokens[w->n - w->n_sample + 1 + k]);
        }
        note(r, r->n, step->logprobs[k], step->top + k * step->n_top, step->n_top);
        r->text[r->n++] = step->tokens[k];
        r->ended = step->tokens[k] == EOS || r->n == r->most;
    }
    r->n_next = c->n_drafts;
    memcpy(r->drafts, c->drafts, sizeof r->drafts);
}

hd_status try_step(machine *m, request *requests, int32_t n, hd_err *err) {
    hd_seq_input inputs[SLOTS];
    hd_seq_output outputs[SLOTS];
    request *of[SLOTS];
    int32_t tokens[SLOTS][POSITIONS + HD_MAX_DRAFTS], n_inputs = 0;
    const hd_runner runner = hd_model_runner_interface(m->model_runner);
    for (int32_t i = 0; i < n; i++) {
        if (requests[i].ended) continue;
        of[n_inputs] = &requests[i];
        inputs[n_inputs] = plan(m, &requests[i], tokens[n_inputs]);
        m->rows += inputs[n_inputs++].n;
    }
    HD_TRY(runner.run(runner.ctx, NULL, 0, inputs, n_inputs, outputs, err));
    for (int32_t i = 0; i < n_inputs; i++) process_output(of[i], &inputs[i], &outputs[i]);
    return HD_OK;
}

void step(machine *m, request *requests, int32_t n) {
    hd_err err = {0};
    must(try_step(m, requests, n, &err), &err);
}

static bool any_runs(const request *requests, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (!requests[i].ended) return true;
    }
    return false;
}

void run_all(machine *m, request *requests, int32_t n) {
    while (any_runs(requests, n)) step(m, requests, n);
}
