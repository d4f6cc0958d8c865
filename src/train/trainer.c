/* trainer.c - micro-batches of complete sequences through model and backward pass. */
#include "train/trainer.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "kv/replay.h"
#include "model/backward.h"

enum { MAX_SEQS = 64, LOGIT_ROWS = 64 };

struct hd_trainer {
    hd_trainer_options o;
    hd_ops ops;
    hd_backward_ops back_ops;
    hd_device *device;
    hd_stream *stream;
    hd_stream *update_stream; /* the optimizer's, with scratch of its own */
    hd_model *model;
    hd_backward *backward;
    hd_kv *kv;
    hd_batch batch;
    hd_parameters *parameters;
    int64_t steps;
    int32_t page_tokens, seq_pages;
    int32_t *pages; /* [seq_pages] */
    /* of the batch's logits rows, [rows] */
    int32_t *target;
    float *factor, *entropy_factor, *temperature, *logprob, *entropy;
    /* of the MTP layer's, [rows]; n_drafts of this batch */
    int32_t *draft_rows, *draft_target;
    float *draft_factor, *draft_logprob;
    int32_t n_drafts;
    int32_t *routes; /* [layers, rows of the batch, top_k] */
    int32_t *keys;   /* [layers with an indexer, rows, index_topk]; NULL: never given */
    /* [layers, experts] rows that chose an expert: since the last step, and before a batch */
    int64_t *selected, *selected_before;
    int64_t n_selected;
};

/* ---- opening ---- */

static hd_status open_model(hd_trainer *t, hd_err *err) {
    const hd_trainer_options *o = &t->o;
    const hd_ops_options ops = {.cpu = {.n_threads = o->threads}, .precision = HD_EXACT};
    HD_TRY(hd_ops_open(&t->ops, &t->device, "cpu", &ops, err));
    HD_TRY(hd_stream_open(&t->stream, t->device, err));
    HD_TRY(hd_stream_open(&t->update_stream, t->device, err));
    const hd_model_env env = {.spec = o->spec,
                              .weights = o->weights,
                              .ops = &t->ops,
                              .device = t->device,
                              .stream = t->stream};
    const hd_model_limits limits = {
        .rows = o->rows,
        .logits = hd_min_i32(LOGIT_ROWS, o->rows),
        .positions = o->context,
    };
    HD_TRY(hd_model_open(&t->model, &env, &limits, 1, err));
    hd_backward_init_cpu(&t->back_ops, hd_cpu_features());
    return hd_backward_open(&t->backward, t->model, &t->back_ops, err);
}

static hd_status open_pages(hd_trainer *t, hd_err *err) {
    const hd_trainer_options *o = &t->o;
    const int32_t n_layers = o->spec->n_layers + hd_weights_n_mtp(o->weights);
    t->page_tokens = hd_kv_shape_of(o->spec).page_tokens;
    t->seq_pages = (int32_t)hd_ceil_div(o->context, t->page_tokens);
    const int32_t n_pages = o->rows / t->page_tokens + MAX_SEQS;
    const hd_kv_options kv = {
        .n_pages = {n_pages, n_pages}
    };
    const hd_batch_limits limits = {o->rows, MAX_SEQS, t->seq_pages};
    HD_TRY(hd_kv_open(&t->kv, o->spec, n_layers, t->device, &kv, err));
    return hd_batch_open(&t->batch, &limits, t->device, err);
}

