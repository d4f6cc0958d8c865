/* rebalance.c - the state machine of moving experts. */
#include "moe/rebalance.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "moe/eplb.h"
#include "moe/simulate.h"

enum {
    MOST_PAUSE = 64,
    LOOKS_THAT_AGREE = 2,
    MOST_WINDOWS = 8,
    FEWEST_STEPS = 8,
    MOST_DEBT = 64 /* steps that pay for what took longer than their shares */
};
static const double FIRST_BYTES_PER_US = 1e3; /* until a move was timed */

/* Windows are of the same traffic as long as the shares of experts differ less than so many times by
 * what chance does to independent rows. Rows of a text are not independent. */
static const double CHANCE = 3;
static const double MEAN_ABS = 0.79788; /* mean of |x|, x standard normal */

/* A plan moves fewer experts the lower its target. Of these the one that gains most is taken. */
static const double targets[] = {0.97, 0.99, 1};
static const double LEAST_GAIN =
    0.005; /* of the busiest ranks' rows: less is not worth a move */

const char *const hd_rebalance_state_names[HD_N_REBALANCE_STATES] = {
    "watch", "plan", "stage", "verify", "flip", "drop", "wait"};

/* Plans being made. First, one that moves nothing measures the maps in force; then one for each target,
 * or one alone that is carried out whether or not it pays. */
typedef struct planning {
    int32_t pass, n_passes, layer; /* pass 0 measures */
    bool always;
    double balancedness, bound, at_start; /* sums over layers so far */
    double old_rows, new_rows, bytes;     /* of the busiest ranks, and that must travel */
    double best;                          /* time that the best plan so far gains */
} planning;

struct hd_rebalance {
    hd_rebalance_options o;
    hd_rebalance_state state;
    /* [layers][slots] in force; planned; by one target */
    int32_t *map, *next, *trial;
    int32_t *first;  /* [slots] of every layer at first */
    int64_t *before; /* [layers][experts] rows at the last look */
    /* [layers][experts] rows of the last window, and of those of the same traffic before */
    double *newer, *older;
    double n_older; /* windows */
    planning plans;
    double *rank_rows;        /* [ranks] */
    int32_t *rank_slot0;      /* [ranks + 1] */
    int32_t *whole, *part;    /* [experts], [slots] rows */
    int32_t *copies;          /* [experts] */
    int64_t read_at, rows_at; /* steps and rows at the last look */
    int32_t agree;            /* looks running in which moves pay */
    bool forced;
    int32_t pause, to_skip; /* looks without a plan after the next failure; now */

    int32_t layer, slot; /* of the plan: where moves have come to */
    int64_t paid_step;   /* whose share was added to the credit last */
    double credit_us;
    int64_t paid_ns; /* when the moves so far are within the limit */
    double bytes_per_us, step_us;
    int64_t now_ns, now_steps, now_rows;
    hd_rebalance_stats stats;
};

/* Ranks have been told to do something of a plan, and it is not complete. */
static bool is_moving(const hd_rebalance *m) {
    return m->state != HD_REBALANCE_WATCH && m->state != HD_REBALANCE_PLAN &&
           m->state != HD_REBALANCE_WAIT;
}

static int32_t per_rank(const hd_rebalance *m) {
    return m->o.slots / m->o.ranks;
}

static int32_t *row_of(const hd_rebalance *m, int32_t *maps, int32_t layer) {
    return maps + (int64_t)layer * m->o.slots;
}

/* ---- opening ---- */

static hd_status check(const hd_rebalance_options *o, hd_err *err) {
    if (o->layers < 1 || o->experts < 1 || o->ranks < 2 || o->slots < o->experts ||
        o->slots % o->ranks) {
        return HD_FAIL(err, HD_EINVAL,
                       "%d layers of %d experts in %d slots on %d ranks cannot be balanced",
                       o->layers, o->experts, o->slots, o->ranks);
    }
    if (o->look < 1 || o->share < 0 || o->horizon < 1) {
        return HD_FAIL(err, HD_EINVAL, "a look every %d steps, a share of %g of each, for %lld",
                       o->look, o->share, (long long)o->horizon);
    }
    return HD_OK;
}

