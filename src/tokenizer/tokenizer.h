/* tokenizer.h - tokenizer and detokenizer: text to token ids and back.
 *
 * A tokenizer is loaded from a model directory's tokenizer.json (byte-level BPE) and, if
 * present, tokenizer_config.json. It is immutable, so threads may share it. Ids and text
 * equal those of the `tokenizers` Python package.
 *
 * Text from clients is encoded without HD_ENCODE_SPECIAL. Then no id of an added token
 * ("<|User|>", "<think>") can result, however the text spells it. Control tokens are
 * appended by id, from hd_tokenizer_find(). */
#ifndef HD_TOKENIZER_TOKENIZER_H
#define HD_TOKENIZER_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tokenizer/span.h"

typedef struct hd_tokenizer hd_tokenizer;

/* A growing list of token ids with a maximum. All zero is an empty list without a maximum. */
typedef struct hd_ids {
    int32_t *ids;
    size_t n, cap;
    size_t max; /* exceeding it is an error of the input; 0: no maximum */
} hd_ids;

hd_status hd_ids_append(hd_ids *v, const int32_t *ids, size_t n, hd_err *err);
static inline hd_status hd_ids_push(hd_ids *v, int32_t id, hd_err *err) {
    return hd_ids_append(v, &id, 1, err);
}
void hd_ids_deinit(hd_ids *v);

/* A growing byte string with a maximum. Not NUL-terminated. */
typedef struct hd_bytes {
    char *data;
    size_t n, cap;
    size_t max;
} hd_bytes;

hd_status hd_bytes_append(hd_bytes *v, const void *data, size_t n, hd_err *err);
void hd_bytes_deinit(hd_bytes *v);

hd_status hd_tokenizer_open(hd_tokenizer **out, const char *dir, hd_err *err);

void hd_tokenizer_close(hd_tokenizer *t); /* NULL is fine */

typedef enum hd_encode_flag {
    HD_ENCODE_SPECIAL = 1, /* added tokens spelled in the text are encoded as their ids */
    HD_ENCODE_BOS = 2,     /* begin with one BOS token */
} hd_encode_flag;

/* Appends the ids of text[n], valid UTF-8, to out. flags: hd_encode_flag, or-ed. On failure
 * out is unchanged. */
hd_status hd_tokenizer_encode(const hd_tokenizer *t, const char *text, size_t n, uint32_t flags,
                              hd_ids *out, hd_err *err);

/* The same for a prompt of spans that cover text: an added token is matched only if it lies
 * completely in a control span. Pre-tokenization ignores the spans. */
hd_status hd_tokenizer_encode_spans(const hd_tokenizer *t, const char *text, size_t n,
                                    const hd_text_span *spans, size_t n_spans, hd_ids *out,
                                    hd_err *err);

/* Appends the text of ids[n], always valid UTF-8: invalid bytes become U+FFFD. Ids without a
 * token are ignored. skip_special omits special tokens. */
hd_status hd_tokenizer_decode(const hd_tokenizer *t, const int32_t *ids, size_t n,
                              bool skip_special, hd_bytes *out, hd_err *err);

/* Returns the largest id + 1; some ids may be unused. */
int32_t hd_tokenizer_vocab_size(const hd_tokenizer *t);

/* Refuses a tokenizer with more ids than the model has rows of logits. */
hd_status hd_tokenizer_check_rows(const hd_tokenizer *t, int64_t model_rows, hd_err *err);

/* Returns the id of a token as spelled in the file ("<think>", or a base token in the byte
 * alphabet), or -1. */
int32_t hd_tokenizer_find(const hd_tokenizer *t, const char *token, size_t n);

/* Returns the bytes of an id, not always valid UTF-8; NULL and 0 for an unused id. They live
 * as long as the tokenizer. */
const uint8_t *hd_tokenizer_piece(const hd_tokenizer *t, int32_t id, size_t *n);

/* special tokens, which skip_special omits */
bool hd_tokenizer_is_special(const hd_tokenizer *t, int32_t id);
bool hd_tokenizer_is_added(const hd_tokenizer *t, int32_t id);

/* From tokenizer_config.json; -1 if it names none. Without a bos there, the token that the
 * post-processor prepends. */
int32_t hd_tokenizer_bos(const hd_tokenizer *t);
int32_t hd_tokenizer_eos(const hd_tokenizer *t);
int32_t hd_tokenizer_pad(const hd_tokenizer *t);

/* Returns whether the files declare that a BOS is prepended to raw prompts. */
bool hd_tokenizer_adds_bos(const hd_tokenizer *t);

/* Decodes ids one by one (streaming). The output in total is what hd_tokenizer_decode()
 * returns for all ids. A UTF-8 sequence divided between tokens is held back until it is
 * complete. */
typedef struct hd_detokenizer {
    const hd_tokenizer *tokenizer;
    bool skip_special;
    uint8_t held[4]; /* the first bytes of a character */
    uint8_t n_held;
    uint8_t need;      /* missing bytes of the character */
    uint8_t low, high; /* range of the next byte */
} hd_detokenizer;

void hd_detokenizer_init(hd_detokenizer *d, const hd_tokenizer *t, bool skip_special);

/* Appends the text that id completes: at most three times its piece plus three bytes. */
hd_status hd_detokenizer_push(hd_detokenizer *d, int32_t id, hd_bytes *out, hd_err *err);

/* Appends U+FFFD for an incomplete character and resets the state. */
hd_status hd_detokenizer_finish(hd_detokenizer *d, hd_bytes *out, hd_err *err);

#endif
