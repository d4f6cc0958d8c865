/* test_ranks.c - every parallel layout: a sharded model computes the bits that the complete model
 * computes.
 *
 * All ranks of a layout run in this process, a thread each (comm/local.h). The ranks of an
 * attention group have the same rows; groups have their own. With HADAL_BACKEND=cuda the same on
 * GPUs, of which ranks share some if there are too few. */
#include "check.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/random_fill.h"
#include "comm/local.h"
#include "fakes/gpus.h"
#include "model/expert_fetch.h"
#include "model/model_internal.h"
#include "weights/configs.h"
#include "weights/experts/expert_moves.h"

enum {
    MAX_RANKS = 8,
    PROMPT = 70,
    SEQS = 2,
    ROWS = PROMPT * SEQS,
    POSITIONS = 128,
    STEPS = 3,
    MAX_SLOTS = 96
};

/* How a world runs. */
typedef struct variant {
    int32_t n_micro; /* micro-batches of a step, which cut sequences */
    bool rotates;    /* the experts of each rank's slots change before every step */
    int32_t room;    /* rows that a rank's experts take at once; 0: all */
    bool hot;        /* every row chooses expert HOT, of routers with a bias */
    hd_expert_split split;
    int32_t cp_part; /* rows for each rank from which cp divides a step */
    int32_t depth;   /* layers ahead of which experts are fetched, with dwdp */
    bool tight;      /* one expert at a time */
    bool joins;    /* the norm of a block completes the result of the one before, as on GPUs */
    bool official; /* precision official, on a CPU that of the reference */
} variant;

enum { HOT = 5 };

static bool on_gpus;

/* ---- one rank ---- */

typedef struct rank {
    hd_comm_local *world; /* NULL: alone */
    int32_t number, n;
    variant how;
    const hd_model_spec *spec;
    const hd_weights *whole;
    hd_parallel_config parallel;
    int32_t owner;        /* the attention group whose rows it has */
    int64_t dispatches;   /* that it has made */
    int64_t gathered;     /* bytes that it received by all-gathers in the prompt */
    int64_t dispatched;   /* and by dispatches */
    int32_t vocab;        /* rows of the LM head that it has */
    float *logits[STEPS]; /* [SEQS, vocab] */
    struct body *body;
    hd_err err;
} rank;

typedef struct body {
    hd_device *device;
    hd_stream *stream;
    hd_weights *weights;
    hd_expert_stage *stage; /* NULL: it has all experts that it computes */
    hd_model *model;
    hd_kv *kv;
    hd_batch batch;
    hd_ops ops;
    const hd_comm *comm;
    hd_comm joining; /* the same, which joins norms */
    int32_t *before; /* [SEQS] on the device: tokens that drafts follow */
    int32_t pages[SEQS][POSITIONS];
    int32_t n_pages;
    int32_t arrived; /* rows at this rank's experts in the last dispatch */
    int32_t group_rows[MAX_RANKS], group_logits[MAX_RANKS];
} body;

static hd_status open_before(body *b, hd_err *err) {
    static const int32_t tokens[SEQS] = {5, 5};
    void *there;
    HD_TRY(hd_device_alloc(b->device, &there, sizeof tokens, "tokens", err));
    b->before = there;
    hd_stream_upload(b->stream, there, tokens, sizeof tokens);
    return HD_OK;
}

static hd_status open_shard(body *b, rank *r) {
    hd_err *err = &r->err;
    const char *backend = on_gpus ? "cuda" : r->how.official ? "ref" : "cpu";
    const hd_ops_options one = {.cpu = {.n_threads = 1},
                                .precision = r->how.official ? HD_OFFICIAL : HD_EXACT,
                                .gpu = on_gpus ? gpus_for(r->number) : 0,
                                .cuda_path = gpus_path(backend)};
    HD_TRY(hd_ops_open(&b->ops, &b->device, backend, &one, err));
    HD_TRY(hd_stream_open(&b->stream, b->device, err));
    HD_TRY(hd_weights_open_shards(&b->weights, r->whole, &r->parallel, r->number, err));
    return hd_weights_upload(b->weights, b->device, b->stream, NULL, err);
}

/* Ranks of a group fetch what they lack from each other. */
static hd_status open_stage(body *b, const rank *all, rank *r) {
    hd_fetch_source peers[MAX_RANKS];
    const int32_t n = r->parallel.dwdp;
    if (n <= 1) return HD_OK;
    for (int32_t i = 0; i < n; i++) {
        const rank *peer = &all[r->number / n * n + i];
        peers[i] = (hd_fetch_source){.name = "peer", .has = peer->body->weights};
    }
    const size_t one = hd_weights_expert_bytes(r->whole, r->spec->n_layers - 1) + 6 * 256;
    const hd_expert_fetch_options o = {.bytes =
                                           r->how.tight ? (size_t)(r->how.depth + 1) * one : 0,
                                       .sources = peers,
                                       .n_sources = n,
                                       .depth = r->how.depth,
                                       .slice_bytes = 1000,
                                       .device = b->device,
                                       .stream = b->stream,
                                       .copy_stream = b->stream};
    return hd_expert_fetch_open(&b->stage, r->spec, b->weights, &o, &r->err);
}

/* all: the ranks, whose shards are open. */
static hd_status open_body(body *b, const rank *all, rank *r) {
    hd_err *err = &r->err;
    HD_TRY(open_stage(b, all, r));
    hd_model_env env = {.spec = r->spec,
                        .weights = b->weights,
                        .ops = &b->ops,
                        .device = b->device,
                        .stream = b->stream,
                        .stage = b->stage,
                        .split = r->how.split,
                        .cp_part = r->how.cp_part};
    if (r->world) {
        HD_TRY(hd_comm_local_join(r->world, r->number, b->device, b->stream, &b->ops, &b->comm,
                                  err));
    }
    if (r->how.joins) {
        b->joining = *b->comm;
        b->joining.joins_norms = true;
        b->comm = &b->joining;
    }
    env.comm = b->comm;
    const int32_t choices = r->n * ROWS * r->spec->route.top_k;
    const hd_model_limits limits = {.rows = ROWS,
                                    .logits = SEQS * hd_max_i32(r->spec->dspark.block, 1),
                                    .positions = POSITIONS,
                                    .expert_rows = r->how.room ? r->how.room : choices,
                                    .n_micro = r->how.n_micro};
    HD_TRY(hd_model_open(&b->model, &env, &limits, err));
    b->n_pages = (int32_t)hd_ceil_div(POSITIONS, hd_kv_shape_of(r->spec).page_tokens);
    for (int32_t i = 0; i < SEQS * b->n_pages; i++) {
        b->pages[i / b->n_pages][i % b->n_pages] = i;
    }
    const hd_kv_options kv = {
        .n_pages = {SEQS * b->n_pages, SEQS * b->n_pages}
    };
    HD_TRY(
        hd_kv_open(&b->kv, r->spec, r->spec->n_layers + r->spec->n_mtp, b->device, &kv, err));
    const hd_batch_limits batch = {ROWS, SEQS, b->n_pages};
    HD_TRY(hd_batch_open(&b->batch, &batch, b->device, err));
    return open_before(b, err);
}

