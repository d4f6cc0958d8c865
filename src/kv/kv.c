/* kv.c - the memory layout of every layer's KV pools in one block, and page copies. */
#include "kv/kv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/terminal.h"
#include "kv/resident.h"

enum { MLA_PAGE_TOKENS = 64 };

/* after the pool kinds of kv.h */
enum { STATE_MAIN = HD_N_POOL_KINDS, STATE_INDEX, N_CONTENTS };

/* Each kind of page content: its KV group, its type, HD_NONE: that of the attention's entries; of how
 * many columns one has a scale, if it is stored as E4M3; the format of V4.1's own program. */
static const struct {
    hd_kv_group group;
    hd_dtype type;
    int32_t scaled;
    hd_group_format own;
} contents[N_CONTENTS] = {
    [HD_POOL_LATENT] = {.group = HD_KV_FULL,              .scaled = 128        },
    [HD_POOL_INDEX] = {.group = HD_KV_FULL,
                        .type = HD_F32,
                        .scaled = 128,
                        .own = {HD_E2M1, HD_E8M0, 32, 0}},
    [HD_POOL_COMPRESSED] = {.group = HD_KV_FULL,
                        .scaled = 64,
                        .own = {HD_E2M1, HD_E4M3, 16, 0}},
    [HD_POOL_SLIDING] = {.group = HD_KV_WINDOW,                     .scaled = 64,                        .own = {HD_E4M3, HD_E8M0, 32, 0}},
    [HD_POOL_TOKENS] = {.group = HD_KV_WINDOW,            .type = HD_I32},
    [STATE_MAIN] = {.group = HD_KV_WINDOW,                                .type = HD_F32                                },
    [STATE_INDEX] = {.group = HD_KV_WINDOW,                                .type = HD_F32                                },
};

/* One kind of page content of one layer: entries of a pool, or rows of a compressor's ring. */
typedef struct layer_pool {
    uint8_t *data;
    hd_dtype type;
    hd_group_format format;
    int32_t width;    /* elements */
    int32_t per_page; /* entries or ring rows of a page */
    size_t page_bytes;
} layer_pool;

typedef struct layer_kv {
    hd_dtype entry_type; /* of what is attended to */
    bool rounds;         /* to the model's own formats */
    int32_t rotated;     /* columns at the end of an entry */
    layer_pool pools[N_CONTENTS];
    hd_pool_kind selected; /* of hd_kv_selected_pool(): in the mirror, if there is one */
    hd_resident resident;
} layer_kv;

