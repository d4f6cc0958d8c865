/* history.h - the last minute of figures, so that a chart begins before its reader came. */
#ifndef HD_SERVER_HISTORY_H
#define HD_SERVER_HISTORY_H

#include "api/text.h"
#include "server/metrics.h"

enum { HISTORY_SAMPLES = 240 }; /* four a second: a minute */

typedef struct history_sample {
    int64_t t_ms;                         /* monotonic, as "t" of /engine/live */
    double tokens_s, prompt_tokens_s;     /* since the sample before */
    metrics_spread ttft, itl;             /* of the minute before */
    int64_t prompt_tokens, cached_tokens; /* since the start */
    int64_t running, waiting;
} history_sample;

typedef struct history history;

history *history_new(void);    /* NULL: no memory */
void history_free(history *h); /* NULL is fine */

/* Replaces the oldest of HISTORY_SAMPLES. From any thread, as the next. */
void history_add(history *h, const history_sample *sample);

/* A JSON object with an array per figure, the oldest first; what was not measured is null. */
void history_write(history *h, api_text *out);

#endif
