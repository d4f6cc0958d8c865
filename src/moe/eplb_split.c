/* eplb_split.c - the exact split of a batch over copies: rows are pushed from the fullest rank
 * along the shortest path of shared experts, until no path from it leads to a rank that has two
 * rows less. Then each rank that it reaches has at least its rows less one, and the experts with
 * rows there live nowhere else: no split is better. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "moe/eplb.h"

struct hd_eplb_splitter {
    int32_t experts, slots, ranks, alive;
    int32_t *rank;         /* [slots] */
    int32_t *holder0;      /* [experts + 1] into holders */
    int32_t *holders;      /* [slots] slots of each expert */
    int32_t *shared0;      /* [ranks + 1] into shared */
    int32_t *shared;       /* [slots] slots of each rank whose expert has other copies */
    int32_t *expert;       /* [slots] */
    bool *has_slots;       /* [ranks] */
    int64_t *sum;          /* [ranks] */
    int32_t *queue;        /* [ranks] */
    int32_t *from, *into;  /* [ranks] slots of the hop that reached the rank */
    uint32_t *seen, round; /* [ranks] the search that reached the rank */
};

void hd_eplb_splitter_close(hd_eplb_splitter *s) {
    if (!s) return;
    free(s->rank);
    free(s->has_slots);
    free(s->sum);
    free(s);
}

static hd_status allocate(hd_eplb_splitter *s) {
    const size_t slots = (size_t)s->slots, ranks = (size_t)s->ranks;
    const size_t experts = (size_t)s->experts;
    int32_t *words = calloc(4 * slots + experts + 1 + 5 * ranks + 1, sizeof *words);
    s->rank = words;
    s->has_slots = calloc(ranks, sizeof *s->has_slots);
    s->sum = calloc(ranks, sizeof *s->sum);
    if (!words || !s->has_slots || !s->sum) return HD_ENOMEM;
    s->holders = words + slots;
    s->shared = words + 2 * slots;
    s->expert = words + 3 * slots;
    s->holder0 = words + 4 * slots;
    s->shared0 = s->holder0 + experts + 1;
    s->queue = s->shared0 + ranks + 1;
    s->from = s->queue + ranks;
    s->into = s->from + ranks;
    s->seen = (uint32_t *)(s->into + ranks);
    return HD_OK;
}

static void index_slots(hd_eplb_splitter *s) {
    int32_t *next = s->holder0; /* counts, then ends */
    for (int32_t i = 0; i < s->slots; i++) {
        if (s->expert[i] >= 0) next[s->expert[i] + 1]++;
    }
    for (int32_t e = 0; e < s->experts; e++) next[e + 1] += next[e];
    for (int32_t i = s->slots - 1; i >= 0; i--) {
        if (s->expert[i] >= 0) s->holders[--next[s->expert[i] + 1]] = i;
    }
    /* next[e + 1] is now the begin of e. */
    for (int32_t e = 0; e < s->experts; e++) next[e] = next[e + 1];
    int32_t n = 0;
    for (int32_t i = 0; i < s->slots; i++) n += s->expert[i] >= 0;
    next[s->experts] = n;
}

hd_status hd_eplb_splitter_open(hd_eplb_splitter **out, const int32_t *slot_expert,
                                const int32_t *rank_slot0, int32_t experts, int32_t ranks,
                                hd_err *err) {
    hd_eplb_splitter *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory for a splitter");
    *s = (hd_eplb_splitter){.experts = experts, .slots = rank_slot0[ranks], .ranks = ranks};
    if (allocate(s) != HD_OK) {
        hd_eplb_splitter_close(s);
        return HD_FAIL(err, HD_ENOMEM, "no memory to split over %d ranks", ranks);
    }
    memcpy(s->expert, slot_expert, (size_t)s->slots * sizeof *s->expert);
    index_slots(s);
    int32_t n = 0;
    for (int32_t d = 0; d < ranks; d++) {
        for (int32_t i = rank_slot0[d]; i < rank_slot0[d + 1]; i++) {
            const int32_t e = s->expert[i];
            s->rank[i] = d;
            if (e < 0) continue;
            s->has_slots[d] = true;
            if (s->holder0[e + 1] - s->holder0[e] > 1) s->shared[n++] = i;
        }
        s->shared0[d + 1] = n;
        s->alive += s->has_slots[d];
    }
    *out = s;
    return HD_OK;
}

static void give(hd_eplb_splitter *s, int32_t *out, int32_t slot, int32_t rows) {
    out[slot] = rows;
    s->sum[s->rank[slot]] += rows;
}

