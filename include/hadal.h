/* hadal.h - everything a program needs to know to use the engine.
 *
 * An hd_engine is a loaded model with its KV cache and its device. A request is one prompt
 * travelling through it; its output comes back as events. Submit, cancel, pause and read from
 * any thread; exactly one thread polls. The engine copies what it is given and owns what it
 * returns. The same request with the same seed gives the same text, whatever else runs beside
 * it. Times are nanoseconds of one monotonic clock. */
#ifndef HADAL_H
#define HADAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    HD_MAX_CHOICES = 64,      /* of one request */
    HD_MAX_ALTERNATIVES = 20, /* listed beside one token */
    HD_MOST_DRAFTS = 7,       /* in one step */
    HD_DRAFTS_AUTO = -1       /* as many as were seen to pay */
};

typedef struct hd_engine hd_engine;

/* Zero means the default everywhere. */
typedef struct hd_engine_options {
    size_t size;           /* sizeof(hd_engine_options): the version of this struct */
    const char *model_dir; /* checkpoint directory, never NULL */
    bool dummy_weights;    /* for measuring: model_dir is a config.json or its folder, and the
                              weights are made up in memory. There is no text: prompts are tokens,
                              events have no parts, and messages, stop strings and forms are
                              refused */
    const char
        *backend; /* "auto", the default: a GPU if one can be used and has the memory, else the
                              CPU; "cpu", "cuda", "ref" for the plain reference, or "null":
                              tokens out of thin air, to measure everything but the model */
    const char
        *precision; /* of the cpu and cuda backends: "exact", the default, or "fast", which
                                rounds activations before products, as docs/numerics.md says;
                                a processor that is no faster so computes exactly all the same;
                                of cuda also "official", the rounding of the official programs */
    bool no_batch_invariance; /* of the cuda backend with "fast": products of many rows by
                                cuBLASLt, so that an answer's bits depend on what runs beside
                                it; docs/numerics.md */
    const char
        *mla; /* of V2 and V3 on the cpu backend: "absorbed", the default, or "naive" where
                              a prompt is long, which is faster and not bit for bit the same */
    int32_t threads;     /* of the cpu backend; default: one per core this process may use, and
                              no more than its quota of processor time pays for */
    bool pin_threads;    /* each to a core of its own */
    int32_t max_running; /* answers computed side by side; default 16 */
    int32_t max_context; /* tokens of one answer, prompt and output; default 8192 or what the
                            model knows, if that is less; more than that is refused */
    int64_t kv_tokens;   /* tokens the KV pools hold; default: two full contexts */
    int64_t snapshot_tokens; /* tokens of window snapshots in host memory; default: kv_tokens */
    int32_t chunk_tokens;    /* prompt tokens of one request in one step; default 256 */
    int32_t step_tokens;     /* tokens of one step; default: what all requests may need */
    int32_t queue_limit;     /* answers that wait; default 1024 */
    bool no_drafts;          /* do not run the MTP layer even if there is one */
    bool need_drafts;        /* refuse a model that has none */
    bool no_graphs;          /* queue every operator of every step on its own, also on a GPU */
    bool no_token_history;   /* render earlier answers from their text alone; default: with the
                                tokens they were given with, under the same salt */
    float forced_acceptance; /* for benchmarks: accept this many drafts per step on average,
                                whatever the model says; the text is then worthless */
    int32_t null_step_us;    /* what a step of the null backend takes; default: nothing */
    void (*on_upload)(void *ctx, size_t done, size_t total); /* NULL, or told while weights are
                                copied to a GPU: bytes so far and in all, inside hd_engine_open */
    void *on_upload_ctx;
    const char *manifest; /* a file of SHA-256 digests, as sha256sum writes it, that all files
                                of the model must have; default: none are computed */
} hd_engine_options;

/* 0 on success; negative on failure: then *out is NULL and why holds one sentence. */
int hd_engine_open(hd_engine **out, const hd_engine_options *options, char *why,
                   size_t why_size);

