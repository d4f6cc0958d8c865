/* fuzz_grammar.c - any bytes as a schema or a pattern: refused with a word and a sentence, or an
 * automaton within its budgets whose masks agree with advance().
 *
 * First byte: the kind and the white space. Then the text, up to a NUL; what follows is fed to
 * the matcher. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/grammar.h"

enum { N_TOKENS = 128 + 8 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "wrong: %s\n", what);
    abort();
}

static hd_grammar_vocab *vocab;
static hd_grammar_masks *masks;
static const uint8_t *pieces[N_TOKENS];
static size_t bytes[N_TOKENS];

static void open_vocab(void) {
    static uint8_t single[128];
    static const char *const more[] = {"\":", "\",\"", "{\"",  "}]",
                                       "12",  "\xc3",  "\xa9", "true"};
    for (size_t i = 0; i < N_TOKENS; i++) {
        if (i < 128) single[i] = (uint8_t)i;
        pieces[i] = i < 128 ? &single[i] : (const uint8_t *)more[i - 128];
        bytes[i] = i < 128 ? 1 : strlen(more[i - 128]);
    }
    const hd_grammar_vocab_args a = {
        .pieces = pieces, .piece_bytes = bytes, .n_pieces = N_TOKENS, .n_rows = N_TOKENS};
    must(hd_grammar_vocab_open(&vocab, &a, NULL) == HD_OK, "the vocabulary");
    must(hd_grammar_masks_open(&masks, vocab, 4 << 20, NULL) == HD_OK, "the cache");
}

static void check_mask(const hd_grammar *g, const hd_grammar_state *s) {
    static hd_grammar_state next;
    uint32_t mask[(N_TOKENS + 31) / 32];
    bool any = false;
    hd_grammar_mask(masks, g, s, mask);
    for (size_t i = 0; i < N_TOKENS; i++) {
        hd_grammar_copy(&next, s);
        bool fine = hd_grammar_advance(g, &next, pieces[i], bytes[i]);
        must(fine == (mask[i / 32] >> (i % 32) & 1), "a mask");
        any |= fine;
    }
    for (int c = 128; c < 256 && !any; c++) {
        hd_grammar_copy(&next, s);
        any = hd_grammar_advance(g, &next, (const uint8_t[]){(uint8_t)c}, 1);
    }
    must(any || hd_grammar_can_end(g, s), "a state without a way out");
}

static void use(const hd_grammar *g, const uint8_t *text, size_t n) {
    static hd_grammar_state s, next;
    must(hd_grammar_n_states(g) <= HD_GRAMMAR_MAX_STATES, "the states");
    must(hd_grammar_bytes(g) <= HD_GRAMMAR_MAX_BYTES, "the bytes");
    hd_grammar_start(g, &s);
    check_mask(g, &s);
    for (size_t i = 0; i < n && i < 40; i++) {
        hd_grammar_copy(&next, &s);
        if (!hd_grammar_advance(g, &next, text + i, 1)) continue;
        hd_grammar_copy(&s, &next);
        check_mask(g, &s);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (n < 1) return 0;
    if (!vocab) open_vocab();
    const uint8_t *text = data + 1, *end = memchr(text, 0, n - 1);
    size_t length = end ? (size_t)(end - text) : n - 1;
    const hd_grammar_args a = {
        .kind = data[0] & 1 ? HD_GRAMMAR_REGEX : HD_GRAMMAR_JSON_SCHEMA,
        .text = (const char *)text,
        .n = length,
        .free_space = data[0] & 2 ? 3 : 0,
    };
    hd_grammar *g;
    hd_err err = {0};
    if (hd_grammar_open(&g, &a, &err) == HD_OK) {
        if (end) use(g, end + 1, n - 2 - length);
        if (!end) use(g, text, length);
        hd_grammar_close(g);
    } else {
        must(strchr(err.msg, ':') != NULL, "a refusal without its word");
    }
    return 0;
}
