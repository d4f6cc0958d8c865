/* test_eplb.c - properties of plans, repairs and splits on random cases, and exact answers of small
 * ones by brute force. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "check.h"

#include "base/philox.h"
#include "moe/eplb.h"

enum { MAX_EXPERTS = 96, MAX_SLOTS = 160, MAX_RANKS = 24 };

/* ---- random cases ---- */

typedef struct dice {
    uint64_t seed, at;
} dice;

static int32_t roll(dice *d, int32_t below) {
    return (int32_t)(hd_philox_at(d->seed, 1, d->at++).v[0] % (uint32_t)below);
}

static double roll_load(dice *d, int32_t kind) {
    const double u = (double)hd_philox_unit(hd_philox_at(d->seed, 2, d->at++).v[0]);
    switch (kind) {
    case 0:
        return floor(u * 5); /* ties and zeros */
    case 1:
        return floor(u * 1e6);
    case 2:
        return exp(4 * u);
    default:
        return pow(u, -1.5); /* a few hot ones */
    }
}

typedef struct example {
    double loads[MAX_EXPERTS];
    int32_t rank_slots[MAX_RANKS];
    bool gone[MAX_RANKS];
    hd_eplb_args args;
} example;

static void make_example(example *c, dice *d) {
    const int32_t nodes = 1 + roll(d, 3), ranks = nodes * (1 + roll(d, 5));
    const int32_t groups = nodes * (1 + roll(d, 2)), experts = groups * (1 + roll(d, 12));
    const int32_t width = (experts + ranks - 1) / ranks + roll(d, 3);
    const int32_t kind = roll(d, 4);
    *c = (example){
        .args = {.loads = c->loads,
                 .layers = 1,
                 .experts = experts,
                 .slots = width * ranks,
                 .ranks = ranks,
                 .nodes = nodes,
                 .groups = groups,
                 .max_moves = -1}
    };
    for (int32_t e = 0; e < experts; e++) c->loads[e] = roll_load(d, kind);
    if (roll(d, 10) == 0) memset(c->loads, 0, sizeof c->loads);
}

/* Slots that differ by rank, and ranks that are gone, as long as all experts fit. */
static void make_uneven(example *c, dice *d) {
    int32_t slots = 0;
    for (int32_t r = 0; r < c->args.ranks; r++) {
        c->rank_slots[r] = c->args.slots / c->args.ranks + roll(d, 4);
        slots += c->rank_slots[r];
    }
    c->args.slots = slots;
    c->args.rank_slots = c->rank_slots;
    const int32_t r = roll(d, c->args.ranks);
    if (slots - c->rank_slots[r] < c->args.experts) return;
    c->gone[r] = true;
    c->args.gone = c->gone;
}

static hd_eplb_map plan(const hd_eplb_args *a) {
    hd_eplb_map m;
    hd_err err = {0};
    if (hd_eplb_plan(&m, a, &err) != HD_OK) fail_msg("%s", err.msg);
    return m;
}

static hd_eplb_map plan_with(example *c, hd_eplb_algorithm algorithm) {
    c->args.algorithm = algorithm;
    return plan(&c->args);
}

/* ---- what every map is ---- */

/* The largest sum of a rank, with an even split; independent of the planner. */
static double largest(const example *c, const int32_t *slot_expert, const int32_t *slot0) {
    int32_t copies[MAX_EXPERTS] = {0};
    double most = 0;
    for (int32_t s = 0; s < c->args.slots; s++) {
        if (slot_expert[s] >= 0) copies[slot_expert[s]]++;
    }
    for (int32_t r = 0; r < c->args.ranks; r++) {
        double sum = 0;
        for (int32_t s = slot0[r]; s < slot0[r + 1]; s++) {
            const int32_t e = slot_expert[s];
            if (e >= 0) sum += c->loads[e] / copies[e];
        }
        if (sum > most) most = sum;
    }
    return most;
}

