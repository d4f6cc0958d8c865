/* cmd_train.c - `hadal train`: supervised training on lines of text, conversations or tokens. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/checksum.h"
#include "base/file.h"
#include "base/progress.h"
#include "cli/commands.h"
#include "cli/training/train_world.h"
#include "train/examples.h"

enum { MAX_DATA_BYTES = 1 << 30 };

typedef struct settings {
    train_settings train;
    const char *data, *held_out;
    int64_t batch, batch_tokens, eval_every;
    double balance;
} settings;

enum { PARTS = 5 }; /* of a sequence's numbers */

typedef struct training {
    settings set;
    train_run run;
    train_world world;
    hd_model_spec *spec;
    hd_weights *weights;
    hd_tokenizer *tokenizer;
    hd_trainer *trainer;
    hd_examples examples, held_out;
    int64_t cursor; /* examples that were taken so far */
    /* of one batch */
    hd_train_sequence *seqs;
    float *numbers;
} training;

/* ---- opening ---- */

static hd_status read_data(const training *t, hd_examples *out, const char *path,
                           uint64_t *checksum, hd_err *err) {
    char *text;
    size_t n;
    hd_example_rules rules = {.tokenizer = t->tokenizer,
                              .eos = t->spec->n_eos ? t->spec->eos[0] : -1,
                              .vocab = t->spec->vocab,
                              .context = (int32_t)t->set.train.context};
    HD_TRY(hd_chat_detect(&rules.encoding, &rules.thinks, t->run.model, err));
    HD_TRY(hd_file_read(&text, &n, path, MAX_DATA_BYTES, err));
    *checksum = hd_checksum(0, text, n);
    const hd_status st = hd_examples_read(out, text, n, path, &rules, err);
    free(text);
    return st;
}

/* The largest number of tokens that n examples may have. */
static int64_t most_tokens(const hd_examples *e, int64_t n) {
    int32_t longest = 0;
    for (int32_t i = 0; i < e->n; i++) longest = e->all[i].n > longest ? e->all[i].n : longest;
    return n * longest;
}

/* The most examples of a batch; every one has two tokens at least. */
static int64_t most_examples(const training *t) {
    return t->set.batch_tokens ? t->set.batch_tokens / 2 : t->set.batch;
}

static hd_status open_batch(training *t, hd_err *err) {
    const int64_t n = most_examples(t) > t->held_out.n ? most_examples(t) : t->held_out.n;
    const int64_t a = t->set.batch_tokens ? t->set.batch_tokens
                                          : most_tokens(&t->examples, t->set.batch),
                  b = most_tokens(&t->held_out, t->held_out.n);
    if (t->set.batch_tokens && most_tokens(&t->examples, 1) > t->set.batch_tokens) {
        return HD_FAIL(err, HD_EINVAL,
                       "--batch-tokens %lld: the longest example has %lld tokens",
                       (long long)t->set.batch_tokens, (long long)most_tokens(&t->examples, 1));
    }
    t->seqs = calloc((size_t)n + 1, sizeof *t->seqs);
    t->numbers = calloc((size_t)(a > b ? a : b) * PARTS + 1, sizeof *t->numbers);
    if (t->seqs && t->numbers) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for a batch of %lld examples", (long long)n);
}

static hd_status open_data(training *t, hd_err *err) {
    uint64_t sum, other;
    HD_TRY(read_data(t, &t->examples, t->set.data, &sum, err));
    if (t->set.held_out) HD_TRY(read_data(t, &t->held_out, t->set.held_out, &other, err));
    HD_TRY(open_batch(t, err));
    if (!t->run.resumed) {
        json_object_set_new(t->run.options, "data", json_integer((json_int_t)sum));
        return HD_OK;
    }
    json_t *before = json_object_get(json_object_get(t->run.state, "options"), "data");
    json_object_set(t->run.options, "data", before);
    t->cursor = json_integer_value(json_object_get(t->run.state, "cursor"));
    if (json_integer_value(before) == (json_int_t)sum && t->cursor >= 0) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "%s: other data than the run in %s began with", t->set.data,
                   t->set.train.out);
}

