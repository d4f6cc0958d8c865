/* job.h - the life of a reply: prompts are submitted, events are collected, and a format
 * writes them as one JSON reply or as an SSE stream. A job is created on an HTTP thread;
 * afterwards the polling thread owns it, except that any thread may cancel it. It ends when
 * the last of its prompts has ended, also if the client has left. */
#ifndef HD_API_JOB_H
#define HD_API_JOB_H

#include <pthread.h>
#include <stdatomic.h>

#include "api/request.h"
#include "api/text.h"

typedef struct api_job api_job;

/* A run of deltas of one kind; neighbors of the same kind are merged. */
typedef struct api_piece {
    hd_delta_kind kind; /* never a note */
    int32_t call;
    bool whole;      /* of the end of a call: its arguments are complete JSON */
    size_t start, n; /* bytes of the choice's text */
} api_piece;

typedef struct api_choice {
    int32_t index, prompt; /* index of the choice; index of its prompt */

    /* Text and ids since the last chunk, or all of them without streaming. */
    api_text text, ids;      /* ids: JSON items */
    api_text logprobs, tops; /* in the format's own representation */
    api_piece *pieces;
    size_t n_pieces, cap_pieces;
    int32_t n_pending; /* tokens */

    int32_t n_calls; /* complete calls */
    bool in_reasoning;
    bool opened; /* for the format: its first chunk is written */
    /* private to the format, like the next */
    api_text prompt_logprobs, call_name, kept, item, masks, mask_logprobs;
    int32_t place;
    int32_t n_blocks, open_block; /* see api_walk_blocks() */

    /* In bytes of text, and one per beginning and end of a call, or in tokens if chunks repeat all:
     * to be left out, since another server wrote it; collected; written, here or there. */
    int64_t skip, collected, written;
    bool finish_written;

    hd_finish_reason finish_reason;
    bool admitted; /* it has run */
    int32_t stop_token;
    api_text stop_text;
    int32_t prompt_tokens, cached_tokens, output_tokens, reasoning_tokens, retracted;
    int32_t drafted, accepted, draft_steps;
    /* Weights that computed the output: the last ones, from which token on, and those before,
     * as api_version_span back to back. */
    const char *weight_version;
    int32_t version_start;
    api_text earlier_versions;
    int64_t last_ns;
} api_choice;

/* Tokens [start, end) of an output, all computed by weights of one version. */
typedef struct api_version_span {
    const char *version; /* the engine keeps it */
    int32_t start, end;
} api_version_span;

typedef struct api_format {
    const char *endpoint, *id_prefix, *object, *chunk_object;
    http_shape shape;
    void (*logprob)(api_job *job, api_choice *c, const hd_step_tokens *step, int32_t i);
    void (*prompt_logprobs)(api_job *job, api_choice *c, const hd_prompt_logprobs *p);
    /* may be NULL */
    void (*replay)(api_job *job, api_choice *c, hd_replay kind, const hd_replay_rows *rows);
    void (*begin)(api_job *job); /* begins a stream; may be NULL */
    /* writes how much of the prompt is computed; NULL: clients cannot ask */
    void (*progress)(api_job *job, const api_choice *c, const hd_event *e);
    void (*chunk)(api_job *job, api_choice *c); /* writes what has arrived to job->out */
    void (*finish)(api_job *job, api_choice *c);
    void (*end)(api_job *job);
    void (*fail)(api_job *job); /* writes an error inside a stream */
    void (*reply)(api_job *job);
    void (*accept)(api_job *job); /* a background job was accepted: it can be retrieved now */
    void (*deinit)(void *state);  /* may be NULL */
    bool cumulative;              /* a chunk repeats all earlier text */
} api_format;

typedef struct api_sub { /* one prompt, one request of the engine */
    api_job *job;
    atomic_uint_least64_t id;
    int32_t first_choice;
    int32_t prompt_tokens;
} api_sub;

