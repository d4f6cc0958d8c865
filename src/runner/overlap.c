/* overlap.c - the overlap schedule: the host launches decode step n + 1 while step n runs.
 *
 * When the scheduler asks for step n, step n is already in flight. It was queued after step
 * n - 1, on the assumption that the same requests continue. Step n + 1 is queued before the
 * host waits for step n. A request that ended meanwhile has rows in step n whose output is
 * dropped. Sequence inputs that step n lacks (a prefill, a resumed request) run after it as
 * an eager step. The next step then starts fresh. So does every step with a constrained
 * sequence, whose mask needs its last token: it is one launch, but the host cannot be ahead
 * of it. If a constraint begins to limit an answer, the tokens after that point and the
 * in-flight step are dropped. */
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "runner/groups_internal.h"

void runner_forget_slot(hd_model_runner *x, int32_t slot) {
    runner_decode_graphs *f = &x->fixed;
    for (size_t i = 0; i < HD_LEN(f->inflight); i++) f->inflight[i].index[slot] = -1;
    f->known[slot].position = -1;
}

void hd_model_runner_forget_steps(hd_model_runner *x) {
    for (int32_t s = 0; x->fixed.on && s < x->o.n_slots; s++) runner_forget_slot(x, s);
}

/* A dropped token would remain in the penalty counts. */
static bool is_constrained(const hd_model_runner *x, const hd_seq_input *w) {
    const runner_constraint *r = x->constraints ? &x->constraints[w->slot] : NULL;
    if (!r || !r->constraint) return false;
    return !runner_constraint_is_free(r) || hd_has_penalty(&x->host.params[w->slot]);
}

static bool any_constrained(const hd_model_runner *x, const hd_seq_input *inputs, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (is_constrained(x, &inputs[i])) return true;
    }
    return false;
}

/* Returns whether all inputs are decodes and fit a graph. A constrained sequence has no
 * drafts, as each draft's mask depends on the one before. */
static bool fits(const hd_model_runner *x, const hd_seq_input *w) {
    if (w->n_sample != w->n || w->n_prompt_logprobs) return false;
    return !is_constrained(x, w) || (w->n == 1 && w->want_drafts == 0);
}

static bool all_fit(const hd_model_runner *x, const hd_seq_input *inputs, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (!fits(x, &inputs[i])) return false;
    }
    return true;
}

/* Returns whether a continued in-flight step has computed this very input, and perhaps more
 * drafts. */
static bool has_computed(const hd_model_runner *x, const runner_inflight_step *f,
                         const hd_seq_input *w) {
    const hd_cursor *at = &x->fixed.known[w->slot];
    if (!f->under_way || f->index[w->slot] < 0 || !fits(x, w)) return false;
    if (at->position != w->start || w->n - 1 > f->shape.n_drafts) return false;
    if (at->position + 2 * f->shape.n_drafts >= f->capacity[w->slot]) return false;
    return at->token == w->tokens[0] &&
           memcmp(at->draft, w->tokens + 1, (size_t)(w->n - 1) * sizeof(int32_t)) == 0;
}

static int32_t most_wanted(const hd_model_runner *x, const hd_seq_input *inputs, int32_t n) {
    int32_t most = 0;
    for (int32_t i = 0; i < n; i++) most = hd_max_i32(most, inputs[i].want_drafts);
    return hd_min_i32(most, x->n_drafts);
}

static int32_t most_given_drafts(const hd_seq_input *inputs, int32_t n) {
    int32_t most = 0;
    for (int32_t i = 0; i < n; i++) most = hd_max_i32(most, inputs[i].n - 1);
    return most;
}

static runner_inflight_step *other(runner_decode_graphs *f, const runner_inflight_step *one) {
    return one == &f->inflight[0] ? &f->inflight[1] : &f->inflight[0];
}

/* Counts the sequences that may outlive this step. */
static int32_t count_continuing(const hd_seq_input *inputs, int32_t n) {
    int32_t continuing = 0;
    for (int32_t i = 0; i < n; i++) continuing += inputs[i].left != 1;
    return continuing;
}

/* Queues the step after f, if it has the same draft depth. */
static hd_status launch_next(hd_model_runner *x, const runner_inflight_step *f,
                             const runner_step_word *all, const hd_seq_input *inputs, int32_t n,
                             hd_err *err) {
    runner_graph_shape shape;
    x->fixed.next = other(&x->fixed, f);
    if (!runner_launches_next(all, f->shape.n_drafts)) return HD_OK;
    if (!runner_decode_graph_shape(x, all->continuing, f->shape.n_drafts, &shape)) return HD_OK;
    return runner_decode_graph_launch(x, x->fixed.next, &shape, inputs, n, false, err);
}

static void collect_output(hd_model_runner *x, const runner_inflight_step *f,
                           const hd_seq_input *w, hd_seq_output *c) {
    runner_decode_graph_output(x, f, w, c);
    runner_record_graph_rows(x, f, w, c);
}