struct hd_kv {
    const hd_model_spec *spec;
    hd_device *device;
    hd_kv_options options;
    int32_t n_layers, page_tokens;
    void *block;                       /* pools on the device, and buffers */
    void *mirror;                      /* pools in host memory, and counts of their buffers */
    hd_resident_scratch scratch;       /* of buffers */
    int32_t *nowhere;                  /* [page_tokens] -1 */
    void *host[HD_N_KV_GROUPS];        /* [n_host, host_bytes] pages in host memory */
    size_t host_bytes[HD_N_KV_GROUPS]; /* of a page, with its choices */
    bool saving;                       /* a page may still be copied to host memory */
    hd_replay_store replay[HD_N_REPLAYS];
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

/* The layers after the last one that writes entries or reads tokens. */
static hd_kv_tail tail_of(const hd_model_spec *spec) {
    int32_t first = spec->n_layers;
    while (first > 0 && spec->layers[first - 1].attention != HD_ATTN_CSA2_FULL &&
           !hd_has_engram(spec, first - 1)) {
        first--;
    }
    if (first == 0 || spec->layers[first - 1].attention != HD_ATTN_CSA2_FULL) {
        return (hd_kv_tail){.n = 0};
    }
    return (hd_kv_tail){.first = first, .n = spec->n_layers - first, .step = spec->window - 1};
}

/* V4.1: pages of whole groups. A draft block attends to a whole window before it. */
static hd_kv_shape shape_of_v41(const hd_model_spec *spec) {
    const int32_t window = spec->window + (spec->drafter == HD_DRAFTER_DSPARK);
    const int32_t before = hd_max_i32(window, spec->engram.max_ngram) - 1;
    return (hd_kv_shape){.page_tokens = MLA_PAGE_TOKENS,
                         .lookback = hd_max_i32(before, 1),
                         .tail = tail_of(spec)};
}

int32_t hd_kv_tail_length(const hd_kv_shape *shape, int32_t i) {
    const int64_t pages = hd_ceil_div(shape->lookback, shape->page_tokens);
    return (int32_t)pages * shape->page_tokens + (shape->tail.n - 1 - i) * shape->tail.step;
}

int32_t hd_kv_longest_tail(const hd_kv_shape *shape) {
    return shape->tail.n && !shape->tail.rebuilds ? hd_kv_tail_length(shape, 0) : 0;
}

int32_t hd_kv_rebuild_length(const hd_kv_shape *shape) {
    return shape->tail.n && shape->tail.rebuilds ? hd_kv_tail_length(shape, 0) : 0;
}

bool hd_kv_is_needed(const hd_kv_shape *shape, int32_t i, const hd_kv_ends *ends, int32_t pos) {
    const int32_t length = hd_kv_tail_length(shape, i);
    if (shape->tail.rebuilds) return pos >= ends->rebuilt - length;
    if (ends->windows_from > 0) return pos >= ends->windows_from;
    const int32_t border = ends->outputs - ends->outputs % shape->page_tokens;
    return pos >= border - length || (pos < ends->branch && pos >= ends->branch - length);
}

/* V4 uses the smallest page that holds whole blocks of both compressors, so that a prefix
 * can be shared to within one block. Other families use a compromise between table size and
 * sharing. */
hd_kv_shape hd_kv_shape_of(const hd_model_spec *spec) {
    if (spec->family == HD_FAMILY_V41) return shape_of_v41(spec);
    if (spec->family != HD_FAMILY_V4) return (hd_kv_shape){.page_tokens = MLA_PAGE_TOKENS};
    int32_t csa = spec->csa_ratio ? 2 * spec->csa_ratio : 1;
    int32_t hca = spec->hca_ratio ? spec->hca_ratio : 1;
    int32_t page = csa / gcd(csa, hca) * hca;
    if (page == 1) page = MLA_PAGE_TOKENS; /* no compressor at all */
    /* a draft block attends to a whole window before it */
    const int32_t window = spec->window + (spec->drafter == HD_DRAFTER_DSPARK);
    int32_t lookback = hd_max_i32(window, hd_max_i32(csa, hca)) - 1;
    lookback = hd_max_i32(lookback, 1); /* 0 would mean that there are no such pages */
    /* the drafter, which needs whole outputs of the last layer, is as one layer more */
    const int32_t n = spec->n_layers + (spec->n_mtp > 0);
    return (hd_kv_shape){
        .page_tokens = page,
        .lookback = lookback,
        .tail = {.n = n, .step = hd_max_i32(spec->window - 1, 0), .rebuilds = true}
    };
}

/* Returns the smallest ring that divides the page and keeps `rows` before the newest
 * position, with space for drafts. A ring as long as the page never wraps inside it. */
static int32_t ring_rows(int32_t page_tokens, int32_t rows) {
    int32_t ring = hd_min_i32(rows, page_tokens);
    while (page_tokens % ring) ring++;
    return ring;
}

hd_status hd_kv_check_type(const hd_model_spec *spec, hd_dtype type, hd_err *err) {
    if (type != HD_E2M1) return HD_OK;
    if (spec->family != HD_FAMILY_V41) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "kv_cache_dtype fp4 is V4.1's own; %s has none",
                       hd_family_name(spec->family));
    }
    if (spec->head_dim % 2 == 0 && spec->index_dim % 2 == 0) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "kv_cache_dtype fp4: %d and %d columns do not fill whole bytes",
                   spec->head_dim, spec->index_dim);
}

