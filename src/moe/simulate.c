/* simulate.c - a run over the steps of some traffic: split, count, look, plan, move. */
#include "moe/simulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/philox.h"

typedef struct sim {
    const hd_sim_args *a;
    hd_sim_result *out;
    int32_t layers, experts, steps;
    int32_t *map;          /* [layers][slots] in force */
    int32_t *rank0;        /* [ranks + 1] first slot of each rank */
    int32_t *rank_of;      /* [slots] */
    int32_t *copies;       /* [experts] of a layer */
    int32_t *turn;         /* [layers][experts] for ROUND: the copy whose turn it is */
    int32_t *rows, *split; /* [experts], [slots] of a layer in a step */
    int32_t *own, *part;   /* [ranks][experts], [slots] of ranks, for LOCAL */
    int64_t *sum, *sorted; /* [ranks], [experts] */
    double *loads;         /* [layers][experts] of a window */
    double *b;             /* [steps][layers] balancedness, as lists for `lowest` */
    hd_eplb_splitter *
        *splitters; /* [layers] of the map in force, for EXACT and LOCAL; else NULL */
    uint64_t drawn;
    double plan_ms, split_us;
    int64_t n_splits;
    double hottest_rows; /* of the busiest rank, sum over steps and layers */
} sim;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

hd_sim_fabric hd_sim_default_fabric(void) {
    /* attention and the rest of a layer; 13.4 MB at 3.2 TB/s; 50 MFLOP at 600 TFLOP/s; 4096
     * values of 1 byte there and 2 back at 370 GB/s */
    return (hd_sim_fabric){.layer_us = 40,
                           .expert_us = 4.2,
                           .row_us = 0.084,
                           .row_bytes = 3 * 4096,
                           .link_gb_s = 370,
                           .expert_bytes = 13.4e6,
                           .move_gb_s = 50,
                           .interference = 0.1};
}

double hd_rebalance_gain(const hd_rebalance_case *c) {
    const double saved = (c->old_us - c->new_us) * (double)c->horizon;
    return saved - c->bytes / c->bytes_per_us * c->interference;
}

/* ---- one layer in one step ---- */

/* The rows of a layer in the passes of a step. */
static int64_t take_rows(sim *s, int32_t step, int32_t layer) {
    const hd_traffic *t = s->a->traffic;
    int64_t total = 0;
    for (int32_t e = 0; e < s->experts; e++) {
        int64_t n = 0;
        for (int32_t p = 0; p < s->a->batch; p++) {
            n += hd_traffic_rows(t, step * s->a->batch + p, layer)[e];
        }
        s->rows[e] = n < INT32_MAX ? (int32_t)n : INT32_MAX;
        total += s->rows[e];
    }
    return total;
}

static void count_copies(sim *s, const int32_t *map) {
    memset(s->copies, 0, (size_t)s->experts * sizeof *s->copies);
    for (int32_t i = 0; i < s->a->slots; i++) {
        if (map[i] >= 0) s->copies[map[i]]++;
    }
}

static void split_shares(sim *s, const int32_t *map, int32_t layer) {
    const bool round = s->a->split == HD_SIM_ROUND;
    int32_t *turn = s->turn + (int64_t)layer * s->experts;
    int32_t *nth = s->copies + s->experts;
    memset(nth, 0, (size_t)s->experts * sizeof *nth);
    for (int32_t i = 0; i < s->a->slots; i++) {
        const int32_t e = map[i];
        if (e < 0) continue;
        const int32_t r = s->copies[e], n = s->rows[e];
        const int32_t from = round ? turn[e] % r : 0;
        const int32_t behind = (nth[e]++ - from + r) % r; /* of the copy whose turn it is */
        s->split[i] = n / r + (behind < n % r);
    }
    for (int32_t e = 0; round && e < s->experts; e++) {
        if (s->copies[e]) turn[e] = (turn[e] + s->rows[e]) % s->copies[e];
    }
}

/* 0 .. n - 1 */
static int32_t draw(sim *s, int32_t n) {
    const uint32_t v = hd_philox_at(s->a->seed, 7, s->drawn++).v[0];
    return (int32_t)((uint64_t)v * (uint32_t)n >> 32);
}

static void split_at_random(sim *s, const int32_t *map) {
    for (int32_t i = 0; i < s->a->slots; i++) s->split[i] = 0;
    for (int32_t e = 0; e < s->experts; e++) {
        int32_t slots[64], r = 0;
        for (int32_t i = 0; i < s->a->slots && r < (int32_t)HD_LEN(slots); i++) {
            if (map[i] == e) slots[r++] = i;
        }
        for (int32_t n = 0; r && n < s->rows[e]; n++) {
            s->split[slots[draw(s, r)]]++;
        }
    }
}