struct api_job {
    const api_format *format;
    http_call *call;
    api_context *ctx;
    api_wishes w;
    api_text head; /* the constant beginning of a chunk */
    api_text out;
    api_text prompt_ids; /* JSON items, if requested */
    void *state;         /* private to the format */
    char id[API_MAX_ID + 24];
    const char *model;
    int64_t created;      /* Unix seconds */
    uint64_t nonce, seed; /* seed: of the first prompt */
    int32_t sequence;     /* number of the next event, where formats count them */
    bool tells, resumed; /* comments say how far the stream has come; another server began it */

    api_sub *subs;
    api_choice *choices;
    int32_t n_subs, n_choices;

    atomic_int refs; /* one for the submitting thread and one per living sub */
    atomic_bool gone, cancelled;
    bool began;
    bool accepted; /* runs in the background, and its client has been answered */
    api_refusal failure;
    /* guards failure: the submitting and the polling thread may both set one */
    pthread_mutex_t failing;
    api_outcome outcome;
};

/* Submits the prompts and writes the reply. The caller may close the request afterwards; if
 * it is refused, the refusal has been sent. prompt_ids and state are moved in; either may be
 * NULL. format->deinit receives state, also on a refusal. */
void api_job_start(api_request *r, const api_format *format, const api_prompt *prompts,
                   int32_t n, api_text *prompt_ids, void *state);

/* Any thread may call it while the job lives. */
void api_job_cancel(api_job *job);

/* ---- for formats ---- */

const char *api_finish_reason(const api_choice *c); /* in OpenAI's words */
void api_call_id(const api_job *job, const api_choice *c, int32_t call, const char *prefix,
                 char out[40]);
const char *api_piece_text(const api_choice *c, const api_piece *p);
/* Appends all text of one kind, joined. */
void api_put_joined(api_text *out, const api_choice *c, hd_delta_kind kind, int32_t call);
void api_put_usage(api_text *out, const api_job *job); /* OpenAI's usage object */
void api_put_matched_stop(api_text *out, const api_choice *c);
const char *api_last_version(const api_choice *c);              /* of the weights */
void api_put_version_spans(api_text *out, const api_choice *c); /* ,"weight_versions":[...] */
/* ,"metadata":{...}: the last version, where SGLang has it in OpenAI's replies. */
void api_put_metadata(api_text *out, const api_choice *c);
/* the token's text */
void api_put_token(api_text *out, const api_context *ctx, int32_t token);
void api_put_list(api_text *out, const char *key, const api_text *items); /* ,"key":[items] */

typedef struct api_totals {
    int64_t prompt, cached, output, reasoning, drafted, accepted, draft_steps;
} api_totals;
api_totals api_job_totals(const api_job *job);

bool api_render_ids(api_request *r, hd_ids *ids); /* token ids of the conversation */
void api_put_ids(api_text *out, const int32_t *ids, size_t n);
/* ,"prompt_progress":{...}, as in llama.cpp's server. */
void api_put_progress(api_text *out, const hd_event *e);
void api_chat_logprob(api_job *job, api_choice *c, const hd_step_tokens *step, int32_t i);
void api_openai_end(api_job *job);
void api_openai_fail(api_job *job);

/* For APIs that list content blocks: reasoning, text and calls in order. Neighboring pieces
 * of one kind form one block; a call is one block from its name to its end. */
typedef struct api_block_writer {
    /* of a call: p is its name */
    void (*open)(api_job *job, api_choice *c, const api_piece *p);
    void (*delta)(api_job *job, api_choice *c, const api_piece *p);
    void (*close)(api_job *job, api_choice *c, hd_delta_kind kind, bool whole);
} api_block_writer;

void api_walk_blocks(api_job *job, api_choice *c, const api_block_writer *w);
void api_close_block(api_job *job, api_choice *c, const api_block_writer *w);

/* Frames a server-sent event (SSE) around what is written between the two calls. */
void api_data_begin(api_job *job, const char *event); /* event: its name, or NULL */
void api_data_end(api_job *job);

#endif
