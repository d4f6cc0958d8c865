/* plan_internal.h - `hadal plan`: what its files share: the settings, the predictions, and their
 * presentation. */
#ifndef HD_CLI_PLANNING_PLAN_INTERNAL_H
#define HD_CLI_PLANNING_PLAN_INTERNAL_H

#include <jansson.h>
#include <stdbool.h>

#include "capacity/pools.h"
#include "cli/options.h"

enum { PLAN_MAX_LAYOUTS = 256 };

/* Of --train. */
typedef struct plan_train_settings {
    int64_t rows, ranks, threads;
    int64_t keep_gib; /* -1: not given */
    const char *freeze;
    int optimizer, backend, weights;
    bool train, drafts, indexer;
} plan_train_settings;

/* Of rows that travel to experts. */
extern const char *const plan_dispatch_types[];
enum { PLAN_ROWS_AS_FLOATS, PLAN_ROWS_AS_FP8 };

typedef struct plan_settings {
    const char *config, *gpu_name, *layout, *chart, *hisparse;
    int64_t gpus, redundant;
    int64_t prefill, decode;               /* GPUs of two pools; 0: one pool does both */
    double price;                          /* of a GPU and hour; 0: none given */
    int precision, kv_type, dispatch_type; /* of plan_dispatch_types */
    bool sum_in_ranks, explain, json;
    plan_train_settings training;
    hd_gpu gpu;
    hd_model_spec *spec;
    hd_capacity_args args;
} plan_settings;

typedef struct plan_result {
    hd_capacity all[PLAN_MAX_LAYOUTS];
    bool best[PLAN_MAX_LAYOUTS]; /* on the Pareto front */
    int32_t n, n_best;
    int32_t first; /* the one to explain: of the best, that with most tokens per second */
    int32_t n_refused;
    hd_err refused; /* why the last layout cannot divide the model */
} plan_result;

/* "tp=2,dp=2,ep=4", or with redundant=N, or "dwdp=4"; returns out. */
int32_t plan_cp(const hd_parallel_config *l); /* at least 1 */
const char *plan_layout_text(const hd_capacity *c, char out[64]);

/* Dollars of a million output tokens. */
double plan_price(const plan_settings *s, const hd_capacity *c);

/* cmd_plan.c: adds the spare slots, sums and types of rows that the settings ask for. */
hd_status plan_complete_layout(const plan_settings *s, hd_parallel_config *l, hd_err *err);

/* cmd_plan.c: whether an option of a plan to serve was given. */
bool plan_serves(const plan_settings *s);

/* plan_train.c: the options of --train, and the whole of such a plan. */
void plan_train_options(option_list *list, plan_train_settings *s);
hd_status plan_check_training(plan_settings *s, hd_err *err); /* completes them, too */
hd_status plan_training(const plan_settings *s, hd_err *err);

/* plan_pools.c: the whole of a plan with --prefill and --decode. */
hd_status plan_pools(const plan_settings *s, hd_err *err);

/* plan_text.c, plan_json.c: parts of what the two forms of a plan print. */
void plan_print_assumed(const plan_settings *s);
void plan_explain_memory(const plan_settings *s, const hd_capacity *c);
void plan_explain_step(const char *title, const hd_step_cost *c, double seconds);
json_t *plan_memory_json(const hd_capacity *c);
json_t *plan_step_json(const hd_step_cost *c, double seconds);
json_t *plan_layout_json(const hd_parallel_config *l);
json_t *plan_gpu_json(const hd_gpu *m);
json_t *plan_load_json(const hd_load *l);
hd_status plan_put_json(json_t *all, hd_err *err); /* prints it, and drops it */

void plan_print_text(const plan_settings *s, const plan_result *r);
hd_status plan_print_json(const plan_settings *s, const plan_result *r, hd_err *err);
hd_status plan_write_chart(const plan_settings *s, const plan_result *r, hd_err *err);

#endif