static void split_exactly(sim *s, hd_eplb_splitter *splitter, const int32_t *rows,
                          int32_t *split) {
    const double begun = now_us();
    hd_eplb_split(splitter, rows, split, NULL);
    s->split_us += now_us() - begun;
    s->n_splits++;
}

/* Each row is of any rank. */
static void split_locally(sim *s, hd_eplb_splitter *splitter) {
    const int32_t ranks = s->a->ranks, slots = s->a->slots;
    memset(s->own, 0, (size_t)ranks * (size_t)s->experts * sizeof *s->own);
    memset(s->split, 0, (size_t)slots * sizeof *s->split);
    for (int32_t e = 0; e < s->experts; e++) {
        for (int32_t n = 0; n < s->rows[e]; n++) {
            s->own[(int64_t)draw(s, ranks) * s->experts + e]++;
        }
    }
    for (int32_t d = 0; d < ranks; d++) {
        split_exactly(s, splitter, s->own + (int64_t)d * s->experts, s->part);
        for (int32_t i = 0; i < slots; i++) s->split[i] += s->part[i];
    }
}

static bool needs_splitter(const sim *s) {
    return s->a->split == HD_SIM_EXACT || s->a->split == HD_SIM_LOCAL;
}

/* Of a map [slots]; NULL unless the split is EXACT or LOCAL. */
static hd_status open_splitter(const sim *s, hd_eplb_splitter **out, const int32_t *map,
                               hd_err *err) {
    *out = NULL;
    if (!needs_splitter(s)) return HD_OK;
    return hd_eplb_splitter_open(out, map, s->rank0, s->experts, s->a->ranks, err);
}

typedef struct layer_load {
    int64_t total, most;
    double us; /* of the busiest rank */
} layer_load;

/* Splits the layer's rows over a map and adds them up by rank. splitter: of this map. */
static void load_ranks(sim *s, const int32_t *map, int32_t layer, hd_eplb_splitter *splitter,
                       layer_load *out) {
    const hd_sim_fabric *f = &s->a->fabric;
    const double link_us = f->row_bytes / (f->link_gb_s * 1e3);
    count_copies(s, map);
    if (s->a->split == HD_SIM_EXACT) {
        split_exactly(s, splitter, s->rows, s->split);
    } else if (s->a->split == HD_SIM_LOCAL) {
        split_locally(s, splitter);
    } else if (s->a->split == HD_SIM_RANDOM) {
        split_at_random(s, map);
    } else {
        split_shares(s, map, layer);
    }
    *out = (layer_load){0};
    for (int32_t d = 0; d < s->a->ranks; d++) {
        int32_t active = 0;
        s->sum[d] = 0;
        for (int32_t i = s->rank0[d]; i < s->rank0[d + 1]; i++) {
            if (map[i] < 0) continue;
            s->sum[d] += s->split[i];
            active += s->split[i] > 0;
        }
        const double us = active * f->expert_us + (double)s->sum[d] * (f->row_us + link_us);
        out->total += s->sum[d];
        if (s->sum[d] > out->most) out->most = s->sum[d];
        if (us > out->us) out->us = us;
    }
}

