/* output.h - chosen tokens become text that may be shown.
 *
 * Detokenizes incrementally and looks for stop strings across token borders: text that could
 * still become a stop string is held back, and nothing behind a stop string ever leaves. */
#ifndef HD_ENGINE_OUTPUT_H
#define HD_ENGINE_OUTPUT_H

#include "text/tokenizer.h"

typedef struct hd_output {
    hd_detokenizer detokenizer;
    hd_bytes text;    /* decoded and not shown yet */
    char **stop;      /* [n_stop] owned */
    size_t *stop_len; /* [n_stop] */
    size_t n_stop;
} hd_output;

hd_status hd_output_init(hd_output *o, const hd_tokenizer *t, const char *const *stop,
                         size_t n_stop, hd_err *err);
void hd_output_deinit(hd_output *o); /* an all-zero one is fine */

/* Decodes tokens[n]. Then the first *n_ready bytes of o->text may be shown and taken with
 * hd_output_take. True in *stopped: a stop string was found; the text before it is what is
 * ready, and the rest is gone. last: nothing follows, so nothing is held back. */
hd_status hd_output_push(hd_output *o, const int32_t *tokens, size_t n, bool last,
                         size_t *n_ready, bool *stopped, hd_err *err);
void hd_output_take(hd_output *o, size_t n);

#endif
