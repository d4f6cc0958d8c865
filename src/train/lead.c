/* lead.c - the calls of a trainer on all ranks: rank 0 sends an order, and every rank carries it out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/deal.h"
#include "train/state.h"

typedef enum order_kind {
    ORDER_SCORE,
    ORDER_ACCUMULATE,
    ORDER_STEP,
    ORDER_GATHER,
    ORDER_LOAD,
    ORDER_END,
    ORDER_KINDS
} order_kind;

enum { ORDER_MAGIC = 0x64726f74, MOST_BYTES = 1 << 30 };

/* What rank 0 sends; `bytes` bytes follow. */
typedef struct order {
    uint32_t magic;
    int32_t kind;
    int64_t value; /* sequences, or steps of a checkpoint */
    int64_t bytes;
} order;

/* ---- ranks ---- */

trainer_text trainer_reason(int32_t rank, const hd_err *err) {
    trainer_text out;
    snprintf(out.text, sizeof out.text, "rank %d: %.180s", rank,
             err && err->msg[0] ? err->msg : "its work failed");
    return out;
}

static bool is_alone(const hd_trainer *t) {
    return !t->ranks.comm;
}

/* Ends the work of all ranks; returns st. */
static hd_status give_up(const hd_trainer *t, hd_status st, const hd_err *why) {
    if (st != HD_OK && !is_alone(t)) {
        hd_comm_abort(t->ranks.comm, trainer_reason(t->o.rank, why).text);
    }
    return st;
}

/* Every rank trains the same weights. */
hd_status trainer_await_ranks(hd_trainer *t, hd_err *err) {
    int64_t own = t->parameters ? hd_parameters_count(t->parameters) : 0;
    int64_t all[HD_LOCAL_MAX_RANKS];
    if (is_alone(t)) return HD_OK;
    hd_status st = train_ranks_collect(&t->ranks, &own, sizeof own, all, err);
    for (int32_t r = 0; r < t->o.n_ranks && st == HD_OK; r++) {
        if (all[r] == all[0]) continue;
        st = HD_FAIL(err, HD_EPEER, "rank %d trains %lld weights and rank 0 %lld", r,
                     (long long)all[r], (long long)all[0]);
    }
    return give_up(t, st, err);
}

static hd_status tell(const hd_trainer *t, order_kind kind, int64_t value, void *data,
                      int64_t bytes, hd_err *err) {
    order o = {ORDER_MAGIC, (int32_t)kind, value, bytes};
    if (is_alone(t)) return HD_OK;
    if (bytes > MOST_BYTES) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "%lld bytes for the other ranks; at most %d",
                       (long long)bytes, MOST_BYTES);
    }
    HD_TRY(train_ranks_broadcast(&t->ranks, &o, sizeof o, err));
    return bytes ? train_ranks_broadcast(&t->ranks, data, (size_t)bytes, err) : HD_OK;
}

void trainer_dismiss(hd_trainer *t) {
    const bool leads = !is_alone(t) && t->o.rank == 0;
    if (leads && !hd_comm_ended(t->ranks.comm)) tell(t, ORDER_END, 0, NULL, 0, NULL);
}

/* ---- sequences ---- */

static hd_status run_dealt(hd_trainer *t, train_deal *d, const hd_train_sequence *s, int32_t n,
                           bool accumulates, hd_err *err) {
    HD_TRY(train_deal_make(d, t, s, n, err));
    HD_TRY(tell(t, accumulates ? ORDER_ACCUMULATE : ORDER_SCORE, n, d->message,
                d->words * (int64_t)sizeof *d->message, err));
    HD_TRY(trainer_run(t, d->own, d->n_own, accumulates, err));
    return train_deal_gather(d, t, s, err);
}

static hd_status run_all(hd_trainer *t, const hd_train_sequence *s, int32_t n, bool accumulates,
                         hd_err *err) {
    train_deal d;
    HD_TRY(trainer_check(t, s, n, err));
    if (is_alone(t)) return trainer_run(t, s, n, accumulates, err);
    const hd_status st = run_dealt(t, &d, s, n, accumulates, err);
    train_deal_deinit(&d);
    return give_up(t, st, err);
}

