/* token_lists.h - reads token sequences from a JSON file: one list, or a list of lists. */
#ifndef HD_CLI_TOKEN_LISTS_H
#define HD_CLI_TOKEN_LISTS_H

#include <stdint.h>

#include "base/status.h"

typedef struct token_lists {
    int32_t n;       /* sequences */
    int32_t longest; /* tokens */
    int64_t total;   /* tokens of all sequences */
    int32_t *tokens; /* [total] the sequences, one after another */
    int64_t *first;  /* [n + 1] */
} token_lists;

/* Ids must be in [0, vocab), sequences 1 to max_tokens long. Owned by the caller. */
hd_status token_lists_load(token_lists *out, const char *path, int32_t vocab,
                           int32_t max_tokens, hd_err *err);
void token_lists_free(token_lists *t); /* an all-zero struct is fine */

#endif
