/* split.c - the exact split of a batch over copies. Ranks with experts in common form trees, found once
 * for a map. From the leaves up each rank gives its parent what it has above the mean, or takes what
 * it lacks: that is all where experts between them have enough rows. Then rows are pushed from the
 * fullest rank along the shortest path of shared experts, until no path from it leads to a rank that
 * has two rows less. Then each rank that it reaches has at least its rows less one, and the experts
 * with rows there live nowhere else: no split is better.
 *
 * Ties are broken by index, and neighbors are visited by the number of copies that they are behind a
 * slot in the order of its expert's slots, then by slot: ops/split/split_cuda.cu does the same. */
#include "moe/split.h"

#include <assert.h>
#include <string.h>

const char *const hd_expert_split_names[] = {"turns", "local", "flow", NULL};

hd_status hd_expert_split_of(hd_expert_split *out, const char *name, hd_err *err) {
    *out = HD_SPLIT_TURNS;
    for (int32_t i = 0; name && hd_expert_split_names[i]; i++) {
        if (strcmp(name, hd_expert_split_names[i]) != 0) continue;
        *out = (hd_expert_split)i;
        return HD_OK;
    }
    return name ? HD_FAIL(err, HD_EINVAL, "expert_split '%s' is not turns, local or flow", name)
                : HD_OK;
}

/* ---- graph ---- */

static void index_slots(const hd_split_graph *g, const int32_t *slot_expert,
                        const int32_t *rank_slot0) {
    int32_t *next = g->holder0; /* counts, then ends, then begins */
    memset(next, 0, ((size_t)g->shape.experts + 1) * sizeof *next);
    for (int32_t i = 0; i < g->shape.slots; i++) {
        if (slot_expert[i] >= 0) next[slot_expert[i]]++;
    }
    for (int32_t e = 0, sum = 0; e <= g->shape.experts; e++) next[e] = sum += next[e];
    for (int32_t d = g->shape.ranks - 1; d >= 0; d--) {
        for (int32_t i = rank_slot0[d + 1] - 1; i >= rank_slot0[d]; i--) {
            if (slot_expert[i] >= 0)
                g->holder[--next[slot_expert[i]]] = (hd_split_holder){i, d};
        }
    }
}

static int32_t own_number(const hd_split_graph *g, int32_t begin, int32_t slot) {
    int32_t k = 0;
    while (g->holder[begin + k].slot != slot) k++;
    return k;
}

static void list_shared(const hd_split_graph *g, const int32_t *slot_expert,
                        const int32_t *rank_slot0) {
    int32_t n = 0;
    g->shared0[0] = 0;
    for (int32_t d = 0; d < g->shape.ranks; d++) {
        for (int32_t i = rank_slot0[d]; i < rank_slot0[d + 1]; i++) {
            const int32_t e = slot_expert[i];
            if (e < 0 || g->holder0[e + 1] - g->holder0[e] == 1) continue;
            const int32_t begin = g->holder0[e];
            g->shared[n++] =
                (hd_split_shared){i, begin, g->holder0[e + 1], own_number(g, begin, i)};
        }
        g->shared0[d + 1] = n;
    }
}

/* The copy that is k behind a slot, of `end - begin` copies. */
static hd_split_holder holder_behind(const hd_split_graph *g, const hd_split_shared *s,
                                     int32_t k) {
    const int32_t at = s->begin + s->own + k;
    return g->holder[at < s->end ? at : at - (s->end - s->begin)];
}

/* Appends the ranks that share experts with rank a, and are in no tree yet. */
static int32_t grow(const hd_split_graph *g, int32_t n, int32_t a) {
    bool more = true;
    for (int32_t k = 1; more; k++) {
        more = false;
        for (int32_t i = g->shared0[a]; i < g->shared0[a + 1]; i++) {
            const hd_split_shared theirs = g->shared[i];
            if (k >= theirs.end - theirs.begin) continue;
            const hd_split_holder mine = holder_behind(g, &theirs, k);
            more = true;
            if (g->root[mine.rank] >= 0) continue;
            g->root[mine.rank] = g->root[a];
            g->branch[n++] = (hd_split_branch){mine.rank, a, mine.slot, theirs.slot};
        }
    }
    return n;
}

/* Returns the end of the tree's branches, which begin at n. */
static int32_t grow_tree(const hd_split_graph *g, int32_t n, int32_t root) {
    int32_t at = n;
    g->root[root] = root;
    g->branch[n++] = (hd_split_branch){root, -1, -1, -1};
    for (; at < n; at++) n = grow(g, n, g->branch[at].rank);
    return n;
}

void hd_split_graph_make(const hd_split_graph *g, const int32_t *slot_expert,
                         const int32_t *rank_slot0) {
    index_slots(g, slot_expert, rank_slot0);
    list_shared(g, slot_expert, rank_slot0);
    int32_t n = 0;
    memset(g->size, 0, (size_t)g->shape.ranks * sizeof *g->size);
    for (int32_t d = 0; d < g->shape.ranks; d++) g->root[d] = -1;
    for (int32_t d = 0; d < g->shape.ranks; d++) {
        bool has_slots = false;
        for (int32_t i = rank_slot0[d]; i < rank_slot0[d + 1]; i++) {
            has_slots |= slot_expert[i] >= 0;
        }
        if (!has_slots || g->root[d] >= 0) continue;
        g->size[d] = grow_tree(g, n, d) - n;
        n += g->size[d];
    }
    *g->alive = n;
}

