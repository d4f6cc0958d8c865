/* route_record.c - hands the experts that the rows of a step chose to a recorder.
 *
 * The model keeps the choices of a step. Those of eager passes are downloaded; those of a graph
 * step are mirrored to host memory by the graph itself, if it was launched for a recorder. */
#include <string.h>

#include "base/checked.h"
#include "moe/recorder.h"
#include "runner/groups_internal.h"
#include "runner/model_runner_internal.h"

_Static_assert((int)HD_RECORD_PREFILL == HD_ROW_PREFILL &&
                   (int)HD_RECORD_DECODE == HD_ROW_DECODE &&
                   (int)HD_RECORD_VERIFY == HD_ROW_VERIFY,
               "rows of steps have the phases of records");

/* Layers with experts that a pass of the drafter runs; 0 if its rows choose another number of experts
 * than a record has. */
static int32_t draft_layers(const hd_model_runner *x) {
    const hd_model_spec *c = x->env.spec;
    int32_t n = 0;
    if (c->n_mtp && hd_layer_route(c, c->n_layers).top_k != c->route.top_k) return 0;
    for (int32_t l = 0; x->n_drafts && l < hd_model_n_draft_layers(c, x->env.weights); l++) {
        n += c->layers[c->n_layers + l].mlp != HD_MLP_DENSE;
    }
    return n;
}

static bool records_blocks(const hd_model_runner *x) {
    return x->env.spec->drafter == HD_DRAFTER_DSPARK && draft_layers(x) > 0;
}

/* Rows of the drafter in a graph step: those of the step and of every further draft, or blocks. */
static int64_t graph_draft_rows(const hd_model_runner *x, const runner_graph_shape *z) {
    if (records_blocks(x)) return z->n_drafts ? z->n * x->env.spec->dspark.block : 0;
    return z->n * (1 + z->n_drafts) + (z->n_drafts > 1 ? (z->n_drafts - 1) * z->n : 0);
}

/* Choices of a graph step: of its rows in all layers, then of its drafts. */
int64_t runner_n_choices(const hd_model_runner *x, const runner_graph_shape *z) {
    const int64_t drafts = draft_layers(x) * graph_draft_rows(x, z);
    return hd_model_n_choices(x->model, z->n * (1 + z->n_drafts)) +
           drafts * x->env.spec->route.top_k;
}

int64_t runner_most_choices(const hd_model_runner *x) {
    const int64_t rows = x->o.step_rows, draft = rows * draft_layers(x);
    const int64_t step = hd_model_n_choices(x->model, x->o.step_rows);
    return hd_max_i64(step, draft * x->env.spec->route.top_k);
}

/* ---- eager passes ---- */

/* Layers with experts of a pass. */
static int32_t layers_of(const hd_model_runner *x, runner_pass pass) {
    const int64_t of_row = hd_model_n_choices(x->model, 1);
    return pass == RUNNER_STEP ? (int32_t)(of_row / x->env.spec->route.top_k) : draft_layers(x);
}

static int64_t n_choices_of(hd_model_runner *x, runner_pass pass) {
    const int64_t rows = runner_batch_of(x, (int32_t)pass)->n_rows;
    return rows * layers_of(x, pass) * x->env.spec->route.top_k;
}

/* Where ranks divide the rows, each has the choices of some: they are summed over the ranks of the group. */
void runner_sum_choices(hd_model_runner *x, runner_pass pass) {
    const hd_batch *b = runner_batch_of(x, (int32_t)pass);
    const int64_t n = n_choices_of(x, pass);
    const int32_t layers = layers_of(x, pass);
    float *sums = (float *)(void *)x->choices;
    memset(sums, 0, (size_t)n * sizeof *sums);
    if (pass == RUNNER_STEP) x->choices_at = 0;
    x->choices_at = hd_model_own_choices(x->model, b, x->choices_at, layers, sums);
    if (hd_model_routes_all(x->model)) return;
    hd_comm_all_reduce(x->env.comm, x->env.stream,
                       &(hd_all_reduce_args){HD_GROUP_TP, hd_f32(sums), (int32_t)n});
}

static hd_status download(hd_model_runner *x, runner_pass pass, hd_err *err) {
    const int64_t n = n_choices_of(x, pass);
    if (hd_device_is_host(x->env.device)) {
        if (hd_model_routes_all(x->model)) {
            runner_sum_choices(x, pass);
        } else {
            runner_command_choices(x, pass);
        }
        HD_TRY(hd_stream_sync(x->env.stream, err));
        const float *sums = (const float *)(const void *)x->choices;
        for (int64_t i = 0; i < n; i++) x->choices[i] = (int32_t)sums[i];
        return HD_OK;
    }
    hd_stream_download(x->env.stream, x->choices, hd_model_choices(x->model) + x->choices_at,
                       (size_t)n * sizeof *x->choices);
    x->choices_at += n;
    return hd_stream_sync(x->env.stream, err);
}

