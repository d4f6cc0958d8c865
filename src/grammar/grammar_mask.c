/* grammar_mask.c - computes token masks and caches intermediate results. A mask is computed
 * by walking the trie of tokens with the automaton.
 *
 * Two kinds of result are cached. An inner result depends on an automaton state alone: the
 * tokens that stay inside its rule, and the trie places (exits) where the rule may end and
 * its caller decides. A final mask depends on a matcher state: the inner result plus walks
 * from its exits. It is valid for all matcher states that agree in what the walk read: the
 * guard. Counts in a guard are limited to the length of the longest token, because larger
 * ones make no difference.
 *
 * A third kind serves counted loops (such as the characters of a string with maxLength):
 * between two repetitions it stores how many more repetitions each token needs. This avoids
 * a walk per count. */
#include "grammar/grammar_vocab_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum {
    N_LOOPS = 8,
    NEVER = 255,      /* in a loop's needs: the token does not match */
    MAX_EXTRA = 2048, /* words of exits or of a guard in a slot */
    ALL = -1,         /* an exit: the root of the trie */
    STOP = -1,        /* in a guard: nothing below was read */
    BOTTOM = -2,      /* in a guard: the stack ends here */
};
#define NO_SLOT UINT32_MAX

typedef struct slot {
    uint64_t grammar; /* id, 0: empty */
    uint32_t hash, next;
    uint32_t newer, older; /* by use */
    bool inner;
    bool usable; /* inner: the exits fit and no limit was met */
    /* final: the depth limit was reached, so the mask is valid for one depth only */
    bool limited;
    uint32_t depth, deepest; /* depth at which it was computed; height it reached */
    uint32_t state;          /* inner: of the automaton */
    uint32_t most, nested;   /* inner: threads at once; exits on one path */
    uint32_t n_extra;
    uint32_t *mask; /* [n_words] */
    int32_t *extra; /* [MAX_EXTRA] */
} slot;

typedef struct frame { /* of the walk, by the depth in the trie */
    hd_grammar_thread threads[HD_GRAMMAR_MAX_THREADS];
    uint32_t n_threads, n_nodes;
    uint32_t nested; /* exits on the path to it, including itself */
    int32_t place;
    bool noted; /* recorded as an exit */
} frame;

/* Repetitions that tokens need in an open loop, from a state between two repetitions. */
typedef struct loop {
    slot walk; /* extra: place and count of each exit */
    uint32_t site;
    uint8_t *needs; /* [32 * n_words] repetitions, or NEVER */
    uint64_t used;
} loop;

struct hd_grammar_masks {
    const hd_grammar_vocab *vocab;
    slot *slots;
    uint32_t *buckets;
    uint32_t *words;
    int32_t *extras;
    uint32_t n_slots, bucket_mask, newest, oldest;
    frame *frames;          /* [longest + 1] */
    hd_grammar_node *nodes; /* [cap_nodes] */
    uint32_t cap_nodes;
    uint8_t *looked; /* [HD_GRAMMAR_MAX_NODES] */
    loop loops[N_LOOPS];
    uint8_t *needs;
    int32_t *loop_exits;
    uint32_t *alive; /* bits: trie places that a walk from an exit reached */
    bool overlap;    /* two walks reached the same place */
    uint64_t tick;
    hd_grammar_masks_stats stats;
};

