/* plan_train.c - `hadal plan --train`: the memory of training, before anything is read. That of a GPU is
 * asked of one. */
#include <inttypes.h>
#include <stdio.h>

#include "cli/planning/plan_internal.h"
#include "train/memory.h"
#include "train/plain.h"

static const char *const optimizers[] = {"adamw", "muon", NULL};
static const char *const backends[] = {"cpu", "cuda", NULL};

void plan_train_options(option_list *list, plan_train_settings *s) {
    const option options[] = {
        option_flag("train", &s->train, "memory of `hadal train`, by rank"),
        option_choice("backend", &s->backend, backends,
                      "with --train: cpu (default), or cuda, which asks a GPU"),
        option_int("rows", &s->rows, 2, 1 << 20, "with --train, as train's"),
        option_int("keep-activations", &s->keep_gib, 0, 1 << 20, "with --train, as train's"),
        option_int("dp", &s->ranks, 1, 64, "with --train, as train's; default 1"),
        option_int("threads", &s->threads, 1, 1024, "with --train, as train's"),
        option_choice("optimizer", &s->optimizer, optimizers, "with --train, as train's"),
        option_choice("weights", &s->weights, hd_plain_names, "with --train, as train's"),
        option_text("freeze", &s->freeze, "LIST", "with --train, as train's"),
        option_flag("mtp", &s->drafts, "with --train: the MTP layer is trained, too"),
        option_flag("indexer", &s->indexer, "with --train: the indexer is trained, too"),
    };
    option_list_add(list, options, HD_LEN(options));
}

hd_status plan_check_training(plan_settings *s, hd_err *err) {
    plan_train_settings *t = &s->training;
    const bool given = t->rows || t->keep_gib >= 0 || t->ranks || t->threads || t->optimizer ||
                       t->backend || t->weights || t->freeze || t->drafts || t->indexer;
    if (given && !t->train) {
        return HD_FAIL(err, HD_EINVAL,
                       "--backend, --rows, --keep-activations, --dp, --threads, --optimizer, "
                       "--weights, --freeze, --mtp and --indexer belong to --train");
    }
    if (t->train && plan_serves(s)) {
        return HD_FAIL(
            err, HD_EINVAL,
            "--train plans training: only --backend, --rows, --keep-activations, "
            "--dp, --threads, "
            "--optimizer, --weights, --freeze, --mtp, --indexer and --json belong to it");
    }
    if (!t->rows) t->rows = t->backend ? HD_TRAIN_GPU_ROWS : HD_TRAIN_ROWS;
    if (!t->ranks) t->ranks = 1;
    return HD_OK;
}

typedef struct part {
    const char *name, *about;
    int64_t bytes;
} part;

enum { N_PARTS = 6 };

static void list_parts(part out[N_PARTS], const hd_trainer_memory *m) {
    const part all[N_PARTS] = {
        {"weights",     "as stored; ranks that are threads share them",     m->weights               },
        {"gradients",   "float32",                                          m->gradients             },
        {"masters",     "and moments, float32, of the rank's slice",        m->masters               },
        {"activations", "of a micro-batch, forward and back, with scratch", m->activations           },
        {"update",      "rank 0, while the new weights are rounded",        m->update                },
        {"peak",        "of rank 0, at most",                               hd_trainer_memory_peak(m)},
    };
    for (int i = 0; i < N_PARTS; i++) out[i] = all[i];
}

static hd_status print(const plan_settings *s, const hd_trainer_memory *m, hd_err *err) {
    part parts[N_PARTS];
    list_parts(parts, m);
    if (s->json) {
        json_t *o =
            json_pack("{s:I, s:I, s:I}", "trained", (json_int_t)m->trained, "ranks",
                      (json_int_t)s->training.ranks, "rows", (json_int_t)s->training.rows);
        for (int i = 0; i < N_PARTS; i++) {
            json_object_set_new(o, parts[i].name, json_integer((json_int_t)parts[i].bytes));
        }
        return plan_put_json(o, err);
    }
    printf("%" PRId64 " weights are trained, %d %s, micro-batches of %d tokens; predicted\n\n",
           m->trained, (int)s->training.ranks, s->training.ranks > 1 ? "ranks" : "rank",
           (int)s->training.rows);
    for (int i = 0; i < N_PARTS; i++) {
        printf("%-12s %12.2f MB  %s\n", parts[i].name, (double)parts[i].bytes * 1e-6,
               parts[i].about);
    }
    return HD_OK;
}

static hd_status measure(hd_trainer_memory *out, const plan_settings *s,
                         const hd_model_spec *spec, hd_weights *w, hd_err *err) {
    const plan_train_settings *t = &s->training;
    const int64_t longest = t->rows + 1;
    hd_trainer_options o = {
        .spec = spec,
        .weights = w,
        .backend = backends[t->backend],
        .rows = (int32_t)t->rows,
        .keep_bytes = hd_keep_bytes(t->keep_gib),
        .context = (int32_t)(longest < spec->max_positions ? longest : spec->max_positions),
        .threads = (int32_t)t->threads,
        .n_ranks = (int32_t)t->ranks,
        .drafts = t->drafts,
        .indexer = t->indexer ? 1.0 : 0.0,
        .matrices = t->optimizer == 1 ? HD_UPDATE_MUON : HD_UPDATE_ADAMW};
    HD_TRY(hd_frozen_of(&o.frozen, t->freeze, err));
    return hd_trainer_memory_of(out, &o, err);
}

hd_status plan_training(const plan_settings *s, hd_err *err) {
    const hd_dummy_options shapes = {.shapes_only = true};
    hd_model_spec spec = *s->spec; /* in the formats of the run */
    hd_weights *w;
    hd_trainer_memory m;
    if (s->training.weights) hd_plain_declare(&spec, hd_plain_type(s->training.weights));
    HD_TRY(hd_weights_open_dummy(&w, &spec, &shapes, err));
    hd_status st = measure(&m, s, &spec, w, err);
    if (st == HD_OK) st = print(s, &m, err);
    hd_weights_close(w);
    return st;
}
