/* split.c - the exact split of a batch over copies. Ranks with experts in common form trees, found once
 * for a map. From the leaves up each rank gives its parent what it has above the mean, or takes what
 * it lacks: that is all where experts between them have enough rows. The largest mean of a tree is a bound:
 * no split has a lower largest sum. Then rows are pushed along shortest paths of shared experts, from ranks
 * above the bound to ranks below it. Where no path leads from the former to the latter, the experts with rows at
 * the ranks that they reach live nowhere else, and the mean of these ranks is a higher bound. It ends when no
 * rank is above the bound: no split is better.
 *
 * A search finds all paths at once, the lowest rank before each rank and the first slot that leads from there, and pushes to the
 * ranks where they end in the order of their numbers. None of this depends on an order in which ranks are
 * looked at: ops/split/split_cuda.cu does the same with a thread for each rank. */
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

static bool has_others(const hd_split_graph *g, int32_t expert, int32_t rank) {
    bool any = false;
    for (int32_t k = g->holder0[expert]; k < g->holder0[expert + 1]; k++) {
        any |= g->holder[k].rank != rank;
    }
    return any;
}

static void list_shared(const hd_split_graph *g, const int32_t *slot_expert,
                        const int32_t *rank_slot0) {
    int32_t n = 0;
    g->shared0[0] = 0;
    for (int32_t d = 0; d < g->shape.ranks; d++) {
        for (int32_t i = rank_slot0[d]; i < rank_slot0[d + 1]; i++) {
            const int32_t e = slot_expert[i];
            if (e < 0 || !has_others(g, e, d)) continue;
            g->shared[n++] = (hd_split_shared){i, g->holder0[e], g->holder0[e + 1]};
        }
        g->shared0[d + 1] = n;
    }
}

/* Appends the ranks that share experts with that of a branch, and are in no tree yet. A slot leads to one:
 * from there the expert's next copy is found. */
static int32_t grow(const hd_split_graph *g, int32_t n, int32_t branch) {
    const int32_t a = g->branch[branch].rank;
    for (int32_t i = g->shared0[a]; i < g->shared0[a + 1]; i++) {
        const hd_split_shared theirs = g->shared[i];
        int32_t k = theirs.begin;
        while (k < theirs.end && g->root[g->holder[k].rank] >= 0) k++;
        if (k == theirs.end) continue;
        const hd_split_holder mine = g->holder[k];
        g->root[mine.rank] = g->root[a];
        g->depth[n] = g->depth[branch] + 1;
        g->branch[n++] = (hd_split_branch){mine.rank, a, mine.slot, theirs.slot};
    }
    return n;
}