hd_status hd_grammar_masks_open(hd_grammar_masks **out, const hd_grammar_vocab *v,
                                size_t max_bytes, hd_err *err) {
    *out = NULL;
    size_t words = (size_t)v->n_words;
    size_t one = sizeof(slot) + 3 * sizeof(uint32_t) + (words + MAX_EXTRA) * 4;
    size_t cap_nodes = HD_GRAMMAR_MAX_NODES + (v->longest + 1) * HD_GRAMMAR_STEP_NODES;
    size_t fixed = sizeof(hd_grammar_masks) + cap_nodes * sizeof(hd_grammar_node) +
                   (v->longest + 1) * sizeof(frame) + HD_GRAMMAR_MAX_NODES +
                   N_LOOPS * (words * 32 + MAX_EXTRA * 4) + v->n_nodes / 8 + 4;
    size_t n = max_bytes > fixed ? (max_bytes - fixed) / one : 0;
    if (n > 1 << 20) n = 1 << 20;
    if (n < 4) {
        return HD_FAIL(err, HD_EINVAL,
                       "a mask cache of %zu bytes, less than the %zu for 4 masks", max_bytes,
                       fixed + 4 * one);
    }
    hd_grammar_masks *m = calloc(1, sizeof *m);
    if (!m) return HD_FAIL(err, HD_ENOMEM, "no memory for a mask cache");
    size_t n_buckets = 4;
    while (n_buckets * 2 <= n) n_buckets *= 2;
    m->vocab = v;
    m->n_slots = (uint32_t)n;
    m->bucket_mask = (uint32_t)n_buckets - 1;
    m->cap_nodes = (uint32_t)cap_nodes;
    m->slots = calloc(n, sizeof *m->slots);
    m->buckets = malloc(n_buckets * sizeof *m->buckets);
    m->words = calloc(n * words, sizeof *m->words);
    m->extras = calloc(n * MAX_EXTRA, sizeof *m->extras);
    m->frames = calloc(v->longest + 1, sizeof *m->frames);
    m->nodes = calloc(cap_nodes, sizeof *m->nodes);
    m->looked = calloc(HD_GRAMMAR_MAX_NODES, 1);
    m->needs = malloc(N_LOOPS * words * 32);
    m->alive = calloc(v->n_nodes / 32 + 1, sizeof *m->alive);
    m->loop_exits = calloc((size_t)N_LOOPS * MAX_EXTRA, sizeof *m->loop_exits);
    if (!m->slots || !m->buckets || !m->words || !m->extras || !m->frames || !m->nodes ||
        !m->looked || !m->needs || !m->loop_exits || !m->alive) {
        hd_grammar_masks_close(m);
        return HD_FAIL(err, HD_ENOMEM, "no memory for a mask cache of %zu bytes", max_bytes);
    }
    memset(m->buckets, 0xff, n_buckets * sizeof *m->buckets);
    for (uint32_t i = 0; i < m->n_slots; i++) {
        m->slots[i] = (slot){.next = NO_SLOT,
                             .newer = i > 0 ? i - 1 : NO_SLOT,
                             .older = i + 1 < m->n_slots ? i + 1 : NO_SLOT,
                             .mask = m->words + i * words,
                             .extra = m->extras + (size_t)i * MAX_EXTRA};
    }
    for (size_t i = 0; i < N_LOOPS; i++) {
        m->loops[i].needs = m->needs + i * words * 32;
        m->loops[i].walk.extra = m->loop_exits + i * MAX_EXTRA;
    }
    m->newest = 0;
    m->oldest = m->n_slots - 1;
    *out = m;
    return HD_OK;
}

void hd_grammar_masks_close(hd_grammar_masks *m) {
    if (!m) return;
    free(m->slots);
    free(m->buckets);
    free(m->words);
    free(m->extras);
    free(m->frames);
    free(m->nodes);
    free(m->looked);
    free(m->needs);
    free(m->loop_exits);
    free(m->alive);
    free(m);
}

hd_grammar_masks_stats hd_grammar_masks_get_stats(const hd_grammar_masks *m) {
    return m->stats;
}

static void touch(hd_grammar_masks *m, uint32_t i) {
    slot *s = &m->slots[i];
    if (m->newest == i) return;
    m->slots[s->newer].older = s->older;
    if (s->older != NO_SLOT) {
        m->slots[s->older].newer = s->newer;
    } else {
        m->oldest = s->newer;
    }
    s->newer = NO_SLOT;
    s->older = m->newest;
    m->slots[m->newest].newer = i;
    m->newest = i;
}

static void forget(hd_grammar_masks *m, slot *s) {
    uint32_t *link = &m->buckets[s->hash & m->bucket_mask];
    uint32_t i = (uint32_t)(s - m->slots);
    while (*link != i) link = &m->slots[*link].next;
    *link = s->next;
    s->grammar = 0;
}

