/* trainer.c - one rank: micro-batches of complete sequences through model and backward pass. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "kv/replay.h"
#include "model/backward.h"
#include "train/trainer_internal.h"

enum { MIN_SEQS = 4, MAX_SEQS = 64, LOGIT_ROWS = 64, GPU_LOGITS = 64 << 20 };

enum { INPUTS = 7, RESULTS = 4 }; /* of loss_rows */

/* ---- opening ---- */

static void init_backward_ops(hd_trainer *t) {
#ifdef HD_CUDA
    if (!hd_device_is_host(t->device)) {
        hd_backward_init_cuda(&t->back_ops);
        return;
    }
#endif
    hd_backward_init_cpu(&t->back_ops, hd_cpu_features());
}

static int32_t default_rows(const hd_trainer *t) {
    return hd_device_is_host(t->device) ? HD_TRAIN_ROWS : HD_TRAIN_GPU_ROWS;
}

static int64_t keep_bytes(const hd_trainer *t) {
    if (t->o.scores_only) return 0;
    if (t->o.keep_bytes >= 0) return t->o.keep_bytes;
    return hd_keep_bytes(hd_device_is_host(t->device) ? HD_KEEP_GIB : HD_KEEP_GPU_GIB);
}

/* Rows of logits that exist at once; on a GPU as many as fit. */
static int32_t logit_rows(const hd_trainer *t) {
    if (hd_device_is_host(t->device)) return hd_min_i32(LOGIT_ROWS, t->o.rows);
    const int32_t fit = GPU_LOGITS / t->o.spec->vocab;
    return hd_min_i32(hd_max_i32(HD_SUM_ROWS, fit), t->o.rows); /* a piece is not divided */
}

static hd_status open_model(hd_trainer *t, hd_err *err) {
    hd_trainer_options *o = &t->o;
    const hd_ops_options ops = {
        .cpu = {.n_threads = o->threads, .untouched = o->shapes_only},
        .precision = HD_EXACT,
        .kv_type = o->kv_type
    };
    HD_TRY(hd_ops_open(&t->ops, &t->device, o->backend ? o->backend : "cpu", &ops, err));
    if (hd_device_cuda_path(t->device) == HD_CUDA_GENERIC) { /* too little shared memory */
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "training on a GPU is for compute capability 9.0, not for other GPUs");
    }
    if (!o->rows) o->rows = hd_max_i32(default_rows(t), o->context - 1);
    HD_TRY(hd_stream_open(&t->stream, t->device, err));
    if (o->upload) HD_TRY(hd_weights_upload(o->upload, t->device, t->stream, NULL, err));
    const hd_model_env env = {.spec = o->spec,
                              .weights = o->weights,
                              .ops = &t->ops,
                              .device = t->device,
                              .stream = t->stream};
    const hd_model_limits limits = {
        .rows = o->rows,
        .logits = logit_rows(t),
        .positions = o->context,
    };
    HD_TRY(hd_model_open(&t->model, &env, &limits, err));
    init_backward_ops(t);
    const hd_backward_options backward = {
        .keep_bytes = keep_bytes(t), .drafts = o->drafts, .indexer = o->indexer > 0.0};
    return hd_backward_open(&t->backward, t->model, &t->back_ops, &backward, err);
}

/* Sequences of a micro-batch: each may leave a page nearly empty, so there are no more than full pages. */
static int32_t most_seqs(const hd_trainer *t) {
    return hd_min_i32(hd_max_i32(t->o.rows / t->page_tokens, MIN_SEQS), MAX_SEQS);
}

int32_t trainer_pages(const hd_trainer *t) {
    return t->o.rows / t->page_tokens + most_seqs(t);
}

int32_t trainer_layers(const hd_trainer *t) {
    return t->o.spec->n_layers + (t->o.drafts ? hd_weights_n_mtp(t->o.weights) : 0);
}

static hd_status open_pages(hd_trainer *t, hd_err *err) {
    const hd_trainer_options *o = &t->o;
    t->page_tokens = hd_kv_shape_of(o->spec).page_tokens;
    t->seq_pages = (int32_t)hd_ceil_div(o->context, t->page_tokens);
    const int32_t n_pages = trainer_pages(t);
    const hd_kv_options kv = {
        .n_pages = {n_pages, n_pages},
          .entry_type = t->ops.kv_type
    };
    const hd_batch_limits limits = {o->rows, most_seqs(t), t->seq_pages};
    HD_TRY(hd_kv_open(&t->kv, o->spec, trainer_layers(t), t->device, &kv, err));
    return hd_batch_open(&t->batch, &limits, t->device, err);
}

