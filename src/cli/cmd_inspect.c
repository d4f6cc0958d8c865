/* cmd_inspect.c - `hadal inspect`: shows the contents of a checkpoint, or of a config alone,
 * and whether it is complete. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/progress.h"
#include "cli/commands.h"
#include "cli/engine_options.h"
#include "cli/inspect/inspect_internal.h"
#include "cli/inspect/inspect_stages.h"
#include "weights/manifest.h"

enum { QUIET_SCALE_BYTES = 1 << 30 }; /* below, reading the scales shows no progress */

int32_t inspect_count_attention(const hd_model_spec *s, hd_attention kind) {
    int32_t n = 0;
    for (int32_t l = 0; l < s->n_layers; l++) n += s->layers[l].attention == kind;
    return n;
}

int32_t inspect_count_mlp(const hd_model_spec *s, hd_mlp kind) {
    int32_t n = 0;
    for (int32_t l = 0; l < s->n_layers; l++) n += s->layers[l].mlp == kind;
    return n;
}

/* An expert exists if its gate does. */
inspect_elsewhere inspect_count_elsewhere(const inspection *in) {
    const hd_param_group_sum *main = in->summary.main, *mtp = in->summary.mtp;
    const int64_t all =
        hd_summary_main(&in->summary).bytes + hd_summary_mtp(&in->summary).bytes;
    inspect_elsewhere e = {.bytes = main[HD_PARAM_GROUP_EXPERTS].bytes +
                                    mtp[HD_PARAM_GROUP_EXPERTS].bytes};
    for (int32_t i = 0; i < in->schema->n; i++) {
        const hd_tensor_decl *d = &in->schema->decls[i];
        const bool exists = in->weights ? hd_weights_stored(in->weights, i) != NULL
                                        : d->layer < in->spec->n_layers + in->n_mtp;
        e.experts += d->role == HD_EXPERT_GATE && exists;
    }
    e.rest = all - e.bytes;
    return e;
}

const char *inspect_mlp_name(hd_mlp kind) {
    static const char *const names[] = {
        [HD_MLP_DENSE] = "dense", [HD_MLP_MOE] = "moe", [HD_MLP_MOE_HASH] = "moe_hash"};
    return names[kind];
}

const char *inspect_quant_name(hd_quant_method method) {
    static const char *const names[] = {
        [HD_QUANT_NONE] = "none", [HD_QUANT_FP8] = "fp8", [HD_QUANT_MODELOPT] = "modelopt"};
    return names[method];
}

/* ---- rows of --tensors ---- */

int32_t inspect_n_rows(const inspection *in) {
    return in->checkpoint ? hd_checkpoint_count(in->checkpoint) : in->schema->n;
}

static inspect_row declared_row(const inspection *in, int32_t i) {
    const hd_tensor_decl *d = &in->schema->decls[i];
    const hd_stored_format f = hd_declared_format(in->spec, d);
    hd_summary one = {0};
    hd_summary_add(&one, in->spec, d, d->rows, d->cols, &f);
    inspect_row row = {.name = d->name,
                       .dtype = hd_dtype_name(f.type),
                       .file = "",
                       .role = hd_role_name(d->role),
                       .rank = d->rank,
                       .layer = d->layer,
                       .expert = d->expert,
                       .bytes = hd_summary_main(&one).bytes + hd_summary_mtp(&one).bytes};
    row.shape[0] = d->rank == 2 ? d->rows : d->cols;
    row.shape[1] = d->cols;
    return row;
}