static void close_body(body *b) {
    hd_batch_close(&b->batch);
    hd_kv_close(b->kv);
    hd_model_close(b->model);
    hd_expert_stage_close(b->stage);
    hd_weights_close(b->weights);
    hd_stream_close(b->stream);
    hd_device_close(b->device);
}

/* The passes of a test: a prompt, one token more, and a block of drafts after it. */
typedef enum pass { PASS_PROMPT, PASS_TOKEN, PASS_BLOCK } pass;

/* How many tokens an attention group has of each sequence: fewer than the group before in a prompt,
 * then one; EMPTY_GROUP has none then. */
enum { FEWER = 7, EMPTY_GROUP = 2 };

static int32_t tokens_of(const rank *r, int32_t owner, pass p) {
    if (p == PASS_PROMPT) return PROMPT - FEWER * owner;
    if (owner == EMPTY_GROUP) return 0;
    return p == PASS_TOKEN ? 1 : r->spec->dspark.block;
}

static void upload(body *b) {
    b->batch.n_micro = hd_model_n_micro(b->model, &b->batch);
    hd_batch_upload(&b->batch, b->stream);
}

/* The ranks of an attention group have the same rows. */
static void write_rows(body *b, const rank *r, pass p) {
    const int32_t owner = r->owner, n = tokens_of(r, owner, p);
    int32_t tokens[PROMPT], start = 0;
    for (int k = PASS_PROMPT; k < (int)p; k++) start += tokens_of(r, owner, (pass)k);
    for (int32_t k = 0; k < r->parallel.dp; k++) {
        const int32_t rows = tokens_of(r, k, p);
        b->group_rows[k] = SEQS * rows;
        b->group_logits[k] = SEQS * (p == PASS_BLOCK ? rows : rows > 0);
    }
    hd_batch_reset(&b->batch);
    b->batch.group_rows = r->parallel.dp > 1 ? b->group_rows : NULL;
    b->batch.group_logits = r->parallel.dp > 1 ? b->group_logits : NULL;
    for (int32_t q = 0; q < SEQS && n; q++) {
        for (int32_t i = 0; i < n; i++) {
            const int32_t at = start + i + 37 * q + 101 * owner;
            tokens[i] =
                (int32_t)(hd_random_fill_at(7, (uint64_t)at) % (uint64_t)r->spec->vocab);
        }
        hd_batch_add(&b->batch, &(hd_batch_seq){
                                    .tokens = tokens,
                                    .n = n,
                                    .start = start,
                                    .after = tokens[0],
                                    .n_logits = 1,
                                    .pages = {b->pages[q], b->pages[q]},
                                    .n_pages = b->n_pages
        });
    }
    if (p != PASS_BLOCK) upload(b);
}

static void keep(const body *b, const rank *r, int32_t step) {
    hd_stream_download(b->stream, r->logits[step], hd_model_logits(b->model),
                       SEQS * (size_t)r->spec->vocab * sizeof(float));
}

/* Every slot gets the expert of the rank's next slot, in all layers. */
static void rotate_slots(body *b, const rank *r) {
    const int32_t own = hd_weights_shard(b->weights)->n_experts;
    for (int32_t l = 0; r->how.rotates && l < r->spec->n_layers + r->spec->n_mtp; l++) {
        const hd_expert_map *map = hd_weights_expert_map(b->weights, l);
        int32_t expert[MAX_SLOTS];
        if (!map) continue;
        assert_true(map->n_slots <= MAX_SLOTS);
        for (int32_t s = 0; s < map->n_slots; s++) {
            expert[s] = map->expert[s / own * own + (s + 1) % own];
        }
        assert_int_equal(hd_weights_place_experts(b->weights, l, expert, b->stream, NULL),
                         HD_OK);
    }
}

/* Runs a block of drafts after the token, and the first place of it. */
static void run_block(body *b, const rank *r) {
    hd_model_absorb(b->model, b->kv, &b->batch);
    write_rows(b, r, PASS_BLOCK);
    b->batch.n_logits = 0;
    hd_batch_make_block(&b->batch, r->spec->dspark.block);
    upload(b);
    hd_model_draft_block(b->model, b->kv, &b->batch);
    const int32_t n = b->batch.n_seqs;
    hd_model_draft_place(b->model, 0, b->before, n, n);
}

static hd_rank_figures figures_of(body *b) {
    hd_rank_figures f = {0};
    hd_stream_wait(b->stream);
    if (b->comm) hd_comm_read_figures(b->comm, &f);
    return f;
}

/* Runs a prompt, one token more, and its draft if there is a drafter. */
static void run_body(body *b, rank *r) {
    rotate_slots(b, r);
    write_rows(b, r, PASS_PROMPT);
    hd_model_step(b->model, b->kv, &b->batch);
    r->vocab = hd_weights_shard(b->weights)->vocab;
    r->gathered = figures_of(b).of[HD_COMM_OP_ALL_GATHER].bytes;
    r->dispatched = figures_of(b).of[HD_COMM_OP_DISPATCH].bytes;
    keep(b, r, 0);
    rotate_slots(b, r);
    write_rows(b, r, PASS_TOKEN);
    hd_model_step(b->model, b->kv, &b->batch);
    keep(b, r, 1);
    if (r->spec->drafter == HD_DRAFTER_DSPARK) {
        run_block(b, r);
    } else if (r->spec->drafter != HD_DRAFTER_NONE) {
        hd_model_draft(b->model, b->kv, &b->batch, false);
    }
    if (r->spec->drafter != HD_DRAFTER_NONE) keep(b, r, 2);
    hd_stream_wait(b->stream);
    const int32_t *in_offset = b->model->acts.in_offset;
    if (in_offset) {
        hd_stream_download(b->stream, &b->arrived,
                           in_offset + hd_weights_shard(b->weights)->n_experts,
                           sizeof b->arrived);
        hd_stream_wait(b->stream);
    }
}