static hd_status open_rows(hd_trainer *t, hd_err *err) {
    const size_t n = (size_t)t->o.rows;
    t->pages = calloc((size_t)t->seq_pages, sizeof *t->pages);
    t->target = calloc(3 * n, sizeof *t->target);
    t->factor = calloc(7 * n, sizeof *t->factor);
    t->n_selected = t->o.balance > 0.0 ? (int64_t)(t->o.spec->n_layers + t->o.spec->n_mtp) *
                                             t->o.spec->route.n_experts
                                       : 0;
    t->selected = calloc((size_t)t->n_selected + 1, sizeof *t->selected);
    t->selected_before = calloc((size_t)t->n_selected + 1, sizeof *t->selected_before);
    if (!t->pages || !t->target || !t->factor || !t->selected || !t->selected_before) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a micro-batch of %d rows", t->o.rows);
    }
    t->entropy_factor = t->factor + n;
    t->temperature = t->factor + 2 * n;
    t->logprob = t->factor + 3 * n;
    t->entropy = t->factor + 4 * n;
    t->routes = calloc(n * (size_t)t->o.spec->n_layers,
                       (size_t)(t->o.spec->route.top_k + 1) * sizeof *t->routes);
    if (!t->routes) return HD_FAIL(err, HD_ENOMEM, "no memory for a micro-batch");
    t->draft_factor = t->factor + 5 * n;
    t->draft_logprob = t->factor + 6 * n;
    t->draft_rows = t->target + n;
    t->draft_target = t->target + 2 * n;
    return HD_OK;
}

static hd_status open_all(hd_trainer *t, hd_err *err) {
    const hd_trainer_options *o = &t->o;
    int32_t n;
    HD_TRY(open_model(t, err));
    HD_TRY(open_pages(t, err));
    HD_TRY(open_rows(t, err));
    if (o->scores_only) return HD_OK;
    const hd_parameters_options parameters = {.frozen = o->frozen,
                                              .matrices = o->matrices,
                                              .drafts = o->drafts,
                                              .biases = o->balance > 0.0};
    HD_TRY(
        hd_parameters_open(&t->parameters, o->spec, o->weights, t->device, &parameters, err));
    const hd_parameter *all = hd_parameters_all(t->parameters, &n);
    return hd_stream_reserve(t->update_stream, hd_optimizer_scratch(all, n), err);
}

hd_status hd_trainer_open(hd_trainer **out, const hd_trainer_options *o, hd_err *err) {
    *out = NULL;
    if (o->context < 2 || o->rows < o->context - 1) {
        return HD_FAIL(err, HD_EINVAL,
                       "micro-batches of %d rows cannot hold a sequence of %d tokens", o->rows,
                       o->context);
    }
    const bool has_mtp = o->spec->drafter == HD_DRAFTER_MTP && hd_weights_n_mtp(o->weights) > 0;
    if (o->drafts && !has_mtp) {
        return HD_FAIL(err, HD_EINVAL, "this model has no MTP layer that could be trained");
    }
    hd_trainer *t = calloc(1, sizeof *t);
    if (!t) return HD_FAIL(err, HD_ENOMEM, "no memory for a trainer");
    t->o = *o;
    const hd_status st = open_all(t, err);
    if (st == HD_OK) {
        *out = t;
    } else {
        hd_trainer_close(t);
    }
    return st;
}

void hd_trainer_close(hd_trainer *t) {
    if (!t) return;
    hd_parameters_close(t->parameters);
    hd_batch_close(&t->batch);
    hd_kv_close(t->kv);
    hd_backward_close(t->backward);
    hd_model_close(t->model);
    hd_stream_close(t->update_stream);
    hd_stream_close(t->stream);
    hd_device_close(t->device);
    free(t->pages);
    free(t->target);
    free(t->factor);
    free(t->routes);
    free(t->keys);
    free(t->selected);
    free(t->selected_before);
    free(t);
}

/* ---- micro-batches ---- */

/* The MTP layer's row t predicts token t + 2 of its sequence, whose first row is row0. */
static void add_drafts(hd_trainer *t, const hd_train_sequence *s, int32_t row0) {
    for (int32_t i = s->first < 2 ? 2 : s->first; s->draft_factor && i < s->n; i++) {
        const int32_t at = t->n_drafts++;
        t->draft_rows[at] = row0 + i - 2;
        t->draft_target[at] = s->tokens[i];
        t->draft_factor[at] = s->draft_factor[i - s->first];
    }
}

