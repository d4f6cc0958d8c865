/* output.h - chosen tokens become the parts of an answer that may be shown.
 *
 * Tokens go through the parser of replies, or straight to content, and then past the stop
 * strings. Those see reasoning and content as shown, each run of either by itself, and never
 * the markup, names or arguments of calls. Text that could still become a stop string is held
 * back while its run may go on; nothing behind a stop string ever leaves. The stop string that
 * ends first wins, so the result does not depend on how tokens cut the text. */
#ifndef HD_ENGINE_OUTPUT_H
#define HD_ENGINE_OUTPUT_H

#include "engine/token_history.h"
#include "hadal.h"
#include "chat/reply.h"
#include "tokenizer/tokenizer.h"

/* What the outputs of all answers to one request share; outlives them. */
typedef struct hd_output_rules {
    const hd_tokenizer *tokenizer; /* NULL: tokens are no text, and there are no parts */
    const hd_reply_options *parse; /* NULL: all text is content */
    const int32_t *markers;        /* [n_markers] special tokens that the parser wants to see */
    int32_t n_markers;
    const int32_t *eos; /* [n_eos] end-of-sequence tokens that may come before the end */
    int32_t n_eos;
    char *const *stop; /* [n_stop] none empty */
    size_t n_stop;
    bool keep_special, keep_stop;
} hd_output_rules;

typedef struct hd_output_part { /* its text is text.data[at, at + n) */
    hd_delta_kind kind;
    int32_t call;
    bool whole;
    size_t at, n;
} hd_output_part;

typedef struct hd_output {
    const hd_output_rules *rules;
    hd_reply *reply; /* or NULL */
    hd_detokenizer detokenizer;
    hd_bytes text; /* of the parts */
    hd_output_part *parts;
    hd_delta *shown; /* [cap_parts] */
    size_t n_parts, n_shown, cap_parts, n_scanned;
    size_t held;      /* bytes at the end of the last part that were not shown */
    const char *stop; /* the stop string that was found, or NULL; then nothing follows */
    int32_t n_reasoning;
    engine_answer_tokens answer; /* of a reply */
    bool out_of_memory;
} hd_output;

/* o must stay where it is until hd_output_deinit(). */
hd_status hd_output_init(hd_output *o, const hd_output_rules *rules, hd_err *err);
void hd_output_deinit(hd_output *o); /* an all-zero one is fine */

hd_status hd_output_push(hd_output *o, int32_t token, hd_err *err);

/* No token follows. */
hd_status hd_output_finish(hd_output *o, hd_reply_finish_reason reason, hd_err *err);

/* What may be shown now: o->shown[o->n_shown], valid until hd_output_taken(). */
void hd_output_show(hd_output *o, bool last);
void hd_output_taken(hd_output *o);

/* What a reply said, once nothing follows; NULL if a stop string cut it. The caller may move
 * it away. */
engine_answer_tokens *hd_output_answer_tokens(hd_output *o);

#endif