static int32_t duplicates(const hd_eplb_map *m) {
    int32_t n = 0;
    for (int32_t r = 0; r < m->ranks; r++) {
        for (int32_t s = m->rank_slot0[r]; s < m->rank_slot0[r + 1]; s++) {
            for (int32_t t = m->rank_slot0[r]; t < s; t++) {
                n += m->slot_expert[s] >= 0 && m->slot_expert[s] == m->slot_expert[t];
            }
        }
    }
    return n;
}

/* Every expert has a slot, slots of ranks that are there hold an expert, the tables are inverse. */
static void check_map(const hd_eplb_map *m, const hd_eplb_args *a) {
    int32_t listed = 0;
    for (int32_t e = 0; e < m->experts; e++) {
        const int32_t *slots = m->expert_slots + e * m->most_copies;
        assert_true(m->n_copies[e] >= 1);
        for (int32_t k = 0; k < m->most_copies; k++) {
            if (k >= m->n_copies[e]) {
                assert_int_equal(slots[k], -1);
                continue;
            }
            assert_in_range(slots[k], 0, m->slots - 1);
            assert_int_equal(m->slot_expert[slots[k]], e);
            for (int32_t j = 0; j < k; j++) assert_int_not_equal(slots[j], slots[k]);
            listed++;
        }
    }
    int32_t filled = 0;
    for (int32_t r = 0; r < m->ranks; r++) {
        for (int32_t s = m->rank_slot0[r]; s < m->rank_slot0[r + 1]; s++) {
            const bool gone = a->gone && a->gone[r];
            if (gone) assert_int_equal(m->slot_expert[s], -1);
            if (!gone && a->phase == HD_EPLB_ROWS && !a->previous) {
                assert_true(m->slot_expert[s] >= 0);
            }
            filled += m->slot_expert[s] >= 0;
        }
    }
    assert_int_equal(filled, listed);
    assert_true(m->balancedness[0] > 0 && m->balancedness[0] <= m->bound[0] * (1 + 1e-9));
    assert_true(m->bound[0] <= 1 + 1e-9);
}

static void assert_same(const hd_eplb_map *a, const hd_eplb_map *b) {
    assert_memory_equal(a->slot_expert, b->slot_expert, (size_t)a->slots * sizeof(int32_t));
    assert_int_equal(a->most_copies, b->most_copies);
    assert_memory_equal(a->expert_slots, b->expert_slots,
                        (size_t)(a->experts * a->most_copies) * sizeof(int32_t));
}

static void test_every_plan_is_whole(void **state) {
    (void)state;
    dice d = {.seed = 1};
    for (int32_t i = 0; i < 3000; i++) {
        example c;
        make_example(&c, &d);
        if (i % 3 == 0) make_uneven(&c, &d);
        for (int32_t algorithm = HD_EPLB_HADAL; algorithm <= HD_EPLB_FLOW; algorithm++) {
            if (algorithm == HD_EPLB_PUBLISHED && i % 3 == 0) continue;
            hd_eplb_map m = plan_with(&c, (hd_eplb_algorithm)algorithm);
            check_map(&m, &c.args);
            hd_eplb_map again = plan(&c.args);
            assert_same(&m, &again);
            hd_eplb_map_close(&again);
            hd_eplb_map_close(&m);
        }
    }
}