static inspect_row stored_row(const inspection *in, int32_t i) {
    static const char *const uses[] = {[HD_USE_UNKNOWN] = "unknown",
                                       [HD_USE_DATA] = "",
                                       [HD_USE_SCALE] = "scale",
                                       [HD_USE_IGNORED] = "ignored"};
    const hd_tensor *t = hd_checkpoint_at(in->checkpoint, i);
    int32_t decl;
    hd_use use = hd_weights_use(in->weights, i, &decl);
    const hd_tensor_decl *d = decl >= 0 ? &in->schema->decls[decl] : NULL;
    inspect_row row = {.name = t->name,
                       .dtype = t->dtype_name,
                       .file = hd_checkpoint_shard_name(in->checkpoint, t->shard),
                       .role = use == HD_USE_DATA && d ? hd_role_name(d->role) : uses[use],
                       .rank = t->rank,
                       .layer = d ? d->layer : -1,
                       .expert = d ? d->expert : -1,
                       .bytes = (int64_t)t->bytes};
    memcpy(row.shape, t->shape, sizeof row.shape);
    return row;
}

inspect_row inspect_row_at(const inspection *in, int32_t i) {
    return in->checkpoint ? stored_row(in, i) : declared_row(in, i);
}

/* ---- gathering ---- */

static void count_tensors(inspection *in) {
    const hd_checkpoint *c = in->checkpoint;
    for (int32_t i = 0; i < in->schema->n; i++)
        in->n_missing += hd_weights_missing(in->weights, i);
    for (int32_t i = 0; i < hd_checkpoint_count(c); i++) {
        int32_t decl;
        hd_use use = hd_weights_use(in->weights, i, &decl);
        in->n_unknown += use == HD_USE_UNKNOWN;
        in->n_ignored += use == HD_USE_IGNORED;
        in->tensor_bytes += (int64_t)hd_checkpoint_at(c, i)->bytes;
    }
}

static void sum_stored(inspection *in) {
    for (int32_t i = 0; i < in->schema->n; i++) {
        const hd_weight *m = hd_weights_stored(in->weights, i);
        if (!m) continue;
        const hd_stored_format f = hd_weight_format(m);
        hd_summary_add(&in->summary, in->spec, &in->schema->decls[i], m->rows, m->cols, &f);
    }
}

typedef enum depth { HEADERS, SCALES, VALUES } depth; /* how much of the files is read */

/* Stops at the first fault. */
static hd_status check_contents(const inspection *in, depth how, hd_err *err) {
    int64_t total = 0;
    for (int32_t i = 0; i < in->schema->n; i++) {
        const hd_weight *m = hd_weights_stored(in->weights, i);
        total += m && (m->scale || how == VALUES) ? m->rows : 0;
    }
    hd_progress bar;
    hd_progress_init(&bar, how == VALUES ? "reading values" : "reading scales", "rows", total,
                     in->tensor_bytes < QUIET_SCALE_BYTES);
    hd_status st = HD_OK;
    for (int32_t i = 0; i < in->schema->n && st == HD_OK; i++) {
        const hd_weight *m = hd_weights_stored(in->weights, i);
        if (!m || (!m->scale && how != VALUES)) continue;
        st = hd_weights_check_scales(in->weights, i, err);
        if (st == HD_OK && how == VALUES) st = hd_weights_check_values(in->weights, i, err);
        hd_progress_add(&bar, m->rows);
    }
    hd_progress_end(&bar);
    return st;
}

static void note_unknown(inspection *in) {
    for (int32_t i = 0; i < hd_checkpoint_count(in->checkpoint); i++) {
        int32_t decl;
        if (hd_weights_use(in->weights, i, &decl) != HD_USE_UNKNOWN) continue;
        HD_FAIL(&in->problem, HD_EFORMAT, "%s: tensor %.200s: unknown to this model (%d such)",
                in->path, hd_checkpoint_at(in->checkpoint, i)->name, in->n_unknown);
        return;
    }
}

static void gather_stored(inspection *in, depth how, bool strict) {
    in->schema = hd_weights_schema(in->weights);
    in->checkpoint = hd_weights_checkpoint(in->weights);
    in->n_mtp = hd_weights_n_mtp(in->weights);
    in->problem = *hd_weights_problem(in->weights);
    count_tensors(in);
    sum_stored(in);
    if (how != HEADERS) check_contents(in, how, &in->problem);
    if (strict) note_unknown(in);
}