hd_status hd_kv_check_heads(const hd_model_spec *spec, int32_t heads, hd_dtype type,
                            hd_err *err) {
    enum { FEW = 16 };
    const bool dense = spec->layers[0].attention == HD_ATTN_MLA;
    if (!hd_is_packed(type) || !dense || heads > FEW) return HD_OK;
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "kv_cache_dtype %s: a GPU reads MLA's entries in it with more than %d heads "
                   "of a rank; here it has %d",
                   hd_kv_type_name(type), FEW, heads);
}

/* Where entries are packed, keys of the indexer are, too. */
static void describe(layer_kv *l, int content, int32_t width, int32_t per_page) {
    const bool key = content == HD_POOL_INDEX;
    const hd_dtype fixed = contents[content].type, entry = l->entry_type;
    const bool packed = hd_is_packed(entry) && (!fixed || key);
    layer_pool p = {
        .type = fixed && !packed ? fixed : entry, .width = width, .per_page = per_page};
    if (packed && entry == HD_E2M1) {
        p.format = contents[content].own;
        p.type = p.format.code;
    } else if (packed) {
        p.format =
            (hd_group_format){HD_E4M3, HD_E8M0, contents[content].scaled, key ? 0 : l->rotated};
    } else if (l->rounds) {
        p.format = contents[content].own;
    }
    p.page_bytes = (size_t)per_page * hd_entry_bytes(p.type, width, p.format);
    l->pools[content] = p;
}

static void describe_layer(layer_kv *l, const hd_model_spec *spec, int32_t layer,
                           hd_dtype entry_type, int32_t max_drafts) {
    const hd_layer_spec *kind = &spec->layers[layer];
    const int32_t page = hd_kv_shape_of(spec).page_tokens, ratio = kind->compress_ratio;
    l->entry_type = entry_type ? entry_type : HD_F32;
    l->rotated = spec->rope_dim;
    l->selected = hd_kv_selected_pool(spec, layer);
    switch (kind->attention) {
    case HD_ATTN_MLA_SPARSE:
        describe(l, HD_POOL_INDEX, spec->index_dim, page);
        describe(l, HD_POOL_LATENT, spec->kv_rank + spec->rope_dim, page);
        return;
    case HD_ATTN_MLA:
        describe(l, HD_POOL_LATENT, spec->kv_rank + spec->rope_dim, page);
        return;
    case HD_ATTN_CSA: {
        const int32_t ring = ring_rows(page, 2 * ratio + max_drafts);
        describe(l, HD_POOL_INDEX, spec->index_dim, page / ratio);
        describe(l, STATE_MAIN, 2 * 2 * spec->head_dim, ring);
        describe(l, STATE_INDEX, 2 * 2 * spec->index_dim, ring);
        break;
    }
    case HD_ATTN_CSA2_FULL:
        describe(l, HD_POOL_INDEX, spec->index_dim, page / ratio);
        describe(l, HD_POOL_COMPRESSED, spec->head_dim, page / ratio);
        if (ratio > 1) {
            describe(l, STATE_MAIN, 2 * spec->head_dim, ring_rows(page, ratio + max_drafts));
        }
        break;
    case HD_ATTN_HCA:
        describe(l, STATE_MAIN, 2 * spec->head_dim, ring_rows(page, ratio + max_drafts));
        break;
    case HD_ATTN_CSA2_REINDEX:
    case HD_ATTN_CSA2_REUSE:
    case HD_ATTN_WINDOW:
        break;
    }
    describe(l, HD_POOL_SLIDING, spec->head_dim, page);
    if (hd_has_engram(spec, layer) && kind->engram == 0) describe(l, HD_POOL_TOKENS, 1, page);
    if (ratio && spec->family == HD_FAMILY_V4) {
        describe(l, HD_POOL_COMPRESSED, spec->head_dim, page / ratio);
    }
}

