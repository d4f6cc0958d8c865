/* vocab.c - see vocab_internal.h; also the byte alphabet in which base tokens are spelled. A
 * token whose characters are all in the alphabet represents the bytes they name; any other
 * represents its own UTF-8 bytes. */
#include "tokenizer/vocab_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer/unicode.h"

/* Printable bytes represent themselves; the other 68 are U+0100 and up, in increasing order. */
static bool is_printable(uint32_t byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) ||
           (byte >= 174 && byte <= 255);
}

uint32_t text_byte_character(uint8_t byte) {
    if (is_printable(byte)) return byte;
    uint32_t rank = 0;
    for (uint32_t b = 0; b < byte; b++) rank += !is_printable(b);
    return 0x100 + rank;
}

int32_t text_character_byte(uint32_t cp) {
    if (cp < 0x100) return is_printable(cp) ? (int32_t)cp : -1;
    uint32_t rank = cp - 0x100; /* the gaps: 0..32, 127..160, 173 */
    if (rank <= 32) return (int32_t)rank;
    if (rank <= 66) return (int32_t)(rank - 33 + 127);
    return rank == 67 ? 173 : -1;
}

static uint32_t hash_more(uint32_t h, const char *text, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ (uint8_t)text[i]) * 0x01000193u;
    return h;
}

static uint32_t hash_end(uint32_t h) {
    h = (h ^ h >> 16) * 0x7feb352du;
    return h ^ h >> 15;
}

hd_status text_vocab_open(text_vocab *v, int32_t n_ids, size_t n_tokens, size_t n_bytes,
                          hd_err *err) {
    *v = (text_vocab){.n_ids = n_ids, .bytes_cap = n_bytes};
    uint32_t n_slots = 16;
    while (n_slots < 2 * n_tokens) n_slots *= 2;
    v->mask = n_slots - 1;
    v->tokens = calloc((size_t)n_ids + 1, sizeof *v->tokens);
    v->flags = calloc((size_t)n_ids + 1, sizeof *v->flags);
    v->slots = malloc(n_slots * sizeof *v->slots);
    v->spellings = malloc(n_bytes + 1);
    v->pieces = malloc(n_bytes + 1);
    if (!v->tokens || !v->flags || !v->slots || !v->spellings || !v->pieces) {
        text_vocab_close(v);
        return HD_FAIL(err, HD_ENOMEM, "no memory for %zu tokens", n_tokens);
    }
    for (uint32_t i = 0; i < n_slots; i++) v->slots[i] = -1;
    return HD_OK;
}

void text_vocab_close(text_vocab *v) {
    free(v->tokens);
    free(v->flags);
    free(v->slots);
    free(v->spellings);
    free(v->pieces);
    *v = (text_vocab){0};
}

/* Returns whether the token at t is spelled a followed by b. */
static bool spelled(const text_vocab *v, const text_token *t, const char *a, size_t a_n,
                    const char *b, size_t b_n) {
    return t->n == a_n + b_n && memcmp(v->spellings + t->at, a, a_n) == 0 &&
           memcmp(v->spellings + t->at + a_n, b, b_n) == 0;
}

static uint32_t find_slot(const text_vocab *v, const char *a, size_t a_n, const char *b,
                          size_t b_n) {
    uint32_t i = hash_end(hash_more(hash_more(0x811c9dc5u, a, a_n), b, b_n)) & v->mask;
    while (v->slots[i] >= 0 && !spelled(v, &v->tokens[v->slots[i]], a, a_n, b, b_n)) {
        i = (i + 1) & v->mask;
    }
    return i;
}

int32_t text_vocab_find_pair(const text_vocab *v, const char *a, size_t a_n, const char *b,
                             size_t b_n) {
    return v->slots[find_slot(v, a, a_n, b, b_n)];
}

int32_t text_vocab_find(const text_vocab *v, const char *token, size_t n) {
    return text_vocab_find_pair(v, token, n, "", 0);
}

/* Writes the bytes that a spelling represents; false if it is not in the alphabet. */
static bool alphabet_bytes(uint8_t *out, const char *token, size_t n, uint32_t *out_n) {
    size_t at = 0;
    *out_n = 0;
    while (at < n) {
        int32_t byte = text_character_byte(text_utf8_next((const uint8_t *)token, &at));
        if (byte < 0) return false;
        out[(*out_n)++] = (uint8_t)byte;
    }
    return true;
}

hd_status text_vocab_add(text_vocab *v, int64_t id, const char *token, size_t n, uint8_t flags,
                         hd_err *err) {
    assert(id >= 0 && id < v->n_ids && n <= v->bytes_cap - v->spellings_n);
    uint32_t slot = find_slot(v, token, n, "", 0);
    if (v->slots[slot] >= 0) {
        return HD_FAIL(err, HD_EFORMAT, "duplicate token '%.80s': ids %d and %lld", token,
                       (int)v->slots[slot], (long long)id);
    }
    text_token *t = &v->tokens[id];
    if (v->flags[id] & TEXT_USED) {
        return HD_FAIL(err, HD_EFORMAT, "duplicate id %lld: '%.*s' and '%.80s'", (long long)id,
                       t->n > 80 ? 80 : (int)t->n, v->spellings + t->at, token);
    }
    *t = (text_token){
        .at = (uint32_t)v->spellings_n, .n = (uint32_t)n, .piece_at = (uint32_t)v->pieces_n};
    memcpy(v->spellings + v->spellings_n, token, n);
    v->spellings_n += n;
    flags |= TEXT_USED;
    if (!alphabet_bytes(v->pieces + v->pieces_n, token, n, &t->piece_n)) {
        memcpy(v->pieces + v->pieces_n, token, n);
        t->piece_n = (uint32_t)n;
        flags |= TEXT_FOREIGN;
    }
    v->pieces_n += t->piece_n;
    v->flags[id] = flags;
    v->slots[slot] = (int32_t)id;
    return HD_OK;
}