/* Adds a sequence; its pages are the next ones from *page on. */
static void add_sequence(hd_trainer *t, const hd_train_sequence *s, int32_t *page) {
    const int32_t rows = s->n - 1, n_pages = (int32_t)hd_ceil_div(rows, t->page_tokens);
    const int32_t at = t->batch.n_logits, n = s->n - s->first;
    if (t->o.drafts) add_drafts(t, s, t->batch.n_rows);
    for (int32_t i = 0; i < n_pages; i++) t->pages[i] = (*page)++;
    for (int32_t i = 0; i < n; i++) {
        t->target[at + i] = s->tokens[s->first + i];
        t->temperature[at + i] = s->temperature > 0.0f ? s->temperature : 1.0f;
        t->factor[at + i] = s->factor ? s->factor[i] : 0.0f;
        t->entropy_factor[at + i] = s->entropy_factor ? s->entropy_factor[i] : 0.0f;
    }
    hd_batch_add(&t->batch, &(hd_batch_seq){
                                .tokens = s->tokens,
                                .n = rows,
                                .after = s->tokens[rows],
                                .n_logits = n,
                                .pages = {t->pages, t->pages},
                                .n_pages = n_pages
    });
}

/* Fills the batch with sequences from the front of s[n]; returns how many. */
static int32_t fill(hd_trainer *t, const hd_train_sequence *s, int32_t n) {
    int32_t page = 0, rows = 0, i = 0;
    t->n_drafts = 0;
    hd_batch_reset(&t->batch);
    for (; i < n && i < MAX_SEQS && rows + s[i].n - 1 <= t->o.rows; i++) {
        rows += s[i].n - 1;
        add_sequence(t, &s[i], &page);
    }
    hd_batch_upload(&t->batch, t->stream);
    return i;
}

/* Puts choices [n, layers, top_k] of a sequence behind those of `before` rows of the batch, layer by
 * layer. */
static void place_choices(const hd_trainer *t, int32_t *to, const int32_t *from, int32_t layers,
                          int32_t top_k, int64_t before, int32_t n) {
    const int64_t rows = t->batch.n_rows;
    for (int32_t r = 0; r < n; r++) {
        for (int32_t l = 0; l < layers; l++) {
            memcpy(to + (l * rows + before + r) * top_k,
                   from + ((int64_t)r * layers + l) * top_k, (size_t)top_k * sizeof *to);
        }
    }
}

static void set_replays(const hd_trainer *t, const hd_train_sequence *s, int32_t n) {
    const hd_model_spec *c = t->o.spec;
    const hd_replay_shape keys = hd_replay_shape_of(c, HD_REPLAY_KEYS);
    for (int32_t i = 0, row = 0; i < n; row += s[i++].n - 1) {
        if (s[i].routes) {
            place_choices(t, t->routes, s[i].routes, c->n_layers, c->route.top_k, row,
                          s[i].n - 1);
        }
        if (s[i].keys) {
            place_choices(t, t->keys, s[i].keys, keys.layers, keys.top_k, row, s[i].n - 1);
        }
    }
}

static void give_drafts(const hd_trainer *t, const hd_train_sequence *s, int32_t n) {
    int32_t at = 0;
    for (int32_t k = 0; k < n; k++) {
        for (int32_t i = s[k].first < 2 ? 2 : s[k].first; s[k].draft_factor && i < s[k].n;
             i++) {
            s[k].draft_logprob[i - s[k].first] = t->draft_logprob[at++];
        }
    }
}

static void give_results(const hd_trainer *t, const hd_train_sequence *s, int32_t n) {
    const float *logprob = t->logprob, *entropy = t->entropy;
    for (int32_t i = 0; i < n; i++) {
        const int32_t tokens = s[i].n - s[i].first;
        memcpy(s[i].logprob, logprob, (size_t)tokens * sizeof *logprob);
        memcpy(s[i].entropy, entropy, (size_t)tokens * sizeof *entropy);
        logprob += tokens;
        entropy += tokens;
    }
}

