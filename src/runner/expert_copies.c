/* expert_copies.c - experts that are copied from one device to another beside the steps. A stream of
 * its own has the copies, and checksums of both ends; nobody waits for it. Spare memory that a flip
 * has freed is written when the steps before that flip are done. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "runner/expert_moves_internal.h"
#include "weights/experts/expert_moves.h"

hd_status runner_copies_open(hd_model_runner *x, int32_t most, hd_err *err) {
    runner_copies *c = &x->moves.copies;
    hd_device *d = x->env.device;
    if (hd_device_is_host(d)) return HD_OK;
    c->most = most;
    c->list = calloc((size_t)most, sizeof *c->list);
    if (!c->list) return HD_FAIL(err, HD_ENOMEM, "no memory to list %d copies", most);
    HD_TRY(hd_stream_open(&c->stream, d, err));
    hd_stream_report_to(c->stream, x->env.stream);
    HD_TRY(hd_device_event_open(&c->flipped, d, false, err));
    HD_TRY(hd_device_event_open(&c->copied, d, false, err));
    return runner_mirrored_open(&c->sums, d, (size_t)most * sizeof(uint64_t),
                                "checksums of experts", err);
}

void runner_copies_close(hd_model_runner *x) {
    runner_copies *c = &x->moves.copies;
    hd_stream_close(c->stream);
    hd_device_event_close(c->flipped);
    hd_device_event_close(c->copied);
    runner_mirrored_close(&c->sums, x->env.device);
    free(c->list);
}

void runner_copies_begin(hd_model_runner *x) {
    const runner_copies *c = &x->moves.copies;
    if (c->stream) hd_stream_wait_event(c->stream, c->flipped);
}

hd_status runner_copies_add(hd_model_runner *x, const runner_move_order *o, hd_err *err) {
    runner_copies *c = &x->moves.copies;
    const int32_t index = x->env.comm->groups[HD_GROUP_EP].index;
    if (!c->stream) return HD_OK;
    if (c->n == c->most) {
        return HD_FAIL(err, HD_EINVAL, "layer %d: more than %d experts at once", o->layer,
                       c->most);
    }
    uint64_t *sum = (uint64_t *)c->sums.device + c->n;
    c->list[c->n] = *o;
    if (index == o->from || index == o->to) {
        hd_stream_clear(c->stream, sum, sizeof *sum);
        hd_weights_sum_expert(x->env.weights, o->layer, o->expert, c->stream, sum);
        hd_stream_download(c->stream, (uint64_t *)c->sums.host + c->n, sum, sizeof *sum);
        hd_stream_record_event(c->stream, c->copied);
    }
    c->n++;
    return HD_OK;
}

bool runner_copies_are_done(const hd_model_runner *x) {
    const runner_copies *c = &x->moves.copies;
    return !c->stream || hd_device_event_is_done(c->copied);
}

void runner_copies_flipped(hd_model_runner *x) {
    runner_copies *c = &x->moves.copies;
    if (c->stream) hd_stream_record_event(x->env.stream, c->flipped);
    c->n = 0;
}

void hd_model_runner_await_moves(hd_model_runner *x) {
    if (x->moves.copies.stream) hd_stream_wait(x->moves.copies.stream);
}

void hd_model_runner_forget_moves(hd_model_runner *x) {
    hd_model_runner_await_moves(x);
    x->moves.copies.n = 0;
    if (x->o.movable) hd_weights_drop_staged(x->o.movable);
}