hd_status hd_trainer_score(hd_trainer *t, const hd_train_sequence *s, int32_t n, hd_err *err) {
    return run_all(t, s, n, false, err);
}

hd_status hd_trainer_accumulate(hd_trainer *t, const hd_train_sequence *s, int32_t n,
                                hd_err *err) {
    return run_all(t, s, n, true, err);
}

static hd_status follow_sequences(hd_trainer *t, const order *o, const void *data,
                                  hd_err *err) {
    train_deal d;
    const int32_t n = (int32_t)(o->value < INT32_MAX ? o->value : -1);
    const int64_t words = o->bytes / (int64_t)sizeof *d.message;
    hd_status st = train_deal_read(&d, t, n, data, words, err);
    if (st == HD_OK) st = trainer_run(t, d.own, d.n_own, o->kind == ORDER_ACCUMULATE, err);
    if (st == HD_OK) st = train_deal_gather(&d, t, NULL, err);
    train_deal_deinit(&d);
    return st;
}

hd_replay_count hd_trainer_replayed(const hd_trainer *t) {
    hd_replay_count sum = hd_backward_replayed(t->backward);
    for (int32_t r = 1; r < t->o.n_ranks; r++) {
        sum.routed += t->replayed[r].routed;
        sum.other_experts += t->replayed[r].other_experts;
        sum.indexed += t->replayed[r].indexed;
        sum.other_keys += t->replayed[r].other_keys;
    }
    return sum;
}

/* ---- steps ---- */

/* Sums the gradients of this rank's slice, and *squares of all. */
static hd_status sum_gradients(hd_trainer *t, double *squares, hd_err *err) {
    double all[HD_LOCAL_MAX_RANKS];
    int64_t first, own, n;
    const hd_parameters *p = t->parameters;
    float *gradients = hd_gradients_all(hd_parameters_gradients(p), &n);
    const float *slice = hd_parameters_gradient_slice(p, &n);
    hd_parameters_slice(p, HD_PARAMETER_MASTER, &first, &own);
    HD_TRY(hd_trainer_finish_gradients(t, err));
    HD_TRY(train_ranks_sum(&t->ranks, gradients, hd_parameters_summed(p), first, own, err));
    HD_TRY(hd_optimizer_squares(squares, &t->optimizer, slice, n, err));
    if (is_alone(t)) return HD_OK;
    HD_TRY(train_ranks_collect(&t->ranks, squares, sizeof *squares, all, err));
    *squares = 0.0;
    for (int32_t r = 0; r < t->o.n_ranks; r++) *squares += all[r];
    return HD_OK;
}

/* The rows of all ranks that selected each expert. */
static hd_status sum_selected(hd_trainer *t, hd_err *err) {
    const int64_t n = t->n_selected;
    if (is_alone(t) || !n) return HD_OK;
    int64_t *all = malloc((size_t)t->o.n_ranks * (size_t)n * sizeof *all);
    if (!all) return HD_FAIL(err, HD_ENOMEM, "no memory for the experts' loads");
    const hd_status st =
        train_ranks_collect(&t->ranks, t->selected, n * (int64_t)sizeof *all, all, err);
    memset(t->selected, 0, (size_t)n * sizeof *all);
    for (int64_t i = 0; i < n * t->o.n_ranks; i++) t->selected[i % n] += all[i];
    free(all);
    return st;
}

static hd_status gather(hd_trainer *t, hd_parameter_array which, float *to, hd_err *err) {
    int64_t first, own;
    const float *slice = hd_parameters_slice(t->parameters, which, &first, &own);
    if (!hd_device_is_host(t->device)) { /* which has one rank */
        hd_stream_download(t->stream, to, slice, (size_t)own * sizeof *to);
        return hd_stream_sync(t->stream, err);
    }
    return train_ranks_gather(&t->ranks, slice, first, own, to,
                              hd_parameters_count(t->parameters), err);
}