/* ---- split ---- */

/* The hop of a search that reached a rank. */
typedef struct hop {
    int32_t seen;       /* the search */
    int32_t from, into; /* slots */
    int32_t rank;       /* before it */
} hop;

typedef struct splitter {
    const hd_split_graph *g;
    int64_t *sum;   /* [ranks] */
    int64_t *goal;  /* [ranks] of a tree, at its root: rows, then the mean of a rank */
    hop *hops;      /* [ranks] */
    int32_t *queue; /* [ranks] */
    int32_t round;  /* the last search */
} splitter;

size_t hd_split_scratch_bytes(hd_split_shape s) {
    return (size_t)s.ranks * (2 * sizeof(int64_t) + sizeof(hop) + sizeof(int32_t));
}

static splitter splitter_in(const hd_split_graph *g, void *scratch) {
    const size_t n = (size_t)g->shape.ranks;
    splitter s = {.g = g, .sum = scratch};
    s.goal = s.sum + n;
    s.hops = (hop *)(void *)(s.goal + n);
    s.queue = (int32_t *)(void *)(s.hops + n);
    memset(scratch, 0, hd_split_scratch_bytes(g->shape));
    return s;
}

/* Equal parts, the first copies a row more. Returns all rows, -1: an expert with rows has no slot. */
static int64_t start(const splitter *s, const int32_t *rows, int32_t *out) {
    const hd_split_graph *g = s->g;
    int64_t total = 0;
    memset(out, 0, (size_t)g->shape.slots * sizeof *out);
    for (int32_t e = 0; e < g->shape.experts; e++) {
        const int32_t begin = g->holder0[e], n = g->holder0[e + 1] - begin;
        assert(rows[e] >= 0);
        total += rows[e];
        if (n == 0 && rows[e] > 0) return -1;
        for (int32_t k = 0; k < n; k++) {
            const hd_split_holder to = g->holder[begin + k];
            out[to.slot] = n == 1 ? rows[e] : rows[e] / n + (k < rows[e] % n);
            s->sum[to.rank] += out[to.slot];
        }
    }
    return total;
}

/* A mean is rounded up, so that each root has at most that of its tree, if no expert has too few rows. */
static void even_out(const splitter *s, int32_t *x) {
    const hd_split_graph *g = s->g;
    int64_t *sum = s->sum, *goal = s->goal;
    for (int32_t d = 0; d < g->shape.ranks; d++) {
        if (g->root[d] >= 0) goal[g->root[d]] += sum[d];
    }
    for (int32_t d = 0; d < g->shape.ranks; d++) {
        if (g->size[d]) goal[d] = (goal[d] + g->size[d] - 1) / g->size[d];
    }
    for (int32_t i = *g->alive - 1; i >= 0; i--) {
        const hd_split_branch b = g->branch[i];
        if (b.parent < 0) continue;
        int64_t n = sum[b.rank] - goal[g->root[b.rank]];
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
static int32_t search(splitter *s, const int32_t *x, int32_t hot, int64_t low) {
    const hd_split_graph *g = s->g;
    const int64_t *sum = s->sum;
    const int32_t round = ++s->round;
    int32_t *queue = s->queue, n = 0, best = -1;
    hop *hops = s->hops;
    int64_t least = sum[hot] - 1; /* what the next best one is below */
    queue[n++] = hot;
    hops[hot].seen = round;
    for (int32_t at = 0; at < n; at++) {
        const int32_t a = queue[at];
        bool more = true;
        for (int32_t k = 1; more; k++) {
            more = false;
            for (int32_t i = g->shared0[a], last = g->shared0[a + 1]; i < last; i++) {
                const hd_split_shared *from = &g->shared[i];
                if (k >= from->end - from->begin) continue;
                more |= k + 1 < from->end - from->begin;
                if (x[from->slot] == 0) continue;
                const hd_split_holder into = holder_behind(g, from, k);
                const int32_t b = into.rank;
                if (hops[b].seen == round) continue;
                hops[b] = (hop){round, from->slot, into.slot, a};
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

static void push(const splitter *s, int32_t *x, int32_t hot, int32_t end, int64_t low) {
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

int64_t hd_split_rows(const hd_split_graph *g, const int32_t *rows, int32_t *out, void *scratch,
                      bool *certificate) {
    splitter s = splitter_in(g, scratch);
    const int64_t total = start(&s, rows, out), alive = *g->alive;
    if (total < 0) return -1;
    const int64_t low = alive ? (total + alive - 1) / alive : 0;
    even_out(&s, out);
    for (;;) {
        int32_t hot = 0;
        for (int32_t d = 1; d < g->shape.ranks; d++) {
            if (s.sum[d] > s.sum[hot]) hot = d;
        }
        const bool even = s.sum[hot] <= low;
        const int32_t end = even ? -1 : search(&s, out, hot, low);
        if (end >= 0) {
            push(&s, out, hot, end, low);
            continue;
        }
        for (int32_t d = 0; d < g->shape.ranks && certificate; d++) {
            certificate[d] = even ? g->root[d] >= 0 : s.hops[d].seen == s.round;
        }
        return s.sum[hot];
    }
}