/* Drops what still runs. NULL is fine. */
void hd_engine_close(hd_engine *e);

/* Sentences about what is odd about the model and was no reason to refuse it. Returns how many;
 * *out, and what it points to, is the engine's. */
size_t hd_engine_notices(const hd_engine *e, const char *const **out);

/* What computes: "cpu", "cuda", "ref" or "null". *no_gpu, where no_gpu is not NULL: why "auto" did
 * not take a GPU, a sentence of the engine's; NULL: it did, or another backend was named. */
const char *hd_engine_backend(const hd_engine *e, const char **no_gpu);

typedef struct hd_request_bias {
    int32_t token;
    float value; /* added to its logit; -INFINITY forbids it */
} hd_request_bias;

/* The form an answer must have; docs/grammar.md lists what is understood. */
typedef enum hd_response_format {
    HD_FORMAT_FREE,
    HD_FORMAT_JSON,        /* any JSON object */
    HD_FORMAT_JSON_SCHEMA, /* form_text is the schema */
    HD_FORMAT_REGEX,       /* form_text is the pattern, matched by the whole answer */
    HD_FORMAT_CHOICE       /* one of choices */
} hd_response_format;

struct hd_event;

/* A request. Give either tokens, or text, or messages. Zero means the default everywhere but
 * in temperature, where it means greedy; hd_engine_defaults() fills in what the model's makers
 * advise. */
typedef struct hd_request {
    size_t size;           /* sizeof(hd_request) */
    const int32_t *tokens; /* [n_tokens] prompt as ids */
    size_t n_tokens;
    const char *text; /* prompt as raw text, NUL-terminated; begins as the tokenizer says */
    const char *messages, *tools; /* prompt as OpenAI JSON, rendered by the model's encoding */
    const char *
        tool_choice; /* NULL, "auto": the model decides; "none"; "required"; or a name, and then
                         it is called once. Arguments of a tool with strict: true keep to the
                         schema of its parameters, those of a call that is demanded as far as
                         a grammar can express it. Beside a form the model calls or answers */
    bool one_call;   /* of these no more than one in an answer */
    int thinking;    /* 1 on, -1 off, 0 what the model does by itself */
    int effort;      /* of thinking, where the encoding knows it: 1 low, 2 high, 3 max */

    int32_t answers;       /* to the one prompt, sharing its pages; default 1; seeds count up */
    int32_t max_tokens;    /* of each answer; default: as many as the context leaves */
    int32_t min_tokens;    /* no end of sequence before */
    int32_t max_reasoning; /* tokens of reasoning, then it is ended; default: no bound */
    int32_t priority;      /* higher first */
    int64_t queue_timeout_ns;
    uint64_t salt; /* prefixes are shared among requests of equal salt only */

    float temperature, top_p, min_p;
    int32_t top_k;
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t seed;
    const hd_request_bias *bias; /* [n_bias] */
    size_t n_bias;
    const char *const *stop; /* [n_stop] strings that end the output */
    size_t n_stop;
    const int32_t *stop_tokens; /* [n_stop_tokens] beside the end of sequence */
    size_t n_stop_tokens;
    bool ignore_eos;

    hd_response_format form; /* of the content, after any reasoning */
    const char *format_text;
    const char *const *choices; /* [n_choices] */
    size_t n_choices;

    int32_t draft_tokens; /* 0 to HD_MOST_DRAFTS per step, or HD_DRAFTS_AUTO; a number above 0
                            is refused where nothing drafts */
    int32_t relaxed_top;  /* inside reasoning a draft also stands if it is among this many */
    float relaxed_delta;  /* most probable tokens and at most this less probable than the first;
                              0: strict. Changes the distribution. */

    bool keep_stop;       /* a stop string found is part of the text */
    bool keep_special;    /* special tokens are part of the text */
    bool unparsed;        /* all text is content: reasoning and calls are not taken apart */
    int32_t top_logprobs; /* alternatives listed beside each token, to HD_MAX_ALTERNATIVES */
    bool prompt_logprobs; /* also for prompt tokens from prompt_logprobs_from on (at least 1) */
    int32_t prompt_logprobs_from;

    /* Called by the polling thread instead of hd_engine_poll() returning; NULL: poll returns. */
    void (*on_event)(void *user, const struct hd_event *event);
    void *user;
} hd_request;