static hd_status open_all(training *t, hd_err *err) {
    const train_settings *s = &t->set.train;
    hd_trainer_options o;
    json_t *own =
        json_pack("{s:I, s:I, s:s}", "batch", (json_int_t)t->set.batch, "batch-tokens",
                  (json_int_t)t->set.batch_tokens, "init", s->init ? s->init : "");
    HD_TRY(train_run_open(&t->run, s, own, err));
    HD_TRY(train_settings_trainer(s, &o, err));
    o.balance = t->set.balance;
    HD_TRY(hd_model_spec_open(&t->spec, t->run.model, err));
    o.context = hd_min_i32(o.context, t->spec->max_positions);
    t->set.train.context = o.context;
    HD_TRY(hd_tokenizer_open(&t->tokenizer, t->run.model, err));
    HD_TRY(hd_tokenizer_check_rows(t->tokenizer, t->spec->vocab, err));
    HD_TRY(open_data(t, err));
    HD_TRY(hd_weights_open_updatable(&t->weights, t->run.model, t->spec, err));
    o.spec = t->spec;
    o.weights = o.upload = t->weights;
    HD_TRY(train_world_lead(&t->world, &o, t->run.model, err));
    HD_TRY(hd_trainer_open(&t->trainer, &o, err));
    return train_run_load(&t->run, t->trainer, err);
}

static void close_all(training *t) {
    hd_trainer_close(t->trainer);
    hd_weights_close(t->weights);
    hd_examples_deinit(&t->examples);
    hd_examples_deinit(&t->held_out);
    hd_tokenizer_close(t->tokenizer);
    hd_model_spec_close(t->spec);
    train_run_close(&t->run);
    free(t->seqs);
    free(t->numbers);
}

/* ---- steps ---- */

/* Example i as sequence `at`, whose numbers begin at *next. */
static void place(training *t, int32_t at, const hd_example *e, float **next) {
    const int32_t n = e->n - e->first;
    float *factor = *next;
    t->seqs[at] = (hd_train_sequence){.tokens = e->tokens,
                                      .n = e->n,
                                      .first = e->first,
                                      .factor = factor,
                                      .logprob = factor + n,
                                      .entropy = factor + 2 * n,
                                      .draft_factor = factor + 3 * n,
                                      .draft_logprob = factor + 4 * n};
    *next += PARTS * (int64_t)n;
}

/* The MTP layer predicts no token below 2. */
static bool is_drafted(const hd_example *e, int32_t k) {
    return e->mask[k] && k >= 2;
}

static int64_t count_drafted(const hd_example *const *examples, int32_t n) {
    int64_t drafted = 0;
    for (int32_t i = 0; i < n; i++) {
        const hd_example *e = examples[i];
        for (int32_t k = e->first; k < e->n; k++) drafted += is_drafted(e, k);
    }
    return drafted;
}

/* The factors of n sequences, of a mean over their tokens with a loss. */
static void set_factors(training *t, const hd_example *const *examples, int32_t n,
                        int64_t n_loss) {
    const double drafted = (double)count_drafted(examples, n);
    for (int32_t i = 0; i < n; i++) {
        const hd_example *e = examples[i];
        float *factor = t->numbers + (t->seqs[i].factor - t->numbers);
        float *draft = factor + 3 * (int64_t)(e->n - e->first);
        for (int32_t k = e->first; k < e->n; k++) {
            factor[k - e->first] = e->mask[k] ? (float)(1.0 / (double)n_loss) : 0.0f;
            draft[k - e->first] =
                is_drafted(e, k) ? (float)(t->set.train.mtp_weight / drafted) : 0.0f;
        }
    }
}

static double mean_draft_loss(const training *t, const hd_example *const *examples, int32_t n) {
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const hd_example *e = examples[i];
        for (int32_t k = e->first; k < e->n; k++) {
            if (is_drafted(e, k)) sum -= (double)t->seqs[i].draft_logprob[k - e->first];
        }
    }
    return sum / (double)count_drafted(examples, n);
}

static double mean_loss(const training *t, const hd_example *const *examples, int32_t n,
                        int64_t n_loss) {
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const hd_example *e = examples[i];
        for (int32_t k = e->first; k < e->n; k++) {
            if (e->mask[k]) sum -= (double)t->seqs[i].logprob[k - e->first];
        }
    }
    return sum / (double)n_loss;
}

/* Longer ones first: micro-batches get full, and long ones do not come last. */
static int by_length(const void *a, const void *b) {
    const hd_example *x = *(const hd_example *const *)a, *y = *(const hd_example *const *)b;
    if (x->n != y->n) return x->n > y->n ? -1 : 1;
    return (x > y) - (x < y);
}