/* A rank that fails ends communication, or the others would wait for it. */
static void *run_rank(void *arg) {
    rank *r = arg;
    run_body(r->body, r);
    const hd_status st = hd_stream_sync(r->body->stream, &r->err);
    r->dispatches = figures_of(r->body).of[HD_COMM_OP_DISPATCH].calls;
    if (st != HD_OK) hd_comm_local_abort(r->world, r->err.msg);
    return NULL;
}

/* ---- worlds ---- */

static void open_rank(rank *r, int32_t number, const hd_weights *whole,
                      const hd_model_spec *spec, const hd_parallel_config *parallel) {
    *r = (rank){.number = number,
                .n = hd_parallel_world(parallel),
                .how = {.n_micro = 1},
                .whole = whole,
                .spec = spec,
                .parallel = *parallel};
    r->body = calloc(1, sizeof *r->body);
    assert_non_null(r->body);
    for (int i = 0; i < STEPS; i++) {
        r->logits[i] = calloc(SEQS * (size_t)spec->vocab, sizeof(float));
        assert_non_null(r->logits[i]);
    }
}

static void close_rank(rank *r) {
    for (int i = 0; i < STEPS; i++) free(r->logits[i]);
    free(r->body);
}

static void run_world(rank *ranks, const hd_parallel_config *parallel, const hd_weights *whole,
                      const hd_model_spec *spec, variant how) {
    pthread_t threads[MAX_RANKS];
    hd_comm_local *world;
    const int32_t n = hd_parallel_world(parallel);
    assert_true(n <= MAX_RANKS);
    assert_int_equal(hd_comm_local_open(&world, parallel, NULL), HD_OK);
    for (int32_t k = 0; k < n; k++) {
        open_rank(&ranks[k], k, whole, spec, parallel);
        ranks[k].world = world;
        ranks[k].how = how;
        ranks[k].owner = k / parallel->tp;
        if (open_shard(ranks[k].body, &ranks[k]) != HD_OK) fail_msg("%s", ranks[k].err.msg);
    }
    for (int32_t k = 0; k < n; k++) {
        if (open_body(ranks[k].body, ranks, &ranks[k]) != HD_OK)
            fail_msg("%s", ranks[k].err.msg);
    }
    for (int32_t k = 0; k < n; k++) {
        assert_int_equal(pthread_create(&threads[k], NULL, run_rank, &ranks[k]), 0);
    }
    for (int32_t k = 0; k < n; k++) pthread_join(threads[k], NULL);
    for (int32_t k = 0; k < n; k++) close_body(ranks[k].body); /* others read it until now */
    hd_comm_local_close(world);
    for (int32_t k = 0; k < n; k++) {
        if (ranks[k].err.status != HD_OK) fail_msg("rank %d: %s", k, ranks[k].err.msg);
    }
}

/* Every row chooses HOT, where the router has a bias. */
static void heat(const hd_weights *w, const hd_model_spec *spec) {
    for (int32_t l = 0; l < spec->n_layers + spec->n_mtp; l++) {
        float *v;
        const float *at = hd_weights_vector(w, l, HD_ROUTER_BIAS);
        if (!at) continue;
        memcpy(&v, &at, sizeof v); /* the complete weights are owned by this test */
        v[HOT] = 100;
    }
}

/* Randomizes vectors that dummy weights leave at zero, so that a wrong part of them is
 * detected. */
static void stir(const hd_weights *w, const hd_model_spec *spec, hd_role role, int32_t n) {
    for (int32_t l = 0; l < spec->n_layers + spec->n_mtp; l++) {
        float *v;
        const float *at = hd_weights_vector(w, l, role);
        if (!at) continue;
        memcpy(&v, &at, sizeof v); /* the complete weights are owned by this test */
        for (int32_t i = 0; i < n; i++) {
            v[i] = (float)(hd_random_fill_at((uint64_t)l, (uint64_t)i) % 1000) / 1000.0f - 0.5f;
        }
    }
}

static hd_weights *make_weights(const hd_model_spec *spec) {
    hd_weights *w;
    assert_int_equal(hd_weights_open_dummy(&w, spec, NULL, NULL), HD_OK);
    stir(w, spec, HD_SINK, spec->n_heads);
    stir(w, spec, HD_ROUTER_BIAS, spec->route.n_experts);
    return w;
}

static double largest(const float *x, size_t n) {
    double most = 0;
    for (size_t i = 0; i < n; i++) most = fmax(most, fabs((double)x[i]));
    return most;
}

static void assert_near(const float *got, const float *want, size_t n, const char *what) {
    const double scale = largest(want, n);
    assert_true(scale > 0.01 && scale < 1e3);
    for (size_t i = 0; i < n; i++) {
        const double off = fabs((double)got[i] - (double)want[i]);
        if (!(off <= 1e-4 * scale)) {
            fail_msg("%s: logit %zu is %g, whole %g", what, i, (double)got[i], (double)want[i]);
        }
    }
}

static const char *const names[] = {"tiny_v2", "tiny_v3", "tiny_v32", "tiny_v4",
                                    "tiny_v4_dspark"};

/* Under the thread sanitizer two families suffice. */
static size_t next_name(size_t k) {
    return is_brief() ? k + 2 : k + 1;
}

static int steps_of(const hd_model_spec *spec) {
    return spec->n_mtp ? STEPS : STEPS - 1;
}

/* A rank alone, with the rows that a rank of attention group `owner` has. */
static void run_alone_as(rank *alone, const hd_weights *whole, const hd_model_spec *spec,
                         int32_t owner, variant how) {
    const hd_parallel_config single = hd_parallel_single();
    body b = {0};
    open_rank(alone, 0, whole, spec, &single);
    alone->owner = owner;
    alone->how.official = how.official;
    if (open_shard(&b, alone) != HD_OK || open_body(&b, NULL, alone) != HD_OK)
        fail_msg("%s", alone->err.msg);
    run_body(&b, alone);
    close_body(&b);
}

static void run_alone(rank *alone, const hd_weights *whole, const hd_model_spec *spec,
                      int32_t owner) {
    run_alone_as(alone, whole, spec, owner, (variant){0});
}

static void describe(char *out, size_t size, const char *name, const hd_parallel_config *l) {
    snprintf(out, size, "%s, tp %d dp %d ep %d etp %d dense_tp %d head_tp %d heads %d cp %d",
             name, l->tp, l->dp, l->ep, l->etp, l->dense_tp, l->head_tp, l->head_parts, l->cp);
}

/* Every rank has the bits of one rank alone, or with sum_in_ranks nearly its values. Returns how
 * many dispatches each rank has made. most: rows at the busiest rank's experts in the last dispatch. */
