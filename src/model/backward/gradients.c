/* gradients.c - memory of the parameters' gradients. */
#include "model/gradients.h"

#include <stdlib.h>

#include "weights/summary.h"

struct hd_gradients {
    const hd_weights *w;
    hd_device *device;
    float *all;
    int64_t n;
    int32_t n_layers; /* MTP layers and the global one included */
    int64_t *first;   /* [n_layers * HD_N_ROLES] place in `all`, or -1 */
    struct {
        int64_t first, n; /* place in `all`; n 0: none */
        int32_t cols;
    } drafts[3]; /* of shared[] */
};

static const hd_role shared[] = {HD_EMBED, HD_HEAD, HD_FINAL_NORM};

bool hd_gradients_exist(const hd_tensor_decl *decl) {
    return hd_param_group_of(decl->role) != HD_PARAM_GROUP_INDEXER &&
           decl->role != HD_ROUTER_BIAS && decl->role != HD_ROUTER_HASH;
}

static int64_t *place_of(const hd_gradients *g, int32_t layer, hd_role role) {
    const int32_t at = layer == HD_GLOBAL ? g->n_layers - 1 : layer;
    return &g->first[(int64_t)at * HD_N_ROLES + role];
}

/* Where the gradient of a tensor begins, or of what it stands for; -1: it is not trained. */
static int64_t first_of(const hd_gradients *g, int32_t layer, hd_role role) {
    int64_t first = *place_of(g, layer, role);
    if (first < 0 && layer != HD_GLOBAL && (role == HD_EMBED || role == HD_HEAD)) {
        first = *place_of(g, HD_GLOBAL, role);
    }
    if (first < 0 && role == HD_HEAD) {
        const hd_weight *head = hd_weights_matrix(g->w, HD_GLOBAL, HD_HEAD);
        if (head == hd_weights_matrix(g->w, HD_GLOBAL, HD_EMBED)) {
            first = *place_of(g, HD_GLOBAL, HD_EMBED);
        }
    }
    return first;
}

/* The experts of a layer lie together, by role. Duplicates share the gradient of what they stand
 * for, whether or not the file has them. */
static void place_tensors(hd_gradients *g, hd_trains_fn *trains, void *ctx) {
    const hd_schema *schema = hd_weights_schema(g->w);
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        if (d->duplicate || hd_weights_missing(g->w, i)) continue;
        int64_t *first = place_of(g, d->layer, d->role);
        if (*first >= 0 || !(trains ? trains(ctx, d) : hd_gradients_exist(d))) continue;
        const hd_expert_table *experts =
            d->expert < 0 ? NULL : hd_weights_experts(g->w, d->layer, d->role);
        *first = g->n;
        g->n += (int64_t)d->rows * d->cols * (experts ? experts->n : 1);
    }
}

/* The MTP layer's parts of what it shares, if it is trained. */
static void place_drafts(hd_gradients *g) {
    const hd_schema *schema = hd_weights_schema(g->w);
    bool drafts = false;
    for (int32_t l = 0; l + 1 < g->n_layers; l++) {
        drafts = drafts || *place_of(g, l, HD_MTP_EMBED_NORM) >= 0;
    }
    for (int32_t i = 0; drafts && i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        for (size_t k = 0; k < HD_LEN(shared) && d->layer == HD_GLOBAL; k++) {
            if (d->role != shared[k] || first_of(g, HD_GLOBAL, d->role) < 0) continue;
            g->drafts[k].first = g->n;
            g->drafts[k].n = (int64_t)d->rows * d->cols;
            g->drafts[k].cols = d->cols;
            g->n += g->drafts[k].n;
        }
    }
}

hd_status hd_gradients_open(hd_gradients **out, const hd_weights *w, hd_device *d,
                            hd_trains_fn *trains, void *ctx, hd_err *err) {
    const hd_schema *schema = hd_weights_schema(w);
    *out = NULL;
    hd_gradients *g = calloc(1, sizeof *g);
    if (!g) return HD_FAIL(err, HD_ENOMEM, "no memory for gradients");
    g->w = w;
    g->device = d;
    g->n_layers = 1;
    for (int32_t i = 0; i < schema->n; i++) {
        if (schema->decls[i].layer + 2 > g->n_layers) g->n_layers = schema->decls[i].layer + 2;
    }
    const size_t places = (size_t)g->n_layers * HD_N_ROLES;
    g->first = calloc(places, sizeof *g->first);
    if (!g->first) {
        hd_gradients_close(g);
        return HD_FAIL(err, HD_ENOMEM, "no memory for gradients");
    }
    for (size_t i = 0; i < places; i++) g->first[i] = -1;
    place_tensors(g, trains, ctx);
    place_drafts(g);
    void *all;
    const hd_status st =
        hd_device_alloc(d, &all, (size_t)g->n * sizeof *g->all, "gradients", err);
    if (st != HD_OK) {
        hd_gradients_close(g);
        return st;
    }
    g->all = all;
    *out = g;
    return HD_OK;
}

void hd_gradients_close(hd_gradients *g) {
    if (!g) return;
    hd_device_release(g->device, g->all);
    free(g->first);
    free(g);
}

float *hd_gradients_at(const hd_gradients *g, int32_t layer, hd_role role) {
    const int64_t first = first_of(g, layer, role);
    return first < 0 ? NULL : g->all + first;
}

float *hd_gradients_of_drafts(const hd_gradients *g, hd_role role) {
    for (size_t k = 0; k < HD_LEN(shared); k++) {
        if (shared[k] == role && g->drafts[k].n) return g->all + g->drafts[k].first;
    }
    return NULL;
}

void hd_gradients_join_drafts(hd_gradients *g, const hd_ops *ops, hd_stream *s) {
    for (size_t k = 0; k < HD_LEN(shared); k++) {
        float *part = hd_gradients_of_drafts(g, shared[k]);
        const int32_t cols = g->drafts[k].cols;
        if (!part) continue;
        ops->add(s, &(hd_add_args){.x = hd_f32(hd_gradients_at(g, HD_GLOBAL, shared[k])),
                                   .y = hd_f32(part),
                                   .rows = (int32_t)(g->drafts[k].n / cols),
                                   .cols = cols,
                                   .repeat = 1});
        hd_stream_clear(s, part, (size_t)g->drafts[k].n * sizeof *part);
    }
}

float *hd_gradients_all(const hd_gradients *g, int64_t *n) {
    *n = g->n;
    return g->all;
}