/* One step of this rank. */
static hd_status step(hd_trainer *t, hd_optimizer_report *report, hd_err *err) {
    int32_t n;
    double squares;
    const hd_parameter *all = hd_parameters_all(t->parameters, &n);
    HD_TRY(sum_gradients(t, &squares, err));
    hd_optimizer_step(&t->o.optimizer, all, n, t->steps, squares, &t->optimizer, report);
    HD_TRY(hd_stream_sync(t->optimizer.stream, err));
    hd_parameters_clear_gradients(t->parameters, t->stream);
    HD_TRY(sum_selected(t, err));
    if (t->n_selected && !report->skipped)
        HD_TRY(hd_parameters_balance(t->parameters, t->selected, t->o.balance, err));
    memset(t->selected, 0, (size_t)t->n_selected * sizeof *t->selected);
    t->steps++;
    return hd_stream_sync(t->stream, err);
}

/* Whether the arrays of this rank are those of all, in host memory. */
static bool has_all(const hd_trainer *t) {
    return is_alone(t) && hd_device_is_host(t->device);
}

static hd_status gather_masters(hd_trainer *t, hd_map *out, hd_err *err) {
    const size_t bytes = (size_t)hd_parameters_count(t->parameters) * sizeof(float);
    HD_TRY(hd_map_take(out, bytes, "trained weights", err));
    const hd_status st =
        gather(t, HD_PARAMETER_MASTER, (float *)(void *)hd_map_writable(out), err);
    if (st != HD_OK) hd_map_close(out);
    return st;
}

/* An update by the masters of all ranks; those of one rank stay where they are. */
static hd_status gather_update(hd_trainer *t, hd_weights_update **u, hd_err *err) {
    hd_map masters = {0};
    if (!has_all(t)) HD_TRY(gather_masters(t, &masters, err));
    return hd_parameters_update(t->parameters, &masters, u, err);
}

/* A step with an update by the masters; NULL if it is skipped. */
static hd_status step_to_update(hd_trainer *t, hd_weights_update **u,
                                hd_optimizer_report *report, hd_err *err) {
    *u = NULL;
    HD_TRY(step(t, report, err));
    if (report->skipped) return HD_OK;
    if (hd_device_is_host(t->device)) return gather_update(t, u, err);
    return hd_parameters_update_in_place(t->parameters, u, err);
}

hd_status hd_trainer_step(hd_trainer *t, hd_weights_update **u, hd_optimizer_report *report,
                          hd_err *err) {
    *u = NULL;
    hd_status st = tell(t, ORDER_STEP, 0, NULL, 0, err);
    if (st == HD_OK) st = step_to_update(t, u, report, err);
    return give_up(t, st, err);
}

/* own: the weights to change; NULL: rank 0 does. */
static hd_status follow_step(hd_trainer *t, hd_weights *own, hd_err *err) {
    hd_optimizer_report report;
    hd_weights_update *u;
    if (!own) {
        HD_TRY(step(t, &report, err));
        return report.skipped ? HD_OK : gather(t, HD_PARAMETER_MASTER, NULL, err);
    }
    HD_TRY(step_to_update(t, &u, &report, err));
    const hd_status st = u ? hd_weights_update_apply(u, own, t->stream, err) : HD_OK;
    hd_weights_update_close(u);
    return st;
}

/* ---- checkpoints ---- */

static hd_status gather_arrays(hd_trainer *t, float *const *arrays, hd_err *err) {
    HD_TRY(tell(t, ORDER_GATHER, 0, NULL, 0, err));
    for (int k = 0; k < HD_N_PARAMETER_ARRAYS; k++) {
        HD_TRY(gather(t, (hd_parameter_array)k, arrays[k], err));
    }
    return HD_OK;
}