static int64_t check_variant_rows(const char *name, const hd_parallel_config *l, variant how,
                                  int32_t *most) {
    hd_model_spec *spec = config_open(name);
    hd_weights *whole = make_weights(spec);
    if (how.hot) heat(whole, spec);
    const size_t n = SEQS * (size_t)spec->vocab;
    rank alone = {0}, ranks[MAX_RANKS];
    char what[200];
    describe(what, sizeof what, name, l);
    run_world(ranks, l, whole, spec, how);
    const int64_t dispatches = ranks[0].dispatches;
    for (int32_t r = 0; r < hd_parallel_world(l); r++) {
        if (r % l->tp == 0) {
            close_rank(&alone);
            run_alone(&alone, whole, spec, r / l->tp);
        }
        for (int i = 0; i < steps_of(spec); i++) {
            if (tokens_of(&ranks[r], r / l->tp, (pass)i) == 0) continue; /* no logits */
            assert_true(largest(alone.logits[i], n) > 0.01);
            if (l->sum_in_ranks) {
                assert_near(ranks[r].logits[i], alone.logits[i], n, what);
            } else if (memcmp(ranks[r].logits[i], alone.logits[i], n * sizeof(float)) != 0) {
                fail_msg("%s: rank %d has other bits in step %d", what, r, i);
            }
        }
    }
    *most = 0;
    for (int32_t r = 0; r < hd_parallel_world(l); r++) {
        *most = hd_max_i32(*most, ranks[r].body->arrived);
        close_rank(&ranks[r]);
    }
    close_rank(&alone);
    hd_weights_close(whole);
    hd_model_spec_close(spec);
    return dispatches;
}

static int64_t check_variant(const char *name, const hd_parallel_config *l, variant how) {
    int32_t most;
    return check_variant_rows(name, l, how, &most);
}

static void check_layout(const char *name, const hd_parallel_config *l, int32_t n_micro,
                         bool rotates) {
    check_variant(name, l, (variant){.n_micro = n_micro, .rotates = rotates});
}

static void tensor_ranks_have_the_same_bits(void **state) {
    (void)state;
    for (size_t k = next_name(0) - 1; k < HD_LEN(names); k = next_name(k)) {
        for (int32_t tp = 2; tp <= (is_brief() ? 2 : 8); tp *= 2) {
            hd_model_spec *spec = config_open(names[k]);
            hd_parallel_config l = hd_parallel_common(tp, 1, 1, spec);
            hd_model_spec_close(spec);
            check_layout(names[k], &l, tp == 4 ? SEQS : 1, false);
        }
        hd_parallel_config sums = hd_parallel_tensor(2);
        sums.sum_in_ranks = true;
        check_layout(names[k], &sums, 1, false);
    }
}

/* In layouts whose attention groups complete the results of attention, of MLPs and of experts, or of some. */
static void joined_norms_have_the_same_bits(void **state) {
    (void)state;
    static const int32_t sizes[][3] = {
  /* tp dp ep */
        {2, 1, 1},
        {4, 1, 1},
        {2, 1, 2},
        {2, 2, 2}
    };
    for (size_t k = next_name(0) - 1; k < HD_LEN(names); k = next_name(k)) {
        hd_model_spec *spec = config_open(names[k]);
        for (size_t i = 0; i < (is_brief() ? 1 : HD_LEN(sizes)); i++) {
            const hd_parallel_config l =
                hd_parallel_common(sizes[i][0], sizes[i][1], sizes[i][2], spec);
            check_variant(names[k], &l, (variant){.n_micro = 1 + (i == 1), .joins = true});
        }
        hd_model_spec_close(spec);
        hd_parallel_config sums = hd_parallel_tensor(2);
        sums.sum_in_ranks = true;
        check_variant(names[k], &sums, (variant){.n_micro = 1, .joins = true});
    }
}

static void check_expert_world(const char *name, int32_t ep, int32_t redundant, int32_t n_micro,
                               bool rotates) {
    const hd_parallel_config l = hd_parallel_expert(ep, redundant);
    check_layout(name, &l, n_micro, rotates);
}

/* Also when rows travel while another micro-batch computes. */
static void expert_ranks_have_the_same_bits(void **state) {
    (void)state;
    for (size_t k = next_name(0) - 1; k < HD_LEN(names); k = next_name(k)) {
        check_expert_world(names[k], 4, 0, 1 + (int32_t)k % HD_MAX_MICRO, false);
    }
    check_expert_world("tiny_v3", 3, 2, SEQS, false);
    check_expert_world("tiny_v4", 3, 6, SEQS, false);
    check_expert_world("tiny_v4_dspark", 3, 6, SEQS, false);
}

static void check_common(const char *name, int32_t tp, int32_t ep, int32_t n_micro,
                         bool rotates) {
    hd_model_spec *spec = config_open(name);
    const hd_parallel_config l = hd_parallel_common(tp, 1, ep, spec);
    hd_model_spec_close(spec);
    check_layout(name, &l, n_micro, rotates);
}

/* Ranks with rows in common, also if there are fewer rows than ranks. */
static void common_rows_have_the_same_bits(void **state) {
    (void)state;
    for (size_t k = next_name(0) - 1; k < HD_LEN(names); k = next_name(k)) {
        check_common(names[k], 1, 4, 3, false);
        check_common(names[k], 2, 2, 1 + (int32_t)(k + 1) % HD_MAX_MICRO, false);
        check_common(names[k], 4, 2, 1, false);
    }
    check_common("tiny_v3", 1, 2, SEQS, true);
    check_common("tiny_v4", 2, 4, SEQS, false);
}

/* Context parallelism: ranks with the same heads divide the rows of queries, unless there are few. */
static void divided_rows_have_the_same_bits(void **state) {
    (void)state;
    static const int32_t sizes[][4] = {
  /* tp cp dp ep */
        {1, 2, 1, 1},
        {1, 3, 1, 3},
        {2, 2, 1, 1},
        {2, 3, 1, 6},
        {1, 2, 2, 4}
    };
    for (size_t k = next_name(0) - 1; k < HD_LEN(names); k = next_name(k)) {
        for (size_t i = 0; i < (is_brief() ? 1 : HD_LEN(sizes)); i++) {
            hd_model_spec *spec = config_open(names[k]);
            const hd_parallel_config l =
                hd_parallel_context(sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3], spec);
            hd_model_spec_close(spec);
            check_layout(names[k], &l, i == 2 ? SEQS : 1, i == 1);
        }
    }
}