/* Evicts and returns the least recently used slot. It can be found only after keep(). */
static slot *take(hd_grammar_masks *m) {
    uint32_t i = m->oldest;
    slot *s = &m->slots[i];
    if (s->grammar) {
        forget(m, s);
        m->stats.evictions++;
    }
    touch(m, i);
    memset(s->mask, 0, (size_t)m->vocab->n_words * sizeof *s->mask);
    s->n_extra = s->nested = 0;
    return s;
}

static void keep(hd_grammar_masks *m, slot *s, const hd_grammar *g, uint32_t hash) {
    s->grammar = g->id;
    s->hash = hash;
    s->next = m->buckets[hash & m->bucket_mask];
    m->buckets[hash & m->bucket_mask] = (uint32_t)(s - m->slots);
}

/* Returns the fewest repetitions of the open loop among a frame's threads. */
static uint32_t fewest(const gram_run *r, const frame *f) {
    uint32_t least = NEVER;
    for (uint32_t t = 0; t < f->n_threads; t++) {
        uint32_t node = f->threads[t].node;
        while (r->nodes[node].parent != r->barrier) node = r->nodes[node].parent;
        if (r->nodes[node].count < least) least = r->nodes[node].count;
    }
    return least;
}

static void allow(hd_grammar_masks *m, const gram_run *r, const frame *f, slot *s,
                  int32_t token) {
    const hd_grammar_vocab *v = m->vocab;
    if (token < 0) return;
    uint8_t *needs = r->open_loop ? ((loop *)(void *)s)->needs : NULL;
    uint8_t need = needs ? (uint8_t)fewest(r, f) : 0;
    for (; token >= 0; token = v->next_same[token]) {
        if (needs) {
            needs[token] = need;
        } else {
            s->mask[token >> 5] |= 1u << (token & 31);
        }
    }
}

static void note_exit(const gram_run *r, slot *s, int32_t place) {
    if (s->n_extra + 2 > MAX_EXTRA) {
        s->usable = false;
        return;
    }
    s->extra[s->n_extra++] = place;
    if (r->open_loop) s->extra[s->n_extra++] = (int32_t)r->hit_count;
}

/* Walks the trie below a place from m->frames[0] and allows the tokens that match. s
 * receives the exits if the run has a barrier. */
static void walk(hd_grammar_masks *m, gram_run *r, int32_t place, slot *s) {
    const hd_grammar_vocab *v = m->vocab;
    uint32_t i = place == ALL ? 0 : (uint32_t)place + 1;
    uint32_t end = place == ALL ? v->n_nodes : v->nodes[place].skip;
    uint32_t base = place == ALL ? 0 : v->nodes[place].depth;
    m->frames[0].place = place;
    m->frames[0].noted = false;
    m->frames[0].nested = 0;
    while (i < end) {
        const gram_trie_node *node = &v->nodes[i];
        frame *to = &m->frames[node->depth - base], *from = to - 1;
        r->n_nodes = from->n_nodes;
        r->hit = false;
        to->n_threads = gram_step(r, from->threads, from->n_threads, node->byte, to->threads);
        if (r->hit && !from->noted) {
            from->noted = true;
            from->nested++;
            if (from->nested > s->nested) s->nested = from->nested;
            note_exit(r, s, from->place);
        }
        if (to->n_threads == 0) {
            i = node->skip;
            continue;
        }
        to->n_nodes = r->n_nodes;
        to->nested = from->nested;
        to->place = (int32_t)i;
        to->noted = false;
        allow(m, r, to, s, node->token);
        if (r->barrier == UINT32_MAX) {
            uint32_t bit = 1u << (i & 31);
            m->overlap |= (m->alive[i >> 5] & bit) != 0;
            m->alive[i >> 5] |= bit;
        }
        i++;
    }
}

static void start_walk(hd_grammar_masks *m, const hd_grammar_thread *threads, uint32_t n,
                       uint32_t n_nodes) {
    memcpy(m->frames[0].threads, threads, n * sizeof *threads);
    m->frames[0].n_threads = n;
    m->frames[0].n_nodes = n_nodes;
}

static uint32_t mix(uint32_t h, uint32_t v) {
    h = (h ^ v) * 0x9e3779b1u;
    return h ^ h >> 15;
}

