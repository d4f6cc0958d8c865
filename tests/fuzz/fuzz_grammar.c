/* fuzz_grammar.c - any bytes as a schema, a pattern or the parameters of a strict tool: refused
 * with a word and a sentence, or an automaton within its budgets whose masks agree with
 * advance().
 *
 * First byte: the kind, the white space, the format of calls. Then the text, up to a NUL; what follows is fed to
 * the matcher. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "grammar/grammar_internal.h"

enum { N_MARKS = 6, N_MORE = 12, N_TOKENS = 128 + N_MORE + N_MARKS };

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
    static const uint8_t marks[N_MARKS] = {0xf8, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd};
    static const char *const more[N_MORE] = {"\":",  "\",\"", "{\"", "}]",    "12", "\xc3",
                                             "\xa9", "true",  "</",  "\">\n", "｜", "｜DSML｜"};
    for (size_t i = 0; i < N_TOKENS; i++) {
        const size_t word = i - 128, mark = word - N_MORE;
        if (i < 128) single[i] = (uint8_t)i;
        pieces[i] = i < 128         ? &single[i]
                    : word < N_MORE ? (const uint8_t *)more[word]
                                    : &marks[mark];
        bytes[i] = i < 128 || word >= N_MORE ? 1 : strlen(more[word]);
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
    must(g->n_states <= HD_GRAMMAR_MAX_STATES, "the states");
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

/* Two tools, of which the first has these parameters. */
static char *offer(const uint8_t *parameters, size_t n, bool strict, size_t *out_n) {
    const char *head = strict ? "[{\"name\":\"a\",\"strict\":true,\"parameters\":"
                              : "[{\"name\":\"a\",\"parameters\":",
               *tail = "},{\"name\":\"ab\"}]";
    const size_t before = strlen(head), after = strlen(tail);
    char *text = malloc(before + n + after);
    must(text != NULL, "memory");
    memcpy(text, head, before);
    memcpy(text + before, parameters, n);
    memcpy(text + before + n, tail, after);
    *out_n = before + n + after;
    return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    if (n < 1) return 0;
    if (!vocab) open_vocab();
    const uint8_t *text = data + 1, *end = memchr(text, 0, n - 1);
    size_t length = end ? (size_t)(end - text) : n - 1;
    hd_grammar_args a = {
        .kind = data[0] & 1   ? HD_GRAMMAR_REGEX
                : data[0] & 4 ? HD_GRAMMAR_CALLS
                              : HD_GRAMMAR_JSON_SCHEMA,
        .text = (const char *)text,
        .n = length,
        .free_space = data[0] & 2 ? 3 : 0,
        .calls = {.format = (hd_reply_format)(data[0] >> 3 & 3) + 1,
                  .marks = data[0] & 32 ? (1 << N_MARKS) - 1 : 0,
                  .flagged = data[0] & 32,
                  .hold = data[0] & 64,
                  .most = data[0] & 128 ? 1 : 128},
    };
    char *tools = NULL;
    if (a.kind == HD_GRAMMAR_CALLS) {
        a.calls.tools = tools = offer(text, length, !a.calls.hold, &a.calls.n_tools);
        if (data[0] & 2) a.kind = HD_GRAMMAR_JSON_OBJECT; /* either */
    }
    hd_grammar *g;
    hd_err err = {0};
    if (hd_grammar_open(&g, &a, &err) == HD_OK) {
        if (end) use(g, end + 1, n - 2 - length);
        if (!end) use(g, text, length);
        hd_grammar_close(g);
    } else {
        must(strchr(err.msg, ':') != NULL, "a refusal without its word");
    }
    free(tools);
    return 0;
}
