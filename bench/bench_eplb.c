/* bench_eplb.c - plans of experts: time of planner, repair and split on one core, and the
 * balancedness of the next batch.
 *
 *     build/bench_eplb [REPEATS]
 *
 * 58 layers of 256 experts; 288 slots. Loads are lognormal(1.0), plans made from 2 million rows.
 * Times are this thread's on its core; means, the split's also the longest of a batch.
 * bench/eplb.py times the published algorithm in Python. Beside steps: what a server's plans and moves
 * add to them. Balancedness is mean / max of the ranks per batch, then averaged over batches and layers;
 * with a jitter every expert's share changes per batch by exp(jitter * N(0, 1)). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/philox.h"
#include "moe/eplb.h"
#include "moe/rebalance.h"

enum {
    LAYERS = 58,
    EXPERTS = 256,
    SLOTS = 288,
    MAX_RANKS = 72,
    BATCHES = 6,
    SPLITS = 8, /* of a batch, timed together: the thread's clock takes a call of the system */
    SEED = 20261124,
};

#define PLAN_ROWS 2e6

static uint64_t drawn;

static double draw(void) {
    const hd_philox p = hd_philox_at(SEED, 0, drawn++);
    return ((double)p.v[0] + 0.5) * 0x1p-32;
}

static double draw_normal(void) {
    const double u = draw(), v = draw();
    return sqrt(-2 * log(u)) * cos(2 * acos(-1.0) * v);
}

static double now_us(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static void fail(const hd_err *err) {
    fprintf(stderr, "error: %s\n", err->msg);
    exit(1);
}

/* ---- loads ---- */

typedef struct shares {
    double of[LAYERS][EXPERTS]; /* add up to 1 in a layer */
} shares;

static void normalize(double *w) {
    double sum = 0;
    for (int32_t e = 0; e < EXPERTS; e++) sum += w[e];
    for (int32_t e = 0; e < EXPERTS; e++) w[e] /= sum;
}

static void draw_shares(shares *s, double sigma) {
    for (int32_t l = 0; l < LAYERS; l++) {
        for (int32_t e = 0; e < EXPERTS; e++) s->of[l][e] = exp(sigma * draw_normal());
        normalize(s->of[l]);
    }
}

/* As many rows, each drawn by itself. */
static void draw_batch(int32_t *rows, const double *share, double jitter, int64_t n) {
    double w[EXPERTS], sum = 0;
    for (int32_t e = 0; e < EXPERTS; e++) w[e] = share[e] * exp(jitter * draw_normal());
    normalize(w);
    for (int32_t e = 0; e < EXPERTS; e++) w[e] = sum += w[e];
    memset(rows, 0, EXPERTS * sizeof *rows);
    for (int64_t i = 0; i < n; i++) {
        const double u = draw();
        int32_t lo = 0, hi = EXPERTS - 1;
        while (lo < hi) {
            const int32_t mid = (lo + hi) / 2;
            if (w[mid] < u)
                lo = mid + 1;
            else
                hi = mid;
        }
        rows[lo]++;
    }
}

/* What a recorder would have counted in PLAN_ROWS rows: the normal approximation. */
static void record(double *loads, const shares *s) {
    for (int32_t l = 0; l < LAYERS; l++) {
        for (int32_t e = 0; e < EXPERTS; e++) {
            const double mean = s->of[l][e] * PLAN_ROWS;
            const double n = floor(mean + sqrt(mean) * draw_normal() + 0.5);
            loads[l * EXPERTS + e] = n > 0 ? n : 0;
        }
    }
}

static hd_eplb_map plan(const double *loads, int32_t ranks, hd_eplb_algorithm algorithm,
                        const int32_t *previous) {
    const hd_eplb_args a = {.loads = loads,
                            .layers = LAYERS,
                            .experts = EXPERTS,
                            .slots = SLOTS,
                            .ranks = ranks,
                            .previous = previous,
                            .max_moves = -1,
                            .algorithm = algorithm};
    hd_eplb_map m;
    hd_err err = {0};
    if (hd_eplb_plan(&m, &a, &err) != HD_OK) fail(&err);
    return m;
}

static double mean_of(const double *v) {
    double sum = 0;
    for (int32_t l = 0; l < LAYERS; l++) sum += v[l];
    return sum / LAYERS;
}

/* ---- time of plans ---- */

static void print_row(const char *what, double ours, const char *unit, double limit) {
    printf("%-34s %9.2f %-3s %9.2f %-3s %6.2f\n", what, ours, unit, limit, unit, ours / limit);
}

static void time_plans(int32_t repeats) {
    static const struct {
        const char *name;
        hd_eplb_algorithm algorithm;
        double limit_ms;
    } rows[] = {
        {"published, 32 ranks", HD_EPLB_PUBLISHED, 1 },
        {"hadal, 32 ranks",     HD_EPLB_HADAL,     10},
        {"flow, 32 ranks",      HD_EPLB_FLOW,      10},
    };
    static shares s;
    static double loads[LAYERS * EXPERTS];
    draw_shares(&s, 1);
    record(loads, &s);
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        const double begin = now_us(CLOCK_THREAD_CPUTIME_ID);
        double balance = 0;
        for (int32_t k = 0; k < repeats; k++) {
            hd_eplb_map m = plan(loads, 32, rows[i].algorithm, NULL);
            balance = mean_of(m.balancedness);
            hd_eplb_map_close(&m);
        }
        print_row(rows[i].name, (now_us(CLOCK_THREAD_CPUTIME_ID) - begin) / repeats / 1e3, "ms",
                  rows[i].limit_ms);
        printf("    balancedness of the same loads: %.4f\n", balance);
    }
    draw_shares(&s, 0.8);
    record(loads, &s);
    hd_eplb_map old = plan(loads, 32, HD_EPLB_HADAL, NULL);
    for (int32_t i = 0; i < LAYERS * EXPERTS; i++) loads[i] *= exp(0.1 * draw_normal());
    const double begin = now_us(CLOCK_THREAD_CPUTIME_ID);
    double balance = 0, moves = 0, least = 1;
    for (int32_t k = 0; k < repeats; k++) {
        hd_eplb_map m = plan(loads, 32, HD_EPLB_HADAL, old.slot_expert);
        balance = mean_of(m.balancedness);
        moves = 0;
        for (int32_t l = 0; l < LAYERS; l++) {
            moves += m.moves[l];
            if (m.balancedness[l] < least) least = m.balancedness[l];
        }
        hd_eplb_map_close(&m);
    }
    print_row("repair, drift 10 %, 32 ranks",
              (now_us(CLOCK_THREAD_CPUTIME_ID) - begin) / repeats / 1e3, "ms", 2);
    printf("    balancedness %.4f (lowest %.4f), %.1f experts move per layer (limit 15)\n",
           balance, least, moves / LAYERS);
    hd_eplb_map_close(&old);
}