/* Returns the inner result of a state: node 1 stands for any caller. */
static const slot *find_inner(hd_grammar_masks *m, const hd_grammar *g, uint32_t state) {
    uint32_t hash = mix(mix(1, (uint32_t)g->id), state);
    uint32_t i = m->buckets[hash & m->bucket_mask];
    for (; i != NO_SLOT; i = m->slots[i].next) {
        const slot *s = &m->slots[i];
        if (s->grammar != g->id || !s->inner || s->state != state) continue;
        touch(m, i);
        return s;
    }
    slot *s = take(m);
    s->inner = s->usable = true;
    s->state = state;
    gram_run r = {.g = g, .nodes = m->nodes, .cap = m->cap_nodes, .barrier = 1};
    m->nodes[0] = m->nodes[1] = (hd_grammar_node){0};
    start_walk(m, &(hd_grammar_thread){state, 1}, 1, 2);
    walk(m, &r, ALL, s);
    if (r.limited || r.dropped) s->usable = false;
    s->deepest = r.deepest;
    s->most = r.most;
    keep(m, s, g, hash);
    return s;
}

/* Returns the repetitions that tokens need in the loop of a site, between two repetitions.
 * Node 1 stands for any caller, node 2 for the loop. */
static const loop *find_loop(hd_grammar_masks *m, const hd_grammar *g, uint32_t state,
                             uint32_t site) {
    loop *oldest = &m->loops[0];
    m->tick++;
    for (size_t i = 0; i < N_LOOPS; i++) {
        loop *l = &m->loops[i];
        if (l->used < oldest->used) oldest = l;
        if (l->walk.grammar != g->id || l->walk.state != state || l->site != site) continue;
        l->used = m->tick;
        return l;
    }
    slot *s = &oldest->walk;
    *s = (slot){.grammar = g->id, .state = state, .usable = true, .extra = s->extra};
    oldest->site = site;
    oldest->used = m->tick;
    memset(oldest->needs, NEVER, (size_t)m->vocab->n_words * 32);
    gram_run r = {
        .g = g, .nodes = m->nodes, .cap = m->cap_nodes, .barrier = 1, .open_loop = true};
    m->nodes[0] = m->nodes[1] = (hd_grammar_node){0};
    m->nodes[2] = (hd_grammar_node){.parent = 1, .site = (uint16_t)site, .depth = 1};
    start_walk(m, &(hd_grammar_thread){state, 2}, 1, 3);
    walk(m, &r, ALL, s);
    if (r.limited || r.dropped || r.ambiguous) s->usable = false;
    s->deepest = r.deepest;
    s->most = r.most;
    return oldest;
}

/* Limits a count to what can matter to a token: repetitions up to the minimum, and to the
 * maximum. */
static int32_t clip(const hd_grammar_vocab *v, uint32_t left) {
    return left < v->longest ? (int32_t)left : (int32_t)v->longest;
}

static int32_t until_min(const hd_grammar_vocab *v, const gram_site *s, uint32_t count) {
    return clip(v, s->min > count ? s->min - count : 0);
}

static int32_t until_max(const hd_grammar_vocab *v, const gram_site *s, uint32_t count) {
    return clip(v, s->max == GRAM_NO_MAX ? GRAM_NO_MAX : s->max - count);
}

/* Records what the walk read; returns false if it does not fit. */
static bool write_guard(const hd_grammar_masks *m, const hd_grammar *g,
                        const hd_grammar_state *at, slot *s) {
    const hd_grammar_vocab *v = m->vocab;
    uint32_t n = 0;
    for (uint32_t t = 0; t < at->n_threads; t++) {
        if (n + 2 > MAX_EXTRA) return false;
        s->extra[n++] = (int32_t)at->threads[t].state;
        uint32_t node = at->threads[t].node;
        for (; node != 0 && m->looked[node]; node = at->nodes[node].parent) {
            const hd_grammar_node *x = &at->nodes[node];
            if (n + 4 > MAX_EXTRA) return false;
            s->extra[n++] = x->site;
            s->extra[n++] = until_min(v, &g->sites[x->site], x->count);
            s->extra[n++] = until_max(v, &g->sites[x->site], x->count);
        }
        s->extra[n++] = node == 0 && m->looked[0] ? BOTTOM : STOP;
    }
    s->n_extra = n;
    return true;
}