/* temperature, top_p, top_k, min_p and repetition_penalty of generation_config.json, or the
 * neutral ones where it is silent. Nothing else is touched. */
void hd_engine_defaults(const hd_engine *e, hd_request *g);

/* The request's id, or 0 on refusal: then why holds one sentence, and *full (may be NULL) says
 * whether the queue was full, so that trying again later makes sense. */
uint64_t hd_engine_submit(hd_engine *e, const hd_request *g, bool *full, char *why,
                          size_t why_size);

/* Its unfinished answers end with HD_END_CANCELLED. An unknown id is fine. */
void hd_engine_cancel(hd_engine *e, uint64_t id);

typedef enum hd_end {
    HD_END_NOT,    /* more events follow for this answer */
    HD_END_STOP,   /* end of sequence, a stop token or a stop string */
    HD_END_LENGTH, /* max_tokens */
    HD_END_CANCELLED,
    HD_END_TIMEOUT, /* waited too long in the queue */
    HD_END_FAILED   /* the device or this request's computation failed */
} hd_end;

typedef enum hd_delta_kind {
    HD_DELTA_REASONING, /* text */
    HD_DELTA_CONTENT,   /* text */
    HD_DELTA_CALL,      /* a tool call begins; text: its name */
    HD_DELTA_ARGUMENTS, /* text: a piece of its JSON object */
    HD_DELTA_CALL_END,  /* whole: the arguments are one JSON object */
    HD_DELTA_NOTE       /* text: what was not as the format has it */
} hd_delta_kind;

typedef struct hd_delta {
    hd_delta_kind kind;
    int32_t call; /* 0, 1, ... within the answer */
    bool whole;
    const char *text; /* [n] UTF-8, whole characters, not NUL-terminated */
    size_t n;
} hd_delta;

typedef struct hd_alternative {
    int32_t token; /* -1: there are no more */
    float logprob;
} hd_alternative;

/* What one step gave one answer. Text is held back where a stop string may begin. */
typedef struct hd_event {
    uint64_t id;
    void *user;
    int32_t answer;        /* 0, 1, ... of the request */
    const hd_delta *parts; /* [n_parts] */
    size_t n_parts;
    const int32_t *tokens;     /* [n_tokens] the ids, end token included */
    const float *logprobs;     /* [n_tokens] */
    const hd_alternative *top; /* [n_tokens, n_top] the most probable first */
    size_t n_tokens, n_top;

    /* With the first event of answer 0, if asked for: prompt tokens from prompt_from on. */
    const int32_t *prompt;            /* [n_prompt] */
    const float *prompt_logprobs;     /* [n_prompt] */
    const hd_alternative *prompt_top; /* [n_prompt, n_top] */
    size_t n_prompt;
    int32_t prompt_from;

    hd_end end;            /* anything but HD_END_NOT: the answer's last event */
    bool last;             /* the request's last event */
    int32_t stop_token;    /* END_STOP by this id, else -1 */
    const char *stop_text; /* END_STOP by this string, else NULL */
    const char *why;       /* END_FAILED: one sentence, else NULL */

    int32_t prompt_tokens, cached_tokens, output_tokens, reasoning_tokens; /* so far */
    /* Drafts of this answer so far, and those of them that are among its output_tokens; what lies
     * behind the answer's end is not accepted. The arrays: by place in the step. */
    int32_t drafted, accepted;
    int32_t drafted_at[HD_MOST_DRAFTS], accepted_at[HD_MOST_DRAFTS];
    int32_t retracted;                 /* times it lost its place for others */
    int64_t submitted_ns, admitted_ns; /* admitted: 0 while it waits */
} hd_event;