/* Plans of 600 cases, with repairs, as one number. */
static void *hash_plans(void *arg) {
    uint64_t *hash = arg;
    dice d = {.seed = 11};
    *hash = 14695981039346656037u;
    for (int32_t i = 0; i < 600; i++) {
        example c;
        make_example(&c, &d);
        if (i % 3 == 0) make_uneven(&c, &d);
        for (int32_t k = 0; k < 4; k++) {
            if (k == HD_EPLB_PUBLISHED && i % 3 == 0) continue;
            c.args.algorithm = k < 3 ? (hd_eplb_algorithm)k : HD_EPLB_HADAL;
            hd_eplb_map old = plan(&c.args), m = old;
            if (k == 3) {
                c.args.previous = old.slot_expert;
                for (int32_t e = 0; e < c.args.experts; e++) c.loads[e] *= 1 + e % 3;
                m = plan(&c.args);
                hd_eplb_map_close(&old);
                c.args.previous = NULL;
            }
            for (int32_t s = 0; s < m.slots; s++) {
                *hash = (*hash ^ (uint64_t)(m.slot_expert[s] + 2)) * 1099511628211u;
            }
            hd_eplb_map_close(&m);
        }
    }
    return NULL;
}

/* Every rank plans alone, so plans are the same in every thread, and in every build: the number is
 * part of the test. */
static void test_plans_are_the_same_everywhere(void **state) {
    (void)state;
    pthread_t thread[3];
    uint64_t hash[4];
    for (int i = 0; i < 3; i++) {
        assert_int_equal(pthread_create(&thread[i], NULL, hash_plans, &hash[i]), 0);
    }
    hash_plans(&hash[3]);
    for (int i = 0; i < 3; i++) pthread_join(thread[i], NULL);
    for (int i = 0; i < 4; i++) assert_true(hash[i] == hash[0]);
    if (hash[0] != 0xc39d21c8f5f0ee09u)
        fail_msg("the plans are 0x%llx", (unsigned long long)hash[0]);
}

static void test_phases_leave_slots_empty_rather_than_harmful(void **state) {
    (void)state;
    dice d = {.seed = 2};
    for (int32_t i = 0; i < 500; i++) {
        example c;
        make_example(&c, &d);
        c.args.step_rows = 1 + roll(&d, 100000);
        c.args.phase = i % 2 ? HD_EPLB_PREFILL : HD_EPLB_DECODE;
        hd_eplb_map m = plan_with(&c, HD_EPLB_HADAL);
        check_map(&m, &c.args);
        assert_true(m.no_copies == (c.args.phase == HD_EPLB_DECODE));
        if (m.no_copies) assert_int_equal(m.most_copies, 1);
        hd_eplb_map_close(&m);
    }
}

/* Rows of one tile are not worth a copy, those of ten are. */
static void test_prefill_counts_tiles(void **state) {
    (void)state;
    const double loads[] = {100, 1280, 100, 100};
    const hd_eplb_args a = {.loads = loads,
                            .layers = 1,
                            .experts = 4,
                            .slots = 8,
                            .ranks = 2,
                            .step_rows = 1580,
                            .phase = HD_EPLB_PREFILL};
    hd_eplb_map m = plan(&a);
    for (int32_t e = 0; e < 4; e++) assert_int_equal(m.n_copies[e], e == 1 ? 2 : 1);
    hd_eplb_map_close(&m);
}

static void test_hadal_is_never_worse_than_published(void **state) {
    (void)state;
    dice d = {.seed = 3};
    double ours = 0, theirs = 0;
    for (int32_t i = 0; i < 3000; i++) {
        example c;
        make_example(&c, &d);
        hd_eplb_map p = plan_with(&c, HD_EPLB_PUBLISHED), h = plan_with(&c, HD_EPLB_HADAL);
        const double worst = largest(&c, p.slot_expert, p.rank_slot0);
        const double most = largest(&c, h.slot_expert, h.rank_slot0);
        assert_true(most <= worst * (1 + 1e-12));
        if (duplicates(&h) && h.most_copies <= h.ranks) assert_true(most <= worst);
        ours += h.balancedness[0];
        theirs += p.balancedness[0];
        hd_eplb_map_close(&p);
        hd_eplb_map_close(&h);
    }
    assert_true(ours > theirs * 1.01);
}

