/* examples.h - training data: JSON lines, as sequences of tokens with a loss mask.
 *
 * A line has one of
 *
 *     {"messages": [...], "tools": [...]}    loss on what the assistant says
 *     {"prompt": TEXT, "completion": TEXT}   loss on the completion and the end of sequence
 *     {"text": TEXT}                         loss on every token
 *     {"tokens": [...], "mask": [...]}       loss where mask is 1; without mask on every token
 *
 * The first token of a sequence has no loss. */
#ifndef HD_TRAIN_EXAMPLES_H
#define HD_TRAIN_EXAMPLES_H

#include "chat/chat.h"
#include "tokenizer/tokenizer.h"

typedef struct hd_example {
    const int32_t *tokens;
    const uint8_t *mask;      /* [n] 1: the token has a loss */
    int32_t n, n_loss, first; /* first: of the tokens with a loss */
} hd_example;

typedef struct hd_examples {
    hd_example *all;
    int32_t n;
    int32_t *tokens; /* storage */
    uint8_t *mask;
} hd_examples;

typedef struct hd_example_rules {
    const hd_tokenizer *tokenizer;
    hd_chat_encoding encoding;
    bool thinks; /* the default of a line without "thinking" */
    int32_t eos; /* -1: none */
    int32_t vocab;
    int32_t context; /* longer examples are refused */
} hd_example_rules;

/* Reads text[n]; label names it in errors, which contain the line's number. Refuses what is no
 * such line, a sequence of less than 2 tokens or more than the context, and one without a
 * token that has a loss. */
hd_status hd_examples_read(hd_examples *out, const char *text, size_t n, const char *label,
                           const hd_example_rules *rules, hd_err *err);
void hd_examples_deinit(hd_examples *e); /* an all-zero one is fine */

/* The example at place i of an endless sequence of shuffled epochs. */
int32_t hd_examples_shuffled(const hd_examples *e, uint64_t seed, int64_t i);

#endif
