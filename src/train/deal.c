/* deal.c - deals sequences to ranks, writes and reads their messages. */
#include "train/deal.h"

#include <stdlib.h>
#include <string.h>

#include "kv/replay.h"

/* RESULTS: numbers of a token. COUNTS: words of a rank's hd_replay_count, before its results. */
enum {
    PART_WORDS = sizeof(train_part) / sizeof(uint32_t),
    N_ARRAYS = 6,
    RESULTS = 3,
    COUNTS = sizeof(hd_replay_count) / sizeof(float)
};

/* The arrays of a sequence that the message has. */
static const size_t arrays[N_ARRAYS] = {
    offsetof(hd_train_sequence, tokens),         offsetof(hd_train_sequence, factor),
    offsetof(hd_train_sequence, entropy_factor), offsetof(hd_train_sequence, draft_factor),
    offsetof(hd_train_sequence, routes),         offsetof(hd_train_sequence, keys)};

static const void *array_of(const hd_train_sequence *s, int k) {
    const void *array;
    memcpy(&array, (const uint8_t *)s + arrays[k], sizeof array);
    return array;
}

static void set_array(hd_train_sequence *s, int k, const void *array) {
    memcpy((uint8_t *)s + arrays[k], &array, sizeof array);
}

static int64_t words_of(const hd_trainer *t, const train_part *p, int k) {
    const hd_model_spec *c = t->o.spec;
    const hd_replay_shape keys = hd_replay_shape_of(c, HD_REPLAY_KEYS);
    const int64_t rows = p->n - 1;
    const int64_t words[N_ARRAYS] = {p->n,
                                     p->n - p->first,
                                     p->n - p->first,
                                     p->n - p->first,
                                     rows * c->n_layers * c->route.top_k,
                                     rows * keys.layers * keys.top_k};
    return p->has >> k & 1 ? words[k] : 0;
}

/* Floats that a rank has to say of its sequences. */
static int64_t results_of(const train_deal *d, int32_t rank) {
    int64_t n = COUNTS;
    for (int32_t i = 0; i < d->n; i++) {
        if (d->parts[i].rank == rank) n += RESULTS * (d->parts[i].n - d->parts[i].first);
    }
    return n;
}

/* Points a sequence to its results; returns what follows. */
static float *point(hd_train_sequence *s, float *results) {
    const int64_t n = s->n - s->first;
    s->logprob = results;
    s->entropy = results + n;
    s->draft_logprob = results + 2 * n;
    return results + RESULTS * n;
}

/* ---- dealing ---- */

typedef struct length {
    int32_t n, at;
} length;

static int longest_first(const void *a, const void *b) {
    const length *x = a, *y = b;
    return x->n != y->n ? (x->n < y->n) - (x->n > y->n) : (x->at > y->at) - (x->at < y->at);
}

static hd_status deal(train_deal *d, int32_t n_ranks, hd_err *err) {
    int64_t tokens[HD_LOCAL_MAX_RANKS] = {0};
    length *lengths = calloc((size_t)d->n + 1, sizeof *lengths);
    if (!lengths) return HD_FAIL(err, HD_ENOMEM, "no memory for %d sequences", d->n);
    for (int32_t i = 0; i < d->n; i++) lengths[i] = (length){d->parts[i].n, i};
    qsort(lengths, (size_t)d->n, sizeof *lengths, longest_first);
    for (int32_t i = 0; i < d->n; i++) {
        int32_t least = 0;
        for (int32_t r = 1; r < n_ranks; r++) {
            if (tokens[r] < tokens[least]) least = r;
        }
        d->parts[lengths[i].at].rank = least;
        tokens[least] += lengths[i].n;
    }
    free(lengths);
    return HD_OK;
}

static hd_status take_lists(train_deal *d, int32_t n, hd_err *err) {
    d->n = n;
    d->parts = calloc((size_t)n + 1, sizeof *d->parts);
    d->own = calloc((size_t)n + 1, sizeof *d->own);
    if (d->parts && d->own) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for %d sequences", n);
}

static hd_status write_message(train_deal *d, const hd_trainer *t, const hd_train_sequence *s,
                               hd_err *err) {
    d->words = (int64_t)d->n * PART_WORDS;
    for (int32_t i = 0; i < d->n * N_ARRAYS; i++) {
        const train_part *p = &d->parts[i / N_ARRAYS];
        if (p->rank) d->words += words_of(t, p, i % N_ARRAYS);
    }
    d->message = malloc((size_t)d->words * sizeof *d->message + 1);
    if (!d->message) return HD_FAIL(err, HD_ENOMEM, "no memory for a message to the ranks");
    uint32_t *at = d->message + (int64_t)d->n * PART_WORDS;
    memcpy(d->message, d->parts, (size_t)d->n * sizeof *d->parts);
    for (int32_t i = 0; i < d->n * N_ARRAYS; i++) {
        const train_part *p = &d->parts[i / N_ARRAYS];
        const int64_t words = p->rank ? words_of(t, p, i % N_ARRAYS) : 0;
        if (words) {
            memcpy(at, array_of(&s[i / N_ARRAYS], i % N_ARRAYS), (size_t)words * sizeof *at);
        }
        at += words;
    }
    return HD_OK;
}

