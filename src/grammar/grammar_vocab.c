/* grammar_vocab.c - the trie of the vocabulary over token bytes, in preorder. A walk that
 * drops a branch skips its subtree, otherwise it continues at the next node. The trie
 * excludes control tokens and pieces longer than GRAM_MAX_PIECE. */
#include "grammar/grammar_vocab_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

typedef struct entry {
    const uint8_t *piece;
    size_t n;
    int32_t id;
} entry;

static int compare_entries(const void *a, const void *b) {
    const entry *x = a, *y = b;
    size_t n = x->n < y->n ? x->n : y->n;
    int c = memcmp(x->piece, y->piece, n);
    if (c) return c;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static size_t common(const entry *a, const entry *b) {
    size_t n = 0;
    while (n < a->n && n < b->n && a->piece[n] == b->piece[n]) n++;
    return n;
}

/* Writes the nodes of the sorted entries and returns their number. With nodes NULL it only
 * counts. */
static size_t arrange(hd_grammar_vocab *v, const entry *entries, size_t n,
                      gram_trie_node *nodes) {
    size_t n_nodes = 0, open[GRAM_MAX_PIECE + 1], depth = 0;
    for (size_t i = 0; i < n; i++) {
        const entry *e = &entries[i];
        size_t same = i > 0 ? common(e, &entries[i - 1]) : 0;
        for (; depth > same; depth--) {
            if (nodes) nodes[open[depth]].skip = (uint32_t)n_nodes;
        }
        for (; depth < e->n; n_nodes++) {
            depth++;
            open[depth] = n_nodes;
            if (!nodes) continue;
            nodes[n_nodes] = (gram_trie_node){
                .token = -1, .byte = e->piece[depth - 1], .depth = (uint8_t)depth};
        }
        if (!nodes) continue;
        gram_trie_node *at = &nodes[open[depth]];
        v->next_same[e->id] = at->token;
        at->token = e->id;
    }
    for (; nodes && depth > 0; depth--) nodes[open[depth]].skip = (uint32_t)n_nodes;
    return n_nodes;
}

static bool is_eos(const int32_t *eos, int32_t n_eos, int32_t id) {
    for (int32_t i = 0; i < n_eos; i++) {
        if (eos[i] == id) return true;
    }
    return false;
}

/* Returns the bytes of a text token, 0 for any other. */
static size_t text_bytes(const hd_grammar_vocab_args *a, int32_t id) {
    const size_t n = a->pieces[id] ? a->piece_bytes[id] : 0;
    return n > GRAM_MAX_PIECE || is_eos(a->eos, a->n_eos, id) ? 0 : n;
}

static hd_status keep_bytes(hd_grammar_vocab *v, const hd_grammar_vocab_args *a, hd_err *err) {
    size_t n = 0; /* fits: 2^31 tokens of at most GRAM_MAX_PIECE bytes */
    for (int32_t id = 0; id < a->n_pieces; id++) n += text_bytes(a, id);
    if (n > UINT32_MAX) return HD_FAIL(err, HD_EINVAL, "a vocabulary of too many bytes");
    v->bytes = malloc(n ? n : 1);
    if (!v->bytes) return HD_FAIL(err, HD_ENOMEM, "no memory for %zu bytes of tokens", n);
    uint32_t at = 0;
    for (int32_t id = 0; id < a->n_pieces; id++) {
        const size_t own = text_bytes(a, id);
        if (own) memcpy(v->bytes + at, a->pieces[id], own);
        at += (uint32_t)own;
        v->bytes_at[id + 1] = at;
    }
    return HD_OK;
}

static hd_status build(hd_grammar_vocab *v, const hd_grammar_vocab_args *a, entry *entries,
                       hd_err *err) {
    size_t n = 0;
    for (int32_t id = 0; id < a->n_pieces; id++) {
        size_t bytes = text_bytes(a, id);
        if (bytes == 0) continue;
        if (bytes > v->longest) v->longest = bytes;
        entries[n++] = (entry){a->pieces[id], bytes, id};
    }
    if (n > 0) qsort(entries, n, sizeof *entries, compare_entries);
    size_t n_nodes = arrange(v, entries, n, NULL);
    if (n_nodes >= UINT32_MAX) return HD_FAIL(err, HD_EINVAL, "a vocabulary of too many bytes");
    v->n_nodes = (uint32_t)n_nodes;
    v->nodes = calloc(n_nodes ? n_nodes : 1, sizeof *v->nodes);
    if (!v->nodes) return HD_FAIL(err, HD_ENOMEM, "no memory for a trie of %zu nodes", n_nodes);
    arrange(v, entries, n, v->nodes);
    return HD_OK;
}

hd_status hd_grammar_vocab_open(hd_grammar_vocab **out, const hd_grammar_vocab_args *a,
                                hd_err *err) {
    *out = NULL;
    if (a->n_pieces < 1 || a->n_rows < a->n_pieces || a->n_eos < 0) {
        return HD_FAIL(err, HD_EINVAL, "%d tokens for %d rows of logits", a->n_pieces,
                       a->n_rows);
    }
    for (int32_t i = 0; i < a->n_eos; i++) {
        if (a->eos[i] >= 0 && a->eos[i] < a->n_rows) continue;
        return HD_FAIL(err, HD_EINVAL, "end-of-sequence token %d, not below %d", a->eos[i],
                       a->n_rows);
    }
    size_t n = (size_t)a->n_pieces;
    hd_grammar_vocab *v = calloc(1, sizeof *v);
    entry *entries = calloc(n, sizeof *entries);
    if (v) {
        v->next_same = calloc(n, sizeof *v->next_same);
        v->eos = calloc((size_t)a->n_eos + 1, sizeof *v->eos);
        v->bytes_at = calloc(n + 1, sizeof *v->bytes_at);
        v->n_pieces = a->n_pieces;
        v->n_eos = a->n_eos;
        v->n_words = (a->n_rows - 1) / 32 + 1;
    }
    hd_status status = HD_OK;
    if (!v || !entries || !v->next_same || !v->eos || !v->bytes_at) {
        status = HD_FAIL(err, HD_ENOMEM, "no memory for a vocabulary of %zu tokens", n);
    } else {
        if (a->n_eos) memcpy(v->eos, a->eos, (size_t)a->n_eos * sizeof *v->eos);
        status = keep_bytes(v, a, err);
        if (status == HD_OK) status = build(v, a, entries, err);
    }
    free(entries);
    if (status == HD_OK) {
        *out = v;
    } else {
        hd_grammar_vocab_close(v);
    }
    return status;
}

static bool has_mark(const uint8_t *piece, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (piece[i] >= HD_GRAMMAR_MARK) return true;
    }
    return false;
}

