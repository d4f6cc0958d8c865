/* groups.c - what the leaders of several attention groups agree on, in words that they gather in host
 * memory: before an eager pass how many rows each has, and before a step which graph all launch. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "runner/groups_internal.h"

enum { LEAST_TIMED_ROWS = 32 }; /* of fewer the fixed costs would count */

/* What a leader says before a pass. */
typedef struct pass_word {
    int32_t pass, rows, logits, places;
    int32_t fetch_from; /* rows of a rank from which on all fetch experts; 0: never */
} pass_word;

union word {
    pass_word pass;
    runner_step_word step;
};

hd_status runner_groups_open(hd_model_runner *x, hd_err *err) {
    x->words = calloc((size_t)x->n_groups, sizeof(union word));
    return x->words ? HD_OK
                    : HD_FAIL(err, HD_ENOMEM, "no memory for %d attention groups", x->n_groups);
}

/* An all-gather of floats, whose bits are those of the words. */
static hd_status exchange(hd_model_runner *x, const void *own, size_t bytes, hd_err *err) {
    const int32_t n = (int32_t)(bytes / sizeof(float));
    const int32_t first = x->env.comm->groups[HD_GROUP_DP].index * n;
    float *words = x->words;
    memcpy(words + first, own, bytes);
    hd_comm_all_gather(x->env.comm, x->env.stream,
                       &(hd_all_gather_args){.group = HD_GROUP_DP,
                                             .x = words,
                                             .rows = 1,
                                             .cols = x->n_groups * n,
                                             .first = first,
                                             .own = n,
                                             .on_host = true});
    return hd_stream_failure(x->env.stream, err);
}

/* ---- eager passes ---- */

hd_batch *runner_batch_of(hd_model_runner *x, int32_t pass) {
    return pass == RUNNER_DRAFT_AGAIN ? &x->chain : &x->batch;
}

bool runner_fits_group(const hd_batch *b, int32_t rows, int32_t logits) {
    return hd_is_within(rows, 0, b->limits.rows) && hd_is_within(logits, 0, rows);
}

/* From so many rows on the compute of a step takes as long as the fetches, as facts/performance.md 2.8 has it,
 * by times that this rank has measured. */
static int32_t fetch_from(const hd_model_runner *x) {
    if (x->o.fetch_from != HD_FETCH_BY_TIME) return x->o.fetch_from;
    const double fetch_ns = (double)hd_expert_stage_read_stats(x->env.stage).fetch_ns;
    if (x->row_ns <= 0 || fetch_ns <= 0) return INT32_MAX;
    const double rows = fetch_ns / x->row_ns + 1;
    return rows < INT32_MAX ? (int32_t)rows : INT32_MAX;
}

/* Of a step's rows, how many one of the ranks has that divide them. */
static int32_t rows_of_rank(const hd_model_runner *x, int32_t rows) {
    return x->n_groups == 1 ? rows / x->env.comm->groups[HD_GROUP_TP].n : rows;
}

void runner_time_rows(hd_model_runner *x, int64_t ns) {
    if (!x->o.fetch_from || x->fetches) return;
    const int32_t rows = rows_of_rank(x, x->batch.n_rows);
    if (rows < LEAST_TIMED_ROWS) return;
    const double each = (double)ns / rows;
    x->row_ns = x->row_ns > 0 ? x->row_ns + (each - x->row_ns) / 8 : each;
}

static void set_fetches(hd_model_runner *x, int32_t pass, int32_t most, int32_t from) {
    x->fetches = pass == RUNNER_STEP && from > 0 && most >= from;
    x->fixed.times.fetch_steps += x->fetches && runner_batch_of(x, pass)->n_rows > 0;
    x->fixed.times.fetch_from = from;
}

void runner_choose_fetches(hd_model_runner *x, int32_t pass) {
    if (!x->o.fetch_from) return;
    set_fetches(x, pass, rows_of_rank(x, runner_batch_of(x, pass)->n_rows), fetch_from(x));
}