static int by_size(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

/* The least rows that the busiest rank can have: the k hottest experts are on at most k ranks and
 * one more per spare slot. */
static double least_most(sim *s, int64_t total) {
    const int32_t spare = s->a->slots - s->experts;
    double least = ceil((double)total / s->a->ranks), top = 0;
    for (int32_t e = 0; e < s->experts; e++) s->sorted[e] = s->rows[e];
    qsort(s->sorted, (size_t)s->experts, sizeof *s->sorted, by_size);
    for (int32_t k = 0; k < s->experts && k + 1 + spare < s->a->ranks; k++) {
        top += (double)s->sorted[k];
        least = fmax(least, ceil(top / (k + 1 + spare)));
    }
    return least;
}

/* How many ranks hold an expert of a token, if its experts are drawn independently. */
static double ranks_per_token(const sim *s, int64_t total) {
    double n = 0;
    for (int32_t d = 0; total && d < s->a->ranks; d++) {
        n += 1 - pow(1 - (double)s->sum[d] / (double)total, s->a->traffic->top_k);
    }
    return n;
}

/* ---- steps ---- */

/* Adds a layer to step number `at` of the result. */
static void add_layer(sim *s, int32_t at, int32_t layer, int64_t total,
                      const layer_load *load) {
    hd_sim_layer *of = &s->out->of_layers[layer];
    hd_sim_step *to = &s->out->steps[at];
    const double mean = (double)load->total / s->a->ranks;
    const double b = load->most ? mean / (double)load->most : 1;
    s->b[(int64_t)layer * s->out->n_steps + at] = b;
    of->balancedness += b / s->out->n_steps;
    of->most += (double)load->most;
    of->bound += (total ? mean / least_most(s, total) : 1) / s->out->n_steps;
    of->ranks_per_token += ranks_per_token(s, total) / s->out->n_steps;
    to->balancedness += b / s->layers;
    to->us += s->a->fabric.layer_us + load->us;
    s->hottest_rows += (double)load->most;
}

/* Runs a step; adds it to the result if it is behind the first window. */
static void run_step(sim *s, int32_t step) {
    const hd_sim_args *a = s->a;
    const int32_t at = step - a->window;
    // NOLINTNEXTLINE(clang-analyzer-unix.Malloc): what is thought to be lost is freed by close_sim()
    for (int32_t l = 0; l < s->layers; l++) {
        layer_load load;
        const int64_t total = take_rows(s, step, l);
        load_ranks(s, s->map + (int64_t)l * a->slots, l, s->splitters[l], &load);
        if (at >= 0) add_layer(s, at, l, total, &load);
    }
    for (int32_t p = 0; at >= 0 && p < a->batch; p++) {
        s->out->steps[at].tokens += a->traffic->tokens[step * a->batch + p];
    }
}

/* ---- plans ---- */

static void add_window(sim *s, int32_t from, int32_t end) {
    const int64_t n = (int64_t)s->layers * s->experts;
    memset(s->loads, 0, (size_t)n * sizeof *s->loads);
    for (int32_t p = from * s->a->batch; p < end * s->a->batch; p++) {
        const int64_t *rows = hd_traffic_rows(s->a->traffic, p, 0);
        for (int64_t i = 0; i < n; i++) s->loads[i] += (double)rows[i];
    }
}

/* Experts that ranks get and did not hold. */
static int64_t count_moves(sim *s, int32_t layer, const int32_t *map) {
    const int32_t *old = s->map + (int64_t)layer * s->a->slots;
    int64_t moves = 0;
    for (int32_t i = 0; i < s->a->slots; i++) {
        bool known = map[i] < 0;
        const int32_t d = s->rank_of[i];
        for (int32_t k = s->rank0[d]; k < s->rank0[d + 1]; k++) known |= old[k] == map[i];
        for (int32_t k = s->rank0[d]; k < i; k++) known |= map[k] == map[i];
        moves += !known;
    }
    return moves;
}

/* The busiest ranks' time in the steps from..end with a map, per step. */
static hd_status judge(sim *s, const int32_t *map, int32_t from, int32_t end, double *us,
                       hd_err *err) {
    *us = 0;
    for (int32_t l = 0; l < s->layers; l++) {
        const int32_t *of_layer = map + (int64_t)l * s->a->slots;
        hd_eplb_splitter *splitter;
        HD_TRY(open_splitter(s, &splitter, of_layer, err));
        for (int32_t step = from; step < end; step++) {
            layer_load load;
            take_rows(s, step, l);
            load_ranks(s, of_layer, l, splitter, &load);
            *us += load.us / (end - from);
        }
        hd_eplb_splitter_close(splitter);
    }
    return HD_OK;
}

/* Those of the map in force take the places of others. */
static hd_status open_splitters(sim *s, hd_err *err) {
    for (int32_t l = 0; l < s->layers; l++) {
        hd_eplb_splitter_close(s->splitters[l]);
        HD_TRY(open_splitter(s, &s->splitters[l], s->map + (int64_t)l * s->a->slots, err));
    }
    return HD_OK;
}

/* The first map is the one that a server would start with, so it moves nothing. */
static hd_status take_map(sim *s, int32_t step, const hd_eplb_map *m, hd_err *err) {
    for (int32_t l = 0; l < s->layers; l++) {
        const int32_t *map = m->slot_expert + (int64_t)l * s->a->slots;
        const int64_t moves = count_moves(s, l, map);
        if (step > s->a->window) {
            s->out->of_layers[l].moves += moves;
            s->out->steps[step - s->a->window].moves += moves;
        }
    }
    memcpy(s->map, m->slot_expert, (size_t)s->layers * (size_t)s->a->slots * sizeof *s->map);
    s->out->plans++;
    return open_splitters(s, err);
}

/* Whether the new map is worth its moves on the last quarter of the window. */
static hd_status pays(sim *s, int32_t step, const hd_eplb_map *m, bool *yes, hd_err *err) {
    const hd_sim_args *a = s->a;
    const int32_t held = step - a->window / 4;
    hd_rebalance_case c = {.horizon = a->horizon,
                           .bytes_per_us = a->fabric.move_gb_s * 1e3,
                           .interference = a->fabric.interference};
    *yes = true;
    if (a->horizon == 0 || a->window < 4) return HD_OK;
    HD_TRY(judge(s, s->map, held, step, &c.old_us, err));
    HD_TRY(judge(s, m->slot_expert, held, step, &c.new_us, err));
    for (int32_t l = 0; l < s->layers; l++) {
        c.bytes += (double)count_moves(s, l, m->slot_expert + (int64_t)l * a->slots) *
                   a->fabric.expert_bytes;
    }
    *yes = hd_rebalance_gain(&c) > 0;
    return HD_OK;
}

/* Plans from the window before a step, and moves if that pays. */
static hd_status look(sim *s, int32_t step, hd_err *err) {
    const hd_sim_args *a = s->a;
    const bool first = step == a->window, judged = a->horizon > 0 && a->window >= 4;
    const hd_eplb_args plan = {
        .loads = s->loads,
        .layers = s->layers,
        .experts = s->experts,
        .slots = a->slots,
        .ranks = a->ranks,
        .nodes = a->nodes,
        .previous = a->plan == HD_SIM_HADAL && !first ? s->map : NULL,
        .max_moves = a->max_moves,
        .algorithm = a->plan == HD_SIM_HADAL       ? HD_EPLB_HADAL
                     : a->plan == HD_SIM_PUBLISHED ? HD_EPLB_PUBLISHED
                                                   : HD_EPLB_FLOW,
    };
    hd_eplb_map m;
    bool yes;
    add_window(s, step - a->window, judged ? step - a->window / 4 : step);
    const double begun = now_us();
    HD_TRY(hd_eplb_plan(&m, &plan, err));
    s->plan_ms += (now_us() - begun) * 1e-3;
    s->out->looks++;
    hd_status st = pays(s, step, &m, &yes, err);
    if (st == HD_OK && yes) st = take_map(s, step, &m, err);
    hd_eplb_map_close(&m);
    return st;
}

/* ---- a run ---- */

static hd_status check(const hd_sim_args *a, hd_err *err) {
    const hd_traffic *t = a->traffic;
    if (a->ranks < 1 || a->slots < t->experts || a->slots < a->ranks ||
        a->slots > HD_EPLB_MAX_SLOTS) {
        return HD_FAIL(err, HD_EINVAL, "%d slots on %d ranks for %d experts", a->slots,
                       a->ranks, t->experts);
    }
    if (a->batch < 1 || a->window < 1 || t->passes / a->batch <= a->window) {
        return HD_FAIL(err, HD_EINVAL,
                       "%d passes are %d steps of %d; a window of %d steps needs more",
                       t->passes, a->batch > 0 ? t->passes / a->batch : 0, a->batch, a->window);
    }
    if (t->layers < 1) return HD_FAIL(err, HD_EINVAL, "no layer has experts");
    return HD_OK;
}

static hd_status open_sim(sim *s, hd_err *err) {
    const hd_sim_args *a = s->a;
    const size_t layers = (size_t)s->layers, experts = (size_t)s->experts;
    const size_t slots = (size_t)a->slots, ranks = (size_t)a->ranks;
    s->map = calloc(layers * slots, sizeof *s->map);
    s->rank0 = calloc(ranks + 1, sizeof *s->rank0);
    s->rank_of = calloc(slots, sizeof *s->rank_of);
    s->copies = calloc(2 * experts, sizeof *s->copies);
    s->turn = calloc(layers * experts, sizeof *s->turn);
    s->rows = calloc(experts, sizeof *s->rows);
    s->split = calloc(slots, sizeof *s->split);
    s->own = calloc(a->split == HD_SIM_LOCAL ? ranks * experts : 1, sizeof *s->own);
    s->part = calloc(slots, sizeof *s->part);
    s->sum = calloc(ranks, sizeof *s->sum);
    s->sorted = calloc(experts, sizeof *s->sorted);
    s->loads = calloc(layers * experts, sizeof *s->loads);
    s->splitters = calloc(layers, sizeof *s->splitters);
    s->out->n_steps = s->steps - a->window;
    s->out->layers = s->layers;
    s->b = calloc(layers * (size_t)s->out->n_steps, sizeof *s->b);
    s->out->steps = calloc((size_t)s->out->n_steps, sizeof *s->out->steps);
    s->out->of_layers = calloc(layers, sizeof *s->out->of_layers);
    if (!s->map || !s->rank0 || !s->rank_of || !s->copies || !s->turn || !s->rows ||
        !s->split || !s->own || !s->part || !s->sum || !s->sorted || !s->loads ||
        !s->splitters || !s->b || !s->out->steps || !s->out->of_layers) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a simulation of %d layers", s->layers);
    }
    for (size_t i = 0; i < layers * slots; i++) {
        s->map[i] = (int32_t)(i % slots) % s->experts;
    }
    for (int32_t d = 0; d < a->ranks; d++) {
        s->rank0[d + 1] = s->rank0[d] + a->slots / a->ranks + (d < a->slots % a->ranks);
        for (int32_t i = s->rank0[d]; i < s->rank0[d + 1]; i++) s->rank_of[i] = d;
    }
    return HD_OK;
}

