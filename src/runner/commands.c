/* commands.c - forward passes of several ranks: the leader broadcasts what to run, and the
 * followers run the same.
 *
 * A command is a fixed header, the rows of every attention group, then page copies, the place of a
 * page that follows as a broadcast of its own, or a batch's host block. It has every page number
 * that a pass reads or writes, so the followers' KV pools mirror the leader's, and scheduler, prefix
 * cache and sampler are the leader's alone. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "runner/expert_moves_internal.h"
#include "runner/groups_internal.h"

enum {
    MAX_COPIES = 64,
    COMMAND_COPY = RUNNER_DRAFT_AGAIN + 1,
    COMMAND_LOADS,
    COMMAND_MOVE,
    COMMAND_REST,
    COMMAND_RENEW,
    COMMAND_LAUNCH,
    COMMAND_SEED,
    COMMAND_PAGE,
    COMMAND_CHOICES,
    COMMAND_END
};

typedef struct command_header {
    /* What follows a header may have numbers of 8 bytes. */
    _Alignas(8) int32_t kind; /* a runner_pass or one of the above */
    int32_t n_copies;
    int32_t pass;    /* whose choices are summed */
    int32_t fetches; /* hd_batch.fetches */
    /* of the batch; n_seqs also of a graph step, with `block` drafts of each and n_rows of prompts */
    int32_t n_rows, n_seqs, n_logits, most_rows, block;
} command_header;

typedef struct seed_order {
    uint64_t seed;
    int32_t slot;
} seed_order;

/* Where a page lies in the host memory of every rank. */
typedef struct page_order {
    int32_t group;
    hd_host_page host;
} page_order;

/* Bytes of group_rows and group_logits, which follow the header. */
static size_t groups_bytes(const hd_model_runner *x) {
    return 2 * (size_t)x->n_groups * sizeof(int32_t);
}

static uint8_t *payload(const hd_model_runner *x) {
    return x->command + sizeof(command_header) + groups_bytes(x);
}

hd_status runner_commands_open(hd_model_runner *x, hd_err *err) {
    if (x->o.role == HD_RUNNER_ALONE) return HD_OK;
    assert(x->env.comm);
    const size_t copies = MAX_COPIES * sizeof(hd_page_copy);
    const size_t batch = x->batch.bytes > x->chain.bytes ? x->batch.bytes : x->chain.bytes;
    x->n_groups = x->env.comm->groups[HD_GROUP_DP].n;
    const size_t order = runner_order_bytes(x),
                 launch = x->o.fixed_steps ? runner_decode_graph_input_bytes(x) : 0;
    size_t other = copies > order ? copies : order;
    if (launch > other) other = launch;
    x->command_bytes =
        sizeof(command_header) + groups_bytes(x) + (other > batch ? other : batch);
    x->command = calloc(1, x->command_bytes);
    if (!x->command) return HD_FAIL(err, HD_ENOMEM, "no memory for commands");
    x->group_rows = (int32_t *)(void *)(x->command + sizeof(command_header));
    x->group_logits = x->group_rows + x->n_groups;
    if (x->n_groups > 1 && x->o.role == HD_RUNNER_LEADS) HD_TRY(runner_groups_open(x, err));
    HD_TRY(runner_moves_open(x, err));
    const int32_t parts = x->env.comm->groups[HD_GROUP_TP].n;
    if (!hd_model_expert_rows(x->model)) return HD_OK;
    return runner_mirrored_open(&x->loads, x->env.device,
                                (size_t)parts * runner_n_loads(x) * sizeof(int64_t),
                                "expert loads", err);
}

size_t hd_model_runner_command_bytes(const hd_model_runner *x) {
    return x->command_bytes;
}

static void run_pass(hd_model_runner *x, int32_t pass) {
    hd_batch *b = runner_batch_of(x, pass);
    b->group_rows = x->n_groups > 1 ? x->group_rows : NULL;
    b->group_logits = x->n_groups > 1 ? x->group_logits : NULL;
    b->fetches = x->fetches;
    b->n_micro = hd_model_n_micro(x->model, b);
    x->fixed.times.micro_steps += pass == RUNNER_STEP && b->n_rows && b->n_micro > 1;
    const int64_t begun = hd_comm_begin_pass(x->env.comm);
    hd_batch_upload(b, x->env.stream);
    if (pass == RUNNER_STEP) {
        hd_model_step(x->model, x->kv, b);
    } else {
        x->drafter->pass(x, b, pass == RUNNER_DRAFT_AGAIN);
    }
    hd_comm_end_pass(x->env.comm, begun);
}

