/* output.h - output processing of one choice: sampled tokens are detokenized, parsed and
 * checked for stop strings, and become deltas.
 *
 * Tokens pass the reply parser, which finds reasoning, content and tool calls, or become
 * content directly. Stop strings are searched in reasoning and in content as shown, in each
 * run of either by itself. They are never searched in markup, names or arguments of tool
 * calls. Text that may be the beginning of a stop string is held back while its run may go
 * on; text behind a stop string is never shown. The stop string that ends first is found, so
 * the result does not depend on where tokens divide the text. */
#ifndef HD_ENGINE_OUTPUT_H
#define HD_ENGINE_OUTPUT_H

#include "engine/token_history.h"
#include "hadal.h"
#include "chat/reply.h"
#include "tokenizer/tokenizer.h"

/* Rules that all choices of one request share; they must outlive the outputs. */
typedef struct hd_output_rules {
    const hd_tokenizer *tokenizer; /* NULL: tokens have no text, and there are no deltas */
    const hd_reply_options *parse; /* NULL: all text is content */
    const int32_t *markers; /* [n_markers] special tokens that the reply parser must see */
    int32_t n_markers;
    /* [n_eos] end-of-sequence tokens that may come before the end (min_tokens, ignore_eos) */
    const int32_t *eos;
    int32_t n_eos;
    char *const *stop; /* [n_stop] stop strings, none empty */
    size_t n_stop;
    bool keep_special, keep_stop;
} hd_output_rules;

typedef struct hd_output_delta { /* a delta whose text is text.data[at, at + n) */
    hd_delta_kind kind;
    int32_t call;
    bool whole;
    size_t at, n;
} hd_output_delta;

typedef struct hd_output {
    const hd_output_rules *rules;
    hd_reply *reply; /* or NULL */
    hd_detokenizer detokenizer;
    hd_bytes text; /* text of the deltas */
    hd_output_delta *deltas;
    hd_delta *shown; /* [cap_deltas] */
    size_t n_deltas, n_shown, cap_deltas, n_scanned;
    size_t held;      /* bytes at the end of the last delta that are held back */
    const char *stop; /* the stop string that was found, or NULL; nothing follows it */
    int32_t n_reasoning;
    engine_answer_tokens answer; /* of a parsed reply */
    bool out_of_memory;
} hd_output;

/* o must not move until hd_output_deinit(). */
hd_status hd_output_init(hd_output *o, const hd_output_rules *rules, hd_err *err);
void hd_output_deinit(hd_output *o); /* an all-zero one is fine */

hd_status hd_output_push(hd_output *o, int32_t token, hd_err *err);

/* Flushes the parser; no token may follow. */
hd_status hd_output_finish(hd_output *o, hd_finish_reason reason, hd_err *err);

/* Sets o->shown[o->n_shown] to the deltas that may be shown now, valid until
 * hd_output_taken(). */
void hd_output_show(hd_output *o, bool last);
void hd_output_taken(hd_output *o);

/* Returns the reply's tokens and texts once no token follows, or NULL if a stop string cut
 * it. The caller may move them away. */
engine_answer_tokens *hd_output_answer_tokens(hd_output *o);

#endif