static void close_sim(sim *s) {
    for (int32_t l = 0; s->splitters && l < s->layers; l++) {
        hd_eplb_splitter_close(s->splitters[l]);
    }
    free(s->map);
    free(s->rank0);
    free(s->rank_of);
    free(s->copies);
    free(s->turn);
    free(s->rows);
    free(s->split);
    free(s->own);
    free(s->part);
    free(s->sum);
    free(s->sorted);
    free(s->loads);
    free(s->splitters);
    free(s->b);
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void sum_up(sim *s) {
    hd_sim_result *r = s->out;
    const hd_sim_fabric *f = &s->a->fabric;
    const int32_t n = r->n_steps;
    double us = 0, tokens = 0;
    for (int32_t l = 0; l < s->layers; l++) {
        hd_sim_layer *of = &r->of_layers[l];
        qsort(s->b + (int64_t)l * n, (size_t)n, sizeof *s->b, by_value);
        of->lowest = s->b[(int64_t)l * n + n / 100];
        r->total.balancedness += of->balancedness / s->layers;
        r->total.bound += of->bound / s->layers;
        r->total.ranks_per_token += of->ranks_per_token / s->layers;
        r->total.most += of->most;
        r->total.moves += of->moves;
    }
    qsort(s->b, (size_t)n * (size_t)s->layers, sizeof *s->b, by_value);
    r->total.lowest = s->b[(int64_t)n * s->layers / 100];
    for (int32_t i = 0; i < n; i++) {
        us += r->steps[i].us + (double)r->steps[i].moves * f->expert_bytes /
                                   (f->move_gb_s * 1e3) * f->interference;
        tokens += (double)r->steps[i].tokens;
    }
    r->step_us = us / n;
    r->tokens_per_s = tokens / us * 1e6;
    r->moved_bytes = (double)r->total.moves * f->expert_bytes;
    r->hottest_link_gb_s = s->hottest_rows * f->row_bytes / us * 1e-3;
    r->planner_ms = r->looks ? s->plan_ms / r->looks : 0;
    r->split_us = s->n_splits ? s->split_us / (double)s->n_splits : 0;
}

static hd_status run(sim *s, hd_err *err) {
    const hd_sim_args *a = s->a;
    HD_TRY(open_splitters(s, err));
    for (int32_t step = 0; step < s->steps; step++) {
        const int32_t since = step - a->window;
        const bool due = since == 0 || (since > 0 && a->every && since % a->every == 0);
        if (due && a->plan != HD_SIM_NONE) HD_TRY(look(s, step, err));
        run_step(s, step);
    }
    sum_up(s);
    return HD_OK;
}

hd_status hd_simulate(hd_sim_result *out, const hd_sim_args *a, hd_err *err) {
    *out = (hd_sim_result){0};
    HD_TRY(check(a, err));
    sim s = {.a = a,
             .out = out,
             .layers = a->traffic->layers,
             .experts = a->traffic->experts,
             .steps = a->traffic->passes / a->batch};
    hd_status st = open_sim(&s, err);
    if (st == HD_OK) st = run(&s, err);
    close_sim(&s);
    if (st != HD_OK) hd_sim_result_close(out);
    return st;
}

void hd_sim_result_close(hd_sim_result *r) {
    free(r->steps);
    free(r->of_layers);
    *r = (hd_sim_result){0};
}
