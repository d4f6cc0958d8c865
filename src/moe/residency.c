/* residency.c - see residency.h. */
#include "moe/residency.h"

#include <stdlib.h>

struct hd_residency {
    int32_t n_layers, n_experts;
    int32_t *slot;       /* [n_layers, n_experts] */
    int64_t *seen, *use; /* the same: rows at the last look; those that count */
};

hd_status hd_residency_open(hd_residency **out, int32_t n_layers, int32_t n_experts,
                            hd_err *err) {
    const size_t n = (size_t)n_layers * (size_t)n_experts;
    hd_residency *r = calloc(1, sizeof *r);
    *out = NULL;
    if (!r) return HD_FAIL(err, HD_ENOMEM, "no memory for a list of %zu experts", n);
    r->n_layers = n_layers;
    r->n_experts = n_experts;
    r->slot = calloc(n + 1, sizeof *r->slot);
    r->seen = calloc(n + 1, sizeof *r->seen);
    r->use = calloc(n + 1, sizeof *r->use);
    if (!r->slot || !r->seen || !r->use) {
        hd_residency_close(r);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a list of %zu experts", n);
    }
    for (size_t i = 0; i < n; i++) r->slot[i] = HD_NOT_RESIDENT;
    *out = r;
    return HD_OK;
}

void hd_residency_close(hd_residency *r) {
    if (!r) return;
    free(r->slot);
    free(r->seen);
    free(r->use);
    free(r);
}

static int64_t at(const hd_residency *r, int32_t layer, int32_t expert) {
    return (int64_t)layer * r->n_experts + expert;
}

void hd_residency_set(hd_residency *r, int32_t layer, int32_t expert, int32_t slot) {
    r->slot[at(r, layer, expert)] = slot;
}

int32_t hd_residency_slot(const hd_residency *r, int32_t layer, int32_t expert) {
    return r->slot[at(r, layer, expert)];
}

void hd_residency_look(hd_residency *r, const int64_t *rows) {
    const int64_t n = (int64_t)r->n_layers * r->n_experts;
    for (int64_t i = 0; i < n; i++) {
        r->use[i] = r->use[i] / 2 + (rows[i] - r->seen[i]);
        r->seen[i] = rows[i];
    }
}

/* The most used expert that is not resident, and the least used that is; false: one is missing. */
static bool find_pair(const hd_residency *r, int32_t layer, hd_residency_swap *out) {
    *out = (hd_residency_swap){layer, -1, -1};
    for (int32_t e = 0; e < r->n_experts; e++) {
        const int64_t use = r->use[at(r, layer, e)];
        if (hd_residency_slot(r, layer, e) == HD_NOT_RESIDENT) {
            if (out->in < 0 || use > r->use[at(r, layer, out->in)]) out->in = e;
        } else if (out->out < 0 || use < r->use[at(r, layer, out->out)]) {
            out->out = e;
        }
    }
    return out->in >= 0 && out->out >= 0;
}

bool hd_residency_next(const hd_residency *r, hd_residency_swap *out) {
    int64_t best = 0;
    for (int32_t l = 0; l < r->n_layers; l++) {
        hd_residency_swap s;
        if (!find_pair(r, l, &s)) continue;
        const int64_t in = r->use[at(r, l, s.in)], had = r->use[at(r, l, s.out)];
        if (in <= had + had / 4 || in - had <= best) continue;
        best = in - had;
        *out = s;
    }
    return best > 0;
}