size_t hd_kv_page_bytes(const hd_model_spec *spec, int32_t n_layers, hd_kv_group group,
                        hd_dtype entry_type, int32_t max_drafts) {
    size_t bytes = 0;
    for (int32_t l = 0; l < n_layers; l++) {
        layer_kv layer = {0};
        describe_layer(&layer, spec, l, entry_type, max_drafts);
        for (int i = 0; i < N_CONTENTS; i++) {
            if (contents[i].group == group) bytes += layer.pools[i].page_bytes;
        }
    }
    return bytes;
}

size_t hd_kv_selected_bytes(const hd_model_spec *spec, int32_t n_layers, hd_dtype entry_type) {
    size_t bytes = 0;
    for (int32_t l = 0; l < n_layers; l++) {
        layer_kv layer = {0};
        describe_layer(&layer, spec, l, entry_type, 0);
        if (layer.selected < HD_N_POOL_KINDS) bytes += layer.pools[layer.selected].page_bytes;
    }
    return bytes;
}

static void place_buffer(layer_kv *l, hd_arena *a, const hd_resident_scratch *x, int32_t rows,
                         int32_t n_pages) {
    if (l->selected == HD_N_POOL_KINDS) return;
    const layer_pool *p = &l->pools[l->selected];
    l->resident.rows.type = p->type;
    hd_resident_place(&l->resident, a, x, p->page_bytes / (size_t)p->per_page, rows,
                      (int64_t)n_pages * p->per_page);
}

size_t hd_kv_resident_bytes(const hd_model_spec *spec, int32_t n_layers, hd_dtype entry_type,
                            int32_t rows, int32_t n_pages) {
    hd_arena a = hd_arena_measure();
    hd_resident_scratch x = {0};
    hd_resident_scratch_place(&x, &a, rows);
    for (int32_t l = 0; l < n_layers; l++) {
        layer_kv layer = {0};
        describe_layer(&layer, spec, l, entry_type, 0);
        place_buffer(&layer, &a, &x, rows, n_pages);
    }
    return a.peak;
}

static bool is_on_host(const hd_kv *kv, const layer_kv *l, int content) {
    return kv->options.resident && content == (int)l->selected && l->selected < HD_N_POOL_KINDS;
}

static void place(hd_kv *kv, hd_arena *device, hd_arena *mirror) {
    const int32_t rows = kv->options.resident;
    if (rows) hd_resident_scratch_place(&kv->scratch, device, rows);
    for (int32_t l = 0; l < kv->n_layers; l++) {
        layer_kv *k = &kv->layers[l];
        for (int i = 0; i < N_CONTENTS; i++) {
            layer_pool *p = &k->pools[i];
            const size_t bytes = (size_t)kv->options.n_pages[contents[i].group] * p->page_bytes;
            hd_arena *a = is_on_host(kv, k, i) ? mirror : device;
            p->data = bytes ? hd_arena_take(a, bytes, 256) : NULL;
        }
        if (!rows || k->selected == HD_N_POOL_KINDS) continue;
        place_buffer(k, device, &kv->scratch, rows, kv->options.n_pages[HD_KV_FULL]);
        k->resident.counts = hd_arena_take(mirror, sizeof *k->resident.counts, 64);
    }
}

/* Fails with the requested size in tokens, and the size that would fit. */
static hd_status no_memory(const hd_kv *kv, size_t bytes, hd_err *err) {
    const hd_kv_options *o = &kv->options;
    const double wide = (double)o->n_pages[HD_KV_WINDOW] * (double)kv->host_bytes[HD_KV_WINDOW];
    double page = (double)hd_kv_page_bytes(kv->spec, kv->n_layers, HD_KV_FULL, o->entry_type,
                                           o->max_drafts);
    if (o->resident) {
        page -= (double)hd_kv_selected_bytes(kv->spec, kv->n_layers, o->entry_type);
    }
    const double left = (double)hd_device_free_bytes(kv->device);
    const double fit = left > wide && page > 0 ? floor((left - wide) / page) : 0;
    char wanted[32], free_text[32];
    return HD_FAIL(
        err, HD_ENOMEM,
        "kv pools: no memory for %s, %lld tokens; %s are free, which hold %.0f tokens",
        hd_bytes_text(wanted, sizeof wanted, (double)bytes),
        (long long)o->n_pages[HD_KV_FULL] * kv->page_tokens,
        hd_bytes_text(free_text, sizeof free_text, left), fit * kv->page_tokens);
}

