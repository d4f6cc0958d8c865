/* executor.c - runs a step on a device: copies, forward pass, choosing, drafts.
 *
 * What the sampler reads per row is laid out like a batch: once on the host, once on the
 * device, sent in one copy. */
#include "exec/executor.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"

/* Per chosen row, in the order of the works. */
typedef struct row_view {
    int32_t *slot, *position, *input, *n_drafted;
    int32_t *first_row;               /* [n_slots + 1] of verify: rows of each choosing work */
    int32_t *count_row, *count_token; /* accepted tokens to count */
    hd_sampling *params;              /* [n_slots] */
    hd_logit_bias *bias;              /* [n_slots, HD_MAX_BIAS] */
} row_view;

/* What the sampler writes. */
typedef struct out_view {
    int32_t *token, *accepted, *next, *top_id;
    float *logprob, *top_logprob;
} out_view;

typedef struct twin {
    void *host, *device;
    size_t bytes;
} twin;

struct hd_executor {
    hd_model_env env;
    hd_executor_options o;
    hd_model *model;
    hd_kv *kv;
    hd_batch batch, chain; /* the step; one row per draft that goes further */
    twin in, out;
    row_view in_host, in_device;
    out_view out_host, out_device;
    uint16_t *counts;      /* [n_slots, vocab] device memory */
    int32_t n_drafts;      /* 0 without an MTP layer */
    int32_t *first_choice; /* [n_slots + 1] by work: first chosen row */
    int32_t *drafting;     /* [n_slots] works that draft, the most wanting first */
    int32_t *draft_rows;   /* [n_slots] scratch: chosen rows, drafted tokens */
};

/* ---- memory ---- */

static int32_t choice_rows(const hd_executor_options *o) {
    return hd_min_i32(o->step_rows, o->n_slots * HD_MAX_CHOSEN);
}

static void *take(hd_arena *a, int64_t n, size_t element) {
    return hd_arena_take(a, (size_t)n * element, 64);
}

static void place_in(row_view *v, hd_arena *a, const hd_executor_options *o) {
    const int32_t rows = choice_rows(o);
    v->slot = take(a, rows, sizeof *v->slot);
    v->position = take(a, rows, sizeof *v->position);
    v->input = take(a, rows, sizeof *v->input);
    v->n_drafted = take(a, rows, sizeof *v->n_drafted);
    v->first_row = take(a, o->n_slots + 1, sizeof *v->first_row);
    v->count_row = take(a, rows, sizeof *v->count_row);
    v->count_token = take(a, rows, sizeof *v->count_token);
    v->params = take(a, o->n_slots, sizeof *v->params);
    v->bias = take(a, (int64_t)o->n_slots * HD_MAX_BIAS, sizeof *v->bias);
}

static void place_out(out_view *v, hd_arena *a, const hd_executor_options *o) {
    const int32_t rows = choice_rows(o);
    v->token = take(a, rows, sizeof *v->token);
    v->accepted = take(a, o->n_slots, sizeof *v->accepted);
    v->next = take(a, o->n_slots, sizeof *v->next);
    v->top_id = take(a, (int64_t)rows * HD_MAX_TOP_LOGPROBS, sizeof *v->top_id);
    v->logprob = take(a, rows, sizeof *v->logprob);
    v->top_logprob = take(a, (int64_t)rows * HD_MAX_TOP_LOGPROBS, sizeof *v->top_logprob);
}

static hd_status open_twin(twin *t, hd_device *d, size_t bytes, const char *what, hd_err *err) {
    t->bytes = bytes;
    HD_TRY(hd_device_alloc(d, &t->device, bytes, what, err));
    return hd_device_alloc_host(d, &t->host, bytes, what, err);
}

