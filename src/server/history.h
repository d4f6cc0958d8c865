/* history.h - samples of the last minute, so that charts of the web page begin with data. */
#ifndef HD_SERVER_HISTORY_H
#define HD_SERVER_HISTORY_H

#include "api/text.h"
#include "server/metrics/metrics.h"

enum { HISTORY_SAMPLES = 240 }; /* four per second: one minute */

typedef struct history_sample {
    int64_t t_ms;                         /* monotonic milliseconds, as "t" of /engine/live */
    double tokens_s, prompt_tokens_s;     /* since the previous sample */
    metrics_spread ttft, itl;             /* over the previous minute */
    int64_t prompt_tokens, cached_tokens; /* since the start */
    int64_t running, waiting;
} history_sample;

typedef struct history history;

history *history_new(void);    /* NULL: no memory */
void history_free(history *h); /* NULL is fine */

/* Replaces the oldest of HISTORY_SAMPLES. Any thread may call this and history_write(). */
void history_add(history *h, const history_sample *sample);

/* Writes a JSON object with an array per figure, oldest first; values that were not measured
 * are null. */
void history_write(history *h, api_text *out);

#endif
