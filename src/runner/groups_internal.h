/* groups_internal.h - the leaders of several attention groups agree on passes and steps. */
#ifndef HD_RUNNER_GROUPS_INTERNAL_H
#define HD_RUNNER_GROUPS_INTERNAL_H

#include "runner/model_runner_internal.h"

/* Before a pass they tell each other their rows, and x->draft_places before RUNNER_DRAFT. */
hd_status runner_groups_open(hd_model_runner *x, hd_err *err);
hd_status runner_agree_pass(hd_model_runner *x, int32_t pass, hd_err *err);
/* Before a pass of a single attention group, by its leader: whether it fetches experts. */
void runner_choose_fetches(hd_model_runner *x, int32_t pass);
void runner_time_rows(hd_model_runner *x, int64_t ns); /* what an eager step took, behind it */
hd_batch *runner_batch_of(hd_model_runner *x, int32_t pass); /* which a pass runs */
bool runner_fits_group(const hd_batch *b, int32_t rows, int32_t logits);

/* What can be done with the inputs of a step. */
typedef enum runner_step_kind {
    RUNNER_IDLE,      /* there are none */
    RUNNER_CONTINUES, /* the in-flight step has computed them */
    RUNNER_FRESH,     /* they fit a graph */
    RUNNER_EAGER
} runner_step_kind;

/* A group's plan of a step. Groups launch graphs of one shape, in which one with less to do has
 * padding rows; they launch the step after it only if all can. */
typedef struct runner_step_word {
    int32_t kind;
    int32_t n, depth;           /* sequences and drafts of each */
    int32_t continuing, wanted; /* sequences of the step after it, and their drafts */
    int32_t waits;              /* the step after it needs tokens of this one */
    int32_t in_flight;          /* 0: no step is; else a number of its graph */
} runner_step_word;

typedef struct runner_step_limits {
    int32_t seqs, drafts;
} runner_step_limits;

/* What all groups do, by what each of n would do: the same in any order of them. The in-flight step
 * continues only if it is one graph in all of them. HD_EPEER: a plan is none. */
hd_status runner_join_steps(const runner_step_word *words, int32_t n,
                            const runner_step_limits *limits, runner_step_word *all,
                            hd_err *err);

/* Whether all launch the step after one with drafts of this depth, before that has ended. */
bool runner_launches_next(const runner_step_word *all, int32_t depth);

/* Returns the plan of all groups in *all; of one group alone its own. HD_EPEER: a plan is none. */
hd_status runner_agree_step(hd_model_runner *x, const runner_step_word *own,
                            runner_step_word *all, hd_err *err);

/* Sums the choices of a pass that just ran over the ranks of the group: x->choices are floats then. The
 * command lets the followers do it too. */
void runner_sum_choices(hd_model_runner *x, runner_pass pass);
void runner_command_choices(hd_model_runner *x, runner_pass pass);

/* Whether records say which slot a row went to: experts have copies. */
bool runner_keeps_slots(const hd_model_runner *x);

#endif
