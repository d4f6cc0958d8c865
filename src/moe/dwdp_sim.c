/* dwdp_sim.c - see dwdp_sim.h. Events: the next end of a layer or of a slice; between two of them all
 * rates are constant. */
#include "moe/dwdp_sim.h"

#include <math.h>
#include <stdbool.h>

#include "base/checked.h"
#include "base/random_fill.h"

enum { MAX_LAYERS = 10000, MAX_SLICES = 100000 };

static const double LEAST = 0.2; /* part of compute_us that every layer takes */
static const double DONE = 1e-9; /* microseconds that count as none */

typedef struct sim_rank {
    int32_t layer;   /* that is computed, or waits for its experts */
    double work;     /* microseconds of it that are left, without copies */
    int32_t fetched; /* layers whose experts are there */
    int32_t slice;   /* of the next one */
    double left;     /* of the slice, microseconds over a link of its own */
    double end, exposed, copied;
} sim_rank;

typedef struct sim {
    const hd_dwdp_sim_args *a;
    sim_rank ranks[HD_DWDP_SIM_MAX_RANKS];
    double now;
} sim;

hd_dwdp_sim_args hd_dwdp_sim_default(void) {
    return (hd_dwdp_sim_args){.ranks = 4,
                              .layers = 58,
                              .depth = 1,
                              .compute_us = 269.7 + 342.4 + 177.5 + 241.7,
                              .jitter = 0.1525,
                              .slowdown = 1.305,
                              .exchange_us = 126.7,
                              .fetch_us = 429,
                              .slices = 64,
                              .order = HD_DWDP_TOGETHER,
                              .seed = 1};
}

static hd_status check(const hd_dwdp_sim_args *a, hd_err *err) {
    const struct {
        const char *name;
        double v, least, most;
    } all[] = {
        {"ranks",    a->ranks,       2,    HD_DWDP_SIM_MAX_RANKS},
        {"layers",   a->layers,      1,    MAX_LAYERS           },
        {"depth",    a->depth,       1,    3                    },
        {"compute",  a->compute_us,  1e-3, 1e9                  },
        {"jitter",   a->jitter,      0,    1                    },
        {"slowdown", a->slowdown,    1,    100                  },
        {"exchange", a->exchange_us, 0,    1e9                  },
        {"fetch",    a->fetch_us,    1e-3, 1e9                  },
        {"slices",   a->slices,      1,    MAX_SLICES           },
    };
    for (size_t i = 0; i < HD_LEN(all); i++) {
        if (all[i].v >= all[i].least && all[i].v <= all[i].most) continue;
        return HD_FAIL(err, HD_EINVAL, "%s is %g; must be %g to %g", all[i].name, all[i].v,
                       all[i].least, all[i].most);
    }
    return HD_OK;
}

/* What a rank computes of a layer: normally distributed. */
static double work_of(const hd_dwdp_sim_args *a, int32_t rank, int32_t layer) {
    const double PI = 3.14159265358979323846, full = 18446744073709551616.0;
    const uint64_t at = 2 * ((uint64_t)layer * HD_DWDP_SIM_MAX_RANKS + (uint64_t)rank);
    const double u = ((double)hd_random_fill_at(a->seed, at) + 1) / (full + 2);
    const double v = (double)hd_random_fill_at(a->seed, at + 1) / full;
    const double part = 1 + a->jitter * sqrt(-2 * log(u)) * cos(2 * PI * v);
    return a->compute_us * (part > LEAST ? part : LEAST);
}

/* ---- copies ---- */

static bool copies(const sim *s, const sim_rank *r) {
    return r->fetched < s->a->layers && r->fetched <= r->layer + s->a->depth;
}

static int32_t peer_of(const sim *s, int32_t rank) {
    const int32_t others = hd_max_i32(s->a->ranks - 1, 1), slice = s->ranks[rank].slice;
    const int32_t block = slice / s->a->slices;
    switch (s->a->order) {
    case HD_DWDP_SAME:
        return block < rank ? block : block + 1;
    case HD_DWDP_STAGGERED:
        return (rank + 1 + block) % s->a->ranks;
    case HD_DWDP_SLICED:
    case HD_DWDP_TOGETHER:
    case HD_DWDP_N_COPY_KINDS:
        break;
    }
    return (rank + 1 + slice % others) % s->a->ranks;
}

