/* rebalance.h - when experts move between ranks, and in which order: a state machine without
 * ranks, clocks or memory of weights. Events go in, actions come out; whoever drives it carries
 * them out one at a time (engine/rebalance.c, or a test's model of ranks).
 *
 *     watch -> plan -> stage -> verify -> flip -> (next layer: stage ...) -> wait -> watch
 *
 * Counts of rows are read every `look` steps. A plan is made from the windows before the last one, as
 * far back as traffic was the same, and judged on the last one: a layer at a time, and not more of
 * them between two steps than a share of a step's time allows, nor more experts. If a plan pays in two
 * looks running, the layers of the second change one after the other. A refusal or a lost rank drops what was
 * staged and leaves the maps in force; the machine tries again after a pause that doubles. */
#ifndef HD_MOE_REBALANCE_H
#define HD_MOE_REBALANCE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "moe/split.h"

typedef struct hd_rebalance hd_rebalance;

typedef enum hd_rebalance_state {
    HD_REBALANCE_WATCH,
    HD_REBALANCE_PLAN,
    HD_REBALANCE_STAGE,
    HD_REBALANCE_VERIFY,
    HD_REBALANCE_FLIP,
    HD_REBALANCE_DROP,
    HD_REBALANCE_WAIT, /* the first window after moves belongs to no plan */
    HD_N_REBALANCE_STATES
} hd_rebalance_state;

extern const char *const hd_rebalance_state_names[HD_N_REBALANCE_STATES];

typedef enum hd_rebalance_do {
    HD_REBALANCE_NOTHING,  /* until the next step */
    HD_REBALANCE_READ,     /* answer with hd_rebalance_rows() */
    HD_REBALANCE_TO_PLAN,  /* answer with hd_rebalance_plan() and hd_rebalance_spend() */
    HD_REBALANCE_TO_STAGE, /* answer these with hd_rebalance_done() */
    HD_REBALANCE_TO_VERIFY,
    HD_REBALANCE_TO_FLIP,
    HD_REBALANCE_TO_DROP
} hd_rebalance_do;

typedef struct hd_rebalance_action {
    hd_rebalance_do what;
    int32_t layer;            /* index in the options' layers */
    int32_t expert, from, to; /* STAGE: ranks */
    const int32_t *map;       /* [slots] VERIFY and FLIP; valid until the answer */
} hd_rebalance_action;

typedef struct hd_rebalance_options {
    int32_t layers, experts, slots, ranks; /* layers with experts; ranks divide slots */
    int32_t look;                          /* steps of a window */
    int64_t
        look_rows; /* rows that are a window, if they come in fewer steps, but 8; 0: none are */
    bool always;   /* move what a plan changes, whether or not it pays */
    int64_t horizon;        /* steps in which a plan must gain what its moves cost */
    double expert_bytes;    /* of an expert of one layer */
    double max_bytes_per_s; /* 0: no limit */
    double
        share; /* of a step's time that plans and stages between two steps take; 0: no limit */
    bool initial_stays;    /* a rank keeps the experts that its slots held at first */
    hd_expert_split split; /* what maps are judged with; TURNS: even */
} hd_rebalance_options;

typedef struct hd_rebalance_stats {
    hd_rebalance_state state;
    int64_t looks, plans, flips, moves, interrupted;
    double moved_bytes;
    /* Means over layers for the rows of the last window, split over copies as the options say: mean / max
     * of the ranks' rows; what no map exceeds; what the maps at first would have given. */
    double balancedness, bound, at_start;
    int32_t single_copies; /* experts, of all layers, that one slot holds */
    int32_t layers_left;   /* of the plan that is carried out */
} hd_rebalance_stats;

/* Slot s holds expert s % experts at first. */
hd_status hd_rebalance_open(hd_rebalance **out, const hd_rebalance_options *o, hd_err *err);
void hd_rebalance_close(hd_rebalance *m); /* NULL is fine */

typedef struct hd_rebalance_now {
    int64_t steps, rows; /* run so far */
    int64_t ns;          /* of any clock */
    double step_us;      /* mean time of a step */
} hd_rebalance_now;

/* Returns what to do now: the same as long as nothing was answered and no time has passed. */
hd_rebalance_action hd_rebalance_next(hd_rebalance *m, const hd_rebalance_now *now);

/* Answers READ: rows [layers][experts] since the start, summed over all ranks. */
void hd_rebalance_rows(hd_rebalance *m, const int64_t *rows);

/* Answers TO_PLAN: a layer of a plan. An error is that of the planner. */
hd_status hd_rebalance_plan(hd_rebalance *m, hd_err *err);
void hd_rebalance_spend(hd_rebalance *m, double took_us);

/* Answers the other actions. took_us: how long a stage took. A flip that was ordered cannot be
 * refused: ok is true. */
void hd_rebalance_done(hd_rebalance *m, bool ok, double took_us);

/* A rank was lost, wherever the machine is. flipped: whether the map that VERIFY or FLIP had is in
 * force on every rank now; else the old one is. Nothing is staged any more. */
void hd_rebalance_interrupt(hd_rebalance *m, bool flipped);

/* Plans at the next look, and moves whether or not it pays. */
void hd_rebalance_force(hd_rebalance *m);

/* The map in force: [slots]. */
const int32_t *hd_rebalance_map(const hd_rebalance *m, int32_t layer);

hd_rebalance_stats hd_rebalance_read_stats(const hd_rebalance *m);

#endif