/* Whether rank d of a holds what rank k of b holds, with experts numbered from the last. */
static bool same_rank(const hd_eplb_map *a, int32_t d, const hd_eplb_map *b, int32_t k) {
    int32_t n[MAX_EXPERTS] = {0};
    for (int32_t s = a->rank_slot0[d]; s < a->rank_slot0[d + 1]; s++) n[a->slot_expert[s]]++;
    for (int32_t s = b->rank_slot0[k]; s < b->rank_slot0[k + 1]; s++) {
        n[a->experts - 1 - b->slot_expert[s]]--;
    }
    for (int32_t e = 0; e < a->experts; e++) {
        if (n[e]) return false;
    }
    return true;
}

/* The same plan but for the numbers of experts and the order of ranks. */
static void assert_renumbered(const hd_eplb_map *a, const hd_eplb_map *b) {
    bool taken[MAX_RANKS] = {false};
    for (int32_t d = 0; d < a->ranks; d++) {
        int32_t k = 0;
        while (k < b->ranks && (taken[k] || !same_rank(a, d, b, k))) k++;
        if (k == b->ranks) fail_msg("no rank holds what rank %d held", d);
        taken[k] = true;
    }
}

static void test_scaled_and_renumbered_loads_give_the_same_plan(void **state) {
    (void)state;
    dice d = {.seed = 4};
    for (int32_t i = 0; i < 300; i++) {
        example c, other;
        make_example(&c, &d);
        c.args.nodes = c.args.groups = 1;
        const int32_t n = c.args.experts;
        for (int32_t e = 0; e < n; e++) c.loads[e] = exp2(20) + roll(&d, 1 << 20) * 64 + e;
        other = c;
        other.args.loads = other.loads;
        for (int32_t algorithm = HD_EPLB_HADAL; algorithm <= HD_EPLB_FLOW; algorithm++) {
            hd_eplb_map a = plan_with(&c, (hd_eplb_algorithm)algorithm);
            for (int32_t e = 0; e < n; e++) other.loads[e] = c.loads[e] * 1024;
            hd_eplb_map b = plan_with(&other, (hd_eplb_algorithm)algorithm);
            assert_same(&a, &b);
            assert_true(a.balancedness[0] == b.balancedness[0]);
            hd_eplb_map_close(&b);
            for (int32_t e = 0; e < n; e++) other.loads[e] = c.loads[n - 1 - e];
            b = plan_with(&other, (hd_eplb_algorithm)algorithm);
            assert_renumbered(&a, &b);
            assert_true(fabs(a.balancedness[0] - b.balancedness[0]) < 1e-12);
            assert_true(fabs(a.bound[0] - b.bound[0]) < 1e-12);
            hd_eplb_map_close(&a);
            hd_eplb_map_close(&b);
        }
    }
}

static void test_a_slot_more_never_lowers_the_bound(void **state) {
    (void)state;
    dice d = {.seed = 5};
    for (int32_t i = 0; i < 200; i++) {
        example c;
        make_example(&c, &d);
        double bound = 0;
        for (int32_t k = 0; k < 5; k++, c.args.slots++) {
            hd_eplb_map m = plan_with(&c, HD_EPLB_HADAL);
            assert_true(m.bound[0] >= bound * (1 - 1e-12));
            bound = m.bound[0];
            hd_eplb_map_close(&m);
        }
    }
}

/* ---- brute force ---- */

typedef struct search {
    const example *c;
    int32_t map[8], copies[8];
    int32_t slot0[4];
    int32_t twice;      /* slots whose expert is on the rank already */
    double best, apart; /* of all plans; of those with no expert twice on a rank */
} search;