static hd_status check(const hd_trainer *t, const hd_train_sequence *s, hd_err *err) {
    if (s->n < 2 || s->n > t->o.context || s->first < 1 || s->first >= s->n) {
        return HD_FAIL(err, HD_EINVAL, "a sequence of %d tokens; must be 2 to %d", s->n,
                       t->o.context);
    }
    for (int32_t i = 0; i < s->n; i++) {
        if (s->tokens[i] >= 0 && s->tokens[i] < t->o.spec->vocab) continue;
        return HD_FAIL(err, HD_EINVAL, "token %d; the model knows 0 to %d", s->tokens[i],
                       t->o.spec->vocab - 1);
    }
    return HD_OK;
}

/* Adds the rows that selected each expert since the last call; the backward pass selects them a second
 * time. */
static void count_selected(hd_trainer *t, bool adds) {
    const int64_t *rows = hd_model_expert_rows(t->model);
    const int64_t main = (int64_t)t->o.spec->n_layers * t->o.spec->route.n_experts;
    for (int64_t i = 0; i < t->n_selected; i++) {
        int64_t now = 0;
        if (i < main) {
            for (int p = 0; p < HD_N_ROW_PHASES; p++) now += rows[p * main + i];
        } else {
            now = rows[HD_N_ROW_PHASES * main + i - main];
        }
        if (adds) t->selected[i] += now - t->selected_before[i];
        t->selected_before[i] = now;
    }
}

static hd_status check_routes(const hd_trainer *t, const hd_train_sequence *s, bool given,
                              hd_err *err) {
    const int32_t layers = t->o.spec->n_layers, top_k = t->o.spec->route.top_k;
    if ((s->routes != NULL) != given) {
        return HD_FAIL(err, HD_EINVAL, "some sequences have routes and some have none");
    }
    for (int64_t i = 0; given && i < (int64_t)(s->n - 1) * layers * top_k; i++) {
        const bool routed = t->o.spec->layers[i / top_k % layers].mlp != HD_MLP_DENSE;
        if (!routed || (s->routes[i] >= 0 && s->routes[i] < t->o.spec->route.n_experts))
            continue;
        return HD_FAIL(err, HD_EINVAL, "expert %d is none of the model's", s->routes[i]);
    }
    return HD_OK;
}

/* A row's keys: as many as it sees, at most top_k, in ascending order, then -1. */
static bool are_keys(const int32_t *keys, int32_t top_k, int32_t n_seen) {
    const int32_t n = hd_min_i32(top_k, n_seen);
    for (int32_t i = 0; i < top_k; i++) {
        const int32_t least = i > 0 ? keys[i - 1] + 1 : 0;
        if (i < n ? keys[i] < least || keys[i] >= n_seen : keys[i] != -1) return false;
    }
    return true;
}

static hd_status check_keys(const hd_trainer *t, const hd_train_sequence *s, bool given,
                            hd_err *err) {
    const hd_model_spec *c = t->o.spec;
    const hd_replay_shape shape = hd_replay_shape_of(c, HD_REPLAY_KEYS);
    if ((s->keys != NULL) != given) {
        return HD_FAIL(err, HD_EINVAL, "some sequences have keys and some have none");
    }
    if (given && !shape.row_bytes) {
        return HD_FAIL(err, HD_EINVAL, "keys are given, but this model has no indexer");
    }
    for (int32_t l = 0; given && l < c->n_layers; l++) {
        const int32_t at = hd_replay_layer(c, HD_REPLAY_KEYS, l);
        const int32_t ratio = hd_max_i32(c->layers[l].compress_ratio, 1);
        for (int32_t r = 0; at >= 0 && r < s->n - 1; r++) {
            const int64_t row = (int64_t)r * shape.layers + at;
            if (are_keys(s->keys + row * shape.top_k, shape.top_k, (r + 1) / ratio)) continue;
            return HD_FAIL(err, HD_EINVAL, "layer %d, position %d: keys that cannot be", l, r);
        }
    }
    return HD_OK;
}