static void broadcast(hd_model_runner *x) {
    hd_comm_broadcast(x->env.comm, x->env.stream,
                      &(hd_broadcast_args){HD_GROUP_TP, x->command, x->command_bytes});
}

/* An all-gather of floats, whose bits are those of the counters. */
static void gather_loads(const hd_model_runner *x) {
    const size_t n = runner_n_loads(x);
    const int32_t part = x->env.comm->groups[HD_GROUP_TP].index;
    const int32_t words = (int32_t)(n * sizeof(int64_t) / sizeof(float));
    hd_stream_copy(x->env.stream, (int64_t *)x->loads.device + (size_t)part * n,
                   hd_model_expert_rows(x->model), n * sizeof(int64_t));
    hd_comm_all_gather(x->env.comm, x->env.stream,
                       &(hd_all_gather_args){.group = HD_GROUP_TP,
                                             .x = x->loads.device,
                                             .rows = 1,
                                             .cols = (int32_t)(x->loads.bytes / sizeof(float)),
                                             .first = part * words,
                                             .own = words});
}

/* Returns when every rank of the group has called it, and so has ended what came before. */
static hd_status await_all(hd_model_runner *x, hd_err *err) {
    const hd_rank_group *g = &x->env.comm->groups[HD_GROUP_TP];
    float *words = (float *)(void *)payload(x);
    HD_TRY(hd_stream_sync(x->env.stream, err));
    words[g->index] = 0;
    hd_comm_all_gather(x->env.comm, x->env.stream,
                       &(hd_all_gather_args){.group = HD_GROUP_TP,
                                             .x = words,
                                             .rows = 1,
                                             .cols = g->n,
                                             .first = g->index,
                                             .own = 1,
                                             .on_host = true});
    return hd_stream_sync(x->env.stream, err);
}

/* ---- the leader ---- */

static bool has_followers(const hd_model_runner *x) {
    return x->o.role == HD_RUNNER_LEADS && x->env.comm->groups[HD_GROUP_TP].n > 1;
}

static void command(hd_model_runner *x, const command_header *h) {
    memcpy(x->command, h, sizeof *h);
    broadcast(x);
}

hd_status runner_forward(hd_model_runner *x, runner_pass pass, hd_err *err) {
    const hd_batch *b = runner_batch_of(x, (int32_t)pass);
    x->has_rows = b->n_rows > 0; /* none: the group is the only one that a loss has left */
    if (x->words) {
        HD_TRY(runner_agree_pass(x, (int32_t)pass, err));
    } else {
        runner_choose_fetches(x, (int32_t)pass);
    }
    if (!x->has_rows) return HD_OK;
    if (has_followers(x)) {
        memcpy(payload(x), b->host_block, b->bytes);
        command(x, &(command_header){.kind = (int32_t)pass,
                                     .fetches = x->fetches,
                                     .n_rows = b->n_rows,
                                     .n_seqs = b->n_seqs,
                                     .n_logits = b->n_logits,
                                     .most_rows = b->most_rows,
                                     .block = b->block});
    }
    run_pass(x, (int32_t)pass);
    return HD_OK;
}

void runner_copy_pages(hd_model_runner *x, const hd_page_copy *copies, int32_t n) {
    for (int32_t i = 0; has_followers(x) && i < n; i += MAX_COPIES) {
        const int32_t some = hd_min_i32(n - i, MAX_COPIES);
        memcpy(payload(x), copies + i, (size_t)some * sizeof *copies);
        command(x, &(command_header){.kind = COMMAND_COPY, .n_copies = some});
    }
    hd_kv_copy(x->kv, x->env.stream, copies, n);
}

static void broadcast_page(hd_model_runner *x, const page_order *o) {
    hd_broadcast_args a = {.group = HD_GROUP_TP};
    a.data = hd_kv_host_page(x->kv, (hd_kv_group)o->group, o->host, &a.bytes);
    hd_comm_broadcast(x->env.comm, x->env.stream, &a);
}

static void copy_pages(void *ctx, const hd_page_copy *copies, int32_t n) {
    runner_copy_pages(ctx, copies, n);
}

static void spread_page(void *ctx, hd_kv_group group, hd_host_page host) {
    hd_model_runner *x = ctx;
    const page_order o = {(int32_t)group, host};
    memcpy(payload(x), &o, sizeof o);
    command(x, &(command_header){.kind = COMMAND_PAGE});
    broadcast_page(x, &o);
}

