/* grammar_vocab_internal.h - the trie of a vocabulary, in preorder. */
#ifndef HD_GRAMMAR_GRAMMAR_VOCAB_INTERNAL_H
#define HD_GRAMMAR_GRAMMAR_VOCAB_INTERNAL_H

#include "grammar/grammar_internal.h"

enum { GRAM_MAX_PIECE = 254 };

typedef struct gram_trie_node {
    uint32_t skip; /* the node after its subtree */
    /* token that ends here, -1: none; others of the same bytes are in next_same */
    int32_t token;
    uint8_t byte;
    uint8_t depth; /* 1: first byte */
} gram_trie_node;

struct hd_grammar_vocab {
    gram_trie_node *nodes; /* [n_nodes] */
    int32_t *next_same;    /* [n_pieces] -1 at the end */
    int32_t *eos;          /* [n_eos] */
    uint8_t *bytes;        /* of token i: bytes_at[i] .. bytes_at[i + 1] */
    uint32_t *bytes_at;    /* [n_pieces + 1] */
    int32_t n_pieces;
    uint32_t n_nodes;
    uint32_t marks; /* which are tokens */
    int32_t n_eos, n_words;
    size_t longest; /* bytes of a token */
};

/* Returns the bytes of a token as a grammar reads it; *n is 0 for a token that no text
 * contains. */
const uint8_t *gram_vocab_bytes(const hd_grammar_vocab *v, int32_t id, size_t *n);

#endif