static hd_status open_views(hd_executor *x, hd_err *err) {
    hd_arena a = hd_arena_measure();
    place_in(&x->in_host, &a, &x->o);
    HD_TRY(open_twin(&x->in, x->env.device, a.peak, "sampling input", err));
    a = hd_arena_over(x->in.host, x->in.bytes);
    place_in(&x->in_host, &a, &x->o);
    a = hd_arena_over(x->in.device, x->in.bytes);
    place_in(&x->in_device, &a, &x->o);
    a = hd_arena_measure();
    place_out(&x->out_host, &a, &x->o);
    HD_TRY(open_twin(&x->out, x->env.device, a.peak, "sampling output", err));
    a = hd_arena_over(x->out.host, x->out.bytes);
    place_out(&x->out_host, &a, &x->o);
    a = hd_arena_over(x->out.device, x->out.bytes);
    place_out(&x->out_device, &a, &x->o);
    void *counts;
    const size_t bytes = (size_t)x->o.n_slots * (size_t)x->env.spec->vocab * sizeof *x->counts;
    HD_TRY(hd_device_alloc(x->env.device, &counts, bytes, "token counts", err));
    x->counts = counts;
    return HD_OK;
}

static hd_status open_all(hd_executor *x, hd_err *err) {
    const hd_executor_options *o = &x->o;
    const int32_t n_layers = x->env.spec->n_layers + hd_weights_n_mtp(x->env.weights);
    const hd_model_limits limits = {
        .rows = o->step_rows, .logits = choice_rows(o), .positions = o->positions};
    const hd_kv_options kv = {
        .n_pages = {o->n_pages[0], o->n_pages[1]},
        .n_snapshots = o->n_snapshots,
        .act_bytes = x->env.ops->act_bytes,
        .max_drafts = x->n_drafts
    };
    const hd_batch_limits step = {o->step_rows, o->n_slots, o->lease_pages};
    const hd_batch_limits chain = {o->n_slots, o->n_slots, o->lease_pages};
    HD_TRY(hd_model_open(&x->model, &x->env, &limits, 1, err));
    HD_TRY(hd_kv_open(&x->kv, x->env.spec, n_layers, x->env.device, &kv, err));
    HD_TRY(hd_batch_open(&x->batch, &step, x->env.device, err));
    HD_TRY(hd_batch_open(&x->chain, &chain, x->env.device, err));
    HD_TRY(open_views(x, err));
    const size_t n = (size_t)o->n_slots + 1;
    x->first_choice = calloc(n, sizeof(int32_t));
    x->drafting = calloc(n, sizeof(int32_t));
    x->draft_rows = calloc(n, sizeof(int32_t));
    if (x->first_choice && x->drafting && x->draft_rows) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for %d slots", o->n_slots);
}

hd_status hd_executor_open(hd_executor **out, const hd_model_env *env,
                           const hd_executor_options *options, hd_err *err) {
    *out = NULL;
    hd_executor *x = calloc(1, sizeof *x);
    if (!x) return HD_FAIL(err, HD_ENOMEM, "no memory for an executor");
    x->env = *env;
    x->o = *options;
    x->n_drafts = hd_weights_n_mtp(env->weights) ? options->max_drafts : 0;
    hd_status st = open_all(x, err);
    if (st == HD_OK) {
        *out = x;
    } else {
        hd_executor_close(x);
    }
    return st;
}

static void close_twin(twin *t, hd_device *d) {
    hd_device_release(d, t->host);
    hd_device_release(d, t->device);
}

void hd_executor_close(hd_executor *x) {
    if (!x) return;
    hd_batch_close(&x->batch);
    hd_batch_close(&x->chain);
    close_twin(&x->in, x->env.device);
    close_twin(&x->out, x->env.device);
    hd_device_release(x->env.device, x->counts);
    hd_kv_close(x->kv);
    hd_model_close(x->model);
    free(x->first_choice);
    free(x->drafting);
    free(x->draft_rows);
    free(x);
}

size_t hd_executor_bytes(const hd_executor *x) {
    return hd_model_bytes(x->model) + x->in.bytes + x->out.bytes +
           (size_t)x->o.n_slots * (size_t)x->env.spec->vocab * sizeof *x->counts;
}