static loss_rows divided(void *block, int64_t n) {
    int32_t *rows = block;
    void *behind = rows + 3 * n;
    float *numbers = behind;
    return (loss_rows){rows,
                       rows + n,
                       rows + 2 * n,
                       numbers,
                       numbers + n,
                       numbers + 2 * n,
                       numbers + 3 * n,
                       numbers + 4 * n,
                       numbers + 5 * n,
                       numbers + 6 * n,
                       numbers + 7 * n};
}

static hd_status open_loss(hd_trainer *t, hd_err *err) {
    const size_t bytes = (INPUTS + RESULTS) * (size_t)t->o.rows * sizeof(float);
    void *host, *device;
    HD_TRY(hd_device_alloc_host(t->device, &host, bytes, "rows of the loss", err));
    t->in = divided(host, t->o.rows);
    HD_TRY(hd_device_alloc(t->device, &device, bytes, "rows of the loss", err));
    t->at = divided(device, t->o.rows);
    return HD_OK;
}

static hd_status open_rows(hd_trainer *t, hd_err *err) {
    const size_t n = (size_t)t->o.rows;
    HD_TRY(open_loss(t, err));
    t->pages = calloc((size_t)t->seq_pages, sizeof *t->pages);
    t->n_selected = t->o.balance > 0.0 ? (int64_t)(t->o.spec->n_layers + t->o.spec->n_mtp) *
                                             t->o.spec->route.n_experts
                                       : 0;
    t->selected = calloc((size_t)t->n_selected + 1, sizeof *t->selected);
    t->selected_before = calloc((size_t)t->n_selected + 1, sizeof *t->selected_before);
    t->expert_rows = calloc((size_t)hd_model_n_expert_rows(t->o.spec) + 1, sizeof(int64_t));
    if (!t->pages || !t->selected || !t->selected_before || !t->expert_rows) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a micro-batch of %d rows", t->o.rows);
    }
    t->routes = calloc(n * (size_t)t->o.spec->n_layers,
                       (size_t)(t->o.spec->route.top_k + 1) * sizeof *t->routes);
    return t->routes ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a micro-batch");
}

/* The rank's end of the exchanges with the others. */
static hd_status open_ranks(hd_trainer *t, hd_comm_local *world, hd_err *err) {
    t->ranks = (train_ranks){t->o.comm, t->stream};
    if (world) {
        HD_TRY(hd_comm_local_join(world, t->o.rank, t->device, t->stream, &t->ops,
                                  &t->ranks.comm, err));
    }
    t->replayed = calloc((size_t)t->o.n_ranks + 1, sizeof *t->replayed);
    return t->replayed ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for a trainer");
}

static hd_status open_optimizer(hd_trainer *t, hd_err *err) {
    hd_optimizer_env *e = &t->optimizer;
    void *sums, *host_sums;
    int64_t elements;
    int32_t n;
    const hd_parameter *all = hd_parameters_all(t->parameters, &n);
    hd_parameters_gradient_slice(t->parameters, &elements);
    const size_t bytes = (size_t)hd_optimizer_sums(elements) * sizeof *e->sums;
    e->ops = &t->back_ops;
    HD_TRY(hd_stream_open(&e->stream, t->device, err));
    HD_TRY(hd_device_alloc(t->device, &sums, bytes, "sums of gradients", err));
    e->sums = sums;
    HD_TRY(hd_device_alloc_host(t->device, &host_sums, bytes, "sums of gradients", err));
    e->host_sums = host_sums;
    return hd_optimizer_reserve(e->stream, hd_device_is_host(t->device), all, n, err);
}

static hd_status open_all(hd_trainer *t, hd_comm_local *world, hd_err *err) {
    const hd_trainer_options *o = &t->o;
    HD_TRY(open_model(t, err));
    HD_TRY(open_ranks(t, world, err));
    HD_TRY(open_pages(t, err));
    HD_TRY(open_rows(t, err));
    if (o->scores_only) return HD_OK;
    const hd_parameters_options parameters = {.frozen = o->frozen,
                                              .matrices = o->matrices,
                                              .threads = o->threads,
                                              .drafts = o->drafts,
                                              .indexer = o->indexer > 0.0,
                                              .shapes_only =
                                                  o->shapes_only || o->gradients_only,
                                              .biases = o->balance > 0.0,
                                              .rank = o->rank,
                                              .n_ranks = o->n_ranks};
    HD_TRY(hd_parameters_open(&t->parameters, o->spec, o->weights, t->device, t->stream,
                              &t->back_ops, &parameters, err));
    return open_optimizer(t, err);
}