hd_status hd_rebalance_open(hd_rebalance **out, const hd_rebalance_options *o, hd_err *err) {
    *out = NULL;
    HD_TRY(check(o, err));
    const size_t slots = (size_t)o->layers * (size_t)o->slots;
    const size_t experts = (size_t)o->layers * (size_t)o->experts;
    hd_rebalance *m = calloc(1, sizeof *m);
    if (!m) return HD_FAIL(err, HD_ENOMEM, "no memory to balance %zu experts", experts);
    m->o = *o;
    m->map = calloc(slots, sizeof *m->map);
    m->next = calloc(slots, sizeof *m->next);
    m->trial = calloc(slots, sizeof *m->trial);
    m->first = calloc((size_t)o->slots, sizeof *m->first);
    m->before = calloc(experts, sizeof *m->before);
    m->older = calloc(experts, sizeof *m->older);
    m->newer = calloc(experts, sizeof *m->newer);
    m->rank_rows = calloc((size_t)o->ranks, sizeof *m->rank_rows);
    m->rank_slot0 = calloc((size_t)o->ranks + 1, sizeof *m->rank_slot0);
    m->whole = calloc((size_t)o->experts, sizeof *m->whole);
    m->part = calloc((size_t)o->slots, sizeof *m->part);
    m->copies = calloc((size_t)o->experts, sizeof *m->copies);
    if (!m->map || !m->next || !m->trial || !m->first || !m->before || !m->older || !m->newer ||
        !m->rank_rows || !m->rank_slot0 || !m->whole || !m->part || !m->copies) {
        hd_rebalance_close(m);
        return HD_FAIL(err, HD_ENOMEM, "no memory to balance %zu experts", experts);
    }
    for (int32_t s = 0; s < o->slots; s++) m->first[s] = s % o->experts;
    for (int32_t d = 0; d <= o->ranks; d++) m->rank_slot0[d] = d * per_rank(m);
    for (int32_t l = 0; l < o->layers; l++) {
        memcpy(row_of(m, m->map, l), m->first, (size_t)o->slots * sizeof *m->first);
    }
    m->bytes_per_us = FIRST_BYTES_PER_US;
    m->pause = 1;
    m->stats.balancedness = m->stats.bound = m->stats.at_start = 1;
    *out = m;
    return HD_OK;
}

void hd_rebalance_close(hd_rebalance *m) {
    if (!m) return;
    free(m->map);
    free(m->next);
    free(m->trial);
    free(m->first);
    free(m->before);
    free(m->older);
    free(m->newer);
    free(m->rank_rows);
    free(m->rank_slot0);
    free(m->whole);
    free(m->part);
    free(m->copies);
    free(m);
}

/* ---- who has what ---- */

static bool rank_holds(const hd_rebalance *m, const int32_t *map, int32_t rank, int32_t expert,
                       int32_t end) {
    const int32_t first = rank * per_rank(m);
    for (int32_t s = first; s < first + per_rank(m) && s < end; s++) {
        if (map[s] == expert) return true;
    }
    return false;
}

static bool held_at_first(const hd_rebalance *m, int32_t rank, int32_t expert) {
    if (!m->o.initial_stays) return false;
    const int32_t first = rank * per_rank(m);
    for (int32_t s = first; s < first + per_rank(m); s++) {
        if (m->first[s] == expert) return true;
    }
    return false;
}

/* Whether the expert of a planned slot must come from another rank; once per rank. */
static bool must_travel(const hd_rebalance *m, int32_t *maps, int32_t layer, int32_t slot) {
    const int32_t *map = row_of(m, m->map, layer), *next = row_of(m, maps, layer);
    const int32_t rank = slot / per_rank(m), expert = next[slot];
    return !rank_holds(m, map, rank, expert, m->o.slots) && !held_at_first(m, rank, expert) &&
           !rank_holds(m, next, rank, expert, slot);
}

/* The nearest rank behind `to` that holds an expert, so that senders differ. */
static int32_t source_of(const hd_rebalance *m, int32_t layer, int32_t expert, int32_t to) {
    const int32_t *map = row_of(m, m->map, layer);
    int32_t k = 1;
    while (!rank_holds(m, map, (to + k) % m->o.ranks, expert, m->o.slots)) k++;
    assert(k < m->o.ranks); /* every expert is somewhere, and not at `to` */
    return (to + k) % m->o.ranks;
}

/* ---- windows ---- */