static void try_all(search *s, int32_t slot) {
    const int32_t n = s->c->args.slots;
    if (slot == n) {
        for (int32_t e = 0; e < s->c->args.experts; e++) {
            if (s->copies[e] == 0) return;
        }
        const double most = largest(s->c, s->map, s->slot0);
        if (most < s->best) s->best = most;
        if (s->twice == 0 && most < s->apart) s->apart = most;
        return;
    }
    /* slots of a rank in the order of experts */
    const int32_t last = slot % (n / s->c->args.ranks) ? s->map[slot - 1] : -1;
    for (int32_t e = last < 0 ? 0 : last; e < s->c->args.experts; e++) {
        s->map[slot] = e;
        s->copies[e]++;
        s->twice += e == last;
        try_all(s, slot + 1);
        s->twice -= e == last;
        s->copies[e]--;
    }
}

/* The mean of ranks, or the least possible largest copy if a rank holds an expert once: by search
 * for that copy, unlike the planner. */
static double least_of_all(const example *c) {
    double sum = 0, low = 0, high = 0;
    for (int32_t e = 0; e < c->args.experts; e++) {
        sum += c->loads[e];
        high = fmax(high, c->loads[e]);
    }
    for (int32_t i = 0; i < 200; i++) {
        const double mid = (low + high) / 2;
        int32_t slots = 0;
        bool fits = mid > 0;
        for (int32_t e = 0; fits && e < c->args.experts; e++) {
            const double r = fmax(1, ceil(c->loads[e] / mid));
            fits = r <= c->args.ranks;
            slots += fits ? (int32_t)r : 0;
        }
        if (fits && slots <= c->args.slots) {
            high = mid;
        } else {
            low = mid;
        }
    }
    return fmax(sum / c->args.ranks, high);
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* With these copies: of the j * ranks + 1 largest ones some rank has j + 1. */
static double least_of_packing(const example *c, const hd_eplb_map *m) {
    const int32_t ranks = c->args.ranks, slots = c->args.slots, width = slots / ranks;
    double copy[MAX_SLOTS], least = 0;
    for (int32_t s = 0; s < slots; s++) {
        copy[s] = c->loads[m->slot_expert[s]] / m->n_copies[m->slot_expert[s]];
    }
    qsort(copy, (size_t)slots, sizeof *copy, by_value);
    for (int32_t j = 0; j < width; j++) {
        double sum = 0;
        for (int32_t k = 0; k <= j; k++) sum += copy[slots - 1 - j * ranks + k];
        for (int32_t k = 0; k < width - 1 - j; k++) sum += copy[k];
        least = fmax(least, sum);
    }
    return least;
}

/* The planner's cost is the least of all plans, and an expert is twice on a rank only where that
 * costs less. */
static void test_small_cases_against_brute_force(void **state) {
    (void)state;
    dice d = {.seed = 6};
    for (int32_t i = 0; i < (is_brief() ? 100 : 300); i++) {
        const int32_t ranks = 2 + roll(&d, 2), width = 2 + roll(&d, ranks == 2 ? 3 : 1);
        const int32_t slots = ranks * width, experts = width + roll(&d, slots - width + 1);
        example c = {
            .args = {.loads = c.loads,
                     .layers = 1,
                     .experts = experts,
                     .slots = slots,
                     .ranks = ranks,
                     .max_moves = -1}
        };
        for (int32_t e = 0; e < experts; e++) c.loads[e] = 1 + roll(&d, 50);
        search s = {.c = &c, .best = HUGE_VAL, .apart = HUGE_VAL};
        for (int32_t r = 0; r <= ranks; r++) s.slot0[r] = r * width;
        try_all(&s, 0);
        hd_eplb_map m = plan_with(&c, HD_EPLB_HADAL);
        const double most = largest(&c, m.slot_expert, m.rank_slot0);
        double sum = 0;
        for (int32_t e = 0; e < experts; e++) sum += c.loads[e];
        const double least = sum / ranks / m.bound[0];
        assert_true(least <= s.best * (1 + 1e-9)); /* the bound is one */
        assert_true(fabs(least - least_of_all(&c)) <= 1e-9 * least);
        assert_true(most >= least_of_packing(&c, &m) * (1 - 1e-12));
        assert_true(fabs(most - s.best) <= 1e-9 * s.best);
        if (duplicates(&m)) assert_true(s.apart > s.best * (1 + 1e-9));
        hd_eplb_map_close(&m);
    }
}

/* "No expert twice on a rank, unless it has more copies than there are ranks" and "the least cost of
 * all plans" exclude each other: here each plan without such a copy costs more. Where slots may
 * be empty it takes 9 slots on 3 ranks, 5 4 4 1: 14/3 against 19/4. A search over all plans with up
 * to 8 slots and small loads found no smaller case. */
static void test_a_copy_beside_another_can_be_best(void **state) {
    (void)state;
    static const struct {
        int32_t ranks, slots;
        double loads[3], best, apart;
    } rows[] = {
        {2, 4, {3, 2, 1}, 3, 3.5       },
        {3, 6, {5, 3, 1}, 3, 19.0 / 6.0},
    };
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        example c = {
            .args = {.loads = c.loads,
                     .layers = 1,
                     .experts = 3,
                     .slots = rows[i].slots,
                     .ranks = rows[i].ranks,
                     .max_moves = -1}
        };
        memcpy(c.loads, rows[i].loads, sizeof rows[i].loads);
        search s = {.c = &c, .best = HUGE_VAL, .apart = HUGE_VAL};
        for (int32_t r = 0; r <= rows[i].ranks; r++) s.slot0[r] = 2 * r;
        try_all(&s, 0);
        assert_true(fabs(s.best - rows[i].best) < 1e-12);
        assert_true(fabs(s.apart - rows[i].apart) < 1e-12);
        hd_eplb_map m = plan_with(&c, HD_EPLB_HADAL);
        assert_true(duplicates(&m) && m.n_copies[0] <= rows[i].ranks);
        assert_true(fabs(largest(&c, m.slot_expert, m.rank_slot0) - rows[i].best) < 1e-12);
        hd_eplb_map_close(&m);
    }
}

