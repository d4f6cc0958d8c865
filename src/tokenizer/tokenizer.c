/* tokenizer.c - see tokenizer.h: opening, encoding, and properties of token ids. */
#include "tokenizer/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "tokenizer/tokenizer_internal.h"

enum { MAX_FILE_BYTES = 128 << 20 };

/* State of one encoding call. */
typedef struct encoder {
    const hd_tokenizer *t;
    const text_controls *controls; /* where added tokens may be matched; NULL: everywhere */
    text_bpe_scratch *scratch;
    text_pieces pieces;
    bool plain; /* ids of added tokens are not allowed */
    hd_ids *out;
} encoder;

hd_status text_tokenizer_open(hd_tokenizer **out, const json_t *root, const char *path,
                              const json_t *config, const char *config_path, hd_err *err) {
    hd_err why = {0};
    hd_tokenizer *t = calloc(1, sizeof *t);
    *out = NULL;
    if (!t) return HD_FAIL(err, HD_ENOMEM, "no memory for a tokenizer");
    const char *where = path;
    hd_status st = text_tokenizer_load(t, root, &why);
    if (st == HD_OK && config) {
        where = config_path;
        st = text_tokenizer_load_config(t, config, &why);
    }
    if (st == HD_OK) {
        *out = t;
        return HD_OK;
    }
    hd_tokenizer_close(t);
    return HD_FAIL(err, st, "%s: %s", where, why.msg);
}

static hd_status open_files(hd_tokenizer **out, const char *path, const char *config_path,
                            hd_err *err) {
    json_t *root = NULL, *config = NULL;
    hd_status st = hd_json_load(&root, path, MAX_FILE_BYTES, err);
    if (st == HD_OK && hd_file_exists(config_path)) {
        st = hd_json_load(&config, config_path, MAX_FILE_BYTES, err);
    }
    if (st == HD_OK) st = text_tokenizer_open(out, root, path, config, config_path, err);
    json_decref(root);
    json_decref(config);
    return st;
}

hd_status hd_tokenizer_open(hd_tokenizer **out, const char *dir, hd_err *err) {
    char *path = hd_path_join(dir, "tokenizer.json");
    char *config_path = hd_path_join(dir, "tokenizer_config.json");
    *out = NULL;
    hd_status st = path && config_path ? open_files(out, path, config_path, err)
                                       : HD_FAIL(err, HD_ENOMEM, "no memory to open %s", dir);
    free(path);
    free(config_path);
    return st;
}

void hd_tokenizer_close(hd_tokenizer *t) {
    if (!t) return;
    text_vocab_close(&t->vocab);
    text_bpe_close(&t->bpe);
    text_pretokenizer_close(&t->pretokenizer);
    text_added_close(&t->verbatim);
    text_added_close(&t->normalized);
    free(t);
}

/* Returns the token that equals the piece, for files that look for it before merging; or -1. */
static hd_status whole_piece(encoder *e, const uint8_t *piece, size_t n, int32_t *id,
                             hd_err *err) {
    *id = -1;
    if (n > e->t->longest_token) return HD_OK;
    char *spelling = malloc(2 * n); /* the alphabet's characters have one or two bytes */
    if (!spelling) return HD_FAIL(err, HD_ENOMEM, "no memory for a piece of text");
    size_t length = 0;
    for (size_t i = 0; i < n; i++) {
        length += text_utf8_put((uint8_t *)spelling + length, text_byte_character(piece[i]));
    }
    *id = text_vocab_find(&e->t->vocab, spelling, length);
    free(spelling);
    if (e->plain && *id >= 0 && e->t->vocab.flags[*id] & TEXT_ADDED) *id = -1;
    return HD_OK;
}

/* Replaces ids of added tokens from n_before on by the tokens that were merged to them. A merge
 * makes its result longer, so this ends; a byte that is itself an added token remains. */
static hd_status split_added(encoder *e, size_t n_before, hd_err *err) {
    const text_bpe *b = &e->t->bpe;
    hd_ids stack = {0};
    hd_ids *out = e->out;
    hd_status st = HD_OK;
    bool any = false;
    for (size_t i = n_before; i < out->n && !any; i++) {
        any = hd_tokenizer_is_added(e->t, out->ids[i]);
    }
    if (!any) return HD_OK;
    for (size_t i = out->n; st == HD_OK && i > n_before; i--) {
        st = hd_ids_push(&stack, out->ids[i - 1], err);
    }
    out->n = n_before;
    while (st == HD_OK && stack.n > 0) {
        int32_t id = stack.ids[--stack.n];
        int32_t slot = hd_tokenizer_is_added(e->t, id) ? b->made_by[id] : -1;
        if (slot < 0) {
            st = hd_ids_push(out, id, err);
        } else {
            const int32_t sides[2] = {b->slots[slot].right, b->slots[slot].left};
            st = hd_ids_append(&stack, sides, 2, err);
        }
    }
    hd_ids_deinit(&stack);
    return st;
}

static hd_status encode_piece(encoder *e, const uint8_t *piece, size_t n, hd_err *err) {
    if (e->t->ignore_merges) {
        int32_t id;
        HD_TRY(whole_piece(e, piece, n, &id, err));
        if (id >= 0) return hd_ids_push(e->out, id, err);
    }
    size_t before = e->out->n;
    HD_TRY(text_bpe_encode(&e->t->bpe, e->scratch, piece, n, e->out, err));
    return e->plain && e->t->merges_make_added ? split_added(e, before, err) : HD_OK;
}