hd_status runner_agree_pass(hd_model_runner *x, int32_t pass, hd_err *err) {
    const hd_batch *b = runner_batch_of(x, pass);
    const pass_word own = {pass, b->n_rows, b->n_logits, x->draft_places, fetch_from(x)};
    const pass_word *words = x->words;
    int32_t most = 0, from = 0;
    HD_TRY(exchange(x, &own, sizeof own, err));
    x->has_rows = false;
    for (int32_t i = 0; i < x->n_groups; i++) {
        const pass_word *w = &words[i];
        if (w->pass != pass || !runner_fits_group(b, w->rows, w->logits)) {
            return HD_FAIL(err, HD_EPEER,
                           "attention group %d runs pass %d of %d rows, %d with logits, and "
                           "group %d pass %d",
                           i, w->pass, w->rows, w->logits,
                           x->env.comm->groups[HD_GROUP_DP].index, pass);
        }
        x->group_rows[i] = w->rows;
        x->group_logits[i] = w->logits;
        x->has_rows |= w->rows > 0;
        most = hd_max_i32(most, w->rows);
        from = hd_max_i32(from, w->fetch_from);
        if (pass == RUNNER_DRAFT) x->draft_places = hd_max_i32(x->draft_places, w->places);
    }
    set_fetches(x, pass, most, from);
    return HD_OK;
}

/* ---- steps ---- */

static bool is_valid(const runner_step_limits *limits, const runner_step_word *w) {
    return hd_is_within(w->kind, RUNNER_IDLE, RUNNER_EAGER) &&
           hd_is_within(w->n, 0, limits->seqs) && hd_is_within(w->depth, 0, limits->drafts) &&
           hd_is_within(w->continuing, 0, w->n) && hd_is_within(w->wanted, 0, limits->drafts);
}

/* Adds what another group has to do. Two kinds of launches together are none. */
static void join(runner_step_word *all, const runner_step_word *w) {
    if (all->kind == RUNNER_IDLE) {
        all->kind = w->kind;
    } else if (w->kind != RUNNER_IDLE && w->kind != all->kind) {
        all->kind = RUNNER_EAGER;
    }
    if (w->continuing && all->continuing && w->wanted != all->wanted) all->waits = true;
    if (w->continuing) all->wanted = hd_max_i32(all->wanted, w->wanted);
    all->waits |= w->waits;
    all->n = hd_max_i32(all->n, w->n);
    all->depth = hd_max_i32(all->depth, w->depth);
    all->continuing = hd_max_i32(all->continuing, w->continuing);
    if (w->in_flight != all->in_flight) all->in_flight = 0;
}

hd_status runner_join_steps(const runner_step_word *words, int32_t n,
                            const runner_step_limits *limits, runner_step_word *all,
                            hd_err *err) {
    *all = (runner_step_word){.in_flight = words[0].in_flight};
    for (int32_t i = 0; i < n; i++) {
        if (!is_valid(limits, &words[i])) {
            return HD_FAIL(err, HD_EPEER, "attention group %d plans a step of kind %d", i,
                           words[i].kind);
        }
        join(all, &words[i]);
    }
    if (all->kind == RUNNER_CONTINUES && !all->in_flight) all->kind = RUNNER_EAGER;
    return HD_OK;
}

bool runner_launches_next(const runner_step_word *all, int32_t depth) {
    return all->continuing && !all->waits && all->wanted == depth;
}

hd_status runner_agree_step(hd_model_runner *x, const runner_step_word *own,
                            runner_step_word *all, hd_err *err) {
    const runner_step_limits limits = {x->o.n_slots, x->n_drafts};
    *all = *own;
    if (!x->words) return HD_OK;
    HD_TRY(exchange(x, own, sizeof *own, err));
    return runner_join_steps(x->words, x->n_groups, &limits, all, err);
}
