/* routing.c - synthetic routing: draws the popularity of experts, and the experts of tokens. */
#include "weights/routing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/philox.h"
#include "weights/dummy_internal.h"

enum {
    DRAW_ORDER = 0x11,
    DRAW_CHOICE,
    DRAW_ROWS, /* high counter words of the Philox draws */
    SKEW_GROUPS = 8,
    BISECTIONS = 40
};

static const double balance = 0.6, most_skew = 4.0, keep = 0.3;

static uint64_t seed_of(int32_t layer) {
    return 1234 + (uint64_t)layer;
}

/* ---- popularity ---- */

/* place[e]: rank of expert e in the order of popularity, a random permutation. */
static void draw_order(double *place, int32_t n, int32_t layer) {
    for (int32_t i = 0; i < n; i++) place[i] = i + 1;
    for (int32_t i = n - 1; i > 0; i--) {
        const hd_philox draw = hd_philox_at(seed_of(layer), DRAW_ORDER, (uint64_t)i);
        const int32_t j = (int32_t)(draw.v[0] % (uint32_t)(i + 1));
        const double other = place[i];
        place[i] = place[j];
        place[j] = other;
    }
}

/* Returns the mean load of the groups over the largest, if popularity falls with this power. */
static double balance_at(const double *place, int32_t n, int32_t groups, double power) {
    double all = 0, most = 0;
    for (int32_t g = 0; g < groups; g++) {
        const int32_t first = (int32_t)((int64_t)g * n / groups);
        const int32_t end = (int32_t)((int64_t)(g + 1) * n / groups);
        double sum = 0;
        for (int32_t e = first; e < end; e++) sum += pow(place[e], -power);
        all += sum;
        most = sum > most ? sum : most;
    }
    return all / groups / most;
}

void hd_routing_fractions(double *fraction, int32_t n, int32_t groups, hd_routing routing,
                          int32_t layer) {
    double low = 0, high = most_skew, sum = 0;
    if (routing != HD_ROUTING_SKEWED) {
        for (int32_t e = 0; e < n; e++) fraction[e] = 1.0 / n;
        return;
    }
    draw_order(fraction, n, layer);
    for (int i = 0; i < BISECTIONS; i++) {
        const double middle = (low + high) / 2;
        if (balance_at(fraction, n, hd_min_i32(groups, n), middle) > balance) {
            low = middle;
        } else {
            high = middle;
        }
    }
    for (int32_t e = 0; e < n; e++) sum += fraction[e] = pow(fraction[e], -low);
    for (int32_t e = 0; e < n; e++) fraction[e] /= sum;
}

/* Returns the first index whose prefix sum exceeds u. */
static int32_t find(const double *upto, int32_t n, double u) {
    int32_t low = 0, high = n - 1;
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (upto[middle] > u) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* Draws binomials one after the other: the part of expert e of what those before it left. It
 * uses their normal approximation, clamped to what is possible, as exact draws of millions
 * would take long. */
void hd_routing_draw(int32_t *rows, const double *fraction, int32_t n, int64_t total,
                     int32_t layer) {
    const double two_pi = 6.283185307179586;
    double left = 1;
    for (int32_t e = 0; e < n; e++) {
        const hd_philox draw = hd_philox_at(seed_of(layer), DRAW_ROWS, (uint64_t)e);
        const double p = e + 1 < n && fraction[e] < left ? fraction[e] / left : 1;
        const double radius = sqrt(-2 * log((double)hd_philox_unit(draw.v[0])));
        const double normal = radius * cos(two_pi * (double)hd_philox_unit(draw.v[1]));
        const double want = (double)total * p + normal * sqrt((double)total * p * (1 - p));
        const int64_t got = want < 0 ? 0 : llround(want);
        rows[e] = (int32_t)(got < total ? got : total);
        total -= rows[e];
        left -= fraction[e];
    }
}

/* ---- experts of tokens ---- */

typedef struct chooser {
    const double *upto; /* prefix sums of the fractions */
    int32_t n, top_k;
    uint64_t seed;
} chooser;

static bool among(const int32_t *list, int32_t n, int32_t id) {
    for (int32_t i = 0; i < n; i++) {
        if (list[i] == id) return true;
    }
    return false;
}

/* before: experts of the previous token, or NULL. */
static void choose(const chooser *c, int32_t token, const int32_t *before, int32_t *out) {
    uint64_t at = (uint64_t)token << 16;
    for (int32_t k = 0; k < c->top_k; at++) {
        const hd_philox draw = hd_philox_at(c->seed, DRAW_CHOICE, at);
        const bool kept = before && (double)hd_philox_unit(draw.v[1]) < keep;
        const int32_t id =
            kept ? before[k] : find(c->upto, c->n, (double)hd_philox_unit(draw.v[0]));
        if (!among(out, k, id)) out[k++] = id;
    }
}

hd_status weights_make_routing(int32_t **out, const hd_model_spec *spec, hd_routing routing,
                               int32_t layer, hd_err *err) {
    const hd_router_rule rule = hd_layer_route(spec, layer);
    const int32_t n = rule.n_experts, k = rule.top_k;
    double *fraction = calloc((size_t)n, sizeof *fraction);
    *out = malloc((size_t)spec->vocab * (size_t)k * sizeof **out);
    if (!fraction || !*out) {
        free(fraction);
        free(*out);
        *out = NULL;
        return HD_FAIL(err, HD_ENOMEM, "no memory for a table of experts by token");
    }
    hd_routing_fractions(fraction, n, SKEW_GROUPS, routing, layer);
    for (int32_t e = 1; e < n; e++) fraction[e] += fraction[e - 1];
    const chooser c = {fraction, n, k, seed_of(layer)};
    for (int32_t t = 0; t < spec->vocab; t++) {
        int32_t *row = *out + (int64_t)t * k;
        choose(&c, t, routing == HD_ROUTING_STICKY && t > 0 ? row - k : NULL, row);
    }
    free(fraction);
    return HD_OK;
}
