/* detokenize.c - detokenizer: token ids to text, all at once or one by one (streaming).
 * Tokens are byte strings, and a character may be divided between two of them. A UTF-8
 * decoder holds the start of a character until it is complete. The longest start that cannot
 * continue becomes one U+FFFD, as the Unicode standard recommends. */
#include <string.h>

#include "tokenizer/tokenizer.h"

static const char replacement[] = "\xef\xbf\xbd";

void hd_detokenizer_init(hd_detokenizer *d, const hd_tokenizer *t, bool skip_special) {
    *d = (hd_detokenizer){.tokenizer = t, .skip_special = skip_special};
}

/* Begins a character with its lead byte; false if no character starts with it. */
static bool begin_character(hd_detokenizer *d, uint8_t byte) {
    d->low = 0x80;
    d->high = 0xbf;
    if (byte >= 0xc2 && byte <= 0xdf) {
        d->need = 1;
    } else if (byte >= 0xe0 && byte <= 0xef) {
        d->need = 2;
        if (byte == 0xe0) d->low = 0xa0;
        if (byte == 0xed) d->high = 0x9f;
    } else if (byte >= 0xf0 && byte <= 0xf4) {
        d->need = 3;
        if (byte == 0xf0) d->low = 0x90;
        if (byte == 0xf4) d->high = 0x8f;
    } else {
        return false;
    }
    d->held[0] = byte;
    d->n_held = 1;
    return true;
}

static hd_status replace_held(hd_detokenizer *d, hd_bytes *out, hd_err *err) {
    d->n_held = d->need = 0;
    return hd_bytes_append(out, replacement, 3, err);
}

/* Processes one byte that is not plain ASCII between characters. */
static hd_status take_byte(hd_detokenizer *d, uint8_t byte, hd_bytes *out, hd_err *err) {
    if (d->need > 0 && (byte < d->low || byte > d->high)) HD_TRY(replace_held(d, out, err));
    if (d->need > 0) {
        d->held[d->n_held++] = byte;
        d->low = 0x80;
        d->high = 0xbf;
        if (--d->need > 0) return HD_OK;
        size_t n = d->n_held;
        d->n_held = 0;
        return hd_bytes_append(out, d->held, n, err);
    }
    if (byte < 0x80) return hd_bytes_append(out, &byte, 1, err);
    return begin_character(d, byte) ? HD_OK : hd_bytes_append(out, replacement, 3, err);
}

hd_status hd_detokenizer_push(hd_detokenizer *d, int32_t id, hd_bytes *out, hd_err *err) {
    size_t n, at = 0;
    if (d->skip_special && hd_tokenizer_is_special(d->tokenizer, id)) return HD_OK;
    const uint8_t *piece = hd_tokenizer_piece(d->tokenizer, id, &n);
    while (at < n) {
        size_t plain = at;
        while (d->need == 0 && plain < n && piece[plain] < 0x80) plain++;
        if (plain > at) {
            HD_TRY(hd_bytes_append(out, piece + at, plain - at, err));
            at = plain;
        } else {
            HD_TRY(take_byte(d, piece[at++], out, err));
        }
    }
    return HD_OK;
}

hd_status hd_detokenizer_finish(hd_detokenizer *d, hd_bytes *out, hd_err *err) {
    return d->need > 0 ? replace_held(d, out, err) : HD_OK;
}

hd_status hd_tokenizer_decode(const hd_tokenizer *t, const int32_t *ids, size_t n,
                              bool skip_special, hd_bytes *out, hd_err *err) {
    hd_detokenizer d;
    hd_detokenizer_init(&d, t, skip_special);
    for (size_t i = 0; i < n; i++) HD_TRY(hd_detokenizer_push(&d, ids[i], out, err));
    return hd_detokenizer_finish(&d, out, err);
}