/* Rows of the busiest rank, of `sum` rows of all, with an even split over copies. */
static double most_even(hd_rebalance *m, const int32_t *map, const double *rows, double *sum) {
    double most = 0;
    memset(m->copies, 0, (size_t)m->o.experts * sizeof *m->copies);
    memset(m->rank_rows, 0, (size_t)m->o.ranks * sizeof *m->rank_rows);
    for (int32_t s = 0; s < m->o.slots; s++) m->copies[map[s]]++;
    *sum = 0;
    for (int32_t s = 0; s < m->o.slots; s++) {
        const double n = rows[map[s]] / m->copies[map[s]];
        double *of = &m->rank_rows[s / per_rank(m)];
        *of += n;
        *sum += n;
        if (*of > most) most = *of;
    }
    return most;
}

/* With an exact one. */
static hd_status most_exact(hd_rebalance *m, const int32_t *map, const double *rows,
                            double *most, double *sum, hd_err *err) {
    hd_eplb_splitter *s;
    HD_TRY(hd_eplb_splitter_open(&s, map, m->rank_slot0, m->o.experts, m->o.ranks, err));
    *sum = 0;
    for (int32_t e = 0; e < m->o.experts; e++) {
        m->whole[e] = rows[e] < INT32_MAX ? (int32_t)rows[e] : INT32_MAX;
        *sum += m->whole[e];
    }
    *most = (double)hd_eplb_split(s, m->whole, m->part, NULL);
    hd_eplb_splitter_close(s);
    return HD_OK;
}

/* With that of the server. */
static hd_status most_rows(hd_rebalance *m, const int32_t *map, const double *rows,
                           double *most, double *sum, hd_err *err) {
    if (m->o.split != HD_SPLIT_TURNS) return most_exact(m, map, rows, most, sum, err);
    *most = most_even(m, map, rows, sum);
    return HD_OK;
}

static void count_single(hd_rebalance *m) {
    m->stats.single_copies = 0;
    for (int32_t l = 0; l < m->o.layers; l++) {
        const int32_t *map = row_of(m, m->map, l);
        memset(m->copies, 0, (size_t)m->o.experts * sizeof *m->copies);
        for (int32_t s = 0; s < m->o.slots; s++) m->copies[map[s]]++;
        for (int32_t e = 0; e < m->o.experts; e++) m->stats.single_copies += m->copies[e] == 1;
    }
}

static hd_eplb_args plan_of(const hd_rebalance *m, const double *rows) {
    return (hd_eplb_args){.loads = rows,
                          .layers = 1,
                          .experts = m->o.experts,
                          .slots = m->o.slots,
                          .ranks = m->o.ranks};
}

/* A plan of a layer for rows that starts from the map in force. */
static hd_status plan_layer(const hd_rebalance *m, hd_eplb_map *out, int32_t layer,
                            const double *rows, double target, hd_err *err) {
    hd_eplb_args plan = plan_of(m, rows + (int64_t)layer * m->o.experts);
    plan.previous = row_of(m, m->map, layer);
    plan.max_moves = -1;
    plan.target = target;
    return hd_eplb_plan(out, &plan, err);
}

static const double *last_rows(const hd_rebalance *m, int32_t layer) {
    return m->newer + (int64_t)layer * m->o.experts;
}

static hd_status balancedness_of(hd_rebalance *m, const int32_t *map, int32_t layer,
                                 double *out, hd_err *err) {
    double most, sum;
    HD_TRY(most_rows(m, map, last_rows(m, layer), &most, &sum, err));
    *out += most > 0 ? sum / m->o.ranks / most : 1;
    return HD_OK;
}

/* The bound depends on the rows alone. */
static hd_status measure_layer(hd_rebalance *m, int32_t layer, hd_err *err) {
    planning *p = &m->plans;
    hd_eplb_map any;
    hd_eplb_args plan = plan_of(m, last_rows(m, layer));
    HD_TRY(balancedness_of(m, row_of(m, m->map, layer), layer, &p->balancedness, err));
    HD_TRY(balancedness_of(m, m->first, layer, &p->at_start, err));
    if (m->o.split == HD_SPLIT_TURNS) {
        plan.previous = row_of(m, m->map, layer); /* which takes no time to keep */
    } else {
        plan.algorithm = HD_EPLB_FLOW;
    }
    HD_TRY(hd_eplb_plan(&any, &plan, err));
    p->bound += any.bound[0];
    hd_eplb_map_close(&any);
    return HD_OK;
}

static void show_measured(hd_rebalance *m) {
    const planning *p = &m->plans;
    m->stats.balancedness = p->balancedness / m->o.layers;
    m->stats.bound = p->bound / m->o.layers;
    m->stats.at_start = p->at_start / m->o.layers;
    count_single(m);
}

