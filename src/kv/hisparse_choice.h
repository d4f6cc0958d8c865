/* hisparse_choice.h - whether HiSparse pays, as far as it can be predicted: the entries that attention selects
 * leave the device, so that more requests run at a time, and each step fetches those that its buffers
 * lack. */
#ifndef HD_KV_HISPARSE_CHOICE_H
#define HD_KV_HISPARSE_CHOICE_H

#include "kv/kv.h"

typedef struct hd_hisparse_choice {
    bool on;
    int32_t rows;             /* of each layer's buffer, if it is on */
    double requests, fitting; /* that run at a time with it, and without it */
    /* Seconds of a step with `requests`: what fetching takes, and what the tokens of that step would take
     * longer in steps of `fitting`. On: gain_s is more. Both 0: all entries fit on the device. */
    double miss_s, gain_s;
} hd_hisparse_choice;

/* Returns the share of selected entries that a buffer lacks. rows: of the buffer, for each row of a step;
 * entries: of a sequence. By the choices of tiny-v4 in stories of 3,000 and 6,800 tokens
 * (docs/perf/log/2026-11-29-million.md): 0.6 (rows / top_k)^-0.8 (1 - rows / entries). */
double hd_hisparse_miss_share(double rows, double entries, double top_k);

/* Returns the bytes that a step of so many rows is predicted to fetch, with buffers of buffer_rows and so many
 * tokens before each row. */
double hd_hisparse_miss_bytes(const hd_model_spec *spec, int32_t n_layers, hd_dtype type,
                              double buffer_rows, double tokens, double rows);

/* Sets the seconds and `on`. step_s, fitting_step_s: of a step with c->requests, without what it fetches, and
 * with c->fitting. A c->fitting below 1 is on: nothing would run. */
void hd_hisparse_decide(hd_hisparse_choice *c, double step_s, double fitting_step_s,
                        double miss_s);

#endif
