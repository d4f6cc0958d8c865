/* train_run.c - options, checkpoints and log of a training run. */
#include "cli/training/train_run.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/json.h"
#include "comm/local.h"
#include "train/init.h"
#include "train/plain.h"

static const char *const optimizers[] = {"adamw", "muon", NULL};
static const char *const backends[] = {"cpu", "cuda", "auto", NULL};
static const char *const schedules[] = {"constant", "cosine", NULL};

train_settings train_settings_default(void) {
    return (train_settings){.steps = 100,
                            .ranks = 1,
                            .processes = rank_options_default(),
                            .keep_gib = -1,
                            .seed = 1,
                            .keep = 2,
                            .rate = 1e-4,
                            .muon_rate = 1e-3,
                            .beta1 = 0.9,
                            .beta2 = 0.95,
                            .eps = 1e-8,
                            .momentum = 0.95,
                            .clip = 1.0,
                            .last_rate = 0.1};
}

void train_options_add(option_list *list, train_settings *s) {
    const option options[] = {
        option_text("out", &s->out, "DIR", "folder of the checkpoints (required)"),
        option_flag("resume", &s->resume, "go on from the last checkpoint in --out"),
        option_int("steps", &s->steps, 1, INT32_MAX, "optimizer steps of the run; default 100"),
        option_int("save-every", &s->save_every, 0, INT32_MAX,
                   "steps between checkpoints; 0: one at the end"),
        option_int("keep", &s->keep, 1, 1000, "checkpoints that are kept; default 2"),
        option_int("seed", &s->seed, 0, INT32_MAX, "of the order of data and of samples"),
        option_choice("optimizer", &s->optimizer, optimizers,
                      "of hidden matrices; AdamW has the rest; default adamw"),
        option_real("lr", &s->rate, 0, 10, "peak rate of AdamW; default 1e-4"),
        option_real("muon-lr", &s->muon_rate, 0, 10, "peak rate of Muon; default 1e-3"),
        option_real("beta1", &s->beta1, 0, 0.9999, "AdamW; default 0.9"),
        option_real("beta2", &s->beta2, 0, 0.999999, "AdamW; default 0.95"),
        option_real("eps", &s->eps, 1e-20, 1, "AdamW; default 1e-8"),
        option_real("momentum", &s->momentum, 0, 0.9999, "Muon; default 0.95"),
        option_real("weight-decay", &s->decay, 0, 10, "of matrices, times the rate; default 0"),
        option_real("clip", &s->clip, 0, 1e30,
                    "largest norm of all gradients; 0: none; default 1"),
        option_choice("schedule", &s->schedule, schedules, "of the rates; default constant"),
        option_int("warmup", &s->warmup, 0, INT32_MAX, "steps of rising rates; default 0"),
        option_real("last-lr", &s->last_rate, 0, 1,
                    "cosine: the last rate over the peak; default 0.1"),
        option_text("freeze", &s->freeze, "LIST",
                    "groups of weights that stay: router, experts, norms, ..."),
        option_real("mtp-weight", &s->mtp_weight, 0, 10,
                    "of the MTP layer's loss, which is then trained; 0: it is not"),
        option_real("indexer-loss", &s->indexer, 0, 1000,
                    "coefficient of the indexers' divergence from attention, by which they are "
                    "trained; 0: they are not"),
        option_int("context", &s->context, 0, INT32_MAX,
                   "tokens of the longest sequence; 0: --rows + 1, or 1025"),
        option_int(
            "rows", &s->rows, 1, 1 << 20,
            "tokens of a micro-batch, which changes no result; default 1024, on a GPU 16384"),
        option_int("keep-activations", &s->keep_gib, 0, 1 << 20,
                   "GiB of activations that are not computed again; default 2, on a GPU 16"),
        option_choice("backend", &s->backend, backends,
                      "cpu (default), cuda, or auto: a GPU if there is one"),
        option_choice("kv-cache-dtype", &s->kv_type, hd_kv_type_names,
                      "number format of cached entries, with which the model is trained: as "
                      "those that serve it; auto is float32"),
        option_choice("weights", &s->weights, hd_plain_names,
                      "number format of matrices: bf16, f32, or stored (default), as MODEL_DIR "
                      "has them"),
        option_int("threads", &s->threads, 0, 1024, "0: one per core; changes no result"),
        option_int("dp", &s->ranks, 1, HD_LOCAL_MAX_RANKS,
                   "data parallel ranks, which share --threads; default 1"),
        option_text("log", &s->log, "FILE", "a JSON line per step; appended to with --resume"),
        with_letter(option_flag("quiet", &s->quiet, "no line per step on standard output"),
                    'q'),
    };
    option_list_add(list, options, HD_LEN(options));
    rank_options_list(&s->processes, list);
}