static bool guard_holds(const hd_grammar_masks *m, const hd_grammar *g,
                        const hd_grammar_state *at, const slot *s) {
    const hd_grammar_vocab *v = m->vocab;
    const int32_t *guard = s->extra;
    for (uint32_t t = 0; t < at->n_threads; t++) {
        if (*guard++ != (int32_t)at->threads[t].state) return false;
        uint32_t node = at->threads[t].node;
        for (; *guard >= 0; guard += 3) {
            const hd_grammar_node *x = &at->nodes[node];
            if (node == 0 || guard[0] != x->site ||
                guard[1] != until_min(v, &g->sites[x->site], x->count) ||
                guard[2] != until_max(v, &g->sites[x->site], x->count)) {
                return false;
            }
            node = x->parent;
        }
        if (*guard++ == BOTTOM && node != 0) return false;
    }
    return true;
}

typedef struct depths {
    uint32_t lowest, highest;
} depths;

static depths find_depths(const hd_grammar_state *at) {
    depths d = {UINT32_MAX, 0};
    for (uint32_t t = 0; t < at->n_threads; t++) {
        uint32_t depth = at->nodes[at->threads[t].node].depth;
        if (depth < d.lowest) d.lowest = depth;
        if (depth > d.highest) d.highest = depth;
    }
    return d;
}

static const slot *find_final(hd_grammar_masks *m, const hd_grammar *g,
                              const hd_grammar_state *at, uint32_t hash) {
    const depths d = find_depths(at);
    uint32_t i = m->buckets[hash & m->bucket_mask];
    for (; i != NO_SLOT; i = m->slots[i].next) {
        const slot *s = &m->slots[i];
        if (s->grammar != g->id || s->inner || s->hash != hash || s->state != at->n_threads) {
            continue;
        }
        bool level = s->limited ? at->n_threads == 1 && s->depth == d.highest
                                : d.highest + s->deepest <= HD_GRAMMAR_MAX_DEPTH;
        if (!level || !guard_holds(m, g, at, s)) continue;
        touch(m, i);
        return s;
    }
    return NULL;
}

/* Whether a single walk would have stayed within the thread limit, so that the parts can be
 * combined. */
static bool stayed_small(const hd_grammar_masks *m, const gram_run *r, const slot *inner) {
    uint32_t at_once = m->overlap ? inner->nested : 1;
    return !r->dropped && inner->most + at_once * r->most <= HD_GRAMMAR_MAX_THREADS;
}

/* Allows the tokens that need at most left more repetitions. */
static void allow_within(const hd_grammar_masks *m, const uint8_t *needs, uint32_t left,
                         uint32_t *mask) {
    const uint8_t most = left < NEVER - 1 ? (uint8_t)left : NEVER - 1;
    for (int32_t w = 0; w < m->vocab->n_words; w++, needs += 32) {
        uint32_t bits = 0;
        for (uint32_t k = 0; k < 32; k++) bits |= (uint32_t)(needs[k] <= most) << k;
        mask[w] = bits;
    }
}

/* Between two repetitions: combines the loop's needs with walks from where it may be left. */
static bool compose_loop(hd_grammar_masks *m, gram_run *r, const hd_grammar_state *at,
                         slot *s) {
    const hd_grammar_thread thread = at->threads[0];
    const hd_grammar_node node = at->nodes[thread.node];
    const gram_site *site = &r->g->sites[node.site];
    const loop *l = find_loop(m, r->g, thread.state, node.site);
    memcpy(m->nodes, at->nodes, at->n_nodes * sizeof *m->nodes); /* the walk overwrote them */
    uint32_t reachable = node.depth - 1u + l->walk.deepest;
    if (!l->walk.usable || reachable > HD_GRAMMAR_MAX_DEPTH) return false;
    if (reachable > r->deepest) r->deepest = reachable;
    m->looked[thread.node] = 1;
    allow_within(m, l->needs, site->max == GRAM_NO_MAX ? GRAM_NO_MAX : site->max - node.count,
                 s->mask);
    for (uint32_t i = 0; i < l->walk.n_extra; i += 2) {
        uint32_t count = node.count + (uint32_t)l->walk.extra[i + 1];
        if (count < site->min || count > site->max) continue;
        start_walk(m, &(hd_grammar_thread){site->ret, node.parent}, 1, at->n_nodes);
        walk(m, r, l->walk.extra[i], s);
    }
    return stayed_small(m, r, &l->walk);
}