/* ---- beside a server's steps ---- */

/* Moves an expert of V4-Flash, 13.4 MB at 25 GB/s. */
#define STAGE_US 540.0
#define STEP_US  30000.0

enum { STEPS = 12000, LOOK = 64, LOOK_ROWS = 20 /* of an expert in a step, about */ };

/* Time of the planner, measured, and of moves, assumed, in this step. */
static double step_beside(hd_rebalance *m, int64_t step, int64_t *rows, const shares *s) {
    const hd_rebalance_now now = {.steps = step,
                                  .rows = step * EXPERTS * LOOK_ROWS,
                                  .ns = step * (int64_t)(STEP_US * 1e3),
                                  .step_us = STEP_US};
    double all = 0;
    hd_err err = {0};
    for (;;) {
        const hd_rebalance_action a = hd_rebalance_next(m, &now);
        double us = a.what == HD_REBALANCE_TO_STAGE ? STAGE_US : 0;
        if (a.what == HD_REBALANCE_NOTHING) return all;
        const double begin = now_us(CLOCK_THREAD_CPUTIME_ID);
        if (a.what == HD_REBALANCE_READ) {
            for (int32_t i = 0; i < LAYERS * EXPERTS; i++) {
                const double n = s->of[i / EXPERTS][i % EXPERTS] * EXPERTS * LOOK * LOOK_ROWS;
                rows[i] += (int64_t)(n * exp(0.1 * draw_normal()));
            }
            hd_rebalance_rows(m, rows);
        } else if (a.what == HD_REBALANCE_TO_PLAN) {
            if (hd_rebalance_plan(m, &err) != HD_OK) fail(&err);
            us = now_us(CLOCK_THREAD_CPUTIME_ID) - begin;
            hd_rebalance_spend(m, us);
        } else {
            hd_rebalance_done(m, true, us);
        }
        all += us;
    }
}

/* Loads change in the middle. */
static void time_beside_steps(void) {
    static shares s;
    static int64_t rows[LAYERS * EXPERTS];
    const hd_rebalance_options o = {.layers = LAYERS,
                                    .experts = EXPERTS,
                                    .slots = SLOTS,
                                    .ranks = 32,
                                    .look = LOOK,
                                    .horizon = 20000,
                                    .expert_bytes = 13.4e6,
                                    .max_bytes_per_s = 1e9,
                                    .share = 0.05};
    hd_rebalance *m;
    hd_err err = {0};
    double sum = 0, most = 0;
    if (hd_rebalance_open(&m, &o, &err) != HD_OK) fail(&err);
    for (int64_t step = 1; step <= STEPS; step++) {
        if (step % (STEPS / 2) == 1) draw_shares(&s, 1);
        const double us = step_beside(m, step, rows, &s);
        sum += us;
        most = us > most ? us : most;
    }
    const hd_rebalance_stats t = hd_rebalance_read_stats(m);
    print_row("beside a step of 30 ms, longest", most / 1e3, "ms", STEP_US * 0.2 / 1e3);
    print_row("beside a step of 30 ms, mean", sum / STEPS / 1e3, "ms", STEP_US * 0.05 / 1e3);
    printf("    %lld looks, %lld plans, %lld experts moved, balancedness %.4f\n",
           (long long)t.looks, (long long)t.plans, (long long)t.moves, t.balancedness);
    hd_rebalance_close(m);
}

