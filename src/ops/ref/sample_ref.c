/* sample_ref.c - the reference sampler in plain C. It sorts the candidates, which faster
 * versions do not. */
#include "ops/ref/ref_internal.h"
#include "ops/ref/sample_internal.h"

typedef struct candidate {
    float y; /* score: the logit after bias, bans, masks and penalties */
    int32_t id;
} candidate;

static bool is_broken(float logit) {
    return !(logit < INFINITY);
}

static bool is_allowed(const hd_sample_args *a, int32_t row, int32_t id) {
    const hd_sampling *p = &a->params[a->slot[row]];
    const int32_t n_ban = a->position[row] < p->ban_until ? p->n_ban : 0;
    for (int32_t i = 0; i < n_ban; i++) {
        if (a->bias[p->ban_at + i].token == id) return false;
    }
    if (!a->mask || a->mask_row[row] < 0) return true;
    const int64_t words = ((int64_t)a->vocab + 31) / 32;
    return a->mask[a->mask_row[row] * words + id / 32] >> (id % 32) & 1u;
}

static float score(const hd_sample_args *a, int32_t row, int32_t id) {
    const hd_sampling *p = &a->params[a->slot[row]];
    float y = a->logits[(int64_t)row * a->vocab + id];
    for (int32_t i = 0; i < p->n_bias; i++) {
        if (a->bias[p->bias_at + i].token == id) y += a->bias[p->bias_at + i].value;
    }
    if (!is_allowed(a, row, id)) return -INFINITY;
    if (!hd_has_penalty(p)) return y;
    const uint16_t count = a->counts[(int64_t)p->counts_row * a->vocab + id];
    int32_t output = count & HD_COUNT_OUTPUT;
    for (int32_t i = 0; a->n_drafted && i < a->n_drafted[row]; i++) {
        output += a->input[row - i] == id;
    }
    return ops_penalized(p, y, output > 0 || (count & HD_COUNT_PROMPT), output);
}

static bool by_score(const candidate *x, const candidate *y) {
    return x->y > y->y || (x->y == y->y && x->id < y->id);
}

static bool by_id(const candidate *x, const candidate *y) {
    return x->id < y->id;
}

/* Heap sort, in place. */
static void sort(candidate *c, int32_t n,
                 bool (*before)(const candidate *, const candidate *)) {
    for (int32_t built = n / 2, end = n; end > 1;) {
        candidate x;
        if (built > 0) {
            x = c[--built];
        } else {
            x = c[--end];
            c[end] = c[0];
        }
        int32_t at = built;
        for (int32_t child = 2 * at + 1; child < end; child = 2 * at + 1) {
            if (child + 1 < end && before(&c[child], &c[child + 1])) child++;
            if (!before(&x, &c[child])) break;
            c[at] = c[child];
            at = child;
        }
        c[at] = x;
    }
}

static int32_t greedy(const candidate *c, int32_t n) {
    const candidate *best = &c[0];
    for (int32_t i = 1; i < n; i++) {
        if (by_score(&c[i], best)) best = &c[i];
    }
    return best->id;
}

static uint64_t weight(const candidate *c, float max, float inverse) {
    return ops_weight(ops_scaled(c->y, max, inverse));
}

static uint64_t total_weight(const candidate *c, int32_t n, float max, float inverse) {
    uint64_t total = 0;
    for (int32_t i = 0; i < n; i++) total += weight(&c[i], max, inverse);
    return total;
}

/* Sorts n > 0 candidates and returns how many of the first top-k, top-p and min-p keep. */
static int32_t keep(const hd_sampling *p, candidate *c, int32_t n, float inverse) {
    sort(c, n, by_score);
    const float max = c[0].y;
    if (p->top_k > 0 && p->top_k < n) n = p->top_k;
    if (p->top_p > 0.0f && p->top_p < 1.0f) {
        const uint64_t need = ops_nucleus(p->top_p, total_weight(c, n, max, inverse));
        uint64_t reached = 0;
        for (n = 0; reached < need; n++) reached += weight(&c[n], max, inverse);
    }
    const float least = ops_least(p->min_p);
    while (n > 1 && ops_scaled(c[n - 1].y, max, inverse) < least) n--;
    return n;
}

static int32_t draw(const hd_sampling *p, int32_t position, candidate *c, int32_t n) {
    const float inverse = ops_inverse_temperature(p->temperature);
    n = keep(p, c, n, inverse);
    const float max = c[0].y;
    sort(c, n, by_id);
    uint64_t left = ops_draw(p->seed, position, total_weight(c, n, max, inverse));
    int32_t i = 0;
    for (; left >= weight(&c[i], max, inverse); i++) left -= weight(&c[i], max, inverse);
    return c[i].id;
}

/* Returns whether relaxed acceptance takes the row's draft, although another token might be
 * sampled. */
static bool is_relaxed_accepted(const hd_sampling *p, int32_t draft, const candidate *c,
                                int32_t n) {
    const candidate *own = NULL, *first = &c[0];
    int32_t rank = 0;
    for (int32_t i = 0; i < n; i++) {
        if (c[i].id == draft) own = &c[i];
        if (by_score(&c[i], first)) first = &c[i];
    }
    for (int32_t i = 0; own && i < n; i++) rank += by_score(&c[i], own);
    return own && rank < p->relaxed_top &&
           ops_is_near(weight(own, first->y, 1.0f), total_weight(c, n, first->y, 1.0f),
                       p->relaxed_delta);
}