hd_status trainer_open_rank(hd_trainer **out, const hd_trainer_options *o, hd_comm_local *world,
                            hd_err *err) {
    *out = NULL;
    if (o->context < 2 || (o->rows && o->rows < o->context - 1)) {
        return HD_FAIL(err, HD_EINVAL,
                       "micro-batches of %d rows cannot hold a sequence of %d tokens", o->rows,
                       o->context);
    }
    const bool has_mtp = o->spec->drafter == HD_DRAFTER_MTP && hd_weights_n_mtp(o->weights) > 0;
    if (o->drafts && !has_mtp) {
        return HD_FAIL(err, HD_EINVAL, "this model has no MTP layer that could be trained");
    }
    if (o->indexer > 0.0 && o->n_ranks > 1) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "--indexer-loss: indexers are trained by one rank only");
    }
    hd_trainer *t = calloc(1, sizeof *t);
    if (!t) return HD_FAIL(err, HD_ENOMEM, "no memory for a trainer");
    t->o = *o;
    if (o->n_ranks > 1 && !o->comm) t->o.threads = train_crew_threads(o);
    const hd_status st = open_all(t, world, err);
    if (st == HD_OK) {
        *out = t;
    } else {
        hd_trainer_close(t);
    }
    return st;
}

hd_status hd_trainer_open(hd_trainer **out, const hd_trainer_options *o, hd_err *err) {
    train_crew *crew = NULL;
    if (o->n_ranks > 1 && !o->comm) HD_TRY(train_crew_open(&crew, o, err));
    hd_status st = trainer_open_rank(out, o, train_crew_world(crew), err);
    if (st != HD_OK) {
        train_crew_abort(crew);
        train_crew_close(crew);
        return st;
    }
    (*out)->crew = crew;
    if (o->rank) return HD_OK; /* hd_trainer_follow() waits */
    st = trainer_await_ranks(*out, err);
    if (st == HD_OK) return HD_OK;
    hd_trainer_close(*out);
    *out = NULL;
    return st;
}

void hd_trainer_close(hd_trainer *t) {
    if (!t) return;
    trainer_dismiss(t);
    train_crew_close(t->crew);
    hd_parameters_close(t->parameters);
    hd_batch_close(&t->batch);
    hd_kv_close(t->kv);
    hd_backward_close(t->backward);
    hd_model_close(t->model);
    hd_stream_close(t->optimizer.stream);
    hd_stream_close(t->stream);
    if (t->device) {
        hd_device_release(t->device, t->optimizer.sums);
        hd_device_release(t->device, t->optimizer.host_sums);
        hd_device_release(t->device, t->in.target);
        hd_device_release(t->device, t->at.target);
    }
    hd_device_close(t->device);
    free(t->pages);
    free(t->expert_rows);
    free(t->routes);
    free(t->keys);
    free(t->selected);
    free(t->selected_before);
    free(t->replayed);
    free(t);
}

/* ---- micro-batches ---- */

/* The MTP layer's row t predicts token t + 2 of its sequence, whose first row is row0. */
static void add_drafts(hd_trainer *t, const hd_train_sequence *s, int32_t row0) {
    for (int32_t i = s->first < 2 ? 2 : s->first; s->draft_factor && i < s->n; i++) {
        const int32_t at = t->n_drafts++;
        t->in.draft_rows[at] = row0 + i - 2;
        t->in.draft_target[at] = s->tokens[i];
        t->in.draft_factor[at] = s->draft_factor[i - s->first];
    }
}

/* Adds a sequence; its pages are the next ones from *page on. */
static void add_sequence(hd_trainer *t, const hd_train_sequence *s, int32_t *page) {
    const int32_t rows = s->n - 1, n_pages = (int32_t)hd_ceil_div(rows, t->page_tokens);
    const int32_t at = t->batch.n_logits, n = s->n - s->first;
    if (t->o.drafts) add_drafts(t, s, t->batch.n_rows);
    for (int32_t i = 0; i < n_pages; i++) t->pages[i] = (*page)++;
    for (int32_t i = 0; i < n; i++) {
        t->in.target[at + i] = s->tokens[s->first + i];
        t->in.temperature[at + i] = s->temperature > 0.0f ? s->temperature : 1.0f;
        t->in.factor[at + i] = s->factor ? s->factor[i] : 0.0f;
        t->in.entropy_factor[at + i] = s->entropy_factor ? s->entropy_factor[i] : 0.0f;
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
    const int32_t most = most_seqs(t);
    int32_t page = 0, rows = 0, i = 0;
    t->n_drafts = 0;
    hd_batch_reset(&t->batch);
    for (; i < n && i < most && rows + s[i].n - 1 <= t->o.rows; i++) {
        rows += s[i].n - 1;
        add_sequence(t, &s[i], &page);
    }
    hd_batch_upload(&t->batch, t->stream);
    hd_stream_upload(t->stream, t->at.target, t->in.target,
                     INPUTS * (size_t)t->o.rows * sizeof *t->in.target);
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
            s[k].draft_logprob[i - s[k].first] = t->in.draft_logprob[at++];
        }
    }
}

