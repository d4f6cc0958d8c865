/* grammar_automaton_internal.h - the automaton of a grammar, and matching with it. Each rule
 * is deterministic; calls of rules stay calls, so recursion needs a stack and not more
 * states. */
#ifndef HD_GRAMMAR_GRAMMAR_AUTOMATON_INTERNAL_H
#define HD_GRAMMAR_GRAMMAR_AUTOMATON_INTERNAL_H

#include "grammar/grammar.h"

enum {
    GRAM_MAX_SITES = 65535,
    GRAM_ENDLESS_HEIGHT = 255,
};
#define GRAM_NO_MAX UINT32_MAX
#define GRAM_NO_END UINT32_MAX

typedef struct gram_state {
    uint32_t arcs_at, sites_at; /* where its own begin */
    uint16_t n_arcs, n_sites;
    uint8_t accept;
    uint8_t height; /* frames needed on the shortest way to the end of the rule */
} gram_state;

typedef struct gram_arc {
    uint32_t to;
    uint8_t lo, hi;
} gram_arc;

/* A call: body, from min to max times, then on at ret. */
typedef struct gram_site {
    uint32_t body, ret; /* states */
    uint32_t min, max;
    uint32_t rule;
    bool tail; /* nothing follows: the body returns to this rule's caller */
} gram_site;

typedef struct gram_bytes {
    uint64_t bits[4];
} gram_bytes;

static inline bool gram_bytes_has(const gram_bytes *s, uint8_t b) {
    return s->bits[b >> 6] >> (b & 63) & 1;
}

/* A marker that opens calls, and its text at the start of the grammar. */
typedef struct gram_opening {
    uint8_t lead[32], marker[32];
    uint8_t n_lead, n_marker;
} gram_opening;

struct hd_grammar {
    uint64_t id;        /* unique in the process, for the mask cache */
    gram_state *states; /* [n_states] 0: accepts and has no arcs */
    gram_arc *arcs;     /* sorted by lo within a state */
    gram_site *sites;
    gram_bytes *first; /* [n_rules] the bytes that a rule may begin with */
    uint32_t
        *longest; /* [n_states] characters to the end of the rule; GRAM_NO_END: any number */
    gram_bytes costly; /* bytes that reduce what may follow by more than one character */
    uint32_t n_states, n_arcs, n_sites, n_rules;
    uint32_t start;
    size_t bytes;
    gram_opening openings[HD_GRAMMAR_OPENINGS]; /* [n_openings] */
    uint32_t n_openings;
};

/* Matching. */

/* One walk: nodes that are pushed and popped, and what was read on the way. */
typedef struct gram_run {
    const hd_grammar *g;
    hd_grammar_node *nodes;
    uint32_t n_nodes, cap;
    uint32_t barrier;   /* a node that must not be popped; UINT32_MAX: none */
    bool open_loop;     /* frames on the barrier repeat without bounds and count from 0 */
    bool hit;           /* the barrier was met, or an open loop could be left */
    bool ambiguous;     /* an open loop could be left with two counts */
    bool limited;       /* the depth limit removed threads */
    bool dropped;       /* another limit removed threads */
    uint32_t hit_count; /* of the open loop that could be left */
    uint32_t deepest;   /* depth and height reached */
    uint32_t n_base;    /* nodes below belong to the text */
    uint8_t *looked;    /* [n_base] popped in this walk; or NULL */
    uint32_t most;      /* most threads at one time */
} gram_run;

/* Advances in[n] by a byte; returns the number of threads in out, at most
 * HD_GRAMMAR_MAX_THREADS. */
uint32_t gram_step(gram_run *r, const hd_grammar_thread *in, uint32_t n, uint8_t byte,
                   hd_grammar_thread *out);

#endif