/* ---- the next batch ---- */

typedef struct judge {
    double published, hadal, flow, bound;
    double split_us, split_most_us;
} judge;

static double judge_even(const hd_eplb_map *m, int32_t l, const int32_t *rows) {
    const int32_t *slots = m->slot_expert + l * SLOTS;
    int64_t total = 0, most = 0, seen[EXPERTS] = {0};
    for (int32_t r = 0; r < m->ranks; r++) {
        int64_t sum = 0;
        for (int32_t s = m->rank_slot0[r]; s < m->rank_slot0[r + 1]; s++) {
            const int32_t e = slots[s], n = m->n_copies[l * EXPERTS + e];
            sum += rows[e] / n + (seen[e]++ < rows[e] % n); /* in turn */
        }
        total += sum;
        if (sum > most) most = sum;
    }
    return (double)total / m->ranks / (double)most;
}

static double judge_split(hd_eplb_splitter *s, const int32_t *rows, int32_t ranks, judge *j) {
    int32_t out[SLOTS];
    int64_t total = 0;
    for (int32_t e = 0; e < EXPERTS; e++) total += rows[e];
    const double begin = now_us(CLOCK_THREAD_CPUTIME_ID);
    int64_t most = 0;
    for (int32_t i = 0; i < SPLITS; i++) most = hd_eplb_split(s, rows, out, NULL);
    const double us = (now_us(CLOCK_THREAD_CPUTIME_ID) - begin) / SPLITS;
    j->split_us += us;
    if (us > j->split_most_us) j->split_most_us = us;
    return (double)total / ranks / (double)most;
}

static judge judge_all(int32_t ranks, int64_t rank_rows, double jitter) {
    static shares s;
    static double loads[LAYERS * EXPERTS];
    draw_shares(&s, jitter > 0 ? 0.8 : 1);
    record(loads, &s);
    hd_eplb_map published = plan(loads, ranks, HD_EPLB_PUBLISHED, NULL);
    hd_eplb_map hadal = plan(loads, ranks, HD_EPLB_HADAL, NULL);
    hd_eplb_map flow = plan(loads, ranks, HD_EPLB_FLOW, NULL);
    judge j = {.bound = mean_of(flow.bound)};
    for (int32_t l = 0; l < LAYERS; l++) {
        hd_eplb_splitter *split;
        hd_err err = {0};
        if (hd_eplb_splitter_open(&split, flow.slot_expert + l * SLOTS, flow.rank_slot0,
                                  EXPERTS, ranks, &err) != HD_OK) {
            fail(&err);
        }
        for (int32_t b = 0; b < BATCHES; b++) {
            int32_t rows[EXPERTS];
            draw_batch(rows, s.of[l], jitter, rank_rows * ranks);
            j.published += judge_even(&published, l, rows);
            j.hadal += judge_even(&hadal, l, rows);
            j.flow += judge_split(split, rows, ranks, &j);
        }
        hd_eplb_splitter_close(split);
    }
    const double n = LAYERS * BATCHES;
    j.published /= n, j.hadal /= n, j.flow /= n, j.split_us /= n;
    hd_eplb_map_close(&published);
    hd_eplb_map_close(&hadal);
    hd_eplb_map_close(&flow);
    return j;
}

static void judge_batches(void) {
    static const struct {
        int32_t ranks;
        int64_t rows;
        double jitter, limit_us;
    } cases[] = {
        {32, 64,   0,   5 },
        {32, 1024, 0,   5 },
        {32, 8192, 0,   5 },
        {32, 1024, 0.3, 5 },
        {72, 1024, 0,   20},
        {72, 1024, 0.3, 20},
    };
    printf("\nnext batch, even split     published  hadal   flow split  bound   split us "
           "(longest, "
           "limit)\n");
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        const judge j = judge_all(cases[i].ranks, cases[i].rows, cases[i].jitter);
        printf(
            "%2d ranks, %4lld rows, %3.0f %%   %.3f      %.3f   %.3f       %.3f   %.2f (%.1f, "
            "%.0f)\n",
            cases[i].ranks, (long long)cases[i].rows, cases[i].jitter * 100, j.published,
            j.hadal, j.flow, j.bound, j.split_us, j.split_most_us, cases[i].limit_us);
    }
}

int main(int argc, char **argv) {
    const long repeats = argc > 1 ? strtol(argv[1], NULL, 10) : 20;
    if (repeats < 1 || repeats > 100000) {
        fprintf(stderr, "usage: bench_eplb [REPEATS]\n");
        return 2;
    }
    printf("%d layers, %d experts, %d slots, one core, mean of %ld\n", LAYERS, EXPERTS, SLOTS,
           repeats);
    printf("%-34s %13s %13s %6s\n", "", "ours", "limit", "ratio");
    time_plans((int32_t)repeats);
    time_beside_steps();
    judge_batches();
    return 0;
}
