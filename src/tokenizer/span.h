/* span.h - spans of a prompt: control spans written by the chat template, and content from
 * the client. */
#ifndef HD_TOKENIZER_SPAN_H
#define HD_TOKENIZER_SPAN_H

#include <stdbool.h>
#include <stddef.h>

typedef struct hd_text_span {
    size_t start, n; /* bytes */
    bool is_control; /* special tokens may occur here */
} hd_text_span;

#endif