static int32_t choose(hd_stream *s, const hd_sample_args *a, int32_t row) {
    const hd_sampling *p = &a->params[a->slot[row]];
    const int32_t given = ops_given(a, row), draft = ops_relaxed_draft(a, row);
    candidate *c = hd_stream_scratch(s, 0, (size_t)a->vocab * sizeof *c);
    int32_t n = 0;
    for (int32_t id = 0; id < a->vocab; id++) {
        if (is_broken(a->logits[(int64_t)row * a->vocab + id])) return HD_TOKEN_BROKEN;
    }
    if (given >= 0) return given;
    for (int32_t id = 0; id < a->n_ids; id++) {
        const float y = score(a, row, id);
        if (is_broken(y)) return HD_TOKEN_BROKEN;
        if (y > -INFINITY) c[n++] = (candidate){y, id};
    }
    if (n == 0) return HD_TOKEN_NONE;
    if (draft >= 0 && is_relaxed_accepted(p, draft, c, n)) return draft;
    return p->temperature > 0.0f ? draw(p, a->position[row], c, n) : greedy(c, n);
}

/* ---- log-probabilities ---- */

/* Lists the tokens of a row by what a mode compares: logits, or scores where they apply. */
static int32_t list_by(const hd_sample_args *a, int32_t row, hd_logprob_mode mode,
                       candidate *c) {
    const bool raw = mode == HD_LOGPROB_RAW || ops_given(a, row) >= 0;
    int32_t n = 0;
    for (int32_t id = 0; id < a->n_ids; id++) {
        const float y = raw ? a->logits[(int64_t)row * a->vocab + id] : score(a, row, id);
        if (y > -INFINITY) c[n++] = (candidate){y, id};
    }
    sort(c, n, by_score);
    return n;
}

/* Appends the ids that have no token. */
static int32_t list_rest(const hd_sample_args *a, int32_t row, candidate *c, int32_t n) {
    for (int32_t id = a->n_ids; id < a->vocab; id++) {
        c[n++] = (candidate){a->logits[(int64_t)row * a->vocab + id], id};
    }
    return n;
}

static void report(hd_stream *s, const hd_sample_args *a, int32_t row) {
    const hd_sampling *p = &a->params[a->slot[row]];
    const bool own = p->logprob || ops_given(a, row) >= 0;
    if (!own && p->n_top <= 0) return;
    const hd_logprob_mode mode = ops_logprob_mode(p);
    const float inverse =
        mode == HD_LOGPROB_RAW ? 1.0f : ops_inverse_temperature(p->temperature);
    candidate *c = hd_stream_scratch(s, 0, (size_t)a->vocab * sizeof *c);
    int32_t n = list_by(a, row, mode, c), n_all;
    if (mode == HD_LOGPROB_SAMPLED && n > 0) n = keep(p, c, n, inverse);
    n_all = mode == HD_LOGPROB_SAMPLED ? n : list_rest(a, row, c, n);
    float max = -INFINITY, y = -INFINITY;
    for (int32_t i = 0; i < n_all; i++) {
        max = c[i].y > max ? c[i].y : max;
        if (c[i].id == a->token[row]) y = c[i].y;
    }
    const double log_total = ops_log_total(max, inverse, total_weight(c, n_all, max, inverse));
    if (own) a->logprob[row] = ops_logprob(y, inverse, log_total);
    for (int32_t i = 0; i < p->n_top; i++) {
        const int64_t at = (int64_t)row * a->top_stride + i;
        a->top_id[at] = i < n ? c[i].id : -1;
        a->top_logprob[at] = i < n ? ops_logprob(c[i].y, inverse, log_total) : -INFINITY;
    }
}

void hd_sample_ref(hd_stream *s, const hd_sample_args *a) {
    for (int32_t r = 0; r < a->rows; r++) {
        a->token[r] = choose(s, a, r);
        if (a->token[r] >= 0) report(s, a, r);
    }
}

void ops_count_token(const hd_count_tokens_args *a, int32_t i) {
    uint16_t *count = &a->counts[(int64_t)a->row[i] * a->vocab + a->token[i]];
    if (a->prompt) {
        *count |= HD_COUNT_PROMPT;
    } else if ((*count & HD_COUNT_OUTPUT) < HD_COUNT_OUTPUT) {
        ++*count;
    }
}

void hd_count_tokens_ref(hd_stream *s, const hd_count_tokens_args *a) {
    (void)s;
    for (int32_t i = 0; i < a->n_clear; i++) {
        memset(a->counts + (int64_t)a->clear[i] * a->vocab, 0,
               (size_t)a->vocab * sizeof *a->counts);
    }
    for (int32_t i = 0; i < a->n; i++) {
        if (a->token[i] >= 0) ops_count_token(a, i);
    }
}

void hd_verify_ref(hd_stream *s, const hd_verify_args *a) {
    (void)s;
    for (int32_t i = 0; i < a->n; i++) {
        const int32_t first = a->first_row[i], last = a->first_row[i + 1] - 1;
        int32_t r = first;
        while (r < last && a->token[r] == a->input[r + 1]) r++;
        a->accepted[i] = r - first;
        a->next[i] = a->token[r];
    }
}

void hd_argmax_ref(hd_stream *s, const hd_argmax_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *x = a->logits + (int64_t)r * a->vocab;
        const uint32_t *mask = ops_argmax_mask(a, r);
        float best = -INFINITY;
        a->token[r] = 0;
        for (int32_t id = 0; id < a->n_ids; id++) {
            if (x[id] > best && (!mask || mask[id / 32] >> (id % 32) & 1u)) {
                best = x[id];
                a->token[r] = id;
            }
        }
    }
}
