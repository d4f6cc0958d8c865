/* sample_cpu.c - the sampler across threads, without sorting the vocabulary.
 *
 * A row is read in tiles whose maxima are kept, so that later passes read only tiles that
 * contain candidates. The threshold of top-k or top-p is found in a histogram over the
 * scaled score, then bit by bit among the few candidates of one bin. Greedy rows are bound
 * by reading the logits, sampled rows by one exponential per token. */
#include <assert.h>

#include "base/checked.h"
#include "ops/cpu/cpu_internal.h"
#include "ops/ref/ref_internal.h"
#include "ops/ref/sample_internal.h"

enum {
    TILE = 256,
    BINS = 1024,
    BINS_PER_UNIT = 34,   /* bins per unit of the scaled score; 30 units */
    COUNT_SHARE = 4096,   /* tokens to count per task, at least */
    CLEARED_AT_ONCE = 64, /* counts that are cleared in the time of one token */
    COUNTS_ALONE = 32     /* counts on a cache line */
};

/* A number of candidates, and their weight. */
typedef struct tally {
    uint64_t n, weight;
} tally;

typedef struct candidate {
    uint32_t key; /* in the order of the scores */
    int32_t id;
} candidate;

/* The state of one row while it is sampled. */
typedef struct row_state {
    const ops_kernels *k;
    const hd_sample_args *a;
    const hd_sampling *p;
    const float *logits;  /* [vocab] */
    const float *y;       /* [n_ids] scores: the logits themselves or `changed` */
    float *tile_max;      /* [n_tiles(n_ids)] of y */
    float *changed;       /* [n_ids] */
    candidate *candidate; /* [n_ids] */
    uint16_t *place;      /* [n_ids] the bin of each */
    tally *bin;           /* [BINS] the most probable first */
    float max, inverse;   /* maximum of y; 1 / temperature */
    int32_t row;
} row_state;

/* A token may be sampled if it is this one or before it in the order of scores, and at least
 * `least` when scaled. */
typedef struct limit {
    float y;
    int32_t id;
    float least;
} limit;

#define EVERY_TOKEN ((limit){-INFINITY, INT32_MAX, -INFINITY})

static int32_t n_tiles(int32_t n) {
    return (n + TILE - 1) / TILE;
}

static int32_t tile_size(int32_t n, int32_t tile) {
    return n - tile * TILE < TILE ? n - tile * TILE : TILE;
}

/* ---- reading a row ---- */

/* Returns the largest of x, +inf if one is NaN or +inf. tile_max may be NULL. */
static float survey(const ops_kernels *k, const float *x, int32_t n, float *tile_max) {
    float max = -INFINITY;
    uint32_t broken = 0;
    for (int32_t t = 0; t < n_tiles(n); t++) {
        const float *part = x + (int64_t)t * TILE;
        const int32_t size = tile_size(n, t);
        for (int32_t i = 0; i < size; i++) broken |= part[i] < INFINITY ? 0u : 1u;
        const float top = k->max(part, size);
        if (tile_max) tile_max[t] = top;
        max = top > max ? top : max;
    }
    return broken ? INFINITY : max;
}

/* Returns the lowest id of the largest element. */
static int32_t first_max(const float *x, const float *tile_max, float max) {
    int32_t tile = 0;
    while (tile_max[tile] < max) tile++;
    int32_t id = tile * TILE;
    while (x[id] < max) id++;
    return id;
}

/* ---- scores ---- */

static void apply_mask(float *y, const uint32_t *mask, int32_t n) {
    for (int32_t first = 0; first < n; first += 32) {
        const uint32_t word = mask[first / 32];
        if (word == UINT32_MAX) continue;
        const int32_t end = n - first < 32 ? n : first + 32;
        for (int32_t id = first; id < end; id++) {
            if (!(word >> (id - first) & 1u)) y[id] = -INFINITY;
        }
    }
}

/* Drafted tokens are counted in the table and in the rows before, other tokens in the table
 * only. Their new scores are applied after the table. */