hd_status train_deal_make(train_deal *d, const hd_trainer *t, const hd_train_sequence *s,
                          int32_t n, hd_err *err) {
    *d = (train_deal){.n = 0};
    HD_TRY(take_lists(d, n, err));
    for (int32_t i = 0; i < n; i++) {
        d->parts[i] =
            (train_part){.n = s[i].n, .first = s[i].first, .temperature = s[i].temperature};
        for (int k = 0; k < N_ARRAYS; k++) d->parts[i].has |= (array_of(&s[i], k) != NULL) << k;
    }
    HD_TRY(deal(d, t->o.n_ranks, err));
    for (int32_t i = 0; i < n; i++) {
        if (d->parts[i].rank == 0) d->own[d->n_own++] = s[i];
    }
    return write_message(d, t, s, err);
}

/* ---- other ranks ---- */

static bool is_part(const hd_trainer *t, const train_part *p) {
    return p->n >= 2 && p->n <= t->o.context && p->first >= 1 && p->first < p->n &&
           p->rank >= 0 && p->rank < t->o.n_ranks && (p->has & 1) && p->has < 1 << N_ARRAYS;
}

/* Finds the arrays of part i, which becomes a sequence if it is this rank's; false: they are not there. */
static bool read_arrays(train_deal *d, const hd_trainer *t, int32_t i, const uint32_t *message,
                        int64_t *at) {
    const train_part *p = &d->parts[i];
    hd_train_sequence *s = &d->own[d->n_own];
    if (!p->rank) return true;
    *s = (hd_train_sequence){.n = p->n, .first = p->first, .temperature = p->temperature};
    for (int k = 0; k < N_ARRAYS; k++) {
        const int64_t words = words_of(t, p, k);
        if (words > d->words - *at) return false;
        if (words) set_array(s, k, message + *at);
        *at += words;
    }
    d->n_own += p->rank == t->o.rank;
    return true;
}

static hd_status read_message(train_deal *d, const hd_trainer *t, int32_t n,
                              const uint32_t *message, hd_err *err) {
    int64_t at = (int64_t)n * PART_WORDS;
    bool ok = n >= 0 && at <= d->words;
    HD_TRY(take_lists(d, ok ? n : 0, err));
    if (d->n) memcpy(d->parts, message, (size_t)d->n * sizeof *d->parts);
    for (int32_t i = 0; i < d->n && ok; i++) {
        ok = is_part(t, &d->parts[i]) && read_arrays(d, t, i, message, &at);
    }
    if (ok && at == d->words) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "a message of rank 0 that holds no sequences");
}

hd_status train_deal_read(train_deal *d, const hd_trainer *t, int32_t n,
                          const uint32_t *message, int64_t words, hd_err *err) {
    *d = (train_deal){.words = words};
    HD_TRY(read_message(d, t, n, message, err));
    d->results = calloc((size_t)results_of(d, t->o.rank), sizeof *d->results);
    if (!d->results) return HD_FAIL(err, HD_ENOMEM, "no memory for results of sequences");
    float *next = d->results + COUNTS;
    for (int32_t i = 0; i < d->n_own; i++) next = point(&d->own[i], next);
    return trainer_check(t, d->own, d->n_own, err);
}

/* ---- results ---- */

/* Rank 0: what another rank said. Returns what follows. */
static const float *take_results(const train_deal *d, hd_trainer *t, int32_t rank,
                                 const hd_train_sequence *s, const float *from) {
    memcpy(&t->replayed[rank], from, sizeof t->replayed[rank]);
    from += COUNTS;
    for (int32_t i = 0; i < d->n; i++) {
        if (d->parts[i].rank != rank) continue;
        const size_t n = (size_t)(s[i].n - s[i].first);
        memcpy(s[i].logprob, from, n * sizeof *from);
        memcpy(s[i].entropy, from + n, n * sizeof *from);
        if (s[i].draft_factor) memcpy(s[i].draft_logprob, from + 2 * n, n * sizeof *from);
        from += RESULTS * n;
    }
    return from;
}

hd_status train_deal_gather(const train_deal *d, hd_trainer *t, const hd_train_sequence *s,
                            hd_err *err) {
    int64_t total = 0, first = 0, own = 0;
    for (int32_t r = 1; r < t->o.n_ranks; r++) {
        if (r == t->o.rank) {
            first = total;
            own = results_of(d, r);
        }
        total += results_of(d, r);
    }
    if (t->o.rank) {
        const hd_replay_count count = hd_backward_replayed(t->backward);
        memcpy(d->results, &count, sizeof count);
        return train_ranks_gather(&t->ranks, d->results, first, own, NULL, total, err);
    }
    float *all = malloc((size_t)total * sizeof *all + 1);
    if (!all) return HD_FAIL(err, HD_ENOMEM, "no memory for results of sequences");
    const hd_status st = train_ranks_gather(&t->ranks, NULL, 0, 0, all, total, err);
    const float *from = all;
    for (int32_t r = 1; r < t->o.n_ranks && st == HD_OK; r++) {
        from = take_results(d, t, r, s, from);
    }
    free(all);
    return st;
}

void train_deal_deinit(train_deal *d) {
    free(d->parts);
    free(d->own);
    free(d->results);
    free(d->message);
}