hd_page_ranks hd_model_runner_page_ranks(hd_model_runner *x) {
    if (!has_followers(x)) return (hd_page_ranks){0};
    return (hd_page_ranks){.ctx = x, .copy = copy_pages, .spread = spread_page};
}

void runner_command_launch(hd_model_runner *x, const runner_graph_shape *shape,
                           const void *inputs, size_t bytes) {
    if (!has_followers(x)) return;
    memcpy(payload(x), inputs, bytes);
    command(x, &(command_header){.kind = COMMAND_LAUNCH,
                                 .n_rows = shape->n_before,
                                 .n_seqs = shape->n,
                                 .block = shape->n_drafts});
}

void runner_command_seed(hd_model_runner *x, int32_t slot, uint64_t seed) {
    if (!has_followers(x) || !x->fixed.on) return;
    memcpy(payload(x), &(seed_order){seed, slot}, sizeof(seed_order));
    command(x, &(command_header){.kind = COMMAND_SEED});
}

void runner_gather_loads(hd_model_runner *x) {
    if (has_followers(x)) command(x, &(command_header){.kind = COMMAND_LOADS});
    gather_loads(x);
}

void runner_command_choices(hd_model_runner *x, runner_pass pass) {
    if (has_followers(x)) {
        command(x, &(command_header){.kind = COMMAND_CHOICES, .pass = (int32_t)pass});
    }
    runner_sum_choices(x, pass);
}

hd_status runner_order_move(hd_model_runner *x, const runner_move_order *o, const int32_t *map,
                            hd_err *err) {
    const size_t n = runner_order_bytes(x) - sizeof *o;
    memcpy(payload(x), o, sizeof *o);
    memset(payload(x) + sizeof *o, 0, n); /* which the leaders of all groups send alike */
    if (map) memcpy(payload(x) + sizeof *o, map, n);
    command(x, &(command_header){.kind = COMMAND_MOVE});
    HD_TRY(hd_stream_failure(x->env.stream, err));
    return runner_move(x, payload(x), err);
}

hd_status hd_model_runner_rest(hd_model_runner *x, hd_err *err) {
    if (!has_followers(x)) return HD_OK;
    command(x, &(command_header){.kind = COMMAND_REST});
    return await_all(x, err);
}

void hd_model_runner_renew(hd_model_runner *x) {
    if (has_followers(x)) command(x, &(command_header){.kind = COMMAND_RENEW});
}

void hd_model_runner_end(hd_model_runner *x) {
    if (has_followers(x)) command(x, &(command_header){.kind = COMMAND_END});
}

/* ---- a follower ---- */

static bool fits_batch(hd_model_runner *x, const command_header *h) {
    const hd_batch *b = runner_batch_of(x, h->kind);
    const int32_t least = x->n_groups > 1 ? 0 : 1;
    for (int32_t i = 0; x->n_groups > 1 && i < x->n_groups; i++) {
        if (!runner_fits_group(b, x->group_rows[i], x->group_logits[i])) return false;
    }
    const int32_t own = x->env.comm->groups[HD_GROUP_DP].index;
    if (x->n_groups > 1 &&
        (x->group_rows[own] != h->n_rows || x->group_logits[own] != h->n_logits)) {
        return false;
    }
    return hd_is_within(h->n_rows, least, b->limits.rows) &&
           hd_is_within(h->n_seqs, least, b->limits.seqs) &&
           hd_is_within(h->n_logits, 0, h->n_rows) &&
           hd_is_within(h->most_rows, least, h->n_rows) &&
           hd_is_within(h->block, 0, HD_MAX_DRAFTS);
}

static hd_status follow_launch(hd_model_runner *x, const command_header *h, hd_err *err) {
    runner_graph_shape shape;
    if (!hd_is_within(h->n_seqs, 1, x->o.n_slots) || h->block < 0 ||
        !hd_is_within(h->n_rows, 0, x->o.step_rows) ||
        !runner_decode_graph_shape(x, h->n_seqs, h->block, h->n_rows, &shape) ||
        shape.n != h->n_seqs || shape.n_before != h->n_rows) {
        return HD_FAIL(err, HD_EPEER,
                       "a graph of %d sequences with %d drafts and %d rows of prompts",
                       h->n_seqs, h->block, h->n_rows);
    }
    return runner_decode_graph_follow(x, &shape, payload(x), err);
}