static void apply_penalties(const row_state *r, float *y) {
    const hd_sample_args *a = r->a;
    const uint16_t *counts = a->counts + (int64_t)r->p->counts_row * a->vocab;
    const int32_t n_drafted = a->n_drafted ? a->n_drafted[r->row] : 0;
    const int32_t *drafted = a->input + (n_drafted > 0 ? r->row + 1 - n_drafted : 0);
    float after[HD_MAX_DRAFTS];
    assert(n_drafted <= HD_MAX_DRAFTS);
    for (int32_t i = 0; i < n_drafted; i++) {
        const int32_t id = drafted[i];
        int32_t output = counts[id] & HD_COUNT_OUTPUT;
        assert(id < a->n_ids);
        for (int32_t j = 0; j < n_drafted; j++) output += drafted[j] == id;
        after[i] = ops_penalized(r->p, y[id], true, output);
    }
    for (int32_t id = 0; id < a->n_ids; id++) {
        if (!counts[id]) continue;
        y[id] = ops_penalized(r->p, y[id], true, counts[id] & HD_COUNT_OUTPUT);
    }
    for (int32_t i = 0; i < n_drafted; i++) y[drafted[i]] = after[i];
}

/* Computes scores from logits; they are used in place if nothing changes them. */
static void make_scores(row_state *r) {
    const hd_sample_args *a = r->a;
    const hd_sampling *p = r->p;
    const bool masked = a->mask && a->mask_row[r->row] >= 0;
    const int32_t n_ban = a->position[r->row] < p->ban_until ? p->n_ban : 0;
    if (!masked && n_ban == 0 && p->n_bias == 0 && !hd_has_penalty(p)) return;
    float *y = r->changed;
    memcpy(y, r->logits, (size_t)a->n_ids * sizeof *y);
    for (int32_t i = 0; i < p->n_bias; i++) {
        const hd_logit_bias *b = &a->bias[p->bias_at + i];
        if (b->token < a->n_ids) y[b->token] += b->value;
    }
    for (int32_t i = 0; i < n_ban; i++) {
        const int32_t id = a->bias[p->ban_at + i].token;
        if (id < a->n_ids) y[id] = -INFINITY;
    }
    if (masked) {
        const int64_t words = ((int64_t)a->vocab + 31) / 32;
        apply_mask(y, a->mask + a->mask_row[r->row] * words, a->n_ids);
    }
    if (hd_has_penalty(p)) apply_penalties(r, y);
    r->y = y;
}

/* ---- top-k and top-p ---- */

static void weigh(const row_state *r, int32_t tile, float *z, uint64_t *weight) {
    r->k->weigh(z, weight, r->y + (int64_t)tile * TILE, tile_size(r->a->n_ids, tile), r->max,
                r->inverse);
}

static int32_t bin_of(float z) {
    return (int32_t)(z * -(float)BINS_PER_UNIT);
}

static void fill_bins(const row_state *r) {
    float z[TILE];
    uint64_t weight[TILE];
    memset(r->bin, 0, BINS * sizeof *r->bin);
    for (int32_t t = 0; t < n_tiles(r->a->n_ids); t++) {
        const int32_t n = tile_size(r->a->n_ids, t);
        uint16_t *place = r->place + (int64_t)t * TILE;
        weigh(r, t, z, weight);
        for (int32_t i = 0; i < n; i++) place[i] = (uint16_t)bin_of(z[i]);
        for (int32_t i = 0; i < n; i++) {
            tally *bin = &r->bin[place[i]];
            bin->n++;
            bin->weight += weight[i];
        }
    }
}

