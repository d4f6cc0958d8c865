/* token_classes.c - classes of tokens by a loose comparison of their texts.
 *
 * A token's key is its folded text with every run of spaces as one, and without those at its
 * ends; a text that this leaves empty is its own key. Bytes that are no text have the token as
 * it is written in the vocabulary's byte alphabet. Tokens with one key are one class. */
#include "tokenizer/token_classes.h"

#include <stdlib.h>
#include <string.h>

#include "tokenizer/unicode.h"

typedef struct key {
    size_t at, n; /* in the text of all keys */
    int32_t id;
} key;

typedef struct keys {
    hd_bytes text, folded;
    key *list;
    hd_err *err;
} keys;

static hd_status put(hd_bytes *out, uint32_t cp, hd_err *err) {
    uint8_t bytes[4];
    return hd_bytes_append(out, bytes, text_utf8_put(bytes, cp), err);
}

static bool is_blank(uint32_t cp) {
    return cp == ' ' || cp == '\t' || cp == '\r' || cp == '\n';
}

/* Appends the folded text, runs of blanks as one space. */
static hd_status fold(const uint8_t *text, size_t n, hd_bytes *out, hd_err *err) {
    bool blank = false;
    for (size_t at = 0; at < n;) {
        uint32_t to[TEXT_MAX_FOLD];
        const int32_t m = text_fold(text_utf8_next(text, &at), to);
        for (int32_t i = 0; i < m; i++) {
            const bool before = blank;
            blank = is_blank(to[i]);
            if (!blank || !before) HD_TRY(put(out, blank ? ' ' : to[i], err));
        }
    }
    return HD_OK;
}

/* Narrows text[*at .. *end) to what is between white space. */
static void strip(const uint8_t *text, size_t *at, size_t *end) {
    while (*at < *end) {
        size_t next = *at;
        if (!text_is_space(text_utf8_next(text, &next))) break;
        *at = next;
    }
    while (*end > *at) {
        size_t last = text_utf8_back(text, *end), next = last;
        if (!text_is_space(text_utf8_next(text, &next))) break;
        *end = last;
    }
}

/* Appends the byte as the vocabularies of byte-level BPE write it: printable bytes as they are,
 * the others from U+0100 on. */
static hd_status put_byte(hd_bytes *out, uint8_t byte, hd_err *err) {
    uint32_t others = 0;
    for (uint32_t b = 0; b <= byte; b++) {
        const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
        if (b == byte) return put(out, printable ? b : 256 + others, err);
        others += !printable;
    }
    return HD_OK;
}

static bool has_replacement(const uint8_t *text, size_t n) {
    for (size_t at = 0; at < n;) {
        if (text_utf8_next(text, &at) == 0xfffd) return true;
    }
    return false;
}

static hd_status add_key(keys *k, const hd_tokenizer *t, int32_t id) {
    size_t n;
    const uint8_t *piece = hd_tokenizer_piece(t, id, &n);
    key *own = &k->list[id];
    *own = (key){.at = k->text.n, .id = id};
    if (!piece) n = 0;
    if (n && (text_utf8_valid((const char *)piece, n) < n || has_replacement(piece, n))) {
        for (size_t i = 0; i < n; i++) HD_TRY(put_byte(&k->text, piece[i], k->err));
        own->n = k->text.n - own->at;
        return HD_OK;
    }
    k->folded.n = 0;
    HD_TRY(fold(piece, n, &k->folded, k->err));
    const uint8_t *text = (const uint8_t *)k->folded.data;
    size_t at = 0, end = k->folded.n;
    const bool one_space = end == 1 && text[0] == ' ';
    if (!one_space) strip(text, &at, &end);
    const void *from = end > at ? text + at : piece;
    own->n = end > at ? end - at : n;
    return own->n ? hd_bytes_append(&k->text, from, own->n, k->err) : HD_OK;
}

/* qsort has no context; keys are compared after their places have become addresses. */
typedef struct entry {
    const char *text;
    size_t n;
    int32_t id;
} entry;

static int by_text(const void *a, const void *b) {
    const entry *x = a, *y = b;
    const size_t n = x->n < y->n ? x->n : y->n;
    const int order = n ? memcmp(x->text, y->text, n) : 0;
    if (order != 0) return order;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static bool same_text(const entry *a, const entry *b) {
    return a->n == b->n && (a->n == 0 || memcmp(a->text, b->text, a->n) == 0);
}

/* class_of[id] = the first id with the same key, then the number of that one. */
static int32_t number(entry *sorted, int32_t n, int32_t *class_of) {
    int32_t next = 0;
    qsort(sorted, (size_t)n, sizeof *sorted, by_text);
    for (int32_t i = 0, first = 0; i < n; i++) {
        if (!same_text(&sorted[i], &sorted[first])) first = i;
        class_of[sorted[i].id] = sorted[first].id;
    }
    for (int32_t id = 0; id < n; id++) {
        class_of[id] = class_of[id] == id ? next++ : class_of[class_of[id]];
    }
    return next;
}

static hd_status classify(keys *k, const hd_tokenizer *t, int32_t n_ids, int32_t *class_of,
                          int32_t *n_classes) {
    for (int32_t id = 0; id < n_ids; id++) HD_TRY(add_key(k, t, id));
    entry *sorted = malloc(((size_t)n_ids + 1) * sizeof *sorted);
    if (!sorted) return HD_FAIL(k->err, HD_ENOMEM, "no memory for classes of %d tokens", n_ids);
    for (int32_t id = 0; id < n_ids; id++) {
        sorted[id] = (entry){k->text.data + k->list[id].at, k->list[id].n, id};
    }
    *n_classes = number(sorted, n_ids, class_of);
    free(sorted);
    return HD_OK;
}

hd_status hd_token_classes(const hd_tokenizer *t, int32_t n_ids, int32_t *class_of,
                           int32_t *n_classes, hd_err *err) {
    keys k = {.err = err};
    k.list = malloc(((size_t)n_ids + 1) * sizeof *k.list);
    if (!k.list) return HD_FAIL(err, HD_ENOMEM, "no memory for keys of %d tokens", n_ids);
    const hd_status st = classify(&k, t, n_ids, class_of, n_classes);
    free(k.list);
    hd_bytes_deinit(&k.text);
    hd_bytes_deinit(&k.folded);
    return st;
}