static hd_status take_seed(hd_model_runner *x, hd_err *err) {
    seed_order o;
    memcpy(&o, payload(x), sizeof o);
    if (!hd_is_within(o.slot, 0, x->o.n_slots - 1)) {
        return HD_FAIL(err, HD_EPEER, "the seed of slot %d of %d", o.slot, x->o.n_slots);
    }
    hd_stream_upload(x->env.stream, &x->device.params[o.slot].seed, &o.seed, sizeof o.seed);
    return HD_OK;
}

static hd_status take_page(hd_model_runner *x, hd_err *err) {
    page_order o;
    memcpy(&o, payload(x), sizeof o);
    if (!hd_is_within(o.group, 0, HD_N_KV_GROUPS - 1) ||
        !hd_is_within(o.host.n, 0, x->o.n_host[o.group] - 1)) {
        return HD_FAIL(err, HD_EPEER, "page %d in host memory of KV group %d", o.host.n,
                       o.group);
    }
    broadcast_page(x, &o);
    return HD_OK;
}

/* Runs a command. Its lengths are checked, its contents are the leader's. */
static hd_status run_command(hd_model_runner *x, const command_header *h, hd_err *err) {
    if (h->kind == COMMAND_COPY && hd_is_within(h->n_copies, 0, MAX_COPIES)) {
        hd_page_copy copies[MAX_COPIES];
        memcpy(copies, payload(x), sizeof copies);
        hd_kv_copy(x->kv, x->env.stream, copies, h->n_copies);
        return HD_OK;
    }
    if (h->kind == COMMAND_LOADS && x->loads.bytes) {
        gather_loads(x);
        return HD_OK;
    }
    if (h->kind == COMMAND_CHOICES && x->choices &&
        hd_is_within(h->pass, RUNNER_STEP, RUNNER_DRAFT_AGAIN)) {
        runner_sum_choices(x, (runner_pass)h->pass);
        return HD_OK;
    }
    if (h->kind == COMMAND_LAUNCH && x->fixed.on) return follow_launch(x, h, err);
    if (h->kind == COMMAND_SEED && x->fixed.on) return take_seed(x, err);
    if (h->kind == COMMAND_PAGE) return take_page(x, err);
    if (h->kind == COMMAND_REST) return await_all(x, err);
    if (h->kind == COMMAND_RENEW && x->o.renew) return x->o.renew(x->o.renew_ctx, err);
    if (h->kind == COMMAND_MOVE) {
        hd_err refused = {0}; /* all ranks know of it */
        const hd_status st = runner_move(x, payload(x), &refused);
        if (st == HD_EPEER) *err = refused;
        return st == HD_EPEER ? st : HD_OK;
    }
    if (!hd_is_within(h->kind, RUNNER_STEP, RUNNER_DRAFT_AGAIN) || !fits_batch(x, h)) {
        return HD_FAIL(err, HD_EPEER, "a command of kind %d with %d rows of %d sequences",
                       h->kind, h->n_rows, h->n_seqs);
    }
    hd_batch *b = runner_batch_of(x, h->kind);
    b->n_rows = h->n_rows;
    b->n_seqs = h->n_seqs;
    b->n_logits = h->n_logits;
    b->most_rows = h->most_rows;
    b->block = h->block;
    memcpy(b->host_block, payload(x), b->bytes);
    x->fetches = h->fetches != 0;
    run_pass(x, h->kind);
    return HD_OK;
}

/* A graph step is not waited for: the leader queues the next one before it ends. Nor is a move of
 * experts. */
static hd_status follow(hd_model_runner *x, hd_err *err) {
    command_header h;
    if (x->fixed.on) runner_decode_graph_reset(x);
    for (;;) {
        broadcast(x);
        HD_TRY(hd_stream_failure(x->env.stream, err));
        memcpy(&h, x->command, sizeof h);
        if (h.kind == COMMAND_END) return HD_OK;
        HD_TRY(run_command(x, &h, err));
        if (h.kind == COMMAND_LAUNCH || h.kind == COMMAND_MOVE) continue;
        HD_TRY(hd_stream_sync(x->env.stream, err));
    }
}

hd_status hd_model_runner_follow(hd_model_runner *x, hd_err *err) {
    char why[160];
    assert(x->o.role == HD_RUNNER_FOLLOWS);
    const hd_status st = follow(x, err);
    if (st == HD_OK) return HD_OK;
    snprintf(why, sizeof why, "rank %d: %.140s", x->env.comm->rank, err->msg);
    hd_comm_abort(x->env.comm, why);
    return st;
}