/* Maps a float to bits in the same order; both zeros are equal. */
static uint32_t key_of(float y) {
    const uint32_t bits = hd_f32_bits(y + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static int32_t list_bin(const row_state *r, int32_t bin) {
    int32_t n = 0;
    for (int32_t t = 0; t < n_tiles(r->a->n_ids); t++) {
        const uint16_t *place = r->place + (int64_t)t * TILE;
        const int32_t size = tile_size(r->a->n_ids, t);
        uint16_t found = 0;
        for (int32_t i = 0; i < size; i++) found |= place[i] == bin;
        for (int32_t i = 0; found && i < size; i++) {
            if (place[i] != bin) continue;
            const int32_t id = t * TILE + i;
            r->candidate[n++] = (candidate){key_of(r->y[id]), id};
        }
    }
    return n;
}

static uint64_t measure(tally t, bool by_weight) {
    return by_weight ? t.weight : t.n;
}

static tally plus(tally x, tally y) {
    return (tally){x.n + y.n, x.weight + y.weight};
}

static uint64_t weight_of(const row_state *r, int32_t id) {
    return ops_weight(ops_scaled(r->y[id], r->max, r->inverse));
}

/* Narrows the candidates of one bin to those of one score: keeps the half, upper or lower in
 * the next bit, in which the tally reaches need. Returns how many are left. */
static int32_t narrow(const row_state *r, int32_t n, tally *above, uint64_t need,
                      bool by_weight) {
    candidate *c = r->candidate;
    uint32_t differ = 0;
    for (int32_t i = 1; i < n; i++) differ |= c[i].key ^ c[0].key;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        if (!(differ & bit)) continue;
        tally upper = {0};
        for (int32_t i = 0; i < n; i++) {
            if (c[i].key & bit) upper = plus(upper, (tally){1, weight_of(r, c[i].id)});
        }
        const bool is_upper = measure(plus(*above, upper), by_weight) >= need;
        if (!is_upper) *above = plus(*above, upper);
        int32_t kept = 0;
        for (int32_t i = 0; i < n; i++) {
            if (((c[i].key & bit) != 0) == is_upper) c[kept++] = c[i];
        }
        n = kept;
    }
    return n;
}

/* Finds the limit at which the most probable candidates together reach `need`, by number or
 * by weight. Returns their weight; with too few candidates the limit is unchanged. */
static uint64_t cut(const row_state *r, limit *at, uint64_t need, bool by_weight) {
    tally above = {0};
    int32_t bin = 0;
    while (bin < BINS && measure(plus(above, r->bin[bin]), by_weight) < need) {
        above = plus(above, r->bin[bin++]);
    }
    if (bin == BINS) return above.weight;
    const int32_t n = narrow(r, list_bin(r, bin), &above, need, by_weight);
    int32_t last = -1;
    while (last + 1 < n && measure(above, by_weight) < need) {
        last++;
        above = plus(above, (tally){1, weight_of(r, r->candidate[last].id)});
    }
    at->id = r->candidate[last].id;
    at->y = r->y[at->id];
    return above.weight;
}

static limit find_limit(const row_state *r) {
    const hd_sampling *p = r->p;
    const bool nucleus = p->top_p > 0.0f && p->top_p < 1.0f;
    limit at = {-INFINITY, INT32_MAX, ops_least(p->min_p)};
    if (p->top_k <= 0 && !nucleus) return at;
    fill_bins(r);
    uint64_t total = 0;
    if (p->top_k > 0) {
        total = cut(r, &at, (uint64_t)p->top_k, false);
    } else {
        for (int32_t i = 0; i < BINS; i++) total += r->bin[i].weight;
    }
    if (nucleus) cut(r, &at, ops_nucleus(p->top_p, total), true);
    return at;
}

/* ---- drawing ---- */

/* Computes the weights of a tile's tokens within the limit; returns their sum. */
static uint64_t weigh_within(const row_state *r, const limit *at, int32_t tile,
                             uint64_t *restrict weight) {
    if (r->tile_max[tile] < at->y) return 0;
    float z[TILE];
    weigh(r, tile, z, weight);
    const float *restrict y = r->y + (int64_t)tile * TILE;
    const int32_t n = tile_size(r->a->n_ids, tile), last = at->id - tile * TILE;
    const float lowest = at->y, least = at->least;
    uint64_t total = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint64_t in = (uint64_t)((y[i] > lowest) | ((y[i] == lowest) & (i <= last))) &
                            (uint64_t)(z[i] >= least);
        weight[i] &= 0 - in;
        total += weight[i];
    }
    return total;
}