/* ---- requests ---- */

/* Counts n tokens of one kind for a slot, as many at a time as the scratch rows hold. */
static void count(hd_executor *x, int32_t slot, const int32_t *tokens, int32_t n, bool prompt) {
    const int32_t at_once = choice_rows(&x->o);
    for (int32_t i = 0; i < n; i += at_once) {
        const int32_t some = hd_min_i32(n - i, at_once);
        for (int32_t k = 0; k < some; k++) x->in_host.count_row[k] = slot;
        memcpy(x->in_host.count_token, tokens + i, (size_t)some * sizeof *tokens);
        hd_stream_upload(x->env.stream, x->in.device, x->in.host, x->in.bytes);
        x->env.ops->count_tokens(x->env.stream,
                                 &(hd_count_tokens_args){.counts = x->counts,
                                                         .row = x->in_device.count_row,
                                                         .token = x->in_device.count_token,
                                                         .n = some,
                                                         .vocab = x->env.spec->vocab,
                                                         .prompt = prompt});
    }
}

void hd_executor_enter(hd_executor *x, int32_t slot, const hd_choosing *choosing,
                       const int32_t *tokens, int32_t n, int32_t n_prompt) {
    hd_sampling *p = &x->in_host.params[slot];
    hd_logit_bias *bias = x->in_host.bias + (int64_t)slot * HD_MAX_BIAS;
    assert(choosing->params.n_bias + choosing->params.n_ban <= HD_MAX_BIAS);
    *p = choosing->params;
    p->counts_row = slot;
    p->bias_at = slot * HD_MAX_BIAS;
    p->ban_at = p->bias_at + p->n_bias;
    if (p->n_bias) memcpy(bias, choosing->bias, (size_t)p->n_bias * sizeof *bias);
    for (int32_t i = 0; i < p->n_ban; i++) bias[p->n_bias + i].id = choosing->ban[i];
    x->in_host.count_row[0] = slot;
    hd_stream_upload(x->env.stream, x->in.device, x->in.host, x->in.bytes);
    x->env.ops->count_tokens(x->env.stream,
                             &(hd_count_tokens_args){.counts = x->counts,
                                                     .clear = x->in_device.count_row,
                                                     .n_clear = 1,
                                                     .vocab = x->env.spec->vocab});
    count(x, slot, tokens, n_prompt, true);
    count(x, slot, tokens + n_prompt, n - n_prompt, false);
}

/* ---- a step ---- */

static void fill_batch(hd_executor *x, const hd_work *works, int32_t n) {
    hd_batch_reset(&x->batch);
    for (int32_t i = 0; i < n; i++) {
        const hd_work *w = &works[i];
        hd_batch_add(&x->batch, &(hd_batch_seq){
                                    .tokens = w->tokens,
                                    .n = w->n,
                                    .start = w->start,
                                    .after = w->after,
                                    .n_logits = w->n_choose,
                                    .pages = {w->pages[0], w->pages[1]},
                                    .n_pages = w->n_pages
        });
    }
    hd_batch_upload(&x->batch, x->env.stream);
}

/* Describes every row that chooses a token. */
static int32_t fill_choices(hd_executor *x, const hd_work *works, int32_t n) {
    row_view *v = &x->in_host;
    int32_t rows = 0, groups = 0;
    for (int32_t i = 0; i < n; i++) {
        const hd_work *w = &works[i];
        x->first_choice[i] = rows;
        if (w->n_choose) v->first_row[groups++] = rows;
        for (int32_t k = 0; k < w->n_choose; k++, rows++) {
            const int32_t at = w->n - w->n_choose + k;
            v->slot[rows] = w->slot;
            v->position[rows] = w->start + at + 1;
            v->input[rows] = w->tokens[at];
            v->n_drafted[rows] = k;
        }
    }
    v->first_row[groups] = rows;
    return groups;
}