static void count_readers(const sim *s, int32_t *readers) {
    for (int32_t i = 0; i < s->a->ranks; i++) {
        if (copies(s, &s->ranks[i])) readers[peer_of(s, i)]++;
    }
}

static double slice_us(const hd_dwdp_sim_args *a) {
    return a->fetch_us / (double)(a->slices * (a->ranks - 1));
}

/* ---- time ---- */

static bool computes(const sim *s, const sim_rank *r) {
    return r->layer < s->a->layers && r->fetched > r->layer;
}

/* The rates at which a rank computes and copies; 0: it does not. */
typedef struct rates {
    double compute, copy;
} rates;

static rates rates_of(const sim *s, int32_t rank, const int32_t *readers) {
    const sim_rank *r = &s->ranks[rank];
    const bool copying = copies(s, r), together = s->a->order == HD_DWDP_TOGETHER;
    return (rates){.compute = computes(s, r) ? (copying ? 1 / s->a->slowdown : 1) : 0,
                   .copy = !copying   ? 0
                           : together ? 1
                                      : 1.0 / readers[peer_of(s, rank)]};
}

static double sooner(double us, double left, double rate) {
    return rate > 0 && left / rate < us ? left / rate : us;
}

static void end_layer(sim *s, int32_t rank) {
    sim_rank *r = &s->ranks[rank];
    r->layer++;
    if (r->layer < s->a->layers) r->work = work_of(s->a, rank, r->layer);
    r->end = s->now;
}

static void end_slice(const sim *s, sim_rank *r) {
    r->left = slice_us(s->a);
    if (++r->slice < s->a->slices * (s->a->ranks - 1)) return;
    r->slice = 0;
    r->fetched++;
}

static void advance(sim *s, const rates *all, double us) {
    s->now += us;
    for (int32_t i = 0; i < s->a->ranks; i++) {
        sim_rank *r = &s->ranks[i];
        if (r->layer < s->a->layers && all[i].compute <= 0) r->exposed += us;
        if (all[i].copy > 0) r->copied += us;
        r->work -= us * all[i].compute;
        r->left -= us * all[i].copy;
        if (all[i].compute > 0 && r->work <= DONE) end_layer(s, i);
        if (all[i].copy > 0 && r->left <= DONE) end_slice(s, r);
    }
}

/* Returns false when all ranks are done. */
static bool run_event(sim *s) {
    int32_t readers[HD_DWDP_SIM_MAX_RANKS] = {0};
    rates all[HD_DWDP_SIM_MAX_RANKS];
    double us = (double)INFINITY;
    count_readers(s, readers);
    for (int32_t i = 0; i < s->a->ranks; i++) {
        all[i] = rates_of(s, i, readers);
        us = sooner(us, s->ranks[i].work, all[i].compute);
        us = sooner(us, s->ranks[i].left, all[i].copy);
    }
    if (isinf(us)) return false;
    advance(s, all, us);
    return true;
}

static void run_ep(hd_dwdp_sim_result *out, const hd_dwdp_sim_args *a) {
    double slowest = 0, mean = 0;
    for (int32_t l = 0; l < a->layers; l++) {
        double most = 0;
        for (int32_t r = 0; r < a->ranks; r++) {
            const double work = work_of(a, r, l);
            most = fmax(most, work);
            mean += work / (a->ranks * a->layers);
        }
        slowest += most / a->layers;
    }
    out->ep_us = slowest + a->exchange_us;
    out->ep_wait_us = slowest - mean;
}

hd_status hd_dwdp_simulate(hd_dwdp_sim_result *out, const hd_dwdp_sim_args *a, hd_err *err) {
    sim s = {.a = a};
    *out = (hd_dwdp_sim_result){0};
    HD_TRY(check(a, err));
    for (int32_t i = 0; i < a->ranks; i++) { /* the first layer was fetched behind the last */
        s.ranks[i] = (sim_rank){.work = work_of(a, i, 0), .fetched = 1, .left = slice_us(a)};
    }
    while (run_event(&s)) {
    }
    const double n = (double)a->ranks * a->layers;
    for (int32_t i = 0; i < a->ranks; i++) {
        out->dwdp_us += s.ranks[i].end / n;
        out->exposed_us += s.ranks[i].exposed / n;
        out->copy_us += s.ranks[i].copied / n;
    }
    run_ep(out, a);
    return HD_OK;
}