static hd_status open_host(hd_kv *kv, hd_err *err) {
    const hd_kv_options *o = &kv->options;
    static const char *const what[] = {"entries in host memory", "windows in host memory"};
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        HD_TRY(hd_device_alloc_host(kv->device, &kv->host[l],
                                    kv->host_bytes[l] * (size_t)o->n_host[l], what[l], err));
    }
    for (int k = 0; k < HD_N_REPLAYS; k++) {
        if (!o->replay[k]) continue;
        HD_TRY(hd_replay_store_open(&kv->replay[k], kv->device, o->n_pages[HD_KV_FULL], err));
    }
    return HD_OK;
}

/* A CPU decodes entries into rooms of this size. */
static hd_status check_widths(const hd_kv *kv, hd_err *err) {
    for (int32_t l = 0; l < kv->n_layers && hd_device_is_host(kv->device); l++) {
        for (int i = 0; i < N_CONTENTS; i++) {
            const layer_pool *p = &kv->layers[l].pools[i];
            if (contents[i].scaled == 0 || (p->type == HD_F32 && !p->format.code)) continue;
            if (p->width <= HD_MAX_ENTRY_COLS) continue;
            return HD_FAIL(
                err, HD_EUNSUPPORTED,
                "kv pools: entries of %d columns must be float32; others have at most %d",
                p->width, HD_MAX_ENTRY_COLS);
        }
    }
    return HD_OK;
}

static hd_status open_pools(hd_kv *kv, hd_err *err) {
    hd_arena a = hd_arena_measure(), mirror = hd_arena_measure();
    place(kv, &a, &mirror);
    hd_err why = {0};
    hd_status st = hd_device_alloc(kv->device, &kv->block, a.peak, "kv pools", &why);
    if (st == HD_ENOMEM) return no_memory(kv, a.peak, err);
    if (st != HD_OK) return HD_FAIL(err, st, "%s", why.msg);
    HD_TRY(
        hd_device_alloc_host(kv->device, &kv->mirror, mirror.peak, "entries of HiSparse", err));
    HD_TRY(open_host(kv, err));
    a = hd_arena_over(kv->block, a.peak);
    mirror = hd_arena_over(kv->mirror, mirror.peak);
    place(kv, &a, &mirror);
    kv->nowhere = malloc((size_t)kv->page_tokens * sizeof *kv->nowhere);
    if (!kv->nowhere) return HD_FAIL(err, HD_ENOMEM, "no memory for the numbers of a page");
    for (int32_t i = 0; i < kv->page_tokens; i++) kv->nowhere[i] = -1;
    return HD_OK;
}

hd_status hd_kv_open(hd_kv **out, const hd_model_spec *spec, int32_t n_layers, hd_device *d,
                     const hd_kv_options *options, hd_err *err) {
    *out = NULL;
    HD_TRY(hd_kv_check_type(spec, options->entry_type, err));
    hd_kv *kv = calloc(1, sizeof *kv + (size_t)n_layers * sizeof kv->layers[0]);
    if (!kv) return HD_FAIL(err, HD_ENOMEM, "no memory for %d layers of kv", n_layers);
    kv->spec = spec;
    kv->device = d;
    kv->options = *options;
    kv->n_layers = n_layers;
    kv->page_tokens = hd_kv_shape_of(spec).page_tokens;
    for (int32_t l = 0; l < n_layers; l++) {
        kv->layers[l].rounds = options->rounds && spec->family == HD_FAMILY_V41;
        describe_layer(&kv->layers[l], spec, l, options->entry_type, options->max_drafts);
    }
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        kv->host_bytes[l] = hd_kv_page_bytes(spec, n_layers, (hd_kv_group)l,
                                             options->entry_type, options->max_drafts);
    }
    for (int k = 0; k < HD_N_REPLAYS; k++) {
        kv->replay[k] = (hd_replay_store){.spec = spec,
                                          .kind = (hd_replay)k,
                                          .shape = hd_replay_shape_of(spec, (hd_replay)k),
                                          .page_tokens = kv->page_tokens};
        if (options->replay[k])
            kv->host_bytes[HD_KV_FULL] += hd_replay_page_bytes(&kv->replay[k]);
    }
    hd_status st = check_widths(kv, err);
    if (st == HD_OK) st = open_pools(kv, err);
    if (st != HD_OK) {
        hd_kv_close(kv);
        return st;
    }
    *out = kv;
    return HD_OK;
}