static hd_status choose(hd_executor *x, int32_t groups, hd_err *err) {
    const row_view *in = &x->in_device;
    const out_view *out = &x->out_device;
    const int32_t rows = x->in_host.first_row[groups];
    hd_stream_upload(x->env.stream, x->in.device, x->in.host, x->in.bytes);
    x->env.ops->sample(x->env.stream, &(hd_sample_args){.token = out->token,
                                                        .logprob = out->logprob,
                                                        .top_id = out->top_id,
                                                        .top_logprob = out->top_logprob,
                                                        .logits = hd_model_logits(x->model, 0),
                                                        .params = in->params,
                                                        .slot = in->slot,
                                                        .position = in->position,
                                                        .bias = in->bias,
                                                        .counts = x->counts,
                                                        .input = in->input,
                                                        .n_drafted = in->n_drafted,
                                                        .rows = rows,
                                                        .vocab = x->env.spec->vocab,
                                                        .n_ids = x->o.n_ids});
    x->env.ops->verify(x->env.stream, &(hd_verify_args){.accepted = out->accepted,
                                                        .next = out->next,
                                                        .token = out->token,
                                                        .input = in->input,
                                                        .first_row = in->first_row,
                                                        .n = groups});
    hd_stream_download(x->env.stream, x->out.host, x->out.device, x->out.bytes);
    return hd_stream_sync(x->env.stream, err);
}

/* What each work has won, and the accepted tokens into the counts. */
static void collect(hd_executor *x, const hd_work *works, int32_t n, hd_chosen *chosen) {
    int32_t group = 0, counted = 0;
    for (int32_t i = 0; i < n; i++) {
        const hd_work *w = &works[i];
        hd_chosen *c = &chosen[i];
        *c = (hd_chosen){.status = HD_OK};
        if (!w->n_choose) continue;
        c->n_tokens = x->out_host.accepted[group++] + 1;
        for (int32_t k = 0; k < c->n_tokens; k++) {
            const int32_t row = x->first_choice[i] + k;
            c->tokens[k] = x->out_host.token[row];
            c->logprobs[k] = x->out_host.logprob[row];
            if (c->tokens[k] == HD_TOKEN_NONE) c->status = HD_EINVAL;
            if (c->tokens[k] == HD_TOKEN_BROKEN) c->status = HD_EDEVICE;
            x->in_host.count_row[counted] = w->slot;
            x->in_host.count_token[counted++] = c->tokens[k];
        }
    }
    if (!counted) return;
    hd_stream_upload(x->env.stream, x->in.device, x->in.host, x->in.bytes);
    x->env.ops->count_tokens(x->env.stream,
                             &(hd_count_tokens_args){.counts = x->counts,
                                                     .row = x->in_device.count_row,
                                                     .token = x->in_device.count_token,
                                                     .n = counted,
                                                     .vocab = x->env.spec->vocab});
}

/* ---- drafts ---- */

/* Every row learns the token behind it, so that the MTP layer's own keys stay complete; rows of
 * refused drafts get any token, they will be written again. The works that want drafts, the
 * most wanting first, keep one wanted row each: that of their last accepted token. */
static int32_t plan_drafts(hd_executor *x, const hd_work *works, int32_t n,
                           const hd_chosen *chosen) {
    hd_batch *b = &x->batch;
    int32_t drafting = 0;
    for (int32_t i = 0; i < n; i++) {
        const hd_work *w = &works[i];
        const hd_chosen *c = &chosen[i];
        const int32_t first = b->host.first_row[i + 1] - w->n_choose;
        for (int32_t k = 0; k < w->n_choose; k++) {
            const bool good = k < c->n_tokens && c->tokens[k] >= 0;
            b->host.next_tokens[first + k] = good ? c->tokens[k] : 0;
        }
        if (!w->want_drafts || !w->n_choose || c->status != HD_OK) continue;
        int32_t at = drafting++;
        for (; at > 0 && works[x->drafting[at - 1]].want_drafts < w->want_drafts; at--) {
            x->drafting[at] = x->drafting[at - 1];
        }
        x->drafting[at] = i;
    }
    b->n_logits = drafting;
    for (int32_t k = 0; k < drafting; k++) {
        const int32_t i = x->drafting[k];
        b->host.logit_rows[k] =
            b->host.first_row[i + 1] - works[i].n_choose + chosen[i].n_tokens - 1;
    }
    return drafting;
}