/* ---- repair ---- */

static void test_repair_keeps_its_promises(void **state) {
    (void)state;
    dice d = {.seed = 7};
    for (int32_t i = 0; i < 1500; i++) {
        example c;
        make_example(&c, &d);
        if (i % 4 == 0) make_uneven(&c, &d);
        hd_eplb_map old = plan_with(&c, HD_EPLB_HADAL);
        const double limit = c.args.target;
        c.args.previous = old.slot_expert;
        c.args.target = old.balancedness[0] / old.bound[0] * (1 - 1e-9);
        hd_eplb_map same = plan(&c.args);
        assert_int_equal(same.moves[0], 0);
        assert_memory_equal(same.slot_expert, old.slot_expert,
                            (size_t)old.slots * sizeof(int32_t));
        hd_eplb_map_close(&same);
        for (int32_t e = 0; e < c.args.experts; e++) c.loads[e] *= 0.5 + roll_load(&d, 0) / 4;
        c.args.target = limit;
        c.args.max_moves = roll(&d, 12);
        const double before = largest(&c, old.slot_expert, old.rank_slot0);
        hd_eplb_map m = plan(&c.args);
        check_map(&m, &c.args);
        assert_true(m.moves[0] <= c.args.max_moves);
        assert_true(largest(&c, m.slot_expert, m.rank_slot0) <= before * (1 + 1e-12));
        assert_int_equal(m.n_reached,
                         m.balancedness[0] >= HD_EPLB_TARGET * m.bound[0] * (1 - 1e-9));
        hd_eplb_map_close(&m);
        hd_eplb_map_close(&old);
    }
}