/* The candidates are no longer needed: their memory holds the sums of the tiles. */
static int32_t draw(const row_state *r) {
    const limit at = find_limit(r);
    uint64_t *sum = (uint64_t *)(void *)r->candidate, total = 0;
    uint64_t weight[TILE] = {0};
    for (int32_t t = 0; t < n_tiles(r->a->n_ids); t++) {
        sum[t] = weigh_within(r, &at, t, weight);
        total += sum[t];
    }
    uint64_t left = ops_draw(r->p->seed, r->a->position[r->row], total);
    int32_t tile = 0, i = 0;
    for (; left >= sum[tile]; tile++) left -= sum[tile];
    weigh_within(r, &at, tile, weight);
    for (; left >= weight[i]; i++) left -= weight[i];
    return tile * TILE + i;
}

/* ---- log-probabilities ---- */

typedef struct top_list {
    float x[HD_MAX_ALTERNATIVES];
    int32_t id[HD_MAX_ALTERNATIVES];
    int32_t n, size;
} top_list;

/* What log-probabilities are taken of: logits, or scores at the temperature. */
typedef struct basis {
    const float *x; /* [n_ids] and the given token's */
    float inverse;
    double log_total;
    limit at; /* tokens behind it are impossible */
} basis;

/* Inserts after equal elements, because ids come in ascending order. */
static void insert(top_list *l, float x, int32_t id) {
    int32_t at = l->n < l->size ? l->n++ : l->size - 1;
    for (; at > 0 && l->x[at - 1] < x; at--) {
        l->x[at] = l->x[at - 1];
        l->id[at] = l->id[at - 1];
    }
    l->x[at] = x;
    l->id[at] = id;
}

static void list_top(const row_state *r, const float *x, top_list *l) {
    for (int32_t t = 0; t < n_tiles(r->a->n_ids); t++) {
        const int32_t first = t * TILE, n = tile_size(r->a->n_ids, t);
        float least = l->n < l->size ? -INFINITY : l->x[l->size - 1];
        if (!(r->k->max(x + first, n) > least)) continue;
        for (int32_t id = first; id < first + n; id++) {
            if (!(x[id] > least)) continue;
            insert(l, x[id], id);
            if (l->n == l->size) least = l->x[l->size - 1];
        }
    }
}

/* Returns the total softmax weight of x. */
static uint64_t total_weight(const ops_kernels *k, const float *x, int32_t n, float max,
                             float inverse) {
    float z[TILE];
    uint64_t weight[TILE], total = 0;
    for (int32_t t = 0; t < n_tiles(n); t++) {
        const int32_t size = tile_size(n, t);
        k->weigh(z, weight, x + (int64_t)t * TILE, size, max, inverse);
        for (int32_t i = 0; i < size; i++) total += weight[i];
    }
    return total;
}

static basis raw_basis(const row_state *r, float max) {
    const uint64_t total = total_weight(r->k, r->logits, r->a->vocab, max, 1.0f);
    return (basis){r->logits, 1.0f, ops_log_total(max, 1.0f, total), EVERY_TOKEN};
}

/* rest: the largest logit of the ids that have no token. */
static basis tempered_basis(const row_state *r, float rest) {
    const hd_sample_args *a = r->a;
    const float max = r->max > rest ? r->max : rest;
    const uint64_t total =
        total_weight(r->k, r->y, a->n_ids, max, r->inverse) +
        total_weight(r->k, r->logits + a->n_ids, a->vocab - a->n_ids, max, r->inverse);
    return (basis){r->y, r->inverse, ops_log_total(max, r->inverse, total), EVERY_TOKEN};
}

static basis sampled_basis(const row_state *r) {
    const limit at = find_limit(r);
    uint64_t total = 0, weight[TILE];
    for (int32_t t = 0; t < n_tiles(r->a->n_ids); t++) {
        total += weigh_within(r, &at, t, weight);
    }
    return (basis){r->y, r->inverse, ops_log_total(r->max, r->inverse, total), at};
}

static float logprob_of(const row_state *r, const basis *b, float y, int32_t id) {
    const bool within = y > b->at.y || (y == b->at.y && id <= b->at.id);
    const bool likely = ops_scaled(y, r->max, b->inverse) >= b->at.least;
    return within && likely ? ops_logprob(y, b->inverse, b->log_total) : -INFINITY;
}

