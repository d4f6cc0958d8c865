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
    const runner_inflight_step *f = x->fixed.next;
    for (int32_t s = 0; x->fixed.on && s < x->o.n_slots; s++) {
        x->fixed.known[s].position = -1;
        /* rows of a prompt have replaced what computing them again would read */
        if (!f->under_way || f->index[s] < 0 || !f->chunk[s].n) runner_forget_slot(x, s);
    }
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

/* Returns whether rows of prompts may be in a step of fixed shape, of which the host has no view. Not
 * so where it chooses rows or what is done with them: rows that layers drop, rows by form of attention
 * or by rank, experts that are fetched, records; and groups would have to agree on their rows. */
static bool takes_chunks(const hd_model_runner *x) {
    const hd_kv_tail tail = hd_kv_shape_of(x->env.spec).tail;
    const hd_parallel_config *l = &hd_weights_shard(x->env.weights)->parallel;
    return (!tail.n || tail.rebuilds) && x->env.mla == HD_MLA_ABSORBED && l->cp <= 1 &&
           x->n_groups <= 1 && x->o.n_micro <= 1 && !x->env.stage && !x->recorder;
}

/* Returns whether an input is a decode, or rows of a prompt, that fits a step of fixed shape. A
 * constrained sequence has no drafts, as each draft's mask depends on the one before. */
static bool fits(const hd_model_runner *x, const hd_seq_input *w) {
    if (w->n_prompt_logprobs) return false;
    if (w->n_sample != w->n) {
        if (w->n_sample > 1 || w->start < w->ends.rebuilt || w->ends.windows_from > 0)
            return false;
        if (!takes_chunks(x)) return false;
    }
    return !is_constrained(x, w) || (w->n_sample <= 1 && w->want_drafts == 0);
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
    if (!f->under_way || f->index[w->slot] < 0) return false;
    if (w->n_sample != w->n || f->chunk[w->slot].n) {
        const runner_chunk *k = &f->chunk[w->slot];
        return k->start == w->start && k->n == w->n && k->is_last == (w->n_sample > 0);
    }
    if (!fits(x, w)) return false;
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
    for (int32_t i = 0; i < n; i++) most = hd_max_i32(most, inputs[i].n_sample - 1);
    return most;
}

static runner_inflight_step *other(runner_decode_graphs *f, const runner_inflight_step *one) {
    return one == &f->inflight[0] ? &f->inflight[1] : &f->inflight[0];
}

/* Counts the sequences that may outlive this step. */
static int32_t count_continuing(const hd_seq_input *inputs, int32_t n) {
    int32_t continuing = 0;
    for (int32_t i = 0; i < n; i++) continuing += runner_continues(&inputs[i]);
    return continuing;
}

/* Returns the rows of prompts before those that sample, of this step and of the next one. */
static int32_t count_before(const hd_seq_input *inputs, int32_t n) {
    int32_t before = 0;
    for (int32_t i = 0; i < n; i++) before += inputs[i].n - hd_max_i32(inputs[i].n_sample, 1);
    return before;
}

static int32_t count_next_before(const hd_seq_input *inputs, int32_t n) {
    int32_t before = 0;
    for (int32_t i = 0; i < n; i++) before += hd_max_i32(inputs[i].n_next - 1, 0);
    return before;
}

/* Returns whether the rows that a prompt has in the next step are not known; or may be others, and
 * what they add to penalty counts could not be undone. */
static bool any_unknown(const hd_model_runner *x, const hd_seq_input *inputs, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        const hd_seq_input *w = &inputs[i];
        if (w->n_sample) continue;
        if (!w->n_next) return true;
        if (w->next_is_last && hd_has_penalty(&x->host.params[w->slot])) return true;
    }
    return false;
}

/* Queues the step after f, if it has the same draft depth. */
static hd_status launch_next(hd_model_runner *x, const runner_inflight_step *f,
                             const runner_step_word *all, const hd_seq_input *inputs, int32_t n,
                             hd_err *err) {
    runner_graph_shape shape;
    x->fixed.next = other(&x->fixed, f);
    if (!runner_launches_next(all, f->shape.n_drafts)) return HD_OK;
    if (!runner_decode_graph_shape(x, all->continuing, f->shape.n_drafts,
                                   count_next_before(inputs, n), &shape)) {
        return HD_OK;
    }
    if (!runner_decode_graph_is_short(x, &shape)) return HD_OK;
    return runner_decode_graph_launch(x, x->fixed.next, &shape, inputs, n, false, err);
}

static void collect_output(hd_model_runner *x, const runner_inflight_step *f,
                           const hd_seq_input *w, hd_seq_output *c) {
    runner_decode_graph_output(x, f, w, c);
    runner_record_graph_rows(x, f, w, c);
}

