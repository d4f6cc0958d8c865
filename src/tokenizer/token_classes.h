/* token_classes.h - classes of tokens that are spelled alike but for case, accents and space:
 * the vocabulary of V4.1's Engram hashes; models.md 2.20. */
#ifndef HD_TOKENIZER_TOKEN_CLASSES_H
#define HD_TOKENIZER_TOKEN_CLASSES_H

#include "tokenizer/tokenizer.h"

/* class_of[id] = the class of every id below n_ids, numbered by first occurrence; *n_classes: how
 * many there are. An id without a token is one without text. */
hd_status hd_token_classes(const hd_tokenizer *t, int32_t n_ids, int32_t *class_of,
                           int32_t *n_classes, hd_err *err);

#endif