/* Gets the choices of a pass, and adds every row that is not padding. */
static hd_status record_rows(hd_model_runner *x, runner_pass pass, hd_err *err) {
    const hd_batch *b = runner_batch_of(x, (int32_t)pass);
    const int32_t top_k = x->env.spec->route.top_k;
    const int64_t stride = (int64_t)b->n_rows * top_k;
    const bool draft = pass != RUNNER_STEP;
    HD_TRY(download(x, pass, err));
    for (int32_t r = 0; r < b->n_rows; r++) {
        if (b->host.phase[r] == HD_ROW_PADDING) continue;
        hd_recorder_row(
            x->recorder, draft ? HD_RECORD_DRAFT : (hd_record_phase)b->host.phase[r],
            b->host.tokens[r], b->host.pos[r], x->choices + (int64_t)r * top_k, stride);
    }
    return HD_OK;
}

/* A step that rebuilds windows computes other rows in every layer, which were recorded before; one that
 * replays the end of a prompt leaves rows out. */
static bool is_recorded(const hd_model_runner *x) {
    return x->recorder && x->choices && !hd_batch_rebuilds(&x->batch) &&
           !hd_batch_cuts_windows(&x->batch, x->env.spec->window);
}

hd_status runner_record_step(hd_model_runner *x, hd_err *err) {
    if (!is_recorded(x)) return HD_OK;
    x->choices_at = 0;
    return record_rows(x, RUNNER_STEP, err);
}

/* Blocks hold all drafts; they are computed with the first one. */
hd_status runner_record_drafts(hd_model_runner *x, int32_t place, int32_t n, hd_err *err) {
    const bool blocks = records_blocks(x), further = blocks || place > 0;
    if (!is_recorded(x) || !draft_layers(x)) return HD_OK;
    if (blocks ? place > 0 || n == 0 : further && n == 0) return HD_OK;
    return record_rows(x, further ? RUNNER_DRAFT_AGAIN : RUNNER_DRAFT, err);
}

/* ---- graph steps ---- */

/* The drafts of a sequence after the first one continue each other. There are none if they follow
 * a token that the sequence did not take. */
static void record_chain(hd_model_runner *x, const runner_inflight_step *f,
                         const hd_seq_input *w, const hd_seq_output *c,
                         const int32_t *choices) {
    const int32_t top_k = x->env.spec->route.top_k, n_tokens = c->step.n_tokens;
    for (int32_t k = 1; k < c->n_drafts; k++) {
        const int32_t token = k > 1 ? c->drafts[k - 2] : c->step.tokens[n_tokens - 1];
        hd_recorder_row(x->recorder, HD_RECORD_DRAFT, token, w->start + n_tokens - 1 + k,
                        choices + (int64_t)f->index[w->slot] * top_k, top_k);
        choices += (int64_t)f->shape.n * top_k;
    }
}

/* The block of a sequence that drafts. */
static void record_block(hd_model_runner *x, const runner_inflight_step *f,
                         const hd_seq_input *w, const hd_seq_output *c,
                         const int32_t *choices) {
    const hd_dspark_spec *d = &x->env.spec->dspark;
    const int32_t top_k = x->env.spec->route.top_k, n_tokens = c->step.n_tokens;
    const int64_t stride = (int64_t)f->shape.n * d->block * top_k;
    for (int32_t k = 0; c->n_drafts && k < d->block; k++) {
        const int64_t at = ((int64_t)f->index[w->slot] * d->block + k) * top_k;
        hd_recorder_row(x->recorder, HD_RECORD_DRAFT,
                        k ? d->filler : c->step.tokens[n_tokens - 1], w->start + n_tokens + k,
                        choices + at, stride);
    }
}

void runner_record_graph_rows(hd_model_runner *x, const runner_inflight_step *f,
                              const hd_seq_input *w, const hd_seq_output *c) {
    const int32_t top_k = x->env.spec->route.top_k, per_seq = 1 + f->shape.n_drafts;
    const int64_t stride = (int64_t)f->shape.n * per_seq * top_k;
    const int32_t *drafts = f->choices + hd_model_n_choices(x->model, f->shape.n * per_seq);
    const bool blocks = records_blocks(x), chains = !blocks && draft_layers(x) > 0;
    if (!x->recorder || !f->recorded) return;
    for (int32_t i = 0; i < w->n; i++) {
        const int64_t at = ((int64_t)f->index[w->slot] * per_seq + i) * top_k;
        hd_recorder_row(x->recorder, (hd_record_phase)runner_phase(w), w->tokens[i],
                        w->start + i, f->choices + at, stride);
        if (!chains) continue;
        hd_recorder_row(x->recorder, HD_RECORD_DRAFT, w->tokens[i], w->start + i, drafts + at,
                        stride);
    }
    if (chains) record_chain(x, f, w, c, drafts + stride);
    if (blocks) record_block(x, f, w, c, drafts);
}

bool runner_keeps_slots(const hd_model_runner *x) {
    const hd_shard *s = hd_weights_shard(x->env.weights);
    const int64_t n = x->env.spec->route.n_experts, slots = n ? hd_shard_slots(s) : 0;
    return hd_device_is_host(x->env.device) && slots > n && (slots + 1) * n < HD_MOST_CHOICE;
}

bool hd_model_runner_records_rows(const hd_model_runner *x) {
    return hd_model_routes_all(x->model) || hd_device_is_host(x->env.device);
}

void hd_model_runner_record(hd_model_runner *x, hd_recorder *r) {
    x->recorder = r;
}
