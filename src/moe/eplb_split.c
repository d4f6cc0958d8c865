/* eplb_split.c - the exact split of a batch over copies. Ranks with experts in common form trees, found
 * once for a map. From the leaves up each rank gives its parent what it has above the mean, or takes
 * what lacks: that is all where experts between them have enough rows. Then rows are pushed from the
 * fullest rank along the shortest path of shared experts, until no path from it leads to a rank that
 * has two rows less. Then each rank that it reaches has at least its rows less one, and the experts
 * with rows there live nowhere else: no split is better. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "moe/eplb.h"

typedef struct holder {
    int32_t slot, rank;
} holder;

/* A slot whose expert has other copies: these are holders[begin] to holders[end]. */
typedef struct shared_slot {
    int32_t slot, begin, end;
} shared_slot;

/* The hop of a search that reached a rank. */
typedef struct hop {
    uint32_t seen;      /* the search */
    int32_t from, into; /* slots */
    int32_t rank;       /* before it */
} hop;

/* A rank in its tree. An expert has the slots `mine` here and `theirs` at the parent. */
typedef struct branch {
    int32_t rank, root, parent; /* -1: none */
    int32_t mine, theirs;
} branch;

struct hd_eplb_splitter {
    int32_t experts, slots, ranks, alive;
    int32_t *holder0;    /* [experts + 1] into holders */
    holder *holders;     /* [slots] of each expert, by slot */
    int32_t *shared0;    /* [ranks + 1] into shared */
    shared_slot *shared; /* [slots] of each rank */
    bool *has_slots;     /* [ranks] */
    branch *branches;    /* [ranks] breadth first, tree by tree */
    int64_t *sum;        /* [ranks] */
    int64_t *goal;       /* [ranks] of a tree, at its root: rows, then the mean of a rank */
    int32_t *size;       /* [ranks] of a tree, at its root: ranks with slots */
    int32_t *queue;      /* [ranks] */
    hop *hops;           /* [ranks] */
    uint32_t round;      /* the last search */
};

void hd_eplb_splitter_close(hd_eplb_splitter *s) {
    if (!s) return;
    free(s->holder0);
    free(s->holders);
    free(s->shared0);
    free(s->shared);
    free(s->has_slots);
    free(s->branches);
    free(s->sum);
    free(s->goal);
    free(s->size);
    free(s->queue);
    free(s->hops);
    free(s);
}

static hd_status allocate(hd_eplb_splitter *s) {
    const size_t slots = (size_t)s->slots, ranks = (size_t)s->ranks;
    s->holder0 = calloc((size_t)s->experts + 1, sizeof *s->holder0);
    s->holders = calloc(slots, sizeof *s->holders);
    s->shared0 = calloc(ranks + 1, sizeof *s->shared0);
    s->shared = calloc(slots, sizeof *s->shared);
    s->has_slots = calloc(ranks, sizeof *s->has_slots);
    s->branches = calloc(ranks, sizeof *s->branches);
    s->sum = calloc(ranks, sizeof *s->sum);
    s->goal = calloc(ranks, sizeof *s->goal);
    s->size = calloc(ranks, sizeof *s->size);
    s->queue = calloc(ranks, sizeof *s->queue);
    s->hops = calloc(ranks, sizeof *s->hops);
    const bool all = s->holder0 && s->holders && s->shared0 && s->shared && s->has_slots &&
                     s->branches && s->sum && s->goal && s->size && s->queue && s->hops;
    return all ? HD_OK : HD_ENOMEM;
}

static void index_slots(hd_eplb_splitter *s, const int32_t *slot_expert,
                        const int32_t *rank_slot0) {
    int32_t *next = s->holder0; /* counts, then ends, then begins */
    for (int32_t i = 0; i < s->slots; i++) {
        if (slot_expert[i] >= 0) next[slot_expert[i]]++;
    }
    for (int32_t e = 0, sum = 0; e <= s->experts; e++) next[e] = sum += next[e];
    for (int32_t d = s->ranks - 1; d >= 0; d--) {
        for (int32_t i = rank_slot0[d + 1] - 1; i >= rank_slot0[d]; i--) {
            if (slot_expert[i] >= 0) s->holders[--next[slot_expert[i]]] = (holder){i, d};
        }
    }
}

/* Appends the ranks that share experts with `at`, and are in no tree yet. */
static int32_t grow(hd_eplb_splitter *s, int32_t n, branch at) {
    for (int32_t i = s->shared0[at.rank]; i < s->shared0[at.rank + 1]; i++) {
        const shared_slot theirs = s->shared[i];
        for (int32_t k = theirs.begin; k < theirs.end; k++) {
            const holder mine = s->holders[k];
            if (s->hops[mine.rank].seen) continue;
            s->hops[mine.rank].seen = 1;
            s->branches[n++] = (branch){mine.rank, at.root, at.rank, mine.slot, theirs.slot};
        }
    }
    return n;
}