static hd_status wait(hd_model_runner *x, runner_inflight_step *f, hd_err *err) {
    const int64_t begun = hd_now_ns();
    HD_TRY(runner_decode_graph_wait(x, f, err));
    x->fixed.times.wait_ns += hd_now_ns() - begun;
    return HD_OK;
}

/* Waits for f and collects its output for inputs[n]; other sequences in f are stale. */
static hd_status collect_outputs(hd_model_runner *x, runner_inflight_step *f,
                                 const hd_seq_input *inputs, int32_t n, hd_seq_output *outputs,
                                 hd_err *err) {
    HD_TRY(wait(x, f, err));
    for (int32_t i = 0; i < n; i++) collect_output(x, f, &inputs[i], &outputs[i]);
    return HD_OK;
}

/* Writes the inputs that f does not contain to x->fixed.eager_inputs. Returns how many. */
static int32_t pick_others(hd_model_runner *x, const runner_inflight_step *f,
                           const hd_seq_input *inputs, int32_t n) {
    runner_decode_graphs *a = &x->fixed;
    int32_t n_others = 0;
    for (int32_t i = 0; i < n; i++) {
        if (has_computed(x, f, &inputs[i])) continue;
        a->eager_inputs[n_others] = inputs[i];
        a->eager_index[n_others++] = i;
    }
    return n_others;
}

/* Launches the inputs that f does not contain as a step behind it, and the step of all behind that. */
static hd_status run_behind(hd_model_runner *x, runner_inflight_step *f,
                            const runner_step_word *all, const runner_graph_shape *shape,
                            int32_t n_others, const hd_seq_input *inputs, int32_t n,
                            hd_seq_output *outputs, hd_err *err) {
    const runner_decode_graphs *a = &x->fixed;
    runner_inflight_step *g = other(&x->fixed, f);
    const bool same_depth = shape->n_drafts == f->shape.n_drafts;
    HD_TRY(runner_decode_graph_launch(x, g, shape, a->eager_inputs, n_others, true, err));
    HD_TRY(wait(x, f, err));
    for (int32_t i = 0, k = 0; i < n; i++) {
        if (k < n_others && a->eager_index[k] == i) {
            k++;
        } else {
            collect_output(x, f, &inputs[i], &outputs[i]);
        }
    }
    if (same_depth) HD_TRY(launch_next(x, g, all, inputs, n, err));
    HD_TRY(wait(x, g, err));
    for (int32_t k = 0; k < n_others; k++) {
        const int32_t i = a->eager_index[k];
        collect_output(x, g, &inputs[i], &outputs[i]);
    }
    return HD_OK;
}

/* Runs the inputs that f does not contain, after it. */
static hd_status run_eager_inputs(hd_model_runner *x, runner_inflight_step *f, int32_t n_eager,
                                  const hd_seq_input *inputs, int32_t n, hd_seq_output *outputs,
                                  hd_err *err) {
    runner_decode_graphs *a = &x->fixed;
    HD_TRY(runner_run_eager(x, a->eager_inputs, n_eager, a->eager_outputs, err));
    if (f->under_way) HD_TRY(runner_decode_graph_wait(x, f, err));
    runner_note_eager(x, a->eager_inputs, n_eager);
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
                          .waits = any_constrained(x, inputs, n) || any_unknown(x, inputs, n),
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

/* Returns whether the first n of x->fixed.eager_inputs can be a step behind f, and its shape. */
static bool fit_behind(const hd_model_runner *x, const runner_inflight_step *f, int32_t n,
                       runner_graph_shape *shape) {
    const hd_seq_input *inputs = x->fixed.eager_inputs;
    const int32_t given = most_given_drafts(inputs, n);
    const int32_t depth =
        hd_max_i32(hd_max_i32(given, most_wanted(x, inputs, n)), f->shape.n_drafts);
    return !x->words && f->under_way && n > 0 && all_fit(x, inputs, n) &&
           runner_decode_graph_shape(x, n, depth, count_before(inputs, n), shape);
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
    if (all.kind == RUNNER_FRESH &&
        runner_decode_graph_shape(x, all.n, all.depth, count_before(inputs, n), &shape)) {
        /* its output is dropped */
        if (f->under_way) HD_TRY(runner_decode_graph_wait(x, f, err));
        HD_TRY(runner_decode_graph_launch(x, f, &shape, inputs, n, true, err));
        HD_TRY(launch_next(x, f, &all, inputs, n, err));
        return collect_outputs(x, f, inputs, n, outputs, err);
    }
    const int32_t n_others = pick_others(x, f, inputs, n);
    if (fit_behind(x, f, n_others, &shape)) {
        return run_behind(x, f, &all, &shape, n_others, inputs, n, outputs, err);
    }
    return run_eager_inputs(x, f, n_others, inputs, n, outputs, err);
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