/* Lists the examples of the next batch, as many as it takes. */
static int32_t take_batch(const training *t, const hd_example **out) {
    const int64_t most = most_examples(t), most_all = t->set.batch_tokens;
    int64_t tokens = 0;
    int32_t n = 0;
    for (; n < most; n++) {
        out[n] = &t->examples.all[hd_examples_shuffled(
            &t->examples, (uint64_t)t->set.train.seed, t->cursor + n)];
        tokens += out[n]->n;
        if (most_all && tokens > most_all) break;
    }
    qsort(out, (size_t)n, sizeof(const hd_example *), by_length);
    return n;
}

/* Makes sequences of n examples; returns their tokens with a loss. */
static int64_t place_all(training *t, const hd_example *const *examples, int32_t n) {
    float *next = t->numbers;
    int64_t n_loss = 0;
    for (int32_t i = 0; i < n; i++) {
        place(t, i, examples[i], &next);
        n_loss += examples[i]->n_loss;
    }
    return n_loss;
}

typedef struct step_result {
    double loss, mtp_loss, indexer_loss, held_out; /* held_out < 0: not measured */
    int64_t tokens;                                /* with a loss */
    double seconds;
    hd_optimizer_report report;
} step_result;

static hd_status apply(training *t, hd_weights_update *u, hd_err *err) {
    if (!u) return HD_OK;
    const hd_status st =
        hd_weights_update_apply(u, t->weights, hd_trainer_stream(t->trainer), err);
    hd_weights_update_close(u);
    return st;
}

static hd_status step(training *t, const hd_example **examples, step_result *r, hd_err *err) {
    const int32_t n = take_batch(t, examples);
    hd_weights_update *u;
    r->tokens = place_all(t, examples, n);
    set_factors(t, examples, n, r->tokens);
    HD_TRY(hd_trainer_accumulate(t->trainer, t->seqs, n, err));
    r->loss = mean_loss(t, examples, n, r->tokens);
    if (t->set.train.mtp_weight > 0.0) r->mtp_loss = mean_draft_loss(t, examples, n);
    if (t->set.train.indexer > 0.0) r->indexer_loss = hd_trainer_take_divergence(t->trainer);
    HD_TRY(hd_trainer_step(t->trainer, &u, &r->report, err));
    t->cursor += n;
    return apply(t, u, err);
}

static hd_status measure_held_out(training *t, const hd_example **examples, double *loss,
                                  hd_err *err) {
    const int32_t n = t->held_out.n;
    for (int32_t i = 0; i < n; i++) examples[i] = &t->held_out.all[i];
    const int64_t n_loss = place_all(t, examples, n);
    HD_TRY(hd_trainer_score(t->trainer, t->seqs, n, err));
    *loss = mean_loss(t, examples, n, n_loss);
    return HD_OK;
}

static hd_status report(const training *t, const step_result *r, hd_err *err) {
    const int64_t steps = hd_trainer_steps(t->trainer);
    json_t *line = json_pack("{s:I, s:o, s:I, s:f, s:f, s:b, s:f}", "step", (json_int_t)steps,
                             "loss", train_run_number(r->loss), "tokens", (json_int_t)r->tokens,
                             "gradient_norm", r->report.skipped ? -1.0 : r->report.norm, "rate",
                             t->set.train.rate * r->report.factor, "skipped",
                             (int)r->report.skipped, "seconds", r->seconds);
    const bool drafts = t->set.train.mtp_weight > 0.0;
    if (line && drafts) json_object_set_new(line, "mtp_loss", train_run_number(r->mtp_loss));
    const bool indexes = t->set.train.indexer > 0.0;
    if (line && indexes)
        json_object_set_new(line, "indexer_loss", train_run_number(r->indexer_loss));
    if (line && r->held_out >= 0)
        json_object_set_new(line, "held_out_loss", train_run_number(r->held_out));
    if (!t->set.train.quiet) {
        printf("step %lld  loss %.4f  norm %.3f  rate %.2e  %.0f tokens/s%s", (long long)steps,
               r->loss, r->report.norm, t->set.train.rate * r->report.factor,
               (double)r->tokens / r->seconds, r->report.skipped ? "  skipped" : "");
        if (drafts) printf("  MTP %.4f", r->mtp_loss);
        if (indexes) printf("  indexer %.4f", r->indexer_loss);
        if (r->held_out >= 0) printf("  held out %.4f", r->held_out);
        printf("\n");
        fflush(stdout);
    }
    return train_run_log(&t->run, line, err);
}

