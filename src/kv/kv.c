/* kv.c - lays out every layer's pools in one block of device memory. */
#include "kv/kv.h"

#include <stdlib.h>

#include "base/arena.h"
#include "base/checked.h"

enum { MIN_PAGE_TOKENS = 64 };

typedef struct layer_kv {
    hd_act *pool[HD_N_POOLS];
    int32_t width[HD_N_POOLS];
    int32_t page_entries[HD_N_POOLS];
    float *state[2]; /* [0] of the attention's compressor, [1] of the indexer's */
    int32_t state_width[2];
    int32_t ring;
} layer_kv;

struct hd_kv {
    const hd_model_spec *spec;
    hd_device *device;
    hd_kv_options options;
    int32_t n_layers, page_tokens, slot_pages;
    void *block;
    size_t bytes;
    layer_kv layers[];
};

static int32_t gcd(int32_t a, int32_t b) {
    while (b) {
        int32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* A multiple of both compressors' state rings, so that rings and blocks divide pages. */
static int32_t choose_page_tokens(const hd_model_spec *spec) {
    int32_t csa = spec->csa_ratio ? 2 * spec->csa_ratio : 1;
    int32_t hca = spec->hca_ratio ? spec->hca_ratio : 1;
    int32_t step = csa / gcd(csa, hca) * hca;
    return (int32_t)hd_ceil_div(MIN_PAGE_TOKENS, step) * step;
}

static void describe_layer(layer_kv *l, const hd_model_spec *spec, int32_t layer,
                           int32_t page_tokens) {
    const hd_layer_spec *kind = &spec->layers[layer];
    switch (kind->attention) {
    case HD_ATTN_MLA_SPARSE:
        l->width[HD_POOL_INDEX] = spec->index_dim;
        l->page_entries[HD_POOL_INDEX] = page_tokens;
        l->width[HD_POOL_LATENT] = spec->kv_rank + spec->rope_dim;
        l->page_entries[HD_POOL_LATENT] = page_tokens;
        return;
    case HD_ATTN_MLA:
        l->width[HD_POOL_LATENT] = spec->kv_rank + spec->rope_dim;
        l->page_entries[HD_POOL_LATENT] = page_tokens;
        return;
    case HD_ATTN_CSA:
        l->width[HD_POOL_INDEX] = spec->index_dim;
        l->page_entries[HD_POOL_INDEX] = page_tokens / kind->compress_ratio;
        l->state_width[1] = 2 * 2 * spec->index_dim;
        l->ring = 2 * kind->compress_ratio;
        l->state_width[0] = 2 * 2 * spec->head_dim;
        break;
    case HD_ATTN_HCA:
        l->ring = kind->compress_ratio;
        l->state_width[0] = 2 * spec->head_dim;
        break;
    case HD_ATTN_WINDOW:
        break;
    }
    l->width[HD_POOL_RECENT] = spec->head_dim;
    l->page_entries[HD_POOL_RECENT] = page_tokens;
    if (kind->compress_ratio) {
        l->width[HD_POOL_COMPRESSED] = spec->head_dim;
        l->page_entries[HD_POOL_COMPRESSED] = page_tokens / kind->compress_ratio;
    }
}

static void place(hd_kv *kv, hd_arena *a) {
    const size_t n_pages = (size_t)kv->options.n_slots * (size_t)kv->slot_pages;
    for (int32_t l = 0; l < kv->n_layers; l++) {
        layer_kv *layer = &kv->layers[l];
        for (int32_t p = 0; p < HD_N_POOLS; p++) {
            size_t bytes = n_pages * (size_t)layer->page_entries[p] * (size_t)layer->width[p] *
                           (size_t)kv->options.act_bytes;
            layer->pool[p] = bytes ? hd_arena_take(a, bytes, 256) : NULL;
        }
        for (int32_t i = 0; i < 2; i++) {
            size_t bytes = n_pages * (size_t)layer->ring * (size_t)layer->state_width[i] * 4;
            layer->state[i] = bytes ? hd_arena_take(a, bytes, 256) : NULL;
        }
    }
}

hd_status hd_kv_open(hd_kv **out, const hd_model_spec *spec, int32_t n_layers, hd_device *d,
                     const hd_kv_options *options, hd_err *err) {
    *out = NULL;
    hd_kv *kv = calloc(1, sizeof *kv + (size_t)n_layers * sizeof kv->layers[0]);
    if (!kv) return HD_FAIL(err, HD_ENOMEM, "no memory for %d layers of kv", n_layers);
    kv->spec = spec;
    kv->device = d;
    kv->options = *options;
    kv->n_layers = n_layers;
    kv->page_tokens = choose_page_tokens(spec);
    kv->slot_pages = (int32_t)hd_ceil_div(options->slot_tokens, kv->page_tokens);
    for (int32_t l = 0; l < n_layers; l++) {
        describe_layer(&kv->layers[l], spec, l, kv->page_tokens);
    }
    hd_arena a = hd_arena_measure();
    place(kv, &a);
    kv->bytes = a.peak;
    hd_status st = hd_device_alloc(d, &kv->block, a.peak, "kv pools", err);
    if (st != HD_OK) {
        hd_kv_close(kv);
        return st;
    }
    a = hd_arena_over(kv->block, a.peak);
    place(kv, &a);
    *out = kv;
    return HD_OK;
}

void hd_kv_close(hd_kv *kv) {
    if (!kv) return;
    hd_device_release(kv->device, kv->block);
    free(kv);
}

size_t hd_kv_bytes(const hd_kv *kv) {
    return kv->bytes;
}

int32_t hd_kv_page_tokens(const hd_kv *kv) {
    return kv->page_tokens;
}

int32_t hd_kv_slot_pages(const hd_kv *kv) {
    return kv->slot_pages;
}

void hd_kv_slot_table(const hd_kv *kv, int32_t slot, hd_lifetime life, int32_t *pages) {
    (void)life; /* both lifetimes own their pages from the start */
    for (int32_t v = 0; v < kv->slot_pages; v++) pages[v] = slot * kv->slot_pages + v;
}

hd_paged hd_kv_pool(const hd_kv *kv, int32_t layer, hd_pool_kind pool,
                    const int32_t *const tables[HD_N_LIFETIMES], int32_t table_stride) {
    const layer_kv *l = &kv->layers[layer];
    const hd_lifetime life = pool == HD_POOL_RECENT ? HD_LIFE_WINDOW : HD_LIFE_ENTRIES;
    return (hd_paged){.data = l->pool[pool],
                      .table = tables[life],
                      .table_stride = table_stride,
                      .page_entries = l->page_entries[pool],
                      .width = l->width[pool]};
}

hd_ring hd_kv_state(const hd_kv *kv, int32_t layer, bool of_index,
                    const int32_t *const tables[HD_N_LIFETIMES], int32_t table_stride) {
    const layer_kv *l = &kv->layers[layer];
    return (hd_ring){.data = l->state[of_index],
                     .table = tables[HD_LIFE_WINDOW],
                     .table_stride = table_stride,
                     .page_tokens = kv->page_tokens,
                     .ring = l->ring,
                     .width = l->state_width[of_index]};
}