/* Floats of a row that ranks gather in all layers (docs/ranks.md): the results of the feed-forward block, and if
 * rows are divided those of attention, and what it keeps. */
static int64_t gathered_floats(const hd_model_spec *c, bool divided) {
    int64_t n = 0;
    for (int32_t i = 0; i < c->n_layers; i++) {
        const hd_attention kind = c->layers[i].attention;
        n += (divided ? 2 : 1) * c->hidden;
        if (!divided) continue;
        n += hd_is_hybrid(c) ? c->head_dim : c->kv_rank + c->rope_dim;
        if (kind == HD_ATTN_MLA_SPARSE) n += c->index_dim;
        if (kind == HD_ATTN_HCA) n += 2 * c->head_dim;
        if (kind == HD_ATTN_CSA) n += 2 * (2 * c->head_dim + 2 * c->index_dim);
    }
    return n;
}

static void check_gathered(const char *name, int32_t cp, int32_t part) {
    const bool divided = ROWS >= cp * part;
    hd_model_spec *spec = config_open(name);
    hd_weights *whole = make_weights(spec);
    const hd_parallel_config l = hd_parallel_context(1, cp, 1, cp, spec);
    rank ranks[MAX_RANKS];
    run_world(ranks, &l, whole, spec, (variant){.n_micro = 1, .cp_part = part});
    int64_t gathered = 0, words = 0;
    for (int32_t r = 0; r < cp; r++) {
        gathered += ranks[r].gathered;
        words += spec->vocab - ranks[r].vocab;
        close_rank(&ranks[r]);
    }
    const int64_t rows = (int64_t)ROWS * (cp - 1);
    assert_int_equal(gathered, (rows * gathered_floats(spec, divided) + SEQS * words) *
                                   (int64_t)sizeof(float));
    hd_weights_close(whole);
    hd_model_spec_close(spec);
}

/* Ranks receive the rows of the others once for each block, and nothing else but logits; of a shorter prompt than
 * pays, none in attention. */
static void divided_rows_exchange_what_the_formula_says(void **state) {
    (void)state;
    for (size_t k = 0; k < HD_LEN(names); k++) {
        check_gathered(names[k], 2, 0);
        check_gathered(names[k], 3, ROWS / 3);
        check_gathered(names[k], 2, ROWS / 2 + 1);
    }
}

/* Layouts of all kinds: groups that lie in others, contain them, or overlap them; parts that are
 * not equal; rows of one step that all belong to another attention group. */
static void any_layout_has_the_same_bits(void **state) {
    (void)state;
    static const struct {
        const char *name;
        hd_parallel_config l; /* tp dp ep etp dense_tp head_tp redundant head_parts sums */
        int32_t n_micro;
    } cases[] = {
        {"tiny_v3",  {2, 2, 2, 2, 4, 1, 0, 0, 0, false, false, 0, 0}, 3   },
        {"tiny_v4",  {2, 2, 2, 2, 2, 4, 0, 0, 0, false, false, 0, 0}, SEQS},
        {"tiny_v2",  {2, 2, 1, 4, 1, 2, 0, 0, 0, false, false, 0, 0}, 1   },
        {"tiny_v32", {1, 4, 2, 2, 4, 2, 0, 0, 0, false, false, 0, 0}, 4   },
        {"tiny_v3",  {2, 3, 2, 3, 3, 3, 0, 0, 0, false, false, 0, 0}, 2   },
        {"tiny_v4",  {2, 3, 1, 3, 6, 2, 0, 0, 0, false, false, 0, 0}, SEQS},
        {"tiny_v2",  {3, 1, 1, 3, 3, 3, 0, 0, 0, false, false, 0, 0}, 1   },
        {"tiny_v4",  {3, 2, 6, 1, 2, 1, 0, 0, 1, false, false, 0, 0}, 3   },
        {"tiny_v32", {4, 2, 4, 2, 8, 8, 0, 0, 2, false, false, 0, 0}, 4   },
        {"tiny_v4",  {1, 8, 4, 1, 2, 8, 0, 0, 0, false, false, 0, 0}, 1   },
        {"tiny_v3",  {2, 2, 1, 1, 1, 1, 0, 0, 0, true, false, 0, 0},  1   },
    };
    for (size_t i = 0; i < HD_LEN(cases) && (i < 2 || !is_brief()); i++) {
        check_layout(cases[i].name, &cases[i].l, cases[i].n_micro, false);
    }
}

/* ---- every pair of choices ---- */

/* What a layout chooses; of families some draft by MTP, some by DSpark, some not at all. */
enum { FAMILY, TP, DP, EP, ETP, DENSE_TP, HEAD_TP, REDUNDANT, N_MICRO, N_FACTORS, LEVELS = 5 };

static const struct {
    int32_t n, at[LEVELS];
} factors[N_FACTORS] = {
    [FAMILY] = {5, {0, 1, 2, 3, 4}},
      [TP] = {4, {1, 2, 3, 4}   },
    [DP] = {4, {1, 2, 3, 4}   },
      [EP] = {5, {1, 2, 3, 4, 8}},
    [ETP] = {3, {1, 2, 4}      },
      [DENSE_TP] = {4, {1, 2, 4, 8}   },
    [HEAD_TP] = {4, {1, 2, 4, 8}   },
      [REDUNDANT] = {4, {0, 1, 2, 4}   },
    [N_MICRO] = {3, {1, 2, 3}      },
};

typedef struct choice {
    uint8_t level[N_FACTORS];
} choice;

typedef struct pairs {
    bool covered[N_FACTORS][LEVELS][N_FACTORS][LEVELS];
} pairs;

static int32_t value_of(const choice *c, int factor) {
    return factors[factor].at[c->level[factor]];
}

/* families: [LEVELS] */
static hd_parallel_config layout_of(const choice *c, hd_model_spec *const *families) {
    const hd_parallel_config common =
        hd_parallel_common(value_of(c, TP), 1, 1, families[c->level[FAMILY]]);
    return (hd_parallel_config){.tp = value_of(c, TP),
                                .dp = value_of(c, DP),
                                .ep = value_of(c, EP),
                                .etp = value_of(c, ETP),
                                .dense_tp = value_of(c, DENSE_TP),
                                .head_tp = value_of(c, HEAD_TP),
                                .redundant = value_of(c, REDUNDANT),
                                .head_parts = common.head_parts};
}