/* Of two copies the emptier rank gets more, until both are equal; more copies get equal parts. */
static void share_out(hd_eplb_splitter *s, int32_t *out, const int32_t *slots, int32_t n,
                      int32_t rows) {
    if (n == 2) {
        const int64_t gap = s->sum[s->rank[slots[1]]] - s->sum[s->rank[slots[0]]];
        const int64_t half = (rows + gap) / 2;
        const int32_t first = half < 0 ? 0 : half > rows ? rows : (int32_t)half;
        give(s, out, slots[0], first);
        give(s, out, slots[1], rows - first);
        return;
    }
    for (int32_t k = 0; k < n; k++) give(s, out, slots[k], rows / n + (k < rows % n));
}

/* First what has one place, then what has several. Returns the rows, -1: no slot. */
static int64_t start(hd_eplb_splitter *s, const int32_t *rows, int32_t *out) {
    int64_t total = 0;
    memset(out, 0, (size_t)s->slots * sizeof *out);
    memset(s->sum, 0, (size_t)s->ranks * sizeof *s->sum);
    for (int32_t e = 0; e < s->experts; e++) {
        const int32_t n = s->holder0[e + 1] - s->holder0[e];
        assert(rows[e] >= 0);
        total += rows[e];
        if (n == 1) give(s, out, s->holders[s->holder0[e]], rows[e]);
        if (n == 0 && rows[e] > 0) return -1;
    }
    for (int32_t e = 0; e < s->experts; e++) {
        const int32_t begin = s->holder0[e], n = s->holder0[e + 1] - begin;
        if (n > 1) share_out(s, out, s->holders + begin, n, rows[e]);
    }
    return total;
}

/* Breadth first from rank `hot`. Returns the first rank below `low`, else the emptiest of those
 * with two rows less than hot, else -1. */
static int32_t search(hd_eplb_splitter *s, const int32_t *x, int32_t hot, int64_t low) {
    int32_t n = 0, best = -1;
    s->round++;
    s->queue[n++] = hot;
    s->seen[hot] = s->round;
    for (int32_t at = 0; at < n; at++) {
        const int32_t a = s->queue[at];
        for (int32_t i = s->shared0[a]; i < s->shared0[a + 1]; i++) {
            const int32_t slot = s->shared[i], e = s->expert[slot];
            if (x[slot] == 0) continue;
            for (int32_t k = s->holder0[e]; k < s->holder0[e + 1]; k++) {
                const int32_t other = s->holders[k], b = s->rank[other];
                if (s->seen[b] == s->round) continue;
                s->seen[b] = s->round;
                s->from[b] = slot;
                s->into[b] = other;
                if (s->sum[b] < low) return b;
                if (s->sum[b] < s->sum[hot] - 1 && (best < 0 || s->sum[b] < s->sum[best])) {
                    best = b;
                }
                s->queue[n++] = b;
            }
        }
    }
    return best;
}

static void push(hd_eplb_splitter *s, int32_t *x, int32_t hot, int32_t end, int64_t low) {
    int64_t n = (s->sum[hot] - s->sum[end]) / 2;
    if (s->sum[end] < low && low - s->sum[end] < n) n = low - s->sum[end];
    for (int32_t b = end; b != hot; b = s->rank[s->from[b]]) {
        if (x[s->from[b]] < n) n = x[s->from[b]];
    }
    for (int32_t b = end; b != hot; b = s->rank[s->from[b]]) {
        x[s->from[b]] -= (int32_t)n;
        x[s->into[b]] += (int32_t)n;
    }
    s->sum[hot] -= n;
    s->sum[end] += n;
}

int64_t hd_eplb_split(hd_eplb_splitter *s, const int32_t *rows, int32_t *out,
                      bool *certificate) {
    const int64_t total = start(s, rows, out);
    if (total < 0) return -1;
    const int64_t low = s->alive ? (total + s->alive - 1) / s->alive : 0;
    if (s->round > UINT32_MAX / 2) { /* before it wraps */
        memset(s->seen, 0, (size_t)s->ranks * sizeof *s->seen);
        s->round = 0;
    }
    for (;;) {
        int32_t hot = 0;
        for (int32_t d = 1; d < s->ranks; d++) {
            if (s->sum[d] > s->sum[hot]) hot = d;
        }
        const bool even = s->sum[hot] <= low;
        const int32_t end = even ? -1 : search(s, out, hot, low);
        if (end >= 0) {
            push(s, out, hot, end, low);
            continue;
        }
        for (int32_t d = 0; d < s->ranks && certificate; d++) {
            certificate[d] = even ? s->has_slots[d] : s->seen[d] == s->round;
        }
        return s->sum[hot];
    }
}