/* Memory for keys, when the first ones come. */
static hd_status open_keys(hd_trainer *t, hd_err *err) {
    const hd_replay_shape shape = hd_replay_shape_of(t->o.spec, HD_REPLAY_KEYS);
    const size_t row = (size_t)shape.layers * (size_t)shape.top_k;
    if (!t->keys) t->keys = calloc((size_t)t->o.rows, row * sizeof *t->keys);
    return t->keys ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for keys of a micro-batch");
}

static hd_status run(hd_trainer *t, const hd_train_sequence *s, int32_t n,
                     const hd_gradients *g, hd_err *err) {
    hd_loss loss = {.routes = n > 0 && s->routes ? t->routes : NULL,
                    .target = t->target,
                    .factor = t->factor,
                    .entropy_factor = t->entropy_factor,
                    .temperature = t->temperature,
                    .logprob = t->logprob,
                    .entropy = t->entropy};
    for (int32_t i = 0; i < n; i++) {
        HD_TRY(check(t, &s[i], err));
        HD_TRY(check_routes(t, &s[i], s->routes != NULL, err));
        HD_TRY(check_keys(t, &s[i], s->keys != NULL, err));
    }
    if (n > 0 && s->keys) {
        HD_TRY(open_keys(t, err));
        loss.keys = t->keys;
    }
    for (int32_t done = 0, now; done < n; done += now) {
        now = fill(t, s + done, n - done);
        set_replays(t, s + done, now);
        if (g) {
            count_selected(t, false);
            loss.drafts = (hd_draft_loss){.rows = t->draft_rows,
                                          .target = t->draft_target,
                                          .factor = t->draft_factor,
                                          .logprob = t->draft_logprob,
                                          .n = t->n_drafts,
                                          .detached = t->o.detached};
            hd_backward_step(t->backward, t->kv, &t->batch, &loss, g);
        } else {
            hd_backward_score(t->backward, t->kv, &t->batch, &loss);
        }
        HD_TRY(hd_stream_sync(t->stream, err));
        give_results(t, s + done, now);
        if (g) {
            give_drafts(t, s + done, now);
            count_selected(t, true);
        }
    }
    return HD_OK;
}

hd_status hd_trainer_score(hd_trainer *t, const hd_train_sequence *s, int32_t n, hd_err *err) {
    return run(t, s, n, NULL, err);
}

hd_status hd_trainer_accumulate(hd_trainer *t, const hd_train_sequence *s, int32_t n,
                                hd_err *err) {
    return run(t, s, n, hd_parameters_gradients(t->parameters), err);
}

/* ---- steps ---- */

hd_status hd_trainer_step(hd_trainer *t, hd_weights_update **u, hd_optimizer_report *report,
                          hd_err *err) {
    int32_t n;
    *u = NULL;
    const hd_parameter *all = hd_parameters_all(t->parameters, &n);
    hd_parameters_join_drafts(t->parameters);
    hd_optimizer_step(&t->o.optimizer, all, n, t->steps, t->update_stream, report);
    hd_parameters_clear_gradients(t->parameters);
    if (t->n_selected && !report->skipped)
        hd_parameters_balance(t->parameters, t->selected, t->o.balance);
    memset(t->selected, 0, (size_t)t->n_selected * sizeof *t->selected);
    t->steps++;
    return report->skipped ? HD_OK : hd_parameters_update(t->parameters, u, err);
}

hd_replay_count hd_trainer_replayed(const hd_trainer *t) {
    return hd_backward_replayed(t->backward);
}

hd_parameters *hd_trainer_parameters(const hd_trainer *t) {
    return t->parameters;
}

int64_t hd_trainer_steps(const hd_trainer *t) {
    return t->steps;
}

void hd_trainer_set_steps(hd_trainer *t, int64_t steps) {
    t->steps = steps;
}

hd_stream *hd_trainer_stream(const hd_trainer *t) {
    return t->stream;
}