/* Whether the last window is of the traffic before it. */
static bool is_same_traffic(const hd_rebalance *m) {
    double differ = 0, chance = 0;
    for (int32_t l = 0; l < m->o.layers; l++) {
        const double *a = m->older + (int64_t)l * m->o.experts;
        const double *b = m->newer + (int64_t)l * m->o.experts;
        double n_a = 0, n_b = 0;
        for (int32_t e = 0; e < m->o.experts; e++) {
            n_a += a[e];
            n_b += b[e];
        }
        if (n_a <= 0 || n_b <= 0) continue;
        for (int32_t e = 0; e < m->o.experts; e++) {
            const double share = (a[e] + b[e]) / (n_a + n_b);
            differ += fabs(a[e] / n_a - b[e] / n_b);
            chance += MEAN_ABS * sqrt(share * (1 / n_a + 1 / n_b));
        }
    }
    return differ <= CHANCE * chance;
}

/* The last window joins those before, or takes their place if traffic has changed. */
static void keep_window(hd_rebalance *m) {
    const int64_t n = (int64_t)m->o.layers * m->o.experts;
    const bool same = m->n_older > 0 && is_same_traffic(m);
    const double kept = !same ? 0 : m->n_older < MOST_WINDOWS ? 1 : 0.5;
    for (int64_t i = 0; i < n; i++) m->older[i] = kept * m->older[i] + m->newer[i];
    m->n_older = kept * m->n_older + 1;
}

static double take_window(hd_rebalance *m, const int64_t *rows) {
    const int64_t n = (int64_t)m->o.layers * m->o.experts;
    double all = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t since = rows[i] < m->before[i] ? rows[i] : rows[i] - m->before[i];
        m->newer[i] = (double)since;
        all += (double)since;
        m->before[i] = rows[i];
    }
    return all;
}

/* ---- plans ---- */

static void begin_layer(hd_rebalance *m) {
    const size_t bytes = (size_t)m->o.slots * sizeof *m->map;
    m->slot = 0;
    while (m->layer < m->o.layers &&
           memcmp(row_of(m, m->map, m->layer), row_of(m, m->next, m->layer), bytes) == 0) {
        m->layer++;
    }
    m->state = m->layer < m->o.layers ? HD_REBALANCE_STAGE : HD_REBALANCE_WAIT;
    m->stats.layers_left = m->o.layers - m->layer;
    if (m->state == HD_REBALANCE_WAIT) m->pause = 1;
}

/* Plans a layer into m->trial, and adds what it changes for the last window. */
static hd_status try_layer(hd_rebalance *m, int32_t layer, hd_err *err) {
    planning *p = &m->plans;
    const double target = p->always ? 1 : targets[p->pass - 1];
    int32_t *map = row_of(m, m->map, layer), *trial = row_of(m, m->trial, layer);
    hd_eplb_map made;
    double before, after, sum;
    HD_TRY(plan_layer(m, &made, layer, p->always ? m->newer : m->older, target, err));
    for (int32_t s = 0; s < m->o.slots; s++) {
        trial[s] = made.slot_expert[s] < 0 ? map[s] : made.slot_expert[s];
    }
    hd_eplb_map_close(&made);
    HD_TRY(most_rows(m, map, last_rows(m, layer), &before, &sum, err));
    HD_TRY(most_rows(m, trial, last_rows(m, layer), &after, &sum, err));
    p->old_rows += before;
    p->new_rows += after;
    for (int32_t s = 0; s < m->o.slots; s++) {
        p->bytes += must_travel(m, m->trial, layer, s) ? m->o.expert_bytes : 0;
    }
    return HD_OK;
}

/* The time that the plan saves within the horizon, judged on the last window, less that of its moves; 0
 * if it does not pay. */
static double gain_of(const hd_rebalance *m) {
    const planning *p = &m->plans;
    const double old = p->old_rows, new = p->new_rows;
    if (new > old *(1 - LEAST_GAIN)) return 0;
    const hd_rebalance_case c = {.old_us = m->step_us,
                                 .new_us = old > 0 ? m->step_us * new / old : m->step_us,
                                 .bytes = p->bytes,
                                 .horizon = m->o.horizon,
                                 .bytes_per_us = m->bytes_per_us,
                                 .interference = 1};
    const double gain = hd_rebalance_gain(&c);
    return gain > 0 ? gain : 0;
}

static void take_trial(hd_rebalance *m) {
    int32_t *spare = m->next;
    m->next = m->trial;
    m->trial = spare;
}