static void report(row_state *r, float rest, float raw_max, int32_t token) {
    const hd_sample_args *a = r->a;
    const bool own = r->p->logprob || ops_given(a, r->row) >= 0;
    if (!own && r->p->n_top <= 0) return;
    const hd_logprob_mode mode = ops_logprob_mode(r->p);
    if (mode != HD_LOGPROB_RAW) r->inverse = ops_inverse_temperature(r->p->temperature);
    const basis b = mode == HD_LOGPROB_RAW        ? raw_basis(r, raw_max)
                    : mode == HD_LOGPROB_TEMPERED ? tempered_basis(r, rest)
                                                  : sampled_basis(r);
    const bool known = mode != HD_LOGPROB_SAMPLED || token < a->n_ids;
    if (own) a->logprob[r->row] = known ? logprob_of(r, &b, b.x[token], token) : -INFINITY;
    if (r->p->n_top <= 0) return;
    top_list l = {.size = r->p->n_top};
    list_top(r, b.x, &l);
    const int64_t at = (int64_t)r->row * a->top_stride;
    for (int32_t i = 0; i < l.size; i++) {
        const float logprob = i < l.n ? logprob_of(r, &b, l.x[i], l.id[i]) : -INFINITY;
        a->top_id[at + i] = logprob > -INFINITY ? l.id[i] : -1;
        a->top_logprob[at + i] = logprob;
    }
}

/* ---- relaxed drafts ---- */

/* Returns how many scores come before a token's in their order; at least `enough` if there
 * are that many. */
static int32_t rank_of(const row_state *r, int32_t id, int32_t enough) {
    const float y = r->y[id];
    int32_t rank = 0;
    for (int32_t t = 0; rank < enough && t < n_tiles(r->a->n_ids); t++) {
        if (r->tile_max[t] < y) continue;
        const int32_t first = t * TILE, n = tile_size(r->a->n_ids, t);
        const float *part = r->y + first;
        for (int32_t i = 0; i < n; i++) {
            rank += (part[i] > y) | ((part[i] == y) & (first + i < id));
        }
    }
    return rank;
}

/* Returns whether relaxed acceptance takes the row's draft, although another token might be
 * sampled. */
static bool is_relaxed_accepted(const row_state *r, int32_t draft) {
    if (r->y[draft] == -INFINITY) return false;
    if (rank_of(r, draft, r->p->relaxed_top) >= r->p->relaxed_top) return false;
    float z;
    uint64_t weight;
    r->k->weigh(&z, &weight, r->y + draft, 1, r->max, 1.0f);
    return ops_is_near(weight, total_weight(r->k, r->y, r->a->n_ids, r->max, 1.0f),
                       r->p->relaxed_delta);
}

/* ---- rows ---- */

/* Samples a row whose token is neither given nor failed. */
static int32_t choose_by_score(row_state *r) {
    const hd_sample_args *a = r->a;
    const int32_t draft = ops_relaxed_draft(a, r->row);
    make_scores(r);
    if (r->y != r->logits) r->max = survey(r->k, r->y, a->n_ids, r->tile_max);
    if (r->max == INFINITY) return HD_TOKEN_BROKEN;
    if (r->max == -INFINITY) return HD_TOKEN_NONE;
    if (draft >= 0 && is_relaxed_accepted(r, draft)) return draft;
    if (r->p->temperature <= 0.0f || r->p->top_k == 1) {
        return first_max(r->y, r->tile_max, r->max);
    }
    r->inverse = ops_inverse_temperature(r->p->temperature);
    return draw(r);
}

static int32_t choose(row_state *r) {
    const hd_sample_args *a = r->a;
    const float rest = survey(r->k, r->logits + a->n_ids, a->vocab - a->n_ids, NULL);
    r->max = survey(r->k, r->logits, a->n_ids, r->tile_max);
    const float raw_max = r->max > rest ? r->max : rest;
    if (raw_max == INFINITY) return HD_TOKEN_BROKEN;
    const int32_t given = ops_given(a, r->row);
    r->y = r->logits;
    const int32_t token = given >= 0 ? given : choose_by_score(r);
    if (token >= 0) report(r, rest, raw_max, token);
    return token;
}

static size_t align(size_t bytes) {
    return (bytes + 63) & ~(size_t)63;
}