const char *train_settings_backend(const train_settings *s) {
    if (strcmp(backends[s->backend], "auto") != 0) return backends[s->backend];
    return hd_device_count_gpus() > 0 ? "cuda" : "cpu";
}

const char *train_settings_kv_type(const train_settings *s) {
    return hd_kv_type_names[s->kv_type];
}

hd_status train_settings_trainer(const train_settings *s, hd_trainer_options *out,
                                 hd_err *err) {
    *out = (hd_trainer_options){
        .rows = (int32_t)s->rows,
        .keep_bytes = hd_keep_bytes(s->keep_gib),
        .context = (int32_t)(s->context ? s->context : (s->rows ? s->rows : HD_TRAIN_ROWS) + 1),
        .backend = train_settings_backend(s),
        .threads = (int32_t)s->threads,
        .n_ranks = (int32_t)s->ranks,
        .drafts = s->mtp_weight > 0.0,
        .indexer = s->indexer,
        .matrices = s->optimizer == 1 ? HD_UPDATE_MUON : HD_UPDATE_ADAMW,
        .optimizer = {
                      .rate = s->rate,
                      .beta1 = s->beta1,
                      .beta2 = s->beta2,
                      .eps = s->eps,
                      .muon_rate = s->muon_rate,
                      .momentum = s->momentum,
                      .decay = s->decay,
                      .clip = s->clip,
                      .schedule = {.kind = s->schedule == 1 ? HD_SCHEDULE_COSINE : HD_SCHEDULE_CONSTANT,
                         .warmup = s->warmup,
                         .steps = s->steps,
                         .last = s->last_rate}}
    };
    HD_TRY(hd_kv_type_of(&out->kv_type, train_settings_kv_type(s), err));
    if (out->kv_type && out->kv_type != HD_F32 && strcmp(out->backend, "cuda") == 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "--kv-cache-dtype %s: gradients of rounded entries are for a CPU",
                       train_settings_kv_type(s));
    }
    if (s->indexer > 0.0 && s->ranks > 1) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "--indexer-loss %g: indexers are trained by one rank only", s->indexer);
    }
    if (s->ranks > 1 && strcmp(out->backend, "cpu") != 0) {
        return HD_FAIL(err, HD_EINVAL, "--dp %d: several ranks train on a CPU only",
                       out->n_ranks);
    }
    if (out->rows && out->context > out->rows + 1) {
        return HD_FAIL(err, HD_EINVAL, "--context %d needs --rows %d at least", out->context,
                       out->context - 1);
    }
    return hd_frozen_of(&out->frozen, s->freeze, err);
}

/* ---- a run ---- */

static hd_status describe(const train_settings *s, json_t *options, hd_err *err) {
    json_t *more = json_pack(
        "{s:I, s:s, s:s, s:s, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:s, s:I, s:f, s:s, "
        "s:f, s:f}",
        "seed", (json_int_t)s->seed, "backend", train_settings_backend(s), "kv-cache-dtype",
        train_settings_kv_type(s), "weights", hd_plain_names[s->weights], "optimizer",
        optimizers[s->optimizer], "lr", s->rate, "muon-lr", s->muon_rate, "beta1", s->beta1,
        "beta2", s->beta2, "eps", s->eps, "momentum", s->momentum, "weight-decay", s->decay,
        "clip", s->clip, "schedule", schedules[s->schedule], "warmup", (json_int_t)s->warmup,
        "last-lr", s->last_rate, "freeze", s->freeze ? s->freeze : "", "mtp-weight",
        s->mtp_weight, "indexer-loss", s->indexer);
    if (more && s->schedule == 1) json_object_set_new(more, "steps", json_integer(s->steps));
    const bool ok = more && options && json_object_update(options, more) == 0;
    json_decref(more);
    return ok ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for the options of a run");
}