static bool between_repetitions(const hd_grammar *g, const hd_grammar_state *at) {
    uint32_t node = at->threads[0].node;
    const gram_site *site = node ? &g->sites[at->nodes[node].site] : NULL;
    return site && site->max > 1 && g->states[at->threads[0].state].accept;
}

/* Combines the inner result with walks from its exits; returns false if only a complete walk
 * is exact. */
static bool compose(hd_grammar_masks *m, gram_run *r, const hd_grammar_state *at, slot *s) {
    if (at->n_threads != 1) return false;
    if (between_repetitions(r->g, at)) return compose_loop(m, r, at, s);
    uint32_t node = at->threads[0].node;
    const slot *inner = find_inner(m, r->g, at->threads[0].state);
    memcpy(m->nodes, at->nodes, at->n_nodes * sizeof *m->nodes); /* the walk overwrote them */
    uint32_t reachable = at->nodes[node].depth + inner->deepest;
    if (!inner->usable || reachable > HD_GRAMMAR_MAX_DEPTH) return false;
    memcpy(s->mask, inner->mask, (size_t)m->vocab->n_words * sizeof *s->mask);
    if (reachable > r->deepest) r->deepest = reachable;
    for (uint32_t i = 0; i < inner->n_extra; i++) {
        start_walk(m, &(hd_grammar_thread){0, node}, 1, at->n_nodes); /* state 0 only returns */
        walk(m, r, inner->extra[i], s);
    }
    return stayed_small(m, r, inner);
}

static const slot *make_final(hd_grammar_masks *m, const hd_grammar *g,
                              const hd_grammar_state *at, uint32_t hash) {
    const depths d = find_depths(at);
    slot *s = take(m);
    gram_run r = {.g = g,
                  .nodes = m->nodes,
                  .cap = m->cap_nodes,
                  .barrier = UINT32_MAX,
                  .n_base = at->n_nodes,
                  .looked = m->looked,
                  .deepest = d.lowest};
    memset(m->looked, 0, at->n_nodes);
    memset(m->alive, 0, (m->vocab->n_nodes / 32 + 1) * sizeof *m->alive);
    m->overlap = false;
    if (!compose(m, &r, at, s)) {
        memset(s->mask, 0, (size_t)m->vocab->n_words * sizeof *s->mask);
        memcpy(m->nodes, at->nodes, at->n_nodes * sizeof *m->nodes);
        r.dropped = false;
        start_walk(m, at->threads, at->n_threads, at->n_nodes);
        walk(m, &r, ALL, s);
    }
    s->inner = false;
    s->limited = r.limited;
    s->state = at->n_threads;
    s->depth = d.highest;
    s->deepest = r.deepest - d.lowest;
    bool once = r.dropped || (r.limited && at->n_threads > 1);
    if (!once && write_guard(m, g, at, s)) keep(m, s, g, hash);
    return s;
}

void hd_grammar_mask(hd_grammar_masks *m, const hd_grammar *g, const hd_grammar_state *s,
                     uint32_t *mask) {
    const hd_grammar_vocab *v = m->vocab;
    if (s->n_threads == 0) {
        memset(mask, 0, (size_t)v->n_words * sizeof *mask);
        return;
    }
    uint32_t hash = mix(2, (uint32_t)g->id);
    for (uint32_t t = 0; t < s->n_threads; t++) hash = mix(hash, s->threads[t].state);
    const slot *found = find_final(m, g, s, hash);
    if (found) {
        m->stats.hits++;
    } else {
        m->stats.misses++;
        found = make_final(m, g, s, hash);
    }
    memcpy(mask, found->mask, (size_t)v->n_words * sizeof *mask);
    if (!hd_grammar_can_end(g, s)) return;
    for (int32_t i = 0; i < v->n_eos; i++) mask[v->eos[i] >> 5] |= 1u << (v->eos[i] & 31);
}