/* Replaces markers that are tokens by their bytes; returns which they are. */
static uint32_t find_marks(const hd_tokenizer *t, const uint8_t **pieces, size_t *bytes) {
    static const uint8_t byte[GRAM_N_MARKS] = {HD_GRAMMAR_MARK,     HD_GRAMMAR_MARK + 1,
                                               HD_GRAMMAR_MARK + 2, HD_GRAMMAR_MARK + 3,
                                               HD_GRAMMAR_MARK + 4, HD_GRAMMAR_MARK + 5};
    uint32_t found = 0;
    for (uint32_t i = 0; i < GRAM_N_MARKS; i++) {
        const int32_t id = hd_tokenizer_find(t, gram_mark_text[i], strlen(gram_mark_text[i]));
        if (id < 0 || !hd_tokenizer_is_added(t, id)) continue;
        pieces[id] = &byte[i];
        bytes[id] = 1;
        found |= 1u << i;
    }
    return found;
}

hd_status hd_grammar_vocab_open_tokenizer(hd_grammar_vocab **out, const hd_tokenizer *t,
                                          int32_t n_rows, const int32_t *eos, int32_t n_eos,
                                          hd_err *err) {
    int32_t n = hd_tokenizer_vocab_size(t);
    const uint8_t **pieces = calloc((size_t)n + 1, sizeof *pieces);
    size_t *bytes = calloc((size_t)n + 1, sizeof *bytes);
    hd_status status = HD_OK;
    *out = NULL;
    if (!pieces || !bytes) {
        status = HD_FAIL(err, HD_ENOMEM, "no memory for a vocabulary of %d tokens", n);
    } else {
        for (int32_t id = 0; id < n; id++) {
            if (hd_tokenizer_is_added(t, id)) continue;
            const uint8_t *piece = hd_tokenizer_piece(t, id, &bytes[id]);
            if (!has_mark(piece, bytes[id])) pieces[id] = piece;
        }
        const uint32_t found = find_marks(t, pieces, bytes);
        const hd_grammar_vocab_args a = {.pieces = pieces,
                                         .piece_bytes = bytes,
                                         .n_pieces = n,
                                         .n_rows = n_rows,
                                         .eos = eos,
                                         .n_eos = n_eos};
        status = hd_grammar_vocab_open(out, &a, err);
        if (status == HD_OK) (*out)->marks = found;
    }
    free(pieces);
    free(bytes);
    return status;
}

void hd_grammar_vocab_close(hd_grammar_vocab *v) {
    if (!v) return;
    free(v->nodes);
    free(v->next_same);
    free(v->eos);
    free(v->bytes);
    free(v->bytes_at);
    free(v);
}

const uint8_t *gram_vocab_bytes(const hd_grammar_vocab *v, int32_t id, size_t *n) {
    const bool known = id >= 0 && id < v->n_pieces;
    const uint32_t at = known ? v->bytes_at[id] : 0;
    *n = known ? v->bytes_at[id + 1] - at : 0;
    return v->bytes + at;
}

bool hd_grammar_advance_token(const hd_grammar_vocab *v, const hd_grammar *g,
                              hd_grammar_state *s, int32_t id) {
    if (is_eos(v->eos, v->n_eos, id)) return true;
    size_t n;
    const uint8_t *bytes = gram_vocab_bytes(v, id, &n);
    if (n > 0) return hd_grammar_advance(g, s, bytes, n);
    s->n_threads = 0;
    return false;
}

uint32_t hd_grammar_vocab_marks(const hd_grammar_vocab *v) {
    return v->marks;
}

int32_t hd_grammar_vocab_words(const hd_grammar_vocab *v) {
    return v->n_words;
}