static void sample_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_sample_args *a = job->args;
    const size_t n = (size_t)a->n_ids, bins = align(BINS * sizeof(tally)),
                 tops = align((n / TILE + 1) * sizeof(float)),
                 scores = align(n * sizeof(float)), list = align((n + 1) * sizeof(candidate)),
                 places = n * sizeof(uint16_t);
    uint8_t *at = hd_stream_scratch(job->stream, worker, bins + tops + scores + list + places);
    for (int32_t row = first; row < end; row++) {
        row_state r = {.k = job->k,
                       .a = a,
                       .p = &a->params[a->slot[row]],
                       .logits = a->logits + (int64_t)row * a->vocab,
                       .bin = (tally *)(void *)at,
                       .tile_max = (float *)(void *)(at + bins),
                       .changed = (float *)(void *)(at + bins + tops),
                       .candidate = (candidate *)(void *)(at + bins + tops + scores),
                       .place = (uint16_t *)(void *)(at + bins + tops + scores + list),
                       .row = row};
        a->token[row] = choose(&r);
    }
}

void ops_sample_cpu(hd_stream *s, const hd_sample_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = sample_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(4 * (int64_t)a->vocab)});
}

/* Rows with masks or values that are not finite use the reference. */
static void argmax_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_argmax_args *a = job->args;
    float *tile_max =
        hd_stream_scratch(job->stream, worker, (size_t)n_tiles(a->n_ids) * sizeof *tile_max);
    for (int32_t r = first; r < end; r++) {
        hd_argmax_args row = *a;
        row.token += r;
        row.logits += (int64_t)r * a->vocab;
        if (a->mask) row.mask_row += r;
        row.rows = 1;
        const bool masked = ops_argmax_mask(&row, 0) != NULL;
        const float max = masked ? INFINITY : survey(job->k, row.logits, a->n_ids, tile_max);
        if (max == INFINITY) {
            hd_argmax_ref(job->stream, &row);
        } else {
            *row.token = first_max(row.logits, tile_max, max);
        }
    }
}

void ops_argmax_cpu(hd_stream *s, const hd_argmax_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = argmax_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(a->vocab)});
}

void ops_weigh_plain(float *z, uint64_t *weight, const float *y, int32_t n, float max,
                     float inverse) {
    ops_weigh(z, weight, y, n, max, inverse);
}

typedef struct count_job {
    const hd_count_tokens_args *a;
    int32_t words; /* vocabulary entries per task */
} count_job;

/* Clears the counts of a range of the vocabulary and counts its tokens, in their order. */
static void count_task(const void *arg, int32_t task, int32_t worker) {
    const count_job *job = arg;
    const hd_count_tokens_args *a = job->a;
    const int32_t first = task * job->words, end = hd_min_i32(first + job->words, a->vocab);
    (void)worker;
    for (int32_t i = 0; i < a->n_clear; i++) {
        memset(a->counts + (int64_t)a->clear[i] * a->vocab + first, 0,
               (size_t)(end - first) * sizeof *a->counts);
    }
    for (int32_t i = 0; i < a->n; i++) {
        if (a->token[i] >= first && a->token[i] < end) ops_count_token(a, i);
    }
}

void ops_count_tokens_cpu(hd_stream *s, const hd_count_tokens_args *a, const ops_kernels *k) {
    (void)k;
    const int64_t work = a->n + (int64_t)a->n_clear * a->vocab / CLEARED_AT_ONCE;
    const int64_t tasks = hd_ceil_div(work, COUNT_SHARE);
    const int32_t workers = hd_stream_workers(s);
    count_job job = {.a = a, .words = a->vocab};
    if (tasks > 1 && workers > 1) {
        job.words = (int32_t)hd_ceil_div(a->vocab, COUNTS_ALONE * workers) * COUNTS_ALONE;
    }
    hd_stream_tasks(s, (int32_t)hd_ceil_div(a->vocab, job.words), count_task, &job);
}

void ops_verify_cpu(hd_stream *s, const hd_verify_args *a, const ops_kernels *k) {
    (void)k;
    hd_verify_ref(s, a);
}