static hd_status print(const inspection *in, bool json, bool tensors, hd_err *err) {
    if (json) return inspect_print_json(in, tensors, err);
    inspect_print_text(in, tensors);
    return HD_OK;
}

/* Collects and prints; closes what it opens. */
static hd_status inspect(const char *path, const hd_model_spec *spec, bool json, bool tensors,
                         depth how, bool strict, hd_err *err) {
    struct stat info;
    bool is_dir = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    inspection in = {.path = path, .spec = spec, .n_mtp = spec->n_mtp};
    hd_weights *weights = NULL;
    hd_schema schema = {0};
    if (is_dir && hd_checkpoint_exists(path)) {
        HD_TRY(hd_weights_survey(&weights, path, spec, err));
        in.weights = weights;
        gather_stored(&in, how, strict);
    } else {
        HD_TRY(hd_schema_open(&schema, spec, err));
        in.schema = &schema;
        hd_summarize(&in.summary, spec, &schema);
    }
    hd_status st = print(&in, json, tensors, err);
    if (st == HD_OK && in.problem.status != HD_OK) {
        *err = in.problem;
        st = err->status;
    }
    hd_schema_close(&schema);
    hd_weights_close(weights);
    return st;
}

static hd_status inspect_stages(const hd_model_spec *spec, bool json, hd_err *err) {
    stage_list list;
    hd_status st = stages_open(&list, spec, err);
    if (st == HD_OK && json) st = stages_print_json(&list, spec, err);
    if (st == HD_OK && !json) stages_print_text(&list, spec);
    stages_close(&list);
    return st;
}

int cmd_inspect(int argc, char **argv) {
    const char *path = "";
    engine_settings engine = engine_settings_default();
    bool json = false, tensors = false, strict = false, quick = false, values = false,
         stages = false;
    const positional where[] = {
        {.name = "MODEL_DIR", .value = &path, .kind = POSITIONAL_CONFIG}
    };
    const option options[] = {
        option_flag("json", &json, "print one JSON object"),
        option_flag("tensors", &tensors, "list every tensor too"),
        option_flag("stages", &stages, "list stages and operators of the forward pass instead"),
        option_flag("strict", &strict, "fail when the files hold tensors that are unknown"),
        option_flag("quick", &quick, "read headers only, not the values of the scales"),
        option_flag("values", &values, "read every weight and refuse NaN and infinity"),
    };
    const command_line line = {
        .command = "inspect",
        .summary = "Prints what a checkpoint holds and whether it is whole.",
        .details = "MODEL_DIR is a model's directory. A config.json, or a directory without\n"
                   "weights, is described from the config alone, in the formats it declares.\n"
                   "Exit code 2 when something is missing, damaged or does not fit; what can\n"
                   "be told is printed all the same.",
        .positionals = where,
        .n_positionals = (int)HD_LEN(where),
        .options = options,
        .n_options = (int)HD_LEN(options)};
    int code;
    if (!engine_options_parse(&line, ENGINE_INSPECT, &engine, argc, argv, &code)) return code;
    hd_err err = {0};
    const char *manifest = engine.options.manifest;
    hd_model_spec *spec = NULL;
    hd_status st = manifest ? hd_manifest_check(manifest, path, &err) : HD_OK;
    if (st == HD_OK && stages && (tensors || strict || quick || values)) {
        st = HD_FAIL(&err, HD_EINVAL,
                     "--stages reads the config alone; --tensors, --strict, --quick and "
                     "--values read the files");
    }
    if (st == HD_OK) st = hd_model_spec_open(&spec, path, &err);
    const depth how = values ? VALUES : quick ? HEADERS : SCALES;
    if (st == HD_OK && stages) st = inspect_stages(spec, json, &err);
    if (st == HD_OK && !stages) st = inspect(path, spec, json, tensors, how, strict, &err);
    hd_model_spec_close(spec);
    if (st == HD_OK) return 0;
    fflush(stdout); /* the description before the error */
    return report_error(&err);
}