/* A rank goes and comes back: what it alone held is named, the rest stays, its slots fill again. */
static void test_a_rank_goes_and_returns(void **state) {
    (void)state;
    dice d = {.seed = 8};
    for (int32_t i = 0; i < 500; i++) {
        example c;
        make_example(&c, &d);
        const int32_t gone = roll(&d, c.args.ranks), width = c.args.slots / c.args.ranks;
        if (c.args.slots - width < c.args.experts) continue;
        hd_eplb_map old = plan_with(&c, HD_EPLB_HADAL);
        int32_t lost = 0;
        for (int32_t e = 0; e < c.args.experts; e++) {
            bool elsewhere = false;
            for (int32_t k = 0; k < old.n_copies[e]; k++) {
                elsewhere |= old.expert_slots[e * old.most_copies + k] / width != gone;
            }
            lost += !elsewhere;
        }
        c.gone[gone] = true;
        c.args.gone = c.gone;
        c.args.previous = old.slot_expert;
        c.args.max_moves = 0;
        hd_eplb_map m = plan(&c.args);
        check_map(&m, &c.args);
        assert_int_equal(m.lost[0], lost);
        assert_true(m.moves[0] >= lost);
        c.args.gone = NULL;
        c.args.previous = m.slot_expert;
        c.args.max_moves = -1;
        hd_eplb_map back = plan(&c.args);
        check_map(&back, &c.args);
        assert_int_equal(back.lost[0], 0);
        hd_eplb_map_close(&back);
        hd_eplb_map_close(&m);
        hd_eplb_map_close(&old);
    }
}

/* ---- split ---- */

static int64_t split(hd_eplb_splitter *s, const int32_t *rows, int32_t *out, bool *proof) {
    return hd_eplb_split(s, rows, out, proof);
}

static void test_split_vectors(void **state) {
    (void)state;
    const int32_t map[] = {0, 1, 6, 2, 3, 0, 4, 5, 2, 6, 7, 4}, slot0[] = {0, 3, 6, 9, 12};
    static const struct {
        int32_t rows[8];
        int64_t most;
    } cases[] = {
        {{40, 5, 20, 5, 10, 5, 10, 5}, 25},
        {{40, 5, 18, 7, 10, 5, 10, 5}, 26},
        {{70, 5, 5, 5, 5, 5, 3, 2},    40},
        {{10, 30, 10, 30, 5, 5, 5, 5}, 35},
        {{0},                          0 },
    };
    hd_eplb_splitter *s;
    assert_int_equal(hd_eplb_splitter_open(&s, map, slot0, 8, 4, NULL), HD_OK);
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        int32_t out[12];
        assert_int_equal(split(s, cases[i].rows, out, NULL), cases[i].most);
    }
    hd_eplb_splitter_close(s);
}

/* The sums are right, and the certificate proves that no split is better. */
static void check_split(const hd_eplb_map *m, const int32_t *rows, const int32_t *out,
                        int64_t most, const bool *proof) {
    int64_t sums[MAX_EXPERTS] = {0}, highest = 0, inside = 0, ranks = 0;
    for (int32_t r = 0; r < m->ranks; r++) {
        int64_t sum = 0;
        for (int32_t s = m->rank_slot0[r]; s < m->rank_slot0[r + 1]; s++) {
            assert_true(out[s] >= 0);
            if (m->slot_expert[s] < 0) {
                assert_int_equal(out[s], 0);
                continue;
            }
            sums[m->slot_expert[s]] += out[s];
            sum += out[s];
        }
        if (sum > highest) highest = sum;
        ranks += proof[r];
    }
    assert_int_equal(highest, most);
    for (int32_t e = 0; e < m->experts; e++) {
        assert_int_equal(sums[e], rows[e]);
        bool only = true;
        for (int32_t s = 0; s < m->slots; s++) {
            int32_t r = 0;
            while (s >= m->rank_slot0[r + 1]) r++;
            if (m->slot_expert[s] == e && !proof[r]) only = false;
        }
        if (only) inside += rows[e];
    }
    assert_int_equal((inside + ranks - 1) / ranks, most);
}