hd_status hd_trainer_gather(hd_trainer *t, hd_whole_parameters *out, hd_err *err) {
    float *arrays[HD_N_PARAMETER_ARRAYS];
    const int64_t count = hd_parameters_count(t->parameters);
    int64_t first;
    *out = (hd_whole_parameters){.n = 0};
    hd_parameters_all(t->parameters, &out->n);
    out->all = calloc((size_t)out->n, sizeof *out->all);
    if (!has_all(t)) {
        out->block = malloc(HD_N_PARAMETER_ARRAYS * (size_t)count * sizeof *out->block);
    }
    if (!out->all || (!out->block && !has_all(t))) {
        hd_whole_parameters_free(out);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a checkpoint of %lld weights",
                       (long long)count);
    }
    for (int k = 0; k < HD_N_PARAMETER_ARRAYS; k++) {
        arrays[k] = out->block ? out->block + k * count
                               : hd_parameters_slice(t->parameters, (hd_parameter_array)k,
                                                     &first, &(int64_t){0});
    }
    hd_parameters_list(t->parameters, arrays, out->all);
    if (!out->block) return HD_OK;
    const hd_status st = gather_arrays(t, arrays, err);
    if (st != HD_OK) hd_whole_parameters_free(out);
    return give_up(t, st, err);
}

void hd_whole_parameters_free(hd_whole_parameters *w) {
    free(w->all);
    free(w->block);
    *w = (hd_whole_parameters){.n = 0};
}

static hd_status load(hd_trainer *t, const char *checkpoint, int64_t steps, hd_err *err) {
    t->steps = steps;
    return hd_state_load(checkpoint, t->parameters, err);
}

hd_status hd_trainer_load(hd_trainer *t, const char *checkpoint, int64_t steps, hd_err *err) {
    HD_TRY(load(t, checkpoint, steps, err));
    return give_up(t,
                   tell(t, ORDER_LOAD, steps, (void *)(uintptr_t)checkpoint,
                        (int64_t)strlen(checkpoint) + 1, err),
                   err);
}

/* ---- other ranks ---- */

static hd_status carry_out(hd_trainer *t, const order *o, char *data, hd_weights *own,
                           hd_err *err) {
    switch ((order_kind)o->kind) {
    case ORDER_SCORE:
    case ORDER_ACCUMULATE:
        return follow_sequences(t, o, data, err);
    case ORDER_STEP:
        return follow_step(t, own, err);
    case ORDER_GATHER:
        for (int k = 0; k < HD_N_PARAMETER_ARRAYS; k++) {
            HD_TRY(gather(t, (hd_parameter_array)k, NULL, err));
        }
        return HD_OK;
    case ORDER_LOAD:
        data[o->bytes - 1] = '\0';
        return load(t, data, o->value, err);
    default:
        return HD_OK;
    }
}

/* *data holds the bytes that follow, which the caller frees; NULL: none. */
static hd_status hear(const hd_trainer *t, order *o, char **data, hd_err *err) {
    *data = NULL;
    HD_TRY(train_ranks_broadcast(&t->ranks, o, sizeof *o, err));
    const bool carries =
        o->kind == ORDER_SCORE || o->kind == ORDER_ACCUMULATE || o->kind == ORDER_LOAD;
    if (o->magic != ORDER_MAGIC || o->kind < 0 || o->kind >= ORDER_KINDS || o->value < 0 ||
        o->bytes < 0 || o->bytes > MOST_BYTES || (!carries && o->bytes) ||
        (o->kind == ORDER_LOAD && !o->bytes)) {
        return HD_FAIL(err, HD_EFORMAT, "rank 0 sent what is no order");
    }
    if (!carries || !o->bytes) return HD_OK;
    *data = malloc((size_t)o->bytes);
    if (!*data) return HD_FAIL(err, HD_ENOMEM, "no memory for a message of rank 0");
    return train_ranks_broadcast(&t->ranks, *data, (size_t)o->bytes, err);
}

hd_status hd_trainer_follow(hd_trainer *t, hd_weights *own, hd_err *err) {
    order o = {.kind = ORDER_GATHER};
    hd_status st = trainer_await_ranks(t, err);
    while (st == HD_OK && o.kind != ORDER_END) {
        char *data;
        st = hear(t, &o, &data, err);
        if (st == HD_OK) st = carry_out(t, &o, data, own, err);
        free(data);
    }
    return give_up(t, st, err);
}