static bool can_be(const choice *c, hd_model_spec *const *families) {
    const hd_parallel_config l = layout_of(c, families);
    if (l.tp * l.dp > MAX_RANKS || hd_parallel_check(&l, NULL) != HD_OK) return false;
    if (l.ep == 1) return l.redundant == 0;
    return (families[c->level[FAMILY]]->route.n_experts + l.redundant) % l.ep == 0;
}

/* The next one in order; false: there is none. */
static bool count_up(choice *c) {
    for (int f = 0; f < N_FACTORS; f++) {
        if (++c->level[f] < factors[f].n) return true;
        c->level[f] = 0;
    }
    return false;
}

/* How many pairs of a choice are not covered; covers them. */
static int32_t count_new(pairs *p, const choice *c, bool covers) {
    int32_t n = 0;
    for (int f = 0; f < N_FACTORS; f++) {
        for (int g = f + 1; g < N_FACTORS; g++) {
            bool *is = &p->covered[f][c->level[f]][g][c->level[g]];
            n += !*is;
            *is |= covers;
        }
    }
    return n;
}

/* Choices that have every pair which any choice can have: greedily those with most new ones. The caller frees
 * it. */
static choice *cover_pairs(hd_model_spec *const *families, int32_t *n) {
    static pairs seen;
    choice *out = NULL;
    memset(&seen, 0, sizeof seen);
    for (*n = 0;; ++*n) {
        choice c = {{0}}, best = c;
        int32_t most = 0;
        do {
            const int32_t new_ones = can_be(&c, families) ? count_new(&seen, &c, false) : 0;
            if (new_ones > most) best = c;
            if (new_ones > most) most = new_ones;
        } while (count_up(&c));
        if (most == 0) return out;
        count_new(&seen, &best, true);
        out = realloc(out, (size_t)(*n + 1) * sizeof *out);
        assert_non_null(out);
        out[*n] = best;
    }
}

static void every_pair_of_choices_has_the_same_bits(void **state) {
    hd_model_spec *families[LEVELS];
    int32_t n;
    (void)state;
    static_assert(HD_LEN(names) == LEVELS, "a level for each family");
    for (int32_t i = 0; i < LEVELS; i++) families[i] = config_open(names[i]);
    choice *choices = cover_pairs(families, &n);
    assert_true(n > LEVELS * LEVELS);
    for (int32_t i = 0; i < n; i += is_brief() ? n : 1) {
        const choice *c = &choices[i];
        const hd_parallel_config l = layout_of(c, families);
        check_layout(names[c->level[FAMILY]], &l, value_of(c, N_MICRO), false);
    }
    for (int32_t i = 0; i < LEVELS; i++) hd_model_spec_close(families[i]);
    free(choices);
}

/* Rows that have no room at once come in further rounds, also if most groups have none and if all of
 * them choose the same expert. */
static void rounds_have_the_same_bits(void **state) {
    (void)state;
    static const struct {
        const char *name;
        hd_parallel_config l; /* tp dp ep etp dense_tp head_tp redundant head_parts sums */
        int32_t n_micro;
    } cases[] = {
        {"tiny_v3",        {4, 1, 4, 1, 1, 4, 0, 0, 1, false, false, 0, 0}, 1   },
        {"tiny_v4",        {1, 4, 4, 1, 1, 1, 4, 0, 0, false, false, 0, 0}, SEQS},
        {"tiny_v3",        {2, 2, 2, 2, 4, 1, 0, 0, 0, false, false, 0, 0}, SEQS},
        {"tiny_v32",       {2, 2, 4, 1, 2, 2, 0, 0, 0, false, false, 0, 0}, 3   },
        {"tiny_v4_dspark", {1, 3, 3, 1, 1, 1, 6, 0, 0, false, false, 0, 0}, SEQS},
    };
    for (size_t i = 0; i < HD_LEN(cases) && (i < 2 || !is_brief()); i++) {
        const hd_parallel_config *l = &cases[i].l;
        variant how = {.n_micro = cases[i].n_micro};
        const int64_t one = check_variant(cases[i].name, l, how);
        how.room = 16 * l->ep;
        const int64_t some = check_variant(cases[i].name, l, how);
        if (on_gpus) { /* as many rounds as there may be, whatever is chosen */
            assert_true(one > 0 && some > one);
            continue;
        }
        how.hot = true;
        const int64_t many = check_variant(cases[i].name, l, how);
        assert_true(one > 0 && some > one && many >= 2 * one);
        how.room = l->ep; /* one row of each rank */
        assert_true(check_variant(cases[i].name, l, how) > 10 * one);
    }
}

/* Ranks that fetch experts of their part from each other, and exchange rows with other parts, in one round and
 * in many. */
static void fetched_experts_have_the_same_bits(void **state) {
    (void)state;
    static const struct {
        const char *name;
        hd_parallel_config l; /* tp dp ep etp dense_tp head_tp redundant dwdp head_parts sums */
        int32_t n_micro, depth;
    } cases[] = {
        {"tiny_v4",        {1, 4, 2, 1, 1, 1, 0, 2, 0, false, false, 0, 0}, 1,    1},
        {"tiny_v3",        {1, 6, 2, 1, 1, 1, 0, 3, 0, false, false, 0, 0}, SEQS, 2},
        {"tiny_v32",       {1, 8, 2, 1, 1, 1, 0, 2, 0, false, false, 0, 0}, 1,    3}, /* two worlds */
        {"tiny_v4_dspark", {1, 6, 3, 1, 1, 1, 6, 2, 0, false, false, 0, 0}, SEQS, 1},
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        const hd_parallel_config *l = &cases[i].l;
        variant how = {.n_micro = cases[i].n_micro, .depth = cases[i].depth};
        const int64_t one = check_variant(cases[i].name, l, how);
        how.room = 16 * l->ep;
        how.tight = true;
        assert_true(one > 0 && check_variant(cases[i].name, l, how) > one);
    }
}

/* Twice the mean, but room for a small step at once. */
static void room_is_bounded(void **state) {
    (void)state;
    const hd_parallel_config l = {.tp = 1, .dp = 72, .ep = 72, .etp = 1};
    assert_int_equal(hd_model_most_expert_rows(&l, 4096, 8), 72 * 4096 * 8);
    assert_int_equal(hd_model_expert_rows_of(&l, 4096, 8), 2 * 4096 * 8);
    assert_int_equal(hd_model_expert_rows_of(&l, 4, 8), HD_LEAST_EXPERT_ROWS);
    const hd_parallel_config two = hd_parallel_expert(2, 0);
    assert_int_equal(hd_model_expert_rows_of(&two, 100, 6), 2 * 100 * 6);
    assert_int_equal(hd_model_expert_rows_of(&two, 1, 6), 2 * 6);
}

