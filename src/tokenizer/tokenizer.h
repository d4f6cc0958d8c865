/* tokenizer.h - text becomes token ids and token ids become text.
 *
 * A tokenizer is read from a model directory's tokenizer.json (byte-level BPE) and, when it is
 * there, tokenizer_config.json. It never changes after open, so any number of threads may use
 * one. Ids and text equal those of the `tokenizers` Python package.
 *
 * Text that comes from people is encoded without HD_ENCODE_SPECIAL: then no id of an added
 * token ("<|User|>", "<think>") can come out, however the text spells it. Control tokens are
 * appended by id, from hd_tokenizer_find(). */
#ifndef HD_TOKENIZER_TOKENIZER_H
#define HD_TOKENIZER_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tokenizer/span.h"

typedef struct hd_tokenizer hd_tokenizer;

/* A growing list of token ids with a maximum; all zero is an empty one without a maximum. */
typedef struct hd_ids {
    int32_t *ids;
    size_t n, cap;
    size_t max; /* more than this is an error of the input; 0: no maximum */
} hd_ids;

hd_status hd_ids_append(hd_ids *v, const int32_t *ids, size_t n, hd_err *err);
static inline hd_status hd_ids_push(hd_ids *v, int32_t id, hd_err *err) {
    return hd_ids_append(v, &id, 1, err);
}
void hd_ids_deinit(hd_ids *v);

/* A growing string of bytes, the same way. Not NUL-terminated. */
typedef struct hd_bytes {
    char *data;
    size_t n, cap;
    size_t max;
} hd_bytes;

hd_status hd_bytes_append(hd_bytes *v, const void *data, size_t n, hd_err *err);
void hd_bytes_deinit(hd_bytes *v);

hd_status hd_tokenizer_open(hd_tokenizer **out, const char *dir, hd_err *err);

/* From documents in memory, for tests and fuzzing; config may be NULL. */
hd_status hd_tokenizer_open_memory(hd_tokenizer **out, const char *json, size_t n,
                                   const char *config, size_t config_n, hd_err *err);
void hd_tokenizer_close(hd_tokenizer *t); /* NULL is fine */

typedef enum hd_encode_flag {
    HD_ENCODE_SPECIAL = 1, /* added tokens spelled in the text become their ids */
    HD_ENCODE_BOS = 2,     /* begin with one beginning-of-sequence token */
} hd_encode_flag;

/* Appends the ids of text[n], valid UTF-8, to out. flags: hd_encode_flag, or-ed. On failure
 * out holds what it held before. */
hd_status hd_tokenizer_encode(const hd_tokenizer *t, const char *text, size_t n, uint32_t flags,
                              hd_ids *out, hd_err *err);

/* The same for a prompt of spans, back to back over text: added tokens are matched only where
 * all of one lies in a control span. Words are cut as if there were no spans. */
hd_status hd_tokenizer_encode_spans(const hd_tokenizer *t, const char *text, size_t n,
                                    const hd_text_span *spans, size_t n_spans, hd_ids *out,
                                    hd_err *err);

/* Appends the text of ids[n], always valid UTF-8: bytes that are none become U+FFFD. Ids
 * without a token stand for nothing. skip_special leaves out the special tokens. */
hd_status hd_tokenizer_decode(const hd_tokenizer *t, const int32_t *ids, size_t n,
                              bool skip_special, hd_bytes *out, hd_err *err);

/* Largest id + 1; ids in between may be unused. */
int32_t hd_tokenizer_vocab_size(const hd_tokenizer *t);

/* Refuses a tokenizer with more ids than the model has rows. */
hd_status hd_tokenizer_check_rows(const hd_tokenizer *t, int64_t model_rows, hd_err *err);

/* The id of a token as the file spells it ("<think>", or a base token in the byte alphabet);
 * -1 when there is none. */
int32_t hd_tokenizer_find(const hd_tokenizer *t, const char *token, size_t n);

/* The bytes that an id stands for, alone not always UTF-8; NULL and 0 for an unused id. Lives
 * as long as the tokenizer. */
const uint8_t *hd_tokenizer_piece(const hd_tokenizer *t, int32_t id, size_t *n);

bool hd_tokenizer_is_special(const hd_tokenizer *t, int32_t id); /* hidden by skip_special */
bool hd_tokenizer_is_added(const hd_tokenizer *t, int32_t id);

/* From tokenizer_config.json; -1 where it names none. bos falls back on the token that the
 * file's post-processor puts in front. */
int32_t hd_tokenizer_bos(const hd_tokenizer *t);
int32_t hd_tokenizer_eos(const hd_tokenizer *t);
int32_t hd_tokenizer_pad(const hd_tokenizer *t);

/* What the files say about raw prompts: whether a BOS goes in front. */
bool hd_tokenizer_adds_bos(const hd_tokenizer *t);

/* Decodes ids as they come. What it emits over time is what hd_tokenizer_decode() gives for
 * all of them: a UTF-8 sequence cut between tokens is held back until it is whole. */
typedef struct hd_detokenizer {
    const hd_tokenizer *tokenizer;
    bool skip_special;
    uint8_t held[4]; /* the start of a character */
    uint8_t n_held;
    uint8_t need;      /* further bytes that the character wants */
    uint8_t low, high; /* the range of the next one */
} hd_detokenizer;

void hd_detokenizer_init(hd_detokenizer *d, const hd_tokenizer *t, bool skip_special);

/* Appends what id completes to out: at most three times its piece and three bytes more. */
hd_status hd_detokenizer_push(hd_detokenizer *d, int32_t id, hd_bytes *out, hd_err *err);

/* Appends U+FFFD for a character that never became whole, and starts anew. */
hd_status hd_detokenizer_finish(hd_detokenizer *d, hd_bytes *out, hd_err *err);

#endif