static hd_status save(training *t, hd_err *err) {
    json_t *state = json_pack("{s:I}", "cursor", (json_int_t)t->cursor);
    return train_run_save(&t->run, t->trainer, t->weights, hd_trainer_steps(t->trainer), state,
                          err);
}

enum { MOST_SKIPPED = 3 };

static hd_status run_steps(training *t, const hd_example **examples, hd_err *err) {
    const int64_t end = t->set.train.steps;
    int skipped = 0;
    while (hd_trainer_steps(t->trainer) < end && !train_run_stopped()) {
        step_result r = {.held_out = -1.0};
        const int64_t start = hd_now_ns();
        HD_TRY(step(t, examples, &r, err));
        r.seconds = (double)(hd_now_ns() - start) * 1e-9;
        const int64_t steps = hd_trainer_steps(t->trainer);
        const int64_t every = t->set.eval_every;
        if (t->held_out.n && (steps == end || (every && steps % every == 0))) {
            HD_TRY(measure_held_out(t, examples, &r.held_out, err));
        }
        HD_TRY(report(t, &r, err));
        skipped = r.report.skipped ? skipped + 1 : 0;
        if (skipped == MOST_SKIPPED) {
            return HD_FAIL(err, HD_EDEVICE,
                           "%d steps in a row with gradients that are no numbers", skipped);
        }
        if (train_run_saves_at(&t->run, steps)) HD_TRY(save(t, err));
    }
    return HD_OK;
}

static hd_status run_all(training *t, hd_err *err) {
    const int64_t n = most_examples(t) > t->held_out.n ? most_examples(t) : t->held_out.n;
    const hd_example **examples = calloc((size_t)n + 1, sizeof *examples);
    if (!examples) return HD_FAIL(err, HD_ENOMEM, "no memory for a batch");
    const hd_status st = run_steps(t, examples, err);
    free((void *)(uintptr_t)examples);
    return st;
}

static hd_status lead(training *t, hd_err *err) {
    HD_TRY(open_all(t, err));
    train_run_catch_signals();
    return run_all(t, err);
}

int cmd_train(int argc, char **argv) {
    training t = {
        .set = {.train = train_settings_default(), .batch = 16}
    };
    static option_list list; /* too large for a frame */
    list.n = 0;
    const option own[] = {
        option_text("data", &t.set.data, "FILE", "JSON lines of examples (required)"),
        option_text("held-out", &t.set.held_out, "FILE", "JSON lines whose loss is measured"),
        option_int("eval-every", &t.set.eval_every, 0, INT32_MAX,
                   "steps between measurements of --held-out; 0: at the end"),
        option_int("batch", &t.set.batch, 1, 1 << 20, "examples of a step; default 16"),
        option_int("batch-tokens", &t.set.batch_tokens, 0, 1 << 28,
                   "instead: as many examples as have so many tokens together"),
        option_real("balance", &t.set.balance, 0, 1,
                    "change of the routers' biases per step, towards equal loads; default 0"),
        option_text("init", &t.set.train.init, "CONFIG",
                    "begin with random weights of this config.json, by --seed; of MODEL_DIR "
                    "only tokenizer and chat format are used"),
    };
    option_list_add(&list, own, HD_LEN(own));
    train_options_add(&list, &t.set.train);
    const positional model = {"MODEL_DIR", &t.set.train.model_dir, false, POSITIONAL_MODEL};
    const command_line line = {
        .command = "train",
        .summary = "Trains a model on examples, on the CPU or a GPU.",
        .details =
            "A line of data has messages, or prompt and completion, or text, or tokens and\n"
            "mask. DIR/step-N/model is a model for `hadal serve`.",
        .positionals = &model,
        .n_positionals = 1,
        .options = list.all,
        .n_options = list.n};
    int code;
    hd_err err = {0};
    if (!options_parse(&line, argc, argv, &code)) return code;
    hd_status st =
        t.set.data ? HD_OK : HD_FAIL(&err, HD_EINVAL, "hadal train needs --data FILE");
    if (st == HD_OK) st = train_world_open(&t.world, &t.set.train, &err);
    if (st == HD_OK) st = t.world.rank ? train_world_follow(&t.world, &err) : lead(&t, &err);
    close_all(&t);
    train_world_close(&t.world, st == HD_OK ? NULL : err.msg);
    return st == HD_OK ? 0 : report_error(&err);
}