/* Experts that change their slots before every step change no bit, with copies too. */
static void moving_experts_have_the_same_bits(void **state) {
    (void)state;
    check_expert_world("tiny_v3", 1, 0, 1, true);
    check_expert_world("tiny_v32", 4, 0, 1, true);
    check_expert_world("tiny_v3", 3, 2, SEQS, true);
    check_expert_world("tiny_v4", 3, 6, 1, true);
}

/* Which copy of an expert computes a row changes no bit. With the rows of all ranks together the busiest
 * rank has the fewest. */
static void splits_have_the_same_bits(void **state) {
    (void)state;
    static const struct {
        const char *name;
        hd_parallel_config l; /* tp dp ep etp dense_tp head_tp redundant head_parts sums */
        variant how;
    } cases[] = {
        {"tiny_v4",        {1, 4, 4, 1, 1, 1, 8, 0, 0, false, false, 0, 0}, {.n_micro = 1}   },
        {"tiny_v3",
         {1, 3, 3, 1, 1, 1, 5, 0, 0, false, false, 0, 0},
         {.n_micro = SEQS, .rotates = true}                                                  },
        {"tiny_v4",        {4, 1, 2, 2, 1, 4, 4, 0, 1, false, false, 0, 0}, {.n_micro = 1}   },
        {"tiny_v4",        {2, 2, 2, 2, 4, 1, 6, 0, 0, false, false, 0, 0}, {.n_micro = SEQS}},
        {"tiny_v3",
         {1, 4, 4, 1, 1, 1, 8, 0, 0, false, false, 0, 0},
         {.n_micro = 1, .room = 64}                                                          },
        {"tiny_v4_dspark",
         {1, 3, 3, 1, 1, 1, 6, 0, 0, false, false, 0, 0},
         {.n_micro = SEQS, .room = 48}                                                       },
    };
    for (size_t i = 0; i < HD_LEN(cases) && (i < 1 || !is_brief()); i++) {
        int32_t most[3];
        for (int32_t k = HD_SPLIT_TURNS; k <= HD_SPLIT_FLOW; k++) {
            variant how = cases[i].how;
            how.split = (hd_expert_split)k;
            check_variant_rows(cases[i].name, &cases[i].l, how, &most[k]);
        }
        /* else the last dispatch is a part */
        if (cases[i].how.room || cases[i].how.n_micro > 1) continue;
        assert_true(most[HD_SPLIT_FLOW] > 0 && most[HD_SPLIT_FLOW] <= most[HD_SPLIT_LOCAL]);
        assert_true(most[HD_SPLIT_FLOW] <= most[HD_SPLIT_TURNS] - (i == 0));
    }
}

/* As many spare slots as experts: both halves of the ranks have all of them, each rank of a half all or a part of
 * each. Rows of all ranks together are dealt over the halves evenly, whatever they choose. */
static void both_parts_with_all_experts_get_equal_rows(void **state) {
    (void)state;
    static const hd_parallel_config layouts[] = {
        {1, 2, 2, 1, 1, 1, 12, 0, 0, false, false, 0, 0},
        {4, 1, 2, 2, 4, 4, 12, 0, 2, false, false, 0, 0}
    };
    for (size_t i = 0; i < HD_LEN(layouts); i++) {
        const hd_parallel_config *l = &layouts[i];
        hd_model_spec *spec = config_open("tiny_v4");
        assert_int_equal(l->redundant, spec->route.n_experts);
        const int32_t rows =
            (l->tp > 1 ? 1 : l->dp) * SEQS * spec->route.top_k; /* of the draft */
        hd_model_spec_close(spec);
        int32_t most, turns;
        variant how = {.n_micro = 1, .split = HD_SPLIT_FLOW};
        check_variant_rows("tiny_v4", l, how, &most);
        how.split = HD_SPLIT_TURNS;
        check_variant_rows("tiny_v4", l, how, &turns);
        assert_int_equal(most, hd_ceil_div(rows, 2));
        assert_true(turns >= most);
    }
}

/* ---- rows that travel in FP8 ---- */

/* The logits of a world: the root of the mean square of their differences from those of a rank alone, over that of
 * the logits; and the bytes that dispatches of the prompt brought. */
typedef struct fp8_result {
    double error;
    int64_t bytes;
    uint64_t bits; /* of all logits of the first attention group */
} fp8_result;

static void add_bits(uint64_t *bits, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) *bits = *bits * 31 + hd_f32_bits(x[i]);
}

static fp8_result run_fp8(const hd_model_spec *spec, hd_parallel_config l, variant how,
                          bool fp8_rows) {
    hd_weights *whole = make_weights(spec);
    const size_t n = SEQS * (size_t)spec->vocab;
    fp8_result out = {0};
    double wrong = 0, all = 0;
    rank ranks[MAX_RANKS];
    l.fp8_rows = fp8_rows;
    run_world(ranks, &l, whole, spec, how);
    for (int32_t r = 0; r < hd_parallel_world(&l); r++) {
        rank alone;
        run_alone_as(&alone, whole, spec, r / l.tp, how);
        for (int i = 0; i < 2; i++) {
            assert_true(largest(alone.logits[i], n) > 0.01);
            for (size_t k = 0; k < n; k++) {
                const double want = (double)alone.logits[i][k];
                const double off = (double)ranks[r].logits[i][k] - want;
                wrong += off * off;
                all += want * want;
            }
            if (r == 0) add_bits(&out.bits, ranks[r].logits[i], n);
        }
        out.bytes += ranks[r].dispatched;
        close_rank(&alone);
        close_rank(&ranks[r]);
    }
    out.error = sqrt(wrong / all);
    hd_weights_close(whole);
    return out;
}

#define FP8_OF_V3                                           \
    "{\"quantization_config\": {\"quant_method\": \"fp8\"," \
    "\"fmt\": \"e4m3\", \"weight_block_size\": [128, 128]}}"
#define FP4_OF_V4                                                                       \
    "{\"expert_dtype\": \"fp4\", \"quantization_config\": {\"quant_method\": \"fp8\", " \
    "\"fmt\": \"e4m3\", \"scale_fmt\": \"ue8m0\", \"weight_block_size\": [128, 128]}}"

static const struct {
    const char *name, *changes;
} fp8_models[] = {
    {"tiny_v3", FP8_OF_V3},
    {"tiny_v4", FP4_OF_V4}
};

static const int32_t fp8_layouts[][3] = {
  /* tp dp ep */
    {1, 2, 2},
    {2, 2, 4}
};