/* The next event, valid until the next call. False: none within timeout_ns (0 never waits,
 * negative waits for ever), or the engine is idle and nothing is pending. */
bool hd_engine_poll(hd_engine *e, hd_event *out, int64_t timeout_ns);

/* Makes a waiting poll return false soon. From any thread, also from a signal's follower. */
void hd_engine_wake(hd_engine *e);

/* ---- control ---- */

void hd_engine_drain(hd_engine *e); /* from now on submissions are refused; the rest finishes */

typedef enum hd_pause {
    HD_PAUSE_ABORT,   /* what runs and waits is cancelled */
    HD_PAUSE_RETRACT, /* what runs goes back to the queue */
    HD_PAUSE_IN_PLACE /* what runs keeps its place */
} hd_pause;

void hd_engine_pause(hd_engine *e, hd_pause how); /* no step until resumed; returns at once */
void hd_engine_resume(hd_engine *e);
void hd_engine_flush(hd_engine *e); /* forgets every cached prefix that is not in use */

/* ---- reading ---- */

enum { HD_PAGES_FULL, HD_PAGES_WINDOW, HD_N_PAGE_GROUPS }; /* of pages, by lifetime */

enum { HD_GAPS = 64 };

typedef struct hd_engine_stats {
    int32_t waiting, running, max_running; /* when the last step ended */
    int32_t living; /* answers submitted whose end was not polled, also while a step is stuck */
    bool paused;    /* and no step runs any more */
    bool draining;
    int64_t steps, rows, finished, retracted;
    int64_t drafted_at[HD_MOST_DRAFTS], accepted_at[HD_MOST_DRAFTS];
    int64_t prompt_tokens, cached_tokens, output_tokens;
    int32_t pages[HD_N_PAGE_GROUPS], pages_free[HD_N_PAGE_GROUPS],
        pages_cached[HD_N_PAGE_GROUPS];
    int32_t page_tokens, snapshots, snapshots_free;
    int64_t step_ns;     /* in steps altogether; of it */
    int64_t host_ns;     /* not waiting for the device */
    int64_t graph_steps; /* steps of decoding alone that a GPU took as one graph each */
    int64_t graph_ns;    /* what it computed in them */
    int64_t gap_ns;      /* what it rested between one and the next that was queued meanwhile */
    int64_t gaps[HD_GAPS];     /* such rests, by half microseconds; the last: or longer */
    int64_t graphs, record_ns; /* recorded graphs, and the host's time for it: not in host_ns */
    int64_t last_step_ns;      /* when a step last ended */
    size_t weight_bytes, kv_bytes, activation_bytes;
    int32_t max_context;
    int64_t audits;         /* after a second without work: is every page and slot back? */
    int64_t audits_failed;  /* they were not; all were taken back, cached prefixes forgotten */
    char audit_missed[128]; /* what was missing at the last of these */
} hd_engine_stats;

void hd_engine_read_stats(hd_engine *e, hd_engine_stats *out);

typedef enum hd_phase { HD_PHASE_WAITING, HD_PHASE_PREFILL, HD_PHASE_DECODE } hd_phase;

typedef struct hd_request_status {
    uint64_t id;
    int32_t answer;
    hd_phase phase;
    int32_t prompt_tokens, cached_tokens, done_tokens, output_tokens;
} hd_request_status;

/* What runs and waits, the most important first; how many of out[max] were written. */
size_t hd_engine_read_requests(hd_engine *e, hd_request_status *out, size_t max);

/* Rows each routed expert has computed: load[layer * n_experts + expert], as of at most a second
 * and a step ago. Returns layers * experts, 0 without experts; nothing is written when max is
 * less. Never waits for a step. */
size_t hd_engine_read_experts(hd_engine *e, int64_t *load, size_t max, int32_t *n_experts);

#ifdef __cplusplus
}
#endif

#endif