/* Waits for f and collects its output for inputs[n]; other sequences in f are stale. */
static hd_status collect_outputs(hd_model_runner *x, runner_inflight_step *f,
                                 const hd_seq_input *inputs, int32_t n, hd_seq_output *outputs,
                                 hd_err *err) {
    const int64_t begun = hd_now_ns();
    HD_TRY(runner_decode_graph_wait(x, f, err));
    x->fixed.times.wait_ns += hd_now_ns() - begun;
    for (int32_t i = 0; i < n; i++) collect_output(x, f, &inputs[i], &outputs[i]);
    return HD_OK;
}

/* Runs the inputs that f does not contain, after it. */
static hd_status run_eager_inputs(hd_model_runner *x, runner_inflight_step *f,
                                  const hd_seq_input *inputs, int32_t n, hd_seq_output *outputs,
                                  hd_err *err) {
    runner_decode_graphs *a = &x->fixed;
    int32_t n_eager = 0;
    for (int32_t i = 0; i < n; i++) {
        if (has_computed(x, f, &inputs[i])) continue;
        a->eager_inputs[n_eager] = inputs[i];
        a->eager_index[n_eager++] = i;
    }
    HD_TRY(runner_run_eager(x, a->eager_inputs, n_eager, a->eager_outputs, err));
    if (n_eager < n) HD_TRY(runner_decode_graph_wait(x, f, err));
    f->under_way = false;
    for (int32_t i = 0, k = 0; i < n; i++) {
        if (k < n_eager && a->eager_index[k] == i) {
            outputs[i] = a->eager_outputs[k++];
        } else {
            collect_output(x, f, &inputs[i], &outputs[i]);
        }
    }
    /* Sequences that are not in the next in-flight step start fresh. */
    for (int32_t s = 0; s < x->o.n_slots; s++) a->known[s].position = -1;
    return HD_OK;
}

static int32_t count_computed(const hd_model_runner *x, const runner_inflight_step *f,
                              const hd_seq_input *inputs, int32_t n) {
    int32_t computed = 0;
    for (int32_t i = 0; i < n; i++) computed += has_computed(x, f, &inputs[i]);
    return computed;
}

/* Tells the graph of an in-flight step from others, and from none. */
static int32_t digest(const runner_inflight_step *f) {
    return f->under_way ? 1 + f->shape.n * (HD_MAX_DRAFTS + 1) + f->shape.n_drafts : 0;
}

/* What this group would do. */
static runner_step_word plan(const hd_model_runner *x, const runner_inflight_step *f,
                             const hd_seq_input *inputs, int32_t n) {
    const int32_t computed = count_computed(x, f, inputs, n),
                  wanted = most_wanted(x, inputs, n);
    const int32_t depth = hd_max_i32(wanted, most_given_drafts(inputs, n));
    runner_step_word w = {.kind = RUNNER_EAGER,
                          .n = n,
                          .depth = hd_min_i32(depth, x->n_drafts),
                          .continuing = count_continuing(inputs, n),
                          .wanted = wanted,
                          .waits = any_constrained(x, inputs, n),
                          .in_flight = digest(f)};
    if (n == 0) {
        w.kind = RUNNER_IDLE;
    } else if (computed == n) {
        w.kind = RUNNER_CONTINUES;
    } else if (computed == 0 && depth == w.depth && all_fit(x, inputs, n)) {
        w.kind = RUNNER_FRESH;
    }
    return w;
}

static hd_status run_step(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                          hd_seq_output *outputs, hd_err *err) {
    runner_inflight_step *f = x->fixed.next;
    runner_graph_shape shape;
    runner_step_word all;
    const runner_step_word own = plan(x, f, inputs, n);
    HD_TRY(runner_agree_step(x, &own, &all, err));
    if (all.kind == RUNNER_IDLE) return hd_stream_sync(x->env.stream, err);
    if (all.kind == RUNNER_CONTINUES) {
        HD_TRY(launch_next(x, f, &all, inputs, n, err));
        return collect_outputs(x, f, inputs, n, outputs, err);
    }
    if (all.kind == RUNNER_FRESH && runner_decode_graph_shape(x, all.n, all.depth, &shape)) {
        /* its output is dropped */
        if (f->under_way) HD_TRY(runner_decode_graph_wait(x, f, err));
        HD_TRY(runner_decode_graph_launch(x, f, &shape, inputs, n, true, err));
        HD_TRY(launch_next(x, f, &all, inputs, n, err));
        return collect_outputs(x, f, inputs, n, outputs, err);
    }
    return run_eager_inputs(x, f, inputs, n, outputs, err);
}

hd_status runner_run_overlapped(hd_model_runner *x, const hd_seq_input *inputs, int32_t n,
                                hd_seq_output *outputs, hd_err *err) {
    hd_model_runner_times *t = &x->fixed.times;
    const hd_model_runner_times before = *t;
    const int64_t begun = hd_now_ns();
    const hd_status st = run_step(x, inputs, n, outputs, err);
    if (st != HD_OK) runner_decode_graph_reset(x);
    if (t->steps > before.steps) {
        t->host_ns += hd_now_ns() - begun - (t->wait_ns - before.wait_ns) -
                      (t->record_ns - before.record_ns);
    }
    return st;
}
