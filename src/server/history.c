/* history.c - a ring of samples behind a lock, written as JSON. */
#include "server/history.h"

#include <pthread.h>
#include <stdlib.h>

struct history {
    pthread_mutex_t lock; /* guards the fields below */
    history_sample samples[HISTORY_SAMPLES];
    int64_t n; /* samples added in total */
};

history *history_new(void) {
    history *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    if (pthread_mutex_init(&h->lock, NULL) != 0) {
        free(h);
        return NULL;
    }
    return h;
}

void history_free(history *h) {
    if (!h) return;
    pthread_mutex_destroy(&h->lock);
    free(h);
}

void history_add(history *h, const history_sample *sample) {
    pthread_mutex_lock(&h->lock);
    h->samples[h->n++ % HISTORY_SAMPLES] = *sample;
    pthread_mutex_unlock(&h->lock);
}

/* ---- columns ---- */

typedef struct column {
    const char *name;
    enum { COUNT, RATE, P50, P95 } kind;
    size_t at; /* offset of an int64_t, a double or a metrics_spread */
} column;

static const column columns[] = {
    {"t",               COUNT, offsetof(history_sample, t_ms)           },
    {"tokens_s",        RATE,  offsetof(history_sample, tokens_s)       },
    {"prompt_tokens_s", RATE,  offsetof(history_sample, prompt_tokens_s)},
    {"ttft_p50_ms",     P50,   offsetof(history_sample, ttft)           },
    {"ttft_p95_ms",     P95,   offsetof(history_sample, ttft)           },
    {"itl_p50_ms",      P50,   offsetof(history_sample, itl)            },
    {"itl_p95_ms",      P95,   offsetof(history_sample, itl)            },
    {"prompt_tokens",   COUNT, offsetof(history_sample, prompt_tokens)  },
    {"cached_tokens",   COUNT, offsetof(history_sample, cached_tokens)  },
    {"running",         COUNT, offsetof(history_sample, running)        },
    {"waiting",         COUNT, offsetof(history_sample, waiting)        },
};

static void write_value(api_text *out, const column *c, const history_sample *s) {
    const void *field = (const char *)s + c->at;
    const metrics_spread *spread = field;
    switch (c->kind) {
    case COUNT:
        api_put_int(out, *(const int64_t *)field);
        return;
    case RATE:
        api_put_real(out, *(const double *)field);
        return;
    case P50:
    case P95:
        if (!spread->n) {
            api_puts(out, "null");
        } else {
            api_put_real(out, c->kind == P50 ? spread->p50_ms : spread->p95_ms);
        }
    }
}

void history_write(history *h, api_text *out) {
    pthread_mutex_lock(&h->lock);
    const int64_t n = h->n < HISTORY_SAMPLES ? h->n : HISTORY_SAMPLES;
    for (size_t c = 0; c < HD_LEN(columns); c++) {
        api_write(out, c ? ",%s:[" : "{%s:[", columns[c].name);
        for (int64_t i = 0; i < n; i++) {
            api_comma(out);
            write_value(out, &columns[c], &h->samples[(h->n - n + i) % HISTORY_SAMPLES]);
        }
        api_puts(out, "]");
    }
    api_puts(out, "}");
    pthread_mutex_unlock(&h->lock);
}
