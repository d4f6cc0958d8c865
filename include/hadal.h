/* hadal.h - everything a program needs to know to use the engine.
 *
 * An hd_engine is a loaded model with its KV cache and its device. A request is one prompt
 * travelling through it; its output comes back as events. Submit and cancel from any thread;
 * exactly one thread polls. The engine copies what it is given and owns what it returns. The
 * same request with the same seed gives the same text, whatever else runs beside it. */
#ifndef HADAL_H
#define HADAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hd_engine hd_engine;

/* Zero means the default everywhere. */
typedef struct hd_engine_options {
    size_t size;           /* sizeof(hd_engine_options): the version of this struct */
    const char *model_dir; /* checkpoint directory, never NULL */
    const char *backend;   /* "cpu", "cuda", or "ref" for the plain reference */
    int32_t threads;       /* of the cpu backend; default: one per processor */
    int32_t max_running;   /* requests computed side by side; default 16 */
    int32_t max_context;   /* tokens of one request, prompt and output; default 8192 or less */
    int64_t kv_tokens;     /* tokens the KV pools hold; default: two full contexts */
    int64_t snapshot_tokens; /* tokens of window snapshots in host memory; default: kv_tokens */
    int32_t chunk_tokens;    /* prompt tokens of one request in one step; default 256 */
    int32_t step_tokens;     /* tokens of one step; default: what all requests may need */
    int32_t queue_limit;     /* requests that wait; default 1024 */
    bool no_drafts;          /* do not run the MTP layer even if there is one */
} hd_engine_options;

/* 0 on success; negative on failure: then *out is NULL and why holds one sentence. */
int hd_engine_open(hd_engine **out, const hd_engine_options *options, char *why,
                   size_t why_size);

/* Drops what still runs. NULL is fine. */
void hd_engine_close(hd_engine *e);

typedef struct hd_engine_bias {
    int32_t token;
    float value; /* added to its logit; -INFINITY forbids it */
} hd_engine_bias;

/* A request. Give either tokens, or text, or messages. Zero means the default everywhere but
 * in temperature, where it means greedy. */
typedef struct hd_generation {
    size_t size;           /* sizeof(hd_generation) */
    const int32_t *tokens; /* [n_tokens] prompt as ids */
    size_t n_tokens;
    const char *text; /* prompt as raw text, NUL-terminated; begins as the tokenizer says */
    const char *messages, *tools; /* prompt as OpenAI JSON, rendered by the model's encoding */
    int thinking;                 /* 1 on, -1 off, 0 what the model does by itself */

    int32_t max_tokens;   /* default: as many as the context leaves */
    int32_t min_tokens;   /* no end of sequence before */
    int32_t priority;     /* higher first */
    int32_t draft_tokens; /* 0 to 7 drafts per step, with an MTP layer */
    int64_t queue_timeout_ns;
    uint64_t salt; /* prefixes are shared among requests of equal salt only */

    float temperature, top_p, min_p;
    int32_t top_k;
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t seed;
    const hd_engine_bias *bias; /* [n_bias] */
    size_t n_bias;
    const char *const *stop; /* [n_stop] strings that end the output and are not part of it */
    size_t n_stop;
    const int32_t *stop_tokens; /* [n_stop_tokens] beside the end of sequence */
    size_t n_stop_tokens;
    bool ignore_eos;
} hd_generation;

/* The request's id, or 0 on refusal: then why holds one sentence, and *full (may be NULL) says
 * whether the queue was full, so that trying again later makes sense. */
uint64_t hd_engine_submit(hd_engine *e, const hd_generation *g, bool *full, char *why,
                          size_t why_size);

/* The request ends with HD_END_CANCELLED unless it has ended. An unknown id is fine. */
void hd_engine_cancel(hd_engine *e, uint64_t id);

typedef enum hd_end {
    HD_END_NOT,    /* more events follow */
    HD_END_STOP,   /* end of sequence, a stop token or a stop string */
    HD_END_LENGTH, /* max_tokens */
    HD_END_CANCELLED,
    HD_END_TIMEOUT, /* waited too long in the queue */
    HD_END_FAILED   /* the device or this request's computation failed */
} hd_end;

typedef struct hd_event {
    uint64_t id;
    const char *text; /* [n_text] UTF-8, whole characters; held back where a stop may begin */
    size_t n_text;
    const int32_t *tokens; /* [n_tokens] the ids this step gave, end token included */
    const float *logprobs; /* [n_tokens] */
    size_t n_tokens;
    hd_end end; /* anything but HD_END_NOT: nothing follows for this id */
    int32_t prompt_tokens, cached_tokens, output_tokens; /* so far */
    int32_t drafted, accepted;                           /* drafts of this request so far */
} hd_event;

/* The next event, valid until the next call. False: none within timeout_ns (0 never waits,
 * negative waits for ever), or the engine is idle and nothing is pending. */
bool hd_engine_poll(hd_engine *e, hd_event *out, int64_t timeout_ns);

typedef struct hd_engine_stats {
    int32_t waiting, running;
    int64_t steps, rows, finished, retracted, drafted, accepted;
    int64_t prompt_tokens, cached_tokens;
    int32_t kv_pages, kv_pages_free, kv_pages_cached;
    size_t activation_bytes; /* activations and sampling state, without the KV pools */
} hd_engine_stats;

void hd_engine_read_stats(hd_engine *e, hd_engine_stats *out);

#ifdef __cplusplus
}
#endif

#endif