static void give_results(const hd_trainer *t, const hd_train_sequence *s, int32_t n) {
    const float *logprob = t->in.logprob, *entropy = t->in.entropy;
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

/* Adds the rows that selected each expert since the last call. The backward pass selects them a second
 * time in blocks that are not kept: only the shares of a layer's experts mean something. */
static hd_status count_selected(hd_trainer *t, bool adds, hd_err *err) {
    const int64_t *rows = t->expert_rows;
    if (t->n_selected == 0) return HD_OK;
    hd_stream_download(t->stream, t->expert_rows, hd_model_expert_rows(t->model),
                       (size_t)hd_model_n_expert_rows(t->o.spec) * sizeof *rows);
    HD_TRY(hd_stream_sync(t->stream, err));
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
    return HD_OK;
}

/* Choices are compared with the routers' own on the host. */
static hd_status check_replay(const hd_trainer *t, const hd_train_sequence *s, hd_err *err) {
    if ((!s->routes && !s->keys) || hd_device_is_host(t->device)) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED, "given experts and keys are for backend cpu");
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

hd_status trainer_check(const hd_trainer *t, const hd_train_sequence *s, int32_t n,
                        hd_err *err) {
    for (int32_t i = 0; i < n; i++) {
        HD_TRY(check(t, &s[i], err));
        HD_TRY(check_replay(t, &s[i], err));
        HD_TRY(check_routes(t, &s[i], s->routes != NULL, err));
        HD_TRY(check_keys(t, &s[i], s->keys != NULL, err));
    }
    return HD_OK;
}

static int64_t rows_of(const hd_train_sequence *s, int32_t n) {
    int64_t rows = 0;
    for (int32_t i = 0; i < n; i++) rows += s[i].n - 1;
    return rows;
}

/* The indexers' divergence in this batch. */
static void add_divergence(hd_trainer *t) {
    const int32_t n = t->o.indexer > 0.0 ? t->batch.n_rows : 0;
    for (int32_t r = 0; r < n; r++) t->divergence += (double)t->in.divergence[r];
    t->divergence_rows += n;
}

double hd_trainer_take_divergence(hd_trainer *t) {
    const double mean = t->divergence / (double)hd_max_i64(t->divergence_rows, 1);
    t->divergence = 0.0;
    t->divergence_rows = 0;
    return mean;
}

hd_status trainer_run(hd_trainer *t, const hd_train_sequence *s, int32_t n, bool accumulates,
                      hd_err *err) {
    const hd_gradients *g = accumulates ? hd_parameters_gradients(t->parameters) : NULL;
    hd_loss loss = {.routes = n > 0 && s->routes ? t->routes : NULL,
                    .target = t->at.target,
                    .factor = t->at.factor,
                    .entropy_factor = t->at.entropy_factor,
                    .temperature = t->at.temperature,
                    .logprob = t->at.logprob,
                    .entropy = t->at.entropy,
                    .divergence = t->o.indexer > 0.0 ? t->at.divergence : NULL};
    if (g && n > 0) loss.indexer = (float)(t->o.indexer / (double)rows_of(s, n));
    if (n > 0 && s->keys) {
        HD_TRY(open_keys(t, err));
        loss.keys = t->keys;
    }
    for (int32_t done = 0, now; done < n; done += now) {
        now = fill(t, s + done, n - done);
        set_replays(t, s + done, now);
        if (g) {
            HD_TRY(count_selected(t, false, err));
            loss.drafts = (hd_draft_loss){.rows = t->o.drafts ? t->at.draft_rows : NULL,
                                          .host_rows = t->in.draft_rows,
                                          .target = t->at.draft_target,
                                          .factor = t->at.draft_factor,
                                          .logprob = t->at.draft_logprob,
                                          .n = t->n_drafts,
                                          .detached = t->o.detached};
            hd_backward_step(t->backward, t->kv, &t->batch, &loss, g);
        } else {
            hd_backward_score(t->backward, t->kv, &t->batch, &loss);
        }
        hd_stream_download(t->stream, t->in.logprob, t->at.logprob,
                           RESULTS * (size_t)t->o.rows * sizeof *t->in.logprob);
        HD_TRY(hd_stream_sync(t->stream, err));
        give_results(t, s + done, now);
        if (g) {
            give_drafts(t, s + done, now);
            add_divergence(t);
            HD_TRY(count_selected(t, true, err));
        }
    }
    return HD_OK;
}

hd_status hd_trainer_finish_gradients(hd_trainer *t, hd_err *err) {
    return hd_parameters_finish_gradients(t->parameters, &t->ops, t->stream, err);
}

hd_parameters *hd_trainer_parameters(const hd_trainer *t) {
    return t->parameters;
}

int64_t hd_trainer_steps(const hd_trainer *t) {
    return t->steps;
}

hd_stream *hd_trainer_stream(const hd_trainer *t) {
    return t->stream;
}