static void begin_plan(hd_rebalance *m) {
    m->agree = 0;
    if (m->plans.always) m->forced = false;
    m->layer = 0;
    begin_layer(m);
    m->stats.plans += m->state == HD_REBALANCE_STAGE;
    if (m->state == HD_REBALANCE_WAIT) m->state = HD_REBALANCE_WATCH; /* nothing to move */
}

static void end_planning(hd_rebalance *m) {
    const planning *p = &m->plans;
    m->state = HD_REBALANCE_WATCH;
    if (p->n_passes > 0 && !p->always) m->agree = p->best > 0 ? m->agree + 1 : 0;
    if (p->always || m->agree >= LOOKS_THAT_AGREE) begin_plan(m);
    keep_window(m);
}

static void end_pass(hd_rebalance *m) {
    planning *p = &m->plans;
    if (p->pass == 0) {
        show_measured(m);
    } else if (p->always) {
        take_trial(m);
    } else {
        const double gain = gain_of(m);
        if (gain > p->best) {
            p->best = gain;
            take_trial(m);
        }
    }
    p->layer = 0;
    p->old_rows = p->new_rows = p->bytes = 0;
    if (p->pass++ == p->n_passes) end_planning(m);
}

hd_status hd_rebalance_plan(hd_rebalance *m, hd_err *err) {
    planning *p = &m->plans;
    assert(m->state == HD_REBALANCE_PLAN);
    const hd_status st =
        p->pass ? try_layer(m, p->layer, err) : measure_layer(m, p->layer, err);
    if (st != HD_OK) {
        m->state = HD_REBALANCE_WATCH;
        return st;
    }
    if (++p->layer == m->o.layers) end_pass(m);
    return HD_OK;
}

/* At the last window: m->older is of the windows before. */
void hd_rebalance_rows(hd_rebalance *m, const int64_t *rows) {
    const bool waited = m->state == HD_REBALANCE_WAIT;
    assert(waited || m->state == HD_REBALANCE_WATCH);
    m->stats.looks++;
    m->state = HD_REBALANCE_WATCH;
    m->read_at = m->now_steps;
    m->rows_at = m->now_rows;
    if (take_window(m, rows) <= 0) return;
    const bool skip = waited || (m->to_skip > 0 && !m->forced);
    m->to_skip -= skip && !waited;
    const bool always = m->forced || m->o.always;
    m->plans = (planning){.always = always && !skip};
    if (!skip) m->plans.n_passes = always ? 1 : m->n_older > 0 ? (int32_t)HD_LEN(targets) : 0;
    m->state = HD_REBALANCE_PLAN;
}

/* ---- actions ---- */

/* A step adds its share, of which none is kept for later. */
static void pay(hd_rebalance *m, int64_t steps) {
    const double share = m->o.share * m->step_us;
    const double due = (double)(steps - m->paid_step) * share;
    m->credit_us = m->credit_us + due < share ? m->credit_us + due : share;
    if (m->credit_us < -MOST_DEBT * share) m->credit_us = -MOST_DEBT * share;
    m->paid_step = steps;
}

static bool has_credit(const hd_rebalance *m) {
    return m->o.share <= 0 || m->step_us <= 0 || m->credit_us > 0;
}

void hd_rebalance_spend(hd_rebalance *m, double took_us) {
    m->credit_us -= took_us;
}

static hd_rebalance_action next_stage(hd_rebalance *m) {
    while (m->slot < m->o.slots && !must_travel(m, m->next, m->layer, m->slot)) m->slot++;
    if (m->slot == m->o.slots) {
        m->state = HD_REBALANCE_VERIFY;
        return (hd_rebalance_action){.what = HD_REBALANCE_TO_VERIFY,
                                     .layer = m->layer,
                                     .map = row_of(m, m->next, m->layer)};
    }
    if (!has_credit(m) || m->now_ns < m->paid_ns) return (hd_rebalance_action){0};
    const int32_t to = m->slot / per_rank(m);
    const int32_t expert = row_of(m, m->next, m->layer)[m->slot];
    return (hd_rebalance_action){.what = HD_REBALANCE_TO_STAGE,
                                 .layer = m->layer,
                                 .expert = expert,
                                 .from = source_of(m, m->layer, expert, to),
                                 .to = to};
}

static bool is_time_to_look(const hd_rebalance *m, const hd_rebalance_now *now) {
    const int64_t steps = now->steps - m->read_at;
    if (m->forced) return steps >= 1;
    const bool enough = m->o.look_rows > 0 && now->rows - m->rows_at >= m->o.look_rows;
    return steps >= m->o.look || (enough && steps >= FEWEST_STEPS);
}