/* Encodes text between added tokens. */
static hd_status encode_text(encoder *e, const uint8_t *text, size_t n, hd_err *err) {
    const uint8_t *piece;
    size_t length;
    HD_TRY(text_pieces_start(&e->pieces, text, n, err));
    for (;;) {
        HD_TRY(text_pieces_next(&e->pieces, &piece, &length, err));
        if (length == 0) return HD_OK;
        HD_TRY(encode_piece(e, piece, length, err));
    }
}

static hd_status encode_normalized(encoder *e, const uint8_t *text, size_t n, hd_err *err) {
    text_added_walk walk;
    int32_t id;
    const uint8_t *part;
    size_t length;
    text_added_start(&walk, &e->t->normalized, e->controls, text, n);
    while (text_added_next(&walk, &id, &part, &length)) {
        HD_TRY(id >= 0 ? hd_ids_push(e->out, id, err) : encode_text(e, part, length, err));
    }
    return HD_OK;
}

static hd_status encode_special(encoder *e, const uint8_t *text, size_t n, hd_err *err) {
    text_added_walk walk;
    int32_t id;
    const uint8_t *part;
    size_t length;
    text_added_start(&walk, &e->t->verbatim, e->controls, text, n);
    while (text_added_next(&walk, &id, &part, &length)) {
        HD_TRY(id >= 0 ? hd_ids_push(e->out, id, err)
                       : encode_normalized(e, part, length, err));
    }
    return HD_OK;
}

static hd_status encode_all(encoder *e, const char *text, size_t n, uint32_t flags,
                            hd_err *err) {
    const uint8_t *bytes = (const uint8_t *)text;
    if (flags & HD_ENCODE_BOS) {
        if (e->t->bos < 0) {
            return HD_FAIL(err, HD_EINVAL, "this tokenizer has no beginning-of-sequence token");
        }
        HD_TRY(hd_ids_push(e->out, e->t->bos, err));
    }
    HD_TRY(text_bpe_scratch_open(&e->scratch, n, err));
    HD_TRY(text_pieces_init(&e->pieces, &e->t->pretokenizer, err));
    if (flags & HD_ENCODE_SPECIAL) return encode_special(e, bytes, n, err);
    return encode_text(e, bytes, n, err);
}

static hd_status encode_checked(encoder *e, const char *text, size_t n, uint32_t flags,
                                hd_err *err) {
    if (n > INT32_MAX) {
        return HD_FAIL(err, HD_EINVAL, "a text of %zu bytes; the limit is %d", n, INT32_MAX);
    }
    size_t bad = text_utf8_valid(text, n);
    if (bad < n) {
        return HD_FAIL(err, HD_EINVAL, "the text is not valid UTF-8 at byte %zu (0x%02x)", bad,
                       (unsigned)(uint8_t)text[bad]);
    }
    size_t before = e->out->n;
    hd_status st = encode_all(e, text, n, flags, err);
    if (st != HD_OK) e->out->n = before;
    text_bpe_scratch_close(e->scratch);
    text_pieces_deinit(&e->pieces);
    return st;
}

hd_status hd_tokenizer_encode(const hd_tokenizer *t, const char *text, size_t n, uint32_t flags,
                              hd_ids *out, hd_err *err) {
    encoder e = {.t = t, .plain = !(flags & HD_ENCODE_SPECIAL), .out = out};
    return encode_checked(&e, text, n, flags, err);
}

hd_status hd_tokenizer_encode_spans(const hd_tokenizer *t, const char *text, size_t n,
                                    const hd_text_span *spans, size_t n_spans, hd_ids *out,
                                    hd_err *err) {
    const text_controls controls = {(const uint8_t *)text, spans, n_spans};
    encoder e = {.t = t, .plain = true, .controls = &controls, .out = out};
    return encode_checked(&e, text, n, HD_ENCODE_SPECIAL, err);
}

int32_t hd_tokenizer_vocab_size(const hd_tokenizer *t) {
    return t->vocab.n_ids;
}

hd_status hd_tokenizer_check_rows(const hd_tokenizer *t, int64_t model_rows, hd_err *err) {
    if (t->vocab.n_ids <= model_rows) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "the tokenizer has ids up to %d, the model %lld rows",
                   (int)t->vocab.n_ids - 1, (long long)model_rows);
}

int32_t hd_tokenizer_find(const hd_tokenizer *t, const char *token, size_t n) {
    return text_vocab_find(&t->vocab, token, n);
}

const uint8_t *hd_tokenizer_piece(const hd_tokenizer *t, int32_t id, size_t *n) {
    *n = 0;
    if (!(text_vocab_flags(&t->vocab, id) & TEXT_USED)) return NULL;
    *n = t->vocab.tokens[id].piece_n;
    return t->vocab.pieces + t->vocab.tokens[id].piece_at;
}

bool hd_tokenizer_is_special(const hd_tokenizer *t, int32_t id) {
    return text_vocab_flags(&t->vocab, id) & TEXT_SPECIAL;
}

bool hd_tokenizer_is_added(const hd_tokenizer *t, int32_t id) {
    return text_vocab_flags(&t->vocab, id) & TEXT_ADDED;
}

int32_t hd_tokenizer_bos(const hd_tokenizer *t) {
    return t->bos;
}

int32_t hd_tokenizer_eos(const hd_tokenizer *t) {
    return t->eos;
}

int32_t hd_tokenizer_pad(const hd_tokenizer *t) {
    return t->pad;
}

bool hd_tokenizer_adds_bos(const hd_tokenizer *t) {
    return t->adds_bos;
}