void hd_kv_close(hd_kv *kv) {
    if (!kv) return;
    hd_device_release(kv->device, kv->block);
    hd_device_release(kv->device, kv->mirror);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) hd_device_release(kv->device, kv->host[l]);
    for (int k = 0; k < HD_N_REPLAYS; k++) hd_device_release(kv->device, kv->replay[k].rows);
    free(kv->nowhere);
    free(kv);
}

hd_status hd_kv_discard(hd_kv *kv, size_t *bytes, hd_err *err) {
    HD_TRY(hd_device_discard(kv->device, kv->block, bytes, err));
    HD_TRY(hd_device_discard(kv->device, kv->mirror, bytes, err));
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        HD_TRY(hd_device_discard(kv->device, kv->host[l], bytes, err));
    }
    for (int k = 0; k < HD_N_REPLAYS; k++) {
        HD_TRY(hd_device_discard(kv->device, kv->replay[k].rows, bytes, err));
    }
    return HD_OK;
}

hd_status hd_kv_restore(hd_kv *kv, hd_err *err) {
    return hd_device_restore(kv->device, kv->block, err);
}

/* Values between 1/2 and 1, with either sign. Packed ones of bytes of 1/2 to 1 as E4M3, which are small
 * powers of two as scales; with a sign they would be large ones, which are rare. */
static hd_random_fill fill_of(hd_dtype type) {
    static const hd_random_fill packed = {.keep = 0x07070707, .set = 0x30303030};
    return hd_is_packed(type) ? packed : hd_dtype_random(type, 0.5f);
}

void hd_kv_random_fill(hd_kv *kv, hd_stream *s) {
    for (int32_t l = 0; l < kv->n_layers; l++) {
        for (int i = 0; i < N_CONTENTS; i++) {
            const layer_pool *p = &kv->layers[l].pools[i];
            if (!p->data || !hd_dtypes[p->type].decode) continue;
            const int32_t n_pages = kv->options.n_pages[contents[i].group];
            hd_random_fill random_fill = fill_of(p->type);
            random_fill.seed = (uint64_t)l * N_CONTENTS + (uint64_t)i;
            hd_stream_random_fill(s, p->data, (size_t)n_pages * p->page_bytes, &random_fill);
        }
    }
}

/* Copies what lies at `page` on the device to host memory, or back. What comes back to the mirror is
 * another page's, of which the buffer may have entries. */
static void copy_part(const hd_kv *kv, hd_stream *s, bool save, const layer_kv *l, int content,
                      hd_device_page device, uint8_t *host) {
    const layer_pool *p = &l->pools[content];
    const size_t page = (size_t)device.n;
    uint8_t *at = p->data + page * p->page_bytes;
    if (is_on_host(kv, l, content)) {
        hd_stream_copy(s, save ? host : at, save ? at : host, p->page_bytes);
        if (save) return;
        const size_t n = (size_t)p->per_page;
        hd_stream_upload(s, l->resident.row_of + page * n, kv->nowhere,
                         n * sizeof *kv->nowhere);
    } else if (save) {
        hd_stream_download(s, host, at, p->page_bytes);
    } else {
        hd_stream_upload(s, at, host, p->page_bytes);
    }
}