hd_rebalance_action hd_rebalance_next(hd_rebalance *m, const hd_rebalance_now *now) {
    hd_rebalance_action a = {.layer = is_moving(m) ? m->layer : 0};
    m->now_ns = now->ns;
    m->now_steps = now->steps;
    m->now_rows = now->rows;
    m->step_us = now->step_us;
    pay(m, now->steps);
    switch (m->state) {
    case HD_REBALANCE_WATCH:
    case HD_REBALANCE_WAIT:
        if (is_time_to_look(m, now)) a.what = HD_REBALANCE_READ;
        return a;
    case HD_REBALANCE_PLAN:
        if (has_credit(m)) a.what = HD_REBALANCE_TO_PLAN;
        return a;
    case HD_REBALANCE_STAGE:
        return next_stage(m);
    case HD_REBALANCE_VERIFY:
    case HD_REBALANCE_FLIP:
        a.map = row_of(m, m->next, m->layer);
        a.what = m->state == HD_REBALANCE_FLIP ? HD_REBALANCE_TO_FLIP : HD_REBALANCE_TO_VERIFY;
        return a;
    case HD_REBALANCE_DROP:
        a.what = HD_REBALANCE_TO_DROP;
        return a;
    case HD_N_REBALANCE_STATES:
        break;
    }
    return a;
}

static void give_up(hd_rebalance *m, hd_rebalance_state next) {
    m->stats.interrupted++;
    m->stats.layers_left = 0;
    m->to_skip = m->pause;
    m->pause = hd_min_i32(2 * m->pause, MOST_PAUSE);
    m->state = next;
}

static void staged(hd_rebalance *m, double took_us) {
    hd_rebalance_spend(m, took_us);
    m->slot++;
    m->stats.moves++;
    m->stats.moved_bytes += m->o.expert_bytes;
    if (took_us > 0) m->bytes_per_us = (m->bytes_per_us + m->o.expert_bytes / took_us) / 2;
    if (m->o.max_bytes_per_s <= 0) return;
    const double ns = m->o.expert_bytes / m->o.max_bytes_per_s * 1e9;
    m->paid_ns = (m->paid_ns > m->now_ns ? m->paid_ns : m->now_ns) + (int64_t)ns;
}

static void flipped(hd_rebalance *m) {
    memcpy(row_of(m, m->map, m->layer), row_of(m, m->next, m->layer),
           (size_t)m->o.slots * sizeof *m->map);
    m->stats.flips++;
    m->layer++;
}

void hd_rebalance_done(hd_rebalance *m, bool ok, double took_us) {
    switch (m->state) {
    case HD_REBALANCE_STAGE:
        if (ok) {
            staged(m, took_us);
        } else {
            give_up(m, HD_REBALANCE_DROP);
        }
        return;
    case HD_REBALANCE_VERIFY:
        if (ok) {
            m->state = HD_REBALANCE_FLIP;
        } else {
            give_up(m, HD_REBALANCE_DROP);
        }
        return;
    case HD_REBALANCE_FLIP:
        assert(ok);
        flipped(m);
        begin_layer(m);
        return;
    case HD_REBALANCE_DROP:
        m->state = HD_REBALANCE_WAIT;
        return;
    case HD_REBALANCE_WATCH:
    case HD_REBALANCE_PLAN:
    case HD_REBALANCE_WAIT:
    case HD_N_REBALANCE_STATES:
        assert(false); /* an answer without an action */
        return;
    }
}

void hd_rebalance_interrupt(hd_rebalance *m, bool is_flipped) {
    const bool moving = is_moving(m);
    if (m->state == HD_REBALANCE_PLAN) m->state = HD_REBALANCE_WATCH;
    if (is_flipped) {
        assert(m->state == HD_REBALANCE_VERIFY || m->state == HD_REBALANCE_FLIP);
        flipped(m);
    }
    m->agree = 0;
    if (moving) give_up(m, HD_REBALANCE_WAIT);
}

void hd_rebalance_force(hd_rebalance *m) {
    m->forced = true;
    m->to_skip = 0;
}

const int32_t *hd_rebalance_map(const hd_rebalance *m, int32_t layer) {
    return row_of(m, m->map, layer);
}

hd_rebalance_stats hd_rebalance_read_stats(const hd_rebalance *m) {
    hd_rebalance_stats s = m->stats;
    s.state = m->state;
    return s;
}