/* The greedy choice of each wanted row becomes the next draft of its work. */
static hd_status take_drafts(hd_executor *x, int32_t n, hd_chosen *chosen, hd_err *err) {
    x->env.ops->argmax(x->env.stream, &(hd_argmax_args){.token = x->out_device.token,
                                                        .logits = hd_model_logits(x->model, 0),
                                                        .rows = n,
                                                        .vocab = x->env.spec->vocab,
                                                        .n_ids = x->o.n_ids});
    hd_stream_download(x->env.stream, x->out_host.token, x->out_device.token,
                       (size_t)n * sizeof(int32_t));
    HD_TRY(hd_stream_sync(x->env.stream, err));
    for (int32_t k = 0; k < n; k++) {
        hd_chosen *c = &chosen[x->drafting[k]];
        c->drafts[c->n_drafts++] = x->out_host.token[k];
    }
    return HD_OK;
}

/* One row per work that wants a further draft, one position on. */
static int32_t fill_chain(hd_executor *x, const hd_work *works, int32_t n, hd_chosen *chosen) {
    int32_t rows = 0;
    hd_batch_reset(&x->chain);
    for (; rows < n; rows++) {
        const hd_work *w = &works[x->drafting[rows]];
        const hd_chosen *c = &chosen[x->drafting[rows]];
        if (hd_min_i32(w->want_drafts, x->n_drafts) <= c->n_drafts) break;
        const int32_t before =
            c->n_drafts > 1 ? c->drafts[c->n_drafts - 2] : c->tokens[c->n_tokens - 1];
        hd_batch_add(&x->chain,
                     &(hd_batch_seq){
                         .tokens = &before,
                         .n = 1,
                         .start = w->start + w->n - w->n_choose + c->n_tokens - 1 + c->n_drafts,
                         .after = c->drafts[c->n_drafts - 1],
                         .n_logits = 1,
                         .pages = {w->pages[0], w->pages[1]},
                         .n_pages = w->n_pages
        });
    }
    return rows;
}

static hd_status draft(hd_executor *x, const hd_work *works, int32_t n, hd_chosen *chosen,
                       hd_err *err) {
    hd_batch *step = &x->batch, *chain = &x->chain;
    int32_t rows = plan_drafts(x, works, n, chosen);
    hd_batch_upload(step, x->env.stream);
    hd_model_draft(x->model, x->kv, &step, 1, false);
    if (rows) HD_TRY(take_drafts(x, rows, chosen, err));
    while ((rows = fill_chain(x, works, rows, chosen)) > 0) {
        hd_batch_upload(chain, x->env.stream);
        hd_model_draft(x->model, x->kv, &chain, 1, true);
        HD_TRY(take_drafts(x, rows, chosen, err));
    }
    return HD_OK;
}

static hd_status run(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                     const hd_work *works, int32_t n, hd_chosen *chosen, hd_err *err) {
    hd_executor *x = ctx;
    hd_batch *batch = &x->batch;
    hd_kv_copy(x->kv, x->env.stream, copies, n_copies);
    fill_batch(x, works, n);
    hd_model_step(x->model, x->kv, &batch, 1);
    const int32_t groups = fill_choices(x, works, n);
    HD_TRY(choose(x, groups, err));
    collect(x, works, n, chosen);
    return x->n_drafts ? draft(x, works, n, chosen, err) : hd_stream_sync(x->env.stream, err);
}

hd_runner hd_executor_runner(hd_executor *x) {
    return (hd_runner){.ctx = x, .run = run};
}