void *hd_kv_host_page(const hd_kv *kv, hd_kv_group group, hd_host_page host, size_t *bytes) {
    *bytes = kv->host_bytes[group];
    return (uint8_t *)kv->host[group] + (size_t)host.n * *bytes;
}

static void copy_page(hd_kv *kv, hd_stream *s, const hd_page_copy *copy) {
    size_t bytes;
    uint8_t *host = hd_kv_host_page(kv, copy->group, copy->host, &bytes);
    for (int32_t l = 0; l < kv->n_layers; l++) {
        for (int k = 0; k < N_CONTENTS; k++) {
            const layer_pool *p = &kv->layers[l].pools[k];
            if (contents[k].group != copy->group || !p->data) continue;
            copy_part(kv, s, copy->save, &kv->layers[l], k, copy->device, host);
            host += p->page_bytes;
        }
    }
    for (int k = 0; copy->group == HD_KV_FULL && k < HD_N_REPLAYS; k++) {
        if (!kv->replay[k].rows) continue;
        hd_stream_wait(s); /* a step may still write them */
        const size_t n = hd_replay_page_bytes(&kv->replay[k]);
        uint8_t *rows = (uint8_t *)kv->replay[k].rows + (size_t)copy->device.n * n;
        memcpy(copy->save ? host : rows, copy->save ? rows : host, n);
        host += n;
    }
}

void hd_kv_copy(hd_kv *kv, hd_stream *s, const hd_page_copy *copies, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        /* it may be the page that is being saved */
        if (kv->saving && !copies[i].save) hd_stream_wait(s);
        kv->saving = copies[i].save;
        copy_page(kv, s, &copies[i]);
    }
}

hd_paged hd_kv_pool(const hd_kv *kv, int32_t layer, hd_pool_kind pool,
                    const int32_t *const tables[HD_N_KV_GROUPS], int32_t table_stride) {
    const layer_pool *p = &kv->layers[layer].pools[pool];
    return (hd_paged){
        .rows = {.data = p->data, .type = p->data ? p->type : HD_F32},
        .table = tables[contents[pool].group],
        .table_stride = table_stride,
        .page_entries = p->per_page,
        .width = p->width,
        .format = p->format
    };
}

hd_kv_buffer hd_kv_resident(const hd_kv *kv, int32_t layer) {
    const layer_kv *l = &kv->layers[layer];
    const hd_resident *r = &l->resident;
    const layer_pool *p = &l->pools[l->selected];
    if (r->n == 0) return (hd_kv_buffer){.resident = *r};
    return (hd_kv_buffer){
        .resident = *r,
        .entries = {.rows = r->rows,
                    .table = kv->scratch.zero,
                    .page_entries = r->n,
                    .width = p->width,
                    .format = p->format},
        .selected = kv->scratch.selected
    };
}

hd_resident_counts hd_kv_read_resident(const hd_kv *kv) {
    hd_resident_counts all = {0};
    for (int32_t l = 0; l < kv->n_layers; l++) {
        const hd_resident_counts *c = kv->layers[l].resident.counts;
        if (!c) continue;
        all.selected += c->selected;
        all.fetched += c->fetched;
    }
    return all;
}

hd_ring hd_kv_state(const hd_kv *kv, int32_t layer, bool of_index,
                    const int32_t *const tables[HD_N_KV_GROUPS], int32_t table_stride) {
    const layer_pool *p = &kv->layers[layer].pools[of_index ? STATE_INDEX : STATE_MAIN];
    return (hd_ring){
        .rows = {.data = p->data, .type = HD_F32},
        .table = tables[HD_KV_WINDOW],
        .table_stride = table_stride,
        .page_tokens = kv->page_tokens,
        .ring = p->per_page,
        .width = p->width
    };
}

const hd_replay_store *hd_kv_replay(const hd_kv *kv, hd_replay kind) {
    return &kv->replay[kind];
}