/* Precision official rounds what FP8 and FP4 experts multiply in the same way: to round it before it travels
 * changes no bit, also in many rounds. */
static void fp8_rows_of_official_products_have_the_same_bits(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(fp8_models); i++) {
        hd_model_spec *spec = config_changed(fp8_models[i].name, fp8_models[i].changes);
        for (size_t k = 0; k < HD_LEN(fp8_layouts); k++) {
            const int32_t *by = fp8_layouts[k];
            const hd_parallel_config l = hd_parallel_common(by[0], by[1], by[2], spec);
            const variant how = {.n_micro = 1, .official = true, .room = k ? 16 * by[2] : 0};
            if (on_gpus && by[0] > 1) continue; /* cuts through blocks, docs/ranks.md */
            const fp8_result got = run_fp8(spec, l, how, true);
            if (got.error > 0) {
                const double plain = run_fp8(spec, l, how, false).error;
                fail_msg("%s, tp %d, ep %d: error %g, of float32 rows %g", fp8_models[i].name,
                         l.tp, l.ep, got.error, plain);
            }
            if (on_gpus || is_brief()) continue; /* bytes of rows of GPUs are not counted */
            assert_true(3 * got.bytes < run_fp8(spec, l, how, false).bytes);
        }
        hd_model_spec_close(spec);
    }
}

/* Where experts multiply float32, rounding is an error, which the layout does not change. */
static void fp8_rows_of_exact_products_are_near(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(fp8_models); i++) {
        hd_model_spec *spec = config_changed(fp8_models[i].name, fp8_models[i].changes);
        uint64_t bits = 0;
        for (size_t k = 0; k < HD_LEN(fp8_layouts); k++) {
            const int32_t *by = fp8_layouts[k];
            const hd_parallel_config l = hd_parallel_common(by[0], by[1], by[2], spec);
            const fp8_result got = run_fp8(spec, l, (variant){.n_micro = 1}, true);
            if (k) assert_true(got.bits == bits);
            bits = got.bits;
            assert_true(got.error > 1e-3 && got.error < 0.3); /* random weights */
        }
        hd_model_spec_close(spec);
    }
}

/* The input of a layer is the output of the one before: a drafter that reads either side drafts
 * the same. */
static void both_sides_of_a_tap_have_the_same_bits(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v4_dspark");
    hd_weights *whole = make_weights(spec);
    const hd_parallel_config single = hd_parallel_single();
    const size_t n = SEQS * (size_t)spec->vocab;
    rank after, before, other;
    spec->dspark.taps[0] = 1;
    const variant plain = {.n_micro = 1};
    run_world(&other, &single, whole, spec, plain);
    spec->dspark.taps[0] = 2;
    spec->dspark.taps[1] = 4;
    run_world(&after, &single, whole, spec, plain);
    for (int32_t i = 0; i < spec->dspark.n_taps; i++) spec->dspark.taps[i]++;
    spec->dspark.side = HD_TAP_INPUT;
    run_world(&before, &single, whole, spec, plain);
    assert_memory_equal(before.logits[2], after.logits[2], n * sizeof(float));
    assert_memory_not_equal(other.logits[2], after.logits[2], n * sizeof(float));
    close_rank(&after);
    close_rank(&before);
    close_rank(&other);
    hd_weights_close(whole);
    hd_model_spec_close(spec);
}

static void a_shard_alone_is_refused(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v3");
    hd_weights *whole = make_weights(spec), *w;
    const hd_parallel_config two = hd_parallel_tensor(2);
    hd_model *m;
    hd_ops ops;
    hd_err err = {0};
    hd_ops_init_ref(&ops, HD_EXACT);
    assert_int_equal(hd_weights_open_shards(&w, whole, &two, 0, &err), HD_OK);
    const hd_model_env env = {.spec = spec, .weights = w, .ops = &ops};
    const hd_model_limits limits = {.rows = 1, .logits = 1, .positions = 1};
    assert_int_not_equal(hd_model_open(&m, &env, &limits, &err), HD_OK);
    assert_non_null(strstr(err.msg, "needs its other ranks"));
    hd_weights_close(w);
    hd_weights_close(whole);
    hd_model_spec_close(spec);
}

int test_ranks(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensor_ranks_have_the_same_bits),
        cmocka_unit_test(joined_norms_have_the_same_bits),
        cmocka_unit_test(expert_ranks_have_the_same_bits),
        cmocka_unit_test(common_rows_have_the_same_bits),
        cmocka_unit_test(divided_rows_have_the_same_bits),
        cmocka_unit_test(divided_rows_exchange_what_the_formula_says),
        cmocka_unit_test(any_layout_has_the_same_bits),
        cmocka_unit_test(every_pair_of_choices_has_the_same_bits),
        cmocka_unit_test(rounds_have_the_same_bits),
        cmocka_unit_test(fetched_experts_have_the_same_bits),
        cmocka_unit_test(room_is_bounded),
        cmocka_unit_test(moving_experts_have_the_same_bits),
        cmocka_unit_test(splits_have_the_same_bits),
        cmocka_unit_test(both_parts_with_all_experts_get_equal_rows),
        cmocka_unit_test(fp8_rows_of_official_products_have_the_same_bits),
        cmocka_unit_test(fp8_rows_of_exact_products_are_near),
        cmocka_unit_test(both_sides_of_a_tap_have_the_same_bits),
        cmocka_unit_test(a_shard_alone_is_refused),
    };
    const struct CMUnitTest of_gpus[] = {
        cmocka_unit_test(tensor_ranks_have_the_same_bits),
        cmocka_unit_test(expert_ranks_have_the_same_bits),
        cmocka_unit_test(common_rows_have_the_same_bits),
        cmocka_unit_test(divided_rows_have_the_same_bits),
        cmocka_unit_test(any_layout_has_the_same_bits),
        cmocka_unit_test(rounds_have_the_same_bits),
        cmocka_unit_test(moving_experts_have_the_same_bits),
        cmocka_unit_test(splits_have_the_same_bits),
        cmocka_unit_test(both_parts_with_all_experts_get_equal_rows),
        cmocka_unit_test(fp8_rows_of_official_products_have_the_same_bits),
        cmocka_unit_test(fp8_rows_of_exact_products_are_near),
        cmocka_unit_test(both_sides_of_a_tap_have_the_same_bits),
    };
    int failed = cmocka_run_group_tests_name("ranks", tests, NULL, NULL);
    on_gpus = gpus_are_wanted();
    if (on_gpus) failed += cmocka_run_group_tests_name("ranks on GPUs", of_gpus, NULL, NULL);
    return failed;
}