/* Returns the end of the tree's branches, which begin at n. */
static int32_t grow_tree(const hd_split_graph *g, int32_t n, int32_t root) {
    int32_t at = n;
    g->root[root] = root;
    g->depth[n] = 0;
    g->branch[n++] = (hd_split_branch){root, -1, -1, -1};
    for (; at < n; at++) n = grow(g, n, at);
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

/* How a search reached a rank. */
typedef struct hop {
    int32_t root;       /* where it began */
    int32_t rank;       /* before it; that itself: it began here */
    int32_t from, into; /* slots */
} hop;

typedef struct splitter {
    const hd_split_graph *g;
    bool *certificate;
    int64_t low;   /* no split has a lower largest sum */
    int64_t *sum;  /* [ranks] */
    int64_t *goal; /* [ranks] of a tree, at its root: rows, then the mean of a rank */
    hop *hops;     /* [ranks] */
    /* [mask words]: ranks below the bound; those that a search has seen, reached last, reaches next */
    uint32_t *below, *seen, *last, *next;
    int64_t above; /* rows above the bound that the ranks have with which a search begins */
} splitter;

enum { MASKS = 4 };

static int32_t mask_words(hd_split_shape s) {
    return (s.ranks + 31) / 32;
}

static size_t mask_bytes(hd_split_shape s) {
    return (size_t)mask_words(s) * sizeof(uint32_t);
}

size_t hd_split_scratch_bytes(hd_split_shape s) {
    const size_t bytes =
        (size_t)s.ranks * (2 * sizeof(int64_t) + sizeof(hop)) + MASKS * mask_bytes(s);
    return (bytes + 7) / 8 * 8;
}

static splitter splitter_in(const hd_split_graph *g, void *scratch, bool *certificate) {
    const size_t n = (size_t)g->shape.ranks, words = (size_t)mask_words(g->shape);
    splitter s = {.g = g, .certificate = certificate, .sum = scratch};
    s.goal = s.sum + n;
    s.hops = (hop *)(void *)(s.goal + n);
    s.below = (uint32_t *)(void *)(s.hops + n);
    s.seen = s.below + words;
    s.last = s.seen + words;
    s.next = s.last + words;
    memset(scratch, 0, hd_split_scratch_bytes(g->shape));
    return s;
}

static bool has(const uint32_t *mask, int32_t d) {
    return mask[d / 32] >> d % 32 & 1;
}

static void put(uint32_t *mask, int32_t d, bool in) {
    mask[d / 32] |= (uint32_t)in << d % 32;
}

/* Equal parts, the first copies a row more. False: an expert with rows has no slot. */
static bool start(const splitter *s, const int32_t *rows, int32_t *out) {
    const hd_split_graph *g = s->g;
    memset(out, 0, (size_t)g->shape.slots * sizeof *out);
    for (int32_t e = 0; e < g->shape.experts; e++) {
        const int32_t begin = g->holder0[e], n = g->holder0[e + 1] - begin;
        assert(rows[e] >= 0);
        if (n == 0 && rows[e] > 0) return false;
        for (int32_t k = 0; k < n; k++) {
            const hd_split_holder to = g->holder[begin + k];
            out[to.slot] = n == 1 ? rows[e] : rows[e] / n + (k < rows[e] % n);
            s->sum[to.rank] += out[to.slot];
        }
    }
    return true;
}

/* Means are rounded up, so that each root has at most that of its tree, if no expert has too few rows. */
static void set_goals(splitter *s) {
    const hd_split_graph *g = s->g;
    const int32_t ranks = g->shape.ranks;
    int32_t highest = -1;
    for (int32_t d = 0; d < ranks; d++) {
        if (g->root[d] >= 0) s->goal[g->root[d]] += s->sum[d];
    }
    for (int32_t d = 0; d < ranks; d++) {
        if (g->root[d] != d) continue;
        s->goal[d] = (s->goal[d] + g->size[d] - 1) / g->size[d];
        if (highest < 0 || s->goal[d] > s->low) highest = d;
        s->low = s->goal[highest];
    }
    for (int32_t d = 0; d < ranks && s->certificate; d++) {
        s->certificate[d] = g->root[d] >= 0 && g->root[d] == highest;
    }
}

static void even_out(const splitter *s, int32_t *x) {
    const hd_split_graph *g = s->g;
    int64_t *sum = s->sum;
    for (int32_t i = *g->alive - 1; i >= 0; i--) {
        const hd_split_branch b = g->branch[i];
        if (b.parent < 0) continue;
        int64_t n = sum[b.rank] - s->goal[g->root[b.rank]];
        if (n > x[b.mine]) n = x[b.mine];
        if (-n > x[b.theirs]) n = -x[b.theirs];
        x[b.mine] -= (int32_t)n;
        x[b.theirs] += (int32_t)n;
        sum[b.rank] -= n;
        sum[b.parent] += n;
    }
}

/* A search begins at all ranks above the bound. Returns whether there are any. */
static bool begin_search(splitter *s) {
    const hd_split_graph *g = s->g;
    s->above = 0;
    memset(s->below, 0, MASKS * mask_bytes(g->shape));
    for (int32_t d = 0; d < g->shape.ranks; d++) {
        const int64_t more = s->sum[d] - s->low;
        put(s->below, d, more < 0);
        if (more <= 0) continue;
        s->above += more;
        put(s->seen, d, true);
        put(s->last, d, true);
        s->hops[d] = (hop){d, d, -1, -1};
    }
    return s->above > 0;
}

/* The hop from rank a to b, of which there is one: into b's first slot whose expert has rows on a. */
static hop find_hop(const splitter *s, const int32_t *x, int32_t a, int32_t b) {
    const hd_split_graph *g = s->g;
    for (int32_t i = g->shared0[b];; i++) {
        const hd_split_shared into = g->shared[i];
        for (int32_t k = into.begin; k < into.end; k++) {
            const hd_split_holder from = g->holder[k];
            if (from.rank != a || x[from.slot] == 0) continue;
            return (hop){s->hops[a].root, a, from.slot, into.slot};
        }
    }
}

/* Reaches the ranks that have copies of a's experts with rows on a. */
static void step_from(const splitter *s, const int32_t *x, int32_t a) {
    const hd_split_graph *g = s->g;
    for (int32_t i = g->shared0[a]; i < g->shared0[a + 1]; i++) {
        const hd_split_shared from = g->shared[i];
        if (x[from.slot] == 0) continue;
        for (int32_t k = from.begin; k < from.end; k++) {
            const int32_t b = g->holder[k].rank;
            if (has(s->seen, b)) continue;
            put(s->seen, b, true);
            put(s->next, b, true);
            s->hops[b] = find_hop(s, x, a, b);
        }
    }
}

/* Takes a step from all ranks that were reached last. Returns whether it reaches any. */
static bool step(splitter *s, const int32_t *x, int32_t words) {
    uint32_t *last = s->last, any = 0;
    memset(s->next, 0, (size_t)words * sizeof *s->next);
    for (int32_t v = 0; v < words; v++) {
        for (uint32_t left = last[v]; left; left &= left - 1) {
            step_from(s, x, v * 32 + __builtin_ctz(left));
        }
    }
    s->last = s->next;
    s->next = last;
    for (int32_t v = 0; v < words; v++) any |= s->last[v];
    return any != 0;
}

/* Returns how many rows it pushes along the path to a rank. */
static int64_t push(const splitter *s, int32_t *x, int32_t end) {
    const hop *hops = s->hops;
    const int32_t root = hops[end].root;
    int64_t n = s->sum[root] - s->low;
    if (s->low - s->sum[end] < n) n = s->low - s->sum[end];
    for (int32_t b = end; b != root && n > 0; b = hops[b].rank) {
        if (x[hops[b].from] < n) n = x[hops[b].from];
    }
    if (n == 0) return 0;
    for (int32_t b = end; b != root; b = hops[b].rank) {
        x[hops[b].from] -= (int32_t)n;
        x[hops[b].into] += (int32_t)n;
    }
    s->sum[root] -= n;
    s->sum[end] += n;
    return n;
}

/* Returns whether the search found any rank to push to. */
static bool push_all(const splitter *s, int32_t *x, int32_t words) {
    int64_t above = s->above;
    bool any = false;
    for (int32_t v = 0; v < words && above > 0; v++) {
        for (uint32_t left = s->seen[v] & s->below[v]; left && above > 0; left &= left - 1) {
            above -= push(s, x, v * 32 + __builtin_ctz(left));
            any = true;
        }
    }
    return any;
}

/* The ranks that were seen have experts' rows that no other rank can take. */
static void raise_bound(splitter *s) {
    int64_t all = 0, n = 0;
    for (int32_t d = 0; d < s->g->shape.ranks; d++) {
        const bool seen = has(s->seen, d);
        if (s->certificate) s->certificate[d] = seen;
        if (!seen) continue;
        all += s->sum[d];
        n++;
    }
    assert(n > 0); /* a search begins with ranks */
    s->low = (all + n - 1) / n;
}

int64_t hd_split_rows(const hd_split_graph *g, const int32_t *rows, int32_t *out, void *scratch,
                      bool *certificate) {
    const int32_t words = mask_words(g->shape);
    splitter s = splitter_in(g, scratch, certificate);
    if (!start(&s, rows, out)) return -1;
    set_goals(&s);
    even_out(&s, out);
    while (begin_search(&s)) {
        while (step(&s, out, words)) {
        }
        if (!push_all(&s, out, words)) raise_bound(&s);
    }
    return s.low;
}