static void test_split_is_exact(void **state) {
    (void)state;
    dice d = {.seed = 9};
    for (int32_t i = 0; i < 1500; i++) {
        example c;
        make_example(&c, &d);
        if (i % 4 == 0) make_uneven(&c, &d);
        hd_eplb_map m = plan_with(&c, i % 2 || i % 4 == 0 ? HD_EPLB_FLOW : HD_EPLB_PUBLISHED);
        hd_eplb_splitter *s;
        assert_int_equal(
            hd_eplb_splitter_open(&s, m.slot_expert, m.rank_slot0, m.experts, m.ranks, NULL),
            HD_OK);
        for (int32_t k = 0; k < 4; k++) {
            int32_t rows[MAX_EXPERTS], out[MAX_SLOTS], again[MAX_SLOTS];
            bool proof[MAX_RANKS];
            const int32_t most = 1 + roll(&d, 1000);
            for (int32_t e = 0; e < m.experts; e++) rows[e] = roll(&d, most);
            const int64_t sum = split(s, rows, out, proof);
            check_split(&m, rows, out, sum, proof);
            assert_int_equal(split(s, rows, again, NULL), sum);
            assert_memory_equal(out, again, (size_t)m.slots * sizeof *out);
        }
        hd_eplb_splitter_close(s);
        hd_eplb_map_close(&m);
    }
}

static void test_split_says_that_an_expert_has_no_slot(void **state) {
    (void)state;
    const int32_t map[] = {0, -1, 2}, slot0[] = {0, 1, 3};
    int32_t out[3];
    hd_eplb_splitter *s;
    assert_int_equal(hd_eplb_splitter_open(&s, map, slot0, 3, 2, NULL), HD_OK);
    assert_int_equal(split(s, (int32_t[]){4, 0, 4}, out, NULL), 4);
    assert_int_equal(split(s, (int32_t[]){4, 1, 4}, out, NULL), -1);
    hd_eplb_splitter_close(s);
}

/* All ranks are one component where each has a spare slot. */
static void test_flow_connects_all_ranks(void **state) {
    (void)state;
    dice d = {.seed = 10};
    for (int32_t i = 0; i < 200; i++) {
        const int32_t ranks = 2 + roll(&d, 20), each = 2 + roll(&d, 3);
        example c = {
            .args = {.loads = c.loads,
                     .layers = 1,
                     .experts = ranks * each,
                     .slots = ranks * (each + 1),
                     .ranks = ranks}
        };
        for (int32_t e = 0; e < c.args.experts; e++) c.loads[e] = 900 + roll(&d, 200);
        hd_eplb_map m = plan_with(&c, HD_EPLB_FLOW);
        assert_true(m.balancedness[0] > 0.999);
        assert_int_equal(duplicates(&m), 0);
        hd_eplb_map_close(&m);
    }
}

int test_eplb(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_plan_is_whole),
        cmocka_unit_test(test_plans_are_the_same_everywhere),
        cmocka_unit_test(test_phases_leave_slots_empty_rather_than_harmful),
        cmocka_unit_test(test_prefill_counts_tiles),
        cmocka_unit_test(test_hadal_is_never_worse_than_published),
        cmocka_unit_test(test_scaled_and_renumbered_loads_give_the_same_plan),
        cmocka_unit_test(test_a_slot_more_never_lowers_the_bound),
        cmocka_unit_test(test_small_cases_against_brute_force),
        cmocka_unit_test(test_a_copy_beside_another_can_be_best),
        cmocka_unit_test(test_repair_keeps_its_promises),
        cmocka_unit_test(test_a_rank_goes_and_returns),
        cmocka_unit_test(test_split_vectors),
        cmocka_unit_test(test_split_is_exact),
        cmocka_unit_test(test_split_says_that_an_expert_has_no_slot),
        cmocka_unit_test(test_flow_connects_all_ranks),
    };
    return cmocka_run_group_tests_name("eplb", tests, NULL, NULL);
}
