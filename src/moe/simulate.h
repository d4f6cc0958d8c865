/* simulate.h - experts on ranks on paper: the planner, the split over copies and the trigger of
 * re-planning, run over recorded or generated traffic without a model.
 *
 * Passes are merged to steps. A plan is made from a window of past steps and judged on later ones;
 * results count the steps after the first window. docs/eplb.md describes the model of a step. */
#ifndef HD_MOE_SIMULATE_H
#define HD_MOE_SIMULATE_H

#include "moe/eplb.h"
#include "moe/traffic.h"

typedef enum hd_sim_plan {
    HD_SIM_NONE,      /* the initial map: slot s holds expert s % experts */
    HD_SIM_PUBLISHED, /* planned anew each time */
    HD_SIM_HADAL,     /* planned once, then repaired */
    HD_SIM_FLOW,      /* planned anew each time */
} hd_sim_plan;

/* How the rows of an expert are split over its copies. */
typedef enum hd_sim_split {
    HD_SIM_EVEN,   /* equal shares, the first copies one row more */
    HD_SIM_ROUND,  /* in turn, going on from step to step */
    HD_SIM_RANDOM, /* each row to any copy */
    HD_SIM_EXACT,  /* hd_eplb_split() of all rows */
    HD_SIM_LOCAL,  /* hd_eplb_split() of the rows of each rank, which has any of them */
} hd_sim_split;

/* Times of one rank. A layer takes layer_us, and on the busiest rank expert_us for each copy with
 * rows, row_us for each row, and the time of its rows on its link, there and back. */
typedef struct hd_sim_fabric {
    double layer_us, expert_us, row_us;
    double row_bytes, link_gb_s;    /* of a row, both ways together */
    double expert_bytes, move_gb_s; /* of an expert's weights, and how fast they move */
    double interference;            /* time of steps lost per time of moving */
} hd_sim_fabric;

/* An H200 and V4-Flash in FP4 over NVLink. */
hd_sim_fabric hd_sim_default_fabric(void);

typedef struct hd_sim_args {
    const hd_traffic *traffic;
    int32_t slots, ranks, nodes;
    hd_sim_plan plan;
    hd_sim_split split;
    int32_t batch;     /* passes of a step */
    int32_t window;    /* steps that a plan is made from; a quarter of them judges it */
    int32_t every;     /* steps between two looks; 0: only the first */
    int32_t horizon;   /* steps in which a plan must gain what its moves cost; 0: always move */
    int64_t max_moves; /* of a layer in a repair; < 0: no limit */
    uint64_t seed;     /* of RANDOM and LOCAL */
    hd_sim_fabric fabric;
} hd_sim_args;

typedef struct hd_sim_step {
    double balancedness; /* mean over layers of mean / max of the ranks' rows */
    double us;           /* predicted, without moves */
    int64_t tokens, moves;
} hd_sim_step;

typedef struct hd_sim_layer {
    double balancedness, lowest; /* mean over steps; 1 % of steps are below `lowest` */
    double most;                 /* rows of the busiest rank, sum over steps */
    double bound;                /* mean over steps: no split of any map is better */
    double ranks_per_token;      /* if the experts of a token are independent */
    int64_t moves;
} hd_sim_layer;

typedef struct hd_sim_result {
    int32_t n_steps, layers;
    hd_sim_step *steps;      /* [n_steps] after the first window */
    hd_sim_layer *of_layers; /* [layers] */
    hd_sim_layer total; /* means, and sums of `most` and moves; lowest: over layers and steps */
    int32_t looks, plans; /* how often a plan was made, and taken */
    double step_us;       /* mean, with the time that moves cost */
    double tokens_per_s, moved_bytes, hottest_link_gb_s;
    double planner_ms, split_us; /* times of a plan and of a split on this core: means */
} hd_sim_result;

/* HD_EINVAL with a sentence for numbers that do not fit together, or too few passes. */
hd_status hd_simulate(hd_sim_result *out, const hd_sim_args *a, hd_err *err);
void hd_sim_result_close(hd_sim_result *r);

/* ---- the trigger, as in a server ---- */

/* What a plan would change, measured on steps that it was not made from. */
typedef struct hd_rebalance_case {
    double old_us, new_us; /* of the busiest ranks in a step, sum over layers */
    int64_t horizon;       /* steps that the plan will serve */
    double bytes, bytes_per_us;
    double interference;
} hd_rebalance_case;

/* The time saved within the horizon less that of the moves, in us: they pay if it is above 0. */
double hd_rebalance_gain(const hd_rebalance_case *c);

#endif
