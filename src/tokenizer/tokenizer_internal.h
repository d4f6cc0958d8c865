/* tokenizer_internal.h - the tables of a tokenizer, shared by loading and use. */
#ifndef HD_TOKENIZER_TOKENIZER_INTERNAL_H
#define HD_TOKENIZER_TOKENIZER_INTERNAL_H

#include <jansson.h>

#include "tokenizer/added_internal.h"
#include "tokenizer/bpe_internal.h"
#include "tokenizer/pretokenize_internal.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/vocab_internal.h"

struct hd_tokenizer {
    text_vocab vocab;
    text_bpe bpe;
    text_pretokenizer pretokenizer;
    text_added verbatim;    /* added tokens that are matched first */
    text_added normalized;  /* and those matched in the remaining text */
    bool ignore_merges;     /* a piece that is a token needs no merging */
    bool merges_make_added; /* some added token is also the result of a merge */
    size_t longest_token;
    int32_t bos, eos, pad; /* -1: none */
    bool adds_bos;
};

/* Fills an all-zero tokenizer from the two documents; config may be NULL. On failure the
 * caller closes it. */
/* From parsed documents, whose paths are for messages; config may be NULL. */
hd_status text_tokenizer_open(hd_tokenizer **out, const json_t *root, const char *path,
                              const json_t *config, const char *config_path, hd_err *err);

hd_status text_tokenizer_load(hd_tokenizer *t, const json_t *root, hd_err *err);
hd_status text_tokenizer_load_config(hd_tokenizer *t, const json_t *config, hd_err *err);

#endif