static hd_status compare(const json_t *before, json_t *now, const char *dir, hd_err *err) {
    const char *key;
    json_t *value;
    json_object_foreach(now, key, value) {
        if (json_equal(json_object_get(before, key), value)) continue;
        return HD_FAIL(err, HD_EINVAL, "%s: a run with another --%s; it cannot be resumed", dir,
                       key);
    }
    return HD_OK;
}

/* Keeps other runs out of the folder from now on, if it is there. */
static hd_status hold_folder(train_run *r, hd_err *err) {
    const char *out = r->set->out;
    if (r->folder) return HD_OK;
    r->folder = opendir(out);
    if (!r->folder && errno == ENOENT) return HD_OK;
    if (!r->folder) return HD_FAIL(err, HD_EIO, "%s: %s", out, strerror(errno));
    if (flock(dirfd(r->folder), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "%s: another run writes to this folder", out);
}

static hd_status make_folder(train_run *r, hd_err *err) {
    const char *out = r->set->out;
    if (mkdir(out, 0777) != 0 && errno != EEXIST) {
        return HD_FAIL(err, HD_EIO, "%s: %s", out, strerror(errno));
    }
    return hold_folder(r, err);
}

/* The folder's model is that of the command line. */
static hd_status compare_models(const train_run *r, hd_err *err) {
    hd_model_spec *given = NULL, *own = NULL;
    hd_status st = hd_model_spec_open(&given, r->set->model_dir, err);
    if (st == HD_OK) st = hd_model_spec_open(&own, r->model, err);
    const char *key = st == HD_OK ? hd_model_spec_difference(given, own) : NULL;
    if (key) {
        st = HD_FAIL(err, HD_EINVAL, "%s: a run of another model than %s (%s differs)",
                     r->resumed, r->set->model_dir, key);
    }
    hd_model_spec_close(given);
    hd_model_spec_close(own);
    return st;
}

/* Makes the model in OUT/start. */
static hd_status begin_randomly(train_run *r, hd_err *err) {
    const train_settings *s = r->set;
    hd_model_spec *spec; /* refused before the folder is made */
    HD_TRY(hd_model_spec_open(&spec, s->init, err));
    hd_model_spec_close(spec);
    HD_TRY(make_folder(r, err));
    return hd_init_folder(r->model, s->init, s->model_dir, (uint64_t)s->seed, err);
}

/* Makes the model of another number format in OUT/start. */
static hd_status begin_plainly(train_run *r, hd_err *err) {
    HD_TRY(hd_plain_check(r->set->model_dir, err)); /* before the folder is made */
    HD_TRY(make_folder(r, err));
    return hd_plain_folder(r->model, r->set->model_dir, hd_plain_type(r->set->weights), err);
}

static hd_status begin(train_run *r, hd_err *err) {
    return r->set->init      ? begin_randomly(r, err)
           : r->set->weights ? begin_plainly(r, err)
                             : HD_OK;
}

static hd_status find_checkpoint(train_run *r, hd_err *err) {
    const train_settings *s = r->set;
    HD_TRY(hold_folder(r, err));
    HD_TRY(hd_state_find(&r->resumed, s->out, err));
    if (r->resumed && !s->resume) {
        return HD_FAIL(err, HD_EINVAL,
                       "%s: has checkpoints; --resume goes on from the last one", s->out);
    }
    if (!r->resumed && s->resume) {
        return HD_FAIL(err, HD_EINVAL, "%s: no checkpoint to resume", s->out);
    }
    r->begun = s->init || s->weights ? hd_path_join(s->out, "start") : strdup(s->model_dir);
    r->model = r->resumed ? hd_path_join(r->resumed, "model")
               : r->begun ? strdup(r->begun)
                          : NULL;
    if (!r->model || !r->begun) return HD_FAIL(err, HD_ENOMEM, "no memory for a path");
    if (!r->resumed) return begin(r, err);
    if (!s->init) HD_TRY(compare_models(r, err));
    HD_TRY(hd_state_read(r->resumed, &r->steps, &r->state, err));
    return compare(json_object_get(r->state, "options"), r->options, r->resumed, err);
}

hd_status train_run_open(train_run *r, const train_settings *s, json_t *options, hd_err *err) {
    *r = (train_run){.set = s, .options = options};
    if (!s->out) return HD_FAIL(err, HD_EINVAL, "training needs --out DIR");
    HD_TRY(describe(s, options, err));
    if (s->init && s->weights) {
        return HD_FAIL(err, HD_EINVAL,
                       "--weights %s with --init: its config declares the formats",
                       hd_plain_names[s->weights]);
    }
    HD_TRY(find_checkpoint(r, err));
    if (!s->log) return HD_OK;
    r->log = fopen(s->log, s->resume ? "ae" : "we");
    return r->log ? HD_OK : HD_FAIL(err, HD_EIO, "%s: %s", s->log, strerror(errno));
}

void train_run_close(train_run *r) {
    if (r->log) fclose(r->log);
    if (r->folder) closedir(r->folder);
    free(r->resumed);
    free(r->model);
    free(r->begun);
    json_decref(r->state);
    json_decref(r->options);
}

hd_status train_run_load(const train_run *r, hd_trainer *t, hd_err *err) {
    if (!r->resumed) return HD_OK;
    const json_t *steps = json_object_get(r->state, "optimizer_steps");
    if (!json_is_integer(steps) || json_integer_value(steps) < 0) {
        return HD_FAIL(err, HD_EFORMAT, "%s: state.json has no optimizer_steps", r->resumed);
    }
    return hd_trainer_load(t, r->resumed, json_integer_value(steps), err);
}

hd_status train_run_save(train_run *r, hd_trainer *t, const hd_weights *w, int64_t steps,
                         json_t *state, hd_err *err) {
    json_t *own = json_integer((json_int_t)hd_trainer_steps(t));
    if (!state || json_object_set_new(state, "optimizer_steps", own) != 0 ||
        json_object_set(state, "options", r->options) != 0) {
        json_decref(state);
        return HD_FAIL(err, HD_ENOMEM, "no memory for the state of a run");
    }
    hd_whole_parameters whole = {.n = 0};
    hd_status st = make_folder(r, err);
    if (st == HD_OK) st = hd_weights_fetch(w, hd_trainer_stream(t), err);
    if (st == HD_OK) st = hd_trainer_gather(t, &whole, err);
    if (st == HD_OK) {
        st = hd_state_save(r->set->out, steps, whole.all, whole.n, w, r->model, state,
                           (int32_t)r->set->keep, err);
    }
    hd_whole_parameters_free(&whole);
    json_decref(state);
    return st;
}

bool train_run_saves_at(const train_run *r, int64_t steps) {
    return steps == r->set->steps || train_run_stopped() ||
           (r->set->save_every && steps % r->set->save_every == 0);
}

json_t *train_run_number(double x) {
    return isfinite(x) ? json_real(x) : json_null();
}

hd_status train_run_log(const train_run *r, json_t *line, hd_err *err) {
    char *text = line ? hd_json_write(line, JSON_COMPACT) : NULL;
    const bool ok = text && (!r->log || (fprintf(r->log, "%s\n", text) > 0 && !fflush(r->log)));
    free(text);
    json_decref(line);
    return ok ? HD_OK : HD_FAIL(err, HD_EIO, "--log: cannot write a line");
}

/* ---- signals ---- */

static volatile sig_atomic_t stopped;

static void stop(int signal) {
    (void)signal;
    stopped = 1;
}

void train_run_catch_signals(void) {
    struct sigaction action = {.sa_handler = stop};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool train_run_stopped(void) {
    return stopped != 0;
}