static void grow_trees(hd_eplb_splitter *s) {
    int32_t n = 0;
    for (int32_t root = 0; root < s->ranks; root++) {
        if (s->hops[root].seen || !s->has_slots[root]) continue;
        int32_t at = n;
        s->hops[root].seen = 1;
        s->branches[n++] = (branch){root, root, -1, -1, -1};
        for (; at < n; at++) n = grow(s, n, s->branches[at]);
    }
    for (int32_t i = 0; i < n; i++) s->size[s->branches[i].root]++;
    s->round = 1;
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
    index_slots(s, slot_expert, rank_slot0);
    int32_t n = 0;
    for (int32_t d = 0; d < ranks; d++) {
        for (int32_t i = rank_slot0[d]; i < rank_slot0[d + 1]; i++) {
            const int32_t e = slot_expert[i];
            if (e < 0) continue;
            const int32_t begin = s->holder0[e], end = s->holder0[e + 1];
            s->has_slots[d] = true;
            if (end - begin > 1) s->shared[n++] = (shared_slot){i, begin, end};
        }
        s->shared0[d + 1] = n;
        s->alive += s->has_slots[d];
    }
    grow_trees(s);
    *out = s;
    return HD_OK;
}

static void give(hd_eplb_splitter *s, int32_t *out, holder to, int32_t rows) {
    out[to.slot] = rows;
    s->sum[to.rank] += rows;
}

/* Of two copies the emptier rank gets more, until both are equal; more copies get equal parts. */
static void share_out(hd_eplb_splitter *s, int32_t *out, const holder *to, int32_t n,
                      int32_t rows) {
    if (n == 2) {
        const int64_t gap = s->sum[to[1].rank] - s->sum[to[0].rank];
        const int64_t half = (rows + gap) / 2;
        const int32_t first = half < 0 ? 0 : half > rows ? rows : (int32_t)half;
        give(s, out, to[0], first);
        give(s, out, to[1], rows - first);
        return;
    }
    for (int32_t k = 0; k < n; k++) give(s, out, to[k], rows / n + (k < rows % n));
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

/* A mean is rounded up, so that each root has at most that of its tree, if no expert has too few rows. */
static void even_out(hd_eplb_splitter *s, int32_t *x) {
    int64_t *sum = s->sum, *goal = s->goal;
    memset(goal, 0, (size_t)s->ranks * sizeof *goal);
    for (int32_t i = 0; i < s->alive; i++) {
        goal[s->branches[i].root] += sum[s->branches[i].rank];
    }
    for (int32_t d = 0; d < s->ranks; d++) {
        if (s->size[d]) goal[d] = (goal[d] + s->size[d] - 1) / s->size[d];
    }
    for (int32_t i = s->alive - 1; i >= 0; i--) {
        const branch b = s->branches[i];
        if (b.parent < 0) continue;
        int64_t n = sum[b.rank] - goal[b.root];
        if (n > x[b.mine]) n = x[b.mine];
        if (-n > x[b.theirs]) n = -x[b.theirs];
        x[b.mine] -= (int32_t)n;
        x[b.theirs] += (int32_t)n;
        sum[b.rank] -= n;
        sum[b.parent] += n;
    }
}

/* Breadth first from rank `hot`. Returns the first rank below `low`, else the emptiest of those
 * with two rows less than hot, else -1. */
static int32_t search(hd_eplb_splitter *s, const int32_t *x, int32_t hot, int64_t low) {
    const holder *holders = s->holders;
    const shared_slot *shared = s->shared;
    const int64_t *sum = s->sum;
    const uint32_t round = ++s->round;
    int32_t *queue = s->queue, n = 0, best = -1;
    hop *hops = s->hops;
    int64_t least = sum[hot] - 1; /* what the next best one is below */
    queue[n++] = hot;
    hops[hot].seen = round;
    for (int32_t at = 0; at < n; at++) {
        const int32_t a = queue[at];
        for (int32_t i = s->shared0[a], last = s->shared0[a + 1]; i < last; i++) {
            const shared_slot from = shared[i];
            if (x[from.slot] == 0) continue;
            for (int32_t k = from.begin; k < from.end; k++) {
                const holder into = holders[k];
                const int32_t b = into.rank;
                if (hops[b].seen == round) continue;
                hops[b] = (hop){round, from.slot, into.slot, a};
                if (sum[b] < low) return b;
                if (sum[b] < least) {
                    best = b;
                    least = sum[b];
                }
                queue[n++] = b;
            }
        }
    }
    return best;
}

static void push(hd_eplb_splitter *s, int32_t *x, int32_t hot, int32_t end, int64_t low) {
    const hop *hops = s->hops;
    int64_t n = (s->sum[hot] - s->sum[end]) / 2;
    if (s->sum[end] < low && low - s->sum[end] < n) n = low - s->sum[end];
    for (int32_t b = end; b != hot; b = hops[b].rank) {
        if (x[hops[b].from] < n) n = x[hops[b].from];
    }
    for (int32_t b = end; b != hot; b = hops[b].rank) {
        x[hops[b].from] -= (int32_t)n;
        x[hops[b].into] += (int32_t)n;
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
        memset(s->hops, 0, (size_t)s->ranks * sizeof *s->hops);
        s->round = 0;
    }
    even_out(s, out);
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
            certificate[d] = even ? s->has_slots[d] : s->hops[d].seen == s->round;
        }
        return s->sum[hot];
    }
}
